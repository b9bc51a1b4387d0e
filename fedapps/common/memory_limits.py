"""Limits of memory for data that others may have written: a small file can unpack to gigabytes."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from fedapps.common.resources import memory_left

VARIABLE = "FEDAPPS_MAX_DATA_GB"  # the user's limit; default: half of the memory that is left
PASS_MEGABYTES = 16.0


def check_size(size: float, source: Path | str) -> None:
    """Raise ValueError if data of `size` bytes are above the limit."""
    text = os.environ.get(VARIABLE, "") or str(memory_left() / 2e9)
    try:
        limit = float(text)
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE} is {text!r:.100}; it must be a number of gigabytes"
        ) from error
    if not size <= 1e9 * limit:
        raise ValueError(
            f"{source} takes {size / 1e9:.3g} GB of memory; the limit is {limit:.3g} GB; "
            f"if you trust the data: {VARIABLE}={math.ceil(size / 1e9)}"
        )


def num_parts(shape: Sequence[int], megabytes: float = PASS_MEGABYTES) -> int:
    """In how many parts to split the rows of an array, each of about `megabytes` as float32."""
    return max(1, min(shape[0], math.ceil(4e-6 * math.prod(shape) / megabytes)))
