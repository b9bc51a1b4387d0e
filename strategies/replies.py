"""Nodes and their replies, which are not trusted: each is read, checked, and refused by cause."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common.constant import ErrorCode

from clients.arrays import Arrays, from_record
from strategies.magnitude import finite
from strategies.requirement import Requirement
from strategies.told import numbers, told, typed, weight

EXAMPLES = "num-examples"
LACKS = "lacks"  # cause of refusal: a client does not do what the strategy requires
IMPLAUSIBLE = 100  # times the usual number of samples; no honest client comes near it


@dataclass(frozen=True, order=True)
class Node:
    """A node and the client that lives on it, `foreign` if it is none of ours. Nodes sort by client
    id."""

    client: int
    id: int
    novel: bool = False
    properties: Mapping[str, Any] = field(default_factory=dict, compare=False)
    foreign: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Update:
    """A valid reply: the node's arrays, its sample count, and what it tells, be it under names that
    we know or, if the node is foreign, under names of its `own`."""

    node: Node
    arrays: Arrays
    num_examples: float
    metrics: dict[str, Any]
    own: Mapping[str, float | list[float]] = field(default_factory=dict)


def read_reply(
    reply: Message,
    node: Node,
    like: Arrays | None,
    train: bool,
    weighted_by: str = EXAMPLES,
    requires: Requirement | None = None,
) -> tuple[Update | None, str, str]:
    """A reply as an update, or None with the cause and the detail of its refusal.

    It weighs what it tells as `weighted_by`. A train reply must hold what is required. Floats of
    another width are cast to that of `like`."""
    if reply.has_error():
        return None, "error", reason_of(reply)
    try:
        arrays: Arrays = {}
        for record in reply.content.values():
            if isinstance(record, ArrayRecord):
                arrays |= from_record(record)
        said = told(reply.content)
        own = numbers(said) if node.foreign else {}
        needed = requires.metrics if requires is not None else ()
        metrics = typed({n: v for n, v in said.items() if n in needed} if node.foreign else said)
        own.pop(weighted_by, None)
        num_examples = weight(metrics.pop(weighted_by, said.get(weighted_by, 0)), weighted_by)
        if weighted_by == EXAMPLES:
            # nobody weighs more than by the samples that it told when it came
            num_examples = min(num_examples, node.properties.get(EXAMPLES, num_examples))
        if train and not num_examples:
            raise ValueError(f"{weighted_by} is 0 or missing; a client trains on some samples")
    except Exception as error:  # whatever a stranger's bytes provoke costs that reply alone
        return None, "malformed", f"{type(error).__name__}: {error}"
    if train and requires is not None and not requires.replied(arrays, said):
        return None, LACKS, f"the client does not {requires.do}"
    if like is not None:
        if arrays.keys() != like.keys():
            return None, "names", f"{sorted(arrays.keys() ^ like.keys())} missing or unknown"
        for name, array in arrays.items():
            if array.shape != like[name].shape:
                return None, "shape", f"{name} is {array.shape}, expected {like[name].shape}"
            if array.dtype.kind == like[name].dtype.kind == "f":
                with np.errstate(over="ignore"):  # it is looked for below
                    arrays[name] = array.astype(like[name].dtype, copy=False)
            elif array.dtype != like[name].dtype:
                return None, "dtype", f"{name} is {array.dtype}, expected {like[name].dtype}"
    for name, array in arrays.items():
        if not finite(array):
            return None, "not-finite", f"{name} holds NaN or infinity"
    return Update(node, arrays, num_examples, metrics, own), "", ""


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


def raised(reply: Message) -> bool:
    """Whether the node's app runs but raised: ours answers ``query`` in any case."""
    return reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def agreed(nodes: Iterable[Node], *properties: str) -> tuple[Any, ...] | None:
    """The values of `properties` that most of the nodes told (ties: the least); None if nobody."""
    told = Counter(
        tuple(node.properties[one] for one in properties)
        for node in nodes
        if all(one in node.properties for one in properties)
    )
    return min(told, key=lambda values: (-told[values], values)) if told else None
