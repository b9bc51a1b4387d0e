"""Runs beside each other as a paper's table has them: over seeds, over clients, beside a paper.

A line for each score and group of runs: mean ± deviation over seeds, the published value, the
difference to a reference whose sign a paired test judges, and how unequal the clients are."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from fedapps.console import spreadsheet_cell
from fedapps.engines.jobs import Job
from fedapps.results.published import SCORES, Published
from fedapps.results.table import Results, epsilon, lost_replies, terms_of_privacy
from fedapps.settings.config import effective

ROUNDS = ("best", "last")
F1 = ("f1", "f1-users")
LEAST_SEEDS = 5  # with fewer a paired test over seeds cannot decide anything
LEVEL = 0.05
FEDERATION = {"dataset", "partition", "num-clients", "train-fraction", "seed"}


@dataclass
class Line:
    """One score of one group of runs; accuracies in %, F1 in [0, 1]."""

    score: str
    by: tuple[str, ...]
    runs: list[Job]
    seeds: dict[str, float] = field(default_factory=dict)  # by split: score of the run on it
    clients: dict[tuple[str, str], float] = field(default_factory=dict)  # by split and client
    published: float | None = None
    difference: float | None = None  # to the reference's mean
    p: float | None = None  # of the paired test that the sign is chance

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(list(self.seeds.values())))

    @property
    def deviation(self) -> float | None:
        """Over seeds; None of one seed."""
        values = list(self.seeds.values())
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    @property
    def measured(self) -> str:
        """``70.00 ± 1.00``; without deviation of one seed."""
        spread = "" if self.deviation is None else f" ± {number(self, self.deviation)}"
        return number(self, self.mean) + spread

    def spread(self) -> tuple[float, float, float] | None:
        """Worst client, mean of the lowest tenth of the clients, deviation over clients: each of
        every seed's clients, then the mean over seeds. None where clients are not told."""
        told = []
        for _, group in groupby(sorted(self.clients), key=lambda key: key[0]):
            values = sorted(self.clients[key] for key in group)
            tenth = values[: math.ceil(len(values) / 10)]
            told.append([values[0], np.mean(tenth), np.std(values, ddof=min(1, len(values) - 1))])
        if not told:
            return None
        worst, lowest, deviation = np.array(told, float).mean(0)
        return float(worst), float(lowest), float(deviation)


@dataclass(frozen=True)
class Comparison:
    """The lines, the reference of their differences, and how those were judged.

    `unscored` are the runs that have no line, such as private ones that are not evaluated."""

    lines: list[Line]
    unscored: list[Job]
    by: list[str]
    against: str
    test: str
    published: Published | None
    round: str


def compare(
    jobs: Sequence[Job],
    *,
    by: Sequence[str] = (),
    round_: str = "best",
    against: str = "",
    published: Published | None = None,
) -> Comparison:
    """Group the runs by settings; "method" is the method with what it has of its own.

    Without `by`: by method and by the swept settings of the federation. `against` is a value of
    the first of `by`, the first one found if empty. Raises ValueError for settings that no run
    has, and where a group would average over something else than seeds."""
    if round_ not in ROUNDS:
        raise ValueError(f"unknown round {round_!r}; known: {', '.join(ROUNDS)}")
    jobs = [job for job in jobs if not job.error]
    keys = list(by) or ["method", *swept(jobs)]
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(tuple(_value(job, key, keys) for key in keys), []).append(job)
    for told, group in groups.items():
        if len({job.seed for job in group}) < len(group):
            differ = sorted({w for job in group for w in [str(job.config["method"]), *_own(job)]})
            raise ValueError(
                f"{', '.join(told)}: more than one run of a seed; add to --by method or what "
                f"differs: {', '.join(differ)}"
            )
    lines = [
        line
        for score in SCORES
        for told, group in groups.items()
        if (line := _line(score, told, group, round_, published)).seeds
    ]
    names = [told[0] for told in groups]
    if against and against not in names:
        raise ValueError(f"no {keys[0]} {against!r} to compare with; there are {', '.join(names)}")
    against = against or (names[0] if names else "")
    test = _judge(lines, against)
    scored = {job.name for line in lines for job in line.runs}
    unscored = [job for job in jobs if job.name not in scored]
    return Comparison(lines, unscored, keys, against, test, published, round_)


