"""Tuning on Optuna: settings are chosen by the training clients' validation score alone, of their
own models or of the model that a novel client would get. The score is the one that
`selection-metric` names, by default the task's main one; of errors the least is the best.

An experiment's [search] table holds a list of choices or a range for each setting:

    [search]
    lr = [0.01, 0.1, 0.3]
    "fedtta.adapt-lr" = { low = 0.001, high = 0.1, log = true }

A key without a section is searched for every method, a key of a method's section for that method
alone. Every method has the same number of trials, unless its lists hold fewer points: none is
tried twice. No trial evaluates novel clients."""

import csv
import math
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

import partitions
from clients.core.own_scores import load_scores
from clients.core.privacy import EVERYTHING
from fedapps.common.new_files import replaced
from fedapps.common.settings import present_keys
from fedapps.common.tasks import AUTO, TASKS, goodness, reported_name, score_named
from fedapps.engines.jobs import Job
from fedapps.files import locked, write_text
from fedapps.planning import make_jobs, replace_settings
from fedapps.results.plot import line_styles, save
from fedapps.results.runs import read_rounds
from fedapps.results.schema import with_present_names
from fedapps.results.sweep import keep_finished
from fedapps.settings.config import Config, Value, defaults, override
from fedapps.settings.variants import Variant, combinations, spanning

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

STORAGE = "study.db"
RETRIED = "retry of"  # attribute of a trial: the number of the failed one
BEST, TRIALS, FIGURE = "best.toml", "trials.csv", "trials.pdf"
MAX_EQUAL_FAILURES = 3  # at the beginning of a method's trials; then its search stops
MAX_GRID = 10_000  # points of lists and whole numbers that are tried in random order, each once
DECIDING = ("selection-metric", "average-over")  # settings of the score that compares the trials
NO_NOVEL_CLIENTS: Config = {
    "evaluate-novel": False,
    "novel-rounds": 0,
    "report-generalization-bound": False,
}
RANGE = {"low", "high", "log"}
UNSAVED = ("method", "output-dir", "training-dir")  # settings that best.toml lacks

Search = dict[str, Any]  # by key a list of choices, or a range {low, high} or {low, high, log}


def read_search(
    table: Mapping[str, Any], config: Mapping[str, Value], methods: Sequence[str]
) -> Search:
    """A [search] table with flat keys. Raises ValueError for unknown keys, for those that none of
    the `methods` reads, and for bad values."""
    search = present_keys(dict(_leaves(table)))
    if not search:
        raise ValueError("the experiment has no [search] table: nothing to tune")
    for key, values in search.items():
        if key in DECIDING:
            raise ValueError(
                f"search of {key}: the trials are compared by the score that it sets; set it for "
                "all trials instead"
            )
        if isinstance(values, list):
            tried = values
        elif RANGE - {"log"} <= values.keys() <= RANGE:
            tried = [values["low"], values["high"]]
        else:
            tried = []
        if not tried:
            raise ValueError(f"search of {key} is {values!r}; a list or {{low, high, log}}")
        for value in tried:
            override(config, {key: value})
        try:
            distribution(values)
            combinations(methods, {key: tried})
        except ValueError as error:
            raise ValueError(f"search of {key}: {error}") from error
    return search


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not value.keys() & RANGE:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list | Mapping):
            yield prefix + key, value
        else:
            raise ValueError(f"search of {prefix}{key} is {value!r}; a list or {{low, high, log}}")


def distribution(values: Any) -> "BaseDistribution":
    """Optuna's distribution over choices or a range. Raises ValueError for an empty range."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list):
        return CategoricalDistribution(values)
    low = values["low"]
    high = values["high"]
    log = values.get("log", False)
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log)
    return FloatDistribution(float(low), float(high), log)


def trial_label(method: str, search: Search, params: Mapping[str, Any]) -> str:
    """The method with a trial's settings: ``"fedtta lr=0.1 adapt-lr=0.0123"``."""
    name = method.split(maxsplit=1)[0]
    words = [method]
    for key, values in search.items():
        if key in params:
            value = params[key]
            if isinstance(value, float) and not isinstance(values, list):
                value = float(f"{value:.3g}")
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{key.removeprefix(f'{name}.')}={text}")
    return " ".join(words)


@dataclass(frozen=True)
class Outcome:
    """One trial: its number from 1, its settings, and its `validation` score of the kind `measure`,
    or None and the `error`."""

    method: str
    number: int
    label: str
    validation: float | None
    error: str = ""
    measure: str = "accuracy"  # a value of `selection-metric`

    @property
    def settings(self) -> str:
        """The label without the method."""
        return self.label.removeprefix(self.method).strip()


