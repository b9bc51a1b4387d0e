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
from fedapps.results.formats import UNKNOWN, TextTable, number_cell, spread_cell, summarize
from fedapps.results.published import Published
from fedapps.results.runs import (
    check_round,
    clients_of,
    column,
    differing,
    federation_of,
    label_without,
    own_settings,
    score_keys,
)
from fedapps.results.table import (
    epsilon,
    left_out_clients,
    lost_replies,
    reporting_last_round,
    terms_of_privacy,
    weights,
)
from fedapps.settings.config import defaults, effective
from partitions import RUN_SEED
from partitions.rules.registry import options_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

DISTILLS = "fedmd"  # with it and its variants, partitions have public samples by default
MIN_SEEDS = 5  # fewer pairs are not tested: the test would have no power
LEVEL = 0.05
TEST = f"Student's paired t test over {MIN_SEEDS} seeds or more, two-sided"
BEST = f"better than each other value that it is compared with; {TEST}, p < {LEVEL}"
FEDERATION = {"dataset", "partition", "num-clients", "train-fraction", "seed"}
SHOTS = "novel-shots"
MEASURED = ["mean", "deviation_over_seeds", "seeds", "published"]
TESTED = ["difference_to_reference", "p"]
EMPTY = {UNKNOWN, "∞"}  # cells; a column that has no others is not shown
SPREADS = {
    "worst_client": "worst",
    "lowest_tenth": "lowest tenth",
    "deviation_over_clients": "deviation",
}


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    `lines` has the columns of `as_csv`: the score, the settings in `by`, and the numbers, NaN if
    unknown; accuracies are in %, F1 lies in [0, 1], errors are in the labels' unit. `unscored` are
    runs without a line, such as private ones that are not evaluated."""

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

    check_round(round_)
    runs = runs[runs.error == ""]
    by = list(dict.fromkeys(by or ["method", *swept(runs)]))
    for key in by:
        check_setting(runs, key)
    groups = _settings_of(runs, by)
    _check_groups(runs, groups)
    references = list(groups[by[0]].unique())
    if against and against not in references:
        known = ", ".join(references)
        raise ValueError(f"no {by[0]} {against!r} to compare with; there are {known}")
    if not against and references:
        against = references[0]
    groups = groups.assign(split=[split_of(config) for config in runs.config])
    scores = _scores(runs, groups, round_)
    place = ["score", *by]
    lines = _measurements(runs, scores, place, published)
    lines["best"] = _best(lines, scores, by)
    lines = lines.join(_paired_tests(scores, by, against), on=place)
    lines = lines.join(spreads(_client_scores(runs, groups, round_), place), on=place)
    unscored = runs.drop(scores.index.unique())
    return Comparison(lines, runs, unscored, by, against, published, round_)


def _settings_of(runs: "DataFrame", keys: list[str]) -> "DataFrame":
    """A row per run, its settings in a column each."""
    from pandas import DataFrame

    columns: dict[str, list[str]] = {}
    for key in keys:
        columns[key] = []
        for label, config in zip(runs.method, runs.config, strict=True):
            columns[key].append(_value(label, config, key, keys))
    return DataFrame(columns, runs.index, dtype=object)


def _scores(runs: "DataFrame", groups: "DataFrame", round_: str) -> "DataFrame":
    """A row per run and known score: the columns of `groups`, score and value."""
    import pandas

    scores = []
    for score in score_keys(runs):
        scores.append(groups.assign(score=score, value=runs[f"{round_} {score}"]))
    return pandas.concat(scores).dropna(subset="value")


def _measurements(
    runs: "DataFrame", scores: "DataFrame", place: list[str], published: Published | None
) -> "DataFrame":
    """A row per score and group of runs: the columns of `place`, `MEASURED`, and ε twice, as a
    number and as a text."""
    from pandas import DataFrame

    rows = []
    for values_of_place, group in scores.groupby(place, sort=False):
        scored = runs.loc[group.index]
        row = dict(zip(place, values_of_place, strict=True))
        row["mean"], row["deviation_over_seeds"] = summarize(group.value)
        row["seeds"] = len(group)
        row["published"] = published.of(scored, row["score"]) if published else None
        row["epsilon"] = scored.epsilon.max()
        row["ε"] = epsilon(scored)
        rows.append(row)
    lines = DataFrame(rows, columns=[*place, *MEASURED, "epsilon", "ε"])
    lines["published"] = lines.published.astype(float)
    return lines


def _client_scores(runs: "DataFrame", groups: "DataFrame", round_: str) -> "DataFrame":
    """A row per run and client with a main score: the columns of `groups`, score and value."""
    clients = clients_of(runs, round_)[["run", "score", "value"]].dropna()
    return clients.join(groups, on="run")


def as_table(comparison: Comparison) -> TextTable:
    """The comparison as texts; empty columns are left out."""
    lines = list(comparison.lines.itertuples(index=False))
    columns = _columns(comparison, lines) if lines else _not_evaluated(comparison.unscored)
    shown = {title: cells for title, cells in columns.items() if set(cells) - EMPTY}
    best: set[tuple[int, int]] = set()
    for row, line in enumerate(lines):
        if line.best:
            best.add((row, list(shown).index("mean")))
    return TextTable(
        f"{federation_of(comparison.runs)}, {comparison.round} round",
        list(shown),
        [list(row) for row in zip(*shown.values(), strict=True)],
        ". ".join(_notes(comparison, set(shown))),
        best,
        BEST,
    )


def _columns(comparison: Comparison, lines: Sequence[Any]) -> dict[str, list[str]]:
    """The columns of `as_table` by title, a cell for each line."""
    table = comparison.lines
    columns: dict[str, list[str]] = {"score": [column(line.score).title for line in lines]}
    for key in comparison.by:
        columns[key] = list(table[key])
    columns["mean"] = [_measured(line) for line in lines]
    columns["published"] = [number(line, line.published) for line in lines]
    columns["difference"] = [number(line, line.mean - line.published, sign=True) for line in lines]
    is_compared = table[comparison.by[0]].nunique() > 1  # a single method is not
    if is_compared:
        columns[f"less {comparison.against}"] = [_judged(line) for line in lines]
    for name, title in spread_titles(comparison).items():
        columns[title] = [number(line, getattr(line, name)) for line in lines]
    columns["ε"] = list(table["ε"])
    columns["seeds"] = [str(line.seeds) for line in lines]
    return columns


def spread_titles(comparison: Comparison) -> dict[str, str]:
    """The titles of `SPREADS`: where a line is an error, the unlucky clients are the highest."""
    if all(sign_of(score) > 0 for score in comparison.lines.score):
        return SPREADS
    return SPREADS | {"lowest_tenth": "worst tenth"}


def _not_evaluated(runs: "DataFrame") -> dict[str, list[str]]:
    """The columns of `as_table` if no run has a score."""
    spent = [epsilon(runs.loc[[index]]) for index in runs.index]
    return {"not evaluated": list(runs.name), "ε": spent}


def side_by_side(
    comparison: Comparison, key: str, scores: Sequence[str] | None = None
) -> TextTable:
    """A column for each value of `key`, which must be in the comparison's `by`; lines of these
    scores alone, if they are given.

    A cell is mean ± deviation over seeds, ↑ or ↓ if it differs significantly from the reference in
    the same column, and the published value in brackets."""
    lines = comparison.lines
    if scores is not None:
        lines = lines[lines.score.isin(scores)]
    rest = [name for name in comparison.by if name != key]
    texts = [_cell(line) for line in lines.itertuples(index=False)]
    titles = [column(score).title for score in lines.score]
    cells = lines.assign(cell=texts, score=titles)
    wide = cells.set_index(["score", *rest, key])[["cell", "best"]].unstack(sort=False)
    values = sorted(wide.cell.columns, key=order)
    table = wide.cell[values].fillna(UNKNOWN)
    columns_before = 1 + len(rest)  # the score and the other settings
    best: set[tuple[int, int]] = set()
    for row, place in np.argwhere(wide.best[values].eq(True).to_numpy()):
        best.add((int(row), columns_before + int(place)))
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
        ["score", *rest, *(f"{key} {value}" for value in values)],
        table.reset_index().to_numpy().tolist(),
        ". ".join(notes),
        best,
        BEST,
    )


def as_csv(comparison: Comparison) -> str:
    """The numbers unrounded, a column each; no name is a formula to a spreadsheet."""
    columns = ["score", *comparison.by, *MEASURED, *TESTED, "epsilon", *SPREADS]
    lines = comparison.lines[columns]
    lines = lines.assign(**{key: lines[key].map(spreadsheet_cell) for key in comparison.by})
    return lines.rename(columns=spreadsheet_cell).to_csv(index=False, lineterminator="\n")


def several(runs: "DataFrame", key: str) -> bool:
    """Whether the runs differ in a setting."""
    succeeded = runs[runs.error == ""]
    values = {str(effective(config, key)) for config in succeeded.config}
    return len(values) > 1


def swept(runs: "DataFrame") -> list[str]:
    """The settings of the federation in the runs' labels, and other common ones that differ."""
    keys: dict[str, None] = {}
    for label in runs.method:
        keys |= dict.fromkeys(own_settings(label))
    comparable = {*FEDERATION, *differing(runs)}
    return [key for key in keys if key in comparable or key.startswith("partition.")]


