"""Run folders as data frames: a row per run, per client, or per evaluated round.

Whatever cannot be read is left out, and described in one sentence."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedapps.common.tasks import SCORES as OF_TASKS
from fedapps.common.tasks import Score, own_score_name, score_named
from fedapps.results.formats import decimals_of
from fedapps.results.schema import (
    Evaluation,
    Failure,
    Rates,
    Round,
    Settings,
    Summary,
    SummaryFile,
    mismatch,
)
from fedapps.settings.config import defaults, relevant
from fedapps.settings.saved_configurations import (
    CIRCUMSTANCES,
    configuration_file,
    ordered,
    ordered_names,
    where_runs_are,
)
from fedapps.settings.variants import Variant

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedapps.engines.jobs import Job

ROLES = {"train": "training clients", "novel": "novel clients"}
SHORT_ROLES = {"train": "training", "novel": "novel"}
ACCURACY, RMSE = OF_TASKS["accuracy"], OF_TASKS["rmse"]
F1 = Score("f1", "F1")


@dataclass(frozen=True)
class Column:
    """A number that tables and figures show of runs: the `metric` of a group of clients. `title`
    is its name for people."""

    role: str
    metric: str
    title: str
    score: Score

    @property
    def key(self) -> str:
        """``<role>-<metric>``, the name that the server gives the metric's mean over the group."""
        return f"{self.role}-{self.metric}"

    def decimals(self, value: float) -> int:
        """How many decimals tables print of such a value."""
        if self.score.any_size:
            return decimals_of(value)
        return 2 if self.score.in_percent else 3


def _columns(*names: str) -> list[Column]:
    """The columns of both groups' scores of these names beside the main ones."""
    columns = []
    for name in names:
        score = score_named(name)
        for role, title in SHORT_ROLES.items():
            columns.append(Column(role, name, f"{title}, {score.text}", score))
    return columns


# By their keys in tables, figures and [published].
SCORE_COLUMNS = {
    shown.key: shown
    for shown in (
        Column("train", "accuracy", "training clients", ACCURACY),
        Column("novel", "accuracy", "novel clients", ACCURACY),
        Column("train", "test-accuracy", "test samples", ACCURACY),
        Column("train", "f1", "F1", F1),
        Column("train", "f1-users", "F1, users", F1),
        Column("train", "rmse", "training clients, RMSE", RMSE),
        Column("novel", "rmse", "novel clients, RMSE", RMSE),
        Column("train", "test-rmse", "test samples, RMSE", RMSE),
        *_columns("r2", "micro-f1", "macro-f1"),
    )
}
MAIN = ("accuracy", "rmse")  # main scores of tasks
MAIN_KEYS = ("train-accuracy", "novel-accuracy", "train-rmse", "novel-rmse")
# What curves over rounds show: F1 where a run has no accuracy.
CURVES = (*MAIN_KEYS, "train-f1", "novel-f1")
ROUNDS = ("best", "last")
DEPLOYMENT = "deployment"  # the engine of real nodes
BOUND = ("training-error", "half-distance", "bound")  # terms of ODPFL-HN's bound and their sum
NUMBERS = (
    *BOUND,
    "rounds",
    "seconds",
    "simulated",
    "late",
    "late-used",
    "late-dropped",
    "late-age",
    "down",
    "up",
    "dropped",
    "undone",
    "clipped",
    "recounted",
    "epsilon",
    "delta",
)
# Settings in which runs of one row may differ.
UNNAMED = {*CIRCUMSTANCES, "method", "seed", "from-dir", "data-dir", "device", "stacked-clients",
           "callbacks", "scores", "versions"}  # fmt: skip


def read_runs(folder: Path, jobs: Iterable["Job"] = ()) -> tuple["DataFrame", list[str]]:
    """The runs in `folder`, in the order in which their methods were asked for, and a sentence for
    each run that is missing, damaged or of another program. `jobs` stand for their own folders.
    Raises ValueError if no run is left."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that `fedapps run` wrote to")
    jobs_by_folder = {job.folder: job for job in jobs}
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for run in _folders_of_runs(folder):
        try:
            row = _of_job(jobs_by_folder[run]) if run in jobs_by_folder else _read(run)
            rows.append(row)
            problems += [f"{run.name}: {doubt}" for doubt in _doubts(row)]
        except ValueError as error:
            problems.append(f"{run.name}: {error}")
    if not rows:
        nothing = f"{folder} holds no runs of fedapps{where_runs_are(folder)}"
        raise ValueError("; ".join([nothing, *problems]))
    _sort_as_requested(rows, ordered_names(folder))
    runs = _frame(rows)
    return runs, problems + _missing(runs)


def _folders_of_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those in it. Hidden ones are left out."""
    folder = folder.resolve()  # "." has no name
    folders = [folder] if (folder / "config.toml").is_file() else ordered(folder)
    return [run for run in folders if not run.name.startswith(".")]


