"""What a network's outputs mean for a task: its loss, its predictions, and their scores.

Outputs z are (n, C) for `classes`, (n, 1) for `binary`, and (n, k) for `labels` and `values`. See
`fedapps.common.tasks.Targets` for the labels."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.criterion import Criterion
from fedapps.common.tasks import BINARY, CLASSES, LABELS, VALUES, Targets


def binary_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Mean −log σ(±z) for outputs (n, 1) and classes 0 and 1 (n,), or for truth values (n, k)."""
    return F.binary_cross_entropy_with_logits(z, y.to(z.dtype).view(z.shape))


def like_outputs(z: Tensor, y: Tensor, task: str) -> Tensor:
    """Labels y in the shape of the outputs z (n, 1) for `binary`, where y is (n,)."""
    return y.view(z.shape) if task == BINARY else y


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
    """Standardised values (n, k) in the unit of the labels as they were given."""
    if not targets.std:
        return z
    return z * z.new_tensor(targets.std) + z.new_tensor(targets.mean)


def main_of(z: Tensor, y: Tensor, targets: Targets) -> float:
    """The task's main score: the share of samples whose class, or all of whose labels, are
    predicted; for values the root of the mean square error, over samples and outputs."""
    prediction = predicted(z, targets)
    if targets.task == VALUES:
        return float((prediction - in_units(y, targets)).square().mean().sqrt())
    correct = prediction == y
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
    error = predicted(z, targets) - in_units(y, targets)
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
