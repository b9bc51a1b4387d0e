"""Rounds that end before the last reply, and what becomes of later replies.

A round ends once a share `round-quorum` of the clients that it sampled have sent valid replies, or
after `round-deadline` seconds, if at least `min-valid-replies` are there. Clients that have not
replied are busy: they are not sampled before they reply or, after `round-timeout` seconds, are
given up.

A late reply y_i started from an older model x_s. The next aggregation takes it as the change of
that model, added to the present one x: x + (1 + a)^−p (y_i − x_s), where a is its age in rounds and
p is `late-exponent`, 1/2 in FedBuff (Nguyen et al., AISTATS 2022, Algorithm 1 and section 5). A
method that cannot use it drops it.

Time is that of a clock where clients have `latency` (`strategies.core.latency`), else that of the
wall. Simulated clients train when their reply is due, on the message that they were sent. So until
then evaluations see their earlier state, all engines give the same bits, and a checkpoint holds
what is on its way. Evaluations take no simulated time, and ask busy clients, too. Real nodes cannot
answer while they train, so evaluations leave busy nodes out."""

import math
import time
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from clients.core.arrays import Arrays, as_type
from strategies.core.latency import Latency
from strategies.core.limits import Change
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.receiver import Receiver
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round, Sent

POLL_SECONDS = 0.1  # between two questions for real nodes' replies


@dataclass
class Flight:
    """A train message without a reply yet: the node, the message's round, the arrays it holds.

    `ends_at` is when the reply arrives, or the node is given up: then it is `lost`. Both it and
    `started_at` are in seconds of the run's clock."""

    node: Node
    round: int
    payload: Arrays
    message: Message
    started_at: float
    ends_at: float
    lost: bool = False


class LateStrategy(Protocol):
    """The part of a strategy that `LateReplies` reads."""

    grid: Grid
    timeout: float
    now: Round
    nodes: MutableSequence[Node]
    receiver: Receiver
    privacy: Privacy | None
    latency: Latency | None
    configrecord_key: str
    uses_late_replies: bool
    round_quorum: float
    round_deadline: float
    late_exponent: float
    min_valid_replies: int

    def message_to(
        self,
        node: Node,
        action: str,
        arrays: Arrays,
        config: ConfigRecord,
        records: dict[int, ArrayRecord],
    ) -> Message:
        """A message to the node; see `PersonalizedStrategy`."""

    def expected_replies(self) -> dict[Node, Arrays]:
        """For each node the arrays that its reply must be like; see `PersonalizedStrategy`."""

    def baselines(self) -> dict[Node, Arrays]:
        """For each node the arrays that its change is measured from; see `PersonalizedStrategy`."""

    def late_starts(self, sent: Mapping[Node, Arrays]) -> dict[Node, Arrays]:
        """The present arrays in place of those that were sent; see `PersonalizedStrategy`."""

    def rebased(self, arrays: Arrays, sent: Arrays, start: Arrays, weight: float) -> Arrays:
        """A late reply's arrays as those of a reply to `start`; see `PersonalizedStrategy`."""