def shown(found: Comparison) -> Results:
    """The comparison as a table of texts; columns that tell nothing are left out."""
    several = len({line.by[0] for line in found.lines}) > 1
    columns: dict[str, list[str]] = {"score": [SCORES[line.score] for line in found.lines]}
    for place, key in enumerate(found.by):
        columns[key] = [line.by[place] for line in found.lines]
    columns["mean"] = [line.measured for line in found.lines]
    columns["published"] = [number(line, line.published) for line in found.lines]
    columns["difference"] = [
        number(line, None if line.published is None else line.mean - line.published, sign=True)
        for line in found.lines
    ]
    if several:
        columns[f"less {found.against}"] = [_judged(line) for line in found.lines]
    spreads = [line.spread() for line in found.lines]
    for place, name in enumerate(("worst", "lowest tenth", "deviation")):
        columns[name] = [
            number(line, s[place] if s else None)
            for line, s in zip(found.lines, spreads, strict=True)
        ]
    columns["ε"] = [epsilon([job.summary() for job in line.runs]) for line in found.lines]
    columns["seeds"] = [str(len(line.seeds)) for line in found.lines]
    if not found.lines:
        columns = {"not evaluated": [job.name for job in found.unscored]}
        columns["ε"] = [epsilon([job.summary()]) for job in found.unscored]
    told = {name: cells for name, cells in columns.items() if set(cells) - {"–", "∞"}}
    rows = [list(row) for row in zip(*told.values(), strict=True)]
    runs = [job for line in found.lines for job in line.runs] + found.unscored
    first = runs[0].config if runs else {}
    title = ", ".join(str(first.get(key, "")) for key in ("dataset", "partition"))
    return Results(
        f"{title}, {first.get('num-clients', 0)} clients, {found.round} round",
        list(told),
        rows,
        caption(found, set(told)),
    )


def as_csv(found: Comparison) -> str:
    """The numbers unrounded, a column each. A name that spreadsheets would take for a formula gets
    a single quote in front."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ["mean", "deviation_over_seeds", "seeds", "published", "less_reference", "p", "epsilon"]
    spread = ["worst_client", "lowest_tenth", "deviation_over_clients"]
    writer.writerow(["score", *map(spreadsheet_cell, found.by), *names, *spread])
    for line in found.lines:
        numbers = [line.mean, line.deviation, len(line.seeds), line.published]
        told = [job.summary()["privacy"]["epsilon"] for job in line.runs if _private(job)]
        tests = [line.difference, line.p, max(told, default=None)]
        writer.writerow(
            [
                line.score,
                *map(spreadsheet_cell, line.by),
                *numbers,
                *tests,
                *(line.spread() or [""] * 3),
            ]
        )
    return file.getvalue()


def _line(
    score: str, by: tuple[str, ...], group: list[Job], round_: str, published: Published | None
) -> Line:
    line = Line(score, by, group)
    for job in group:
        summary = job.summary()
        told = summary if round_ == "best" else summary.get("last", {})
        if (value := _score(told, score)) is None:
            continue
        split = _split(job)
        line.seeds[split] = value
        if score in ("train", "novel"):
            for client, one in told.get("per_client", {}).items():
                if one["role"] == score and one["accuracy"] is not None:
                    line.clients[split, client] = 100 * one["accuracy"]
        if published is not None and line.published is None:
            line.published = published.value(job, score)
    return line


def _score(told: dict[str, Any], score: str) -> float | None:
    role = told.get("novel" if score == "novel" else "train") or {}
    if score in F1:
        return role.get(score.replace("-", "_"))
    value = role.get("test_accuracy" if score == "test" else "accuracy")
    return None if value is None else 100 * value


def _split(job: Job) -> str:
    """What two runs must share for their clients to be the same ones."""
    told = {k: v for k, v in job.config.items() if k in FEDERATION or k.startswith("partition.")}
    return repr(sorted(told.items()))


def swept(jobs: Sequence[Job]) -> list[str]:
    """The settings of the federation that runs' labels tell."""
    words = [word.partition("=")[0] for job in jobs for word in job.method.split()[1:]]
    return [w for w in dict.fromkeys(words) if w in FEDERATION or w.startswith("partition.")]


def _own(job: Job) -> list[str]:
    return [word.partition("=")[0] for word in job.method.split()[1:]]