def _sort_as_requested(rows: list[dict[str, Any]], requested: Sequence[str]) -> None:
    """Sort the runs by seed, and their methods by the first run's place in the `requested` names;
    others come last, by name."""
    first: dict[str, int] = {}
    for row in rows:
        if row["name"] in requested:
            first.setdefault(row["method"], requested.index(row["name"]))

    def place(row: dict[str, Any]) -> tuple[int, str, int]:
        method = row["method"]
        return first.get(method, len(requested)), method, row["seed"]

    rows.sort(key=place)


def failures(runs: "DataFrame") -> list[str]:
    """A sentence for each run that failed."""
    failed = runs[runs.error != ""]
    return [
        f"{name} failed: {error}" for name, error in zip(failed.name, failed.error, strict=True)
    ]


def check_round(round_: str) -> None:
    """Raise ValueError for a name that is not in `ROUNDS`."""
    if round_ not in ROUNDS:
        raise ValueError(f"unknown round {round_!r}; known: {', '.join(ROUNDS)}")


def runs_of(jobs: Iterable["Job"]) -> "DataFrame":
    """The same for jobs that this process has run."""
    return _frame([_of_job(job) for job in jobs])


def _of_job(job: "Job") -> dict[str, Any]:
    file = job.folder / "summary.json"
    result = SummaryFile.validate_json(file.read_bytes()) if file.is_file() else None
    return _row(job.method, job.config | {"seed": job.seed}, job.folder, job.error, result)


def run_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> "DataFrame":
    """The same for one run, from its configuration and its summary."""
    result = SummaryFile.validate_python(summary)
    return _frame([_row(str(config["method"]), config, Path(), "", result)])


def read_rounds(folder: Path) -> list[Round]:
    """The rounds of a run's metrics.jsonl, up to the first damaged line."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    rounds: list[Round] = []
    for line in file.read_text("utf-8", "replace").splitlines():
        try:
            rounds.append(Round.model_validate_json(line))
        except ValueError:
            # A process that was killed may have left half a line.
            break
    return rounds


def rounds_of(runs: "DataFrame", points: int) -> "DataFrame":
    """A row per run and evaluated round, at most `points` rounds of each run: `CURVES`, which are
    accuracies in % by role, RMSE in the labels' unit, and F1 where there is no accuracy, NaN where
    unknown. `time` is in simulated seconds, NaN where the run has none."""
    from pandas import DataFrame

    rows = []
    for run in runs[["folder", "method", "seed"]].itertuples():
        reports = [report for report in read_rounds(run.folder) if report.evaluation]
        step = max(math.ceil(len(reports) / points), 1)
        # Chosen from the last round backwards, so that it is always among them.
        for report in reversed(reports[::-step]):
            row = {"method": run.method, "seed": run.seed, "round": report.round}
            row["time"] = report.simulated_seconds
            for key in CURVES:
                value = report.evaluation.get(key)
                row[key] = None if value is None else column(key).score.shown(value)
            for role in ROLES:
                if row[f"{role}-accuracy"] is not None:
                    row[f"{role}-f1"] = None
            rows.append(row)
    frame = DataFrame(rows, columns=["method", "seed", "round", "time", *CURVES])
    frame[["time", *CURVES]] = frame[["time", *CURVES]].astype(float)
    return frame.dropna(subset=[*CURVES], how="all")


def clients_of(runs: "DataFrame", round_: str = "best") -> "DataFrame":
    """A row per run and evaluated client: the `value` of its main score, accuracies in % and RMSE
    in the labels' unit, under the `score`'s key in `MAIN_KEYS`. `run` is the run's index in
    `runs`."""
    from pandas import DataFrame

    rows = []
    for run in runs[["summary", "method", "seed"]].itertuples():
        evaluation = _evaluation(run.summary, round_)
        if evaluation is None:
            continue
        for name, client in evaluation.per_client.items():
            main = client.main
            value = None if client.score is None else main.shown(client.score)
            key = f"{client.role}-{main.name}"
            scores = (client.role, client.examples, key, value)
            rows.append((run.Index, run.method, run.seed, name, *scores))
    columns = ["run", "method", "seed", "client", "role", "examples", "score", "value"]
    frame = DataFrame(rows, columns=columns)
    return frame.assign(value=frame.value.astype(float))


def decisions_of(runs: "DataFrame", round_: str = "best") -> "DataFrame":
    """A row per run and novel client that chose a correction: the correction as `chosen`, T and t
    as `misfit` and `limit`, the `expected` and the measured `gain` in points, NaN where unknown.
    `run` is the run's index in `runs`."""
    from pandas import DataFrame

    rows = []
    for run in runs.itertuples():
        evaluation = _evaluation(run.summary, round_)
        if evaluation is None:
            continue
        for name, client in evaluation.per_client.items():
            if client.role != "novel" or not client.chosen:
                continue
            metrics = client.metrics
            gain = None
            accuracy = metrics.get("accuracy")
            base_accuracy = metrics.get("base-accuracy")
            if accuracy is not None and base_accuracy is not None:
                gain = 100 * (accuracy - base_accuracy)
            expected = metrics.get("expected-gain")
            points = None if expected is None else 100 * expected
            numbers = (metrics.get("misfit"), metrics.get("misfit-limit"), points, gain)
            rows.append((run.Index, run.method, run.seed, name, client.chosen, *numbers))
    numbers_of = ["misfit", "limit", "expected", "gain"]
    frame = DataFrame(rows, columns=["run", "method", "seed", "client", "chosen", *numbers_of])
    return frame.astype(dict.fromkeys(numbers_of, float))


