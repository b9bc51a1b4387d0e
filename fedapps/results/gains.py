"""What novel clients gain: client by client, against a reference on the same split."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedapps.results.comparison import LEVEL, TEST, paired_t_pvalue, split_of, spreads
from fedapps.results.formats import UNKNOWN, TextTable, decimals_of, seeds_cell, summarize
from fedapps.results.runs import (
    check_one_main_score,
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

log = logging.getLogger(__name__)

NOVEL_SCORES = {
    "accuracy": "mean accuracy in %",
    "gain": "mean gain in points",
    "harmed": "clients in % that lose more than one point",
    "worst-decile": "mean accuracy of the lowest tenth in %",
    "milliseconds": "median over evaluations, for a client",
    "kilobytes": "arrays to and from a client",
}
# The same where the labels are values. A gain is the reference's RMSE less the client's.
OF_VALUES = {
    "rmse": "mean RMSE in the labels' unit",
    "gain": "mean decrease of the RMSE in the labels' unit",
    "harmed": "clients in % whose RMSE is more than one percent higher",
    "worst-decile": "mean RMSE of the highest tenth in the labels' unit",
    "milliseconds": NOVEL_SCORES["milliseconds"],
    "kilobytes": NOVEL_SCORES["kilobytes"],
}
BY_MAIN_SCORE = {"accuracy": NOVEL_SCORES, "rmse": OF_VALUES}
# Points. A loss of exactly one point is no harm; float32 accuracies are off by some 1e-6.
HARM = -1.0 - 1e-4
# The factor of the reference's RMSE above which a client is harmed, and the same for float32.
HARM_OF_VALUES = 1.01 * (1 + 1e-6)


def novel_scores(runs: "DataFrame", round_: str = "best", against: str = "fedavg") -> "DataFrame":
    """`NOVEL_SCORES` of each run, or `OF_VALUES`, NaN where unknown; the reference is `against` on
    the run's split, of several the one with the run's settings. Raises ValueError for runs with
    different main scores."""
    main = check_one_main_score(runs)
    clients = clients_of(runs, round_)
    clients = clients[clients.role == "novel"].dropna(subset="value")
    clients = clients.join(_places(runs, against), on="run")
    reference = clients[clients.name == against]
    keys = ["split", "client"]
    if reference.settings.nunique() > 1:
        keys.append("settings")
    reference = reference[[*keys, "value"]]
    clients = clients.merge(reference, "left", on=keys, suffixes=("", "_reference"))
    _warn_of_lost(clients, reference, keys, runs, against)
    if main == "accuracy":
        clients["gain"] = clients.value - clients.value_reference
        harmed = clients.gain < HARM
    else:
        clients["gain"] = clients.value_reference - clients.value
        harmed = clients.value > HARM_OF_VALUES * clients.value_reference
    clients["harmed"] = 100.0 * harmed.where(clients.gain.notna())
    scores = clients.groupby("run")[["value", "gain", "harmed"]].mean()
    scores = scores.rename(columns={"value": main})
    scores["worst-decile"] = spreads(clients, ["run"])["lowest_tenth"]
    for run in runs.itertuples():
        seconds, megabytes = _costs(run.folder)
        scores.loc[run.Index, "milliseconds"] = 1e3 * seconds
        scores.loc[run.Index, "kilobytes"] = 1e3 * megabytes
    return scores.reindex(columns=[*BY_MAIN_SCORE[main]]).astype(float)


def _places(runs: "DataFrame", against: str) -> "DataFrame":
    """By which a run finds its reference: `name` of its method, its `split` of clients, and its
    `settings`, which are those in which the labels of the reference's own runs differ."""
    from pandas import DataFrame

    names = [label.partition(" ")[0] for label in runs.method]
    keys: set[str] = set()
    for name, label in zip(names, runs.method, strict=True):
        if name == against:
            keys |= own_settings(label).keys()
    settings = []
    for label, config in zip(runs.method, runs.config, strict=True):
        values = own_settings(label) | config
        settings.append(repr([str(effective(values, key)) for key in sorted(keys)]))
    splits = [split_of(config) for config in runs.config]
    return DataFrame({"name": names, "settings": settings, "split": splits}, runs.index)


