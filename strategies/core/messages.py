"""Messages to nodes and their replies: serialised once, checked, counted in the round."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import WARNING
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.core.arrays import Arrays, filled, num_bytes, to_record
from clients.core.protocol import SAVE_STATE
from fedapps.common.errors import bounded, brief, cause_of
from strategies.core.limits import (
    MIN_REPLIES_FOR_NORMS,
    SEPARATE,
    Change,
    NormHistory,
    bound_numbers,
    usual_count,
)
from strategies.core.privacy import Privacy
from strategies.core.replies import EXAMPLES, NOT_FINITE, Node, Requirement, Update, read_reply
from strategies.core.round import Request, Round

Sent = list[tuple[Message, Node]]
MAX_CAUSES = 50  # that `on_failure` gets: a client may invent any number


class StrategyState(Protocol):
    """What a messenger reads of its strategy."""

    grid: Grid
    timeout: float
    nodes: list[Node]
    now: Round
    arrays: Arrays
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
    configrecord_key: str
    on_failure: Callable[[str], None] | None

    def baseline_arrays(self, sent: Arrays) -> Arrays:
        """As in `StrategyBase`."""


class Messenger:
    """Builds a strategy's messages and reads their replies."""

    def __init__(self, sender: StrategyState) -> None:
        self._sender = sender
        self.sizes = NormHistory()
        self.record: ArrayRecord | None = None  # the sender's arrays as a record, if there is one
        self._causes: set[str] = set()  # that `on_failure` got

    @property
    def hides_participants(self) -> bool:
        """Whether the participants and their number are secret."""
        return self._sender.privacy is not None and self._sender.privacy.hides_participants

    def exchanges(
        self, requests: Sequence[Request], config: Mapping[str, Any]
    ) -> list[Callable[[], list[Update]]]:
        """Send the requests together, each with this `config`; for each what reads its replies."""
        sender, records = self._sender, dict[int, ArrayRecord]()
        sent = [
            self.messages(r.action, r.payloads, ConfigRecord({**config, **r.config}), records)
            for r in requests
        ]
        replies: list[Message] = []
        if messages := [message for pairs in sent for message, _ in pairs]:
            replies += sender.grid.send_and_receive(messages, timeout=sender.timeout)
        return [
            partial(self.receive, pairs, replies, r.like)
            for r, pairs in zip(requests, sent, strict=True)
        ]

    def messages(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: ConfigRecord,
        records: dict[int, ArrayRecord] | None = None,
    ) -> Sent:
        """One message per node. Arrays that nodes share are serialised once; `records` holds them
        by id, for other messages with the same arrays."""
        sender, records = self._sender, {} if records is None else records
        if self.record is not None:
            records[id(sender.arrays)] = self.record
        sent = []
        for node in sorted(payloads):
            arrays = payloads[node]
            if id(arrays) not in records:
                records[id(arrays)] = to_record(arrays)
            entries = {sender.arrayrecord_key: records[id(arrays)], sender.configrecord_key: config}
            content = filled(RecordDict(), entries)
            sent.append((Message(content, dst_node_id=node.id, message_type=action), node))
            sender.now.bytes["down"] += num_bytes(arrays.values())
        return sent

    def receive(
        self,
        sent: Sent,
        replies: Iterable[Message],
        like: Mapping[Node, Arrays],
        train: bool = False,
    ) -> list[Update]:
        """The valid replies, sorted by client; the others are counted and logged."""
        sender = self._sender
        nodes = {message.metadata.message_id: node for message, node in sent}
        kind = sent[0][0].metadata.message_type if sent else ""
        payloads = sender.now.payloads if kind == "train" else {}
        changes: list[Change] = []
        for reply in replies:
            node = nodes.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            update, cause, detail = read_reply(
                reply, node, like.get(node), train, sender.weighted_by_key, sender.requires
            )
            if update is None:
                self.drop(node, cause, detail)
                continue
            if train and sender.privacy is not None and (why := sender.privacy.exposed(update)):
                self.drop(node, "not-private", why)
                continue
            change = Change(
                update, sender.baseline_arrays(payloads.get(node, {})), sender.limit_groups
            )
            if name := change.not_finite():
                self.drop(node, NOT_FINITE, f"{name} holds NaN or infinity")
                continue
            changes.append(change)
            sender.now.bytes["up"] += num_bytes(update.arrays.values())
        for node in nodes.values():
            self.drop(node, "missing", f"none within {sender.timeout} s")
        return self._limited(kind, sorted(changes, key=lambda change: change.update.node))

    def _limited(self, kind: str, changes: list[Change]) -> list[Update]:
        """The updates of plausible size, within the limits of `strategies.core.limits`.

        Where participants are secret all are kept as they are, since usual sizes would reveal
        something of them; there the privacy clips every update. So does a wrapper. Clients without
        labels change less than others and are no measure for them."""
        sender, updates = self._sender, [change.update for change in changes]
        if self.hides_participants or not updates or kind == SAVE_STATE:
            return updates
        by_examples = sender.weighted_by_key == EXAMPLES
        joined = [node for node in sender.nodes if by_examples and not node.novel]
        trains = kind != "evaluate"  # an evaluation's weights are never limited
        most = math.inf
        if trains and sender.max_examples_ratio:
            most = sender.max_examples_ratio * usual_count(updates, joined)
        if sender.protect:
            for change, update in zip(changes, bound_numbers(updates), strict=True):
                change.update = update
        measure = [c for c in changes if not c.update.node.unlabeled] or changes
        usual = self.sizes.usual(kind, {c.update.node.client: c.norms for c in measure})
        crowd = len(changes) >= MIN_REPLIES_FOR_NORMS
        ratio = (
            sender.max_update_ratio
            if trains and sender.runs_own_loop and kind not in SEPARATE
            else 0.0
        )
        ratio *= 1 if crowd else 2
        max_norm = sender.max_update_norm if kind == "train" else 0.0
        kept = []
        for change in changes:
            if why := change.absurd(usual):
                self.drop(change.update.node, "absurd", why)
                continue
            limited = change.limited(usual, ratio, max_norm, most, crowd=crowd)
            sender.now.clipped += limited.arrays is not change.update.arrays
            sender.now.recounted += limited.num_examples != change.update.num_examples
            kept.append(limited)
        return kept

    def drop(self, node: Node, cause: str, detail: str) -> None:
        """Count and log a reply that is not used; each new cause goes to the sender's
        `on_failure`."""
        sender, detail = self._sender, bounded(detail)
        sender.now.dropped[cause] += 1
        who = "a client"
        if not self.hides_participants:
            who = f"client {node.client}, round {sender.now.number}"
        sender.now.failure = sender.now.failure or f"{who}: {cause}: {brief(detail)}"
        key = f"{cause}\n{cause_of(detail)}"
        if key in self._causes or len(self._causes) == MAX_CAUSES:
            log(WARNING, "%s: reply dropped, %s: %s", who, cause, brief(detail))
            return
        log(WARNING, "%s: reply dropped, %s: %s", who, cause, detail)
        self._causes.add(key)
        if sender.on_failure is not None:
            sender.on_failure(f"{who}: {cause}\n{detail}")
