"""What the nodes of a run have in common, and may disagree about without knowing it.

A node is refused, or named in the log, if its answer to ``query`` has another value than those of
most of the first nodes."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import eq
from typing import Any, NamedTuple

from clients.core.projections import are_alike
from clients.core.protocol import (
    AXES,
    CLASS_NAMES,
    COLUMNS,
    FROZEN,
    MAGNITUDE,
    PUBLIC,
    SCALING,
    VALUE_MAGNITUDE,
)
from strategies.core.replies import DIFFERS, OTHER_CLASSES, OTHER_FROZEN, OTHER_PUBLIC

FACTOR = 5  # powers of two between inputs that may have one unit
MOST_COMPARED = 100  # values with all others, which bounds the time


class Common(NamedTuple):
    """A property that all nodes which have it share: the cause and the reason of a refusal, and
    whether two values count as the same. Without a cause the reason is only said: another value
    may be meant."""

    cause: str
    reason: str
    is_same: Callable[[Any, Any], bool]

    def of_most(self, values: Sequence[Any]) -> Any:
        """The value that counts as the same as most of the `values`; of several the most frequent
        one. Values may all differ by rounding."""
        counts = Counter(values)

        def agreeing(value: Any) -> int:
            return sum(count for other, count in counts.items() if self.is_same(value, other))

        candidates = [value for value, _ in counts.most_common(MOST_COMPARED)]
        return max(candidates, key=agreeing)


def have_one_order(one: str, other: str) -> bool:
    """Whether two inputs may have their axes in one order: no, if they differ in the order alone
    and the shortest axis, that of channels, has another place."""
    a = list(map(int, one.split()))
    b = list(map(int, other.split()))
    shortest = min(a)
    if sorted(a) != sorted(b) or a.count(shortest) > 1:
        return True
    return a.index(shortest) == b.index(shortest)


def have_one_unit(one: int, other: int) -> bool:
    """Whether powers of two are so near that the numbers below them may have one unit."""
    return abs(one - other) <= FACTOR


COMMON = {
    COLUMNS: Common(
        DIFFERS,
        "its table has other columns than those of most nodes, or the same in another order; give "
        "all nodes the same columns in one order, or set standardize='training-clients' in "
        "client_app and server_app, which finds columns by name",
        eq,
    ),
    CLASS_NAMES: Common(
        OTHER_CLASSES,
        "its classes have other names than those of most nodes, or the same in another order, so "
        "its labels mean other classes; number the classes by one list on all nodes, by "
        "target_transform of ImageFolder or align_labels_with_mapping of datasets",
        eq,
    ),
    PUBLIC: Common(
        OTHER_PUBLIC,
        "its public samples are not those of most nodes, or come in another order; give all nodes "
        "the same public samples in one order, prepared alike",
        are_alike,
    ),
    AXES: Common(
        "",
        "its inputs have the axes of most nodes' inputs in another order, such as channels last; "
        "unless the network tells them apart, give all nodes one order, as x.permute(0, 3, 1, 2)",
        have_one_order,
    ),
    MAGNITUDE: Common(
        "",
        "its inputs are more than thirty times as large or as small as those of most nodes; unless "
        "they are so, give all nodes one unit, such as pixels in [0, 1]",
        have_one_unit,
    ),
    VALUE_MAGNITUDE: Common(
        "",
        "its values to predict are more than thirty times as large or as small as those of most "
        "nodes; unless they are so, give all nodes one unit",
        have_one_unit,
    ),
    SCALING: Common(
        "",
        "its data were exported with another scaling of inputs or values than those of most nodes; "
        "unless each node is to have its own, export all of them from one dataset",
        eq,
    ),
    FROZEN: Common(
        OTHER_FROZEN,
        "its network's frozen parameters are not those of most nodes, and they are never sent; "
        "load the same weights on all nodes, or keep numbers of a node alone in buffers with "
        "persistent=False",
        are_alike,
    ),
}