def order(value: str) -> tuple[bool, Any]:
    """Sorts the values of a setting: numbers by size, then words."""
    try:
        return False, float(value)
    except ValueError:
        return True, value


def number(line: Any, value: float, *, sign: bool = False) -> str:
    """A value of the line's score, with the decimals of its mean; – for NaN."""
    return number_cell(value, digits_of(line), signed=sign)


def digits_of(line: Any) -> int:
    """The decimals of a line: two of accuracies, three of F1, four digits of errors."""
    return column(line.score).decimals(line.mean)


def sign_of(score: str) -> int:
    """1 if more of a score is better, −1 if less is."""
    return 1 if column(score).score.higher_is_better else -1


def check_setting(runs: "DataFrame", key: str, option: str = "--by") -> None:
    """Raise ValueError with the nearest names if `key` is neither "method" nor a setting of any of
    the runs. `option` is where it was named."""
    if key == "method" or any(effective(config, key) is not None for config in runs.config):
        return
    known = {"method"}.union(*runs.config)
    near = get_close_matches(key, sorted(known), cutoff=0.5)
    hint = "config.toml has their names"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    raise ValueError(f"no run has a setting {key!r}; {option} takes method and settings: {hint}")


def _value(label: str, config: Mapping[str, Any], key: str, keys: Iterable[str]) -> str:
    """A run's value of a setting; of "method" its label without the other `keys`."""
    if key == "method":
        return label_without(label, keys)
    value = effective(config, key)
    if value is None:  # a setting of another method
        return UNKNOWN
    return str(value)


