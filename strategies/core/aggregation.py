"""Robust and plain means of the clients' models.

The robust means limit what a minority of malicious clients can do. They are Flower's functions:
median and trimmed mean by coordinate (Yin et al., ICML 2018), and multi-Krum (Blanchard et al.,
NeurIPS 2017). Multi-Krum is the plain mean of the n − f updates nearest to their neighbours, with
f = ⌊fraction · n⌋. Robust means ignore sample counts, which clients could forge. Integers and
booleans, such as counts of steps, are averaged like all arrays, but are part of no distance."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from clients.core.arrays import Arrays, as_type, is_counter, is_statistic, to_record
from strategies.core.replies import Update

# Takes the clients' changes, the fraction, and the names of the arrays that distances are made of.
Mean = Callable[[Sequence[Arrays], float, Collection[str]], Arrays]
Combine = Callable[[list[np.ndarray]], np.ndarray]  # all clients' arrays of one name to one array


def _by_name(changes: Sequence[Arrays], combine: Combine) -> Arrays:
    """`combine` of all clients' arrays, name by name."""
    result: Arrays = {}
    for name in changes[0]:
        result[name] = combine([change[name] for change in changes])
    return result


def _plain_mean(changes: Sequence[Arrays]) -> Arrays:
    return _by_name(changes, lambda arrays: np.mean(arrays, axis=0))


def median(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The median of every entry; it tolerates any malicious minority."""
    return _by_name(changes, lambda arrays: np.median(arrays, axis=0))


def trimmed_mean(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The mean of every entry without the ⌊fraction · n⌋ largest and smallest values."""
    return _by_name(changes, lambda arrays: trim_mean(np.stack(arrays), fraction))


def krum(changes: Sequence[Arrays], fraction: float, measured: Collection[str]) -> Arrays:
    """The mean of the n − f changes with the least distances to their n − f − 2 nearest.

    Distances are those of the `measured` arrays; without any, all changes are equally near."""
    if not measured:
        return _plain_mean(changes)
    records = []
    for change in changes:
        measured_arrays = {name: array for name, array in change.items() if name in measured}
        records.append(RecordDict({"arrays": to_record(measured_arrays)}))
    f = int(fraction * len(changes))
    # Flower returns the chosen records themselves, not their positions.
    chosen = {id(record) for record in select_multikrum(records, f, len(changes) - f)}
    kept = []
    for change, record in zip(changes, records, strict=True):
        if id(record) in chosen:
            kept.append(change)
    return _plain_mean(kept)


MEANS: dict[str, Mean] = {"median": median, "trimmed-mean": trimmed_mean, "krum": krum}
ROBUST = ("none", *MEANS)


def is_plain(kind: str, fraction: float, clients: int) -> str:
    """Why the robust mean of this number of clients equals the plain mean; "" if it differs."""
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
    changes: list[Arrays] = []
    for model in models:
        changes.append({name: array.astype(float) - start[name] for name, array in model.items()})
    measured = {name for name in models[0] if not is_counter(start[name])}
    moved: Arrays = {}
    for name, change in MEANS[kind](changes, fraction, measured).items():
        moved[name] = as_type(start[name] + change, start[name].dtype)
    return moved


def weighted_mean(arrays: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Σ_i p_i w_i with p_i = n_i / Σ n, name by name, in the arrays' dtypes and shapes.

    Sums are in float32 at least. Means of integers and booleans are rounded (see
    `clients.core.arrays.as_type`)."""
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    mean: Arrays = {}
    for name, first in arrays[0].items():
        dtype: Any = np.float64  # of the sum; integers and booleans would be cut off
        if first.dtype.kind == "f":
            dtype = np.promote_types(first.dtype, np.float32)
        weighted_sum = np.zeros(first.shape, dtype)
        for client, share in zip(arrays, shares, strict=True):
            # A share of the sum's type keeps numpy from a wider, slower product.
            weighted_sum += client[name] * weighted_sum.dtype.type(share)
        mean[name] = as_type(weighted_sum, first.dtype)
    return mean


def mean(arrays: Sequence[Arrays]) -> Arrays:
    """The unweighted mean, name by name."""
    return weighted_mean(arrays, [1.0] * len(arrays))


def mean_statistics(updates: Sequence[Update]) -> Arrays:
    """The mean of the running statistics and counters, weighted by sample counts."""
    statistics: list[Arrays] = []
    for update in updates:
        arrays = update.arrays
        statistics.append({name: a for name, a in arrays.items() if is_statistic(name, a)})
    return weighted_mean(statistics, [update.num_examples for update in updates])
