"""Nodes and their replies, which are not trusted: each is read, checked, and refused by cause."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.common.constant import ErrorCode

from clients.arrays import Arrays, from_record
from strategies.magnitude import finite
from strategies.told import told

IMPLAUSIBLE = 100  # times the usual number of samples; no honest client comes near it


@dataclass(frozen=True, order=True)
class Node:
    """A node and the client that lives on it. Nodes sort by client id."""

    client: int
    id: int
    novel: bool = False
    properties: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Update:
    """A valid reply: the node's arrays, its sample count and its metrics."""

    node: Node
    arrays: Arrays
    num_examples: int
    metrics: dict[str, Any]


def read_reply(
    reply: Message, node: Node, like: Arrays | None, train: bool
) -> tuple[Update | None, str, str]:
    """A reply as an update, or None with the cause and the detail of its refusal."""
    if reply.has_error():
        return None, "error", reason_of(reply)
    try:
        arrays: Arrays = {}
        for record in reply.content.values():
            if isinstance(record, ArrayRecord):
                arrays |= from_record(record)
        metrics = told(reply.content)
        num_examples = metrics.pop("num-examples", 0)
        # nobody weighs more than by the samples that it told when it came
        num_examples = min(num_examples, node.properties.get("num-examples", num_examples))
        if train and not num_examples:
            raise ValueError("num-examples is 0 or missing; a client trains on some samples")
    except Exception as error:  # whatever a stranger's bytes provoke costs that reply alone
        return None, "malformed", f"{type(error).__name__}: {error}"
    if like is not None:
        if arrays.keys() != like.keys():
            return None, "names", f"{sorted(arrays.keys() ^ like.keys())} missing or unknown"
        for name, array in arrays.items():
            if array.shape != like[name].shape:
                return None, "shape", f"{name} is {array.shape}, expected {like[name].shape}"
            if array.dtype != like[name].dtype:
                return None, "dtype", f"{name} is {array.dtype}, expected {like[name].dtype}"
    for name, array in arrays.items():
        if not finite(array):
            return None, "not-finite", f"{name} holds NaN or infinity"
    return Update(node, arrays, num_examples, metrics), "", ""


def weighed(updates: list[Update], nodes: Sequence[Node]) -> list[Update]:
    """The updates; who tells implausibly many samples counts as having the usual number: the lower
    median of what the nodes told when they came, or of these replies where they told nothing.

    A client within the bound may lie still; `strategies.robust` counts clients, not samples."""
    told = [n.properties["num-examples"] for n in nodes if "num-examples" in n.properties]
    counts = sorted(told or [update.num_examples for update in updates])
    usual = max(1, counts[(len(counts) - 1) // 2]) if counts else 1
    most = IMPLAUSIBLE * usual
    return [u if u.num_examples <= most else replace(u, num_examples=usual) for u in updates]


def reason_of(reply: Message) -> str:
    """Why the client failed, in one line: engines send whole tracebacks, the cause last."""
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"error {reply.error.code}"


def unknown_query(reply: Message) -> bool:
    """Whether the node's app runs but has no query handler."""
    reason = reply.error.reason or ""
    return (
        reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        and "No query function registered" in reason
    )


def agreed(nodes: Iterable[Node], *properties: str) -> tuple[Any, ...] | None:
    """The values of `properties` that most of the nodes told (ties: the least); None if nobody."""
    told = Counter(
        tuple(node.properties[one] for one in properties)
        for node in nodes
        if all(one in node.properties for one in properties)
    )
    return min(told, key=lambda values: (-told[values], values)) if told else None