def _costs(run: Path) -> tuple[float, float]:
    """Seconds and megabytes of a novel client, medians over evaluations; NaN if unknown."""
    seconds = []
    megabytes = []
    for report in read_rounds(run):
        if "novel-client" in report.phases:
            seconds.append(report.phases["novel-client"])
            megabytes.append(sum(report.novel_megabytes.values()))
    if not seconds:
        return math.nan, math.nan
    return float(np.median(seconds)), float(np.median(megabytes))


def _warn_of_lost(
    clients: "DataFrame", reference: "DataFrame", keys: list[str], runs: "DataFrame", against: str
) -> None:
    """Warn of runs that lack clients of their reference: their scores are over the others."""
    place_keys = [key for key in keys if key != "client"]
    reference_clients: dict[tuple[str, ...], set[str]] = {}
    for place, group in reference.groupby(place_keys):
        reference_clients[place] = set(group.client)
    for (run, *place), group in clients.groupby(["run", *place_keys]):
        known = reference_clients.get(tuple(place), set())
        lost = known - set(group.client)
        if lost:
            log.warning(
                "%s lacks %d of the %d novel clients of %s; its scores are over the others",
                runs.name[run],
                len(lost),
                len(known),
                against,
            )


def gains_table(
    runs: "DataFrame", scores: Sequence[str], round_: str = "best", against: str = ""
) -> TextTable:
    """A row for each method, a column for each of the scores: mean ± deviation over seeds. Raises
    ValueError for unknown scores and rounds, and if all runs failed."""
    _check(scores, round_)
    against = against or "fedavg"
    runs = runs[runs.error == ""]
    if runs.empty:
        raise ValueError("all runs failed; there is nothing to show")
    runs = shortened(runs)
    check_reference([runs], against)
    main = check_one_main_score(runs)
    meanings = _meanings(main, scores)
    values = novel_scores(runs, round_, against)
    rows = []
    for method, group in runs.groupby("method", sort=False):
        cells = [_cell(values.loc[group.index, score], score, main) for score in scores]
        rows.append([str(method), *cells, str(len(group))])
    title = f"{federation_of(runs)}: novel clients, against {against}"
    return TextTable(title, ["method", *scores, "seeds"], rows, _notes(meanings))


def scenarios_table(
    runs_by_scenario: Mapping[str, "DataFrame"],
    score: str,
    round_: str = "best",
    against: str = "",
) -> TextTable:
    """A row for each method, a column for each of the `scenarios`. Raises ValueError for an unknown
    score or round, where no scenario has a run called `against`, and where the scenarios have
    different main scores."""
    import pandas

    _check([score], round_)
    against = against or "fedavg"
    check_reference(runs_by_scenario.values(), against)
    main = check_one_main_score(pandas.concat([*runs_by_scenario.values()]))
    meanings = _meanings(main, [score])
    cells: dict[str, dict[str, str]] = {}  # by method and scenario
    for scenario, runs in runs_by_scenario.items():
        values = novel_scores(runs, round_, against)[score]
        for method, group in runs.groupby("method", sort=False):
            cell = _cell(values[group.index], score, main)
            cells.setdefault(str(method), {})[scenario] = cell
    rows = []
    for method, by_scenario in cells.items():
        rows.append([method, *(by_scenario.get(name, UNKNOWN) for name in runs_by_scenario)])
    title = f"{score} of novel clients by scenario, against {against}"
    return TextTable(title, ["method", *runs_by_scenario], rows, _notes(meanings))


