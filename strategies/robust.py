"""Means of the clients' models that a minority of liars cannot move far, by Flower's functions.

Median and trimmed mean coordinate by coordinate (Yin et al., ICML 2018); Krum (Blanchard et al.,
NeurIPS 2017) in its multi-Krum form: the plain mean of the n − f updates that are nearest to their
neighbours, f = ⌊fraction · n⌋ of n being presumed liars. All count clients alike, since sample
counts are the clients' word."""

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from clients.arrays import Arrays, as_type, to_record

Mean = Callable[[Sequence[Arrays], float], Arrays]


def median(changes: Sequence[Arrays], fraction: float) -> Arrays:
    """The median of every entry; it bears any minority of liars."""
    return {n: np.median([one[n] for one in changes], axis=0) for n in changes[0]}


def trimmed_mean(changes: Sequence[Arrays], fraction: float) -> Arrays:
    """The mean of every entry without the ⌊fraction · n⌋ largest and as many least."""
    return {n: trim_mean(np.stack([one[n] for one in changes]), fraction) for n in changes[0]}


def krum(changes: Sequence[Arrays], fraction: float) -> Arrays:
    """The mean of the n − f changes with the least distances to their n − f − 2 nearest."""
    records = [RecordDict({"arrays": to_record(one)}) for one in changes]
    liars = int(fraction * len(changes))
    chosen = select_multikrum(records, liars, len(changes) - liars)
    honest = [c for c, r in zip(changes, records, strict=True) if any(r is one for one in chosen)]
    return {name: np.mean([one[name] for one in honest], axis=0) for name in changes[0]}


MEANS: dict[str, Mean] = {"median": median, "trimmed-mean": trimmed_mean, "krum": krum}
ROBUST = ("none", *MEANS)


def robust_mean(kind: str, fraction: float, start: Arrays, models: Sequence[Arrays]) -> Arrays:
    """`start` moved by the robust mean of the models' changes, in the arrays' own dtypes."""
    if not models[0]:  # nothing travels
        return {}
    changes = [{n: a.astype(float) - start[n] for n, a in one.items()} for one in models]
    moved = {n: start[n] + change for n, change in MEANS[kind](changes, fraction).items()}
    return {name: as_type(a, start[name].dtype) for name, a in moved.items()}
