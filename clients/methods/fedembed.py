"""FedEmbed client (Silva et al., 2022, Algorithm 1, lines 6-21).

Three losses and their gradient paths: CE of the user's sub-population head to Θ_e, Θ_k, v_u; CE
of the type head to Θ_e, Θ_t, v_u; CE of the global head to Θ_g and v_u alone, by a
stop-gradient at the encoder. The embedding v_u stays on the client; only
prototypical users, who are volunteers, send it. Ours, as the paper leaves it open: the triplet loss
descends by SGD, sample by sample; with *personal* assignment the head stays on the client unless
the server holds it; with more sub-populations than types, head k belongs to type k mod T."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from clients.core.arrays import Arrays, group
from clients.core.client import Config, Metrics
from clients.core.protocol import HEADS
from clients.methods._preferences import EMBEDDING, GlobalPlusClient, enclose
from fedapps.common.seeds import seed_of
from fedapps.common.settings import NONNEGATIVE, POSITIVE, POSITIVE_INT, setting
from partitions.datasets.loading import Info
from partitions.federations import RANK
from partitions.shares import SUB_POPULATION

ASSIGNMENT = setting(
    "prototype", "how users find their head", ("prototype", "som", "personal", "type")
)
PERSONAL_HEAD = "heads.0."  # a user's head that the server holds


def check_heads(heads: str, assignment: str) -> None:
    """Raise ValueError if the server is to hold heads that are not personal."""
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
    active = ((v - p_k) ** 2).sum() - ((v - p_n) ** 2).sum() + margin > 0
    return v - lr * 2 * (p_n - p_k) if active else v


class FedEmbedClient(GlobalPlusClient):
    """A user with a personal embedding and the head of its sub-population.

    The first `prototypical_users` of every sub-population volunteer their embeddings."""

    exchanges = ("query.prototype", "query.som", "train.assign")
    rates: tuple[str, ...] = ("lr", "embedding_lr", "triplet_lr")

    assignment, heads = ASSIGNMENT, HEADS
    sub_populations = setting(0, "heads; 0: one for each type", "[0, 10000]")
    type_head = setting(True, "whether there is a head that learns the types")
    prototypical_users = setting(
        1,
        "volunteers of each sub-population, who send embeddings",
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
        """Whether it is the embedding, or a head that stays on the client."""
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
        if count < info.num_types:
            raise ValueError(
                f"fedembed.sub-populations is {sub_populations}; it must be 0 or at least the "
                f"{info.num_types} types"
            )
        if heads == "server":
            count = 1  # the user's
        personal = assignment == "personal" and heads == "client"
        types = info.num_types * type_head
        net = enclose(info, model, seed, embedding_dim, count, own=personal, num_types=types)
        net.types = info.num_types
        return net

    def losses(self, x: Tensor, y: Tensor, types: Tensor) -> dict[str, Tensor]:
        """CE of head k, of the global head behind a stop-gradient, and of the type head."""
        net = self.model
        features = net.features(x)
        inputs = net.conditioned(features)
        assert net.global_head is not None
        losses = {
            "head": self.criterion(net.head(self.k)(inputs), y),
            "global": self.criterion(net.global_head(net.conditioned(features.detach())), y),
        }
        if net.type_head is not None:
            losses["type"] = self.criterion(net.type_head(inputs), types)
        return losses

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local pass on the assigned head, with `type` on the head of the preferred type."""
        self.k = self.preferred if self.assignment == "type" else int(self.state.get("head", 0))
        return super().train(arrays, config)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Also choose the user's head."""
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
        return loss, n, metrics | {"head": self.k}

    def get_properties(self, config: Config) -> Config:
        """Also the sub-population that a volunteer is prototypical of."""
        properties = super().get_properties(config)
        group_of_volunteers = int(self.share.attributes[RANK]) // self.prototypical_users
        k = self.preferred + group_of_volunteers * self.model.types
        if self.assignment == "prototype" and not self.share.novel and k < len(self.model.heads):
            properties["prototype"] = k
        return properties

    # Further messages

    def prototype(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """A volunteer's embedding. Raises ValueError if the user is none."""
        if "prototype" not in self.get_properties(config):
            raise ValueError("this user is not prototypical: its embedding stays on the client")
        return {"prototype": self.embedding().copy()}, {}

    def som(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """SOM update (K, d) and similarity score (K,) for the user's embedding.

        ``pull`` (K, K) holds rate × neighbourhood of each pair of nodes."""
        nodes, v = arrays["nodes"], self.embedding()
        distance = distances(v, nodes)
        pull = arrays["pull"][distance.argmin()]
        return {"update": pull[:, None] * (v - nodes), "score": -distance}, {}

    def assign(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Choose the head before a local pass.

        Prototypes: triplet steps, then the nearest prototype's head; returns nothing. SOM: the best
        matching new node; returns one-hot (old, new) counts (K, K)."""
        if "old" in arrays:
            v = self.embedding()
            old, new = (int(distances(v, arrays[name]).argmin()) for name in ("old", "new"))
            self.state["head"] = np.array(new)
            overlap = np.zeros((len(arrays["old"]),) * 2, np.int64)
            overlap[old, new] = 1
            return {"overlap": overlap}, {}
        centers, heads = arrays["centers"], arrays["heads"]
        if self.assignment == "prototype":
            self.state[f"personal/{EMBEDDING}"] = self.pulled(centers, heads, config)
        self.state["head"] = np.array(heads[distances(self.embedding(), centers).argmin()])
        return {}, {}

    def pulled(self, centers: np.ndarray, heads: np.ndarray, config: Config) -> np.ndarray:
        """v_u after one triplet step per positive sample, p_n drawn from the other types."""
        v, same = self.embedding(), heads % self.model.types == self.preferred
        if not same.any() or same.all():
            return v
        generator = np.random.default_rng(
            seed_of(self.seed, "triplet", int(config.get("server-round", 0)), self.client)
        )
        samples = self.typed(self.share.train)
        positives = int(samples[:][1].sum())
        for n in generator.choice(np.flatnonzero(~same), positives):
            p_k = centers[same][distances(v, centers[same]).argmin()]
            v = triplet_step(v, p_k, centers[n], self.margin, self.triplet_lr)
        return v.astype(np.float32)
