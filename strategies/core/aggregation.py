"""Means of the clients' models that a minority of malicious clients cannot move far.

Flower's functions: median and trimmed mean by coordinate (Yin et al., ICML 2018), and multi-Krum
(Blanchard et al., NeurIPS 2017), the plain mean of the n − f updates nearest to their neighbours,
f = ⌊fraction · n⌋. All ignore sample counts, which clients could forge. Integers and booleans, such
as counts of steps, are averaged as all arrays, and are part of no distance."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from clients.core.arrays import Arrays, as_type, is_counter, is_statistic, to_record
from strategies.core.replies import Update

Mean = Callable[[Sequence[Arrays], float, Collection[str]], Arrays]  # changes, fraction, measured


def median(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The median of every entry; it tolerates any malicious minority."""
    return {n: np.median([c[n] for c in changes], axis=0) for n in changes[0]}


def trimmed_mean(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The mean of every entry without the ⌊fraction · n⌋ largest and smallest values."""
    return {n: trim_mean(np.stack([c[n] for c in changes]), fraction) for n in changes[0]}


def krum(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The mean of the n − f changes with the least distances to their n − f − 2 nearest.

    Distances are those of the `measured` arrays; without any, all changes are equally near."""
    if not measured:
        return {name: np.mean([c[name] for c in changes], axis=0) for name in changes[0]}
    records = []
    for change in changes:
        distant = {name: a for name, a in change.items() if name in measured}
        records.append(RecordDict({"arrays": to_record(distant)}))
    f = int(fraction * len(changes))
    chosen = {id(record) for record in select_multikrum(records, f, len(changes) - f)}
    kept = [c for c, record in zip(changes, records, strict=True) if id(record) in chosen]
    return {name: np.mean([c[name] for c in kept], axis=0) for name in changes[0]}


MEANS: dict[str, Mean] = {"median": median, "trimmed-mean": trimmed_mean, "krum": krum}
ROBUST = ("none", *MEANS)


def is_plain(kind: str, fraction: float, clients: int) -> str:
    """Why the robust mean of so many clients is the plain one; "" if it is not."""
    if kind == "median" or int(fraction * clients):
        return ""
    return (
        f"robust is {kind!r}, but robust-fraction {fraction:g} of {clients} clients is less than "
        "one: it is the plain mean. Take robust='median', more clients in a round, or a larger "
        "robust-fraction"
    )


def robust_mean(kind: str, fraction: float, start: Arrays, models: Sequence[Arrays]) -> Arrays:
    """`start` moved by the robust mean of the models' changes, in the dtypes of `start`."""
    if not models[0]:  # all arrays are personal
        return {}
    changes = [{n: a.astype(float) - start[n] for n, a in w.items()} for w in models]
    measured = {name for name in models[0] if not is_counter(start[name])}
    mean = MEANS[kind](changes, fraction, measured)
    moved = {name: start[name] + change for name, change in mean.items()}
    return {name: as_type(a, start[name].dtype) for name, a in moved.items()}


def weighted_mean(arrays: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Σ_i p_i w_i with p_i = n_i / Σ n, name by name, in the arrays' dtypes and shapes.

    Sums are in float32 at least. Means of integers and booleans are rounded (see
    `clients.core.arrays.as_type`)."""
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    mean = {}
    for name, first in arrays[0].items():
        dtype = np.promote_types(first.dtype, np.float32) if first.dtype.kind == "f" else np.float64
        out = np.zeros(first.shape, dtype)
        for client, share in zip(arrays, shares, strict=True):
            out += client[name] * out.dtype.type(share)
        mean[name] = as_type(out, first.dtype)
    return mean


def mean(arrays: Sequence[Arrays]) -> Arrays:
    """The unweighted mean, name by name."""
    return weighted_mean(arrays, [1.0] * len(arrays))


def mean_statistics(updates: Sequence[Update]) -> Arrays:
    """The mean of the running statistics and counters, weighted by sample counts."""
    statistics = [{n: a for n, a in u.arrays.items() if is_statistic(n, a)} for u in updates]
    return weighted_mean(statistics, [u.num_examples for u in updates])
