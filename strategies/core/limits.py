"""How much one client's reply can count. The other clients' replies are the measure.

*Norms*: in each group of a reply's arrays (see `group_norms`), a change longer than a few times the
usual norm is scaled down to that; a thousand times the usual norm refuses the reply. The usual norm
is the upper quartile of the clients' last norms, the lower median among four clients or fewer. So
no client moves it alone, however often it is sampled. Integers and booleans, such as counts of
steps, are part of no norm. *Sample counts* are limited to a few times the median count; with a
change of ρ > 1 usual norms to 1/ρ of that, so that norm and count together stay within one limit.
*Risks and losses* are limited to a few times the cohort's upper quartile. Replies within the limits
are not changed. Among fewer than `MIN_REPLIES_FOR_NORMS` replies norms may be twice as long, and do
not limit counts."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from clients.core.arrays import Arrays, as_type, is_counter, is_statistic
from clients.core.protocol import DOMAIN
from strategies.core.replies import EXAMPLES, Node, Update, finite

ABSURD = 1000.0  # ratio of a norm to the usual one; beyond it a reply is refused
LARGEST = 1e18  # of norms; beyond it squares overflow in float32
LARGEST_COUNT = 2**53  # of integers; beyond it their mean is not exact
REMEMBERED = 200  # clients, by their last norm
MIN_REPLIES_FOR_NORMS = (
    5  # replies; honest ones of fewer clients differ more, and each decides more of the usual
)
MIN_REPLIES_FOR_QUARTILE = 3  # replies; the quartile of fewer can be that of a liar
MAX_QUARTILE_RATIO = (
    4.0  # ratio of the upper quartile to the lower median; a larger one is that of many liars
)
METRIC_LIMITS = {"risk": 2.0, "loss": 100.0}  # ratio of the largest value to the upper quartile
# Replies that concern their sender alone: no other client's model follows them.
SEPARATE = (DOMAIN, "query.describe", "query.export")

Norms = dict[str, float]  # by group
WIDE = {np.dtype(np.float32), np.dtype(np.float64)}  # whose squares need no wider type


def lower_quantile(values: Collection[float], share: float = 0.5) -> float:
    """The lower quantile at `share`; by default the lower median."""
    return sorted(values)[int(share * (len(values) - 1))]


def usual_size(sizes: Collection[float]) -> float:
    """The upper quartile, at most MAX_QUARTILE_RATIO lower medians: a minority cannot make it
    absurd."""
    return min(lower_quantile(sizes, 0.75), MAX_QUARTILE_RATIO * lower_quantile(sizes))


def usual_count(updates: Sequence[Update], nodes: Iterable[Node]) -> float:
    """The lower median, at least 1, of the counts that the `nodes` gave on joining, else of the
    replies."""
    joined = [node.properties[EXAMPLES] for node in nodes if EXAMPLES in node.properties]
    return max(1, lower_quantile(joined or [update.num_examples for update in updates]))


def bounded_weights(
    weights: Sequence[float], updates: Sequence[Update], ratio: float
) -> list[float]:
    """Weights that are not sample counts, those of changes of ρ > `ratio` times ratio / ρ (ratio 0:
    as they are)."""
    return [
        w * min(1.0, ratio / u.length) if ratio else w
        for w, u in zip(weights, updates, strict=True)
    ]


def bound_numbers(updates: Sequence[Update]) -> list[Update]:
    """The updates with `METRIC_LIMITS` in the range of the cohort."""
    limits = {}
    for name, ratio in METRIC_LIMITS.items():
        sizes = [abs(u.metrics[name]) for u in updates if name in u.metrics]
        limits[name] = ratio * usual_size(sizes) if sizes else 0.0
    result = []
    for update in updates:
        far = {
            name: math.copysign(limit, update.metrics[name])
            for name, limit in limits.items()
            if 0 < limit < abs(update.metrics.get(name, 0))
        }
        result.append(replace(update, metrics=update.metrics | far) if far else update)
    return result


@lru_cache(maxsize=4096)
def group_of(name: str, statistic: bool, parts: tuple[str, ...]) -> str:
    """The group of an array: its kind of running statistic, its prefix before "/", or the one of
    `parts` that its name starts with."""
    if statistic:
        return name.rpartition(".")[2]
    prefix, slash, _ = name.partition("/")
    return prefix if slash else next((part for part in parts if name.startswith(part)), "")


def group_norms(arrays: Arrays, start: Arrays, parts: tuple[str, ...] = ()) -> Norms:
    """‖y − x‖ by group of the arrays y; x is 0 where `start` lacks one of the same shape.

    Integers and booleans do not count."""
    squares: Norms = {}
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is a valid distance
        for name, y in arrays.items():
            if is_counter(y):
                continue
            wide = y if y.dtype in WIDE else y.astype(np.float64)
            x = start.get(name)
            change = wide if x is None or x.shape != y.shape else wide - x
            group = group_of(name, is_statistic(name, y), parts)
            squares[group] = squares.get(group, 0.0) + float(np.vdot(change, change))
    return {group: math.sqrt(square) for group, square in squares.items()}


def scaled(arrays: Arrays, start: Arrays, factors: Norms, parts: tuple[str, ...] = ()) -> Arrays:
    """x + factor (y − x) with the x of `group_norms` and the factor of each array's group, in the
    dtypes of y; arrays of other groups do not change, nor do integers and booleans."""
    result = dict(arrays)
    for name, y in arrays.items():
        group = group_of(name, is_statistic(name, y), parts)
        if group in factors and not is_counter(y):
            x = start.get(name)
            x = np.zeros_like(y) if x is None or x.shape != y.shape else x
            result[name] = as_type(x + factors[group] * (y.astype(float) - x), y.dtype)
    return result


class Change:
    """The change that an update makes to the `start` from which its size is measured."""

    def __init__(self, update: Update, start: Arrays, parts: tuple[str, ...] = ()) -> None:
        self.update, self._start, self._parts = update, start, parts
        self.norms = group_norms(update.arrays, start, parts)

    def not_finite(self) -> str:
        """The name of an array that holds NaN or infinity, "" if all norms are finite."""
        if all(map(math.isfinite, self.norms.values())):
            return ""  # spares a pass over each array
        return next((name for name, a in self.update.arrays.items() if not finite(a)), "")

    def absurd(self, usual: Norms) -> str:
        """Why the update is refused; "" if its size is plausible."""
        for group, norm in self.norms.items():
            limit = min(ABSURD * max(1.0, usual[group]), LARGEST)
            if norm > limit:
                return f"{norm:.3g} from what was sent, > {limit:.3g}" + (group and f" ({group})")
        return self._absurd_count()

    def _absurd_count(self) -> str:
        """Why an array of integers is refused; "" if its numbers are counts."""
        for name, y in self.update.arrays.items():
            if not is_counter(y) or not y.size:
                continue
            sent = self._start.get(name)
            if sent is not None and np.array_equal(y, sent):
                continue
            largest = max(int(y.max()), -int(y.min()))
            if largest > LARGEST_COUNT:
                return f"{name} holds {largest}, > {LARGEST_COUNT}"
        return ""

    def limited(
        self, usual: Norms, ratio: float, max_norm: float, most: float, *, crowd: bool = True
    ) -> Update:
        """The update whose groups are at most `ratio` usual norms long and all together `max_norm`
        (0: any length), with at most `most` samples; in a `crowd` with at most `most` / ρ for a
        group of ρ usual norms."""
        limits = {group: ratio * usual[group] or math.inf for group in self.norms}
        norms = {group: min(norm, limits[group]) for group, norm in self.norms.items()}
        length = 1.0
        if ratio and crowd:
            length = max([1.0, *(norm / usual[g] for g, norm in norms.items() if usual[g])])
        whole = math.hypot(*norms.values())
        if max_norm and whole > max_norm:
            norms = {group: norm * max_norm / whole for group, norm in norms.items()}
        factors = {g: norms[g] / norm for g, norm in self.norms.items() if norms[g] < norm}
        update = self.update
        if factors:
            arrays = scaled(update.arrays, self._start, factors, self._parts)
            update = replace(update, arrays=arrays)
        if length == 1 and update.num_examples <= most:
            return update
        counted = min(update.num_examples, most / length)
        return replace(update, num_examples=counted, length=length)


class NormHistory:
    """The norm of each client's last reply, by kind of message and group of arrays."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, float]] = {}

    def state(self) -> dict[str, dict[int, float]]:
        """The norms by kind and client."""
        return {kind: dict(last) for kind, last in self._last.items()}

    def load_state(self, state: Mapping[str, Mapping[int, float]]) -> None:
        """Continue from a `state`."""
        self._last = {kind: dict(last) for kind, last in state.items()}

    def usual(self, kind: str, norms: Mapping[int, Norms]) -> Norms:
        """The usual norm of each group, once these by client are remembered.

        It is the `usual_size` of the last norms of up to REMEMBERED clients, or that of a cohort
        of MIN_REPLIES_FOR_QUARTILE or more if it is larger."""
        return {
            group: self._usual(
                f"{kind} {group}", {c: n[group] for c, n in norms.items() if group in n}
            )
            for group in sorted({group for n in norms.values() for group in n})
        }

    def _usual(self, key: str, norms: Mapping[int, float]) -> float:
        last = self._last.setdefault(key, {})
        for client, norm in norms.items():
            last.pop(client, None)
            last[client] = min(norm, LARGEST)
        while len(last) > REMEMBERED:
            del last[next(iter(last))]
        usual = usual_size(last.values())
        return (
            max(usual, usual_size(norms.values()))
            if len(norms) >= MIN_REPLIES_FOR_QUARTILE
            else usual
        )
