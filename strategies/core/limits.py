"""How much one client's reply may count, relative to the other clients' replies.

*Norms*: the norm of a change is limited in each group of a reply's arrays (see `group_norms`). A
change that exceeds a few times the usual norm is scaled down to this limit. A change that exceeds a
thousand times the usual norm is refused. The usual norm is the upper quartile of the clients' last
norms, but at most `MAX_QUARTILE_RATIO` lower medians. Of four clients or fewer this quartile is the
lower median. So no single client moves the usual norm, however often it is sampled. Integers and
booleans, such as counts of steps, are part of no norm.

*Sample counts* are limited to a few times the median count. A change of ρ > 1 usual norms has a
limit of 1/ρ of that, so that norm and count together stay within one limit.

*Risks and losses* are limited to a few times the upper quartile of the replies.

Replies within the limits are not changed. Among fewer than `MIN_REPLIES_FOR_NORMS` replies the
limits of norms are twice as large, and norms do not limit counts."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from clients.core.arrays import (
    Arrays,
    as_type,
    is_counter,
    is_statistic,
)
from clients.core.protocol import (
    LOSS,
    NUM_EXAMPLES,
)
from strategies.core.replies import (
    Node,
    Update,
    finite,
)

ABSURD = 1000.0  # ratio of a norm to the usual norm; a reply beyond it is refused
LARGEST_NORM = 1e18  # norm; larger squares overflow in float32
LARGEST_COUNT = 2**53  # integer; the mean of larger ones is not exact
REMEMBERED = 200  # clients whose last norms are stored

# Honest replies of fewer clients differ more, and each moves the usual norm more.
MIN_REPLIES_FOR_NORMS = 5
# Among fewer replies a malicious client can decide the quartile.
MIN_REPLIES_FOR_QUARTILE = 3
# Only many malicious clients can raise the upper quartile beyond this multiple of the lower median.
MAX_QUARTILE_RATIO = 4.0

# Ratio of the largest value to the upper quartile.
METRIC_LIMITS = {"risk": 2.0, LOSS: 100.0}
Norms = dict[str, float]  # by group
WIDE = {np.dtype(np.float32), np.dtype(np.float64)}  # types whose squares are summed as they are


def lower_quantile(values: Collection[float], share: float = 0.5) -> float:
    """The lower quantile at `share`; by default the lower median."""
    return sorted(values)[int(share * (len(values) - 1))]


def usual_size(sizes: Collection[float]) -> float:
    """The upper quartile, but at most MAX_QUARTILE_RATIO lower medians: a minority of clients
    cannot raise it far."""
    return min(lower_quantile(sizes, 0.75), MAX_QUARTILE_RATIO * lower_quantile(sizes))


def usual_count(updates: Sequence[Update], nodes: Iterable[Node]) -> float:
    """The lower median, at least 1, of the counts that the `nodes` gave when they joined.

    Without any such count it is that of the replies' counts."""
    counts: list[float] = []
    for node in nodes:
        if NUM_EXAMPLES in node.properties:
            counts.append(node.properties[NUM_EXAMPLES])
    if not counts:
        counts = [update.num_examples for update in updates]
    return max(1, lower_quantile(counts))


def bounded_weights(
    weights: Sequence[float], updates: Sequence[Update], ratio: float
) -> list[float]:
    """Limit weights other than sample counts by the norms of the updates.

    The weight of a change of ρ > `ratio` usual norms is multiplied by ratio / ρ. Ratio 0: off."""
    if not ratio:
        return list(weights)
    bounded = []
    for weight, update in zip(weights, updates, strict=True):
        bounded.append(weight * min(1.0, ratio / update.rho))
    return bounded


def bound_numbers(updates: Sequence[Update]) -> list[Update]:
    """The updates with the metrics of `METRIC_LIMITS` limited relative to the other updates."""
    limits: dict[str, float] = {}
    for name, ratio in METRIC_LIMITS.items():
        sizes = [abs(update.metrics[name]) for update in updates if name in update.metrics]
        if sizes:
            limits[name] = ratio * usual_size(sizes)
    result = []
    for update in updates:
        bounded: dict[str, float] = {}
        for name, limit in limits.items():
            # A limit of 0 is no measure: most clients sent 0.
            if name in update.metrics and 0 < limit < abs(update.metrics[name]):
                bounded[name] = math.copysign(limit, update.metrics[name])
        if bounded:
            result.append(replace(update, metrics=update.metrics | bounded))
        else:
            result.append(update)
    return result


@lru_cache(maxsize=4096)
def group_of(name: str, statistic: bool, limit_groups: tuple[str, ...]) -> str:
    """The group of an array: its kind of running statistic, its prefix before "/", or the one of
    `limit_groups` that its name starts with."""
    if statistic:
        return name.rpartition(".")[2]
    prefix, slash, _ = name.partition("/")
    if slash:
        return prefix
    for group in limit_groups:
        if name.startswith(group):
            return group
    return ""


def _start_of(name: str, array: np.ndarray, start: Arrays) -> np.ndarray | None:
    """The array of `start` that this one is measured from; None if there is none of its shape."""
    x = start.get(name)
    if x is None or x.shape != array.shape:
        return None
    return x


def group_norms(arrays: Arrays, start: Arrays, limit_groups: tuple[str, ...] = ()) -> Norms:
    """‖y − x‖ by group of the arrays y; x is 0 where `start` lacks one of the same shape.

    Integers and booleans do not count."""
    squares: Norms = {}
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is a valid distance
        for name, y in arrays.items():
            if is_counter(y):
                continue
            # The sum of many squares would overflow in float16.
            change = y if y.dtype in WIDE else y.astype(np.float64)
            x = _start_of(name, y, start)
            if x is not None:
                change = change - x
            group = group_of(name, is_statistic(name, y), limit_groups)
            squares[group] = squares.get(group, 0.0) + float(np.vdot(change, change))
    return {group: math.sqrt(square) for group, square in squares.items()}