def column(key: str) -> Column:
    """What the runs' column ``best KEY`` or ``last KEY`` holds: one of `SCORE_COLUMNS`, or another
    score, such as a user's own, whose key is ``train-NAME`` or ``novel-NAME``."""
    if key in SCORE_COLUMNS:
        return SCORE_COLUMNS[key]
    role, _, name = key.partition("-")
    score = F1 if name == F1.name else score_named(name)
    return Column(role, name, f"{SHORT_ROLES[role]}, {score.text}", score)


def score_keys(runs: "DataFrame") -> list[str]:
    """The keys of the scores that the runs' frame has: `SCORE_COLUMNS`, then users' own."""
    first = ROUNDS[0]
    columns = [name for name in runs.columns if name.startswith(f"{first} ")]
    return [name.removeprefix(f"{first} ") for name in columns]


def main_scores(runs: "DataFrame") -> list[str]:
    """The names of the main scores of the runs' tasks, "accuracy" first; if no run was evaluated,
    that one alone."""
    present = set(runs.main)
    return [name for name in MAIN if name in present] or ["accuracy"]


def check_one_main_score(runs: "DataFrame") -> str:
    """The name of the runs' main score. Raises ValueError if they have several."""
    names = main_scores(runs)
    if len(names) > 1:
        parts = []
        for name in names:
            methods = ", ".join(runs.method[runs.main == name].unique())
            parts.append(f"{OF_TASKS[name].text} ({methods})")
        raise ValueError(
            f"the runs have tasks with different main scores, {' and '.join(parts)}: their gains "
            "have no common unit; show the runs of each task by themselves"
        )
    return names[0]


def own_settings(label: str) -> dict[str, str]:
    """The settings in a variant's label, with their words: ``{"lr": "lr=0.1"}``."""
    return {word.partition("=")[0]: word for word in label.split()[1:]}


def label_without(label: str, keys: Iterable[str]) -> str:
    """A variant's label without these settings."""
    words = [word for key, word in own_settings(label).items() if key not in keys]
    return " ".join([label.partition(" ")[0], *words])


def are_on_real_nodes(runs: "DataFrame") -> bool:
    """Whether one of the runs was a deployment's."""
    return any(summary is not None and summary.engine == DEPLOYMENT for summary in runs.summary)


def federation_of(runs: "DataFrame") -> str:
    """Dataset, partition and number of clients; what differs between runs is left out.

    Where nodes may have data of their own, the settings do not say how they are dealt."""
    words = []
    on_real_nodes = are_on_real_nodes(runs)
    for key, unit in (("dataset", ""), ("partition", ""), ("num-clients", " clients")):
        if key == "partition" and on_real_nodes:
            words.append(DEPLOYMENT)
            continue
        values = {str(config[key]) for config in runs.config}
        if len(values) != 1:
            continue
        value = values.pop()
        if Path(value).is_absolute():  # a user's data, which differ by their whole path
            value = Path(value).name
        words.append(f"{value}{unit}")
    return ", ".join(words)