def _check_groups(runs: "DataFrame", groups: "DataFrame") -> None:
    """Raise ValueError if a group holds two runs of one seed, or runs of several methods."""
    same_seed = groups.assign(seed_=runs.seed).duplicated()
    # A line for each method of a group: a group that occurs twice has several.
    labels = runs.method.map(lambda label: label_without(label, groups.columns))
    methods = groups.assign(label_=labels).drop_duplicates()
    same_group = methods.drop(columns="label_").duplicated()
    if same_seed.any():
        group = groups[same_seed].iloc[0]
    elif same_group.any():
        group = groups.loc[same_group[same_group].index[0]]
    else:
        return
    mixed = runs[(groups == group).all(axis=1)]
    differ = {config["method"] for config in mixed.config}
    for label in mixed.method:
        differ |= own_settings(label).keys()
    raise ValueError(
        f"{', '.join(group)}: more than one run of a seed, or more than one method; add to "
        f"--by method or what differs: {', '.join(sorted(differ))}"
    )


def split_of(config: Mapping[str, Any]) -> str:
    """What two runs must share to have the same clients, and the seed."""
    config = defaults() | dict(config)
    method = str(config["method"])
    distills = method in METHODS.known() and DISTILLS in (method, METHODS[method].extends)
    if distills and not config["partition.public-samples"]:
        config["partition.public-samples"] = "default"
    keys = set(FEDERATION)
    keys |= {f"partition.{name}" for name in options_of(config)}
    shared = {key: value for key, value in config.items() if key in keys}
    data_seed = config["data-seed"]
    if data_seed == RUN_SEED:
        data_seed = config["seed"]
    shared["data-seed"] = data_seed
    return repr(sorted(shared.items()))


def spreads(clients: "DataFrame", index: list[str]) -> "DataFrame":
    """Worst client, mean of the lowest tenth, deviation over clients: means over seeds. For an
    error, where lower is better, it is the highest tenth."""

    def lowest_tenth(values: "Series") -> float:
        count = math.ceil(len(values) / 10)
        return float(values.nsmallest(count).mean())

    signs = clients.score.map(sign_of).astype(float)
    clients = clients.assign(value=signs * clients.value, sign=signs)
    groups = clients.groupby([*index, "split"])
    by_seed = groups.value.agg(["min", lowest_tenth, "std"])
    by_seed = by_seed.fillna(0.0)  # the deviation of a single client
    sign = groups.sign.first()
    for name in ("min", "lowest_tenth"):
        by_seed[name] = by_seed[name] * sign
    by_seed = by_seed.set_axis([*SPREADS], axis=1)
    return by_seed.groupby(index).mean()


def _paired_tests(scores: "DataFrame", by: list[str], against: str) -> "DataFrame":
    """Each line's mean difference to the reference on the same splits, and its p by Student's
    paired t test over seeds: NaN for fewer than `MIN_SEEDS`.

    Clients of one training run share its model, so a test over them would say nothing of another
    training run."""
    import pandas

    first, *rest = by
    reference = scores[first] == against
    keys = ("score", *rest, "split")
    both = scores[~reference].merge(scores[reference], on=keys, suffixes=("", "_reference"))
    both = both.assign(difference=both.value - both.value_reference)
    by_seed = both.groupby(["score", *by]).difference

    columns = {"difference_to_reference": by_seed.mean(), "p": by_seed.agg(paired_t_pvalue)}
    return pandas.DataFrame(columns, dtype=float)


