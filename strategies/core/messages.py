"""A strategy's messages to nodes, and the checks of their replies.

Arrays that several nodes get are serialised once. Bytes and refused replies are counted in the
strategy's present round."""

import math
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from functools import partial
from logging import WARNING
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.core.arrays import Arrays, filled, num_bytes, to_record
from clients.core.protocol import NUM_EXAMPLES, SAVE_STATE
from fedapps.common.errors import bounded, brief, cause_of
from strategies.core.checks_and_limits import (
    MIN_REPLIES_FOR_NORMS,
    SEPARATE,
    Change,
    NormHistory,
    bound_numbers,
    read_reply,
    usual_count,
)
from strategies.core.privacy import Privacy
from strategies.core.replies import NOT_FINITE, Node, Requirement, Update
from strategies.core.round_state import Request, Round

Sent = list[tuple[Message, Node]]
NO_ARRAYS: Mapping[Node, Arrays] = {}
MAX_CAUSES = 50  # passed to `on_failure`; a client may invent any number of causes


class RunningStrategy(Protocol):
    """The part of a strategy that everything reads which sends its messages."""

    grid: Grid
    timeout: float
    nodes: MutableSequence[Node]
    now: Round
    arrays: Arrays
    configrecord_key: str


class StrategyState(RunningStrategy, Protocol):
    """What a messenger reads of its strategy."""

    requires: Requirement | None
    privacy: Privacy | None
    runs_own_loop: bool
    limit_groups: tuple[str, ...]
    protect: bool
    max_update_norm: float
    max_update_ratio: float
    max_examples_ratio: float
    average_over: str
    weighted_by_key: str
    arrayrecord_key: str
    on_failure: Callable[[str], None] | None


