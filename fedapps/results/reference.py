"""What a run keeps of its training clients' inputs, to say whether a later client's look like them.

`partitions.datasets.distance` says what a distance is; `largest` is that of the training clients'
own validation rows."""

import math
from dataclasses import dataclass

import numpy as np

from partitions.datasets.distance import farthest, threshold
from partitions.datasets.encoding import moments
from partitions.federations import Federation
from partitions.shares import Samples

# Training rows that the statistics are taken from, of all clients together: at least one of each
# client, so that at most so many clients count.
MAX_ROWS = 5000


@dataclass(frozen=True)
class Reference:
    """Names, means and deviations of the training rows' columns, or of the means of channels;
    `largest` is the largest distance of a training client's validation rows. `shares` are the
    fractions of the training labels by class, () where the task has none. Of more than `MAX_ROWS`
    training clients, every second, third, … one counts."""

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    largest: float = 0.0
    shares: tuple[float, ...] = ()

    def distances(self, x: np.ndarray) -> np.ndarray:
        """(m' − m) / s of columns x (n, d), (d,); 0 where the training rows do not vary."""
        mean = np.array(self.mean)
        std = np.array(self.std)
        varies = std > 0
        distances = np.zeros(len(std))
        distances[varies] = (x.mean(0) - mean)[varies] / std[varies]
        return distances

    def threshold(self, count: int) -> float:
        """The distance above which `count` rows do not look like training."""
        return threshold(self.largest, count)


def reference(federation: Federation) -> Reference:
    """That of a federation's training clients."""
    every = np.flatnonzero(~federation.novel).tolist()
    step = math.ceil(len(every) / MAX_ROWS)
    training = every[::step]
    each = max(1, MAX_ROWS // len(training))
    shares = [federation.share(client) for client in training]
    # A share's rows are in random order.
    x = np.concatenate([columns_of(share.train, each) for share in shares])
    names = _names(federation, x.shape[1])
    mean, std = moments(x)
    without_largest = Reference(names, tuple(mean.tolist()), tuple(std.tolist()))
    largest = 0.0
    for share in shares:
        if len(share.validation):
            distances = without_largest.distances(columns_of(share.validation, each))
            largest = max(largest, float(np.abs(distances).max(initial=0)))
    return Reference(
        names,
        without_largest.mean,
        without_largest.std,
        largest,
        _class_shares(federation, training),
    )


def columns_of(samples: Samples, count: int | None = None) -> np.ndarray:
    """The columns of the first `count` inputs as stored over their scale, (n, d) float64: a vector
    itself, else the mean of each channel."""
    x = samples.x.index_select(0, samples.index[:count]).double() / samples.scale
    if x.ndim > 2:
        x = x.flatten(2).mean(2)
    return x.numpy()


def far(reference: Reference, samples: Samples) -> tuple[dict[str, float], float]:
    """The distances of the farthest columns by name, the farthest first, and the threshold."""
    distances = reference.distances(columns_of(samples)).tolist()
    found = farthest(dict(zip(reference.names, distances, strict=True)))
    return found, reference.threshold(len(samples))


def _names(federation: Federation, count: int) -> tuple[str, ...]:
    if federation.encoding is not None:
        return federation.encoding.outputs
    kind = "column" if len(federation.info.shape) == 1 else "channel"
    return tuple(f"{kind} {number}" for number in range(count))


def _class_shares(federation: Federation, training: list[int]) -> tuple[float, ...]:
    if federation.info.num_types:  # each user has its own labels; those of the samples are types
        return ()
    labels = [federation.share(client).train.labels() for client in training]
    if labels[0].ndim != 1:
        return ()
    counts = np.zeros(federation.info.num_classes)
    for y in labels:
        counts += np.bincount(y[y >= 0].numpy(), minlength=len(counts))
    if not counts.sum():
        return ()
    return tuple((counts / counts.sum()).tolist())
