"""What the `data` function of an app returns, as a client's share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from operator import is_
from typing import Any

import numpy as np
from flwr.app import Context
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from clients.core.draws import Draws
from fedapps.common.once import say_once
from fedapps.common.tasks import Targets
from partitions.arrays import as_array, as_tensor
from partitions.items import from_batch, from_items, from_tensors, parts_of
from partitions.pictures import are_pictures
from partitions.reading import Form, is_list_of_numbers, is_table, of_table
from partitions.shares import Samples, Share

FORMS = (
    "return training samples, (training, validation), (training, validation, test), or a dict with "
    "these keys; samples are a DataLoader, a dataset, a DataFrame, a dict of columns, a tensor, "
    "array or list of inputs, or a pair of inputs and labels (x, y)"
)
NO_LABELS = (
    "the training samples have no labels, so the node is a novel client: it gets a model, and is "
    "not trained on; of a dataset's items the first one decides"
)
ARRAYS = Tensor | np.ndarray
FIRST = 10**6  # values, about, whose magnitude is told
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


@dataclass(frozen=True)
class Given:
    """What `data` returned, by its use; None where there is nothing."""

    train: Any
    validation: Any = None
    test: Any = None


def share_of(
    given: Any,
    context: Context,
    public: Callable[[], Tensor] | None = None,
    form: Form | None = None,
) -> Share:
    """A client's share of what its node's `data` function returned, read as `form` says.

    It is novel if its training samples have no labels, or by its node configuration. Raises
    ValueError for data with another reading, or with a part that would not be used."""
    novel = bool(context.node_config.get("novel", False))
    form = replace(form or Form(), may_lack_label=novel)
    parts = given_parts(given)
    train = _samples(parts.train, form, draws=True)
    empty = replace(train, index=train.index[:0])
    held_out = _held_out(parts.validation, form, "validation")
    if held_out is None:
        held_out = empty
    test = _held_out(parts.test, form, "test")
    for samples, name in ((held_out, "validation"), (test, "test")):
        if samples is not None and len(samples):
            _check_axes(train, samples, name)
    if not novel:
        for samples, name in ((held_out, "validation"), (test, "test")):
            if samples is not None and len(samples):
                _check_labels(train, samples, name)
    if novel and parts.validation is not None:
        _say(
            "a novel client (novel=true) is scored on its training samples; its validation samples "
            "are not used"
        )
    if not novel and not train.has_labels:
        say_once(NO_LABELS)
        novel = True
    if not novel and _are_same(parts.train, parts.validation):
        _say(
            "the validation samples are the training samples, so scores are none of other samples; "
            "return others in a pair (training, validation)"
        )
    if not novel and parts.validation is None:
        _say(
            "data returned training samples alone, so the node's model is not evaluated; return "
            "(training, validation)"
        )
    public_samples = None if public is None else from_tensors(public())
    return Share(
        train=empty if novel else train,
        validation=held_out,
        test=test,
        everything=train,
        novel=novel,
        public=public_samples,
        targets=Targets(form.task),
    )


def axes_of(samples: Samples) -> str:
    """The lengths of two or three axes of inputs, as words; "" for other inputs, and where an axis
    has the length 1, whose place does not matter."""
    shape = tuple(samples.x.shape[1:])
    if parts_of(samples) or len(shape) not in (2, 3) or min(shape) < 2:
        return ""
    return " ".join(map(str, shape))


def magnitude_of(samples: Samples, of_labels: bool = False) -> int | None:
    """The exponent of the power of two above the mean absolute value of the first inputs, or of
    their labels. None for items, which are read when they are needed, for several input tensors,
    if all are 0, and without labels."""
    if not samples.fixed or parts_of(samples):
        return None
    values = samples.y if of_labels else samples.x
    rows = samples.index[: FIRST // math.prod(values.shape[1:]) + 1]
    mean = float(values[rows].double().abs().mean())
    return math.frexp(mean)[1] if 0 < mean < math.inf else None


def batches_of(given: Any) -> Callable[[list[int]], Any] | None:
    """Batches of rows of the training samples that `data` returned, as a DataLoader makes them;
    None for tables and columns, which have no batches of their own."""
    part = given_parts(given).train
    collate = default_collate
    if isinstance(part, DataLoader):
        collate = part.collate_fn
        part = part.dataset
    elif is_table(part) or isinstance(part, Mapping) or is_list_of_numbers(part):
        return None
    elif _are_inputs_and_labels(part):
        if not all(isinstance(item, ARRAYS) for item in part):
            return None
        part = TensorDataset(*map(as_tensor, part))
    elif isinstance(part, ARRAYS):
        part = TensorDataset(as_tensor(part))
    items = part
    return lambda rows: collate([items[row] for row in rows])


def say_what_is_unused(given: Any, batch_size: int) -> None:
    """Say once which options of the training samples' DataLoader are not used; `batch_size` is the
    client's setting."""
    loader = given_parts(given).train
    if not isinstance(loader, DataLoader):
        return
    sampler = _own_sampler(loader)
    if sampler is not None and sampler is loader.batch_sampler:
        _say(f"mini-batches are those of {type(sampler).__name__}; batch-size is not used")
    elif batch_size != loader.batch_size:
        _say(
            f"mini-batches have {batch_size} samples (setting batch-size), not the DataLoader's "
            f"{loader.batch_size}; pass batch_size={loader.batch_size} to client_app for the same"
        )
    unused = []
    if sampler is None and isinstance(loader.sampler, SequentialSampler):
        unused.append("shuffle=False (training shuffles)")
    if loader.drop_last:
        unused.append("drop_last=True (a pass ends as short-batches and local-epochs say)")
    for name in ("num_workers", "generator", "worker_init_fn"):
        if getattr(loader, name):
            unused.append(name)
    if unused:
        _say(f"of the DataLoader the dataset is used, not {', '.join(unused)}")