def _value(job: Job, key: str, keys: Sequence[str]) -> str:
    """A run's value of a setting; of "method" its label without the other keys of the table."""
    if key == "method":
        method, *words = job.method.split()
        return " ".join([method, *(w for w in words if w.partition("=")[0] not in keys)])
    value = effective(job.config, key)
    if value is None and "." in key:  # another method's own setting
        return "–"
    if value is None:
        raise ValueError(f"no run has a setting {key!r}; --by takes method and settings")
    return str(value)


def _judge(lines: Sequence[Line], against: str) -> str:
    """Fill in differences to the reference of each line and their p; returns the test's name.

    Over seeds by Student's paired t test where there are enough of them, else over clients by
    Wilcoxon's signed-rank test: then it says nothing of another training run."""
    from scipy import stats

    pairs = []
    for line in lines:
        for other in lines:
            same = (line.score, *line.by[1:]) == (other.score, *other.by[1:])
            if same and other.by[0] == against and other is not line:
                pairs.append((line, other))
    over_seeds = min((len(a.seeds.keys() & b.seeds.keys()) for a, b in pairs), default=0)
    over_seeds_alone = over_seeds >= LEAST_SEEDS
    for line, other in pairs:
        common = sorted(line.seeds.keys() & other.seeds.keys())
        if not common:
            continue
        line.difference = float(np.mean([line.seeds[s] - other.seeds[s] for s in common]))
        if over_seeds_alone:
            differences = [line.seeds[s] - other.seeds[s] for s in common]
        else:
            both = sorted(line.clients.keys() & other.clients.keys())
            differences = [line.clients[c] - other.clients[c] for c in both]
        if len(differences) < LEAST_SEEDS:
            continue
        if len(set(differences)) == 1:  # no variance: the tests are not defined
            line.p = 1.0 if differences[0] == 0 else 0.0
        elif over_seeds_alone:
            line.p = float(stats.ttest_1samp(differences, 0).pvalue)
        else:
            line.p = float(stats.wilcoxon(differences).pvalue)
    if over_seeds_alone:
        return "Student's paired t test over seeds"
    return "Wilcoxon's signed-rank test over clients"


def caption(found: Comparison, columns: set[str]) -> str:
    """What the columns that are shown mean."""
    notes = ["accuracy in %, F1 in [0, 1]"]
    if any(len(line.seeds) > 1 for line in found.lines):
        notes.append("± standard deviation over seeds")
    if f"less {found.against}" in columns:
        notes.append(
            f"less {found.against}: mean difference on the same splits, its sign judged by "
            f"{found.test}, two-sided, n.s.: p ≥ {LEVEL}, not corrected for the number of rows"
        )
    if "worst" in columns:
        notes.append("worst, lowest tenth, deviation: over clients, mean over seeds")
    runs = list({job.folder: job for line in found.lines for job in line.runs}.values())
    for job in found.unscored:
        spent = f", ε = {epsilon([job.summary()])}" if _private(job) else ""
        notes.append(f"not evaluated: {job.name}{spent}")
    notes += terms_of_privacy([*runs, *found.unscored]) + lost_replies([*runs, *found.unscored])
    told = found.published.deviations(runs) if found.published and "published" in columns else {}
    if found.published and told:
        differ = ", ".join(
            f"{key} {value} (there {found.published.settings[key]})"
            for key, value in sorted(told.items())
        )
        notes.append(f"published under other settings: {differ}")
    return "; ".join(notes)


def _private(job: Job) -> bool:
    return "privacy" in job.summary()


def _judged(line: Line) -> str:
    if line.difference is None:
        return "–"
    told = number(line, line.difference, sign=True)
    if line.p is None:
        return told
    if line.p >= LEVEL:
        return f"{told} n.s."
    return f"{told} (p {line.p:.1g})" if line.p >= 0.001 else f"{told} (p < 0.001)"


def number(line: Line, value: float | None, *, sign: bool = False) -> str:
    """A value of the line's score: accuracies by two digits, F1 by three."""
    if value is None:
        return "–"
    digits = 3 if line.score in F1 else 2
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def order(value: str) -> tuple[bool, Any]:
    """Sorts a setting's values: numbers first, by size; then words."""
    try:
        return False, float(value)
    except ValueError:
        return True, value
