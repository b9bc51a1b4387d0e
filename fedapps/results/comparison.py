"""Comparison of runs as in a paper's table: over seeds, over clients, with published values.

A line for each score and group of runs: mean ± deviation over seeds, the published value, the
difference to a reference with a paired test, and how unequal the clients are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapps.console import spreadsheet_cell
from fedapps.methods import METHODS
from fedapps.results.formats import TextTable
from fedapps.results.published import Published
from fedapps.results.runs import (
    F1,
    SCORES,
    check_round,
    clients_of,
    differing,
    federation_of,
    label_without,
    own_settings,
)
from fedapps.results.table import epsilon, lost_replies, terms_of_privacy
from fedapps.settings.config import defaults, effective
from partitions import RUN_SEED
from partitions.rules.registry import options_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

DISTILLS = "fedmd"  # it and its variants deal public samples, even if none are asked for
MIN_SEEDS = 5  # with fewer pairs no test is made: it could not decide anything
LEVEL = 0.05
TEST = f"Student's paired t test over {MIN_SEEDS} seeds or more, two-sided"
FEDERATION = {"dataset", "partition", "num-clients", "train-fraction", "seed"}
SHOTS = "novel-shots"
MEASURED = ["mean", "deviation_over_seeds", "seeds", "published"]
TESTED = ["difference_to_reference", "p"]
SPREADS = {
    "worst_client": "worst",
    "lowest_tenth": "lowest tenth",
    "deviation_over_clients": "deviation",
}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    `lines` has the columns of `as_csv`: the score, the settings in `by`, and the numbers, NaN if
    unknown; accuracies are in %, F1 lies in [0, 1]. `unscored` are runs without a line, such as
    private ones that are not evaluated."""

    lines: "DataFrame"
    runs: "DataFrame"
    unscored: "DataFrame"
    by: Sequence[str]
    against: str
    published: Published | None
    round: str


def compare(
    runs: "DataFrame",
    *,
    by: Sequence[str] = (),
    round_: str = "best",
    against: str = "",
    published: Published | None = None,
) -> Comparison:
    """Group the runs by settings; "method" is the method with its own settings.

    Without `by`: by method, and by common settings that are swept or that differ between runs.
    `against` is a value of the first setting in `by`, by default the first value. Raises ValueError
    for settings that no run has, and if a group would average over anything but seeds."""
    import pandas

    check_round(round_)
    runs = runs[runs.error == ""]
    by = list(dict.fromkeys(by or ["method", *swept(runs)]))
    for key in by:
        check_setting(runs, key)
    values = [[_value(run.method, run.config, key, by) for key in by] for run in runs.itertuples()]
    groups = pandas.DataFrame(values, runs.index, by, dtype=object)
    _check_groups(runs, groups)
    names = list(groups[by[0]].unique())
    if against and against not in names:
        raise ValueError(f"no {by[0]} {against!r} to compare with; there are {', '.join(names)}")
    against = against or next(iter(names), "")
    groups = groups.assign(split=[split_of(config) for config in runs.config])
    scores = pandas.concat(
        [groups.assign(score=score, value=runs[f"{round_} {score}"]) for score in SCORES]
    ).dropna(subset="value")
    rows = []
    for place, group in scores.groupby(["score", *by], sort=False):
        scored = runs.loc[group.index]
        numbers = [group.value.mean(), group.value.std(), len(group)]
        numbers += [published.of(scored, place[0]) if published else None, scored.epsilon.max()]
        rows.append([*place, *numbers, epsilon(scored)])
    lines = pandas.DataFrame(rows, columns=["score", *by, *MEASURED, "epsilon", "ε"])
    lines["published"] = lines.published.astype(float)
    block = lines.groupby(["score", *by[1:]])["mean"]
    lines["best"] = (block.transform("size") > 1) & (lines["mean"] == block.transform("max"))
    clients = clients_of(runs, round_)[["run", "client", "role", "accuracy"]].dropna()
    clients = clients.set_axis(["run", "client", "score", "value"], axis=1).join(groups, on="run")
    for more in (_paired_tests(scores, by, against), spreads(clients, ["score", *by])):
        lines = lines.join(more, on=["score", *by])
    unscored = runs.drop(scores.index.unique())
    return Comparison(lines, runs, unscored, by, against, published, round_)


