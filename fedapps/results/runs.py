"""Run folders as data frames: a row per run, per client, or per evaluated round.

Whatever cannot be read is left out, and described in one sentence."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

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
from fedapps.settings.config import CIRCUMSTANCES, defaults, ordered, ordered_names, relevant
from fedapps.settings.variants import Variant

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedapps.engines.job_pool import Job

ROLES = {"train": "training clients", "novel": "novel clients"}
SCORES = ROLES | {"test": "test samples", "f1": "F1", "f1-users": "F1, users"}
F1 = ("f1", "f1-users")  # in [0, 1]; the other scores are accuracies in %
ROUNDS = ("best", "last")
BOUND = ("training_error", "half_distance", "bound")  # terms of ODPFL-HN's bound and their sum
NUMBERS = (
    *BOUND,
    "rounds",
    "seconds",
    "down",
    "up",
    "dropped",
    "undone",
    "clipped",
    "recounted",
    "epsilon",
    "delta",
)
UNNAMED = {*CIRCUMSTANCES, "method", "seed", "from-dir", "data-dir", "device", "stacked-clients",
           "callbacks", "versions"}  # settings in which runs of one row may differ  # fmt: skip


def read_runs(folder: Path, jobs: Iterable["Job"] = ()) -> tuple["DataFrame", list[str]]:
    """The runs in `folder`, in the order in which their methods were asked for, and a sentence for
    each run that is missing, damaged or of another program. `jobs` stand for their own folders.
    Raises ValueError if no run is left."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that `fedapps run` wrote to")
    single = (folder / "config.toml").is_file()
    known = {job.folder: job for job in jobs}
    rows, problems = [], []
    for place in [folder.resolve()] if single else ordered(folder.resolve()):
        if not place.name.startswith("."):
            try:
                rows.append(_of_job(known[place]) if place in known else _read(place))
                problems += [f"{place.name}: {doubt}" for doubt in _doubts(rows[-1])]
            except ValueError as error:
                problems.append(f"{place.name}: {error}")
    if not rows:
        raise ValueError("; ".join([f"{folder} holds no runs of fedapps", *problems]))
    asked = ordered_names(folder)
    first = {row["method"]: asked.index(row["name"]) for row in rows[::-1] if row["name"] in asked}
    rows.sort(key=lambda row: (first.get(row["method"], len(asked)), row["method"], row["seed"]))
    runs = _frame(rows)
    return runs, problems + _missing(runs)


def failures(runs: "DataFrame") -> list[str]:
    """A sentence for each run that failed."""
    return [f"{run.name} failed: {run.error}" for run in runs[runs.error != ""].itertuples()]


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
    rounds: list[Round] = []
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else []:
        try:
            rounds.append(Round.model_validate_json(line))
        except ValueError:
            break
    return rounds


