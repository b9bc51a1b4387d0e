"""Several input tensors for a sample, such as token ids and an attention mask, as one tensor.

Samples, methods and messages know one tensor of inputs x. Parts of equal shapes are stacked,
(n, number of parts, *shape), so that each mini-batch may have its own length; others are flattened
and stand side by side, (n, sum of sizes)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST_WHOLE = 2**24  # float32, in which samples are read, has all whole numbers up to this one


@dataclass(frozen=True)
class Part:
    """One input tensor: its keyword in the network's forward pass ("": by position), the shape of
    one sample, and whether its entries stay whole numbers."""

    name: str
    shape: tuple[int, ...]
    whole: bool


def have_equal_shapes(parts: Sequence[Part]) -> bool:
    """Whether the parts are stacked."""
    return len({part.shape for part in parts}) == 1


def packed_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """The shape of one sample's tensor."""
    if have_equal_shapes(parts):
        return (len(parts), *parts[0].shape)
    return (sum(math.prod(part.shape) for part in parts),)


def packing(shapes: Any) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    """The shape of one sample's tensor and its parts, of a dict of shapes by keyword or a tuple of
    shapes by position; for the shape of a single tensor there are no parts."""
    parts: list[Part] = []
    if isinstance(shapes, Mapping):
        for name, shape in shapes.items():
            parts.append(Part(str(name), tuple(shape), True))
    elif all(isinstance(shape, tuple | list) for shape in shapes):
        for shape in shapes:
            parts.append(Part("", tuple(shape), True))
    if not parts:
        return tuple(shapes), ()
    return packed_shape(parts), tuple(parts)


def packed(tensors: Sequence[Tensor], stacked: bool) -> Tensor:
    """The parts (n, *shape) as one tensor of float32. Raises ValueError for whole numbers that
    float32 does not have."""
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.numel() and tensor.max() > LARGEST_WHOLE:
            raise ValueError(
                f"an input has the whole number {int(tensor.max())}; samples are read as float32, "
                f"which has those up to {LARGEST_WHOLE}"
            )
    floats = [tensor.float() for tensor in tensors]
    if stacked:
        return torch.stack(floats, 1)
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in floats], 1)


def unpacked(x: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """The parts (n, *shape) of `packed` tensors."""
    if have_equal_shapes(parts):
        columns = x.unbind(1)
    else:
        sizes = [math.prod(part.shape) for part in parts]
        columns = x.split(sizes, 1)
    tensors = []
    for part, column in zip(parts, columns, strict=True):
        tensor = column.reshape(len(x), *part.shape)
        if part.whole:
            tensor = tensor.long()
        tensors.append(tensor)
    return tensors