def as_table(comparison: Comparison) -> TextTable:
    """The comparison as texts; empty columns are left out."""
    lines, unscored = list(comparison.lines.itertuples(index=False)), comparison.unscored
    columns: dict[str, list[str]] = {"score": [SCORES[line.score] for line in lines]}
    columns |= {key: list(comparison.lines[key]) for key in comparison.by}
    columns["mean"] = [_measured(line) for line in lines]
    columns["published"] = [number(line, line.published) for line in lines]
    columns["difference"] = [number(line, line.mean - line.published, sign=True) for line in lines]
    if comparison.lines[comparison.by[0]].nunique() > 1:
        columns[f"less {comparison.against}"] = [_judged(line) for line in lines]
    for name, title in SPREADS.items():
        columns[title] = [number(line, getattr(line, name)) for line in lines]
    columns["ε"] = list(comparison.lines["ε"])
    columns["seeds"] = [str(line.seeds) for line in lines]
    if not lines:
        columns = {"not evaluated": list(unscored.name)}
        columns["ε"] = [epsilon(unscored.loc[[index]]) for index in unscored.index]
    columns = {name: cells for name, cells in columns.items() if set(cells) - {"–", "∞"}}
    best = {(i, [*columns].index("mean")) for i, line in enumerate(lines) if line.best}
    return TextTable(
        f"{federation_of(comparison.runs)}, {comparison.round} round",
        list(columns),
        [list(row) for row in zip(*columns.values(), strict=True)],
        ". ".join(_notes(comparison, set(columns))),
        best,
    )


def side_by_side(
    comparison: Comparison, key: str, scores: Sequence[str] = tuple(SCORES)
) -> TextTable:
    """A column for each value of `key`, which must be in the comparison's `by`.

    A cell is mean ± deviation over seeds, ↑ or ↓ if it differs significantly from the reference in
    the same column, and the published value in brackets."""
    lines = comparison.lines[comparison.lines.score.isin(scores)]
    rest = [name for name in comparison.by if name != key]
    cells = [_cell(line) for line in lines.itertuples(index=False)]
    rows = lines.assign(cell=cells, score=lines.score.map(SCORES))
    both = rows.set_index(["score", *rest, key])[["cell", "best"]].unstack(sort=False)
    table = both.cell[sorted(both.cell.columns, key=order)].fillna("–")
    best = np.argwhere(both.best[table.columns].eq(True).to_numpy())
    notes = _notes(comparison, set())
    if lines.p.notna().any():
        notes.append(
            f"↑, ↓: more, less than {comparison.against} of the same column; {TEST}, p < {LEVEL}, "
            "not corrected for the number of cells"
        )
    if lines.published.notna().any():
        notes.append("in brackets: published")
    if key == SHOTS:
        notes.append("clients that show labels are scored on their other samples")
    return TextTable(
        f"{federation_of(comparison.runs)}, {comparison.round} round, by {key}",
        ["score", *rest, *(f"{key} {value}" for value in table.columns)],
        table.reset_index().to_numpy().tolist(),
        ". ".join(notes),
        {(int(row), 1 + len(rest) + int(column)) for row, column in best},
    )


def as_csv(comparison: Comparison) -> str:
    """The numbers unrounded, a column each; no name is a formula to a spreadsheet."""
    columns = ["score", *comparison.by, *MEASURED, *TESTED, "epsilon", *SPREADS]
    lines = comparison.lines[columns]
    lines = lines.assign(**{key: lines[key].map(spreadsheet_cell) for key in comparison.by})
    return lines.rename(columns=spreadsheet_cell).to_csv(index=False, lineterminator="\n")


def several(runs: "DataFrame", key: str) -> bool:
    """Whether the runs differ in a setting."""
    return len({str(effective(config, key)) for config in runs[runs.error == ""].config}) > 1


def swept(runs: "DataFrame") -> list[str]:
    """The settings of the federation in the runs' labels, and other common ones that differ."""
    words = dict.fromkeys(key for label in runs.method for key in own_settings(label))
    known = {*FEDERATION, *differing(runs)}
    return [key for key in words if key in known or key.startswith("partition.")]


def order(value: str) -> tuple[bool, Any]:
    """Sorts the values of a setting: numbers by size, then words."""
    try:
        return False, float(value)
    except ValueError:
        return True, value


def number(line: Any, value: float, *, sign: bool = False) -> str:
    """A value of the line's score: accuracies with two digits, F1 with three; – for NaN."""
    if math.isnan(value):
        return "–"
    digits = 3 if line.score in F1 else 2
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def check_setting(runs: "DataFrame", key: str, option: str = "--by") -> None:
    """Raise ValueError with the nearest names if `key` is neither "method" nor a setting of any of
    the runs. `option` is where it was named."""
    if key == "method" or any(effective(config, key) is not None for config in runs.config):
        return
    known = {*(name for config in runs.config for name in config), "method"}
    near = get_close_matches(key, sorted(known), cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}?" if near else "config.toml has their names"
    raise ValueError(f"no run has a setting {key!r}; {option} takes method and settings: {meant}")


def _value(label: str, config: Mapping[str, Any], key: str, keys: Iterable[str]) -> str:
    """A run's value of a setting; of "method" its label without the other `keys`."""
    if key == "method":
        return label_without(label, keys)
    value = effective(config, key)
    return "–" if value is None else str(value)  # a setting of another method


