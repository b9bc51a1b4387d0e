"""What a network's outputs mean for a task, and the evaluation of a client by them.

The first part has the loss of outputs and labels, the predictions and their scores. Outputs z are
(n, C) for `classes`, (n, 1) for `binary`, and (n, k) for `labels` and `values`. See
`fedapps.common.tasks.Targets` for the labels. The second part scores a client's predictions for its
samples."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.criterion import Criterion
from clients.core.protocol import COUNTS, TRAINING_ERROR, VALUE_SUMS, Metrics
from fedapps.common.tasks import BINARY, CLASSES, LABELS, TASKS, VALUES, Targets, reported_name
from partitions.shares import SUB_POPULATION, Samples, Share, labeled_rows

# Outputs: losses, predictions, scores


def binary_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Mean −log σ(±z) for outputs (n, 1) and classes 0 and 1 (n,), or for truth values (n, k)."""
    return F.binary_cross_entropy_with_logits(z, y.to(z.dtype).view(z.shape))


LOGITS, PROBABILITIES = "logits", "probabilities"  # what a user's network gives


def _unchanged(z: Tensor) -> Tensor:
    return z


def from_logits(outputs: str, task: str) -> Callable[[Tensor], Tensor]:
    """How the user's network's own `outputs` follow from logits z (n, k)."""
    if outputs == LOGITS:
        return _unchanged
    if task == CLASSES:
        return partial(torch.softmax, dim=1)
    return torch.sigmoid


CRITERIA: dict[str, Criterion] = {
    CLASSES: F.cross_entropy,
    BINARY: binary_cross_entropy,
    LABELS: binary_cross_entropy,
    VALUES: F.mse_loss,
}


def label_vectors(y: Tensor, num_outputs: int) -> Tensor:
    """Labels as a vector of numbers for each sample, (n, k): one-hot for `classes`, 0 or 1 for
    `binary`; truth values and standardised values as they are."""
    if y.ndim == 2:
        return y
    if num_outputs == 1:
        return y[:, None]
    return F.one_hot(y, num_outputs)


def predicted(z: Tensor, targets: Targets) -> Tensor:
    """Predictions from outputs: classes (n,), truth values 0 and 1 (n, k), or values (n, k) in the
    unit of the labels as they were given."""
    if targets.task == CLASSES:
        return z.argmax(1)
    if targets.task == BINARY:
        return (z[:, 0] > 0).long()
    if targets.task == LABELS:
        return (z > 0).long()
    return in_units(z, targets)


def in_units(z: Tensor, targets: Targets) -> Tensor:
    """Standardised values (n, k) in the unit of the labels as they were given, float64: float32
    would round values that are far from 0, such as points in time."""
    if not targets.std:
        return z
    z = z.double()
    return z * z.new_tensor(targets.std) + z.new_tensor(targets.mean)


def value_errors(z: Tensor, y: Tensor, targets: Targets) -> Tensor:
    """Outputs z minus values y (n, k), in the unit of the values as they were given."""
    error = z - y
    return error * error.new_tensor(targets.std) if targets.std else error


def main_of(z: Tensor, y: Tensor, targets: Targets) -> float:
    """The task's main score: the share of samples whose class, or all of whose labels, are
    predicted; for values the root of the mean square error, over samples and outputs."""
    if targets.task == VALUES:
        return float(value_errors(z, y, targets).square().mean().sqrt())
    correct = predicted(z, targets) == y
    if correct.ndim > 1:
        correct = correct.all(1)
    return float(correct.float().mean())


def further_scores(z: Tensor, y: Tensor, targets: Targets) -> dict[str, float]:
    """The other scores of `labels` and `values` by name; R² only where the labels differ."""
    if targets.task == LABELS:
        prediction = predicted(z, targets)
        return {"micro-f1": micro_f1(y, prediction), "macro-f1": macro_f1_of_labels(y, prediction)}
    if targets.task != VALUES:
        return {}
    error = value_errors(z, y, targets)
    scores = {"mae": float(error.abs().mean())}
    r2 = determination(value_sums(z, y))
    if r2 is not None:
        scores["r2"] = r2
    return scores


