"""Prior-EM's server: FedAvg, and sums of the training clients' label counts.

Before each evaluation the server requests the counts of all training clients that are present. If
no training client is present, the last counts are used. A finished run is served with the counts of
its training: the nodes that are served may be others. Clients get only sums over clients,
``source/…``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, prefixed
from clients.methods.prior_em import SOURCE, SOURCE_PRIOR
from strategies.core.count_limits import bounded_confusions, bounded_totals
from strategies.core.replies import Node, Requirement
from strategies.maths.label_shift import prior
from strategies.methods.fedavg import FedAvg

HEAD_WEIGHT = "head.weight"
LABELS = Requirement(
    "prior-em", "answer `query.labels`, their label counts", offers=("query.labels",)
)


class PriorEM(FedAvg):
    """With `source_prior` = "training" the server requests the clients' label counts."""

    persistent_attributes = ("source",)

    source_prior = SOURCE_PRIOR

    def __init__(self, **settings: Any) -> None:
        if self.requires is None and settings.get("source_prior") == "training":
            self.requires = LABELS
        super().__init__(**settings)
        self.source: Arrays = {}
        if self.privacy is not None and self.requires is not None:
            self.privacy.admit("label counts")

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model. Raises ValueError if it has no head to count the classes by."""
        if self.requires is not None and HEAD_WEIGHT not in arrays:
            raise ValueError(
                f"{self.requires.method} counts the classes by {HEAD_WEIGHT!r}, which the clients "
                "do not send; leave the head's weights unfrozen and without weight norm or another "
                f"parametrization, and use `{self.requires.usage}`"
            )
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model, and the sums over the training clients' labels, which are requested first."""
        training = self.training_nodes()
        if training and not self.serves_finished_run:
            self.source = self.ask(arrays, training) or self.source
        if self.source:
            arrays = arrays | prefixed(SOURCE, self.source)
        return dict.fromkeys(nodes, arrays)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model."""
        return dict.fromkeys(nodes, arrays)

    def ask(self, arrays: Arrays, training: Sequence[Node]) -> Arrays:
        """π as ``prior``, if `source_prior` needs it and a client answers."""
        if self.source_prior == "uniform":
            return {}
        shape = arrays[HEAD_WEIGHT].shape[:1]  # (C,)
        counts = self._sum("labels", training, {}, shape)
        if counts is None:
            return {}
        return {"prior": prior(counts)}

    def _sum(
        self, query: str, training: Sequence[Node], sent: Arrays, shape: tuple[int, ...]
    ) -> np.ndarray | None:
        """The sum of the clients' counts, negative ones as 0; None without a reply."""
        like = {query: np.zeros(shape, np.float32)}
        replies = self.exchange(
            f"query.{query}", dict.fromkeys(training, sent), like=dict.fromkeys(training, like)
        )
        if not replies:
            return None
        total = np.zeros(shape)
        for counts in self.bounded([reply.arrays[query] for reply in replies]):
            total = total + np.maximum(counts, 0)
        return total

    def bounded(self, counts: list[np.ndarray]) -> list[np.ndarray]:
        """The clients' counts within the limits that are on: see `strategies.core.count_limits`."""
        if self.max_update_ratio and counts[0].ndim == 2:
            counts = bounded_confusions(counts, self.max_update_ratio)
        if self.max_examples_ratio:
            counts = bounded_totals(counts, self.max_examples_ratio)
        return counts
