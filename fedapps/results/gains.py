"""What novel clients gain: client by client, against a reference on the same split."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedapps.results.comparison import LEVEL, TEST, paired_t_pvalue, split_of, spreads
from fedapps.results.formats import TextTable
from fedapps.results.runs import (
    check_round,
    clients_of,
    failures,
    federation_of,
    label_without,
    own_settings,
    read_rounds,
    read_runs,
)
from fedapps.settings.config import effective

if TYPE_CHECKING:
    from pandas import DataFrame, Series

NOVEL_SCORES = {
    "accuracy": "mean accuracy in %",
    "gain": "mean gain in points",
    "harmed": "clients in % that lose more than one point",
    "worst-decile": "mean accuracy of the lowest tenth in %",
    "milliseconds": "median over evaluations, for a client",
    "kilobytes": "arrays to and from a client",
}
HARM = -1.0 - 1e-4  # points; a loss of exactly one is no harm, however its decimals are rounded


def novel_scores(runs: "DataFrame", round_: str = "best", against: str = "fedavg") -> "DataFrame":
    """`NOVEL_SCORES` of each run, NaN where unknown; the reference is `against` on the run's split,
    of several the one with the run's settings."""
    from pandas import DataFrame

    clients = clients_of(runs, round_)
    clients = clients[clients.role == "novel"].dropna(subset="accuracy")
    names = [label.partition(" ")[0] for label in runs.method]
    described = [own_settings(label) for label in runs.method]
    # the settings by which the reference's own runs differ
    keys = sorted(
        {key for name, s in zip(names, described, strict=True) if name == against for key in s}
    )
    rests = [
        repr([str(effective({**words, **config}, key)) for key in keys])
        for config, words in zip(runs.config, described, strict=True)
    ]
    place = zip(names, rests, map(split_of, runs.config), strict=True)
    known = DataFrame(list(place), runs.index, ["name", "rest", "split"])
    clients = clients.join(known, on="run")
    reference = clients[clients.name == against]
    keys = ["split", "client", *(["rest"] if reference.rest.nunique() > 1 else [])]
    reference = reference[[*keys, "accuracy"]]
    clients = clients.merge(reference, "left", on=keys, suffixes=("", "_reference"))
    _warn_of_lost(clients, reference, keys, runs, against)
    clients["gain"] = clients.accuracy - clients.accuracy_reference
    clients["harmed"] = 100.0 * (clients.gain < HARM).where(clients.gain.notna())
    found = clients.groupby("run")[["accuracy", "gain", "harmed"]].mean()
    tenth = clients.assign(value=clients.accuracy)[["run", "split", "value"]]
    found["worst-decile"] = spreads(tenth, ["run"])["lowest_tenth"]
    for run in runs.itertuples():
        rounds = DataFrame(
            [
                (r.phases["novel-client"], sum(r.novel_megabytes.values()))
                for r in read_rounds(run.folder)
                if "novel-client" in r.phases
            ],
            columns=["seconds", "megabytes"],
        )
        found.loc[run.Index, "milliseconds"] = 1e3 * rounds.seconds.median()
        found.loc[run.Index, "kilobytes"] = 1e3 * rounds.megabytes.median()
    return found.reindex(columns=[*NOVEL_SCORES]).astype(float)


def _warn_of_lost(
    clients: "DataFrame", reference: "DataFrame", keys: list[str], runs: "DataFrame", against: str
) -> None:
    """Warn of runs that lack clients of their reference: their scores are over the others."""
    parts = [key for key in keys if key != "client"]
    all_of = reference.groupby(parts).client.agg(set)
    for (run, *part), group in clients.groupby(["run", *parts]):
        known = all_of.get(tuple(part) if len(part) > 1 else part[0], set())
        if lost := known - set(group.client):
            words = "%s lacks %d of the %d novel clients of %s; its scores are over the others"
            logging.getLogger(__name__).warning(
                words, runs.name[run], len(lost), len(known), against
            )


def gains_table(
    runs: "DataFrame", scores: Sequence[str], round_: str = "best", against: str = ""
) -> TextTable:
    """A row for each method, a column for each of the scores: mean ± deviation over seeds. Raises
    ValueError for unknown scores and rounds, and if all runs failed."""
    _check(scores, round_)
    runs, against = runs[runs.error == ""], against or "fedavg"
    if runs.empty:
        raise ValueError("all runs failed; there is nothing to show")
    runs = shortened(runs)
    check_reference([runs], against)
    found = novel_scores(runs, round_, against)
    rows = [
        [str(method), *(_cell(found.loc[group.index, s], s) for s in scores), str(len(group))]
        for method, group in runs.groupby("method", sort=False)
    ]
    title = f"{federation_of(runs)}: novel clients, against {against}"
    return TextTable(title, ["method", *scores, "seeds"], rows, _notes(scores))