def differing(runs: "DataFrame") -> list[str]:
    """The common settings that labels name because the runs differ in them."""
    keys: dict[str, None] = {}
    for label, variant, config in zip(runs.method, runs.variant, runs.config, strict=True):
        for key in own_settings(label):
            in_variant = key in own_settings(variant)
            of_method = f"{config['method']}.{key}" in config
            if key in config and not in_variant and not of_method:
                keys[key] = None
    return list(keys)


def _tell_apart(rows: list[dict[str, Any]]) -> None:
    """Append the settings in which runs differ to their labels, unless a label names them already.

    Common settings are compared between all runs, a method's between the runs of that method. Only
    settings that a run reads count."""
    read = [relevant(defaults() | row["config"]) for row in rows]
    keys: dict[str, None] = {}
    for settings in read:
        keys |= dict.fromkeys(key for key in settings if key not in UNNAMED)
    for key in keys:
        section, _, name = key.rpartition(".")
        word = key if section == "partition" else name
        unlabeled = []
        for row, settings in zip(rows, read, strict=True):
            if key in settings and word not in own_settings(row["variant"]):
                unlabeled.append((row, str(settings[key])))
        if len({value for _, value in unlabeled}) > 1:
            for row, value in unlabeled:
                # A label's words are parted by blanks, so a value must be one word.
                row["method"] += f" {word}={'_'.join(value.split())}"


def _read(folder: Path) -> dict[str, Any]:
    """The run in `folder`. Raises ValueError if its files are missing or damaged."""
    for name in ("config.toml", "summary.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name}; the run was never evaluated, or this is no run")
    try:
        config = configuration_file(folder)
        Settings.model_validate(config)
        result = SummaryFile.validate_json((folder / "summary.json").read_bytes())
    except ValidationError as error:
        damaged = error.errors()[0]["type"] == "json_invalid"
        what = "damaged" if damaged else "no run of fedapps"
        raise ValueError(f"{what}: {mismatch(error)}") from error
    except (ValueError, RecursionError) as error:  # of TOML and UTF-8
        raise ValueError(f"damaged: {error}") from error
    failure = result.error if isinstance(result, Failure) else ""
    label = str(Variant.of_folder(folder, config["method"]))
    return _row(label, config, folder, failure, result)


def _row(method: str, config: Any, folder: Path, error: str, result: Any) -> dict[str, Any]:
    """A row of the runs' frame; `summary` is None for a run that failed or was not evaluated."""
    summary = result
    if error or isinstance(result, Failure):
        summary = None
    row = {
        "method": method,
        "seed": config["seed"],
        "name": folder.name,
        "folder": folder,
        "variant": method,  # the label as the folder says it
        "config": config,
        "error": error,
        "summary": summary,
        "label": result.name if result is not None else "",
        "main": _main_score(summary),
    }
    own = _own_names(config)
    for round_ in ROUNDS:
        for score, value in _scores(_evaluation(summary, round_), own).items():
            row[f"{round_} {score}"] = value
    if summary is not None:
        row |= _totals(summary)
    return row


def _totals(summary: Summary) -> dict[str, Any]:
    """`NUMBERS` of a run and the terms of its privacy, where they are known."""
    totals: dict[str, Any] = {
        "rounds": summary.rounds,
        "seconds": summary.seconds,
        "simulated": summary.simulated_seconds,
        "late": summary.late,
        "late-used": summary.late_used,
        "late-dropped": summary.late_dropped,
        "late-age": summary.late_age,
        "down": summary.megabytes_per_client_round.down,
        "up": summary.megabytes_per_client_round.up,
        "dropped": summary.dropped_replies,
        "undone": summary.undone_rounds,
        "clipped": summary.clipped_replies,
        "recounted": summary.recounted_replies,
    }
    if summary.privacy is not None:
        totals |= dict(summary.privacy)
    # The bound is one of the saved model: novel clients get that one.
    training_error = at_saved_model(summary).get("train-training-error")
    half_distance = summary.evaluation.get("novel-half-distance")
    if training_error is not None and half_distance is not None:
        totals["training-error"] = training_error
        totals["half-distance"] = half_distance
        totals["bound"] = training_error + half_distance
    return totals


def at_saved_model(summary: Summary) -> Rates:
    """The training clients' scores at the round of the saved model, which novel clients report; {}
    if a summary of an earlier release lacks them."""
    if summary.saved_model_train is not None:
        return summary.saved_model_train
    return {} if other_rounds(summary) else summary.evaluation


