"""FedEmbed client (Silva et al., 2022, Algorithm 1, lines 6-21).

Θ_e is the encoder, Θ_k the head of sub-population k, Θ_g the global head, Θ_t the type head and v_u
the user's embedding. Three losses and the parameters that their gradients reach:
- CE of the user's head: Θ_e, Θ_k, v_u;
- CE of the type head: Θ_e, Θ_t, v_u;
- CE of the global head: Θ_g, v_u, by a stop-gradient at the encoder.
By default this stop is behind the encoder, and the last gradient reaches v_u as it is appended to
the features. The paper's sentence, "gradients from the global classification head only update the
personal embeddings", may also mean that they pass through the encoder to diag(v_u), and leave the
encoder's weights alone: `global_gradient` = "input".
v_u stays on the client; only prototypical users, who are volunteers, send it.

Ours, since the paper leaves it open: the triplet loss descends by SGD, sample by sample. With
*personal* assignment the head stays on the client unless the server holds it. With more
sub-populations than types T, head k belongs to type k mod T. A map may have fewer."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from clients.core.arrays import Arrays, group
from clients.core.client import Config, Metrics
from clients.core.protocol import HEAD, HEADS, round_of
from clients.methods._preferences import EMBEDDING, GlobalPlusClient, enclose
from fedapps.common.seeds import seed_of
from fedapps.common.settings import NONNEGATIVE, POSITIVE, POSITIVE_INT, setting
from partitions.datasets.loading import Info
from partitions.preference_federation import RANK
from partitions.shares import SUB_POPULATION

ASSIGNMENT = setting(
    "prototype", "how users find their head", ("prototype", "som", "personal", "type")
)
PERSONAL_HEAD = "heads.0."  # prefix of a user's head that the server holds


def check_heads(heads: str, assignment: str) -> None:
    """Raise ValueError if the settings let the server hold heads that are not personal."""
    if heads == "server" and assignment != "personal":
        raise ValueError(
            f"fedembed.heads is 'server' and assignment {assignment!r}; the server "
            "can hold only personal heads, so set assignment to 'personal' or heads to 'client'"
        )


def distances(v: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """‖v − c_k‖ (K,) for the embedding v (d,) and centers (K, d)."""
    return np.linalg.norm(centers - v, axis=1)


def triplet_step(
    v: np.ndarray, p_k: np.ndarray, p_n: np.ndarray, margin: float, lr: float
) -> np.ndarray:
    """v − lr ∂/∂v max(0, ‖v − p_k‖² − ‖v − p_n‖² + α), Eq. (1); the gradient is 2(p_n − p_k)."""
    loss = ((v - p_k) ** 2).sum() - ((v - p_n) ** 2).sum() + margin
    if loss <= 0:
        return v
    return v - lr * 2 * (p_n - p_k)


class FedEmbedClient(GlobalPlusClient):
    """A user with a personal embedding and the head of its sub-population.

    The first `prototypical_users` of every sub-population volunteer their embeddings."""

    exchanges = ("query.prototype", "query.som", "train.assign")
    rates: tuple[str, ...] = ("lr", "embedding_lr", "triplet_lr")

    assignment, heads = ASSIGNMENT, HEADS
    sub_populations = setting(
        0,
        "number of heads; 0: one for each type; fewer than types with assignment som alone",
        "[0, 10000]",
    )
    global_gradient = setting(
        "features",
        "where the global head's loss reaches the embedding: appended to the features alone, or at "
        "the encoder's input, too, which takes a second forward pass",
        ("features", "input"),
    )
    type_head = setting(True, "train a further head that predicts the types")
    prototypical_users = setting(
        1,
        "users of each sub-population who volunteer to send their embeddings",
        POSITIVE_INT,
        beside="assignment=prototype",
    )
    margin = setting(1.0, "margin of the triplet loss", NONNEGATIVE, beside="assignment=prototype")
    triplet_lr = setting(
        0.05, "learning rate of the triplet loss", POSITIVE, beside="assignment=prototype"
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.preferred = int(self.share.attributes[SUB_POPULATION])

    @classmethod
    def is_personal(cls, name: str) -> bool:
        """Whether the array is the embedding, or belongs to a head that stays on the client."""
        return super().is_personal(name) or name.startswith("own.")

    @classmethod
    def build(  # type: ignore[override]  # it takes more settings
        cls,
        base: nn.Module,
        info: Info,
        *args: Any,
        model: str,
        seed: int,
        embedding_dim: int,
        assignment: str,
        heads: str,
        sub_populations: int,
        type_head: bool,
        **settings: Any,
    ) -> nn.Module:
        """Encoder, K sub-population heads (0: one per type), global head and type head."""
        check_heads(heads, assignment)
        count = sub_populations or info.num_types
        # A map finds its clusters without the types, and so may have fewer nodes than types.
        if count < info.num_types and assignment != "som":
            raise ValueError(
                f"fedembed.sub-populations is {sub_populations}, and assignment is {assignment!r}; "
                f"set it to 0 or at least the {info.num_types} types. Only assignment 'som' takes "
                "fewer"
            )
        if heads == "server":
            count = 1  # the server sends only the user's head
        personal = assignment == "personal" and heads == "client"
        types = info.num_types if type_head else 0
        net = enclose(info, model, seed, embedding_dim, count, own=personal, num_types=types)
        net.types = info.num_types
        return net

    def losses(self, x: Tensor, y: Tensor, types: Tensor) -> dict[str, Tensor]:
        """CE of head k, of the global head behind a stop-gradient, and of the type head."""
        net = self.model
        assert net.global_head is not None
        features = net.features(x)
        inputs = net.conditioned(features)
        if self.global_gradient == "input":
            stopped = net.conditioned(net.features_of_fixed(x))
        else:
            stopped = net.conditioned(features.detach())  # gradients reach v_u, not the encoder
        losses = {
            "head": self.criterion(net.head(self.k)(inputs), y),
            "global": self.criterion(net.global_head(stopped), y),
        }
        if net.type_head is not None:
            losses["type"] = self.criterion(net.type_head(inputs), types)
        return losses

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train the assigned head; with assignment "type" the head of the preferred type."""
        self.k = int(self.state.get("head", 0))
        if self.assignment == "type":
            self.k = self.preferred
        return super().train(arrays, config)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the model and choose the user's head."""
        assignment = group(arrays, "assignment")
        self.k = self.preferred if self.assignment == "type" else 0
        if assignment:
            nearest = distances(self.embedding(), assignment["centers"]).argmin()
            self.k = int(assignment["heads"][nearest])
        shared = {n: a for n, a in arrays.items() if not n.startswith("assignment/")}
        super().receive(shared, config)

    def score(self, arrays: Arrays, config: Config) -> tuple[float, int, Metrics]:
        """Scores of the user's head, whose number is ``head``."""
        loss, n, metrics = super().score(arrays, config)
        return loss, n, metrics | {HEAD: self.k}

    def get_properties(self, config: Config) -> Config:
        """The client's properties; of a volunteer also the sub-population of the prototype."""
        properties = super().get_properties(config)
        if self.assignment != "prototype" or self.share.novel:
            return properties
        # The first volunteers of a type stand for head k = type, the next ones for k = type + T, …
        group_of_volunteers = int(self.share.attributes[RANK]) // self.prototypical_users
        k = self.preferred + group_of_volunteers * self.model.types
        if k < len(self.model.heads):
            properties["prototype"] = k
        return properties

    # Further messages

    def prototype(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """A volunteer's embedding. Raises ValueError if the user is no volunteer."""
        if "prototype" not in self.get_properties(config):
            raise ValueError("this user is not prototypical: its embedding stays on the client")
        return {"prototype": self.embedding().copy()}, {}

    def som(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Update (K, d) of a self-organizing map, and similarities (K,) to the user's embedding.

        ``nodes`` (K, d) are the map's nodes, ``pull`` (K, K) holds rate × neighbourhood of each
        pair of nodes."""
        v = self.embedding()
        nodes = arrays["nodes"]
        distance = distances(v, nodes)
        best_match = distance.argmin()
        pull = arrays["pull"][best_match]
        return {"update": pull[:, None] * (v - nodes), "score": -distance}, {}

    def assign(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Choose the head before local training.

        A map sends its ``old`` and ``new`` nodes: the head is the best matching new node, and the
        reply is 1 in row old, column new of a matrix (K, K). Otherwise the server sends
        ``centers`` and their ``heads``: the head is that of the nearest center, after triplet steps
        if these are prototypes. The reply is then empty."""
        if "old" in arrays:
            v = self.embedding()
            old = int(distances(v, arrays["old"]).argmin())
            new = int(distances(v, arrays["new"]).argmin())
            self.state["head"] = np.array(new)
            num_nodes = len(arrays["old"])
            overlap = np.zeros((num_nodes, num_nodes), np.int64)
            overlap[old, new] = 1
            return {"overlap": overlap}, {}
        centers, heads = arrays["centers"], arrays["heads"]
        if self.assignment == "prototype":
            self.state[f"personal/{EMBEDDING}"] = self.pulled(centers, heads, config)
        nearest = distances(self.embedding(), centers).argmin()
        self.state["head"] = np.array(heads[nearest])
        return {}, {}

    def pulled(self, centers: np.ndarray, heads: np.ndarray, config: Config) -> np.ndarray:
        """v_u after one triplet step for each positive sample; p_n is drawn from other types."""
        v = self.embedding()
        same_type = heads % self.model.types == self.preferred
        if not same_type.any() or same_type.all():
            return v
        round_ = round_of(config)
        generator = np.random.default_rng(seed_of(self.seed, "triplet", round_, self.client))
        _, y = self.typed(self.share.train)[:]
        num_positives = int(y.sum())
        for n in generator.choice(np.flatnonzero(~same_type), num_positives):
            nearest = distances(v, centers[same_type]).argmin()
            p_k = centers[same_type][nearest]
            v = triplet_step(v, p_k, centers[n], self.margin, self.triplet_lr)
        return v.astype(np.float32)
