"""Samples of a map-style dataset, such as torch's, with its transforms and its collate function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fedapps.common.tasks import BINARY, LABELS, VALUES
from partitions.arrays import as_array, as_tensor
from partitions.datasets.labels import check_below, of_node
from partitions.datasets.readers.raw import UNLABELED
from partitions.parts import Part, have_equal_shapes, packed, packed_shape
from partitions.pictures import LOOKED_AT, check_pixels, pictures_in
from partitions.reading import (
    Form,
    Read,
    check_classes,
    check_fits,
    check_whole,
    label_name,
    labels_of_node,
    read,
    say_gaps,
)
from partitions.shares import Rows, Samples, row_major

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Items(Samples):
    """Rows of `items`, whose elements are (x, y), x alone, or a mapping of columns.

    Every access reads the dataset again, so random transforms stay random. An item's label is read
    together with its input, never in a pass of its own. With `collate` it makes each mini-batch of
    the items, as a DataLoader's does, so the shape of inputs may differ by mini-batch. Labels must
    be below `num_classes`, if that is not 0; several labels or values must be so many."""

    items: Sequence[Any] = field(default_factory=tuple, compare=False)
    device: str = "cpu"
    labeled: bool = True  # as the first item
    num_classes: int = 0
    form: Form = field(default_factory=Form, compare=False)
    collate: Collate | None = field(default=None, compare=False)
    parts: tuple[Part, ...] = ()  # the input tensors that an item's packed inputs consist of
    fixed: ClassVar[bool] = False  # random transforms

    def __getitem__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        chosen = self.index[rows].tolist()
        if self.collate is not None and chosen:
            return self._collated(self.collate, chosen)
        inputs = []
        labels = []
        for row in chosen:
            sample = read(self.items[row], self.form)
            inputs.append(self._inputs_of(sample, batched=False))
            labels.append(self._label_of(sample.label, row))
        x = _stacked(inputs, chosen).float().to(self.device)
        return row_major(x), as_labels(labels).to(self.device)

    def _inputs_of(self, sample: Read, batched: bool) -> Tensor:
        stacked = not self.parts or have_equal_shapes(self.parts)
        return sample.inputs(batched, stacked)

    def _label_of(self, label: Any, row: int) -> int | list[float]:
        """An item's class, or its several labels or values; −1 where no item has one."""
        self._check_labeled(label is not None, row)
        if label is None:
            return UNLABELED
        if self.form.task in (LABELS, VALUES):
            return numbers_of(label, row, self.form.task, self.num_classes)
        return class_of(label, row, self.num_classes)

    def _check_labeled(self, labeled: bool, row: int) -> None:
        if labeled != self.labeled:
            has, lacks = (0, row) if self.labeled else (row, 0)
            raise ValueError(
                f"item {has} of {type(self.items).__name__} has a label, and item {lacks} none; "
                "leave out samples without a label, or give a client without labels its inputs "
                "alone"
            )

    def _collated(self, collate: Collate, rows: list[int]) -> tuple[Tensor, Tensor]:
        """The mini-batch that the collate function makes of these items."""
        batch = read(collate([self.items[row] for row in rows]), self.form, batched=True)
        x = self._inputs_of(batch, batched=True)
        self._check_labeled(batch.label is not None, rows[0])
        y = np.full(len(rows), UNLABELED)
        if batch.label is not None:
            y = labels_of_node(as_array(batch.label), "a mini-batch", self.form.task)
            check_fits(y, self.num_classes, "a mini-batch")
        check_batch(collate, len(rows), len(x), len(y))
        return row_major(x.float().to(self.device)), torch.from_numpy(y).to(self.device)

    @property
    def has_labels(self) -> bool:
        """Whether the samples have labels."""
        return self.labeled and len(self) > 0

    def labels(self) -> Tensor:
        """All labels (n,) or (n, k). This reads every item of the dataset."""
        if not self.labeled:
            return torch.full((len(self),), UNLABELED)
        return self[:][1]

    def below(self, num_classes: int) -> "Items":
        """The same samples; labels are checked when they are read."""
        return replace(self, num_classes=num_classes)

    def to(self, device: str | torch.device) -> "Items":
        """The samples on `device`, moved when they are accessed."""
        return replace(self, device=str(device))


