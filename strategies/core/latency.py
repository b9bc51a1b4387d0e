"""The seconds of simulated clients, which answer at once: a clock without waiting.

Each client has its own seconds, from the model's arrival to its reply: median · exp(σ z) with
z ~ N(0, 1), drawn by (seed, client), so the same in every round and on every engine. A share of the
training clients, and of the novel ones, is slower by a factor."""

import math
from collections.abc import Sequence

import numpy as np

from fedapps.common.seeds import SEED, seed_of
from fedapps.common.settings import SHARE, Configured, setting
from strategies.core.replies import Node

SECONDS = "(0, 1000000]"


class Latency(Configured):
    """The seconds of each client, by the settings `latency…`."""

    latency = setting(
        "none",
        "seconds that a simulated client takes for a message: none, or drawn for each client; then "
        "metrics, tables and figures have simulated seconds, and nobody waits",
        ("none", "lognormal"),
    )
    latency_median = setting(
        1.0, "median over clients, in simulated seconds", SECONDS, beside="latency!=none"
    )
    latency_sigma = setting(
        0.5,
        "σ, deviation over clients of the seconds' logarithm; 0: all clients are alike",
        "[0, 10]",
        beside="latency!=none",
    )
    latency_slow_share = setting(
        0.0,
        "share of the training clients, and of the novel ones, that are slower by "
        "latency-slow-factor",
        SHARE,
        beside="latency!=none",
    )
    latency_slow_factor = setting(
        10.0, "seconds of a slow client, in multiples", "[1, 1000000]", beside="latency!=none"
    )
    seed = SEED

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        # The slow clients of a role, and the number of clients of that role among which they were
        # drawn.
        self._slow: dict[bool, tuple[int, frozenset[int]]] = {}

    def seconds(self, node: Node, nodes: Sequence[Node]) -> float:
        """Seconds in which the client of the node replies; `nodes` are all that are present."""
        draw = np.random.default_rng(seed_of(self.seed, "latency", node.client)).standard_normal()
        seconds = self.latency_median * math.exp(self.latency_sigma * draw)
        if node.client in self._slow_clients(node.novel, nodes):
            seconds *= self.latency_slow_factor
        return seconds

    def _slow_clients(self, novel: bool, nodes: Sequence[Node]) -> frozenset[int]:
        """The ids of the slow clients of a role: the first ones by seeded numbers."""
        if not self.latency_slow_share:
            return frozenset()
        clients = [node.client for node in nodes if node.novel == novel]
        count, slow = self._slow.get(novel, (0, frozenset()))
        if count != len(clients):
            clients.sort(key=lambda client: seed_of(self.seed, "slow", client))
            slow = frozenset(clients[: round(self.latency_slow_share * len(clients))])
            self._slow[novel] = (len(clients), slow)
        return slow
