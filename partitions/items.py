"""Samples of a map-style dataset, such as torch's, with its transforms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from partitions.datasets.labels import check_below, of_node
from partitions.datasets.readers.hub import IMAGES, LABELS
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import Rows, Samples, row_major

INPUTS = ("x", "input", "inputs", *IMAGES)
FORMS = f"items are (x, y), x, or mappings with one of {', '.join(INPUTS)}"


@dataclass(frozen=True)
class Items(Samples):
    """Rows of `items`, whose elements are (x, y), x alone, or a mapping of columns.

    Every access reads the dataset again, so random transforms stay random. An item's label is read
    together with its input, never in a pass of its own. Labels must be below `num_classes`, if that
    is not 0."""

    items: Sequence[Any] = field(default_factory=tuple, compare=False)
    device: str = "cpu"
    labeled: bool = True  # as the first item
    num_classes: int = 0
    fixed: ClassVar[bool] = False  # random transforms

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        inputs = []
        labels = []
        for row in self.index[rows].tolist():
            x, label = item_of(self.items[row])
            inputs.append(x)
            labels.append(self._class_of(label, row))
        x = torch.stack(inputs).float().to(self.device)
        return row_major(x), torch.tensor(labels, dtype=torch.long).to(self.device)

    def _class_of(self, label: Any, row: int) -> int:
        """An item's label as a number; −1 where no item has one."""
        if (label is not None) != self.labeled:
            has, lacks = (0, row) if self.labeled else (row, 0)
            raise ValueError(
                f"item {has} of {type(self.items).__name__} has a label, and item {lacks} none; "
                "leave out samples without a label, or give a client without labels its inputs "
                "alone"
            )
        return UNLABELED if label is None else class_of(label, row, self.num_classes)

    @property
    def has_labels(self) -> bool:
        """Whether the samples have labels."""
        return self.labeled and len(self) > 0

    def labels(self) -> Tensor:
        """All labels (n,). This reads every item of the dataset."""
        if not self.labeled:
            return torch.full((len(self),), UNLABELED)
        return self[:][1]

    def below(self, num_classes: int) -> "Items":
        """The same samples; labels are checked when they are read."""
        return replace(self, num_classes=num_classes)

    def to(self, device: str | torch.device) -> "Items":
        """The samples on `device`, moved when they are accessed."""
        return replace(self, device=str(device))


def from_items(items: Any) -> Samples:
    """A map-style dataset as samples; one of tensors is read at once. Raises ValueError if it is
    empty or not such a dataset."""
    name = type(items).__name__
    tensors = _in_tensors(items)
    if tensors is not None:
        x, y, rows = tensors
        if len(rows):
            return _of_rows(x, y, rows, name)
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__") or not len(items):
        raise ValueError(f"{name} is not a dataset with items and a length above 0")
    try:
        first = items[0]
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{name} has no item 0: a dataset has items 0 … n - 1, each a sample; of a table "
            "or a dictionary give arrays (x, y)"
        ) from error
    x, label = item_of(first)
    if label is not None:
        class_of(label, 0)
    # Only the shape of these inputs matters: they take no memory, and are never read.
    placeholder = torch.zeros(1).expand(len(items), *x.shape)
    # Labels are read with the inputs. To read this tensor's values fails.
    labels = torch.empty(len(items), dtype=torch.long, device="meta")
    index = torch.arange(len(items))
    return Items(placeholder, labels, index, scale=1.0, items=items, labeled=label is not None)


def from_tensors(x: Tensor | np.ndarray, y: Tensor | np.ndarray | None = None) -> Samples:
    """Inputs (n, *shape) as the network takes them, and labels (n,) if there are any."""
    x = as_tensor(x)
    return _of_rows(x, y, np.arange(len(x)), "labels")


def _of_rows(x: Tensor, y: Any, rows: np.ndarray, source: str) -> Samples:
    """Rows of inputs and of labels, if there are any, whose classes are checked in these rows."""
    labels = np.full(len(x), UNLABELED)
    if y is not None:
        given = as_array(y)
        if given.ndim and len(given) != len(x):
            raise ValueError(f"{len(x)} inputs, but {len(given)} labels; each input needs one")
        labels[rows] = of_node(given[rows] if given.ndim else given, source)
    if not len(x):
        raise ValueError("there are 0 inputs; at least one is needed")
    return Samples(x, torch.from_numpy(labels), torch.from_numpy(rows), scale=1.0)


def _in_tensors(items: Any) -> tuple[Tensor, Tensor | None, np.ndarray] | None:
    """Inputs, labels if there are any, and the rows of a TensorDataset or of a Subset of it."""
    if type(items) is Subset:
        whole = _in_tensors(items.dataset)
        if whole is None:
            return None
        x, y, rows = whole
        return x, y, rows[np.asarray(items.indices, dtype=np.int64)]
    if type(items) is TensorDataset and len(items.tensors) in (1, 2):
        x, *labels = items.tensors
        return x, labels[0] if labels else None, np.arange(len(x))
    return None


def item_of(item: Any) -> tuple[Tensor, Any]:
    """Input and label of a dataset's item; None where it has no label. Raises ValueError for a
    mapping in which it is not clear what is which."""
    if isinstance(item, Mapping):
        x, y = _of_mapping(item)
    elif isinstance(item, tuple | list):
        if not 1 <= len(item) <= 2:
            raise ValueError(f"an item has {len(item)} parts; {FORMS}")
        x, y = item[0], item[1] if len(item) == 2 else None
    else:
        x, y = item, None
    try:
        return as_tensor(x), y
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"an item holds {type(x).__name__} where its input should be a tensor, array, numbers "
            f"or a picture; {FORMS}"
        ) from error


def _of_mapping(columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """Input and label of a mapping, by the usual names."""
    inputs = [name for name in INPUTS if name in columns]
    labels = [name for name in LABELS if name in columns]
    for names, what in ((inputs, "input"), (labels, "label")):
        if len(names) > 1:
            raise ValueError(
                f"an item has {' and '.join(names)}, and each may be its {what}; leave one of them "
                "out"
            )
    if not inputs:
        return None, None
    others = [name for name in columns if name not in inputs]
    if not labels and others:
        raise ValueError(
            f"an item has {inputs[0]} and {', '.join(map(str, others))}, and none of the names of "
            f"labels ({', '.join(LABELS)}); rename the label, or give a client without labels its "
            "inputs alone"
        )
    return columns[inputs[0]], columns[labels[0]] if labels else None


def class_of(label: Any, row: int, num_classes: int = 0) -> int:
    """The label of an item as a number from 0. Raises ValueError for all else, and for a label that
    is not below `num_classes` > 0."""
    if type(label) is int and label >= 0 and (label < num_classes or not num_classes):
        return label
    try:
        y = of_node(as_array(label)[None], f"item {row}")
        if num_classes:
            check_below(y, num_classes, f"item {row}")
    except ValueError as error:
        text = str(error).replace(": row 0 has", " has")  # the item is its own row 0
        raise ValueError(text) from error
    return int(y[0])


def as_array(value: Any) -> np.ndarray:
    """An array of a tensor, an array, a list or a number."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


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