@dataclass(frozen=True)
class PackedSamples(Samples):
    """Samples whose inputs are packed of several tensors."""

    parts: tuple[Part, ...] = ()


def parts_of(samples: Samples) -> tuple[Part, ...]:
    """The parts that the samples' packed inputs consist of; () for a single tensor."""
    return samples.parts if isinstance(samples, Items | PackedSamples) else ()


def from_items(items: Any, form: Form | None = None, collate: Collate | None = None) -> Samples:
    """A map-style dataset as samples; one of tensors is read at once, unless a collate function
    makes its mini-batches. Raises ValueError if it is empty or not such a dataset."""
    form = form or Form()
    name = type(items).__name__
    batched = collate is not None
    if collate is None:
        items = _with_pictures(items)
        tensors = _in_tensors(items)
        if tensors is not None and len(tensors[2]):
            x, y, rows = tensors
            say_gaps(x)
            return _of_rows(x, y, rows, name, form)
    first = _first(items, name)
    if collate is None:
        _check_pictures(items, first)
        sample = read(first, form, batched)
    else:
        sample = read(collate([first]), form, batched)
        labels_in_batch = 1 if sample.label is None else len(as_array(sample.label))
        check_batch(collate, 1, len(sample.tensors[0]), labels_in_batch)
    _check_label(sample.label, form.task, batched)
    if sample.label is not None and not batched:  # a collate function may number them anew
        check_classes(_class_names(items, form), form)
    parts = sample.parts(batched)
    shape = packed_shape(parts) if parts else sample.tensors[0].shape[int(batched) :]
    # Only the shape of these inputs matters: they take no memory, and are never read.
    placeholder = torch.zeros(1).expand(len(items), *shape)
    # Labels are read with the inputs. To read this tensor's values fails.
    labels = torch.empty(len(items), dtype=torch.long, device="meta")
    return Items(
        placeholder,
        labels,
        torch.arange(len(items)),
        scale=1.0,
        items=items,
        labeled=sample.label is not None,
        form=form,
        collate=collate,
        parts=parts,
    )


def _first(items: Any, name: str) -> Any:
    """The first item of a map-style dataset. Raises ValueError if `items` is none, or is empty."""
    if hasattr(items, "toarray"):  # of scipy
        raise ValueError(f"inputs are {name}; give a dense array: x.toarray()")
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__") or not len(items):
        raise ValueError(
            f"{name} is not a dataset with items and a length above 0; of a stream of samples give "
            "a list of them"
        )
    try:
        return items[0]
    except (LookupError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{name} has no item 0: a dataset has items 0 … n - 1, each a sample; of a table "
            "or a dictionary give arrays (x, y)"
        ) from error


def _check_pictures(items: Any, first: Any) -> None:
    """`check_pixels` of the pictures in the first items."""
    if pictures_in(first):
        count = min(len(items), LOOKED_AT)
        others = (pictures_in(items[row]) for row in range(1, count))
        check_pixels(chain([pictures_in(first)], others))


def _class_names(items: Any, form: Form) -> list[str]:
    """The names of a dataset's classes by their numbers: of torchvision's folders, or of a
    `datasets.Dataset` whose labels have them. [] for others, and where a transform of the user's
    may number the classes anew."""
    while type(items) is Subset:
        items = items.dataset
    if type(items).__module__ == "torchvision.datasets.folder":
        return [] if items.target_transform is not None else list(items.classes)
    features = getattr(items, "features", None)
    given = getattr(items, "format", None)
    if not isinstance(features, Mapping) or not isinstance(given, Mapping):
        return []
    if given["type"] == "custom":
        return []
    shown = {name: features[name] for name in given["columns"]}
    return list(getattr(shown[label_name(shown, form)], "names", None) or [])


def _with_pictures(items: Any) -> Any:
    """A `datasets.Dataset` that gives its pictures as such. Its formats give bytes, and some put
    the channels last. A transform of the user's stays."""
    features = getattr(items, "features", None)
    given = getattr(items, "format", None)
    if not isinstance(features, Mapping) or not isinstance(given, Mapping):
        return items
    has_pictures = any(type(feature).__name__ == "Image" for feature in features.values())
    if not has_pictures or given["type"] in (None, "custom"):
        return items
    return items.with_format(None, columns=given["columns"])