def macro_f1(y: Tensor, prediction: Tensor) -> float:
    """Mean of 2 TP / (2 TP + FP + FN) over the classes among the labels y (n,) or predictions."""
    num_classes = int(max(y.max(), prediction.max())) + 1
    true_positives = y[y == prediction].bincount(minlength=num_classes)
    denominators = y.bincount(minlength=num_classes) + prediction.bincount(minlength=num_classes)
    f1 = 2 * true_positives / denominators
    return float(f1[denominators > 0].mean())


def micro_f1(y: Tensor, prediction: Tensor) -> float:
    """2 TP / (2 TP + FP + FN) over all samples and labels (n, k); 1 where both are all zero."""
    true_positives = float((y * prediction).sum())
    denominator = float(y.sum() + prediction.sum())
    return 2 * true_positives / denominator if denominator else 1.0


def macro_f1_of_labels(y: Tensor, prediction: Tensor) -> float:
    """The mean over the labels of F1, without those that neither occur nor are predicted; 1 if none
    is left."""
    true_positives = (y * prediction).sum(0)
    denominators = y.sum(0) + prediction.sum(0)
    occurs = denominators > 0
    if not occurs.any():
        return 1.0
    return float((2 * true_positives[occurs] / denominators[occurs]).mean())


def value_sums(z: Tensor, y: Tensor) -> list[float]:
    """For each output: n, Σ y, Σ y² and Σ (z − y)², one after the other, of standardised values.
    Sums over clients give R² over all their samples."""
    z, y = z.double(), y.double()
    n = torch.full_like(y[0], len(y))
    sums = torch.stack([n, y.sum(0), y.square().sum(0), (z - y).square().sum(0)], 1)
    return sums.flatten().tolist()


def determination(sums: list[float]) -> float | None:
    """R² = 1 − Σ (z − y)² / Σ (y − ȳ)², the mean over the outputs, from `value_sums`; None where
    the labels of an output are all equal."""
    scores = []
    for start in range(0, len(sums), 4):
        n, total, squares, errors = sums[start : start + 4]
        spread = squares - total**2 / n
        if spread <= 1e-12 * max(squares, 1e-300):
            return None
        scores.append(1 - errors / spread)
    return sum(scores) / len(scores)


# A client's evaluation


class Choice(NamedTuple):
    """The correction that a client chose for its inputs, and why in one sentence."""

    name: str
    reason: str


class OwnScore(Protocol):
    """A user's own score, see `clients.core.own_scores`."""

    def of(self, outputs: Tensor, y: Tensor, targets: Targets) -> float | None:
        """Its value for these samples, None if it fails for them."""


class Client(Protocol):
    """The attributes of `clients.core.client.Client` that scoring uses."""

    share: Share
    device: str
    adaptation_metrics: Metrics
    intermediate_logits: dict[str, Tensor]
    novel_batch: int
    novel_stream: bool
    batchwise: bool
    supports_streaming: bool
    criterion: Criterion
    targets: Targets
    stream: dict[str, Tensor]

    @property
    def own_scores(self) -> Mapping[str, OwnScore]:
        """The user's own scores by name."""

    @property
    def scored_as_novel(self) -> bool:
        """Whether it is scored on all its data, and adapts to them."""

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, classes)."""

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, classes) of the next inputs of a stream."""


def score_parts(client: Client, bound: bool, select: str = "") -> tuple[float, int, Metrics]:
    """Loss, number of labeled samples and metrics.

    A novel client is scored on all its data, a training client on validation and test data. The
    counts for the F1 of sub-populations are those of its test samples, or of its validation samples
    if it has no others. With `bound`, the metrics include the error on the training data, a term of
    the generalization bound."""
    share = client.share
    if client.scored_as_novel:
        return score_samples(client, share.everything, select=select, counts=True)
    has_test = share.test is not None and len(share.test) > 0
    loss, labeled, metrics = score_samples(
        client, share.validation, select=select, counts=not has_test
    )
    main = TASKS[client.targets.task].main.name
    if share.test is not None:
        _, tested, scores = score_samples(client, share.test, "test-", counts=has_test)
        metrics |= scores | {f"test-{main}-examples": tested}
    if bound:
        _, trained, fitted = score_samples(client, share.train)
        metrics |= {
            TRAINING_ERROR: 1 - fitted["accuracy"],
            f"{TRAINING_ERROR}-examples": trained,
        }
    return loss, labeled, metrics