def _are_same(training: Any, validation: Any) -> bool:
    """Whether both are one object, or of tuples and loaders the same parts."""
    if training is validation:
        return True
    if isinstance(training, DataLoader) and isinstance(validation, DataLoader):
        return training.dataset is validation.dataset
    if isinstance(training, tuple) and isinstance(validation, tuple):
        return len(training) == len(validation) and all(map(is_, training, validation))
    return False


def _say(text: str) -> None:
    """Warn once in a process."""
    say_once(text, WARNING)


def given_parts(given: Any) -> Given:
    """Training, validation and test samples as they are given. Raises ValueError for another number
    of parts."""
    if isinstance(given, Mapping) and not is_table(given):
        splits = _of_splits(given)
        if splits is not None:
            return splits
    if not isinstance(given, tuple | list):
        return Given(given)
    # A pair of tensors is inputs and labels, not training and validation inputs.
    if _are_inputs_and_labels(given):
        if len(given) == 2:
            say_once("data returned (x, y): the inputs of training samples and their labels")
        return Given(given)
    if len(given) == 2 and not is_list_of_numbers(given):
        say_once("data returned a pair: training samples and validation samples")
        return Given(*given)
    if len(given) == 3 and all(map(_is_dataset, given)):
        say_once("data returned training, validation and test samples")
        return Given(*given)
    if isinstance(given, tuple):
        raise ValueError(f"data returned a tuple of {len(given)} parts; {FORMS}")
    return Given(given)


def _of_splits(given: Mapping[str, Any]) -> Given | None:
    """The parts of a dict whose keys name them; None if its keys are those of columns."""
    uses: dict[str, str] = {}
    for use, names in SPLITS.items():
        uses |= dict.fromkeys(names, use)
    if not given or not set(given) & set(uses):
        return None
    unknown = [str(name) for name in given if name not in uses]
    if unknown and all(isinstance(given[name], ARRAYS | list) for name in set(given) & set(uses)):
        return None  # columns of a table; one has the name of a split
    if unknown:
        raise ValueError(
            f"data returned a dict with the keys {', '.join(map(str, given)):.200}; the keys of "
            f"samples are train, validation and test, not {', '.join(unknown):.200}"
        )
    parts: dict[str, Any] = {}
    for name, samples in given.items():
        if uses[name] in parts:
            raise ValueError(f"data returned {', '.join(given)}; two of them are {uses[name]} data")
        parts[uses[name]] = samples
    if "train" not in parts:
        raise ValueError(f"data returned {', '.join(given)} without training samples; {FORMS}")
    if set(parts) == {"train", "test"}:
        _say("of train and test samples the test samples are the validation samples")
        parts["validation"] = parts.pop("test")
    return Given(**parts)