def other_rounds(summary: Summary) -> bool:
    """Whether training clients report another round than that of the saved model."""
    return summary.novel_round not in (None, summary.best_round)


def _evaluation(summary: Summary | None, round_: str) -> Evaluation | None:
    if summary is not None and round_ == "last":
        return summary.last
    return summary


def _scores(evaluation: Evaluation | None, own: Sequence[str]) -> dict[str, float | None]:
    """`SCORE_COLUMNS` of an evaluation, and the user's `own`: accuracies in %, F1 in [0, 1], errors
    in the labels' unit; None if unknown."""
    known: Rates = {}
    if evaluation is not None:
        known = evaluation.evaluation
    # Macro F1 is a score of tables where the task has several labels; elsewhere it chooses rounds.
    has_labels = any(key.endswith("-micro-f1") for key in known)
    scores: dict[str, float | None] = {}
    for key, shown in SCORE_COLUMNS.items():
        value = known.get(key)
        if value is None or (shown.metric == "macro-f1" and not has_labels):
            scores[key] = None
        else:
            scores[key] = shown.score.shown(value)
    for name in own:
        for role in ROLES:
            for key in (f"{role}-{name}", f"{role}--{name}"):
                if key in known:
                    scores[key] = known[key]
    return scores


def _own_names(config: Mapping[str, Any]) -> list[str]:
    """The names of the user's own scores in a run's configuration, as summaries have them."""
    references = str(config.get("scores", "")).split(",")
    return [own_score_name(word.strip()) for word in references if word.strip()]


def _main_score(summary: Summary | None) -> str:
    """The name of the main score of a run's task; "" for a run that was not evaluated."""
    if summary is None:
        return ""
    for name in MAIN:
        for evaluation in (summary.evaluation, summary.last.evaluation):
            if any(evaluation.get(f"{role}-{name}") is not None for role in ROLES):
                return name
    return next(name for name in MAIN if f"train-{name}" in summary.evaluation)


def _frame(rows: list[dict[str, Any]]) -> "DataFrame":
    from pandas import DataFrame, concat

    _tell_apart(rows)
    _rename(rows)
    columns = ["method", "variant", "seed", "name", "folder", "config", "error", "summary", "main"]
    keys = dict.fromkeys(SCORE_COLUMNS)
    for row in rows:
        for name in row:
            round_, _, key = name.partition(" ")
            if round_ in ROUNDS and key:
                keys[key] = None
    numbers = []
    for round_ in ROUNDS:
        numbers += [f"{round_} {key}" for key in keys]
    numbers += NUMBERS
    # The floats are one block: to convert each column takes three times as long.
    return concat(
        [
            DataFrame(rows, columns=columns, dtype=object),
            DataFrame(rows, columns=numbers, dtype=float),
            DataFrame(rows, columns=["generator", "terms"], dtype=object),
        ],
        axis=1,
    )


def _rename(rows: list[dict[str, Any]]) -> None:
    """Put the methods' names in tables into the labels, unless several methods share a name."""
    methods_by_label: dict[str, set[str]] = {}
    for row in rows:
        method = row["config"]["method"]
        methods_by_label.setdefault(row["label"] or method, set()).add(method)
    for row in rows:
        label = row["label"]
        if label and len(methods_by_label[label]) == 1:
            _, *settings = row["method"].split()
            row["method"] = " ".join([label, *settings])


def _doubts(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a run that can be shown."""
    summary = row["summary"]
    if summary is None:
        return
    rounds = summary.rounds
    planned = row["config"].get("rounds", rounds)
    # Summaries of earlier releases do not say whether the run has finished.
    unknown = summary.finished is None
    if summary.finished is False or (unknown and rounds < planned):
        yield f"has not finished: {rounds} of {planned} rounds"
    if summary.undone_rounds:
        yield (
            f"{summary.undone_rounds} of {rounds} rounds were undone: NaN or infinity would "
            "have come into the model"
        )
    read = len(read_rounds(row["folder"]))
    if read < rounds:
        yield f"metrics.jsonl is damaged or cut short: {read} of {rounds} rounds"


def _missing(runs: "DataFrame") -> list[str]:
    """A sentence for each method that lacks a seed which other methods have."""
    seeds = set(runs.seed)
    sentences = []
    for method, present in runs.groupby("method", sort=False).seed:
        for seed in sorted(seeds - set(present)):
            sentences.append(f"{method}: no run of seed {seed}")
    return sentences