def _check_label(label: Any, task: str, batched: bool) -> None:
    """Raise ValueError for a first label that is none of the task."""
    if label is None:
        return
    if batched:
        labels_of_node(as_array(label), "a mini-batch", task)
    elif task in (LABELS, VALUES):
        numbers_of(label, 0, task)
    else:
        class_of(label, 0, 2 if task == BINARY else 0)


def check_batch(collate: Collate, count: int, inputs: int, labels: int) -> None:
    """Raise ValueError unless a mini-batch has an input and a label for each of `count` items."""
    if inputs == labels == count:
        return
    name = getattr(collate, "__name__", type(collate).__name__)
    raise ValueError(
        f"the collate function {name} made {inputs} inputs and {labels} labels of {count} items; "
        "it must make one of each item, along the first axis"
    )


def _stacked(inputs: list[Tensor], rows: list[int]) -> Tensor:
    """The inputs of a mini-batch as one tensor. Raises ValueError if their shapes differ."""
    for row, x in zip(rows, inputs, strict=True):
        if x.shape != inputs[0].shape:
            raise ValueError(
                f"item {rows[0]} has inputs of shape {tuple(inputs[0].shape)}, item {row} of "
                f"{tuple(x.shape)}; give a DataLoader whose collate_fn pads them, or items of one "
                "shape"
            )
    return torch.stack(inputs)


def from_tensors(x: Any, y: Any = None, form: Form | None = None) -> Samples:
    """Inputs (n, *shape) as the network takes them, and labels (n,) or (n, k) if there are any."""
    x = as_tensor(x)
    check_whole(x)
    say_gaps(x)
    return _of_rows(x, y, np.arange(len(x)), "labels", form)


def from_batch(batch: Any, form: Form) -> Samples:
    """All samples at once: a mapping of columns, or (x, y) with several tensors x, each (n, …)."""
    whole = read(batch, form, batched=True)
    counts = {len(tensor) for tensor in whole.tensors}
    if len(counts) > 1:
        raise ValueError(f"the inputs have {sorted(counts)} samples; each needs a row for each")
    parts = whole.parts(batched=True)
    if not parts:
        return from_tensors(whole.tensors[0], whole.label, form)
    x = packed(whole.tensors, have_equal_shapes(parts))
    samples = _of_rows(x, whole.label, np.arange(len(x)), "labels", form)
    return PackedSamples(samples.x, samples.y, samples.index, scale=1.0, parts=parts)


def _of_rows(x: Tensor, y: Any, rows: np.ndarray, source: str, form: Form | None = None) -> Samples:
    """Rows of inputs and of labels, if there are any, which are checked in these rows."""
    form = form or Form()
    # Values that are to be scaled keep their digits until then.
    dtype = np.float64 if form.task == VALUES and form.table is not None else np.float32
    labels = np.full(len(x), UNLABELED)
    if y is not None:
        given = as_array(y)
        if given.ndim and len(given) != len(x):
            raise ValueError(f"{len(x)} inputs, but {len(given)} labels; each input needs one")
        chosen = given[rows] if given.ndim else given
        of_rows = labels_of_node(chosen, source, form.task, dtype)
        if of_rows.ndim > 1:
            labels = np.full((len(x), of_rows.shape[1]), np.nan, dtype)
        labels[rows] = of_rows
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
        check_whole(x)
        return x, labels[0] if labels else None, np.arange(len(x))
    return None


def numbers_of(label: Any, row: int, task: str, count: int = 0) -> list[float]:
    """The several labels or values of an item. Raises ValueError for others, and unless there are
    `count` > 0."""
    numbers = labels_of_node(as_array(label)[None], f"item {row}", task)
    check_fits(numbers, count, f"item {row}")
    values: list[float] = numbers[0].tolist()
    return values


def as_labels(labels: Sequence[Any]) -> Tensor:
    """Labels of items as a tensor: (n,) classes, or (n, k) where the task has several."""
    if labels and isinstance(labels[0], list):
        return torch.tensor(labels, dtype=torch.float32)
    return torch.tensor(labels, dtype=torch.long)


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
