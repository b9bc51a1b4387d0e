"""Models that a hypernetwork generates: what a strategy needs of it beside its own rounds.

`Targets` knows which arrays of the clients' networks are generated. `ModelGenerator` holds the
hypernetwork, the embeddings of the clients and their optimizer. pFedHN and the methods that get
their descriptors from an encoder have one each.

Only trainable weights are generated, a tied parameter once. Buffers, such as running statistics,
get no gradient and novel clients have none, so the server sends their mean over the clients,
weighted by sample counts. Frozen parameters do not change."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import (
    Arrays,
    as_type,
    group,
    is_statistic,
    prefixed,
    settled,
    to_tensors,
    wide,
)
from clients.core.saved_states import TAKE_THE_SAME
from clients.core.sgd import SGD, Adam, Optimizer
from clients.models.roles import Roles, roles_of
from fedapps.common.resources import memory_left
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import MOMENTUM, NONNEGATIVE, RATE, WIDTH, Configured, setting
from strategies.core.aggregation import weighted_mean
from strategies.core.replies import Node, Update
from strategies.core.run_state import check_names
from strategies.maths.hypernetwork import Hypernetwork

WEIGHTS = "[0, 1000000000]"
OTHER_WAYS = (
    "pass network=Net(), whose state_dict has arrays of the same number and shapes, or "
    "buffers=('4', '5'), the names of those that are no weights, () if there are none; or "
)
SHOWN = 5  # names of arrays in a message


class GeneratorSettings(Configured):
    """The settings of the hypernetwork and of its optimizer."""

    hidden_dim = setting(100, "width of the trunk: weights of φ for each generated weight", WIDTH)
    hidden_layers = setting(3, "hidden layers of the trunk; 0, without bias: θ = W v", "[0, 20]")
    bias = setting(True, "biases in the hypernetwork")
    chunk_size = setting(
        0,
        "weights that one shared output layer generates at a time; 0: one layer per array",
        WEIGHTS,
    )
    spectral_norm = setting(False, "spectral normalisation of the hypernetwork")
    server_optimizer = setting(
        "sgd", "optimizer of hypernetwork, embeddings and encoder", ("sgd", "adam")
    )
    server_lr = setting(0.01, "learning rate of the hypernetwork", RATE)
    embedding_lr = setting(0.0, "learning rate of the embeddings; 0: server-lr", RATE)
    server_momentum = setting(
        0.9, "momentum of the server's SGD", MOMENTUM, beside="server-optimizer=sgd"
    )
    server_weight_decay = setting(0.001, "weight decay of the server's optimizer", "[0, 10]")
    clip_norm = setting(50.0, "clip each server gradient to this norm; 0: off", NONNEGATIVE)


def build_optimizer(
    settings: GeneratorSettings, parameters: Iterable[Tensor], lr: float
) -> Optimizer:
    """The optimizer that `settings` choose, at the learning rate `lr`."""
    if settings.server_optimizer == "adam":
        return Adam(parameters, lr, settings.server_weight_decay)
    return SGD(parameters, lr, settings.server_momentum, settings.server_weight_decay)


class ModelGenerator:
    """θ_i = h(v_i; φ) for the clients' networks, and the descent on φ and on learnt v_i.

    `embeddings` holds v_i (embedding_dim,) by client id. If `learns_embeddings`, the optimizer
    moves them. A strategy may pass any other v_i, such as a descriptor that a client computed.

    The hypernetwork is initialised by `seed` when it is first needed. If `embedding_dim` is 0 by
    then, `default_dim` is called: the number of training clients is known only during a run."""

    def __init__(
        self,
        settings: GeneratorSettings,
        targets: "Targets",
        seed: int,
        *,
        embedding_dim: int,
        default_dim: Callable[[], int] | None = None,
        learns_embeddings: bool = True,
    ) -> None:
        self.targets = targets
        self.embedding_dim = embedding_dim  # entries of an embedding; 0: not known yet
        self.embeddings: dict[int, nn.Parameter] = {}
        self.hypernetwork: Hypernetwork | None = None  # h(·; φ)
        self.optimizer: Optimizer  # of φ and of learnt embeddings
        self.weight_spread: float | None = None  # of the round's models, `relative_weight_spread`
        self._settings = settings
        self._seed = seed
        self._default_dim = default_dim
        self._learns_embeddings = learns_embeddings
        # The round's models by network, with the graph that leads back to φ and v_i
        self._generated: list[tuple[list[Node], dict[str, Tensor]]] = []

    # φ and the embeddings

    def network(self) -> Hypernetwork:
        """The hypernetwork, initialised by the first call."""
        if self.hypernetwork is None:
            if not self.embedding_dim and self._default_dim is not None:
                self.embedding_dim = self._default_dim()
            with drawing(seed_of(self._seed, "hypernetwork")):
                spectral = self._settings.spectral_norm
                hypernetwork = self._build(self.embedding_dim, spectral=spectral)
            self.hypernetwork = hypernetwork.to(self.targets.dtype)
            lr = self._settings.server_lr
            self.optimizer = build_optimizer(self._settings, hypernetwork.parameters(), lr)
        return self.hypernetwork

    def built_optimizer(self) -> Optimizer:
        """The optimizer of φ and of learnt embeddings; φ is initialised if it is not yet."""
        self.network()
        return self.optimizer

    def draw_embedding(self, client: int) -> None:
        """Start a client's embedding at N(0, I), by the seed and the client's id alone."""
        self.network()  # decides `embedding_dim`
        generator = torch.Generator().manual_seed(seed_of(self._seed, "embedding", client))
        self.add_embedding(client, torch.randn(self.embedding_dim, generator=generator))

    def add_embedding(self, client: int, v: Tensor) -> None:
        """Hold v (embedding_dim,) as a client's embedding."""
        network = self.network()
        v = v.to(next(network.parameters()).dtype)
        embedding = nn.Parameter(v, requires_grad=self._learns_embeddings)
        self.embeddings[client] = embedding
        if self._learns_embeddings:
            lr = self._settings.embedding_lr or self._settings.server_lr
            self.optimizer.add([embedding], lr)

    def _build(self, embedding_dim: int, *, spectral: bool) -> Hypernetwork:
        settings = self._settings
        return Hypernetwork(
            self.targets.shapes(),
            embedding_dim,
            settings.hidden_dim,
            settings.hidden_layers,
            spectral=spectral,
            bias=settings.bias,
            chunk=settings.chunk_size,
        )

    def check_memory(self) -> None:
        """Raise ValueError if training φ takes more memory than is free.

        Memory is needed for φ and its gradient, for the optimizer's moments, and for the copies of
        φ and of the moments to which an undone round returns."""
        shapes = self.targets.shapes()
        with torch.device("meta"):  # counts the weights without allocating them
            # Spectral normalisation adds no weights, and takes seconds to set up.
            hypernetwork = self._build(self.embedding_dim or 1, spectral=False)
        phi = sum(parameter.numel() for parameter in hypernetwork.parameters())
        moments = 0
        if self._settings.server_optimizer == "adam":
            moments = 2
        elif self._settings.server_momentum:
            moments = 1
        needed = (3 + 2 * moments) * phi * self.targets.dtype.itemsize
        free = memory_left()
        if needed > free:
            weights = sum(torch.Size(shape).numel() for shape in shapes.values())
            chunk = max(1000, weights // 1000)
            raise ValueError(
                f"the hypernetwork has {phi / 1e6:.3g} million weights for the network's "
                f"{weights / 1e6:.3g} million; its training takes {needed / 1e9:.3g} GB, and "
                f"{free / 1e9:.3g} GB are free. Set chunk-size, as to {chunk}, a smaller "
                f"hidden-dim (now {self._settings.hidden_dim}) or a smaller network"
            )

    # A round

    def generate(self, vectors: Sequence[Tensor], network: str = "") -> dict[str, Tensor]:
        """h(v_i; φ) for the v_i (embedding_dim,) of m nodes with one target network: arrays
        (m, *shape) by name."""
        v = torch.stack([vector.to(self.targets.dtype) for vector in vectors])
        return self.network()(v, network)

    def models(self, vectors: Mapping[Node, Tensor]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) for each node's v_i, to be evaluated."""
        self.network().eval()
        models: dict[Node, Arrays] = {}
        with torch.no_grad():
            for network, nodes in self.targets.by_network(list(vectors)).items():
                theta = self.generate([vectors[node] for node in nodes], network)
                models |= self.targets.named(theta, nodes, network)
        return models

    def models_to_train(
        self, vectors: Mapping[Node, Tensor], *, frozen: bool = False, also: bool = False
    ) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) for each node's v_i. The graph is kept for `descend`, which moves φ
        unless it is `frozen`. With `also` the graph is kept beside that of the last call."""
        # In training mode a spectral norm's power iteration steps, which would change a frozen φ.
        self.network().train(not frozen).requires_grad_(not frozen)
        if not also:
            self._generated = []
        models: dict[Node, Arrays] = {}
        for network, nodes in self.targets.by_network(list(vectors)).items():
            theta = self.generate([vectors[node] for node in nodes], network)
            self._generated.append((nodes, theta))
            models |= self.targets.named(theta, nodes, network)
        if not also:
            self.weight_spread = relative_weight_spread([theta for _, theta in self._generated])
        return models

    def descend(
        self, updates: Sequence[Update], rate_factor: float, also_moved: Iterable[int] = ()
    ) -> None:
        """g_φ = mean_i (∂θ_i/∂φ)ᵀ(θ_i − θ̃_i) and g_v = (∂θ_i/∂v_i)ᵀ(θ_i − θ̃_i), with the trained
        θ̃_i of `updates`; then one step at `rate_factor` times the learning rates.

        The embeddings of the clients `also_moved` take the step with the gradient 0 if they have
        no other. The gradient of a v_i that the strategy passed stays in its ``grad``."""
        trained = {update.node: update.arrays for update in updates}
        self._backpropagate(trained)
        # φ follows the mean over clients; each v_i has the gradient of its own client.
        parameters = list(self.network().parameters())
        for parameter in parameters:
            if parameter.grad is not None and len(updates) > 1:
                parameter.grad /= len(updates)
        self._drop_unused_gradients(trained)
        if self._settings.clip_norm > 0:
            learnt = [*parameters, *self.embeddings.values()]
            nn.utils.clip_grad_norm_(learnt, self._settings.clip_norm)
        for client in also_moved:
            embedding = self.embeddings.get(client)
            if embedding is not None and embedding.grad is None:
                embedding.grad = torch.zeros_like(embedding)
        self.optimizer.step(rate_factor)
        self.optimizer.zero_grad()
        self._generated = []

    def _backpropagate(self, trained: Mapping[Node, Arrays]) -> None:
        """Add Σ_i (∂θ_i/∂·)ᵀ(θ_i − θ̃_i) to the gradients of φ and v_i; nodes without a reply add
        zero."""
        for nodes, theta in self._generated:
            differences = {name: torch.zeros_like(array) for name, array in theta.items()}
            for row, node in enumerate(nodes):
                reply = to_tensors(trained.get(node, {}))
                for name, array in reply.items():
                    if name in differences:
                        differences[name][row] = theta[name][row].detach() - array
            torch.autograd.backward(list(theta.values()), list(differences.values()))

    def _drop_unused_gradients(self, trained: Mapping[Node, Arrays]) -> None:
        """Without a reply an embedding keeps its place: momentum and decay would move it, too."""
        for nodes, _ in self._generated:
            for node in nodes:
                if node not in trained and node.client in self.embeddings:
                    self.embeddings[node.client].grad = None

    # What is saved

    def arrays(self) -> Arrays:
        """``hypernetwork/…`` and ``embedding/<client>``, which share memory, and ``buffer/…``."""
        phi = {name: t.detach().numpy() for name, t in self.network().state_dict().items()}
        embeddings = {str(client): v.detach().numpy() for client, v in self.embeddings.items()}
        return (
            prefixed("hypernetwork", phi)
            | prefixed("embedding", embeddings)
            | prefixed("buffer", self.targets.averages())
        )

    def restore(self, saved: Arrays) -> None:
        """Load the φ, the embeddings and the averaged buffers of saved `arrays`. Raises ValueError
        if they generate another network."""
        embeddings = to_tensors(group(saved, "embedding"))
        if embeddings:
            self.embedding_dim = len(next(iter(embeddings.values())))
        for client, embedding in embeddings.items():
            self.add_embedding(int(client), embedding.clone())
        phi = to_tensors(group(saved, "hypernetwork"))
        saved_shapes = {name: tensor.shape for name, tensor in phi.items()}
        own_shapes = {name: t.shape for name, t in self.network().state_dict().items()}
        if saved_shapes != own_shapes:
            raise ValueError(
                "the saved hypernetwork has other layers, or generates another network: "
                f"{TAKE_THE_SAME}, and the hypernetwork's settings"
            )
        self.network().load_state_dict(phi)
        self.targets.load(group(saved, "buffer"))

    def forget(self) -> None:
        """Drop φ, the embeddings and their optimizer; `restore` builds them anew."""
        self.hypernetwork = None
        self.embeddings = {}
        self._generated = []


def relative_weight_spread(generated: Sequence[Mapping[str, Tensor]]) -> float | None:
    """√(Σ_i ‖w_i − w̄‖² / Σ_i ‖w_i‖²) over generated models w_i, with the mean w̄ of each network.

    `generated` holds the arrays (m, *shape) of each network. None if each has a single client."""
    distances = 0.0
    sizes = 0.0
    comparable = False
    for theta in generated:
        flat = torch.cat([array.detach().reshape(len(array), -1) for array in theta.values()], 1)
        comparable = comparable or len(flat) > 1
        distances += float((flat - flat.mean(0)).square().sum())
        sizes += float(flat.square().sum())
    if not comparable:
        return None
    return float((distances / sizes) ** 0.5)


class Targets:
    """Target networks by name, each with its arrays; the only one of a run is named "".

    `modules` show which arrays are buffers, frozen or tied. Their arrays have the networks' names,
    or the same number and shapes where arrays are named by number. Without a module, `buffers`
    names the arrays that are averaged. Without either, statistics are recognised by their names
    (see `clients.core.arrays.is_statistic`), and nothing is frozen or tied.

    Raises ValueError if modules or `buffers` fit no network, if statistics cannot be recognised,
    and if no array is left to generate."""

    def __init__(
        self,
        networks: Mapping[str, Arrays],
        modules: Mapping[str, nn.Module] | None = None,
        buffers: Sequence[str] | None = None,
        strategy: str = "PFedHN",
    ) -> None:
        modules = modules or {}
        _check_networks(networks, modules)
        _check_buffers(networks, modules, buffers)
        self._arrays = {network: dict(arrays) for network, arrays in networks.items()}
        self._learnt: dict[str, Arrays] = {}  # templates of the generated arrays, by network
        self._tied: dict[str, Mapping[str, str]] = {}  # by network: a name, and whose array it has
        self.averaged: dict[str, Arrays] = {}  # buffers by network
        for network, arrays in networks.items():
            if network in modules:
                roles = _named_roles(modules[network], arrays, network)
            else:
                if buffers is None:
                    check_names(arrays, strategy, OTHER_WAYS)
                roles = Roles(frozenset(buffers or ()), frozenset(), {})
            averaged = {}
            for name, array in arrays.items():
                if name in roles.buffers or is_statistic(name, array):
                    averaged[name] = array
            not_generated = {*averaged, *roles.frozen, *roles.tied}
            self._tied[network] = roles.tied
            self.averaged[network] = averaged
            self._learnt[network] = {n: a for n, a in arrays.items() if n not in not_generated}
            if not self._learnt[network]:
                raise ValueError(
                    "the network has no trainable weights that could be generated; buffers, "
                    f"frozen or tied are {', '.join(arrays):.500}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of generated arrays: that of the networks, float32 at least."""
        learnt = next(iter(self._learnt.values()))
        first = next(iter(learnt.values()))
        return torch.from_numpy(wide(np.zeros(0, first.dtype))).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Generated shapes by ``<network>/<array>``, or ``<array>`` of the only network."""
        shapes = {}
        for network, arrays in self._learnt.items():
            for name, array in arrays.items():
                shapes[_joined(network, name)] = array.shape
        return shapes

    def by_network(self, nodes: Sequence[Node]) -> dict[str, list[Node]]:
        """The nodes by their target network."""
        groups: dict[str, list[Node]] = {}
        for node in nodes:
            groups.setdefault(self._of(node), []).append(node)
        return groups

    def has(self, node: Node) -> bool:
        """Whether the node's network is known."""
        return self._of(node) in self._arrays

    def named(
        self, theta: Mapping[str, Tensor], nodes: Sequence[Node], network: str
    ) -> dict[Node, Arrays]:
        """Row i of every array as the model of node i, in the network's order and dtypes."""
        learnt = self._learnt[network]
        tied = self._tied[network]
        other_arrays = self._arrays[network] | self.averaged[network]
        rows = {}
        for name, tensor in theta.items():
            rows[name] = as_type(tensor.detach().numpy(), learnt[name].dtype)
        models: dict[Node, Arrays] = {}
        for i, node in enumerate(nodes):
            model = {}
            for name, other in other_arrays.items():
                source = tied.get(name, name)
                model[name] = np.asarray(rows[source][i]) if source in rows else other
            models[node] = model
        return models

    def average(self, updates: Sequence[Update]) -> None:
        """Average the replies' buffers, weighted by sample counts."""
        for network, old_buffers in self.averaged.items():
            replies = [update for update in updates if self._of(update.node) == network]
            if not old_buffers or not replies:
                continue
            new_buffers = []  # of each reply
            for update in replies:
                new_buffers.append({name: update.arrays[name] for name in old_buffers})
            mean = weighted_mean(new_buffers, [update.num_examples for update in replies])
            self.averaged[network] = settled(mean, old_buffers)

    def averages(self) -> Arrays:
        """The averaged buffers by ``<network>/<array>``, or ``<array>`` of the only network."""
        averages = {}
        for network, buffers in self.averaged.items():
            for name, array in buffers.items():
                averages[_joined(network, name)] = array
        return averages

    def load(self, saved: Arrays) -> None:
        """Load saved `averages`; buffers that are not among them do not change."""
        for network, buffers in self.averaged.items():
            loaded = {}
            for name, array in buffers.items():
                loaded[name] = saved.get(_joined(network, name), array)
            self.averaged[network] = loaded

    def _of(self, node: Node) -> str:
        return "" if "" in self._arrays else str(node.properties.get("model", ""))


