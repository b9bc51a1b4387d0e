"""Prior-EM's server: FedAvg, and what it knows of the training clients' labels.

Before each evaluation the server asks all training clients that are present. Where none is, the
last answers count: those of the finished run that is served. Clients get sums over clients alone,
``source/…``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, prefixed
from clients.methods.prior_em import SOURCE, SOURCE_PRIOR
from strategies.core.replies import Node, Requirement
from strategies.methods.fedavg import FedAvg

HEAD_WEIGHT = "head.weight"
LABELS = Requirement(
    "prior-em", "answer `query.labels`, their label counts", offers=("query.labels",)
)


def prior(counts: np.ndarray) -> np.ndarray:
    """π (C,) from label counts, one more of each: no class has probability 0."""
    counts = np.maximum(counts, 0) + 1
    return np.asarray(counts / counts.sum(), np.float32)


class PriorEM(FedAvg):
    """With `source_prior` = "training" it asks for the clients' label counts."""

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
                f"do not send; leave the head's weights unfrozen, and use `{self.requires.usage}`"
            )
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model, and what is known of the training clients' labels."""
        if training := self.training_nodes():
            self.source = self.ask(arrays, training) or self.source
        sent = arrays | prefixed(SOURCE, self.source) if self.source else arrays
        return dict.fromkeys(nodes, sent)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model."""
        return dict.fromkeys(nodes, arrays)

    def ask(self, arrays: Arrays, training: Sequence[Node]) -> Arrays:
        """π, if it is asked for."""
        if self.source_prior == "uniform":
            return {}
        shape = arrays[HEAD_WEIGHT].shape[:1]  # (C,)
        counts = self._sum("labels", training, {}, shape)
        return {} if counts is None else {"prior": prior(counts)}

    def _sum(
        self, what: str, training: Sequence[Node], sent: Arrays, shape: tuple[int, ...]
    ) -> np.ndarray | None:
        """The sum of the clients' counts; None without a reply."""
        like = {what: np.zeros(shape, np.float32)}
        replies = self.exchange(
            f"query.{what}", dict.fromkeys(training, sent), like=dict.fromkeys(training, like)
        )
        return sum((u.arrays[what] for u in replies), np.zeros(shape)) if replies else None
