"""How far a later client's inputs are from training's, for people.

The distance of a column is (m' − m) / s, with mean m and deviation s over the training rows and the
mean m' of the later client. A distance is large above the largest of the training clients, plus
4 / √n for n later rows, as the mean of n rows varies by s / √n."""

import math
from collections.abc import Mapping

MARGIN = 4.0  # deviations of a mean over n rows
SHOWN = 5  # columns in a report


def threshold(largest: float, count: int) -> float:
    """The distance above which `count` rows do not look like training."""
    return largest + MARGIN / math.sqrt(count)


def words(name: str, distance: float) -> str:
    """A column's distance for people."""
    side = "above" if distance > 0 else "below"
    return f"{name}: {abs(distance):.3g} deviations {side} training"


def farthest(distances: Mapping[str, float]) -> dict[str, float]:
    """The distances of the farthest columns by name, the farthest first."""
    order = sorted(distances, key=lambda name: -abs(distances[name]))
    return {name: distances[name] for name in order[:SHOWN]}


def warning(distances: Mapping[str, float], limit: float) -> str:
    """The columns that are farther than `limit`; "" without one."""
    beyond = [words(name, d) for name, d in farthest(distances).items() if abs(d) > limit]
    if not beyond:
        return ""
    return (
        f"inputs do not look like training: {'; '.join(beyond)} (training clients' own are below "
        f"{limit:.2g})"
    )
