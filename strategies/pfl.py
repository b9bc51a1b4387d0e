"""Personal models for a novel client without labels: sampled, nearest, ensemble (Amosy et al.,
section 6.2; Ye et al., section 4.1), over personal models from FedPer or pFedHN.

PFL-sampled: the accuracy of a random training client's model, in expectation. PFL-nearest: the
model of the training client at the smallest A-distance. PFL-ensemble: the mean of all models'
logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clients.arrays import Arrays, prefixed
from clients.optimizers import Optimizer
from clients.pfl import BASES, HEAD
from strategies.base import PersonalizedStrategy
from strategies.distances import a_distances
from strategies.fedavg import FedAvg
from strategies.pfedhn import PFedHN
from strategies.replies import Node, Update
from strategies.requirement import Requirement


class PFL(PersonalizedStrategy):
    """Trains as `base` = "fedper" or "pfedhn" does, the latter with `server_lr` and the other
    settings of `PFedHN`; a novel client gets all personal models, ``<client>/<name>``."""

    holds_model = False
    requires = Requirement(
        "pfl-ensemble",
        "answer `query.export`, which hands out their personal models",
        offers=("query.export",),
        otherwise="its base with nothing personal: FedAvg, or PFedHN",
    )

    def __init__(
        self,
        *,
        base: str = "fedper",
        embedding_dim: int = 0,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
        server_lr: float = 0.01,
        server_momentum: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if base not in BASES:
            raise ValueError(f"unknown base {base!r}; known: {BASES}")
        self.base: PersonalizedStrategy = FedAvg(seed=self.seed)
        if base == "pfedhn":
            self.base = PFedHN(
                seed=self.seed,
                embedding_dim=embedding_dim,
                hidden_dim=hidden_dim,
                hidden_layers=hidden_layers,
                server_lr=server_lr,
                server_momentum=server_momentum,
            )
        self.base.lr_decay, self.base.lr_decay_rounds = self.lr_decay, self.lr_decay_rounds
        self.base.saved_rounds = self.saved_rounds
        self.keeps_arrays, self.in_place = self.base.keeps_arrays, self.base.in_place
        self._heads_stay = base == "fedper" and self.requires is not None

    def initialize(self, arrays: Arrays) -> Arrays:
        """The base's; FedPer's without the head."""
        self.whole = arrays
        if self._heads_stay:
            arrays = {name: a for name, a in arrays.items() if not name.startswith(HEAD)}
        return self.base.initialize(arrays)

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The base's."""
        return self.base.restore(arrays, saved)

    def forget(self) -> None:
        """What the base's `restore` makes anew."""
        self.base.forget()

    def state(self) -> dict[str, Any]:
        """With what the base keeps."""
        kept = {name: getattr(self.base, name) for name in self.base.kept}
        return super().state() | {"base": kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """With what the base kept."""
        super().load_state(state)
        for name, value in state.get("base", {}).items():
            setattr(self.base, name, value)

    def optimizers(self) -> list[Optimizer]:
        """The base's."""
        return self.base.optimizers()

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The base's."""
        return self._updated_base().broadcast(arrays, nodes)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The base's."""
        return self._updated_base().aggregate(arrays, updates)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The base's model for training clients, the personal models of all for novel ones."""
        training = [node for node in nodes if not node.novel]
        payloads = self._updated_base().personalize(arrays, training)
        novel = [node for node in nodes if node.novel]
        return payloads | (self.offer(arrays, novel) if novel else {})

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The personal models that each novel client gets."""
        return dict.fromkeys(novel, self.personal_models(arrays))

    def personal_models(self, arrays: Arrays) -> Arrays:
        """``<client>/<name>`` of every training client that hands out its model.

        Where none is there any more, those that were handed out last."""
        if not self.training_nodes():
            return self.handout
        sent = self._updated_base().personalize(arrays, self.training_nodes())
        found: Arrays = {}
        for update in self.exchange("query.export", sent, like=dict.fromkeys(sent, self.whole)):
            found |= prefixed(str(update.node.client), update.arrays)
        self.handout = found
        return found

    def _updated_base(self) -> PersonalizedStrategy:
        self.base.nodes, self.base.now = self.nodes, self.now
        return self.base


class PFLNearest(PFL):
    """A novel client gets the model of the nearest training client, in A-distance."""

    kept = ("nearest",)
    requires = Requirement(
        "pfl-nearest",
        "answer `query.export` and `query.domain`, which compares inputs",
        offers=("query.export", "query.domain"),
        otherwise="its base with nothing personal: FedAvg, or PFedHN",
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nearest: dict[int, int] = {}  # training client by novel client; inputs do not change

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The nearest training client's model, among those that handed it out."""
        models = self.personal_models(arrays)
        new = [node for node in novel if node.client not in self.nearest]
        if new:
            training = self.training_nodes()
            if not training:
                raise ValueError(
                    "pfl-nearest asks the training clients how near they are, so they must be "
                    "there: serve its run to nodes, or choose pfl-ensemble"
                )
            distances = a_distances(self.exchanges, new, training)
            for node, row in zip(new, distances, strict=True):
                if np.isfinite(row).any():
                    self.nearest[node.client] = training[int(np.nanargmin(row))].client
        offers = {}
        for node in novel:
            start = f"{self.nearest.get(node.client)}/"
            own = {name: a for name, a in models.items() if name.startswith(start)}
            if own:
                offers[node] = own
        return offers
