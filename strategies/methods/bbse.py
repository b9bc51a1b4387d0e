"""BBSE's server: FedAvg, and the confusion matrix of the training clients' held-out samples."""

from collections.abc import Sequence

from clients.core.arrays import Arrays
from strategies.core.replies import Node, Requirement
from strategies.maths.label_shift import conditional, prior
from strategies.methods.prior_em import HEAD_WEIGHT, PriorEM


class BBSE(PriorEM):
    """Requests the clients' confusion matrices, which include their label counts."""

    requires = Requirement(
        "bbse",
        "answer `query.confusion`, a confusion matrix of held-out samples",
        offers=("query.confusion",),
    )

    def ask(self, arrays: Arrays, training: Sequence[Node]) -> Arrays:
        """K as ``confusion``, and π as ``prior`` if `source_prior` needs it."""
        shape = 2 * arrays[HEAD_WEIGHT].shape[:1]  # (C, C)
        counts = self._sum("confusion", training, arrays, shape)
        if counts is None:
            return {}
        known = {"confusion": conditional(counts)}
        if self.source_prior == "training":
            known["prior"] = prior(counts.sum(0))
        return known