def scenarios(folder: Path) -> tuple[dict[str, "DataFrame"], list[str]]:
    """The finished runs in each subfolder, by its name and the swept settings that all its labels
    name; and a sentence for each run that failed, is missing or damaged, and for each subfolder
    that is left out because all its runs failed. A label has only settings that tell its method's
    runs apart. Raises ValueError where no subfolder holds finished runs."""
    result: dict[str, DataFrame] = {}
    problems: list[str] = []
    left_out: list[str] = []
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not any(subfolder.glob("*/summary.json")):
            continue
        runs, doubts = read_runs(subfolder)
        problems += [f"{subfolder.name}: {doubt}" for doubt in [*doubts, *failures(runs)]]
        runs = runs[runs.error == ""]
        if runs.empty:
            left_out.append(f"{subfolder.name} is left out: all its runs failed")
            continue
        for settings, group in _by_common_settings(shortened(runs)):
            result[f"{subfolder.name} {settings}".strip()] = group
    if not result:
        raise ValueError("; ".join([f"{folder} has no subfolder that holds runs", *left_out]))
    return result, problems + left_out


def _by_common_settings(runs: "DataFrame") -> Iterator[tuple[str, "DataFrame"]]:
    """The runs grouped by the settings that all labels name, which the groups' labels lack."""
    common = set.intersection(*(set(own_settings(label)) for label in runs.method))
    settings = []
    labels = []
    for label in runs.method:
        words = [word for key, word in own_settings(label).items() if key in common]
        settings.append(" ".join(words))
        labels.append(label_without(label, common))
    yield from runs.assign(method=labels).groupby(np.array(settings), sort=False)


def shortened(runs: "DataFrame") -> "DataFrame":
    """The runs, their labels without the settings that are the same in all runs of a method."""
    names = runs.method.str.partition(" ")[0]
    labels = runs.method.copy()
    for name, group in runs.groupby(names):
        # A setting is the same if every label has its key with the same word.
        settings = [own_settings(label).items() for label in group.method]
        same = dict(set.intersection(*map(set, settings)))
        labels[names == name] = [label_without(label, same) for label in group.method]
    return runs.assign(method=labels)


def _check(scores: Sequence[str], round_: str) -> None:
    check_round(round_)
    known = NOVEL_SCORES | OF_VALUES
    unknown = [score for score in scores if score not in known]
    if unknown:
        raise ValueError(f"unknown score {unknown[0]!r}; known: {', '.join(known)}")


def _meanings(main: str, scores: Sequence[str]) -> dict[str, str]:
    """What the asked scores are for runs with this main score. Raises ValueError for a score that
    they do not have."""
    known = BY_MAIN_SCORE[main]
    for score in scores:
        if score not in known:
            raise ValueError(f"the runs have no {score}; their scores: {', '.join(known)}")
    return {score: known[score] for score in scores}


def check_reference(frames: Iterable["DataFrame"], against: str) -> None:
    """Raise ValueError if no run in the `frames` is called `against`."""
    names: set[str] = set()
    for runs in frames:
        names |= {label.partition(" ")[0] for label in runs.method}
    if against not in names:
        known = ", ".join(sorted(names))
        raise ValueError(f"no run of {against!r} to compare with; --against takes one of {known}")


def _cell(values: "Series", score: str, main: str) -> str:
    """``1.20 ± 0.30``, of a gain also its p."""
    in_units = main != "accuracy" and score in (main, "gain", "worst-decile")
    decimals = decimals_of(summarize(values).mean) if in_units else 2
    text = seeds_cell(values, decimals)
    if score != "gain":
        return text
    p = paired_t_pvalue(values.dropna())
    if math.isnan(p):
        return text
    return f"{text} (p {p:.2g})" if p < LEVEL else f"{text} n.s."


def _notes(meanings: Mapping[str, str]) -> str:
    notes = [f"{score}: {meaning}" for score, meaning in meanings.items()]
    if "gain" in meanings:
        notes.append(f"p: {TEST}; n.s.: p ≥ {LEVEL}")
    return "; ".join([*notes, "± standard deviation over seeds"])