def score_samples(
    client: Client,
    samples: Samples,
    prefix: str = "",
    select: str = "",
    *,
    counts: bool = False,
) -> tuple[float, int, Metrics]:
    """Mean loss, number of labeled samples, and the task's scores over the labeled samples, each
    under its name after `prefix`.

    For `select` = "macro-f1" the metrics of classes include this score. Without a `prefix` they
    include the adaptation's metrics, the scores of its intermediate logits, further scores of the
    task, and the user's own; with one, the one of these scores that `select` names. With `counts`
    they include those for the F1 of sub-populations, under names without the prefix: one model's,
    on one set of samples."""
    in_full = not prefix
    if not len(samples):
        return 0.0, 0, {}
    x, y = samples.to(client.device)[:]
    logits = predict_novel(client, x) if client.scored_as_novel else client.predict(x)
    labeled = labeled_rows(y)
    count = int(labeled.sum())
    metrics = dict(client.adaptation_metrics) if in_full else {}
    if not count:
        return 0.0, 0, metrics
    targets = client.targets
    main = TASKS[targets.task].main.name
    rows = slice(None) if count == len(y) else labeled  # nearly always the first, without a copy
    y = y[rows]
    if in_full:
        for name, z in client.intermediate_logits.items():
            metrics[f"{name}-{main}"] = main_of(z[rows], y, targets)
    logits = logits[rows]
    metrics[prefix + main] = main_of(logits, y, targets)
    if select == "macro-f1" and targets.task in (CLASSES, BINARY):
        metrics[prefix + select] = macro_f1(y, predicted(logits, targets))
    if in_full:
        metrics |= further_scores(logits, y, targets)
        metrics |= own_scores_of(client, logits, y)
    elif select:
        further = further_scores(logits, y, targets) | own_scores_of(client, logits, y)
        name = reported_name(select, further)
        if name in further:
            metrics[prefix + name] = further[name]
    if targets.task == VALUES:
        metrics[prefix + VALUE_SUMS] = value_sums(logits, y)
    if counts and SUB_POPULATION in client.share.attributes:  # a user with a preference
        # True negatives, false positives, false negatives, true positives.
        metrics[COUNTS] = (2 * y + logits.argmax(1)).bincount(minlength=4).tolist()
        metrics[SUB_POPULATION] = int(client.share.attributes[SUB_POPULATION])
    return float(client.criterion(logits, y)), count, metrics


def own_scores_of(client: Client, outputs: Tensor, y: Tensor) -> Metrics:
    """The user's own scores of outputs and labels; NaN where one fails for them, which the server
    counts and leaves out of the mean."""
    scores: Metrics = {}
    for name, score in client.own_scores.items():
        value = score.of(outputs, y, client.targets)
        scores[name] = math.nan if value is None else value
    return scores


def predict_novel(client: Client, x: Tensor) -> Tensor:
    """Logits (n, C) of inputs x (n, *shape), predicted in batches of `novel_batch`.

    The model adapts to each batch anew. With `novel_stream` it continues from the previous batch,
    if the method supports that. Sets `intermediate_logits` of all batches, and `adaptation_metrics`
    to their means over the batches."""
    if client.batchwise or not client.novel_batch or len(x) <= client.novel_batch:
        return client.predict(x)
    client.stream = {}
    online = client.novel_stream and client.supports_streaming
    logits: list[Tensor] = []
    intermediate: dict[str, list[Tensor]] = defaultdict(list)
    metrics: dict[str, list[Any]] = defaultdict(list)
    for batch in x.split(client.novel_batch):
        logits.append(client.update(batch) if online else client.predict(batch))
        for name, z in client.intermediate_logits.items():
            intermediate[name].append(z)
        for name, value in client.adaptation_metrics.items():
            metrics[name].append(value)
    client.intermediate_logits = {}
    for name, parts in intermediate.items():
        if len(parts) == len(logits):  # a batch without them has no such score
            client.intermediate_logits[name] = torch.cat(parts)
    client.adaptation_metrics = {name: sum(v) / len(v) for name, v in metrics.items()}
    return torch.cat(logits)


def by_parts(forward: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Tensor:
    """`forward` of each part, without gradients; the results are concatenated."""
    with torch.no_grad():
        return torch.cat([forward(part) for part in parts])