def _is_dataset(part: Any) -> bool:
    """Whether it is a set of samples, and neither an array nor a sample."""
    if isinstance(part, ARRAYS | str | int | float):
        return False
    if isinstance(part, tuple):
        return _are_inputs_and_labels(part)
    return isinstance(part, DataLoader) or is_table(part) or hasattr(part, "__getitem__")


def _are_inputs_and_labels(given: Any) -> bool:
    """Whether it is (x,) or (x, y): inputs, and a label for each."""
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= 2:
        return False
    if all(isinstance(part, ARRAYS) for part in given):
        return True
    if len(given) == 1 or not isinstance(given, tuple):
        return False
    x, y = given
    if isinstance(x, ARRAYS) or is_table(x) or is_list_of_numbers(x):
        return isinstance(y, ARRAYS) or _is_column(y)
    if are_pictures(x):
        return isinstance(y, ARRAYS) or _is_column(y)
    if _is_list_of_arrays(x):
        return _is_column(y)
    several = isinstance(x, Mapping) or (isinstance(x, tuple) and _is_tensors(x))
    return several and _is_column(y)


def _is_tensors(given: tuple[Any, ...]) -> bool:
    return bool(given) and all(isinstance(part, ARRAYS) for part in given)


def _is_list_of_arrays(x: Any) -> bool:
    """Whether it is a list of arrays, one for each sample."""
    return isinstance(x, list) and bool(x) and all(isinstance(row, ARRAYS) for row in x)


def _is_column(y: Any) -> bool:
    """Whether it is one label for each sample: an array (n,) or (n, 1), a list of such, or a column
    of a table."""
    if _is_list_of_arrays(y):
        return not y[0].ndim
    if isinstance(y, list):
        return is_list_of_numbers(y) or (bool(y) and isinstance(y[0], str))
    shape = tuple(getattr(y, "shape", ()))
    return shape[1:] in ((), (1,)) and len(shape) > 0 and not is_table(y)


def _samples(part: Any, form: Form, draws: bool = False) -> Samples:
    """Samples in one of the `FORMS`; with `draws` a loader may have any sampler."""
    if isinstance(part, DataLoader):
        dataset = _dataset(part, draws)
        collate = None if part.collate_fn is default_collate else part.collate_fn
        return from_items(dataset, form, collate)
    if is_table(part):
        x, y = of_table(part, form)
        return from_tensors(x, y, form)
    if isinstance(part, ARRAYS) or is_list_of_numbers(part):
        return from_tensors(_as_inputs(part), form=form)
    if isinstance(part, Mapping):
        return from_batch(part, form)
    if _are_inputs_and_labels(part):
        x, *labels = part
        y = labels[0] if labels else None
        _check_same_rows(x, y)
        if is_table(x):
            return from_tensors(of_table(x, form, labels=False)[0], y, form)
        if isinstance(x, ARRAYS | list) and not are_pictures(x):
            return from_tensors(_as_inputs(x), y, form)
        return from_batch((x, y), form)
    if isinstance(part, str):
        raise ValueError(f"data returned the text {part!r:.200}; read it first; {FORMS}")
    if isinstance(part, tuple):
        kinds = ", ".join(type(item).__name__ for item in part)
        raise ValueError(f"data returned ({kinds}) as samples; {FORMS}")
    return from_items(part, form)


def _check_same_rows(x: Any, y: Any) -> None:
    """Raise ValueError for labels of pandas that have the inputs' rows in another order. Rows are
    matched by their place, as by scikit-learn."""
    of_inputs: Any = getattr(x, "index", None)
    of_labels: Any = getattr(y, "index", None)
    if not hasattr(of_inputs, "equals") or not hasattr(of_labels, "equals"):
        return  # not both are of pandas
    has_same_rows = len(of_inputs) == len(of_labels) and set(of_inputs) == set(of_labels)
    if has_same_rows and not of_inputs.equals(of_labels):
        raise ValueError(
            "the labels' index has the rows of the inputs in another order; rows are matched by "
            "their place: give y.loc[x.index], or reset_index(drop=True) of both if they fit as "
            "they are"
        )


