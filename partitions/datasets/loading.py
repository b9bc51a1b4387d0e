"""name → dataset as tensors, loaded once per process.

A name may also be the path of a user's own data (`partitions.datasets.readers.local`), absolute or
below ``data-dir``, or ``module:NAME``: an `Info`, or a function that returns inputs and labels.

Datasets come from ``data-dir`` (or $FEDAPPS_DATA_DIR) in their official files or in the
`datasets` library's form, else from the Hugging Face hub. They are converted once and
memory-mapped from a cache folder, so that all processes of a machine share one copy."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import isfunction
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from fedapps.common import external_code
from fedapps.common.settings import keyword_arguments
from fedapps.common.spelling import did_you_mean
from fedapps.common.tasks import AUTO, LABELS, VALUES
from partitions.cache import cache_key, cached, code_identity, content_key, fingerprint
from partitions.datasets.catalog import DATASETS, Info, Moment
from partitions.datasets.copies import note_on_copies
from partitions.datasets.description import (
    BY_CHARACTER,
    BY_WORD,
    IMAGE,
    SIGNAL,
    TABLE,
    TOKENS,
    VECTOR,
    Description,
)
from partitions.datasets.labels import is_sparse
from partitions.datasets.readers.raw import UNLABELED, Raw
from partitions.datasets.words import CHARACTERS, NUM_WORD_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DATASETS", "Dataset", "Info", "Moment", "configured", "described", "info", "load"]

Result = TypeVar("Result")
_KIND_OF_AXES = {1: VECTOR, 2: SIGNAL, 3: IMAGE}  # of an input
OTHER_LEVEL = {"folder:0": "folder:1", "folder:1": "folder:0"}  # of two levels of folders
OF_FILES = ("image_size", "label_column", "task", "inputs", "skip_broken")  # options of reading
OWN = "own data"  # the summary of a user's data
READ_VERSION = 9  # of what the readers of a user's files return, for the cache
MADE_VERSION = 1  # of the datasets that functions of this package make, for the cache
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """Inputs x (n, *shape) as stored and labels y: (n,) int64, (n, k) float32 for several labels,
    or (n, k) float64 for values in their own unit; rows < `num_train` are the
    official training split, and the next `num_validation` rows a given validation split. `classes`
    names the labels, and `words` the tokens 1, 2, …, which a federation numbers anew; equal `key`s
    mean equal content."""

    info: Info
    x: "Tensor"
    y: "Tensor"
    num_train: int
    columns: dict[str, np.ndarray]
    classes: tuple[str, ...] = ()
    key: str = ""
    num_validation: int = 0
    words: tuple[str, ...] = ()


def preference_info(info: Info) -> Info:
    """The binary task of users who prefer one type each: the dataset's classes are the types."""
    return replace(info, num_classes=2, num_types=info.num_classes)


def described(config: Mapping[str, Any], key: str = "dataset") -> Info:
    """The entry of the dataset that `config` names under `key`; errors as `info`."""
    name, data_dir, options = named(config, key)
    return info(name, data_dir, **options)


def configured(config: Mapping[str, Any], key: str = "dataset") -> Dataset:
    """The dataset that `config` names under `key`; errors as `load`."""
    name, data_dir, options = named(config, key)
    return load(name, data_dir, **options)


def named(config: Mapping[str, Any], key: str = "dataset") -> tuple[str, str, dict[str, Any]]:
    """Name, data folder and options of the dataset that `config` names, as `load` takes them."""
    name = str(config[key])
    options = keyword_arguments(config, name)
    options["image_size"] = int(config.get("image-size", 0))
    options["label_column"] = label_of(config, key)
    options["task"] = str(config.get("task", AUTO))
    options["inputs"] = str(config.get("inputs", AUTO))
    options["skip_broken"] = float(config.get("skip-broken", 0.0))
    return name, str(config["data-dir"]), options


def label_of(config: Mapping[str, Any], key: str = "dataset") -> str:
    """What `label` names. In images in folders of two levels alone, the other level than the
    owners'."""
    label = str(config.get("label", ""))
    other = OTHER_LEVEL.get(str(config.get("partition.column", "")), "")
    if label or not other:
        return label
    path = own_path(str(config[key]), str(config.get("data-dir", "")))
    if path is None or not path.is_dir() or _has_three_levels(path):
        return ""
    return other


def _has_three_levels(folder: Path) -> bool:
    """Whether there are folders of folders of folders, as the first ones show; then each level may
    hold the classes."""
    for _ in range(2):
        below = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        if not below:
            return False
        folder = below[0]
    return any(path.is_dir() for path in folder.iterdir())


