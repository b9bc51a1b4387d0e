"""F1 of users with tastes: macro F1 per sub-population, then the mean over sub-populations.

A user tells its sub-population and its counts of (label, prediction): the experimenter may look,
a server in service does not evaluate so."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

LABELS, PREDICTIONS = [0, 0, 1, 1], [0, 1, 0, 1]  # the four counts: TN, FP, FN, TP


class Told(Protocol):
    """What a user told: metrics with ``sub-population`` and ``counts``."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The user's metrics."""
        ...


def macro_f1(counts: np.ndarray) -> float:
    """Mean F1 of both classes from counts [TN, FP, FN, TP]; F1 of an absent class is 0."""
    from sklearn.metrics import f1_score  # here: pandas comes with it, 80 MB that no client needs

    return float(
        f1_score(LABELS, PREDICTIONS, sample_weight=counts, average="macro", zero_division=0.0)
    )


def f1_scores(updates: Iterable[Told]) -> dict[str, float]:
    """``train-f1``, their mean, and ``train-f1-<sub-population>``; {} if nobody told counts."""
    groups: dict[int, np.ndarray] = {}
    for update in updates:
        if "counts" in update.metrics:
            kind = int(update.metrics["sub-population"])
            groups[kind] = groups.get(kind, np.zeros(4)) + np.asarray(update.metrics["counts"])
    if not groups:
        return {}
    each = {f"train-f1-{kind}": macro_f1(groups[kind]) for kind in sorted(groups)}
    return {"train-f1": float(np.mean(list(each.values())))} | each
