"""Images and rows that cannot be read: refused, or left out up to a share that is allowed."""

import math
from collections.abc import Sequence

MOST_NAMED = 10


def left_out(broken: Sequence[str], total: int, allowed: float, kind: str) -> list[str]:
    """A note that names the first of the `broken` ones among a `total` of that `kind`, images or
    rows; empty if there are none. Raises ValueError if they are more than the `allowed` share."""
    if not broken:
        return []
    text = "; ".join(broken[:MOST_NAMED])
    if len(broken) > MOST_NAMED:
        text += f"; and {len(broken) - MOST_NAMED} more"
    count = f"{len(broken)} of {total} {kind}"
    share = math.ceil(100 * len(broken) / total) / 100
    if len(broken) <= allowed * total:
        return [f"{text}: {count} are left out (skip-broken={allowed:g})"]
    allows = f", above skip-broken={allowed:g}" if allowed else ""
    advice = "repair them, or take them away"
    if share < 1:
        advice += f", or set skip-broken={share:g}, which leaves out up to that share"
    raise ValueError(f"{text}: {count} cannot be used{allows}; {advice}")
