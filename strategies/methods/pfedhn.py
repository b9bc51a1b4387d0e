"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork generates every client's model.

Any Flower client can take part that trains the weights it gets and returns them under the same
names. A client whose property ``model`` names one of `models` gets that network's weights (section
5.2). Departs from the paper: Algorithm 1 prints the opposite sign of the update; the surrogate
½‖θ̃_i − h(v_i; φ)‖² gives the sign here. A round has any number of clients: φ follows the mean of
their gradients. An embedding moves only when its client replies; in the authors' code momentum and
weight decay also move those of clients that were not sampled. Only trainable weights are generated;
buffers are averaged on the server (see `strategies.methods._generated_networks`)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from clients.core.arrays import Arrays, group, prefixed, to_tensors
from clients.core.optimizers import SGD, Adam, Optimizer
from clients.methods.pfedhn import NOVEL_ROUNDS
from fedapps.common.resources import memory_left
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import MOMENTUM, NONNEGATIVE, RATE, WIDTH, setting
from strategies.core.replies import Node, Requirement, Update
from strategies.core.rounds import PersonalizedStrategy
from strategies.maths.hypernetwork import Hypernetwork
from strategies.methods._generated_networks import Targets

DESCRIPTOR = "descriptor"
WEIGHTS = "[0, 1000000000]"
CLASS_PROPORTIONS = Requirement("pfedhn-pc", "answer `query.describe`", offers=("query.describe",))


