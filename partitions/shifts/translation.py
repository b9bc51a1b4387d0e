"""Converts a dataset to the input size and the classes of another one.

Classes are matched by name. Classes without a counterpart are left out, as STL-10's monkeys are
for CIFAR-10."""

import torch
from torch import Tensor

from partitions.datasets.loading import Dataset, Info

SYNONYMS = {"car": "automobile"}
CHUNK = 1000  # images that are resized at once


def translated(other: Dataset, to: Dataset) -> Dataset:
    """`other` with the input size and the labels of `to`, without classes that `to` lacks."""
    label_of = {SYNONYMS.get(name, name): label for label, name in enumerate(to.classes)}
    new_labels = [label_of.get(SYNONYMS.get(name, name), -1) for name in other.classes]
    y = torch.tensor(new_labels)[other.y]
    rows = torch.nonzero(y >= 0)[:, 0]
    if not len(rows):
        raise ValueError(f"{other.info.name} and {to.info.name} have no class in common")
    factor = to.info.scale / other.info.scale
    chunks = []
    for chunk in rows.split(CHUNK):
        chunks.append(_resized(other.x[chunk], to.info.shape[-2:], factor))
    columns = {name: values[rows.numpy()] for name, values in other.columns.items()}
    num_train = int((rows < other.num_train).sum())
    info = Info(other.info.name, to.info.shape, to.info.num_classes, "", scale=to.info.scale)
    key = ""
    if other.key and to.key:
        key = f"{other.key} as {to.key}"
    return Dataset(info, torch.cat(chunks), y[rows], num_train, columns, to.classes, key)


def _resized(x: Tensor, size: tuple[int, ...], factor: float) -> Tensor:
    """Images (n, C, H, W) of another size, bilinear with antialiasing, and their values scaled."""
    from torchvision.transforms.v2 import functional

    if x.shape[-2:] != size:
        x = functional.resize(x, list(size), antialias=True)
    if factor != 1:
        x = (x.float() * factor).round().to(x.dtype)
    return x
