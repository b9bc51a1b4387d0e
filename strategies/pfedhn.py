"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork generates every client's model.

Driven by named arrays alone, so any Flower client takes part that trains the weights it is sent
and returns them under the same names. Departs from the paper: Algorithm 1 prints the opposite
sign of the update; the surrogate ½‖θ̃_i − h(v_i; φ)‖² fixes it as written here. Any number of
clients a round: φ follows the mean of their gradients, each v_i its own. Arrays that are not
floating point (counters) are averaged, not generated."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.arrays import Arrays, prefixed, to_tensors
from partitions.seeds import seed_of
from strategies.base import Node, PersonalizedStrategy, Update
from strategies.fedavg import weighted_mean
from strategies.hypernetwork import Hypernetwork

OPTIMIZERS = ("sgd", "adam")


class PFedHN(PersonalizedStrategy):
    """θ_i = h(v_i; φ); the server descends on φ and v_i by one vector–Jacobian product.

    `embedding_dim` 0 means 1 + ⌊n/4⌋ for n training clients; `embedding_lr` 0 means
    `server_lr`. Gradients are clipped jointly at norm `clip_norm` (0: never)."""

    keeps_arrays = True

    def __init__(
        self,
        *,
        embedding_dim: int = 0,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
        spectral_norm: bool = False,
        server_optimizer: str = "sgd",
        server_lr: float = 0.01,
        embedding_lr: float = 0.0,
        server_momentum: float = 0.9,
        server_weight_decay: float = 0.001,
        clip_norm: float = 50.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if server_optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown server-optimizer {server_optimizer!r}; known: {OPTIMIZERS}")
        self.embedding_dim = embedding_dim
        self.hidden_dim, self.hidden_layers, self.spectral = (
            hidden_dim,
            hidden_layers,
            spectral_norm,
        )
        self.server_optimizer, self.server_lr = server_optimizer, server_lr
        self.embedding_lr = embedding_lr or server_lr
        self.server_momentum, self.server_weight_decay = server_momentum, server_weight_decay
        self.clip_norm = clip_norm
        self.embeddings: dict[int, nn.Parameter] = {}  # v_i by client id
        self.hypernetwork: Hypernetwork | None = None  # h(·; φ)
        self._optimizer: torch.optim.Optimizer
        self._theta: dict[str, Tensor] = {}  # θ of this round's clients, graph kept
        self._nodes: list[Node] = []

    def initialize(self, arrays: Arrays) -> Arrays:
        """Keep the target network's arrays as the template of what is generated."""
        self.template = {n: a for n, a in arrays.items() if a.dtype.kind == "f"}
        self.counters = {n: a for n, a in arrays.items() if a.dtype.kind != "f"}
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) for every node."""
        with torch.no_grad():
            return self._named(self.generate(nodes), nodes)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ), with the graph kept for the vector–Jacobian product."""
        self._nodes, self._theta = list(nodes), self.generate(nodes)
        return self._named(self._theta, nodes)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """g_φ = mean_i (∂θ_i/∂φ)ᵀ(θ_i − θ̃_i), g_v = (∂θ_i/∂v_i)ᵀ(θ_i − θ̃_i); descend."""
        assert self.hypernetwork is not None
        replies = {update.node: update for update in updates}
        difference = {name: torch.zeros_like(theta) for name, theta in self._theta.items()}
        for row, node in enumerate(self._nodes):
            if node in replies:
                for name, trained in to_tensors(replies[node].arrays).items():
                    if name in difference:
                        difference[name][row] = self._theta[name][row].detach() - trained
        self._optimizer.zero_grad()
        torch.autograd.backward(list(self._theta.values()), list(difference.values()))
        for parameter in self.hypernetwork.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(updates)
        absent = [node for node in self._nodes if node not in replies]
        for node in absent:  # without a reply there is no gradient, hence no momentum or decay
            self.embeddings[node.client].grad = None
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)
        self._optimizer.step()
        self._theta = {}
        if self.counters:
            counts = [{n: u.arrays[n] for n in self.counters} for u in updates]
            self.counters = weighted_mean(counts, [u.num_examples for u in updates])
        return self.server_arrays()

    def generate(self, nodes: Sequence[Node]) -> dict[str, Tensor]:
        """h(v_i; φ) for the nodes' embeddings: arrays (m, *shape) by name."""
        network = self.hypernetwork or self._build()
        return network(torch.stack([self.embedding(node.client) for node in nodes]))

    def embedding(self, client: int) -> nn.Parameter:
        """v_i ~ N(0, I) when the client is first seen, later the one that was learnt."""
        if client not in self.embeddings:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "embedding", client))
            v = nn.Parameter(torch.randn(self.embedding_dim, generator=generator))
            self.embeddings[client] = v
            self._optimizer.add_param_group({"params": [v], "lr": self.embedding_lr})
        return self.embeddings[client]

    def server_arrays(self) -> Arrays:
        """φ as ``hypernetwork/…`` and the embeddings as ``embedding/<client>``, memory shared."""
        assert self.hypernetwork is not None
        own = {n: t.detach().numpy() for n, t in self.hypernetwork.state_dict().items()}
        v = {str(client): v.detach().numpy() for client, v in self.embeddings.items()}
        return prefixed("hypernetwork", own) | prefixed("embedding", v)

    def _build(self) -> Hypernetwork:
        """The hypernetwork, initialised by the run's seed, and the server's optimizer."""
        self.embedding_dim = self.embedding_dim or 1 + len(self.training_nodes()) // 4
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "hypernetwork"))
            self.hypernetwork = Hypernetwork(
                {name: a.shape for name, a in self.template.items()},
                self.embedding_dim,
                self.hidden_dim,
                self.hidden_layers,
                spectral=self.spectral,
            )
        if self.server_optimizer == "sgd":
            self._optimizer = torch.optim.SGD(
                self.hypernetwork.parameters(),
                lr=self.server_lr,
                momentum=self.server_momentum,
                weight_decay=self.server_weight_decay,
            )
        else:
            self._optimizer = torch.optim.Adam(
                self.hypernetwork.parameters(),
                lr=self.server_lr,
                weight_decay=self.server_weight_decay,
            )
        return self.hypernetwork

    def _parameters(self) -> Iterable[nn.Parameter]:
        assert self.hypernetwork is not None
        yield from self.hypernetwork.parameters()
        yield from self.embeddings.values()

    def _named(self, theta: dict[str, Tensor], nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """Row i of every array as node i's model."""
        rows = {name: np.asarray(t.detach().numpy()) for name, t in theta.items()}
        return {
            node: {name: array[i] for name, array in rows.items()} | self.counters
            for i, node in enumerate(nodes)
        }