def _held_out(part: Any, form: Form, name: str) -> Samples | None:
    """Validation or test samples; None if there are none."""
    if part is None:
        return None
    try:
        return _samples(part, form)
    except ValueError as error:
        raise ValueError(f"{name} samples: {error}") from error


def _as_inputs(x: Any) -> Any:
    """Inputs as they are; of lists an array. Raises ValueError for rows of different lengths."""
    if _is_list_of_arrays(x):
        shapes = sorted({tuple(row.shape) for row in x})
        if len(shapes) > 1:
            raise ValueError(
                f"inputs are arrays of the shapes {shapes[0]} and {shapes[1]}; give all samples "
                "one shape, or a DataLoader whose collate_fn does"
            )
        return np.stack([as_array(row) for row in x])
    if not isinstance(x, list):
        return x
    lengths = {len(row) for row in x if isinstance(row, list)}
    if len(lengths) > 1:
        raise ValueError(
            f"inputs are lists of {min(lengths)} to {max(lengths)} numbers; pad them to one "
            "length, or give a DataLoader whose collate_fn does"
        )
    return np.asarray(x)


def _check_axes(train: Samples, held_out: Samples, name: str) -> None:
    """Raise ValueError if inputs have another number of axes than those of training: then they are
    no inputs, but labels in a form that is not known. Sizes may differ, as of images."""
    shape = tuple(train.x.shape[1:])
    other = tuple(held_out.x.shape[1:])
    if len(shape) != len(other):
        raise ValueError(
            f"the {name} samples have inputs of shape {other}, the training samples of {shape}; of "
            "labels give an array or a list of numbers, as (x, y)"
        )


def _check_labels(train: Samples, held_out: Samples, name: str) -> None:
    """Raise ValueError if only one of them has labels: the other's would not be used."""
    if train.has_labels == held_out.has_labels:
        return
    has, lacks = ("training", name) if train.has_labels else (name, "training")
    raise ValueError(
        f"the {has} samples have labels, and the {lacks} samples have none; give both labels, or "
        "return the inputs alone for a client without labels"
    )


def _dataset(loader: DataLoader[Any], draws: bool) -> Any:
    """The loader's dataset. Raises ValueError if its samples cannot be drawn by their numbers, and
    unless `draws`, if the loader changes how often each of them is drawn."""
    name = type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{name} has a stream of samples ({type(loader.dataset).__name__}), and mini-batches "
            "are drawn by the samples' numbers; return them as a list, or a dataset with "
            "__getitem__ and __len__"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"{name} makes its own batches (__iter__), and training draws its own mini-batches "
            "from the dataset; return a dataset whose items are samples, or give the order as a "
            "batch_sampler"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(
            f"{name} has batch_size=None, so it is unclear whether an item is a sample or a batch; "
            "return the dataset itself, whose items are samples"
        )
    sampler = _own_sampler(loader)
    if sampler is not None and not draws:
        raise ValueError(
            f"{name} of validation or test samples has {type(sampler).__name__}, which does not "
            "draw each sample once, and scores are over all samples; return its dataset, or a "
            "torch.utils.data.Subset of it"
        )
    return loader.dataset


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler, or the sampler of batches, that makes an epoch another thing than one pass over
    the dataset, in order or shuffled; None without one."""
    if type(loader.batch_sampler) is not BatchSampler:
        return loader.batch_sampler
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return None
    is_pass = type(sampler) is RandomSampler and not sampler.replacement
    if is_pass and len(sampler) == len(sampler.data_source):
        return None
    return sampler


def draws_of(given: Any) -> Draws | None:
    """How the loader of the training samples draws them; None for passes over all of them."""
    loader = given_parts(given).train
    if not isinstance(loader, DataLoader):
        return None
    sampler = _own_sampler(loader)
    return None if sampler is None else Draws(sampler, sampler is loader.batch_sampler)