def scaled(
    arrays: Arrays, start: Arrays, factors: Norms, limit_groups: tuple[str, ...] = ()
) -> Arrays:
    """x + factor (y − x) with the x of `group_norms` and the factor of each array's group, in the
    dtypes of y. Arrays of groups without a factor do not change, nor do integers and booleans."""
    result = dict(arrays)
    for name, y in arrays.items():
        group = group_of(name, is_statistic(name, y), limit_groups)
        if group not in factors or is_counter(y):
            continue
        x = _start_of(name, y, start)
        if x is None:
            x = np.zeros_like(y)
        result[name] = as_type(x + factors[group] * (y.astype(float) - x), y.dtype)
    return result


class Change:
    """An update and the norms of its difference from `start`, by group."""

    def __init__(self, update: Update, start: Arrays, limit_groups: tuple[str, ...] = ()) -> None:
        self.update = update
        self._start = start
        self._limit_groups = limit_groups
        self.norms = group_norms(update.arrays, start, limit_groups)

    def not_finite(self) -> str:
        """The name of an array that holds NaN or infinity; "" if there is none."""
        # An array with NaN or infinity has no finite norm, so finite norms spare a pass over the
        # arrays. A norm alone is no proof: the squares of large finite numbers overflow as well.
        if all(map(math.isfinite, self.norms.values())):
            return ""
        for name, array in self.update.arrays.items():
            if not finite(array):
                return name
        return ""

    def absurd(self, usual: Norms) -> str:
        """Why the update is refused; "" if its size is plausible."""
        for group, norm in self.norms.items():
            limit = min(ABSURD * max(1.0, usual[group]), LARGEST_NORM)
            if norm > limit:
                where = f" ({group})" if group else ""
                return f"{norm:.3g} from what was sent, > {limit:.3g}{where}"
        return self._absurd_count()

    def _absurd_count(self) -> str:
        """Why an array of integers is refused; "" if its numbers are counts."""
        for name, y in self.update.arrays.items():
            if not is_counter(y) or not y.size:
                continue
            sent = self._start.get(name)
            if sent is not None and np.array_equal(y, sent):
                continue  # the server sent these numbers itself
            largest = max(int(y.max()), -int(y.min()))
            if largest > LARGEST_COUNT:
                return f"{name} holds {largest}, > {LARGEST_COUNT}"
        return ""

    def limited(
        self,
        usual: Norms,
        norm_ratio: float,
        max_norm: float,
        max_examples: float,
        *,
        norms_limit_counts: bool = True,
    ) -> Update:
        """The update within the limits of this file's head; the same object if nothing changes.

        Each group is at most `norm_ratio` usual norms long, and all groups together at most
        `max_norm` (0: any length). The update counts with at most `max_examples` samples. With
        `norms_limit_counts` it counts with at most `max_examples` / ρ, where its longest group is
        of ρ > 1 usual norms."""
        norms: Norms = {}
        for group, norm in self.norms.items():
            norms[group] = norm
            limit = norm_ratio * usual[group]
            # Where the usual norm is 0 there is no measure, and so no limit.
            if limit > 0:
                norms[group] = min(norm, limit)
        rho = 1.0
        if norm_ratio and norms_limit_counts:
            rho = _rho(norms, usual)
        whole = math.hypot(*norms.values())
        if max_norm and whole > max_norm:
            norms = {group: norm * max_norm / whole for group, norm in norms.items()}
        factors: Norms = {}
        for group, norm in self.norms.items():
            if norms[group] < norm:
                factors[group] = norms[group] / norm
        update = self.update
        if factors:
            arrays = scaled(update.arrays, self._start, factors, self._limit_groups)
            update = replace(update, arrays=arrays)
        if rho == 1 and update.num_examples <= max_examples:
            return update
        num_examples = min(update.num_examples, max_examples / rho)
        return replace(update, num_examples=num_examples, rho=rho)


def _rho(norms: Norms, usual: Norms) -> float:
    """ρ ≥ 1, the largest norm of a group in usual norms."""
    rho = 1.0
    for group, norm in norms.items():
        if usual[group]:
            rho = max(rho, norm / usual[group])
    return rho


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
        """Store these norms by client, and return the usual norm of each group.

        It is the `usual_size` of the last norms of up to REMEMBERED clients. With
        MIN_REPLIES_FOR_QUARTILE or more replies it is that of the replies if this is larger."""
        by_group: dict[str, dict[int, float]] = defaultdict(dict)
        for client, client_norms in norms.items():
            for group, norm in client_norms.items():
                by_group[group][client] = norm
        usual: Norms = {}
        for group in sorted(by_group):
            usual[group] = self._usual(f"{kind} {group}", by_group[group])
        return usual

    def _usual(self, key: str, norms: Mapping[int, float]) -> float:
        last = self._last.setdefault(key, {})
        for client, norm in norms.items():
            last.pop(client, None)  # a client that replies again becomes the most recent
            last[client] = min(norm, LARGEST_NORM)
        while len(last) > REMEMBERED:
            least_recent = next(iter(last))
            del last[least_recent]
        usual = usual_size(last.values())
        if len(norms) >= MIN_REPLIES_FOR_QUARTILE:
            usual = max(usual, usual_size(norms.values()))
        return usual