def _best(lines: "DataFrame", scores: "DataFrame", by: list[str]) -> list[bool]:
    """Whether a line is better than each other line that differs in the first setting alone, and
    `TEST` confirms it against each of them."""
    first, *rest = by
    block_keys = ["score", *rest]
    confirmed: dict[tuple[str, ...], bool] = {}  # by block and value of the first setting
    for block, group in scores.groupby(block_keys, sort=False):
        sign = sign_of(group.score.iloc[0])
        by_value = {value: rows.set_index("split").value for value, rows in group.groupby(first)}
        for value, values in by_value.items():
            leads = []  # over each rival
            for rival, rival_values in by_value.items():
                if rival != value:
                    leads.append(_leads(sign * values, sign * rival_values))
            confirmed[*block, str(value)] = bool(leads) and all(leads)
    places = lines[[*block_keys, first]].itertuples(index=False, name=None)
    return [confirmed[place] for place in places]


def _leads(values: "Series", others: "Series") -> bool:
    """Whether values by split are higher than others on the same splits, by `TEST`."""
    differences = (values - others).dropna()
    return bool(differences.mean() > 0 and paired_t_pvalue(differences) < LEVEL)


def paired_t_pvalue(differences: "Series") -> float:
    """The p of `TEST`, by which the mean of the seeds' differences is 0. NaN for fewer than
    `MIN_SEEDS`."""
    from scipy import stats

    if len(differences) < MIN_SEEDS:
        return math.nan
    if differences.nunique() == 1:  # no variance: the test is not defined
        return 1.0 if differences.iloc[0] == 0 else 0.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def _notes(comparison: Comparison, columns: set[str]) -> list[str]:
    """What the shown `columns` mean, and the conditions of the numbers."""
    runs = comparison.runs
    published = comparison.published
    shown = [column(score).score for score in comparison.lines.score.unique()]
    errors = any(score.in_units for score in shown)
    notes = []
    if not errors or any(score.in_percent for score in shown):
        notes.append("accuracy in %, F1 in [0, 1]")
    if errors:
        notes.append("errors in the labels' unit: less is better")
    of_last_round = reporting_last_round(runs)
    if comparison.round == "best" and of_last_round:
        notes.append(f"the last round in place of the best one: {', '.join(of_last_round)}")
    if (comparison.lines.seeds > 1).any():
        notes.append("± standard deviation over seeds")
    if f"less {comparison.against}" in columns:
        notes.append(
            f"less {comparison.against}: mean difference on the same splits; {TEST}, n.s.: p ≥ "
            f"{LEVEL}, not corrected for the number of rows"
        )
    if "worst" in columns:
        titles = ", ".join(spread_titles(comparison).values())
        notes.append(f"{titles}: over clients, mean over seeds")
    for run in comparison.unscored.itertuples():
        spent = ""
        if not math.isnan(run.epsilon):
            spent = f", ε = {epsilon(runs.loc[[run.Index]])}"
        notes.append(f"not evaluated: {run.name}{spent}")
    notes += weights(runs)
    notes += left_out_clients(runs, comparison.round)
    notes += terms_of_privacy(runs)
    notes += lost_replies(runs)
    if published and "published" in columns:
        deviations = []
        for key, value in sorted(published.deviations(runs).items()):
            deviations.append(f"{key} {value} (there {published.settings[key]})")
        if deviations:
            notes.append(f"published under other settings: {', '.join(deviations)}")
    return notes


def _measured(line: Any) -> str:
    """``70.00 ± 1.00``; without deviation if there is one seed."""
    return spread_cell(line.mean, line.deviation_over_seeds, digits_of(line))


def _judged(line: Any) -> str:
    """``+3.50 (p 0.03)`` or ``+0.50 n.s.``."""
    difference = number(line, line.difference_to_reference, sign=True)
    if math.isnan(line.p):
        return difference
    if line.p >= LEVEL:
        return f"{difference} n.s."
    if line.p < 0.001:
        return f"{difference} (p < 0.001)"
    return f"{difference} (p {line.p:.1g})"


def _cell(line: Any) -> str:
    """``70.00 ± 1.00 ↑ (68.00)``."""
    words = [_measured(line)]
    if line.p < LEVEL and line.difference_to_reference:
        words.append("↑" if line.difference_to_reference > 0 else "↓")
    if not math.isnan(line.published):
        words.append(f"({number(line, line.published)})")
    return " ".join(words)
