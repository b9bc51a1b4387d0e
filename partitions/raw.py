"""A dataset as read from its source."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Raw:
    """Inputs x (n, …) and labels y (n,), the `num_train` training samples first."""

    x: np.ndarray
    y: np.ndarray
    num_train: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
