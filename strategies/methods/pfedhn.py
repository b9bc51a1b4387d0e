"""pFedHN (Shamsian et al., ICML 2021, Algorithm 1): a hypernetwork generates every client's model.

Any Flower client can take part that trains the weights it gets and returns them under the same
names. A client whose property ``model`` names one of `models` gets that network's weights (section
5.2). Departs from the paper: Algorithm 1 prints the opposite sign of the update; the surrogate
½‖θ̃_i − h(v_i; φ)‖² gives the sign here. A round has any number of clients: φ follows the mean of
their gradients. An embedding moves only when its client replies; in the authors' code momentum and
weight decay also move those of clients that were not sampled, as with `moved_embeddings` = "all".
Their Adam has no weight decay; with `server_optimizer` = "adam" that is `server_weight_decay` = 0.
Each of their local steps draws its batch anew, as with `batch_draws` = "independent"; the default
are passes. They clip local gradients at 50, as `local_clip_norm` does here by default.

Only trainable weights are generated; buffers are averaged on the server (see
`strategies.methods._generated_networks`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.sgd import Optimizer
from clients.methods.pfedhn import NOVEL_ROUNDS
from fedapps.common.settings import setting
from fedapps.common.tasks import CLASSES, ForTasks
from strategies.core.replies import Node, Requirement, Update
from strategies.core.strategy import PersonalizedStrategy, check_num_rounds
from strategies.methods._generated_networks import GeneratorSettings, ModelGenerator, Targets

DESCRIPTOR = "descriptor"  # name of v_i in a client's reply
CLASS_PROPORTIONS = Requirement("pfedhn-pc", "answer `query.describe`", offers=("query.describe",))


def class_shares(counts: NDArray[Any], totals: Sequence[float]) -> NDArray[Any]:
    """p̂_i (C,) float32: a client's samples of each class, divided by those of all training clients.
    A class that no training client has gets 0."""
    of_all = np.array(totals, np.float32)
    shares = np.zeros_like(counts)
    np.divide(counts, of_all, out=shares, where=of_all > 0)
    return shares


class PFedHN(GeneratorSettings, PersonalizedStrategy):
    """θ_i = h(v_i; φ); the server descends on φ and v_i by one vector–Jacobian product.

    Gradients of φ and v_i are clipped jointly. With `descriptor` = "class-proportions" the clients
    send v_i, and only φ is learnt. With "class-shares" v_i is p̂_i of section 5.3: the share of each
    class's samples that client i has, so the training clients' v_i sum to 1 in each entry. The
    run's rounds are followed by `novel_rounds` in which φ is frozen and labeled novel clients learn
    their v_i (section 5.3). `models` are the arrays of the target networks by name, where clients
    differ in size.

    `network` is the target network's module, or several by name. It is needed if some arrays are
    frozen or tied, or are buffers whose names do not show it; numbers never show it. `buffers` are
    the names of buffers where there is no such module, as with Keras."""

    keeps_arrays = True
    any_model = True
    uses_late_replies = True
    persistent_attributes = ("class_totals", "embedding_source")
    in_place = True  # the arrays are the parameters that the optimizer moves

    # The reports count the samples of each class.
    settings_for_tasks: ClassVar = {"descriptor": ForTasks((CLASSES,), "learnt")}

    embedding_dim = setting(
        0, "entries of an embedding; 0: 1 + (training clients) // 4", "[0, 4096]"
    )
    descriptor = setting(
        "learnt",
        "source of the embeddings: learnt, or the clients' reports",
        ("learnt", "class-proportions", "class-shares"),
    )
    moved_embeddings = setting(
        "sampled",
        "embeddings that momentum and weight decay move in a round: those of the clients that "
        "replied, or all, as in the authors' code",
        ("sampled", "all"),
        beside="descriptor=learnt",
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
        if settings.get("descriptor", self.descriptor) != "learnt":
            self.requires = CLASS_PROPORTIONS
        super().__init__(**settings)
        self.models = models or {}
        self._modules = {"": network} if isinstance(network, nn.Module) else network
        self._buffers = buffers
        self.generator: ModelGenerator  # h(·; φ) and the embeddings v_i
        self.class_totals: list[float] = []  # samples of each class at all training clients
        self.embedding_source = self.descriptor

    # The run

    def initialize(self, arrays: Arrays) -> Arrays:
        """The target networks' arrays are templates of the generated ones."""
        networks = self.models or {"": arrays}
        targets = Targets(networks, self._modules, self._buffers, type(self).__name__)
        self.generator = ModelGenerator(
            self,
            targets,
            self.seed,
            embedding_dim=self.embedding_dim,
            default_dim=self._default_embedding_dim,
            learns_embeddings=self.descriptor == "learnt",
        )
        serves_only = self.num_rounds == 0 and self.former is not None
        if not serves_only:
            self.generator.check_memory()
        return arrays

    def _default_embedding_dim(self) -> int:
        return 1 + len(self.training_nodes()) // 4

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """Saved φ, embeddings and averaged buffers."""
        if not any(name.startswith("embedding/") for name in saved):
            raise ValueError(f"the saved arrays hold no embedding; their names: {list(saved)[:5]}")
        self.generator.restore(saved)
        dim = self.generator.embedding_dim
        if self.embedding_dim not in (0, dim):
            raise ValueError(
                f"embedding-dim is {self.embedding_dim}, and the saved embeddings have {dim} "
                f"entries: set it to {dim}, or to 0, which takes those of the saved run"
            )
        return self.generator.arrays()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """The saved embeddings must come from the same source."""
        saved = state.get("kept", {}).get("embedding_source", self.descriptor)
        if saved != self.descriptor:
            raise ValueError(
                f"descriptor is {self.descriptor!r}, and the saved run's embeddings are those of "
                f"descriptor={saved!r}: set that, or train again"
            )

    def forget(self) -> None:
        """φ, the embeddings, and their optimizer."""
        self.generator.forget()

    def optimizers(self) -> list[Optimizer]:
        """The one of φ and the embeddings."""
        return [self.generator.built_optimizer()]

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **options: Any,
    ) -> Result:
        """As the base, followed by the novel rounds."""
        check_num_rounds(num_rounds)
        total = num_rounds + self.novel_rounds
        return super().start(grid, initial_arrays, total, *args, **options)

    def _run(self, *args: Any) -> Result:
        # Fixed before the first round: a run that ends early lowers `num_rounds`.
        self._last_training_round = self.num_rounds - self.novel_rounds
        return super()._run(*args)

    @property
    def may_stop(self) -> bool:
        """Never before novel rounds."""
        return super().may_stop and not self.novel_rounds

    @property
    def frozen(self) -> bool:
        """Whether this round's clients are the novel ones, and φ is frozen."""
        return bool(self.novel_rounds) and self.round > self._last_training_round

    @property
    def evaluates_novel(self) -> bool:
        """Novel clients with novel rounds are evaluated once they learn."""
        return super().evaluates_novel and (self.frozen or not self.novel_rounds)

    def sample(self) -> list[Node]:
        """Training clients; in the novel rounds all novel clients."""
        if not self.frozen:
            return super().sample()
        self.selection_phase = 1
        # φ is frozen: training clients' validation cannot choose a round.
        self.report_last_round = True
        return [node for node in self.nodes if node.novel]

    # A round

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ); the graph is kept for the vector–Jacobian product."""
        embeddings_before = len(self.generator.embeddings)
        self._draw_those_that_move()
        vectors = self._vectors(self.ensure_embeddings(nodes))
        if len(self.generator.embeddings) > embeddings_before:
            self.arrays = self.generator.arrays()  # the state to which an undone round returns
        return self.generator.models_to_train(vectors, frozen=self.frozen)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Descend on φ and v_i, see `ModelGenerator.descend`; average the clients' buffers."""
        others = [node.client for node in self._nodes_that_move()]
        self.generator.descend(updates, self.decay, others)
        if not self.frozen:
            self.generator.targets.average(updates)
        return self.generator.arrays()

    def late_starts(self, sent: Mapping[Node, Arrays]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) of the present φ and v_i, with its graph; none if φ is frozen now, and
        was not when the client began."""
        nodes = [node for node in sent if node.novel == self.frozen]
        if not nodes:
            return {}
        return self.generator.models_to_train(self._vectors(nodes), frozen=self.frozen, also=True)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """θ_i = h(v_i; φ) for every node; the class proportions of new clients are requested."""
        return self.generator.models(self._vectors(self.ensure_embeddings(nodes)))

    def report(self) -> dict[str, float]:
        """The relative spread of the round's generated weights, if they can be compared."""
        spread = self.generator.weight_spread
        return {} if spread is None else {"weights-spread": spread}

    # Embeddings

    def known_clients(self) -> set[int]:
        """Those with an embedding."""
        return set(self.generator.embeddings)

    def ensure_embeddings(self, nodes: Sequence[Node]) -> list[Node]:
        """Give every node a v_i; returns the nodes that have one and whose network is known.

        Learnt ones start at N(0, I), and are kept when a client leaves. Class proportions are
        requested once."""
        known = []
        for node in nodes:
            if self.generator.targets.has(node):
                known.append(node)
            else:
                detail = f"its network {node.properties.get('model')!r} is not known"
                self.receiver.drop(node, "model", detail)
        embeddings = self.generator.embeddings
        new = [node for node in known if node.client not in embeddings]
        if self.descriptor == "learnt":
            for node in new:
                self.generator.draw_embedding(node.client)
        elif new:
            self._request_class_proportions(new)
        return [node for node in known if node.client in embeddings]

    def _nodes_that_move(self) -> list[Node]:
        """With `moved_embeddings` = "all" the present clients of the round's role."""
        if self.moved_embeddings != "all" or self.descriptor != "learnt":
            return []
        if self.frozen:
            return [node for node in self.nodes if node.novel]
        return list(self.training_nodes())

    def _draw_those_that_move(self) -> None:
        """Weight decay moves an embedding from the first round on, so it must be there by then."""
        with_network = [n for n in self._nodes_that_move() if self.generator.targets.has(n)]
        self.ensure_embeddings(with_network)

    def _request_class_proportions(self, nodes: Sequence[Node]) -> None:
        """Store what the nodes' reports of class proportions give. The most common size is the
        valid one, the smallest of several. For "class-shares" the first request also goes to all
        training clients, whose counts add up to the totals. All later counts are divided by the
        same totals."""
        asked = list(nodes)
        asks_for_totals = self.descriptor == "class-shares" and not self.class_totals
        if asks_for_totals:
            for node in self.training_nodes():
                if self.generator.targets.has(node) and node not in asked:
                    asked.append(node)
        replies = self.exchange("query.describe", {node: {} for node in asked})
        vectors = self._valid_proportions(replies)
        if self.descriptor == "class-shares":
            vectors = self._shares_of_classes(vectors, replies, asks_for_totals)
        for node, v in vectors.items():
            self.generator.add_embedding(node.client, torch.from_numpy(v.copy()))

    def _valid_proportions(self, replies: Sequence[Update]) -> dict[Node, NDArray[Any]]:
        """The class proportions (C,) in the replies, each of the size that most of them have."""
        vectors = {}
        for reply in replies:
            if DESCRIPTOR in reply.arrays:
                vectors[reply.node] = reply.arrays[DESCRIPTOR]
        if not self.generator.embedding_dim and vectors:
            # By majority, since the first reply may be false.
            counts = Counter(v.size for v in vectors.values())
            self.generator.embedding_dim = max(counts, key=lambda size: (counts[size], -size))
        valid: dict[Node, NDArray[Any]] = {}
        for node, v in vectors.items():
            if v.shape == (self.generator.embedding_dim,):
                valid[node] = v
            else:
                self.receiver.drop(node, "shape", f"{DESCRIPTOR} is {v.shape}")
        return valid

    def _shares_of_classes(
        self,
        proportions: Mapping[Node, NDArray[Any]],
        replies: Sequence[Update],
        makes_totals: bool,
    ) -> dict[Node, NDArray[Any]]:
        """p̂_i of each node whose class `proportions` are known, see `class_shares`.

        If it `makes_totals`, the totals are those of the training clients among the nodes. A node
        is left out while no training client's counts are known."""
        examples = {update.node: update.num_examples for update in replies}
        class_counts = {node: v * np.float32(examples[node]) for node, v in proportions.items()}
        if makes_totals:
            of_training = [v for node, v in class_counts.items() if not node.novel]
            if of_training:
                self.class_totals = np.sum(of_training, axis=0).tolist()
        shares: dict[Node, NDArray[Any]] = {}
        for node, counts in class_counts.items():
            if self.class_totals:
                shares[node] = class_shares(counts, self.class_totals)
            else:
                detail = "no training client has sent the class counts that its own are divided by"
                self.receiver.drop(node, "model", detail)
        return shares

    def _vectors(self, nodes: Sequence[Node]) -> dict[Node, Tensor]:
        """v_i of each node."""
        return {node: self.generator.embeddings[node.client] for node in nodes}
