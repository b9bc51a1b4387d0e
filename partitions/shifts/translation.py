"""A dataset with the inputs' size and the classes of another one.

Classes are matched by name: STL-10 has monkeys and no frogs."""

import torch
from torch import Tensor

from partitions.datasets.loading import Dataset, Info

SYNONYMS = {"car": "automobile"}
CHUNK = 1000  # images that are resized at once


def translated(other: Dataset, to: Dataset) -> Dataset:
    """`other` with the input size and the labels of `to`, only common classes."""
    names = [SYNONYMS.get(name, name) for name in to.classes]
    label = [names.index(n) if (n := SYNONYMS.get(c, c)) in names else -1 for c in other.classes]
    y = torch.tensor(label)[other.y]
    rows = torch.nonzero(y >= 0)[:, 0]
    if not len(rows):
        raise ValueError(f"{other.info.name} and {to.info.name} have no class in common")
    factor = to.info.scale / other.info.scale
    x = torch.cat([_resized(other.x[r], to.info.shape[-2:], factor) for r in rows.split(CHUNK)])
    columns = {name: values[rows.numpy()] for name, values in other.columns.items()}
    num_train = int((rows < other.num_train).sum())
    known = Info(other.info.name, to.info.shape, to.info.num_classes, "", scale=to.info.scale)
    key = f"{other.key} as {to.key}" if other.key and to.key else ""
    return Dataset(known, x, y[rows], num_train, columns, to.classes, key)


def _resized(x: Tensor, size: tuple[int, ...], factor: float) -> Tensor:
    """Images (n, C, H, W) of another size, bilinear with antialiasing, and their values scaled."""
    from torchvision.transforms.v2 import functional

    x = x if x.shape[-2:] == size else functional.resize(x, list(size), antialias=True)
    return x if factor == 1 else (x.float() * factor).round().to(x.dtype)
