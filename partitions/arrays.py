"""Whatever holds numbers as an array of numpy."""

from typing import Any

import numpy as np
from torch import Tensor


def as_array(value: Any) -> np.ndarray:
    """An array of a tensor, an array, a list or a number. Raises ValueError for masked cells."""
    if np.ma.is_masked(value):
        raise ValueError(
            f"an array has {np.ma.count_masked(value)} masked cells; fill them, as x.filled(0), or "
            "leave these samples out"
        )
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"a {type(value).__name__} holds rows of several lengths or kinds, which are no array; "
            "give rows of one length, or each part by itself"
        ) from error
