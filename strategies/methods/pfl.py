"""Personal models of training clients for a novel client without labels (Amosy et al., section
6.2; Ye et al., section 4.1), trained by FedPer or pFedHN.

PFL-sampled: the expected accuracy of a random training client's model. PFL-nearest: the model of
the training client at the smallest A-distance. PFL-ensemble: the mean of all models' logits, or
of a random share's. No limit protects novel clients from a liar, whose model they get as it is
(docs/reference/failures.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from clients.core.arrays import Arrays, prefixed
from clients.core.optimizers import Optimizer
from clients.methods.pfl import BASE, HEAD
from fedapps.common.seeds import seed_of
from fedapps.common.settings import setting
from strategies.core.domain_distances import a_distances
from strategies.core.replies import Node, Requirement, Update
from strategies.core.rounds import PersonalizedStrategy
from strategies.methods.fedavg import FedAvg
from strategies.methods.pfedhn import PFedHN

PFEDHN_SETTINGS = ("embedding_dim", "hidden_dim", "hidden_layers", "chunk_size", "server_lr",
                   "server_momentum")  # fmt: skip


def _of_pfedhn(name: str) -> Any:
    """pFedHN's setting, which is read with the base pfedhn alone."""
    return replace(PFedHN.declared[name], beside="base=pfedhn")


class PFL(PersonalizedStrategy):
    """Trains as `base` = "fedper" or "pfedhn" does; "pfedhn" with `server_lr` and the other
    settings of `PFedHN`; a novel client gets all personal models, ``<client>/<name>``."""

    holds_model = False
    requires = Requirement(
        "pfl-ensemble",
        "answer `query.export`, which hands out their personal models",
        offers=("query.export",),
        fallback="its base with nothing personal: FedAvg, or PFedHN",
    )

    base = BASE
    embedding_dim = _of_pfedhn("embedding_dim")
    hidden_dim = _of_pfedhn("hidden_dim")
    hidden_layers = _of_pfedhn("hidden_layers")
    chunk_size = _of_pfedhn("chunk_size")
    server_lr = _of_pfedhn("server_lr")
    server_momentum = _of_pfedhn("server_momentum")

    def __init__(
        self,
        *,
        network: nn.Module | Mapping[str, nn.Module] | None = None,
        buffers: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        rates = {"lr_decay": self.lr_decay, "lr_decay_rounds": self.lr_decay_rounds}
        common: dict[str, Any] = {"seed": self.seed, "saved_rounds": self.saved_rounds, **rates}
        self.trainer: PersonalizedStrategy = FedAvg(**common)
        if self.base == "pfedhn":
            given = {name: getattr(self, name) for name in PFEDHN_SETTINGS}
            self.trainer = PFedHN(**common, **given, network=network, buffers=buffers)
        self.keeps_arrays, self.in_place = self.trainer.keeps_arrays, self.trainer.in_place
        self._heads_stay = self.base == "fedper" and self.requires is not None

    def initialize(self, arrays: Arrays) -> Arrays:
        """The base's; FedPer's without the head."""
        self.whole = arrays
        if self._heads_stay:
            if not any(name.startswith(HEAD) for name in arrays):
                raise ValueError(
                    f"{type(self).__name__} keeps the clients' {HEAD}… arrays on them, and there "
                    f"are none among {', '.join(arrays):.500}; use `{self.requires.usage}`"
                )
            arrays = {name: a for name, a in arrays.items() if not name.startswith(HEAD)}
        return self.trainer.initialize(arrays)

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """As the base."""
        return self.trainer.restore(arrays, saved)

    def forget(self) -> None:
        """As the base."""
        self.trainer.forget()

    def optimizers(self) -> list[Optimizer]:
        """As the base."""
        return self.trainer.optimizers()

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """As the base."""
        return self._present_trainer().broadcast(arrays, nodes)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """As the base."""
        return self._present_trainer().aggregate(arrays, updates)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The base's model for training clients, the personal models of all for novel ones."""
        training = [node for node in nodes if not node.novel]
        payloads = self._present_trainer().personalize(arrays, training)
        novel = [node for node in nodes if node.novel]
        return payloads | (self.offer(arrays, novel) if novel else {})

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The personal models that each novel client gets."""
        return dict.fromkeys(novel, self.personal_models(arrays))

    def personal_models(self, arrays: Arrays) -> Arrays:
        """``<client>/<name>`` of every training client that hands out its model; unless none has
        trained, without those that still have the head that they started with.

        Where no training client is present, those that were handed out last."""
        if not self.training_nodes():
            return self.published_models
        sent = self._present_trainer().personalize(arrays, self.training_nodes())
        models: Arrays = {}
        updates = self.exchange("query.export", sent, like=dict.fromkeys(sent, self.whole))
        trained = [update for update in updates if not update.metrics.get("untrained")]
        for update in trained or updates:
            models |= prefixed(str(update.node.client), update.arrays)
        self.published_models = models
        return models

    def _present_trainer(self) -> PersonalizedStrategy:
        self.trainer.nodes, self.trainer.now = self.nodes, self.now
        return self.trainer


class PFLEnsemble(PFL):
    """With `ensemble_share` below 1, novel clients get the models of the same random clients, as
    many as that share of those that answered, at least one (0.5 in Ye et al.'s released program).
    """

    ensemble_share = setting(1.0, "share of the training clients' models that count", "(0, 1]")

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The personal models of the drawn clients; all of them by default."""
        models = self.personal_models(arrays)
        owners = sorted({int(name.partition("/")[0]) for name in models})
        count = max(1, round(self.ensemble_share * len(owners)))
        generator = np.random.default_rng(seed_of(self.seed, "ensemble"))
        drawn = set(generator.permutation(owners)[:count].tolist())
        kept = {n: a for n, a in models.items() if int(n.partition("/")[0]) in drawn}
        return dict.fromkeys(novel, kept)


class PFLNearest(PFL):
    """A novel client gets the model of the nearest training client, in A-distance."""

    persistent_attributes = ("nearest",)
    requires = Requirement(
        "pfl-nearest",
        "answer `query.export` and `query.domain`, which compares inputs",
        offers=("query.export", "query.domain"),
        fallback="its base with nothing personal: FedAvg, or PFedHN",
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nearest: dict[int, int] = {}  # training client by novel client

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The nearest training client's model, among those that handed it out."""
        models = self.personal_models(arrays)
        owners = {int(name.partition("/")[0]) for name in models}
        new = [node for node in novel if self.nearest.get(node.client) not in owners]
        training = [node for node in self.training_nodes() if node.client in owners]
        if new and not self.training_nodes():
            raise ValueError(
                "pfl-nearest asks the training clients how near they are, so they must be "
                "there: serve its run to nodes, or choose pfl-ensemble"
            )
        if new and training:
            distances = a_distances(self.exchanges, new, training)
            for node, row in zip(new, distances, strict=True):
                if np.isfinite(row).any():
                    self.nearest[node.client] = training[int(np.nanargmin(row))].client
        offers = {}
        for node in novel:
            start = f"{self.nearest.get(node.client)}/"
            model = {name: a for name, a in models.items() if name.startswith(start)}
            if model:
                offers[node] = model
        return offers