@dataclass
class Tuning:
    """Trials of `search` over `config`, each the mean over `seeds`, `parallel` at once.

    `run` runs jobs, each to its folder. All results are in `output`. `group`, "training" or
    "novel", is the one whose model is validated."""

    config: Config
    seeds: Sequence[int]
    search: Search
    output: Path
    parallel: int
    run: Callable[[list[Job]], None]
    group: str = "training"

    def __post_init__(self) -> None:
        dp = self.config["dp"]
        covers = self.config["dp-covers"]
        if dp != "none" and covers == EVERYTHING:
            raise ValueError(
                f"tune compares validation scores, which dp {dp!r} with dp-covers {covers!r} keeps "
                "on the clients; set dp-covers to 'model-updates' if ε need not cover them"
            )
        self.trial_config = override(self.config, NO_NOVEL_CLIENTS)

    def tune(self, methods: Sequence[str], trials: int) -> list[Outcome]:
        """Run `trials` trials of every method; those in `output` count. Then retry those that
        failed in earlier calls. A method's search stops if its first trials of this call fail alike
        and none has succeeded.

        Raises ValueError if nothing is searched for any of them, and if `output` holds trials of
        other settings or a damaged study. Raises OSError if the disk does not take the study, or if
        another process searches in `output`: it would take the trials of this one as its own."""
        import optuna

        if not any(map(self._space, methods)):
            raise ValueError(f"[search] has no key of {', '.join(methods)}: nothing to tune")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output), _storage_errors(self.output / STORAGE):
            return self._tune(methods, trials)

    def _tune(self, methods: Sequence[str], trials: int) -> list[Outcome]:
        """The trials of `tune`, without its checks."""
        outcomes: list[Outcome] = []
        for method in methods:
            study = self._study(method)
            errors: list[str] = []
            max_trials = min(trials, len(_grid(self._space(method))) or trials)
            # Trials that failed in earlier calls are retried after all others.
            failures = [trial for trial in _finished(study.trials) if trial.value is None]
            while True:
                missing = max_trials - len(_finished(study.trials))
                batch: Sequence[Trial | FrozenTrial]
                if missing > 0:
                    batch = self._next_trials(study, method, min(self.parallel, missing))
                else:
                    batch = failures[: self.parallel]
                    failures = failures[self.parallel :]
                if not batch:
                    break
                errors += self._run_batch(study, method, batch)
                distinct_errors = {re.sub(r"[\d.]+", "", error) for error in errors}
                if len(errors) < MAX_EQUAL_FAILURES or len(distinct_errors) > 1:
                    continue
                if all(trial.value is None for trial in _finished(study.trials)):
                    break
            outcomes += self._outcomes(study, method)
            write_results(outcomes, self.config, self.seeds, self.output)
        return outcomes

    def _outcomes(self, study: "Study", method: str) -> list[Outcome]:
        """The finished trials of the method's study."""
        measure = self._measure(method)
        outcomes = []
        for number, trial in enumerate(_finished(study.trials), 1):
            label = trial_label(method, self.search, trial.params)
            error = study.user_attrs.get(f"error {trial.number}", "")
            outcomes.append(Outcome(method, number, label, trial.value, error, measure))
        return outcomes

    def _measure(self, method: str) -> str:
        """The kind of score that compares the method's trials."""
        return selected_score(Variant.parse(method).apply(self.trial_config))

    def _study(self, method: str) -> "Study":
        import optuna
        from optuna.storages import RDBStorage

        file = (self.output / STORAGE).resolve()
        check_database(file)
        connect = partial(sqlite3.connect, file, check_same_thread=False)
        search = sorted(map(repr, self.search.items()))
        settings = repr((sorted(self.trial_config.items()), search, list(self.seeds)))
        measure = self._measure(method)
        if self.group != "training":
            settings += f" for {self.group}"
        if measure != "accuracy":
            settings += f" by {measure}"
        study = optuna.create_study(
            # a path in the URL would need escapes that differ between releases of SQLAlchemy
            storage=RDBStorage(f"sqlite:///{STORAGE}", {"creator": connect}),
            study_name=method,
            direction="maximize" if goodness(measure, 1.0) > 0 else "minimize",
            load_if_exists=True,
        )
        if study.user_attrs.get("settings", settings) != settings:
            raise ValueError(
                f"{self.output} holds trials of {method} under other settings; choose another "
                "--output"
            )
        study.set_user_attr("settings", settings)
        return study

    def _space(self, method: str) -> "dict[str, BaseDistribution]":
        """What is searched for the method. Its section's key replaces the common one, and its label
        replaces both."""
        keys = spanning(Variant.parse(method), self.search)
        return {key: distribution(self.search[key]) for key in keys}

    def _next_trials(
        self, study: "Study", method: str, count: int
    ) -> "Sequence[Trial | FrozenTrial]":
        """At most `count` trials: interrupted ones, or new ones if there are none."""
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        space = self._space(method)
        trials = study.trials  # each look at them asks the database anew
        interrupted = []
        for trial in trials:
            if trial.state == TrialState.RUNNING and trial.params.keys() == space.keys():
                interrupted.append(trial)
        if interrupted:
            return interrupted[:count]
        # Each batch has its own seed, so a resumed study draws what it would have drawn.
        study.sampler = TPESampler(seed=int(self.config["seed"]) + len(_finished(trials)))
        seen = [trial.params for trial in trials]
        points = [point for point in _grid(space) if point not in seen]
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        missing = max(count - len(waiting), 0)
        order = np.random.default_rng(int(self.config["seed"])).permutation(len(points))
        for number in order[:missing]:
            study.enqueue_trial(points[number])
        return [study.ask(space) for _ in range(count)]

    def _run_batch(
        self, study: "Study", method: str, batch: "Sequence[Trial | FrozenTrial]"
    ) -> list[str]:
        """Run the trials at once. Returns the errors of those that failed.

        Optuna's finished trials are final: a retry that succeeds is added as a trial."""
        from optuna.trial import TrialState, create_trial

        labels = [trial_label(method, self.search, trial.params) for trial in batch]
        distinct = list(dict.fromkeys(labels))
        config = self.trial_config | {"resume": True}  # a trial that was interrupted continues
        jobs = make_jobs(config, distinct, self.seeds, self.output / "trials")
        replace_settings(jobs)
        keep_finished(jobs)
        self.run(jobs)
        errors = []
        for trial, label in zip(batch, labels, strict=True):
            trial_jobs = [job for job in jobs if job.method == label]
            scores = [validation_score(job, self.group) for job in trial_jobs]
            values = [score for score in scores if score is not None]
            if len(values) < len(scores):
                reasons = [job.error for job in trial_jobs if job.error]
                errors.append(reasons[0] if reasons else "")
                study.set_user_attr(f"error {trial.number}", errors[-1])
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            elif study.trials[trial.number].state.is_finished():
                study.add_trial(
                    create_trial(
                        value=float(np.mean(values)),
                        params=trial.params,
                        distributions=trial.distributions,
                        user_attrs={RETRIED: trial.number},
                    )
                )
            else:
                study.tell(trial.number, float(np.mean(values)))
        return errors


