"""The replies to a strategy's messages: each is checked (`reply_checks`), and counts within limits
(`limits`). Those that are refused are counted and logged."""

import math
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from logging import WARNING
from typing import Protocol

from flwr.app import Message
from flwr.common.logger import log

from clients.core.arrays import (
    Arrays,
    num_bytes,
)
from clients.core.protocol import (
    DOMAIN,
    NUM_EXAMPLES,
    SAVE_STATE,
)
from fedapps.common.errors import bounded, brief, cause_of
from strategies.core.limits import (
    MIN_REPLIES_FOR_NORMS,
    Change,
    NormHistory,
    bound_numbers,
    usual_count,
)
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.replies import (
    NOT_FINITE,
    Node,
    Requirement,
    Update,
)
from strategies.core.reply_checks import FOREIGN_NAMES, raw_values, read_reply, unusable_names
from strategies.core.round_state import Round, Sent

# Replies that affect their sender alone: no other client's model depends on them.
SEPARATE = (DOMAIN, "query.describe", "query.export")

# Causes of refusal that `on_failure` gets; a client may invent any number of them.
MAX_CAUSES = 50
NO_ARRAYS: Mapping[Node, Arrays] = {}


class ReceivingStrategy(Protocol):
    """What a receiver reads of its strategy."""

    timeout: float
    nodes: MutableSequence[Node]
    now: Round
    requires: Requirement | None
    privacy: Privacy | None
    runs_own_loop: bool
    limit_groups: tuple[str, ...]
    protect: bool
    max_update_norm: float
    max_update_ratio: float
    max_examples_ratio: float
    weighted_by_key: str
    on_failure: Callable[[str], None] | None


class Receiver:
    """Reads the replies to a strategy's messages.

    Bytes and refused replies are counted in the strategy's present round."""

    def __init__(self, strategy: ReceivingStrategy) -> None:
        self._strategy = strategy
        self.sizes = NormHistory()
        self._causes: set[str] = set()  # passed to `on_failure`
        self._unusable_names: set[str] = set()  # of foreign clients' metrics, logged

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
        if node.foreign and not participants_are_secret(strategy.privacy):
            self._say_what_is_left_out(reply)
        change = Change(update, start, strategy.limit_groups)
        name = change.not_finite()
        if name:
            self.drop(node, NOT_FINITE, f"{name} holds NaN or infinity")
            return None
        return change

    def _say_what_is_left_out(self, reply: Message) -> None:
        """Log each metric that a foreign client's reply has under a name that no metric has here,
        once in a run."""
        for name in unusable_names(raw_values(reply.content)):
            if name in self._unusable_names or len(self._unusable_names) == MAX_CAUSES:
                continue
            self._unusable_names.add(name)
            text = "the metric %.200r is left out; rename it in the client: a name has %s"
            log(WARNING, text, name, FOREIGN_NAMES)

    def limited(self, kind: str, changes: list[Change]) -> list[Update]:
        """The updates of plausible size, within the limits of `strategies.core.checks_and_limits`.

        `changes` are sorted by client, so that sums are the same on every engine."""
        strategy = self._strategy
        updates = [change.update for change in changes]
        # Where participants are secret, usual sizes would reveal something about them; there the
        # privacy clips every update.
        hidden = participants_are_secret(strategy.privacy)
        if hidden or not updates or kind == SAVE_STATE:
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
        if not participants_are_secret(strategy.privacy):
            client = f"client {node.client}, round {strategy.now.number}"
        if not strategy.now.failure:
            strategy.now.failure = f"{client}: {cause}: {brief(detail)}"
        key = f"{cause}\n{cause_of(detail)}"
        text = f"{client}: {cause}\n{detail}"
        strategy.now.causes.setdefault(key, text)
        is_new = self.pass_cause(key, text)
        shown = detail if is_new else brief(detail)
        log(WARNING, "%s: reply dropped, %s: %s", client, cause, shown)

    def pass_cause(self, key: str, text: str) -> bool:
        """Pass the `text` of a cause to the strategy's `on_failure`, unless one of this `key` was
        passed before, or too many were. Returns whether it is new."""
        if key in self._causes or len(self._causes) == MAX_CAUSES:
            return False
        self._causes.add(key)
        if self._strategy.on_failure is not None:
            self._strategy.on_failure(text)
        return True
