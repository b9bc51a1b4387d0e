"""What is the input and what is the label in a sample, a mini-batch or a table of a user.

These are a tensor x, a pair (x, y), or a mapping of columns; x may be several tensors."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedapps.common.once import say_once
from fedapps.common.tasks import BINARY, CLASSES, LABELS, VALUES
from partitions.arrays import as_array, as_tensor
from partitions.datasets.labels import SIGNS, check_below, of_node, of_task
from partitions.datasets.readers.hub import IMAGES
from partitions.datasets.readers.hub import LABELS as LABEL_NAMES
from partitions.parts import LARGEST_WHOLE, Part, packed
from partitions.pictures import are_pictures, of_pictures
from partitions.shares import check_columns

INPUTS = ("x", "input", "inputs", *IMAGES)
FORMS = f"items are (x, y), x, or mappings with one of {', '.join(INPUTS)}"


def _no_names() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Form:
    """How a user's samples are read: the `task` of their labels, the name of the `label` column
    ("": the usual ones), and the parameters of the network's forward pass, which `takes` gives.

    Samples `may_lack_label` if their client is novel. `table` reads columns by name, without the
    label, as inputs (n, d), where all nodes share an encoding. `order` holds the columns of a table
    in the order of the samples that are read first, in which those of all others are put, and
    `classes` the names of these samples' classes by their numbers, where a dataset has them."""

    task: str = CLASSES
    label: str = ""
    takes: Callable[[], Sequence[str]] = _no_names
    may_lack_label: bool = False
    table: Callable[[Mapping[str, Any]], np.ndarray] | None = None
    order: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> str:
        """A digest of `order`; "" before a table was read."""
        return _digest(self.order)

    @property
    def class_names(self) -> str:
        """A digest of `classes`; "" without any."""
        return _digest(self.classes)


def _digest(names: Sequence[str]) -> str:
    if not names:
        return ""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Read:
    """Input tensors and the label as it is given, None without one. A single input has no
    `names`; of several, each has its keyword, or "" by position."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    label: Any

    def parts(self, batched: bool) -> tuple[Part, ...]:
        """The parts that one sample's packed inputs consist of; () for a single input."""
        if not self.names:
            return ()
        parts: list[Part] = []
        for name, tensor in zip(self.names, self.tensors, strict=True):
            shape = tuple(tensor.shape[1:] if batched else tensor.shape)
            parts.append(Part(name, shape, not tensor.is_floating_point()))
        return tuple(parts)

    def inputs(self, batched: bool, stacked: bool) -> Tensor:
        """One tensor of inputs: (n, *shape) of a batch, (*shape) of one sample."""
        if not self.names:
            return self.tensors[0]
        if batched:
            return packed(self.tensors, stacked)
        return packed([tensor[None] for tensor in self.tensors], stacked)[0]


def read(given: Any, form: Form, batched: bool = False) -> Read:
    """The inputs and the label of one sample, or of a batch whose first axis are samples. Raises
    ValueError where it is not clear what is which."""
    if isinstance(given, Mapping):
        return _of_columns(given, form, batched)
    label = None
    x = given
    if isinstance(given, tuple | list) and not (batched and is_list_of_numbers(given)):
        if not 1 <= len(given) <= 2:
            raise ValueError(
                f"an item has {len(given)} parts; {FORMS}; several inputs of a sample stand "
                "together, as ((a, b), y)"
            )
        x = given[0]
        label = given[1] if len(given) == 2 else None
    if isinstance(x, Mapping):
        names = tuple(map(str, x))
        return Read(tuple(map(_input, x.values())), names, label)
    if isinstance(x, tuple) or (isinstance(x, list) and any(isinstance(a, Tensor) for a in x)):
        return Read(tuple(map(_input, x)), ("",) * len(x), label)
    return Read((_input(x),), (), label)


def is_list_of_numbers(given: Any) -> bool:
    """Whether it is a list of numbers, or of such lists."""
    if not isinstance(given, list) or not given:
        return False
    first = given[0]
    return isinstance(first, bool | int | float | np.number) or is_list_of_numbers(first)


def _input(value: Any) -> Tensor:
    if are_pictures(value):
        return of_pictures(value)
    try:
        return as_tensor(value)
    except TypeError as error:
        raise ValueError(
            f"an item holds {type(value).__name__} where its input should be a tensor, array, "
            f"numbers or a picture; {FORMS}"
        ) from error