@contextmanager
def _storage_errors(file: Path) -> Iterator[None]:
    """Inside, an error of the database in `file`, as on a full disk, is raised as OSError with its
    reason alone. Optuna and SQLAlchemy raise errors of their own around it."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise OSError(
            f"{file} cannot be read or written: {reason}; trials that it holds are kept, and the "
            "same command continues the search once the disk takes more"
        ) from error


def check_database(file: Path) -> None:
    """Raise ValueError if there is such a file, but no intact SQLite database in it."""
    if not file.is_file():
        return
    try:
        with closing(sqlite3.connect(file)) as connection:
            (state,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.OperationalError as error:  # locked, or not readable
        raise OSError(f"{file}: {error}") from error
    except sqlite3.DatabaseError as error:
        state = str(error)
    if state != "ok":
        raise ValueError(
            f"{file} is damaged ({state}); delete it and repeat the command: it keeps finished runs"
        )


def selected_score(config: Config) -> str:
    """The name of the score that `selection-metric` chooses, as clients report it; "auto" is the
    task's main one."""
    selected = str(config["selection-metric"])
    if selected == AUTO:
        return TASKS[partitions.task(config).task].main.name
    return reported_name(selected, load_scores(str(config["scores"])))


def validation_score(job: Job, group: str) -> float | None:
    """The score that the run's `selection-metric` names, on the training clients' validation
    samples, at the round that the group reports, of the model that the group gets; None if the run
    failed.

    Raises ValueError if no training client reports the score."""
    summary = job.summary()
    if job.error or not summary.get("finished"):
        return None
    measure = selected_score(job.config)
    if group == "novel":
        evaluations = {line.round: line.evaluation for line in read_rounds(job.folder)}
        scores = evaluations[summary["novel_round"]]
        score = scores.get(f"train-global-{measure}", scores.get(f"train-{measure}"))
    else:
        score = with_present_names(summary)["evaluation"].get(f"train-{measure}")
    if score is None:
        raise ValueError(
            f"{job.name}: training clients report no {score_named(measure).text} on validation "
            "samples to tune by"
        )
    return float(score)


def heading(measures: Collection[str]) -> str:
    """What the validation scores of some trials are, for a table's or a figure's heading."""
    if len(measures) != 1:
        return "validation"
    (measure,) = measures
    score = score_named(measure)
    return f"validation {score.text}" + (", %" if score.in_percent else "")


def shown(measure: str, score: float) -> float:
    """The score as tables and figures show it: accuracies in %."""
    return score_named(measure).shown(score)


