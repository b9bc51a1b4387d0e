"""The table at the end of `fedapps run`: a row per method."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clients.core.protocol import FEW_SAMPLES
from fedapps.common.tasks import AUTO, score_named
from fedapps.results.formats import (
    FAILED,
    TextTable,
    mean_cell,
    number_cell,
    seeds_cell,
    spread_cell,
    summarize,
)
from fedapps.results.runs import (
    MAIN,
    ROLES,
    SCORE_COLUMNS,
    at_saved_model,
    column,
    differing,
    federation_of,
    label_without,
    main_scores,
    other_rounds,
    score_keys,
)
from fedapps.settings.config import effective

if TYPE_CHECKING:
    from pandas import DataFrame


NOT_FINITE = "-not-finite-"  # in an evaluation's keys, between the group and the score
# What the columns of each main score hold.
MEANINGS = {"accuracy": "accuracy in %", "rmse": "RMSE in the labels' unit"}
# Scores beside the main ones, in the order of their columns.
FURTHER = ("train-r2", "novel-r2", "train-micro-f1", "novel-micro-f1", "train-macro-f1",
           "novel-macro-f1")  # fmt: skip


def results(runs: "DataFrame") -> TextTable:
    """A row per method; several seeds as mean ± standard deviation over seeds. A common setting in
    which runs differ has a column.

    The main score of each task has columns of its own. Columns that would be empty are left out:
    accuracies if no client has validation samples but F1 is known, and everything about novel
    clients if there are none."""
    settings = differing(runs)
    columns = _columns(runs, settings)
    over_seeds = runs.seed.nunique() > 1
    rows = []
    for label, group in runs.groupby("method", sort=False):
        cells = {"method": label_without(label, settings)}
        for key in settings:
            cells[key] = str(effective(group.config.iloc[0], key))
        evaluated = group[group.summary.notna()]
        if len(evaluated):
            cells |= _cells(evaluated, over_seeds)
        else:
            first_number = next(column for column in columns if column not in cells)
            cells[first_number] = FAILED
        rows.append([cells.get(column, "") for column in columns])
    notes = _notes(runs, columns, over_seeds)
    shown = [MEANINGS[name] for name in MAIN if SCORE_COLUMNS[f"train-{name}"].title in columns]
    meaning = "last round"
    if shown:
        meaning = f"{', '.join(shown)}, {_reported_round(runs)}"
    return TextTable(f"{federation_of(runs)}: {meaning}", columns, rows, "; ".join(notes))


def _reported_round(runs: "DataFrame") -> str:
    """The round that the scores belong to, in words."""
    of_last_round = reporting_last_round(runs)
    if of_last_round and set(of_last_round) == set(runs.method[runs.summary.notna()]):
        return "at the last round"
    best = "at the round that is best on validation"
    selected = {str(effective(config, "selection-metric")) for config in runs.config}
    if selected != {AUTO}:
        names = ["the main score" if name == AUTO else score_named(name).text for name in selected]
        best = f"{best} by {' or '.join(sorted(names))}"
    if not of_last_round:
        return best
    return f"{best}, or the last one ({', '.join(of_last_round)})"


def reporting_last_round(runs: "DataFrame") -> list[str]:
    """The methods with a run that reports its last round, not the best one on validation."""
    labels: dict[str, None] = {}
    for run in runs.dropna(subset="summary").itertuples():
        if run.summary.reports_last_round:
            labels[run.method] = None
    return list(labels)


def _columns(runs: "DataFrame", settings: Sequence[str]) -> list[str]:
    """The titles of the columns that are not empty."""
    has_f1 = _known(runs, "train-f1")
    columns = ["method"]
    columns += [key for key in settings if key != "rounds"]  # which every table has
    for name in main_scores(runs):
        if _known(runs, f"train-{name}") or not has_f1:
            columns.append(SCORE_COLUMNS[f"train-{name}"].title)
        if novel_clients(runs):
            columns.append(SCORE_COLUMNS[f"novel-{name}"].title)
    columns += [column(key).title for key in _further(runs)]
    if has_f1:
        columns += ["F1", "F1, users"]
    if runs.epsilon.notna().any():
        columns.append("ε")
    if runs.bound.notna().any():
        columns += ["êrr", "½ d̂", "êrr + ½ d̂"]
    columns += ["rounds", "seconds"]
    if runs.simulated.notna().any():
        columns.append("simulated s")
    return [*columns, "MB down", "MB up"]


def _known(runs: "DataFrame", key: str) -> bool:
    """Whether any of the runs has this score."""
    return bool(runs[f"best {key}"].notna().any())


def _further(runs: "DataFrame") -> list[str]:
    """The keys of the known scores beside the main ones: those of the tasks, and users' own."""
    own = [key for key in score_keys(runs) if key not in SCORE_COLUMNS]
    return [key for key in (*FURTHER, *own) if _known(runs, key)]