class PFedHN(PersonalizedStrategy):
    """θ_i = h(v_i; φ); the server descends on φ and v_i by one vector–Jacobian product.

    Gradients of φ and v_i are clipped jointly. With `descriptor` = "class-proportions" the clients
    send v_i, and only φ is learnt. The run's rounds are followed by `novel_rounds` in which φ is
    frozen and labeled novel clients learn their v_i (section 5.3). `models` are the arrays of the
    target networks by name, where clients differ in size.

    `network` is the target network's module, or several by name. It is needed where arrays are
    frozen, tied, or buffers that their names do not show, as names that are numbers never do.
    `buffers` are the names of buffers where there is no such module, as with Keras."""

    keeps_arrays = True
    any_model = True
    in_place = True  # the arrays are the parameters that the optimizer moves

    embedding_dim = setting(
        0, "entries of an embedding; 0: 1 + (training clients) // 4", "[0, 4096]"
    )
    hidden_dim = setting(100, "weights for each weight of the network: the trunk's width", WIDTH)
    hidden_layers = setting(3, "hidden layers of the trunk; 0 without bias: θ = W v", "[0, 20]")
    bias = setting(True, "biases in the hypernetwork")
    chunk_size = setting(
        0,
        "weights that one shared output layer generates at a time; 0: a layer for each array",
        WEIGHTS,
    )
    spectral_norm = setting(False, "spectral normalisation of the hypernetwork")
    descriptor = setting(
        "learnt", "embeddings: learnt, or reported by clients", ("learnt", "class-proportions")
    )
    server_optimizer = setting("sgd", "of hypernetwork, embeddings and encoder", ("sgd", "adam"))
    server_lr = setting(0.01, "learning rate of the hypernetwork", RATE)
    embedding_lr = setting(0.0, "learning rate of the embeddings; 0: server-lr", RATE)
    server_momentum = setting(
        0.9, "momentum of the server's SGD", MOMENTUM, beside="server-optimizer=sgd"
    )
    server_weight_decay = setting(0.001, "weight decay of the server's optimizer", "[0, 10]")
    clip_norm = setting(
        50.0, "norm at which each server gradient is clipped; 0: never", NONNEGATIVE
    )
    novel_rounds = NOVEL_ROUNDS

    def __init__(
        self,
        *,
        models: Mapping[str, Arrays] | None = None,
        network: nn.Module | Mapping[str, nn.Module] | None = None,
        buffers: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if settings.get("descriptor", self.descriptor) == "class-proportions":
            self.requires = CLASS_PROPORTIONS
        super().__init__(**settings)
        self._serves_novel = self.evaluate_novel  # once they have learnt
        self.evaluate_novel = self.evaluate_novel and not self.novel_rounds
        self._shape: dict[str, Any] = {
            "hidden_dim": self.hidden_dim,
            "hidden_layers": self.hidden_layers,
            "bias": self.bias,
            "spectral": self.spectral_norm,
            "chunk": self.chunk_size,
        }
        self.embedding_lr = self.embedding_lr or self.server_lr
        self.models = models or {}
        self._modules = {"": network} if isinstance(network, nn.Module) else network
        self._buffers = buffers
        self.embeddings: dict[int, nn.Parameter] = {}  # v_i by client id
        self.hypernetwork: Hypernetwork | None = None  # h(·; φ)
        self.optimizer: Optimizer
        self._generated: list[tuple[list[Node], dict[str, Tensor]]] = []  # graph kept
        self._spread: float | None = None

    # Embeddings

    def ensure_embeddings(self, nodes: Sequence[Node]) -> list[Node]:
        """Give every node its v_i; returns the nodes that have one and whose network is known.

        Learnt ones start at N(0, I), and are kept when a client leaves. Fixed ones are asked for
        once; their size is the most common one."""
        for node in nodes:
            if not self.targets.has(node):
                detail = f"its network {node.properties.get('model')!r} is not known"
                self.messenger.drop(node, "model", detail)
        nodes = [node for node in nodes if self.targets.has(node)]
        new = [node for node in nodes if node.client not in self.embeddings]
        if self.descriptor == "learnt":
            for node in new:
                generator = torch.Generator().manual_seed(
                    seed_of(self.seed, "embedding", node.client)
                )
                self._remember(node.client, torch.randn(self._dim(), generator=generator))
        elif new:
            replies = self.exchange("query.describe", {node: {} for node in new})
            sent = {u.node: u.arrays[DESCRIPTOR] for u in replies if DESCRIPTOR in u.arrays}
            if not self.embedding_dim and sent:
                sizes = Counter(v.size for v in sent.values())
                self.embedding_dim = max(sizes, key=lambda size: (sizes[size], -size))
            for node, v in sent.items():
                if v.shape == (self.embedding_dim,):
                    self._remember(node.client, torch.from_numpy(v.copy()))
                else:
                    self.messenger.drop(node, "shape", f"{DESCRIPTOR} is {v.shape}")
        return [node for node in nodes if node.client in self.embeddings]

    def update_descriptor_statistics(self, nodes: Sequence[Node]) -> None:
        """Called with a training round's nodes before their models are generated."""

    def embedding(self, client: int) -> Tensor:
        """v_i (embedding_dim,) of a client."""
        return self.embeddings[client]

    def _remember(self, client: int, v: Tensor) -> None:
        learnt = self.descriptor == "learnt"
        network = self.network()
        v = v.to(next(network.parameters()).dtype)
        self.embeddings[client] = nn.Parameter(v, requires_grad=learnt)
        if learnt:
            self.optimizer.add([self.embeddings[client]], self.embedding_lr)

    # Hooks

    def initialize(self, arrays: Arrays) -> Arrays:
        """The target networks' arrays are templates of the generated ones."""
        self.targets = Targets(
            self.models or {"": arrays}, self._modules, self._buffers, type(self).__name__
        )
        if self.num_rounds or self.former is None:  # else it only serves
            self._check_memory()
        return arrays

    def _check_memory(self) -> None:
        """Raise ValueError if training φ takes more memory than there is: φ and its gradient, the
        optimizer's moments, and copies of φ and the moments to undo a round."""
        with torch.device("meta"):
            shapes, width = self.targets.shapes(), self.embedding_dim or 1
            phi = sum(p.numel() for p in Hypernetwork(shapes, width, **self._shape).parameters())
        moments = 2 if self.server_optimizer == "adam" else bool(self.server_momentum)
        needed = (3 + 2 * moments) * phi * self.targets.dtype.itemsize
        free = memory_left()
        if needed > free:
            weights = sum(torch.Size(shape).numel() for shape in shapes.values())
            chunk = max(1000, weights // 1000)
            raise ValueError(
                f"the hypernetwork has {phi / 1e6:.3g} million weights for the network's "
                f"{weights / 1e6:.3g} million; its training takes {needed / 1e9:.3g} GB, and "
                f"{free / 1e9:.3g} GB are free. Set chunk-size, as to {chunk}, a smaller "
                f"hidden-dim (now {self.hidden_dim}) or a smaller network"
            )

    def forget(self) -> None:
        """φ, the embeddings, and their optimizer."""
        self.hypernetwork, self.embeddings, self._generated = None, {}, []

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """Saved φ, embeddings and averaged buffers."""
        v = to_tensors(group(saved, "embedding"))
        if not v:
            raise ValueError(f"the saved arrays hold no embedding; their names: {list(saved)[:5]}")
        self.embedding_dim = len(next(iter(v.values())))
        self.network().load_state_dict(to_tensors(group(saved, "hypernetwork")))
        for client, embedding in v.items():
            self._remember(int(client), embedding.clone())
        self.targets.load(group(saved, "buffer"))
        return self.server_arrays()

    @property
    def may_stop(self) -> bool:
        """Never before novel rounds."""
        return super().may_stop and not self.novel_rounds

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **options: Any,
    ) -> Result:
        """As the base, followed by the novel rounds."""
        total = num_rounds + self.novel_rounds
        return super().start(grid, initial_arrays, total, *args, **options)

    def _run(self, *args: Any) -> Result:
        self._last_training_round = self.num_rounds - self.novel_rounds  # a stop moves the former
        return super()._run(*args)

    @property
    def frozen(self) -> bool:
        """Whether this round's clients are the novel ones, and φ is frozen."""
        return bool(self.novel_rounds) and self.round > self._last_training_round

    def sample(self) -> list[Node]:
        """Training clients; in the novel rounds all novel clients."""
        if not self.frozen:
            return super().sample()
        self.selection_phase, self.evaluate_novel = 1, self._serves_novel
        # φ is frozen: training clients' validation cannot choose a round.
        self.report_last_round = True
        return [node for node in self.nodes if node.novel]

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) for every node."""
        with torch.no_grad():
            nodes = self.ensure_embeddings(nodes)
            self.network().eval()
            models: dict[Node, Arrays] = {}
            for name, members in self.targets.by_network(nodes).items():
                models |= self.targets.named(self.generate(members, name), members, name)
            return models

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ); the graph is kept for the vector–Jacobian product."""
        known, nodes = len(self.embeddings), self.ensure_embeddings(nodes)
        self.update_descriptor_statistics(nodes)
        if len(self.embeddings) > known:
            self.arrays = self.server_arrays()  # to which an undone round returns
        self.network().train(not self.frozen).requires_grad_(not self.frozen)
        self._generated = []
        payloads: dict[Node, Arrays] = {}
        for name, members in self.targets.by_network(nodes).items():
            theta = self.generate(members, name)
            self._generated.append((members, theta))
            payloads |= self.targets.named(theta, members, name)
        self._spread = relative_weight_spread([theta for _, theta in self._generated])
        return payloads

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """g_φ = mean_i (∂θ_i/∂φ)ᵀ(θ_i − θ̃_i), g_v = (∂θ_i/∂v_i)ᵀ(θ_i − θ̃_i); descend."""
        replies = {update.node: update for update in updates}
        network = self.network()
        for nodes, theta in self._generated:
            difference = {name: torch.zeros_like(t) for name, t in theta.items()}
            for row, node in enumerate(nodes):
                if node in replies:
                    for name, trained in to_tensors(replies[node].arrays).items():
                        if name in difference:
                            difference[name][row] = theta[name][row].detach() - trained
            torch.autograd.backward(list(theta.values()), list(difference.values()))
        for parameter in network.parameters():
            if parameter.grad is not None and len(updates) > 1:
                parameter.grad /= len(updates)
        for nodes, _ in self._generated:  # no reply: no momentum or decay either
            for node in nodes:
                if node not in replies and node.client in self.embeddings:
                    self.embeddings[node.client].grad = None
        if self.clip_norm > 0:
            learnt = [*network.parameters(), *self.embeddings.values()]
            nn.utils.clip_grad_norm_(learnt, self.clip_norm)
        self.optimizer.step(self.decay)
        self.optimizer.zero_grad()
        self._generated = []
        if not self.frozen:
            self.targets.average(updates)
        return self.server_arrays()

    def optimizers(self) -> list[Optimizer]:
        """One for φ and the embeddings."""
        self.network()
        return [self.optimizer]

    def report(self) -> dict[str, float]:
        """The `spread` of the round's generated models."""
        return {} if self._spread is None else {"weights-spread": self._spread}

    # The hypernetwork

    def generate(self, nodes: Sequence[Node], model: str = "") -> dict[str, Tensor]:
        """h(v_i; φ) for nodes of one target network: arrays (m, *shape) by name."""
        v = torch.stack([self.embedding(node.client).to(self.targets.dtype) for node in nodes])
        return self.network()(v, model)

    def network(self) -> Hypernetwork:
        """The hypernetwork, initialised by the run's seed on the first call."""
        if self.hypernetwork is None:
            with drawing(seed_of(self.seed, "hypernetwork")):
                self.hypernetwork = Hypernetwork(self.targets.shapes(), self._dim(), **self._shape)
            self.hypernetwork.to(self.targets.dtype)
            self.optimizer = self._optimizer(self.hypernetwork.parameters(), self.server_lr)
        return self.hypernetwork

    def server_arrays(self) -> Arrays:
        """``hypernetwork/…`` and ``embedding/<client>``, which share memory, and ``buffer/…``."""
        phi = {n: t.detach().numpy() for n, t in self.network().state_dict().items()}
        v = {str(client): v.detach().numpy() for client, v in self.embeddings.items()}
        averages = prefixed("buffer", self.targets.averages())
        return prefixed("hypernetwork", phi) | prefixed("embedding", v) | averages

    def _dim(self) -> int:
        self.embedding_dim = self.embedding_dim or 1 + len(self.training_nodes()) // 4
        return self.embedding_dim

    def _optimizer(self, parameters: Iterable[Tensor], lr: float) -> Optimizer:
        decay = self.server_weight_decay
        if self.server_optimizer == "adam":
            return Adam(parameters, lr, decay)
        return SGD(parameters, lr, self.server_momentum, decay)


def relative_weight_spread(generated: Sequence[Mapping[str, Tensor]]) -> float | None:
    """The square root of Σ_i ‖w_i − w̄‖² / Σ_i ‖w_i‖² over generated models w_i, with the mean w̄ of
    each network. None for single clients."""
    flat = [torch.cat([t.detach().reshape(len(t), -1) for t in w.values()], 1) for w in generated]
    if all(len(w) < 2 for w in flat):
        return None
    distances = sum(float((w - w.mean(0)).square().sum()) for w in flat)
    return float((distances / sum(float(w.square().sum()) for w in flat)) ** 0.5)
