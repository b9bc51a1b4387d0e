"""Tuning on Optuna: settings sought by the training clients' validation accuracy alone.

An experiment's [search] names them, a list of choices or a range for each:

    [search]
    lr = [0.01, 0.1, 0.3]
    "fedtta.adapt-lr" = { low = 0.001, high = 0.1, log = true }

A key without a section is searched for every method, the key of a method's section for that method
alone; every method has the same number of trials. While tuning, novel clients are not evaluated."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedapps.engines.jobs import Job, make_jobs
from fedapps.files import write_text
from fedapps.results.sweep import keep_finished
from fedapps.settings.config import Config, Value, override, variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

STORAGE = "study.db"
BLIND: Config = {"evaluate-novel": False, "novel-rounds": 0, "bound": False}
RANGE = {"low", "high", "log"}

Run = Callable[[list[Job]], None]  # runs jobs, each to its folder


@dataclass(frozen=True)
class Search:
    """What is sought: by key a list of choices, or a range {low, high} or {low, high, log}."""

    space: Mapping[str, Any]

    @classmethod
    def read(cls, table: Mapping[str, Any], config: Mapping[str, Value]) -> "Search":
        """A [search] table over `config`. Raises ValueError for unknown keys and bad values."""
        space = dict(_leaves(table))
        if not space:
            raise ValueError("the experiment has no [search] table: nothing to tune")
        for key, told in space.items():
            values = told if isinstance(told, list) else [told.get("low"), told.get("high")]
            whole = isinstance(told, list) or (
                told.keys() <= RANGE and told.keys() >= RANGE - {"log"}
            )
            if not whole or not values:
                raise ValueError(f"search of {key} is {told!r}; a list or {{low, high, log}}")
            for value in values:
                override(config, {key: value})
            if not isinstance(told, list) and not told["low"] < told["high"]:
                raise ValueError(f"search of {key}: low {told['low']} is not below {told['high']}")
            if not isinstance(told, list) and told.get("log") and told["low"] <= 0:
                raise ValueError(f"search of {key}: a logarithmic range begins above 0")
        return cls(space)

    def label(self, trial: "Trial", method: str) -> str:
        """The method with what the trial suggests: ``"fedtta lr=0.1 adapt-lr=0.0123"``."""
        name = method.split(maxsplit=1)[0]
        words = []
        value: Any
        for key, told in self.space.items():
            section = key.rpartition(".")[0]
            if section not in ("", "partition", name):
                continue
            if isinstance(told, list):
                value = trial.suggest_categorical(key, told)
            elif isinstance(told["low"], int) and isinstance(told["high"], int):
                value = trial.suggest_int(
                    key, told["low"], told["high"], log=told.get("log", False)
                )
            else:
                low, high = float(told["low"]), float(told["high"])
                value = float(
                    f"{trial.suggest_float(key, low, high, log=told.get('log', False)):.3g}"
                )
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{key.removeprefix(f'{name}.')}={text}")
        return " ".join([method, *words])


@dataclass(frozen=True)
class Outcome:
    """One trial: its number from 1, what was tried, and the validation accuracy; None: failed."""

    method: str
    number: int
    label: str
    validation: float | None


@dataclass
class Tuning:
    """Trials of `search` over `config`, each the mean over `seeds`, `parallel` at once, blind to
    novel clients; all that is known of them lies in `output`. `run` carries jobs out."""

    config: Config
    seeds: Sequence[int]
    search: Search
    output: Path
    parallel: int
    run: Run

    def __post_init__(self) -> None:
        self.config = override(self.config, BLIND)

    def tune(self, methods: Sequence[str], trials: int) -> list[Outcome]:
        """`trials` trials of every method; goes on where `output` has some.

        Raises ValueError where it has trials of other settings."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.output.mkdir(parents=True, exist_ok=True)
        outcomes: list[Outcome] = []
        for method in methods:
            study = self._study(method)
            while (left := trials - len(_outcomes(study, method))) > 0:
                self._try(study, method, min(self.parallel, left))
            outcomes += _outcomes(study, method)
            write(outcomes, self.config, self.seeds, self.output)
        return outcomes

    def _study(self, method: str) -> "Study":
        import optuna

        space = sorted(map(repr, self.search.space.items()))
        told = repr((sorted(self.config.items()), space, list(self.seeds)))
        study = optuna.create_study(
            storage=f"sqlite:///{(self.output / STORAGE).resolve()}",
            study_name=method,
            direction="maximize",
            load_if_exists=True,
        )
        if study.user_attrs.setdefault("settings", told) != told:
            raise ValueError(
                f"{self.output} holds trials of {method} under other settings; choose another "
                "--output"
            )
        study.set_user_attr("settings", told)
        return study

    def _try(self, study: "Study", method: str, count: int) -> None:
        """`count` trials at once; first, without new ones, those that a stop left under way."""
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        begun = [t for t in study.trials if t.state == TrialState.RUNNING]
        labels = {t.number: t.user_attrs["label"] for t in begun if "label" in t.user_attrs}
        labels = dict(list(labels.items())[:count])
        if not labels:
            # A draw of its own for each batch, and the same one where the study was stopped.
            study.sampler = TPESampler(seed=int(self.config["seed"]) + len(_ended(study)))
            batch = [study.ask() for _ in range(count)]
            labels = {trial.number: self.search.label(trial, method) for trial in batch}
            for trial in batch:
                trial.set_user_attr("label", labels[trial.number])
        distinct = list(dict.fromkeys(labels.values()))
        jobs = make_jobs(self.config, distinct, self.seeds, self.output / "trials")
        keep_finished(jobs)
        self.run(jobs)
        for number, label in labels.items():
            values = [_validation(job) for job in jobs if job.method == label]
            if any(value is None for value in values):
                study.tell(number, state=TrialState.FAIL)
            else:
                study.tell(number, float(np.mean([v for v in values if v is not None])))