def scenarios_table(
    found: Mapping[str, "DataFrame"], score: str, round_: str = "best", against: str = ""
) -> TextTable:
    """A row for each method, a column for each of the `scenarios`. Raises ValueError for an unknown
    score or round, and where no scenario has a run called `against`."""
    _check([score], round_)
    against = against or "fedavg"
    check_reference(found.values(), against)
    cells: dict[str, dict[str, str]] = {}
    columns = []
    for scenario, runs in found.items():
        columns.append(scenario)
        values = novel_scores(runs, round_, against)[score]
        for method, group in runs.groupby("method", sort=False):
            cells.setdefault(str(method), {})[scenario] = _cell(values[group.index], score)
    rows = [[method, *(row.get(c, "–") for c in columns)] for method, row in cells.items()]
    title = f"{score} of novel clients by scenario, against {against}"
    return TextTable(title, ["method", *columns], rows, _notes([score]))


def scenarios(folder: Path) -> tuple[dict[str, "DataFrame"], list[str]]:
    """The finished runs in each subfolder, by its name and the swept settings that all its labels
    say; and a sentence for each run that failed, is missing or damaged, and for each subfolder
    that is left out because all its runs failed. A label says only what tells its method's runs
    apart. Raises ValueError where no subfolder holds finished runs."""
    found, problems, empty = {}, [], []
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(inner.glob("*/summary.json")):
            runs, doubts = read_runs(inner)
            problems += [f"{inner.name}: {doubt}" for doubt in [*doubts, *failures(runs)]]
            runs = runs[runs.error == ""]
            if runs.empty:
                empty.append(f"{inner.name} is left out: all its runs failed")
                continue
            runs = shortened(runs)
            common = set.intersection(*(set(own_settings(label)) for label in runs.method))
            words = [
                " ".join(word for key, word in own_settings(label).items() if key in common)
                for label in runs.method
            ]
            labels = [label_without(label, common) for label in runs.method]
            for name, group in runs.assign(method=labels).groupby(np.array(words), sort=False):
                found[f"{inner.name} {name}".strip()] = group
    if not found:
        raise ValueError("; ".join([f"{folder} has no subfolder that holds runs", *empty]))
    return found, problems + empty


def shortened(runs: "DataFrame") -> "DataFrame":
    """The runs, their labels without the settings that are the same in all runs of a method."""
    names = runs.method.str.partition(" ")[0]
    labels = runs.method.copy()
    for name, group in runs.groupby(names):
        said = [own_settings(label) for label in group.method]
        same = {key for key, word in said[0].items() if all(s.get(key) == word for s in said)}
        labels[names == name] = [label_without(label, same) for label in group.method]
    return runs.assign(method=labels)


def _check(scores: Sequence[str], round_: str) -> None:
    check_round(round_)
    if unknown := [score for score in scores if score not in NOVEL_SCORES]:
        raise ValueError(f"unknown score {unknown[0]!r}; known: {', '.join(NOVEL_SCORES)}")


def check_reference(several: Iterable["DataFrame"], against: str) -> None:
    """Raise ValueError if no run is called `against`."""
    names = {label.partition(" ")[0] for runs in several for label in runs.method}
    if against not in names:
        there = ", ".join(sorted(names))
        raise ValueError(f"no run of {against!r} to compare with; --against takes one of {there}")


def _cell(values: "Series", score: str) -> str:
    """``1.20 ± 0.30``, of a gain also its p."""
    values = values.dropna()
    if not len(values):
        return "–"
    p = paired_t_pvalue(values) if score == "gain" else math.nan
    judged = "" if math.isnan(p) else f" (p {p:.2g})" if p < LEVEL else " n.s."
    spread = f" ± {values.std():.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}{judged}"


def _notes(scores: Sequence[str]) -> str:
    notes = [f"{score}: {NOVEL_SCORES[score]}" for score in scores]
    if "gain" in scores:
        notes.append(f"p: {TEST}; n.s.: p ≥ {LEVEL}")
    return "; ".join([*notes, "± standard deviation over seeds"])