def _check_groups(runs: "DataFrame", groups: "DataFrame") -> None:
    """Raise ValueError if a group holds two runs of one seed, or runs of several methods."""
    twice = groups.assign(seed_=runs.seed).duplicated()
    labels = runs.method.map(lambda label: label_without(label, groups.columns))
    mixed = groups.assign(label_=labels).drop_duplicates().drop(columns="label_").duplicated()
    if twice.any() or mixed.any():
        group = groups[twice].iloc[0] if twice.any() else groups.loc[mixed[mixed].index[0]]
        same = runs[(groups == group).all(axis=1)]
        words = {key for label in same.method for key in own_settings(label)}
        words |= {config["method"] for config in same.config}
        raise ValueError(
            f"{', '.join(group)}: more than one run of a seed, or more than one method; add to "
            f"--by method or what differs: {', '.join(sorted(words))}"
        )


def split_of(config: Mapping[str, Any]) -> str:
    """What two runs must share to have the same clients, and the seed."""
    config, method = defaults() | dict(config), str(config["method"])
    if method in METHODS.known() and DISTILLS in (method, METHODS[method].extends):
        config["partition.public-samples"] = config["partition.public-samples"] or "default"
    keys = {*FEDERATION, *(f"partition.{name}" for name in options_of(config))}
    shared = {key: value for key, value in config.items() if key in keys}
    data_seed = config["data-seed"]
    shared["data-seed"] = config["seed"] if data_seed == RUN_SEED else data_seed
    return repr(sorted(shared.items()))


def spreads(clients: "DataFrame", index: list[str]) -> "DataFrame":
    """Worst client, mean of the lowest tenth, deviation over clients: means over seeds."""

    def lowest_tenth(values: "Series") -> float:
        return float(values.nsmallest(math.ceil(len(values) / 10)).mean())

    by_seed = clients.groupby([*index, "split"]).value.agg(["min", lowest_tenth, "std"])
    return by_seed.fillna(0.0).set_axis([*SPREADS], axis=1).groupby(index).mean()


def _paired_tests(scores: "DataFrame", by: list[str], against: str) -> "DataFrame":
    """Each line's mean difference to the reference on the same splits, and the p that its sign is
    chance: Student's paired t test over seeds, NaN for fewer than `MIN_SEEDS`.

    Clients of one training run share its model, so a test over them would say nothing of another
    training run."""
    import pandas

    first, *rest = by
    reference = scores[first] == against
    keys = ("score", *rest, "split")
    both = scores[~reference].merge(scores[reference], on=keys, suffixes=("", "_reference"))
    both = both.assign(difference=both.value - both.value_reference)
    by_seed = both.groupby(["score", *by]).difference

    means, chances = by_seed.mean(), by_seed.agg(paired_t_pvalue)
    return pandas.DataFrame({"difference_to_reference": means, "p": chances}, dtype=float)


def paired_t_pvalue(differences: "Series") -> float:
    """The p of `TEST` for the differences of seeds: that their mean is 0; NaN for too few."""
    from scipy import stats

    if len(differences) < MIN_SEEDS:
        return math.nan
    if differences.nunique() == 1:  # no variance: the test is not defined
        return 1.0 if differences.iloc[0] == 0 else 0.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def _notes(comparison: Comparison, columns: set[str]) -> list[str]:
    """What the shown `columns` mean, and the conditions of the numbers."""
    runs, published = comparison.runs, comparison.published
    notes = ["accuracy in %, F1 in [0, 1]"]
    if (comparison.lines.seeds > 1).any():
        notes.append("± standard deviation over seeds")
    if f"less {comparison.against}" in columns:
        notes.append(
            f"less {comparison.against}: mean difference on the same splits; {TEST}, n.s.: p ≥ "
            f"{LEVEL}, not corrected for the number of rows"
        )
    if "worst" in columns:
        notes.append("worst, lowest tenth, deviation: over clients, mean over seeds")
    for run in comparison.unscored.itertuples():
        spent = "" if math.isnan(run.epsilon) else f", ε = {epsilon(runs.loc[[run.Index]])}"
        notes.append(f"not evaluated: {run.name}{spent}")
    notes += terms_of_privacy(runs) + lost_replies(runs)
    if published and "published" in columns and (other := published.deviations(runs)):
        differ = ", ".join(
            f"{key} {value} (there {published.settings[key]})"
            for key, value in sorted(other.items())
        )
        notes.append(f"published under other settings: {differ}")
    return notes


def _measured(line: Any) -> str:
    """``70.00 ± 1.00``; without deviation if there is one seed."""
    deviation = number(line, line.deviation_over_seeds)
    return number(line, line.mean) + f" ± {deviation}" * (deviation != "–")


def _judged(line: Any) -> str:
    """``+3.50 (p 0.03)`` or ``+0.50 n.s.``."""
    difference = number(line, line.difference_to_reference, sign=True)
    if math.isnan(line.p):
        return difference
    if line.p >= LEVEL:
        return f"{difference} n.s."
    return f"{difference} (p {line.p:.1g})" if line.p >= 0.001 else f"{difference} (p < 0.001)"


def _cell(line: Any) -> str:
    """``70.00 ± 1.00 ↑ (68.00)``."""
    words = [_measured(line)]
    if line.p < LEVEL and line.difference_to_reference:
        words.append("↑" if line.difference_to_reference > 0 else "↓")
    if not math.isnan(line.published):
        words.append(f"({number(line, line.published)})")
    return " ".join(words)