def info(name: str, data_dir: str = "", **options: Any) -> Info:
    """The entry of `name`; ValueError with the choices if there is none."""
    entry = _entry(name)
    if entry is None:
        return load(name, data_dir, **options).info
    _check_task(entry, options)
    return entry


def _check_task(entry: Info, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a task that is not the one of the dataset's entry."""
    task = options.get("task", AUTO)
    if task not in (AUTO, entry.task):
        raise ValueError(f"task is {task!r}, but the task of {entry.name} is {entry.task!r}")


def load(name: str, data_dir: str = "", **options: Any) -> Dataset:
    """The dataset `name`, the same object for every caller in a process.

    For a user's data `options` are its function's settings, and `OF_FILES`. Raises ValueError for
    an unknown name, for damaged files and for a missing source."""
    root = data_root(data_dir)
    entry = _entry(name)
    if entry is None:
        return _own(name, root, tuple(sorted(options.items())))
    _check_task(entry, options)
    return _load(name, root)


def data_root(data_dir: str = "") -> str:
    """The folder of datasets, `data_dir` or else $FEDAPPS_DATA_DIR, with the home folder in place
    of ~; "" if neither is given."""
    return os.path.expanduser(data_dir or os.environ.get("FEDAPPS_DATA_DIR", ""))


def own_path(name: str, data_dir: str = "") -> Path | None:
    """The path of a user's data: `name` itself, else below the data folder. None for the package's
    names, and if neither exists."""
    if not name or name in DATASETS:
        return None
    name = os.path.expanduser(name)
    for path in (Path(name), Path(data_root(data_dir)) / name):
        if path.exists():
            return path
    return None


def absolute_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """The paths of data in `config` by key, absolute: engines run in other working directories."""
    paths: dict[str, str] = {}
    data_dir = str(config["data-dir"])
    if data_dir:
        paths["data-dir"] = str(Path(data_root(data_dir)).resolve())
    for key in ("dataset", "partition.novel-dataset"):
        path = own_path(str(config.get(key, "")), data_dir)
        if path is not None:
            paths[key] = str(path.resolve())
    return paths


def source(name: str, data_dir: str = "") -> str:
    """The source of the dataset for `load`: "embedded", "synthesised", a folder, "hub …"."""
    root = data_root(data_dir)
    if name == "digits":
        return "embedded"
    entry = _entry(name)
    if entry is None:
        return str(own_path(name, data_dir) or name)
    if entry.make:
        return "synthesised"
    folder = Path(root) / entry.name
    if root and folder.is_dir():
        return str(folder)
    return f"hub {entry.hub or '(no copy)'}"


def reread(name: str, data_dir: str = "", **options: Any) -> Dataset:
    """The dataset from its files, without the cache. Errors as `load`."""
    root = data_root(data_dir)
    entry = _entry(name)
    folder = Path(root) / name
    if entry is not None and name != "digits" and root and folder.is_dir():
        return _checked(entry, _from_folder(entry, folder), str(folder))
    return load(name, data_dir, **options)


def _entry(name: str) -> Info | None:
    """The table's entry; None for a user's data."""
    if name not in DATASETS and external_code.is_reference(name):
        named_object = external_code.load(name)
        return named_object if isinstance(named_object, Info) else None
    return DATASETS.get(name)


@cache
def _own(name: str, root: str, options: tuple[tuple[str, Any], ...]) -> Dataset:
    """A user's data, at a path or from a function, with an `Info` from its content."""
    raw, key = _read_own(name, root, options)
    _held[name, root, options] = key
    for note in raw.notes:
        logger.warning("%s", note)
    return _checked(_info_of(name, raw), raw, name, key)


def _read_own(name: str, root: str, options: tuple[tuple[str, Any], ...]) -> tuple[Raw, str]:
    """A user's data, from the cache if it has them, and their key in it."""
    given = dict(options)
    size = given.pop("image_size", 0)
    label = given.pop("label_column", "")
    task = given.pop("task", AUTO)
    inputs = given.pop("inputs", AUTO)
    skip = given.pop("skip_broken", 0.0)
    path = own_path(name, root)
    key = _own_key(name, root, options)
    if path is not None:
        from partitions.datasets.readers.local import read_files

        raw = cached(
            key,
            lambda: _checked_samples(
                read_files(path, size, label=label, task=task, inputs=inputs, skip=skip), name
            ),
        )
        return raw, key
    if _may_cache(name, given):
        raw = cached(key, lambda: _checked_samples(_made(name, given, task, inputs), name))
        return raw, key
    raw = _checked_samples(_made(name, given, task, inputs), name)
    return raw, content_key(name, raw)


def _info_of(name: str, raw: Raw) -> Info:
    """What a user's data are, by their content."""
    count = raw.y.shape[-1]  # of labels or values
    if raw.y.ndim == 1:
        count = len(raw.classes) or int(raw.y.max()) + 1
    are_tokens = raw.inputs is not None and raw.inputs.kind == TOKENS
    scale = 255.0 if raw.x.dtype == np.uint8 and not are_tokens else 1.0
    shape = raw.x.shape[1:]
    columns = tuple(raw.columns)
    if raw.inputs is not None and raw.inputs.kind == TABLE:
        # Numbers name the clients only where partition.column says so.
        columns = tuple(name for name in columns if raw.columns[name].dtype.kind == "U")
    entry = Info(
        name,
        shape,
        count,
        OWN,
        scale=scale,
        classes=raw.classes,
        columns=columns,
        task=raw.task,
        inputs=raw.inputs or Description(_KIND_OF_AXES.get(len(shape), IMAGE)),
        clients_words=bool(raw.words),
        owner=raw.owner,
    )
    if are_tokens and entry.inputs is not None and raw.x.size:
        entry = replace(entry, num_tokens=_num_tokens(entry.inputs, raw))
    return entry


def _num_tokens(inputs: Description, raw: Raw) -> int:
    """The number of tokens that a network has to know: of texts that of all characters or of a
    federation's words."""
    if inputs.texts == BY_CHARACTER:
        return len(CHARACTERS)
    if inputs.texts == BY_WORD:
        return NUM_WORD_TOKENS
    return int(raw.x.max()) + 1


def _own_key(name: str, root: str, options: tuple[tuple[str, Any], ...]) -> str:
    """A key of a user's data in their present state: of their files, or of the code that makes
    them."""
    path = own_path(name, root)
    if path is not None:
        return cache_key("own", files=fingerprint(path), options=options, version=READ_VERSION)
    if external_code.is_reference(name):
        arguments = dict(options)
        for key in OF_FILES:  # no arguments of the function
            arguments.pop(key, None)
        return cache_key(name, code=code_identity(name, arguments))
    if Path(name).suffix or len(Path(name).parts) > 1:
        raise ValueError(_no_file(name, root))
    raise ValueError(
        f"unknown dataset {name!r}{did_you_mean(name, DATASETS)}; known: "
        f"{', '.join(DATASETS)}; also module:NAME, and the "
        "path, itself or in data-dir, of a folder of class folders, a .npz, a .csv, or a "
        "folder or parquet file of the datasets library"
    )


def _no_file(name: str, root: str) -> str:
    """The sentence about a path to which nothing exists."""
    places = [Path(name).parent]
    if root and not Path(name).is_absolute():
        places.append((Path(root) / name).parent)
    known: list[str] = []
    for place in places:
        if place.is_dir():
            known += [path.name for path in place.iterdir() if not path.name.startswith(".")]
    where = " nor ".join(str(place.resolve()) for place in places)
    either = "neither in " if len(places) > 1 else "not in "
    hint = did_you_mean(Path(name).name, known)
    moved = "; if it was moved, put a link in its place" if Path(name).is_absolute() else ""
    return f"unknown dataset {name!r}{hint}: there is no such path, {either}{where}{moved}"


def _may_cache(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the function's result is kept on disk: unless its keyword `cache` is False."""
    function = external_code.load(name)
    defaults = external_code.keywords(function) if callable(function) else {}
    return (defaults | dict(options)).get("cache", True) is not False


_held: dict[tuple[str, str, tuple[tuple[str, Any], ...]], str] = {}  # keys of data in memory


def forget_changed() -> bool:
    """Forget the data in this process if their files have changed since they were read, or if they
    must not be cached. Returns whether it did."""
    if not any(map(_has_changed, _held)):
        return False
    _held.clear()
    _own.cache_clear()
    _load.cache_clear()
    return True


def _has_changed(held: tuple[str, str, tuple[tuple[str, Any], ...]]) -> bool:
    name, root, _ = held
    try:
        entry = _entry(name)
        if entry is None:
            return _own_key(*held) != _held[held]
        return folder_key(entry, name, Path(root) / name) != _held[held]
    except (OSError, ValueError):  # the data are gone, or their code is not allowed any more
        return True


def _checked_samples(raw: Raw, name: str) -> Raw:
    """The data, with a note if many samples occur twice."""
    copies = note_on_copies(_numbered(raw, name), name)
    return raw.noted(copies) if copies else raw


def _numbered(raw: Raw, name: str) -> Raw:
    """The data. ValueError if labels without names leave most of the classes 0, 1, … empty."""
    if raw.classes or raw.y.ndim > 1 or not len(raw.y):
        return raw
    labels = np.unique(raw.y)
    low = int(labels[0])
    high = int(labels[-1])
    if is_sparse(min(low, 0), high, len(labels)):
        raise ValueError(
            f"{name}: labels go up to {high}, but only {len(labels)} different ones occur; number "
            "the classes from 0, or give the labels as texts"
        )
    return raw


def _made(name: str, options: dict[str, Any], task: str = AUTO, inputs: str = AUTO) -> Raw:
    """The data of the function ``module:NAME``, which returns a `Raw`, or inputs and labels."""
    from partitions.arrays import as_array
    from partitions.datasets.labels import of_task
    from partitions.datasets.readers.convert import as_inputs, joined

    function = external_code.load(name)
    if not _makes_data(function):
        raise ValueError(
            f"{name!r} is {external_code.described(function)}; a dataset must be an Info, or a "
            "function annotated to return a Raw, or inputs and labels "
            "(-> tuple[np.ndarray, np.ndarray])"
        )
    data = external_code.call_with(name, function, {}, options)
    if not isinstance(data, Raw):
        try:
            x, y = data
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r} must return inputs and labels, or a Raw") from error
        x = as_array(x)
        data = Raw(x, as_array(y), len(x))
    notes: list[str] = []
    x, description = as_inputs(data.x, name, False, notes, inputs)
    y = of_task(data.y, name, task, notes)
    data = replace(data, x=x, y=y, inputs=description)
    _check_parts(data, name)
    return joined([data], name, task=task).noted(*notes)


def _check_parts(raw: Raw, name: str) -> None:
    """Raise ValueError if the parts of a function's `Raw` do not fit to each other."""
    count = len(raw.x)
    for column, values in raw.columns.items():
        if len(values) != count:
            raise ValueError(
                f"{name}: column {column} has {len(values)} values for {count} samples; give one "
                "for each"
            )
    held_out = count - raw.num_train
    if not 0 < raw.num_train <= count or not 0 <= raw.num_validation <= held_out:
        raise ValueError(
            f"{name}: num_train is {raw.num_train} and num_validation {raw.num_validation}, of "
            f"{count} samples; count the training samples, which come first, and then those of "
            "validation"
        )
    if raw.classes and raw.y.dtype.kind == "U":
        raise ValueError(
            f"{name}: labels are texts such as {str(raw.y[0])!r:.80}, and classes are given, too; "
            "give labels as numbers of these classes, or leave classes out"
        )


def _makes_data(function: Any) -> bool:
    """Whether it is a function annotated to return a `Raw` or a pair of arrays."""
    from torch import Tensor

    if not isfunction(function):
        return False
    annotation = external_code.return_annotation(function)
    if external_code.of_kind(annotation, Raw):
        return True
    are_arrays = [
        external_code.of_kind(entry, np.ndarray, Tensor) for entry in get_args(annotation)
    ]
    return external_code.of_kind(annotation, tuple) and are_arrays == [True, True]


@cache
def _load(name: str, root: str) -> Dataset:
    entry = _entry(name)
    assert entry is not None
    make = _function(entry.make)
    if make:
        key = cache_key(name, made=MADE_VERSION, code=_code_of(name))
        return _checked(entry, cached(key, make), "synthesis", key)
    folder = Path(root) / entry.name
    if root and folder.is_dir():
        key = _held[name, root, ()] = folder_key(entry, name, folder)
        raw = cached(key, lambda: _from_folder(entry, folder))
        for note in raw.notes:
            logger.warning("%s", note)
        return _checked(entry, raw, str(folder), key)
    key = cache_key(name, hub=entry.hub, code=_code_of(name))
    return _checked(entry, cached(key, lambda: _from_hub(entry, root)), entry.hub, key)


def folder_key(entry: Info, name: str, folder: Path) -> str:
    """A key of a dataset's files in a folder, and of the code that reads them."""
    return cache_key(name, files=fingerprint(folder), code=_code_of(name), shape=entry.shape)


def _code_of(name: str) -> str:
    """The source of the module that declares a user's `Info`. "" for this package's datasets, whose
    code has a version."""
    if external_code.is_reference(name):
        return external_code.source_code(name)
    return ""


def _function(named: Callable[..., Result] | str) -> Callable[..., Result] | None:
    """The function of an `Info`, imported if it is given by its name; None if there is none."""
    if isinstance(named, str):
        return resolve_name(named) if named else None
    return named


def _from_folder(entry: Info, folder: Path) -> Raw:
    """The samples of a dataset's folder: official files, else a folder of the `datasets` library.
    ValueError if it holds neither."""
    from partitions.datasets.readers import hub

    raw = None
    read = _function(entry.read)
    if read:
        raw = read(folder)
    if raw is None:
        raw = hub.read_folder(folder, entry.shape, entry.columns)
    if raw is None:
        raise ValueError(
            f"{folder} holds neither {entry.name}'s files ({entry.files}) nor a datasets folder"
        )
    _checked(entry, raw, str(folder))
    return raw


def _from_hub(entry: Info, root: str) -> Raw:
    from partitions.datasets.readers import hub

    try:
        if not entry.hub:
            raise FileNotFoundError("the hub has no canonical copy")
        raw = hub.read_hub(entry.hub, Path(root), entry.shape, entry.columns)
    except (OSError, ValueError, ImportError) as error:
        where = f"{root}/{entry.name}" if root else f"<data-dir>/{entry.name}"
        raise ValueError(
            f"dataset {entry.name!r} was not found. Give it in one of three ways: its official "
            f"files in {where} (set data-dir or FEDAPPS_DATA_DIR): {entry.files}; a folder of the "
            f"datasets library there (save_to_disk or parquet); or a network that reaches the hub "
            f"for {entry.hub!r} ({type(error).__name__}: {error})"
        ) from error
    _checked(entry, raw, entry.hub)
    return raw


def _checked(entry: Info, raw: Raw, origin: str, key: str = "") -> Dataset:
    """The raw arrays as a dataset; ValueError if shapes or labels are not the dataset's."""
    if raw.x.shape[1:] != entry.shape:
        raise ValueError(
            f"{origin}: inputs of shape {raw.x.shape[1:]}, {entry.name} has {entry.shape}"
        )
    if len(raw.x) != len(raw.y) or not len(raw.y):
        raise ValueError(f"{origin}: {len(raw.x)} inputs, but {len(raw.y)} labels")
    if entry.task in (LABELS, VALUES):
        return _dataset(entry, raw, key, np.float32 if entry.task == LABELS else np.float64)
    if (raw.y == UNLABELED).all():
        columns = entry.inputs.names if entry.inputs is not None else ()
        which = f"; its columns: {', '.join(columns):.500}" if columns else ""
        raise ValueError(
            f"{origin}: holds no labels (y, folders of classes, or a column: label=NAME names it)"
            f"{which}"
        )
    if entry.summary == OWN:
        _check_own_classes(raw, origin)
    if not 0 <= raw.y.min() <= raw.y.max() < entry.num_classes:
        raise ValueError(
            f"{origin}: labels {raw.y.min()}…{raw.y.max()} lie outside 0…{entry.num_classes - 1}; "
            f"every label must be a whole number from 0 to {entry.num_classes - 1}"
        )
    return _dataset(entry, raw, key, np.int64)


def _check_own_classes(raw: Raw, origin: str) -> None:
    """Raise ValueError for classes below 0, and if all samples have one class."""
    row = int(raw.y.argmin())
    if raw.y[row] < 0:
        raise ValueError(
            f"{origin}: row {row} has the label {raw.y[row]}; number the classes from 0 on, give "
            f"them as texts, leave out rows without a label, or set task={VALUES} to learn these "
            "numbers"
        )
    if raw.y.min() == raw.y.max():
        name = raw.classes[raw.y[0]] if raw.classes else raw.y[0]
        raise ValueError(
            f"{origin}: all {len(raw.y)} samples have the label {name}; there is nothing to learn: "
            "add samples of another class"
        )


def _dataset(entry: Info, raw: Raw, key: str, kind: type[np.generic]) -> Dataset:
    """The arrays as tensors; labels of that kind."""
    import torch

    x = torch.from_numpy(np.ascontiguousarray(raw.x))
    y = torch.from_numpy(raw.y.astype(kind))
    return Dataset(
        entry,
        x,
        y,
        raw.num_train,
        raw.columns,
        raw.classes or entry.classes,
        key,
        raw.num_validation,
        raw.words,
    )