def rounds_of(runs: "DataFrame", points: int) -> "DataFrame":
    """A row per run and evaluated round, at most `points` rounds of each run: accuracies in % by
    role, F1 if there is no accuracy."""
    from pandas import DataFrame

    rows = []
    for run in runs.itertuples():
        reports = [report for report in read_rounds(run.folder) if report.evaluation]
        for report in reports[:: -(-len(reports) // points) or 1]:
            scores = {
                role: report.evaluation.get(f"{role}-accuracy", report.evaluation.get(f"{role}-f1"))
                for role in ROLES
            }
            rows.append({"method": run.method, "seed": run.seed, "round": report.round} | scores)
    frame = DataFrame(rows, columns=["method", "seed", "round", *ROLES])
    frame[[*ROLES]] = 100 * frame[[*ROLES]].astype(float)
    return frame.dropna(subset=[*ROLES], how="all")


def clients_of(runs: "DataFrame", round_: str = "best") -> "DataFrame":
    """A row per run and evaluated client, accuracies in %; `run` is the run's index in `runs`."""
    from pandas import DataFrame

    rows = [
        (run.Index, run.method, run.seed, name, client.role, client.accuracy, client.examples)
        for run in runs.itertuples()
        if (evaluation := _evaluation(run.summary, round_))
        for name, client in evaluation.per_client.items()
    ]
    columns = ["run", "method", "seed", "client", "role", "accuracy", "examples"]
    frame = DataFrame(rows, columns=columns)
    return frame.assign(accuracy=100 * frame.accuracy.astype(float))


def own_settings(label: str) -> dict[str, str]:
    """The settings in a variant's label, with their words: ``{"lr": "lr=0.1"}``."""
    return {word.partition("=")[0]: word for word in label.split()[1:]}


def label_without(label: str, keys: Iterable[str]) -> str:
    """A variant's label without these settings."""
    words = [word for key, word in own_settings(label).items() if key not in keys]
    return " ".join([label.partition(" ")[0], *words])


def federation_of(runs: "DataFrame") -> str:
    """Dataset, partition and number of clients; what differs between runs is left out."""
    words = (("dataset", ""), ("partition", ""), ("num-clients", " clients"))
    values = [({str(config[key]) for config in runs.config}, unit) for key, unit in words]
    return ", ".join(f"{min(found)}{unit}" for found, unit in values if len(found) == 1)


def differing(runs: "DataFrame") -> list[str]:
    """The common settings that labels name because the runs differ in them."""
    return list(
        dict.fromkeys(
            key
            for run in runs.itertuples()
            for key in own_settings(run.method)
            if key not in own_settings(run.variant)
            and key in run.config
            and f"{run.config['method']}.{key}" not in run.config
        )
    )


def _tell_apart(rows: list[dict[str, Any]]) -> None:
    """Add to the labels the settings that the runs read and in which they differ, unless they say
    them: common ones between all runs, those of a section between runs of one method."""
    read = [relevant(defaults() | row["config"]) for row in rows]
    for key in dict.fromkeys(key for settings in read for key in settings if key not in UNNAMED):
        section, _, name = key.rpartition(".")
        word = key if section == "partition" else name
        silent = [
            (row, settings[key])
            for row, settings in zip(rows, read, strict=True)
            if key in settings and word not in own_settings(row["variant"])
        ]
        if len({str(value) for _, value in silent}) > 1:
            for row, value in silent:
                row["method"] += f" {word}={'_'.join(str(value).split())}"


def _read(folder: Path) -> dict[str, Any]:
    """The run in `folder`. Raises ValueError if its files are missing or damaged."""
    for name in ("config.toml", "summary.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name}; the run was never evaluated, or this is no run")
    try:
        config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
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
    seed = config["seed"]
    row = {"method": method, "seed": seed, "name": folder.name, "folder": folder}
    row["variant"] = method  # the label as the folder says it
    summary = None if error or isinstance(result, Failure) else result
    row |= {"config": config, "error": error, "summary": summary}
    row["label"] = result.name if result is not None else ""
    for round_ in ROUNDS:
        row |= {f"{round_} {s}": v for s, v in _scores(_evaluation(summary, round_))}
    if summary is not None:
        row |= {"rounds": summary.rounds, "seconds": summary.seconds}
        row |= dict(summary.megabytes_per_client_round) | {"dropped": summary.dropped_replies}
        row |= {"undone": summary.undone_rounds}
        row |= {"clipped": summary.clipped_replies, "recounted": summary.recounted_replies}
        row |= dict(summary.privacy or {})
        trained = at_saved_model(summary).get("training_error")  # of the model that is handed out
        distance = (summary.novel or {}).get("half_distance")
        if trained is not None and distance is not None:
            row |= dict(zip(BOUND, (trained, distance, trained + distance), strict=True))
    return row


def at_saved_model(summary: Summary) -> Rates:
    """The training clients' scores at the round of the saved model, which novel clients report; {}
    if a summary of an earlier release lacks them."""
    if summary.saved_model_train is not None:
        return summary.saved_model_train
    return {} if other_rounds(summary) else summary.train


def other_rounds(summary: Summary) -> bool:
    """Whether training clients report another round than that of the saved model."""
    return summary.novel_round not in (None, summary.best_round)


def _evaluation(summary: Any, round_: str) -> Evaluation | None:
    return summary.last if summary is not None and round_ == "last" else summary


def _scores(evaluation: Evaluation | None) -> Iterator[tuple[str, float | None]]:
    train = (evaluation and evaluation.train) or {}
    novel = (evaluation and evaluation.novel) or {}
    accuracies = (train.get("accuracy"), novel.get("accuracy"), train.get("test_accuracy"))
    yield from zip(SCORES, (None if a is None else 100 * a for a in accuracies), strict=False)
    yield from ((score, train.get(score.replace("-", "_"))) for score in F1)


def _frame(rows: list[dict[str, Any]]) -> "DataFrame":
    from pandas import DataFrame

    _tell_apart(rows)
    users: dict[str, set[str]] = {}  # of a name, the methods
    for row in rows:
        method = row["config"]["method"]
        users.setdefault(row["label"] or method, set()).add(method)
    for row in rows:
        if row["label"] and len(users[row["label"]]) == 1:
            _, *words = row["method"].split()
            row["method"] = " ".join([row["label"], *words])
    columns = ["method", "variant", "seed", "name", "folder", "config", "error", "summary"]
    scores = [f"{round_} {score}" for round_ in ROUNDS for score in SCORES]
    numbers = [*scores, *NUMBERS]
    frame = DataFrame(rows, columns=[*columns, *numbers, "generator", "terms"], dtype=object)
    return frame.astype(dict.fromkeys(numbers, float))


def _doubts(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a run that can be shown."""
    if (summary := row["summary"]) is not None:
        expected, read = summary.rounds, len(read_rounds(row["folder"]))
        rounds = row["config"].get("rounds", expected)
        if summary.finished is False or (summary.finished is None and expected < rounds):
            yield f"has not finished: {expected} of {rounds} rounds"
        if summary.undone_rounds:
            yield (
                f"{summary.undone_rounds} of {expected} rounds were undone: NaN or infinity would "
                "have come into the model"
            )
        if read < expected:
            yield f"metrics.jsonl is damaged or cut short: {read} of {expected} rounds"


def _missing(runs: "DataFrame") -> list[str]:
    """A sentence for each method that lacks a seed which other methods have."""
    seeds = set(runs.seed)
    return [
        f"{method}: no run of seed {seed}"
        for method, present in runs.groupby("method", sort=False).seed
        for seed in sorted(seeds - set(present))
    ]
