"""FedEmbed server (Silva et al., 2022, Algorithm 1): heads of sub-populations, and their users.

The mean change over all participants drives a central Adam. The assignments of heads are:

*Prototype*: the volunteers' embeddings travel to the users. The server requests them again after
users have trained.

*SOM*: the map travels. In each pass a part of the round's users return an update and a score for
each node ("access to only one embedding at a time", section 3.3.1). After the last pass all users
return one-hot (old, new) counts, which decide the heads of the new nodes. The map's rows keep the
order of the heads, so no head moves.

*Personal*: each user has a head ("own personal cluster", section 4.1), which stays with the user or
on the server. On the server Adam's momentum moves a head for some rounds after its user trained.

What the server learns of a user: its head, since unused heads return unchanged, unless changes are
noised locally. With a map it also learns the user's embedding v, from the update pull·(v − m), and
its head from the counts. Under differential privacy these assignments need `dp-covers` =
"model-updates"."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, prefixed
from clients.methods._preferences import EMBEDDING_DIM
from clients.methods.fedembed import ASSIGNMENT, PERSONAL_HEAD, check_heads
from fedapps.common.seeds import seed_of
from fedapps.common.settings import POSITIVE_INT, setting
from strategies.core.aggregation import mean
from strategies.core.replies import Node, Requirement, Update
from strategies.maths import som
from strategies.methods._preferences import CentralAdam, WithSelfOrganizingMap
from strategies.methods._server_heads import HeldHeads

EXCHANGES = {  # by assignment: what users send beside their updates
    "prototype": "embeddings and sub-populations of prototypical users",
    "som": "every user's embedding, in its map update, and the head it chose",
}


class FedEmbed(HeldHeads, WithSelfOrganizingMap, CentralAdam):
    """Assigns heads by `assignment`, then trains encoder and heads of the sampled users.

    `heads` says who holds *personal* heads; the server holds all shared ones."""

    head = PERSONAL_HEAD
    requires = Requirement(
        "fedembed",
        "have tastes and an embedding",
        offers=("query.prototype", "query.som", "train.assign"),
        source="fedapps run --methods {}",
    )
    persistent_attributes = ("centers", "heads", "positions", "recent")

    assignment = ASSIGNMENT
    embedding_dim = EMBEDDING_DIM
    som_passes = setting(
        1,
        "map updates per round, each by a part of the round's users",
        POSITIVE_INT,
        beside="assignment=som",
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.dim = self.embedding_dim
        check_heads(self.heads, self.assignment)
        if self.privacy is not None and self.assignment in EXCHANGES:
            self.privacy.admit(EXCHANGES[self.assignment])
        self.centers = np.zeros((0, self.dim), np.float32)  # prototypes, or the map's nodes
        self.heads: Any = np.zeros(0, np.int64)  # the head of each center
        self.positions = np.zeros((0, 2))  # of the map's nodes on its grid
        self.count = 0  # number of heads
        # Round and volunteers of the last evaluation: their prototypes hold until they train.
        self.recent = np.zeros(0, np.int64)

    def initialize(self, arrays: Arrays) -> Arrays:
        """The map's nodes start where embeddings do: uniform in [0, 1)."""
        heads = {name.split(".")[1] for name in arrays if name.startswith("heads.")}
        self.count = len(heads)
        if self.assignment == "som":
            generator = np.random.default_rng(seed_of(self.seed, "som"))
            self.centers = generator.random((self.count, self.dim)).astype(np.float32)
            self.heads = np.arange(self.count)
            self.positions = som.grid(self.count)
        return super().initialize(arrays)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As the base. A model of another run comes without that run's last evaluation."""
        super().load_state(state)
        if "round" not in state:
            self.recent = np.zeros(0, np.int64)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model, with the prototypes or the map by which a user chooses its head. Prototypes
        are requested from the volunteers first."""
        if self.assignment == "prototype":
            self._refresh()
            self.recent = self._round_and_volunteers(self.round)
        known = prefixed("assignment", self._assignment_arrays())
        return super().personalize(arrays | known, nodes)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model, for the users that chose a head in this round's exchange."""
        if self.assignment == "prototype":
            # After an evaluation in the previous round no volunteer has trained since its request.
            if not np.array_equal(self.recent, self._round_and_volunteers(self.round - 1)):
                self._refresh()
            replies = self.exchange("train.assign", dict.fromkeys(nodes, self._assignment_arrays()))
            nodes = [reply.node for reply in replies]
        elif self.assignment == "som":
            nodes = self._organize(nodes)
        return super().personalize(arrays, nodes)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """One Adam step along the mean change over all users."""
        if not self.server_holds_heads:
            return super().aggregate(arrays, updates)
        head_changes = self.mean_changes(arrays, updates)
        moved_heads = {name: arrays[name] + change for name, change in head_changes.items()}
        mean_shared = mean([update.arrays for update in self.shared(updates)])
        return self.descend(arrays, mean_shared | moved_heads)

    def _assignment_arrays(self) -> Arrays:
        """The arrays by which users choose their head; none with `personal` and `type`."""
        if self.assignment in ("personal", "type"):
            return {}
        return {"centers": self.centers, "heads": self.heads}

    def _refresh(self) -> None:
        """Set each sub-population's prototype to the mean embedding of its present volunteers.

        If no volunteer answers, the former prototype stays."""
        volunteers = self.volunteers()
        like: Arrays = {"prototype": np.zeros(self.dim, np.float32)}
        payloads: dict[Node, Arrays] = {node: {} for node in volunteers}
        replies = self.exchange("query.prototype", payloads, like=dict.fromkeys(volunteers, like))
        embeddings: dict[int, list[np.ndarray]] = {}
        for reply in replies:
            kind = reply.node.properties["prototype"]
            embeddings.setdefault(kind, []).append(reply.arrays["prototype"])
        centers = dict(zip(self.heads.tolist(), self.centers, strict=True))
        for kind, vectors in embeddings.items():
            centers[kind] = np.mean(vectors, axis=0)
        if not centers:
            raise RuntimeError("no prototypical user answered; choose another fedembed.assignment")
        kinds = sorted(centers)
        self.heads = np.array(kinds)
        self.centers = np.stack([centers[kind] for kind in kinds])

    def volunteers(self) -> list[Node]:
        """Users that are prototypical of a sub-population with a head."""
        volunteers = []
        for node in self.training_nodes():
            if 0 <= node.properties.get("prototype", -1) < self.count:
                volunteers.append(node)
        return volunteers

    def _round_and_volunteers(self, round_: int) -> np.ndarray:
        """A round and the ids of its volunteers, as `recent` holds them."""
        return np.array([round_, *(node.client for node in self.volunteers())], np.int64)

    def _organize(self, nodes: Sequence[Node]) -> list[Node]:
        """Refit the map to the users; each new node takes over the head of an old one. Returns the
        users that chose a head."""
        if not nodes:  # private sampling selected nobody
            return []
        old = self.centers
        new, nodes = self._refitted(nodes)
        maps = {"old": old, "new": new}
        counts = np.zeros((len(old), len(old)), np.int64)  # users by old and new node
        like = {"overlap": counts}
        replies = self.exchange(
            "train.assign", dict.fromkeys(nodes, maps), like=dict.fromkeys(nodes, like)
        )
        one_hot = []
        for reply in replies:
            overlap = reply.arrays["overlap"]
            one_hot.append(overlap.min() >= 0 and overlap.sum() == 1)
        replies = self._checked(replies, one_hot, "a user moves from one node to one")
        for reply in replies:
            counts = counts + reply.arrays["overlap"]
        order = som.successors(counts)
        self.centers = new[order]
        self.positions = self.positions[order]
        if (order != np.arange(len(order))).any():  # users chose by the former order
            nodes = [reply.node for reply in replies]
            replies = self.exchange("train.assign", dict.fromkeys(nodes, self._assignment_arrays()))
        return [reply.node for reply in replies]

    def _checked(self, replies: list[Update], valid: list[bool], why: str) -> list[Update]:
        """The valid replies; the others are counted and logged."""
        accepted = []
        for reply, is_valid in zip(replies, valid, strict=True):
            if is_valid:
                accepted.append(reply)
            else:
                self.receiver.drop(reply.node, "malformed", why)
        return accepted

    def _refitted(self, nodes: Sequence[Node]) -> tuple[np.ndarray, list[Node]]:
        """The map (K, d) after `som_passes` federated updates, and the users that answered.

        A part of the users takes part in each pass; with as many passes as users, passes are
        Kohonen's steps. Rate and radius decay over all passes of the run."""
        generator = np.random.default_rng(seed_of(self.seed, "som-passes", self.round))
        parts = np.array_split(generator.permutation(len(nodes)), min(self.som_passes, len(nodes)))
        centers = self.centers
        answered: set[Node] = set()
        like: Arrays = {"update": centers, "score": centers[:, 0]}
        for number in range(self.som_passes):
            participants = [nodes[i] for i in parts[number % len(parts)]]
            finished_rounds = self.round - 1 + (number + 1) / self.som_passes
            pull = self.pull(self.positions, finished_rounds / max(self.num_rounds, 1))
            sent: Arrays = {"nodes": centers, "pull": pull.astype(np.float32)}
            replies = self.exchange(
                "query.som",
                dict.fromkeys(participants, sent),
                like=dict.fromkeys(participants, like),
            )
            possible = [som.is_of_one_user(centers, pull, **reply.arrays) for reply in replies]
            replies = self._checked(replies, possible, "no embedding gives this update and score")
            if replies:
                updates = [reply.arrays["update"] for reply in replies]
                scores = [reply.arrays["score"] for reply in replies]
                centers = som.federated_step(centers, updates, scores)
            answered |= {reply.node for reply in replies}
        return centers, sorted(answered)