def _grid(space: "Mapping[str, BaseDistribution]") -> list[dict[str, Any]]:
    """All points of lists and whole numbers; none if some range is continuous, or for too many."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values: list[Sequence[Any]] = []
    for key_distribution in space.values():
        if isinstance(key_distribution, CategoricalDistribution):
            values.append(key_distribution.choices)
        elif isinstance(key_distribution, IntDistribution):
            values.append(range(key_distribution.low, key_distribution.high + 1))
        else:
            return []
    if math.prod(map(len, values)) > MAX_GRID:
        return []
    return [dict(zip(space, point, strict=True)) for point in product(*values)]


def _finished(trials: "Sequence[FrozenTrial]") -> "list[FrozenTrial]":
    """The finished trials in order. A retry that succeeded replaces the trial that failed."""
    finished: dict[int, FrozenTrial] = {}  # by the number of the first try
    for trial in trials:
        if trial.state.is_finished():
            finished[trial.user_attrs.get(RETRIED, trial.number)] = trial
    return list(finished.values())


def best(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The best trial of each method, the first of equals; none if all trials failed."""
    winners: dict[str, Outcome] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.number):
        if outcome.validation is None:
            continue
        winner = winners.get(outcome.method)
        if winner is None or _is_better(outcome, winner):
            winners[outcome.method] = outcome
    # In the order of the outcomes, which best.toml keeps.
    methods = dict.fromkeys(outcome.method for outcome in outcomes)
    return {method: winners[method] for method in methods if method in winners}


def _is_better(outcome: Outcome, other: Outcome) -> bool:
    """Whether a trial's validation score is better than that of another trial."""
    assert outcome.validation is not None and other.validation is not None
    score = goodness(outcome.measure, outcome.validation)
    return score > goodness(other.measure, other.validation)


def write_results(
    outcomes: Sequence[Outcome], config: Config, seeds: Sequence[int], output: Path
) -> None:
    """Write trials.csv; if a trial succeeded, also best.toml, an experiment of every method at its
    best settings, and trials.pdf."""
    for name in (BEST, FIGURE):
        (output / name).unlink(missing_ok=True)
    with (
        replaced(output / TRIALS) as new,
        new.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["method", "trial", "settings", "validation", "error", "measure"])
        for outcome in outcomes:
            trial = [outcome.method, outcome.number, outcome.settings]
            writer.writerow([*trial, outcome.validation, outcome.error, outcome.measure])
    if not best(outcomes):
        return
    changed = _differences_from_defaults(config)
    labels = [outcome.label for outcome in best(outcomes).values()]
    for label in labels:
        Variant.parse(label).apply(config)  # checks that best.toml can be read
    content = {"methods": labels, "seeds": list(seeds), **changed}
    measures = dict.fromkeys(score_named(outcome.measure).text for outcome in outcomes)
    title = f"# The best settings by the training clients' validation {', '.join(measures)}\n"
    write_text(output / BEST, title + tomli_w.dumps(content))
    save(history(outcomes), output / FIGURE)


def _differences_from_defaults(config: Config) -> Config:
    """The settings that give `config` as an experiment's file. A method's value that a common key
    gives it is left out."""
    known = defaults()
    changed: Config = {}
    for key, value in config.items():
        if key not in UNSAVED and value != known.get(key):
            changed[key] = value
    common = {key: value for key, value in changed.items() if "." not in key}
    # A common key of a file also changes the methods' keys of its name.
    with_common = override(known, common)
    differing: Config = {}
    for key, value in changed.items():
        if key in common or value != with_common.get(key):
            differing[key] = value
    return differing


def history(outcomes: Sequence[Outcome]) -> "Figure":
    """Validation score of each trial as a dot, and of the best so far as a line; a panel for each
    kind of score."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    winners = best(outcomes)
    measures = list(dict.fromkeys(outcome.measure for outcome in winners.values()))
    figure = Figure(figsize=(6 * len(measures), 4), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    axes = dict(zip(measures, panels, strict=True))
    styles = line_styles()
    for method, winner in winners.items():
        measure = winner.measure
        axis = axes[measure]
        style = next(styles)
        numbers = []
        scores = []
        for outcome in outcomes:
            if outcome.method == method and outcome.validation is not None:
                numbers.append(outcome.number)
                scores.append(shown(measure, outcome.validation))
        # Of a loss the least value is the best.
        better = np.maximum if goodness(measure, 1.0) > 0 else np.minimum
        best_so_far = better.accumulate(scores)
        axis.plot(numbers, best_so_far, label=method, **style | {"marker": ""})
        axis.plot(numbers, scores, style["marker"], color=style["color"], alpha=0.6)
    for measure, axis in axes.items():
        axis.set(xlabel="trial", ylabel=f"training clients: {heading([measure])}")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend()
    return figure