def _notes(runs: "DataFrame", columns: Sequence[str], over_seeds: bool) -> list[str]:
    """What the columns mean, and the conditions of the numbers."""
    notes = []
    if SCORE_COLUMNS["train-accuracy"].title in columns:
        notes.append("training clients: validation accuracy")
    elif SCORE_COLUMNS["train-rmse"].title in columns:
        notes.append("training clients: validation samples")
    if SCORE_COLUMNS["train-micro-f1"].title in columns:
        notes.append("accuracy of several labels: the share of samples whose labels are all right")
    if SCORE_COLUMNS["train-r2"].title in columns:
        notes.append("R²: over the samples of all clients together")
    has_novel = any(title.startswith("novel clients") for title in columns)
    if has_novel:
        learn = any(config.get("novel-shots") for config in runs.config)
        exception = " but those that they learn from" if learn else ""
        notes.append(f"novel clients: all their samples{exception}")
    notes += weights(runs)
    notes += few_samples(runs)
    notes += left_out_clients(runs)
    notes += failed_seeds(runs)
    if "F1" in columns:
        notes.append("F1 of test samples: mean over sub-populations; over users")
    if "ε" in columns:
        notes.append("ε (δ): spent in the whole run, each run by itself")
    notes += terms_of_privacy(runs)
    notes += lost_replies(runs)
    notes += late_replies(runs)
    notes += limited_replies(runs)
    notes += undone_rounds(runs)
    notes += at_saved_models(runs)
    if over_seeds:
        notes.append("± standard deviation over seeds")
    else:
        if has_novel:
            notes.append("± standard error over clients")
        notes.append(f"one seed ({runs.seed.iloc[0]}): no deviation over seeds")
    return [*notes, "MB per client and round"]


def novel_clients(runs: "DataFrame") -> bool:
    """Whether any of the runs has novel clients."""
    return any(float(config["train-fraction"]) < 1 for config in runs.config)


def weights(runs: "DataFrame") -> list[str]:
    """How means weigh clients, where it is not equally."""
    if all(effective(config, "average-over") == "clients" for config in runs.config):
        return []
    return ["average-over=samples: means weigh each client by its samples, standard errors do not"]


def few_samples(runs: "DataFrame") -> list[str]:
    """A warning where a novel client is scored on less than `FEW_SAMPLES` samples."""
    fewest = FEW_SAMPLES
    for summary in runs.summary.dropna():
        for client in summary.per_client.values():
            if client.role == "novel" and client.score is not None:
                fewest = min(fewest, client.examples)
    if fewest == FEW_SAMPLES:
        return []
    return [f"a novel client has only {fewest} samples to be scored on"]


def left_out_clients(runs: "DataFrame", round_: str = "best") -> list[str]:
    """By score and method, the number of clients that a mean lacks since they had no number for it,
    summed over seeds."""
    counts: dict[str, Counter[str]] = {}  # by the score's title and the method
    for run in runs.dropna(subset="summary").itertuples():
        evaluation = run.summary.last if round_ == "last" else run.summary
        for key, count in evaluation.evaluation.items():
            role, is_count, name = key.partition(NOT_FINITE)
            if is_count and count:
                title = column(f"{role}-{name}").title
                counts.setdefault(title, Counter())[run.method] += int(count)
    words = []
    for title, by_method in counts.items():
        methods = [f"{method} {count}" for method, count in by_method.items()]
        words.append(f"{title} ({', '.join(methods)})")
    if not words:
        return []
    return [f"clients without a number, left out of the mean: {', '.join(words)}"]


def failed_seeds(runs: "DataFrame") -> list[str]:
    """By method, how many of its runs failed, where others have a mean."""
    words = []
    for label, group in runs.groupby("method", sort=False):
        failed = int(group.summary.isna().sum())
        if 0 < failed < len(group):
            words.append(f"{label} {failed} of {len(group)}")
    return [f"runs that failed, left out of the means: {', '.join(words)}"] if words else []


def epsilon(runs: "DataFrame") -> str:
    """The largest ε(δ) of the runs; "TEST" if the noise follows from a seed."""
    private = runs.dropna(subset="epsilon")
    if private.empty:
        return "∞"
    test = " TEST" if (private.generator != "system").any() else ""
    return f"{private.epsilon.max():.2f} ({private.delta.iloc[0]:g}){test}"


def terms_of_privacy(runs: "DataFrame") -> list[str]:
    """What every ε covers, with the methods to which it applies."""
    groups = runs.dropna(subset="terms").groupby("terms", sort=False).method
    return [f"ε of {', '.join(methods.unique())}: {terms}" for terms, methods in groups]


def lost_replies(runs: "DataFrame") -> list[str]:
    """The number of dropped training replies by method, summed over seeds."""
    return _counts(runs, "dropped", "training replies dropped")


