"""Samples of a map-style dataset, such as torch's, with its transforms."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from partitions.datasets.readers.hub import IMAGES, LABELS
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import Rows, Samples, row_major

INPUTS = ("x", "input", "inputs", *IMAGES)


@dataclass(frozen=True)
class Items(Samples):
    """Rows of `items`, whose elements are (x, y), x alone, or a mapping of columns.

    Every access calls the dataset again, so random transforms stay random."""

    items: Sequence[Any] = field(default_factory=tuple, compare=False)
    device: str = "cpu"
    fixed: ClassVar[bool] = False  # random transforms

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        chosen = [item_of(self.items[int(row)])[0] for row in self.index[rows]]
        x, y = torch.stack(chosen).float().to(self.device), self.y[self.index[rows]]
        return row_major(x), y.to(self.device)

    def to(self, device: str | torch.device) -> "Items":
        """The samples on `device`, moved when they are accessed."""
        return replace(self, device=str(device))


def from_items(items: Any) -> Samples:
    """A map-style dataset as samples; one of tensors is read at once. Raises ValueError if it is
    empty or not such a dataset."""
    if (found := _in_tensors(items)) is not None and len(found):
        return found
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__") or not len(items):
        raise ValueError(f"{type(items).__name__} is not a dataset with items and a length above 0")
    y = torch.tensor([item_of(items[row])[1] for row in range(len(items))])
    x, _ = item_of(items[0])  # only its shape matters
    nothing = torch.zeros(1).expand(len(items), *x.shape)
    return Items(nothing, y, torch.arange(len(items)), scale=1.0, items=items)


def from_tensors(x: Tensor | np.ndarray, y: Tensor | np.ndarray | None = None) -> Samples:
    """Inputs (n, *shape) as the network takes them, and labels (n,) if there are any."""
    x = as_tensor(x)
    y = torch.full((len(x),), UNLABELED) if y is None else as_tensor(y).long()
    if len(x) != len(y) or not len(x):
        raise ValueError(f"{len(x)} inputs, but {len(y)} labels; at least one of each is needed")
    return Samples(x, y, torch.arange(len(x)), scale=1.0)


def _in_tensors(items: Any) -> Samples | None:
    """The tensors of a TensorDataset of inputs, or of inputs and labels, or of a Subset of it."""
    if type(items) is Subset:
        whole, rows = _in_tensors(items.dataset), torch.tensor(items.indices, dtype=torch.long)
        return None if whole is None else replace(whole, index=whole.index[rows])
    if type(items) is TensorDataset and [tensor.ndim for tensor in items.tensors[1:]] in ([], [1]):
        return from_tensors(*items.tensors)
    return None


def item_of(item: Any) -> tuple[Tensor, int]:
    """Input and label of a dataset's item; −1 where it has no label."""
    if isinstance(item, dict):
        columns: dict[str, Any] = item
        x, y = (
            next((columns[name] for name in names if name in columns), None)
            for names in (INPUTS, LABELS)
        )
    else:
        x, y = item if isinstance(item, tuple | list) else (item, None)
    try:
        return as_tensor(x), UNLABELED if y is None else int(y)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"an item holds {type(x).__name__} where its input should be a tensor, array, numbers "
            f"or a picture; items are (x, y), x, or mappings with one of {', '.join(INPUTS)}"
        ) from error


def as_tensor(value: Any) -> Tensor:
    """A tensor of an array, of lists, or of a picture: (channels, height, width) in [0, 1].

    Raises TypeError or ValueError for other values."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "getbands"):  # of Pillow
        from torchvision.transforms.functional import to_tensor

        picture: Tensor = to_tensor(value)
        return picture
    array = np.asarray(value)
    if not array.ndim:
        raise TypeError(f"{value!r:.80} is no array")
    return torch.from_numpy(np.ascontiguousarray(array))