class LateReplies:
    """The end of a strategy's rounds, its busy nodes, and the clock of simulated clients."""

    def __init__(self, strategy: LateStrategy) -> None:
        self._strategy = strategy
        self._flights: list[Flight] = []
        self.seconds = 0.0  # on the clock of simulated clients, since the run began

    @property
    def ends_early(self) -> bool:
        """Whether rounds may end before all replies are in."""
        strategy = self._strategy
        return strategy.round_quorum < 1 or strategy.round_deadline > 0

    @property
    def active(self) -> bool:
        """Whether rounds may end early, or time is simulated."""
        return self.ends_early or self._strategy.latency is not None

    @property
    def busy(self) -> set[Node]:
        """The nodes that have not replied yet to the train message of an earlier round."""
        return {flight.node for flight in self._flights}

    @property
    def unable_to_score(self) -> set[Node]:
        """The nodes that evaluations leave out: real ones that are busy."""
        return set() if self._strategy.latency is not None else self.busy

    @property
    def seconds_to_score(self) -> float:
        """How long an evaluation waits: real nodes have the time that they have for a round."""
        strategy = self._strategy
        if strategy.latency is not None or not strategy.round_deadline:
            return strategy.timeout
        return min(strategy.timeout, strategy.round_deadline)

    def wait_for(self, nodes: Iterable[Node]) -> None:
        """Let the clock of simulated clients go on until the slowest of the `nodes` has replied to
        an exchange within a round. Real nodes have replied by then."""
        if self._strategy.latency is None or not self._strategy.now.training:
            return
        seconds = [self._seconds_of(node)[0] for node in nodes]
        self.seconds += max(seconds, default=0.0)

    def collect(self, sent: Sent) -> list[Update]:
        """Send the train messages, and wait until the round ends; returns the updates to aggregate.

        Updates of late replies begin at present arrays, which take the place of what was sent in
        the round's payloads."""
        strategy = self._strategy
        now = strategy.now
        self._resolve()
        late = {flight.node: flight for flight in self._flights}
        for message, node in sent:
            self._flights.append(self._launched(message, node))
        started = {node for _, node in sent}
        for node, flight in late.items():
            now.payloads[node] = flight.payload
        like = strategy.expected_replies()
        starts = strategy.baselines()
        if not strategy.uses_late_replies:
            # A late reply is dropped. In another phase than that of its round, its names differ.
            like = {node: arrays for node, arrays in like.items() if node not in late}
        if strategy.latency is not None:
            changes = self._simulated(started, like, starts)
        else:
            changes = self._awaited(started, like, starts)
        num_late = len(started & self.busy)
        num_arrived = sum(change.update.node in late for change in changes)
        if participants_are_secret(strategy.privacy):
            self._flights = []  # a busy node would tell who took part before
        if not strategy.uses_late_replies:
            changes = [change for change in changes if change.update.node not in late]
        changes.sort(key=lambda change: change.update.node)
        updates, ages = self._rebased(strategy.receiver.limited("train", changes), late)
        if self.ends_early:
            now.report |= {"late": num_late, "late-used": len(ages)}
            now.report["late-dropped"] = num_arrived - len(ages)
            if ages:
                now.report["late-age"] = float(np.mean(ages))
        if strategy.latency is not None:
            now.report["simulated-seconds"] = self.seconds
        return updates

    # The end of a round

    def _needed(self, started: Collection[Node]) -> int:
        """How many valid replies of the nodes that this round asked end it."""
        if participants_are_secret(self._strategy.privacy):
            return len(started) + 1  # the deadline alone ends it
        # Without the subtraction 0.55 · 100 would need 56 replies, as it is rounded upwards.
        return math.ceil(self._strategy.round_quorum * len(started) - 1e-9)

    def _least(self) -> int:
        """How many valid replies a round needs, even after its deadline."""
        strategy = self._strategy
        return 0 if participants_are_secret(strategy.privacy) else strategy.min_valid_replies

    def _usable(self, node: Node, started: Collection[Node]) -> bool:
        return node in started or self._strategy.uses_late_replies

    def _simulated(
        self,
        started: Collection[Node],
        like: Mapping[Node, Arrays],
        starts: Mapping[Node, Arrays],
    ) -> list[Change]:
        """Deliver the messages in the order in which replies are due, until the round ends."""
        strategy = self._strategy
        deadline = math.inf
        if strategy.round_deadline:
            deadline = self.seconds + strategy.round_deadline
        due = sorted(self._flights, key=lambda flight: (flight.ends_at, flight.node))
        changes: list[Change] = []
        cut = False  # by the deadline
        while due:
            valid = [change.update.node for change in changes]
            missing = self._needed(started) - sum(node in started for node in valid)
            missing_least = self._least() - sum(self._usable(node, started) for node in valid)
            count, cut = self._next(due, started, missing, missing_least, deadline)
            if not count:
                break
            changes += self._delivered(due[:count], like, starts)
            self.seconds = max(self.seconds, due[count - 1].ends_at)
            due = due[count:]
        if cut or (participants_are_secret(strategy.privacy) and deadline < math.inf):
            self.seconds = max(self.seconds, deadline)  # later, if too few had replied
        self._flights = due
        return changes

    def _next(
        self,
        due: Sequence[Flight],
        started: Collection[Node],
        missing: int,
        missing_least: int,
        deadline: float,
    ) -> tuple[int, bool]:
        """How many of the flights that are `due` are certainly part of this round, and whether the
        deadline keeps the others out. Replies at the same second count together."""
        of_round = 0
        usable = 0
        for count, flight in enumerate(due):
            together = count > 0 and flight.ends_at == due[count - 1].ends_at
            if not together:
                if of_round >= missing and usable >= missing_least:
                    return count, False
                if flight.ends_at > deadline and usable >= missing_least:
                    return count, True
            of_round += flight.node in started
            usable += self._usable(flight.node, started)
        return len(due), False

    def _delivered(
        self,
        flights: Sequence[Flight],
        like: Mapping[Node, Arrays],
        starts: Mapping[Node, Arrays],
    ) -> list[Change]:
        """Send the messages of simulated clients; returns the valid replies."""
        strategy = self._strategy
        receiver = strategy.receiver
        for flight in flights:
            if flight.lost:
                receiver.drop_missing(flight.node)
        sent = [(flight.message, flight.node) for flight in flights if not flight.lost]
        if not sent:
            return []
        # Grids of this package yield replies as they arrive; Flower's return a list.
        send = getattr(strategy.grid, "stream", strategy.grid.send_and_receive)
        replies = send([message for message, _ in sent], timeout=strategy.timeout)
        changes, unanswered = receiver.read(sent, replies, like, starts, train=True)
        for node in unanswered:
            receiver.drop_missing(node)
        return changes

    def _awaited(
        self,
        started: Collection[Node],
        like: Mapping[Node, Arrays],
        starts: Mapping[Node, Arrays],
    ) -> list[Change]:
        """Push the round's messages to real nodes, and pull replies until the round ends."""
        strategy = self._strategy
        receiver = strategy.receiver
        grid = strategy.grid
        messages = [flight.message for flight in self._flights if flight.node in started]
        if messages:
            grid.push_messages(messages)
        deadline = math.inf
        if strategy.round_deadline:
            deadline = time.monotonic() + strategy.round_deadline
        changes: list[Change] = []
        while True:
            sent = [(flight.message, flight.node) for flight in self._flights]
            ids = [message.metadata.message_id for message, _ in sent]
            replies = grid.pull_messages(ids) if ids else []
            pulled, unanswered = receiver.read(sent, replies, like, starts, train=True)
            changes += pulled
            present = time.monotonic()
            still_busy = set(unanswered)
            self._flights = [flight for flight in self._flights if flight.node in still_busy]
            self._give_up(present)
            valid = [change.update.node for change in changes]
            enough = sum(node in started for node in valid) >= self._needed(started)
            least = sum(self._usable(node, started) for node in valid) >= self._least()
            over = present >= deadline
            alone = participants_are_secret(strategy.privacy) and deadline < math.inf
            if least and (over or (enough and not alone)):
                break
            if not self._flights and not (alone and not over):
                break
            time.sleep(POLL_SECONDS)
        return changes

    def _give_up(self, present: float) -> None:
        """Count the nodes that have not replied within the timeout as missing."""
        strategy = self._strategy
        for flight in self._flights:
            if present >= flight.ends_at:
                strategy.receiver.drop_missing(flight.node)
        self._flights = [flight for flight in self._flights if present < flight.ends_at]

    def _launched(self, message: Message, node: Node) -> Flight:
        """The flight of a message that is sent now."""
        now = self._strategy.now
        payload = now.payloads[node]
        if self._strategy.latency is None:
            started_at = time.monotonic()
            ends_at = started_at + self._strategy.timeout
            return Flight(node, now.number, payload, message, started_at, ends_at)
        seconds, lost = self._seconds_of(node)
        ends_at = self.seconds + seconds
        return Flight(node, now.number, payload, message, self.seconds, ends_at, lost)

    def _seconds_of(self, node: Node) -> tuple[float, bool]:
        """After how many simulated seconds a node replies or, as the flag says, is given up."""
        strategy = self._strategy
        assert strategy.latency is not None
        seconds = strategy.latency.seconds(node, strategy.nodes)
        return min(seconds, strategy.timeout), seconds > strategy.timeout

    # Late replies

    def _rebased(
        self, updates: list[Update], late: Mapping[Node, Flight]
    ) -> tuple[list[Update], list[int]]:
        """The updates, those of late replies as if they began at the present arrays, and the ages
        of these."""
        strategy = self._strategy
        now = strategy.now
        sent = {u.node: late[u.node].payload for u in updates if u.node in late}
        starts = strategy.late_starts(sent) if sent else {}
        ages: list[int] = []
        result: list[Update] = []
        for update in updates:
            node = update.node
            if node not in sent:
                result.append(update)
                continue
            if node not in starts:
                continue
            age = now.number - late[node].round
            weight = late_weight(age, strategy.late_exponent)
            arrays = strategy.rebased(update.arrays, sent[node], starts[node], weight)
            result.append(replace(update, arrays=arrays))
            now.payloads[node] = starts[node]
            ages.append(age)
        return result, ages

    # What a checkpoint holds

    def state(self) -> dict[str, Any]:
        """The clock, and what is on its way to simulated clients; each model once."""
        if self._strategy.latency is None:
            return {}  # a resumed run cannot ask real nodes for replies to another run
        models: list[Arrays] = []
        places: dict[int, int] = {}
        flights: list[dict[str, Any]] = []
        for flight in self._flights:
            key = id(flight.payload)
            if key not in places:
                places[key] = len(models)
                models.append(flight.payload)
            config = flight.message.content.config_records[self._strategy.configrecord_key]
            flights.append(
                {
                    "client": flight.node.client,
                    "node": flight.node.id,
                    "novel": flight.node.novel,
                    "round": flight.round,
                    "model": places[key],
                    "config": dict(config),
                    "started-at": flight.started_at,
                    "ends-at": flight.ends_at,
                    "lost": flight.lost,
                }
            )
        return {"seconds": self.seconds, "models": models, "flights": flights}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        if not state:
            return
        self.seconds = state["seconds"]
        records: dict[int, ArrayRecord] = {}
        self._flights = []
        for saved in state["flights"]:
            node = Node(saved["client"], saved["node"], saved["novel"])
            payload = state["models"][saved["model"]]
            config = ConfigRecord(saved["config"])
            message = self._strategy.message_to(node, "train", payload, config, records)
            times = (saved["started-at"], saved["ends-at"], saved["lost"])
            self._flights.append(Flight(node, saved["round"], payload, message, *times))

    def _resolve(self) -> None:
        """Give flights the present nodes, with their properties; those of simulated clients that
        left are missing. An engine reports a real node that left."""
        if self._strategy.latency is None:
            return
        present = {node: node for node in self._strategy.nodes}
        flights: list[Flight] = []
        for flight in self._flights:
            if flight.node in present:
                flights.append(replace(flight, node=present[flight.node]))
            else:
                self._strategy.receiver.drop(flight.node, "missing", "the node left")
        self._flights = flights


def late_weight(age: int, exponent: float) -> float:
    """(1 + a)^−p of a reply that is used a rounds after the one that asked for it."""
    return float((1 + age) ** -exponent)


def rebased(arrays: Arrays, sent: Arrays, start: Arrays, weight: float) -> Arrays:
    """x + w (y − x_s) for a reply's `arrays` y, the arrays x_s that were `sent`, and the present
    arrays x in `start`. An array that was not sent is a change itself: w y."""
    result: Arrays = {}
    for name, y in arrays.items():
        if name in sent:
            moved = start[name] + weight * (y.astype(float) - sent[name])
        else:
            moved = weight * y.astype(float)
        result[name] = as_type(moved, y.dtype)
    return result