def late_replies(runs: "DataFrame") -> list[str]:
    """Late replies by method, summed over seeds: how many, used at which mean age, and dropped."""
    words = []
    for method, group in runs.dropna(subset="late").groupby("method", sort=False):
        if not group.late.sum():
            continue
        text = f"{method} {group.late.sum():.0f}"
        if group["late-used"].sum():
            age = (group["late-age"] * group["late-used"]).sum() / group["late-used"].sum()
            text += f", {group['late-used'].sum():.0f} used at a mean age of {age:.1f} rounds"
        if group["late-dropped"].sum():
            text += f", {group['late-dropped'].sum():.0f} dropped"
        words.append(text)
    return [f"late replies: {'; '.join(words)}"] if words else []


LIMITED = {
    "clipped": "training replies scaled down by a limit on their length",
    "recounted": "training replies that a limit counts with fewer samples",
}


def limited_replies(runs: "DataFrame") -> list[str]:
    """The number of replies that limits cut, by method, summed over seeds: a line a limit."""
    notes = []
    for name, meaning in LIMITED.items():
        notes += _counts(runs, name, meaning)
    return notes


def undone_rounds(runs: "DataFrame") -> list[str]:
    """The number of undone rounds by method, summed over seeds, and what an undone round means."""
    meaning = "rounds undone, as NaN or infinity would have come into the model"
    return _counts(runs, "undone", meaning)


def _counts(runs: "DataFrame", column: str, meaning: str) -> list[str]:
    """A note with a column's sum over seeds by method; none if all are 0 or unknown."""
    counts = runs.groupby("method", sort=False)[column].sum()
    by_method = [f"{method} {count:.0f}" for method, count in counts.items() if count]
    if not by_method:
        return []
    return [f"{meaning}: {', '.join(by_method)}"]


def at_saved_models(runs: "DataFrame") -> list[str]:
    """By method the training clients' main score at the round of the saved model, the mean over
    seeds, where they report another round."""
    words = []
    for method, group in runs.groupby("method", sort=False):
        done = [summary for summary in group.summary if summary is not None]
        if not any(map(other_rounds, done)):
            continue
        main = main_scores(group)[0]
        shown = SCORE_COLUMNS[f"train-{main}"]
        scores = [at_saved_model(summary).get(shown.key) for summary in done]
        known = [shown.score.shown(score) for score in scores if score is not None]
        if known:
            mean = sum(known) / len(known)
            words.append(f"{method} {number_cell(mean, shown.decimals(mean))}")
    if not words:
        return []
    return [f"training clients at the round of the saved model: {', '.join(words)}"]


def _cells(runs: "DataFrame", over_seeds: bool) -> dict[str, str]:
    """A method's cells by column, over its seeds."""
    cells: dict[str, str] = {}
    for name in main_scores(runs):
        for role in ROLES:
            cell = "cannot without labels"
            if role == "train" or _serves_novel(runs):
                cell = _main_cell(runs, name, role, over_seeds)
            cells[SCORE_COLUMNS[f"{role}-{name}"].title] = cell
    for key in _further(runs):
        shown = column(key)
        values = runs[f"best {key}"]
        cells[shown.title] = seeds_cell(values, shown.decimals(summarize(values).mean))
    fewest_and_most = sorted({runs.rounds.min(), runs.rounds.max()})
    return cells | {
        "F1": seeds_cell(runs["best train-f1"], 3),
        "F1, users": seeds_cell(runs["best train-f1-users"], 3),
        "ε": epsilon(runs),
        "êrr": mean_cell(runs["training-error"], 3),
        "½ d̂": mean_cell(runs["half-distance"], 3),
        "êrr + ½ d̂": mean_cell(runs.bound, 3),
        "rounds": "–".join(f"{rounds:.0f}" for rounds in fewest_and_most),
        "seconds": mean_cell(runs.seconds, 0),
        "simulated s": mean_cell(runs.simulated, 0),
        "MB down": mean_cell(runs.down, 3),
        "MB up": mean_cell(runs.up, 3),
    }


def _serves_novel(runs: "DataFrame") -> bool:
    """Whether the method or its runs have served novel clients; no foreign code is imported."""
    from fedapps.methods import METHODS

    entry = METHODS.get(runs.config.iloc[0]["method"])
    if entry is None:
        return True
    if entry.novel:
        return True
    novel_scores = {f"novel-{name}" for name in MAIN}
    return any(not novel_scores.isdisjoint(summary.evaluation) for summary in runs.summary)


def _main_cell(runs: "DataFrame", name: str, role: str, over_seeds: bool) -> str:
    """The main score `name` of a group of clients: mean ± standard deviation over seeds. In a table
    of a single seed, ± is the standard error over clients."""
    key = f"{role}-{name}"
    shown = SCORE_COLUMNS[key]
    values = runs[f"best {key}"]
    known = values.dropna()
    decimals = shown.decimals(summarize(values).mean)
    if over_seeds or len(known) != 1:
        return seeds_cell(values, decimals)
    standard_error = runs.summary[known.index[0]].evaluation.get(f"{role}-sem")
    if standard_error is None:
        return number_cell(known.iloc[0], decimals)
    return spread_cell(known.iloc[0], shown.score.shown(standard_error), decimals)