def _validation(job: Job) -> float | None:
    """Validation accuracy of the training clients at the reported round; None if it failed.

    Raises ValueError if no training client has validation samples."""
    summary = job.summary()
    if job.error or not summary.get("finished"):
        return None
    accuracy = summary["train"]["accuracy"]
    if accuracy is None:
        raise ValueError(f"{job.name}: no validation samples of training clients to tune by")
    return float(accuracy)


def _ended(study: "Study") -> list["FrozenTrial"]:
    """Trials that ended, be it by a failure of their own."""
    return [trial for trial in study.trials if trial.state.is_finished()]


def _outcomes(study: "Study", method: str) -> list[Outcome]:
    return [
        Outcome(method, number, trial.user_attrs["label"], trial.value)
        for number, trial in enumerate(_ended(study), 1)
    ]


def best(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The best trial of each method, the first of equals; a method all of whose trials failed has
    none."""
    found: dict[str, Outcome] = {}
    for one in outcomes:
        rival = found.get(one.method)
        if one.validation is not None and (
            rival is None or rival.validation is None or one.validation > rival.validation
        ):
            found[one.method] = one
    return found


def write(outcomes: Sequence[Outcome], config: Config, seeds: Sequence[int], output: Path) -> None:
    """best.toml, an experiment of every method at its best, with novel clients; trials.csv; and
    trials.pdf."""
    from fedapps.results.plot import save
    from fedapps.settings.config import defaults

    known = defaults() | BLIND | {"method": config["method"]}
    changed = {k: v for k, v in config.items() if v != known[k] and k != "output-dir"}
    chosen = [one.label for one in best(outcomes).values()]
    for label in chosen:
        variant(config, label)  # what is written can be read
    text = "# The best settings by the training clients' validation accuracy\n"
    content = {"methods": chosen, "seeds": list(seeds), **changed}
    write_text(output / "best.toml", text + tomli_w.dumps(content))
    with (output / "trials.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "trial", "settings", "validation"])
        for one in outcomes:
            settings = one.label.removeprefix(one.method).strip()
            writer.writerow([one.method, one.number, settings, one.validation])
    if any(one.validation is not None for one in outcomes):
        save(drawn(outcomes), output / "trials.pdf")


def drawn(outcomes: Sequence[Outcome]) -> "Figure":
    """Validation accuracy of each trial as a dot, and of the best so far as a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from fedapps.results.plot import line_styles

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for method, style in zip(best(outcomes), line_styles(), strict=False):
        told = [(o.number, 100 * o.validation) for o in outcomes
                if o.method == method and o.validation is not None]  # fmt: skip
        x, y = zip(*told, strict=True)
        axis.plot(x, np.maximum.accumulate(y), label=method, **style | {"marker": ""})
        axis.plot(x, y, style["marker"], color=style["color"], alpha=0.6)
    axis.set(xlabel="trial", ylabel="validation accuracy of training clients, %")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    return figure


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not value.keys() & RANGE:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list | Mapping):
            yield prefix + key, value
        else:
            raise ValueError(f"search of {prefix}{key} is {value!r}; a list or {{low, high, log}}")
