"""Tasks: what labels mean, how many outputs a network has for them, and which scores count.

The table needs no torch. `clients.core.evaluation` has losses, predictions and scores."""

from collections.abc import Iterable
from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True)
class Score:
    """A number that says how good predictions are. `text` is its name for people, `short` that in
    a column's head. One `in_percent` lies in [0, 1] and is printed times 100, one `in_units` has
    the labels' unit, and one of `any_size` is printed with four significant digits."""

    name: str
    text: str
    higher_is_better: bool = True
    in_percent: bool = False
    short: str = ""
    in_units: bool = False
    any_size: bool = False

    def goodness(self, value: float) -> float:
        """The value as a number that is larger for better models."""
        return value if self.higher_is_better else -value

    def shown(self, value: float) -> float:
        """The value as tables and figures print it: a share in %."""
        return 100 * value if self.in_percent else value


SCORES = {
    score.name: score
    for score in (
        Score("accuracy", "accuracy", in_percent=True),
        Score("macro-f1", "macro F1"),
        Score("micro-f1", "micro F1"),
        Score("rmse", "root mean square error", False, short="RMSE", in_units=True, any_size=True),
        Score("mae", "mean absolute error", False, short="MAE", in_units=True, any_size=True),
        Score("r2", "R²"),
        Score("loss", "loss", higher_is_better=False, any_size=True),
    )
}


@dataclass(frozen=True)
class Task:
    """What the labels of a dataset mean. The first of `scores` chooses the reported round; `loss`
    names the training loss for people."""

    name: str
    summary: str
    scores: tuple[str, ...]
    loss: str

    @property
    def main(self) -> Score:
        """The score that tables show and that chooses the reported round."""
        return SCORES[self.scores[0]]


CLASSES, BINARY, LABELS, VALUES = "classes", "binary", "labels", "values"
TASKS = {
    task.name: task
    for task in (
        Task(
            CLASSES,
            "one class of several for each sample; an output for each class",
            ("accuracy", "macro-f1"),
            "cross entropy",
        ),
        Task(
            BINARY,
            "one of two classes for each sample; one output, positive for the second class",
            ("accuracy", "macro-f1"),
            "binary cross entropy",
        ),
        Task(
            LABELS,
            "any number of labels at once; an output for each label, positive where it holds",
            ("accuracy", "micro-f1", "macro-f1"),
            "mean binary cross entropy over the labels",
        ),
        Task(
            VALUES,
            "one or several numbers for each sample (regression); an output for each",
            ("rmse", "mae", "r2"),
            "mean square error",
        ),
    )
}

ALL_TASKS = tuple(TASKS)
MAIN_SCORES = frozenset(task.main.name for task in TASKS.values())  # one for each task
# The tasks with one class for each sample: their outputs give a probability for each class.
CLASS_PROBABILITIES = (CLASSES, BINARY)


@dataclass(frozen=True)
class ForTasks:
    """What a setting needs: any other value than `neutral` serves `tasks` alone."""

    tasks: tuple[str, ...]
    neutral: str | float | bool


@dataclass(frozen=True)
class Targets:
    """How a client's stored labels are read.

    Labels of `classes` and `binary` are whole numbers (n,), −1 without one. Those of `labels` and
    `values` are floats (n, k), NaN without one; values are stored as (value − `mean`) / `std`, with
    a number for each output."""

    task: str = CLASSES
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def check_task(name: str) -> str:
    """The name. Raises ValueError with the choices for an unknown one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r:.200}; known: {', '.join(TASKS)}")
    return name


def score_named(name: str) -> Score:
    """The score under this name, by default a user's own. A minus sign before the name of an own
    score says that lower is better."""
    if name in SCORES:
        return SCORES[name]
    higher_is_better = not name.startswith("-")
    return Score(name, name.removeprefix("-"), higher_is_better, any_size=True)


def own_score_name(reference: str) -> str:
    """The name of the score that ``module:NAME`` refers to, with hyphens for underscores."""
    return reference.rpartition(":")[2].strip("_").replace("_", "-")


def not_served(name: str, tasks: Iterable[str], task: str) -> str:
    """What the method or setting `name` serves, and what to write instead of the task, if any."""
    served = ", ".join(tasks)
    advice = ""
    if task == BINARY and CLASSES in served.split(", "):
        advice = f"; set task={CLASSES}, which has an output for each of the two classes"
    return f"{name} serves {served}, not task={task}{advice}"


def goodness(name: str, value: float) -> float:
    """The value of the score `name` as a number that is larger for better models."""
    return score_named(name).goodness(value)


def reported_name(selected: str, reported: Iterable[str]) -> str:
    """The name under which clients report the score that `selection-metric` names, one of those
    that are `reported`: "auto" is the task's main score, and an own score has a minus sign if
    lower is better. A name that nobody reports stays as it is."""
    names = set(reported)
    if selected == AUTO:
        return main_score(names).name
    if selected not in names and f"-{selected}" in names:
        return f"-{selected}"
    return selected


def main_score(names: Iterable[str]) -> Score:
    """The score that tables show of a client that reports these numbers."""
    present = set(names)
    for task in TASKS.values():
        if task.main.name in present:
            return task.main
    return SCORES["accuracy"]
