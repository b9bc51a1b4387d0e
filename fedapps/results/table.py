"""The table at the end of `fedapps run`: a row per method."""

from typing import TYPE_CHECKING

from clients.core.protocol import FEW_SAMPLES
from fedapps.results.formats import FAILED, TextTable
from fedapps.results.runs import (
    at_saved_model,
    differing,
    federation_of,
    label_without,
    other_rounds,
)
from fedapps.settings.config import effective

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def results(runs: "DataFrame") -> TextTable:
    """A row per method; several seeds as mean ± standard deviation over seeds. A common setting in
    which runs differ has a column.

    Columns that would be empty are left out: accuracies if no client has validation samples but F1
    is known, and everything about novel clients if there are none."""
    scored = bool(runs["best f1"].notna().any())
    validated = bool(runs["best train"].notna().any()) or not scored
    joined = novel_clients(runs)
    apart = differing(runs)
    columns = ["method", *(key for key in apart if key != "rounds")]  # which has a column below
    columns += [*["training clients"] * validated, *["novel clients"] * joined]
    columns += [*["F1", "F1, users"] * scored, *["ε"] * bool(runs.epsilon.notna().any())]
    columns += ["êrr", "½ d̂", "êrr + ½ d̂"] * bool(runs.bound.notna().any())
    columns += ["rounds", "seconds", "MB down", "MB up"]
    spread = runs.seed.nunique() > 1
    rows = []
    for label, group in runs.groupby("method", sort=False):
        config = group.config.iloc[0]
        cells = {"method": label_without(label, apart)}
        cells |= {key: str(effective(config, key)) for key in apart}
        if len(done := group[group.summary.notna()]):
            cells |= _cells(done, spread)
        else:
            cells[columns[len(cells)]] = FAILED
        rows.append([cells.get(column, "") for column in columns])
    few = any(config.get("novel-shots") for config in runs.config)
    notes = [
        *["training clients: validation accuracy"] * validated,
        *[f"novel clients: all their samples{' but those that they learn from' * few}"] * joined,
        *few_samples(runs),
        *["F1 of test samples: mean over sub-populations; over users"] * scored,
        *["ε (δ): spent in the whole run, each run by itself"] * ("ε" in columns),
        *terms_of_privacy(runs),
        *lost_replies(runs),
        *limited_replies(runs),
        *undone_rounds(runs),
        *at_saved_models(runs),
        *["± standard deviation over seeds"] * spread,
        *["± standard error over clients"] * (joined and not spread),
        "MB per client and round",
    ]
    what = "accuracy in %, at the round that is best on validation" if validated else "last round"
    return TextTable(f"{federation_of(runs)}: {what}", columns, rows, "; ".join(notes))


def novel_clients(runs: "DataFrame") -> bool:
    """Whether any of the runs has novel clients."""
    return any(float(config["train-fraction"]) < 1 for config in runs.config)


def few_samples(runs: "DataFrame") -> list[str]:
    """A warning where a novel client is scored on less than `FEW_SAMPLES` samples."""
    scored = [c for s in runs.summary.dropna() for c in s.per_client.values() if c.role == "novel"]
    least = min((c.examples for c in scored if c.accuracy is not None), default=FEW_SAMPLES)
    return [f"a novel client has only {least} samples to be scored on"] * (least < FEW_SAMPLES)


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
    counts = runs.groupby("method", sort=False).dropped.sum()
    words = [f"{method} {count:.0f}" for method, count in counts.items() if count]
    return [f"training replies dropped: {', '.join(words)}"] if words else []


LIMITED = {
    "clipped": "training replies scaled down by a limit on their length",
    "recounted": "training replies that a limit counts with fewer samples",
}


def limited_replies(runs: "DataFrame") -> list[str]:
    """The number of replies that limits cut, by method, summed over seeds: a line a limit."""
    notes = []
    for column, meaning in LIMITED.items():
        counts = runs.groupby("method", sort=False)[column].sum()
        words = [f"{method} {count:.0f}" for method, count in counts.items() if count]
        if words:
            notes.append(f"{meaning}: {', '.join(words)}")
    return notes


def undone_rounds(runs: "DataFrame") -> list[str]:
    """The number of undone rounds by method, summed over seeds, and what an undone round means."""
    counts = runs.groupby("method", sort=False).undone.sum()
    words = [f"{method} {count:.0f}" for method, count in counts.items() if count]
    if not words:
        return []
    return [f"rounds undone, as NaN or infinity would have come into the model: {', '.join(words)}"]


def at_saved_models(runs: "DataFrame") -> list[str]:
    """By method the training clients' accuracy at the round of the saved model, the mean over
    seeds, where they report another round."""
    words = []
    for method, group in runs.groupby("method", sort=False):
        done = [summary for summary in group.summary if summary is not None]
        if not any(map(other_rounds, done)):
            continue
        scores = [at_saved_model(summary).get("accuracy") for summary in done]
        known = [100 * score for score in scores if score is not None]
        if known:
            words.append(f"{method} {sum(known) / len(known):.2f}")
    if not words:
        return []
    return [f"training clients at the round of the saved model: {', '.join(words)}"]


def _cells(runs: "DataFrame", spread: bool) -> dict[str, str]:
    return {
        "training clients": _accuracy(runs, "train", spread),
        "novel clients": _accuracy(runs, "novel", spread)
        if _serves_novel(runs)
        else "cannot without labels",
        "F1": _mean(runs["best f1"], 3, spread=True),
        "F1, users": _mean(runs["best f1-users"], 3, spread=True),
        "ε": epsilon(runs),
        "êrr": _mean(runs.training_error, 3),
        "½ d̂": _mean(runs.half_distance, 3),
        "êrr + ½ d̂": _mean(runs.bound, 3),
        "rounds": "–".join(f"{n:.0f}" for n in sorted({runs.rounds.min(), runs.rounds.max()})),
        "seconds": _mean(runs.seconds, 0),
        "MB down": _mean(runs.down, 3),
        "MB up": _mean(runs.up, 3),
    }


def _serves_novel(runs: "DataFrame") -> bool:
    """Whether the method or its runs have served novel clients; no foreign code is imported."""
    from fedapps.methods import METHODS

    entry = METHODS.get(runs.config.iloc[0]["method"])
    return entry is None or bool(entry.novel) or any(s.novel for s in runs.summary)


def _accuracy(runs: "DataFrame", group: str, spread: bool) -> str:
    """Mean ± standard deviation over seeds; in a table of one seed, without `spread`, ± the
    standard error over clients."""
    values = runs[f"best {group}"].dropna()
    if len(values) == 1 and not spread:
        sem = (getattr(runs.summary[values.index[0]], group) or {}).get("sem")
        return f"{values.iloc[0]:.2f}" + (f" ± {100 * sem:.2f}" if sem is not None else "")
    return _mean(values, 2, spread=True)


def _mean(values: "Series", digits: int, *, spread: bool = False) -> str:
    """The mean over seeds; – if there are no values, as in private runs."""
    values = values.dropna()
    if values.empty:
        return "–"
    deviation = f" ± {values.std():.{digits}f}" if spread and len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}"