class Messenger:
    """Builds a strategy's messages and reads their replies."""

    def __init__(self, strategy: StrategyState) -> None:
        self._strategy = strategy
        self.sizes = NormHistory()
        # The record of the strategy's present arrays; None if it is not made yet.
        self.record: ArrayRecord | None = None
        self._causes: set[str] = set()  # passed to `on_failure`

    @property
    def hides_participants(self) -> bool:
        """Whether the participants and their number are secret."""
        privacy = self._strategy.privacy
        return privacy is not None and privacy.hides_participants

    @property
    def failure(self) -> str:
        """The first refused reply of the round, in one line."""
        return self._strategy.now.failure

    def exchanges(
        self, requests: Sequence[Request], config: Mapping[str, Any]
    ) -> list[Callable[[], list[Update]]]:
        """Send the requests together, each with this `config`.

        Returns a function for each request, which checks and returns its replies."""
        strategy = self._strategy
        records: dict[int, ArrayRecord] = {}  # shared by all requests
        sent_by_request: list[Sent] = []
        messages: list[Message] = []
        for request in requests:
            request_config = ConfigRecord({**config, **request.config})
            sent = self.messages(request.action, request.payloads, request_config, records)
            sent_by_request.append(sent)
            messages += [message for message, _ in sent]
        replies: list[Message] = []
        if messages:
            replies += strategy.grid.send_and_receive(messages, timeout=strategy.timeout)
        readers: list[Callable[[], list[Update]]] = []
        for request, sent in zip(requests, sent_by_request, strict=True):
            readers.append(partial(self.receive, sent, replies, request.like))
        return readers

    def messages(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: ConfigRecord,
        records: dict[int, ArrayRecord] | None = None,
    ) -> Sent:
        """One message per node, of Flower's message type `action`.

        Arrays that nodes share are serialised once. `records` holds the results by the arrays' id;
        pass the same dict to share them with other messages."""
        strategy = self._strategy
        if records is None:
            records = {}
        if self.record is not None:
            records[id(strategy.arrays)] = self.record
        sent: Sent = []
        for node in sorted(payloads):
            arrays = payloads[node]
            sent.append((self.message(action, node, arrays, config, records), node))
            strategy.now.bytes["down"] += num_bytes(arrays.values())
        return sent

    def message(
        self,
        action: str,
        node: Node,
        arrays: Arrays,
        config: ConfigRecord,
        records: dict[int, ArrayRecord],
    ) -> Message:
        """A message that is not counted in the round; `records` are those of `messages`."""
        strategy = self._strategy
        if id(arrays) not in records:
            records[id(arrays)] = to_record(arrays)
        entries = {
            strategy.arrayrecord_key: records[id(arrays)],
            strategy.configrecord_key: config,
        }
        content = filled(RecordDict(), entries)
        return Message(content, dst_node_id=node.id, message_type=action)

    def receive(
        self,
        sent: Sent,
        replies: Iterable[Message],
        like: Mapping[Node, Arrays] = NO_ARRAYS,
        starts: Mapping[Node, Arrays] = NO_ARRAYS,
        *,
        train: bool = False,
    ) -> list[Update]:
        """The valid replies to the messages `sent`, sorted by client.

        Other replies are counted and logged. `replies` may be an iterator: each is read before the
        next one is taken. `like` gives, by node, the arrays whose names, shapes and dtypes a reply
        must have; `starts` those that its change is measured from, where that is not from zero.
        `train`: a reply needs a positive weight and what the strategy requires."""
        kind = sent[0][0].metadata.message_type if sent else ""
        changes, unanswered = self.read(sent, replies, like, starts, train=train)
        for node in unanswered:
            self.drop_missing(node)
        return self.limited(kind, sorted(changes, key=lambda change: change.update.node))

    def read(
        self,
        sent: Sent,
        replies: Iterable[Message],
        like: Mapping[Node, Arrays],
        starts: Mapping[Node, Arrays],
        *,
        train: bool = False,
    ) -> tuple[list[Change], list[Node]]:
        """The valid replies in the order of their arrival, and the nodes that did not answer.

        The arguments are those of `receive`; the replies are not limited yet."""
        strategy = self._strategy
        nodes = {message.metadata.message_id: node for message, node in sent}
        changes: list[Change] = []
        for reply in replies:
            # Removed, since a second reply to the same message does not count.
            node = nodes.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            start = starts.get(node, {})
            change = self._read(reply, node, like.get(node), start, train=train)
            if change is not None:
                changes.append(change)
                strategy.now.bytes["up"] += num_bytes(change.update.arrays.values())
        return changes, list(nodes.values())

    def _read(
        self, reply: Message, node: Node, like: Arrays | None, start: Arrays, *, train: bool
    ) -> Change | None:
        """The reply of a node, and its change from `start`; None if it is refused."""
        strategy = self._strategy
        update, cause, detail = read_reply(
            reply, node, like, train, strategy.weighted_by_key, strategy.requires
        )
        if update is None:
            self.drop(node, cause, detail)
            return None
        if train and strategy.privacy is not None:
            not_private = strategy.privacy.exposed(update)
            if not_private:
                self.drop(node, "not-private", not_private)
                return None
        change = Change(update, start, strategy.limit_groups)
        name = change.not_finite()
        if name:
            self.drop(node, NOT_FINITE, f"{name} holds NaN or infinity")
            return None
        return change

    def limited(self, kind: str, changes: list[Change]) -> list[Update]:
        """The updates of plausible size, within the limits of `strategies.core.checks_and_limits`.

        `changes` are sorted by client, so that sums are the same on every engine."""
        strategy = self._strategy
        updates = [change.update for change in changes]
        # Where participants are secret, usual sizes would reveal something about them; there the
        # privacy clips every update.
        if self.hides_participants or not updates or kind == SAVE_STATE:
            return updates
        if strategy.protect:
            for change, update in zip(changes, bound_numbers(updates), strict=True):
                change.update = update
        # Clients without labels change less than others, so their norms are no measure for them.
        labeled = [change for change in changes if not change.update.node.unlabeled]
        measured = labeled or changes
        # Nor is the answer of a client that has nothing to add to a sum.
        if kind.startswith("query."):
            measured = [change for change in measured if any(change.norms.values())] or measured
        norms = {change.update.node.client: change.norms for change in measured}
        usual = self.sizes.usual(kind, norms)

        max_examples = self._max_examples(kind, updates)
        enough_replies = len(changes) >= MIN_REPLIES_FOR_NORMS
        norm_ratio = self._norm_ratio(kind)
        if not enough_replies:
            norm_ratio *= 2
        max_norm = strategy.max_update_norm if kind == "train" else 0.0
        result = []
        for change in changes:
            absurd = change.absurd(usual)
            if absurd:
                self.drop(change.update.node, "absurd", absurd)
                continue
            limited = change.limited(
                usual, norm_ratio, max_norm, max_examples, norms_limit_counts=enough_replies
            )
            if limited.arrays is not change.update.arrays:
                strategy.now.clipped += 1
            if limited.num_examples != change.update.num_examples:
                strategy.now.recounted += 1
            result.append(limited)
        return result

    def _max_examples(self, kind: str, updates: Sequence[Update]) -> float:
        """The sample count that a reply counts with at most; infinity if it is not limited."""
        strategy = self._strategy
        if kind == "evaluate" or not strategy.max_examples_ratio:
            return math.inf
        # The count that a client gave when it joined is a measure only if sample counts are the
        # weights.
        joined: list[Node] = []
        if strategy.weighted_by_key == NUM_EXAMPLES:
            joined = [node for node in strategy.nodes if not node.novel]
        return strategy.max_examples_ratio * usual_count(updates, joined)

    def _norm_ratio(self, kind: str) -> float:
        """The limit of a group's norm, in usual norms; 0 if it is not limited."""
        strategy = self._strategy
        # Inside a Flower privacy wrapper the wrapper clips.
        if not strategy.runs_own_loop or kind == "evaluate" or kind in SEPARATE:
            return 0.0
        return strategy.max_update_ratio

    def drop_missing(self, node: Node) -> None:
        """Count and log a reply that did not come in time."""
        self.drop(node, "missing", f"none within {self._strategy.timeout} s")

    def drop(self, node: Node, cause: str, detail: str) -> None:
        """Count and log a reply that is not used.

        Each new cause is also passed to the strategy's `on_failure`, with its whole detail."""
        strategy = self._strategy
        detail = bounded(detail)
        strategy.now.dropped[cause] += 1
        client = "a client"
        if not self.hides_participants:
            client = f"client {node.client}, round {strategy.now.number}"
        if not strategy.now.failure:
            strategy.now.failure = f"{client}: {cause}: {brief(detail)}"
        key = f"{cause}\n{cause_of(detail)}"
        if key in self._causes or len(self._causes) == MAX_CAUSES:
            log(WARNING, "%s: reply dropped, %s: %s", client, cause, brief(detail))
            return
        log(WARNING, "%s: reply dropped, %s: %s", client, cause, detail)
        self._causes.add(key)
        if strategy.on_failure is not None:
            strategy.on_failure(f"{client}: {cause}\n{detail}")