def label_name(columns: Mapping[str, Any], form: Form) -> str:
    """The name of the column of labels; "" if there is none. Raises ValueError if several may be
    it, and for a declared one that is missing."""
    if form.label in columns:
        return form.label
    if form.label and not form.may_lack_label:
        raise ValueError(
            f"label is {form.label!r}, but the columns are {', '.join(map(str, columns)):.300}; "
            "name one of them; a client without labels has novel=true in its node "
            "configuration, or returns an array of its inputs"
        )
    if form.label:
        return ""
    labels = [name for name in LABEL_NAMES if name in columns]
    if len(labels) > 1:
        raise ValueError(
            f"an item has {' and '.join(labels)}, and each may be its label; leave one of them "
            "out, or name it, as label=NAME"
        )
    return labels[0] if labels else ""


def _by_text(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The columns by their names as text. Raises ValueError if two have the same text."""
    columns: dict[str, Any] = {}
    for name, values in given.items():
        if str(name) in columns:
            raise ValueError(f"an item has two columns called {name}; rename one of them")
        columns[str(name)] = values
    return columns


def _of_columns(given: Mapping[Any, Any], form: Form, batched: bool) -> Read:
    """Of a mapping, in this order: the input under its usual name; several inputs, which the
    network's forward pass takes by name; the columns of a table that all nodes encode alike; or a
    vector of all columns, if each is one number for each sample."""
    columns = _by_text(given)
    target = label_name(columns, form)
    label = columns[target] if target else None
    others = {name: values for name, values in columns.items() if name != target}

    usual = [name for name in INPUTS if name in others]
    if len(usual) > 1:
        raise ValueError(
            f"an item has {' and '.join(usual)}, and each may be its input; leave one of them out"
        )
    if usual:
        (name,) = usual
        rest = [other for other in others if other != name]
        if not target and rest:
            raise ValueError(
                f"an item has {name} and {', '.join(rest)}, and none of the names of labels "
                f"({', '.join(LABEL_NAMES)}); rename the label, name it, as label=NAME, or give a "
                "client without labels its inputs alone"
            )
        return Read((_input(others[name]),), (), label)

    taken = {name: _input(values) for name, values in others.items() if name in form.takes()}
    if taken:
        _say_inputs(list(taken), [name for name in others if name not in taken], target)
        return Read(tuple(taken.values()), tuple(taken), label)

    if batched and form.table is not None and _are_columns(list(others.values())):
        return Read((torch.from_numpy(form.table(others)),), (), label)

    numbers = _as_vector(others, form, batched)
    if numbers is not None:
        say_once(f"the columns {', '.join(others):.300} are one vector of inputs")
        return Read((numbers,), (), label)
    raise ValueError(
        f"an item has the columns {', '.join(columns):.300}, and it is not clear which are its "
        "inputs; call a single one x, let the network's forward pass take several by these names, "
        "or give pairs (x, y)"
    )


def _say_inputs(named: list[str], left: list[str], target: str) -> None:
    text = f"inputs are {', '.join(named)}, which the network's forward pass takes by name"
    if target:
        text += f"; the label is {target}"
    if left:
        text += f"; not used: {', '.join(left):.300}"
    say_once(text)


def _are_columns(given: Sequence[Any]) -> bool:
    """Whether each has one cell for each sample."""
    return bool(given) and all(np.ndim(as_array(column)) == 1 for column in given)


def _as_vector(columns: Mapping[str, Any], form: Form, batched: bool) -> Tensor | None:
    """The columns as one tensor (d,), of a batch (n, d), if each is one number for each sample."""
    arrays = {name: as_array(column) for name, column in columns.items()}
    for array in arrays.values():
        if array.ndim != int(batched) or array.dtype.kind not in "biuf":
            return None
    if not arrays:
        return None
    values: list[Tensor] = []
    for name in ordered(list(arrays), form):
        values.append(torch.from_numpy(arrays[name].astype(np.float32)))
    return torch.stack(values, -1)


def ordered(names: list[str], form: Form) -> list[str]:
    """The columns in the order of the samples that were read first. Raises ValueError for other
    columns than theirs."""
    if not form.order:
        form.order.extend(names)
    lacking = [name for name in form.order if name not in names]
    new = [name for name in names if name not in form.order]
    if lacking or new:
        found = f"it has {', '.join(new):.200} in addition" if new else "it has no others"
        missing = ", ".join(lacking) or "no column"
        raise ValueError(
            f"a table lacks {missing:.200} of the training samples' columns, and {found}; give all "
            "samples the same columns"
        )
    return list(form.order)


def check_classes(names: Sequence[str], form: Form) -> None:
    """Raise ValueError if the `names` of classes contradict those of the samples that were read
    first: then a label means another class."""
    if not form.classes:
        form.classes.extend(names)
    for number, (name, first) in enumerate(zip(names, form.classes, strict=False)):
        if name != first:
            raise ValueError(
                f"class {number} is {name!r:.80}, and in the training samples {first!r:.80}; "
                "number the classes of all samples by one list"
            )


def is_table(given: Any) -> bool:
    """Whether it is a pandas DataFrame; pandas is not imported for it."""
    return type(given).__module__.partition(".")[0] == "pandas" and hasattr(given, "columns")


def of_table(table: Any, form: Form, labels: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
    """Inputs (n, d) and labels of a DataFrame, one row for each sample; None without a
    label column, and where the table has inputs alone.

    Raises ValueError for columns that are no numbers and for gaps, by name."""
    names = [str(name) for name in table.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"a table has several columns called {', '.join(twice):.200}; rename them")
    columns = {str(name): table[name] for name in table.columns}
    target = label_name(columns, form) if labels else ""
    if labels and not target:
        text = (
            f"a table has no label column ({', '.join(LABEL_NAMES)}): its client is one without "
            "labels; name the column by label=NAME"
        )
        say_once(text, WARNING)
    if form.table is not None:
        x = form.table({name: column for name, column in columns.items() if name != target})
        return x, columns[target].to_numpy() if target else None
    inputs: list[np.ndarray] = []
    for name in ordered([name for name in columns if name != target], form):
        array = columns[name].to_numpy()
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"column {name!r} of a table is {array.dtype}, such as {array[0]!r:.80}; make "
                "numbers of it, alike on all nodes (pandas.get_dummies), or leave it out"
            )
        numbers = array.astype(np.float32)
        gaps = np.flatnonzero(~np.isfinite(numbers))
        if len(gaps):
            raise ValueError(
                f"column {name!r} of a table has no number in row {gaps[0]}, one of {len(gaps)}; "
                "fill them in, or leave these rows out"
            )
        inputs.append(numbers)
    if not inputs:
        raise ValueError("a table has no column of inputs")
    return np.stack(inputs, 1), columns[target].to_numpy() if target else None


def labels_of_node(
    given: np.ndarray, source: str, task: str, dtype: type = np.float32
) -> np.ndarray:
    """One node's labels as the task has them: (n,) int64, or (n, k) of `dtype` for several labels
    and for values. Raises ValueError for labels with another reading."""
    if task in (LABELS, VALUES):
        return of_task(given, source, task).astype(dtype)
    if task == CLASSES:
        return of_node(given, source)
    labels = given
    if given.ndim == 1 or given.shape[1:] == (1,):
        values = set(np.unique(given).tolist()) if given.dtype.kind in "if" else set()
        if -1 in values and values <= set(SIGNS):
            say_once(f"{source}: labels are -1 and 1: -1 is the first class, 1 the second")
            labels = given > 0
    y = of_node(labels, source)
    check_below(y, 2, source, BINARY)
    return y


def check_fits(y: np.ndarray, num_outputs: int, source: str) -> None:
    """Raise ValueError for classes (n,) that are not below `num_outputs` > 0, and for several
    labels or values (n, k) of another number."""
    if num_outputs and y.ndim == 1:
        check_below(y, num_outputs, source)
    elif num_outputs:
        check_columns(y.shape[1], num_outputs)


def check_whole(x: Tensor) -> None:
    """Raise ValueError for whole numbers that float32, in which samples are read, does not have."""
    if not x.is_floating_point() and x.numel() and int(x.max()) > LARGEST_WHOLE:
        raise ValueError(
            f"inputs go up to {int(x.max())}; samples are read as float32, which has whole numbers "
            f"up to {LARGEST_WHOLE}; give these inputs as decimals, or number the tokens from 0"
        )


def say_gaps(x: Tensor) -> None:
    """Warn of NaN and infinity in inputs: most networks give NaN for them."""
    if not x.is_floating_point() or torch.isfinite(x.sum()):  # a sum is faster than a test of each
        return
    rows = (~torch.isfinite(x.flatten(1))).any(1).nonzero().flatten().tolist()
    if rows:
        text = (
            f"row {rows[0]} of the inputs holds NaN or infinity, one of {len(rows)}; unless the "
            "network replaces them it gives no numbers: fill them in, or leave these rows out"
        )
        say_once(text, WARNING)
