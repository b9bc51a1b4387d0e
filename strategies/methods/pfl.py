"""Personal models of training clients for a novel client without labels (Amosy et al., section
6.2; Ye et al., section 4.1), trained by FedPer or pFedHN.

PFL-sampled: the expected accuracy of a random training client's model. PFL-nearest: the model of
the training client at the smallest A-distance. PFL-ensemble: the mean logits of all models, or of a
random share of them. No limit protects novel clients from a liar: they get its model unchanged
(docs/reference/failures.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from clients.core.arrays import Arrays, prefixed
from clients.core.protocol import DOMAIN
from clients.core.sgd import Optimizer
from clients.methods.pfl import BASE, HEAD, UNTRAINED
from fedapps.common.seeds import seed_of
from fedapps.common.settings import setting
from strategies.core.domain_distances import a_distances
from strategies.core.replies import Node, Requirement, Update
from strategies.core.strategy import PersonalizedStrategy
from strategies.methods.fedavg import FedAvg
from strategies.methods.pfedhn import PFedHN

PFEDHN_SETTINGS = (
    "embedding_dim",
    "hidden_dim",
    "hidden_layers",
    "chunk_size",
    "server_lr",
    "server_momentum",
)


def _of_pfedhn(name: str) -> Any:
    """pFedHN's setting `name`, which is read only with the base pfedhn."""
    return replace(PFedHN.declared[name], beside="base=pfedhn")


class PFL(PersonalizedStrategy):
    """Trains as `base` = "fedper" or "pfedhn" does, "pfedhn" with the settings of `PFedHN`. A novel
    client gets all personal models, ``<client>/<name>``."""

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
        common: dict[str, Any] = {
            "seed": self.seed,
            "saved_rounds": self.saved_rounds,
            "lr_decay": self.lr_decay,
            "lr_decay_rounds": self.lr_decay_rounds,
        }
        self.trainer: PersonalizedStrategy = FedAvg(**common)
        if self.base == "pfedhn":
            pfedhn_settings = {name: getattr(self, name) for name in PFEDHN_SETTINGS}
            self.trainer = PFedHN(**common, **pfedhn_settings, network=network, buffers=buffers)
        self.keeps_arrays = self.trainer.keeps_arrays
        self.in_place = self.trainer.in_place
        self._heads_stay = self.base == "fedper" and self.requires is not None

    def initialize(self, arrays: Arrays) -> Arrays:
        """The base's; FedPer's without the head."""
        self.initial_model = arrays  # with the head
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
        """The base's model for training clients; for novel clients the personal models, which the
        training clients export on request."""
        training = [node for node in nodes if not node.novel]
        novel = [node for node in nodes if node.novel]
        payloads = self._present_trainer().personalize(arrays, training)
        if novel:
            payloads |= self.offer(arrays, novel)
        return payloads

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The personal models that each novel client gets."""
        return dict.fromkeys(novel, self.personal_models(arrays))

    def personal_models(self, arrays: Arrays) -> Arrays:
        """The models ``<client>/<name>`` of the training clients that export them.

        A model with an untrained head is left out, unless all are untrained. If no training client
        is present, the models are those of the last export."""
        if not self.training_nodes():
            return self.published_models
        sent = self._present_trainer().personalize(arrays, self.training_nodes())
        like = dict.fromkeys(sent, self.initial_model)
        updates = self.exchange("query.export", sent, like=like)
        trained = [update for update in updates if not update.metrics.get(UNTRAINED)]
        models: Arrays = {}
        for update in trained or updates:
            models |= prefixed(str(update.node.client), update.arrays)
        self.published_models = models
        return models

    def _present_trainer(self) -> PersonalizedStrategy:
        """The base, in the present round and with the nodes that are present."""
        self.trainer.nodes = self.nodes
        self.trainer.now = self.now
        return self.trainer


class PFLEnsemble(PFL):
    """With `ensemble_share` below 1, all novel clients get the models of the same random clients:
    this share of the clients that answered, at least one (0.5 in Ye et al.'s released program)."""

    ensemble_share = setting(1.0, "share of the training clients' models to use", "(0, 1]")

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The personal models of the drawn clients; all of them by default."""
        models = self.personal_models(arrays)
        owners = sorted({_owner(name) for name in models})
        count = max(1, round(self.ensemble_share * len(owners)))
        generator = np.random.default_rng(seed_of(self.seed, "ensemble"))
        drawn = set(generator.permutation(owners)[:count].tolist())
        ensemble = {name: array for name, array in models.items() if _owner(name) in drawn}
        return dict.fromkeys(novel, ensemble)


class PFLNearest(PFL):
    """A novel client gets the model of the nearest training client, in A-distance.

    Distances are the estimates 2(1 − 2 err), also below 0: of two clients whose inputs cannot be
    distinguished from the novel client's, the one with the larger error is nearer."""

    persistent_attributes = ("nearest",)
    requires = Requirement(
        "pfl-nearest",
        "answer `query.export` and `query.domain`, which compares inputs",
        offers=("query.export", DOMAIN),
        fallback="its base with nothing personal: FedAvg, or PFedHN",
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nearest: dict[int, int] = {}  # training client by novel client

    def offer(self, arrays: Arrays, novel: Sequence[Node]) -> dict[Node, Arrays]:
        """The model of the nearest training client, among the clients that export theirs."""
        models = self.personal_models(arrays)
        owners = {_owner(name) for name in models}
        new = [node for node in novel if self.nearest.get(node.client) not in owners]
        training = [node for node in self.training_nodes() if node.client in owners]
        if new and not self.training_nodes():
            raise ValueError(
                "pfl-nearest asks the training clients how near they are, so they must be "
                "there: serve its run to nodes, or choose pfl-ensemble"
            )
        if new and training:
            distances = a_distances(self.exchange_together, new, training)
            for node, row in zip(new, distances, strict=True):
                if np.isfinite(row).any():
                    self.nearest[node.client] = self._nearest_of(node, row, training).client
        offers = {}
        for node in novel:
            start = f"{self.nearest.get(node.client)}/"
            model = {name: a for name, a in models.items() if name.startswith(start)}
            if model:
                offers[node] = model
        return offers

    def _nearest_of(self, node: Node, distances: np.ndarray, training: Sequence[Node]) -> Node:
        """The training client at the smallest of the distances (training,), which may be NaN.
        Among equally near ones the seed draws: errors of few inputs are often equal, and the first
        client would be the nearest of most."""
        nearest = np.flatnonzero(distances == np.nanmin(distances))
        generator = np.random.default_rng(seed_of(self.seed, "nearest", node.client))
        return training[int(generator.choice(nearest))]


def _owner(name: str) -> int:
    """The id of the client that exported the array ``<client>/<name>``."""
    return int(name.partition("/")[0])
