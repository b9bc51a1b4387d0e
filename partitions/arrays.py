"""What a user gives, as an array or a tensor: a tensor, an array, lists, a number, a picture."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from partitions.pictures import is_picture, of_picture

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has few operations for them


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


def as_tensor(value: Any) -> Tensor:
    """A tensor of an array, of lists, or of a picture: (channels, height, width) in [0, 1].

    Raises TypeError or ValueError for other values."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex():
            raise ValueError(
                f"inputs are {value.layout} tensors of {value.dtype}; give dense ones of real "
                "numbers, such as x.to_dense()"
            )
        value = value.detach()
        return value.to(torch.int64) if value.dtype in UNSIGNED else value
    if hasattr(value, "toarray"):  # of scipy
        raise ValueError(f"inputs are {type(value).__name__}; give a dense array: x.toarray()")
    if is_picture(value):
        return of_picture(value)
    array = as_array(value)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no long doubles
        array = array.astype(np.float64)
    if not array.ndim:
        raise TypeError(f"{value!r:.80} is no array")
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"inputs are an array of {array.dtype}, such as {array.flat[0]!r:.80}; they must be "
            "numbers"
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(array))
