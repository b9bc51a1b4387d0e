"""FedMD server (Li and Wang, 2019, Algorithm 1): the mean of the clients' logits on a public set.

The server holds logits and no model. HeteroFedTTA (Ye et al., UPFL, Algorithm 2) has two sets."""

from dataclasses import replace
from typing import Any

import numpy as np

from clients.core.arrays import Arrays
from clients.methods.fedmd import CLASSES, FLOAT16, PUBLIC_SAMPLES
from strategies.core.replies import Requirement, Update, most_common
from strategies.core.run_state import in_order_of
from strategies.core.strategy import PersonalizedStrategy


class FedMD(PersonalizedStrategy):
    """F(D_p) ← (1/N) Σ_i f_i(D_p); the first round's clients get no consensus.

    Logits whose shape differs from that of most training clients are dropped. The mean is taken in
    float32, also if logits travel as `float16`."""

    holds_model = False
    sets: tuple[str, ...] = ("logits",)
    requires = Requirement(
        "fedmd",
        "return logits on public samples",
        offers=("public-logits",),
        source="fedapps.client_app('{}', public=…)",
    )

    float16 = FLOAT16

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.dtype = np.dtype(np.float16 if self.float16 else np.float32)  # of logits on the wire

    def initialize(self, arrays: Arrays) -> Arrays:
        """No logits, unless `arrays` hold those of a former run."""
        return {name: a for name, a in arrays.items() if name in self.sets}

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The logits of a former run."""
        return in_order_of(dict.fromkeys(self.sets, np.empty(0)), saved)

    def expected(self, sent: Arrays) -> Arrays | None:
        """Logits (m, C) for each set, with the most common m and C of training clients."""
        shape = most_common(self.training_nodes(), PUBLIC_SAMPLES, CLASSES)
        if shape is None:
            raise RuntimeError(
                "no client sent the shape of its public logits; FedMD needs its own clients"
            )
        return dict.fromkeys(self.sets, np.empty(shape, self.dtype))

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The plain mean of each set of logits."""
        consensus = {}
        for name in self.sets:
            logits = [update.arrays[name].astype(np.float32) for update in updates]
            consensus[name] = np.mean(logits, axis=0).astype(self.dtype)
        return consensus


class HeteroFedTTA(FedMD):
    """The consensus of the base and of the personalized models, Algorithm 2, Aggregate."""

    sets = ("logits/base", "logits/personalized")
    requires = replace(
        FedMD.requires,
        method="heterofedtta",
        behaviour="return two sets of logits on public samples",
    )