def _joined(network: str, name: str) -> str:
    """The name of a network's array among those of all networks."""
    return f"{network}/{name}" if network else name


def _check_networks(networks: Mapping[str, Arrays], modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for what is no module, and for a module of no network."""
    given_modules = modules.values() if isinstance(modules, Mapping) else [modules]
    for module in given_modules:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"network= is {module!r:.80}, which is no torch.nn.Module; give an instance, as "
                "network=Net()"
            )
    unknown = sorted(modules.keys() - networks.keys())
    if unknown:
        names = ", ".join(name or "one network without a name" for name in networks)
        given = unknown[0] or "one module"
        raise ValueError(
            f"network= is {given}, but the arrays are those of {names}: give a module "
            "for each by its name, as models= has them"
        )


def _check_buffers(
    networks: Mapping[str, Arrays],
    modules: Mapping[str, nn.Module],
    buffers: Sequence[str] | None,
) -> None:
    """Raise ValueError for `buffers` that name no array, or beside a module, which shows them."""
    if buffers is None:
        return
    if isinstance(buffers, str):
        raise ValueError(f"buffers= is {buffers!r:.80}; give a tuple of names, ({buffers!r:.80},)")
    if modules:
        raise ValueError("network= tells which arrays are buffers; leave out buffers=")
    known: set[str] = set()
    for arrays in networks.values():
        known |= arrays.keys()
    unknown = sorted(set(map(str, buffers)) - known)
    if unknown:
        raise ValueError(
            f"buffers= names {unknown[0]!r}, which is no array: {', '.join(sorted(known)):.500}"
        )


def _named_roles(module: nn.Module, arrays: Arrays, network: str) -> Roles:
    """The roles of the module's arrays, under the names of `arrays`. Raises ValueError if neither
    names nor, where names are numbers, number and shapes are the same."""
    roles = roles_of(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    misfits = _misfits(arrays, shapes)
    if not misfits:
        return roles
    # Numbers come from a list of arrays, whose order is that of the module's state_dict.
    if all(name.isdecimal() for name in arrays):
        by_number = dict(zip(arrays, shapes.values(), strict=False))
        misfits = _misfits(arrays, by_number)
        if not misfits and len(arrays) == len(shapes):
            return _renamed(roles, dict(zip(shapes, arrays, strict=True)))
    # Without a misfit the number of arrays is wrong.
    wrong = ", ".join(misfits[:SHOWN]) or f"{len(arrays)} arrays"
    known = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    of_network = f" of {network!r}" if network else ""
    raise ValueError(
        f"network= is {type(module).__name__}, which does not fit the arrays{of_network}: "
        f"{wrong} are not among its own: {known:.500}; pass the clients' "
        "network, or arrays as its state_dict lists them"
    )


def _misfits(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Name and shape of each array whose name has another shape in `shapes`, or none."""
    misfits = []
    for name, array in arrays.items():
        if shapes.get(name) != array.shape:
            misfits.append(f"{name} {array.shape}")
    return misfits


def _renamed(roles: Roles, names: Mapping[str, str]) -> Roles:
    """The roles under other names, which `names` holds by the former ones."""
    return Roles(
        frozenset(names[name] for name in roles.buffers),
        frozenset(names[name] for name in roles.frozen),
        {names[name]: names[source] for name, source in roles.tied.items()},
    )
