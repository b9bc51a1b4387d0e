"""A user's data without code, by its path: a folder of class folders (torchvision's
ImageFolder), a ``.npz`` of arrays or a ``.npy`` of inputs, a ``.csv``, a folder or a parquet file
of the `datasets` library."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.common.memory_limits import check_size
from fedapps.common.tasks import AUTO
from partitions.datasets.labels import lacks_label, of_later, of_task
from partitions.datasets.readers import hub
from partitions.datasets.readers.broken import left_out
from partitions.datasets.readers.convert import as_inputs, joined, scaled_pixels, truth_pictures
from partitions.datasets.readers.own_leaf import leaf_files, read_leaf
from partitions.datasets.readers.pictures import read_pictures
from partitions.datasets.readers.raw import Raw
from partitions.datasets.readers.tables import read_csv, read_frame, read_table

__all__ = ["joined", "read_files", "scaled_pixels"]

CSV_GROWTH = 4  # bytes in memory of a byte of CSV, at most: "1," becomes a number of 8 bytes
TABLES = (".csv", ".tsv")  # whose cells are separated by any of the usual marks
ENDINGS = ("", "_train", "_test")  # of the names of arrays in a .npz


def read_files(
    path: Path,
    size: int = 0,
    later: bool = False,
    label: str = "",
    task: str = AUTO,
    inputs: str = AUTO,
    skip: float = 0.0,
) -> Raw:
    """The samples at `path`, training samples first.

    Images are cropped and resized to `size`×`size`; with 0 they stay as they are, and must have
    equal sizes. A folder may hold ``train`` and ``test`` folders of class folders. `label` names
    the column of labels in a table or the array of labels in a .npz; "" means the usual name. Data
    without labels (class folders, ``y`` or a column) have the label −1. `task` declares what the
    labels are, `inputs` what the inputs in arrays are; "auto": they decide. Up to a share `skip`
    of the images, of a table's rows without a label, or of an array's rows without a label or with
    NaN or infinity is left out, and noted. The caller shows the notes.

    `later` is for a later client: whole numbers stay whole, as in `scaled_pixels`, labels keep
    their numbers, and the labels called `label` may be missing. Raises ValueError with the file's
    name for data that cannot be read."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if path.suffix in (".npz", ".npy"):
        return _arrays(path, later, label, task, inputs, skip)
    if path.is_file() and path.suffix == ".json":
        return read_leaf(path, leaf_files(path), later, task, inputs)
    is_csv = path.suffix.lower() in TABLES
    if path.is_file() and path.suffix != ".parquet" and not is_csv:
        raise ValueError(
            f"{path} is no data that can be read: an .npz, .npy, .csv, .parquet or LEAF's .json "
            "file, a folder of images, or one of the datasets library (save_to_disk or parquet); "
            "save a table of another program as a .csv"
        )
    if is_csv:
        check_size(CSV_GROWTH * path.stat().st_size, path)
        notes: list[str] = []
        frame = read_csv(path, notes, later)
        return read_frame(frame, path, later, label, task, notes, (len(frame), 0), skip=skip)
    with _readable(path):
        unpacked = hub.unpacked(path)
    check_size(unpacked, path)
    with _readable(path):
        loaded = hub.open_folder(path, decode=False)
    if loaded is not None:
        raw = read_table(loaded, path, size, later, label, task, inputs, skip)
        return raw if later else truth_pictures(raw, path)
    if files := leaf_files(path):
        return read_leaf(path, files, later, task, inputs)
    _check_no_tables(path)
    raw = read_pictures(path, size, label, later, skip)
    return raw if later else truth_pictures(raw, path)


def _check_no_tables(folder: Path) -> None:
    """Raise ValueError for a folder of CSV files alone, such as one for each hospital."""
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    if files and all(path.suffix == ".csv" for path in files):
        raise ValueError(
            f"{folder} holds {len(files)} CSV files, such as {files[0].name}, and no images; write "
            "their rows into one file, with a column that names the client; then "
            "partition=natural partition.column=NAME makes each file a client"
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # zipfile and numpy raise many kinds of errors for damaged bytes
        reason = str(error)
        if "allow_pickle" in reason:  # numpy's message for all bytes that it does not know
            reason = (
                "it is damaged, or holds Python objects, such as texts or rows of several lengths: "
                "save texts as np.array(texts, dtype=str), and rows of one length"
            )
        raise ValueError(
            f"{path} is no whole {path.suffix or 'folder'} of plain data ({reason})"
        ) from error


def _arrays(path: Path, later: bool, label: str, task: str, inputs: str, skip: float) -> Raw:
    """``x`` (n, …) and ``y`` (n,), or ``x_train``, ``y_train``, ``x_test``, ``y_test``; further
    arrays (n,) beside x and y are natural columns. `label` may name another array than ``y``."""
    arrays = _loaded(path)
    y_name = label or "y"
    whole_names = {"x", y_name}
    split_names = {"x_train", f"{y_name}_train", "x_test", f"{y_name}_test"}
    if arrays.keys() & whole_names and arrays.keys() & split_names:
        raise ValueError(
            f"{path} holds {', '.join(sorted(arrays))}; it must hold either x and {y_name}, or "
            f"x_train, {y_name}_train, x_test and {y_name}_test"
        )
    endings = [ending for ending in ENDINGS if f"x{ending}" in arrays]
    if not endings:
        raise ValueError(f"{path} holds {sorted(arrays)}; it must hold x and {y_name}")
    if not later:
        _check_pairs(arrays, endings, path, label)
    notes: list[str] = []
    parts = []
    rows: list[int] = []  # that are kept, numbered through all parts
    count = 0
    for ending in endings:
        if skip:
            kept = _complete_rows(arrays, ending, "" if later else y_name, path, skip, notes)
            rows += (count + kept).tolist()
            count += len(arrays[f"x{ending}"])
            arrays = arrays | _of_rows(arrays, ending, y_name, kept)
        parts.append(_part(arrays, ending, y_name, path, later, notes, task, inputs))
    used = {f"x{ending}" for ending in endings} | {f"{y_name}{ending}" for ending in endings}
    unused = sorted(arrays.keys() - used - parts[0].columns.keys())
    if unused:
        why = "they hold no single value for each sample" if endings == [""] else "of splits"
        notes.append(f"{path}: arrays are left out ({why}): {', '.join(unused)}")
    raw = joined(parts, path, later=later, task=task)
    if len(rows) < count:
        raw = replace(raw, rows=tuple(rows))
    return raw.noted(*notes)


def _complete_rows(
    arrays: dict[str, np.ndarray],
    ending: str,
    y_name: str,
    path: Path,
    skip: float,
    notes: list[str],
) -> np.ndarray:
    """The rows of the arrays with this ending whose inputs are finite, and which have a label in
    the array `y_name` if there is one. Raises ValueError if the others are more than a share
    `skip`."""
    x = arrays[f"x{ending}"]
    y = arrays.get(f"{y_name}{ending}")
    place = f"{path}, x{ending}" if ending else str(path)
    broken: dict[int, str] = {}
    if y is not None and y.shape[:1] == x.shape[:1]:
        for row in np.flatnonzero(lacks_label(y)).tolist():
            broken[row] = f"{place}, row {row} has no label"
    if x.dtype.kind == "f" and x.size:
        finite = np.isfinite(x).reshape(len(x), -1).all(1)
        for row in np.flatnonzero(~finite).tolist():
            broken[row] = f"{place}, row {row} holds NaN or infinity"
    notes += left_out([broken[row] for row in sorted(broken)], len(x), skip, "rows")
    return np.setdiff1d(np.arange(len(x)), list(broken))


def _of_rows(
    arrays: dict[str, np.ndarray], ending: str, y_name: str, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """These rows of the inputs and labels with this ending; of undivided arrays also of those that
    have one value for each sample."""
    count = len(arrays[f"x{ending}"])
    if len(rows) == count:
        return {}
    chosen = {}
    for name, array in arrays.items():
        is_part = name in (f"x{ending}", f"{y_name}{ending}")
        if is_part or (not ending and array.shape == (count,)):
            chosen[name] = array[rows]
    return chosen


def _loaded(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file by name; the array of a .npy file is called ``x``."""
    with _readable(path):
        loaded: Any = np.load(path, mmap_mode="c", allow_pickle=False)
    if isinstance(loaded, np.ndarray):  # numpy has checked the length of the mapped file
        return {"x": loaded}
    with loaded as file:
        check_size(sum(entry.file_size for entry in file.zip.infolist()), path)
        with _readable(path):
            return {name: file[name] for name in file.files}


def _check_pairs(arrays: dict[str, np.ndarray], endings: list[str], path: Path, label: str) -> None:
    """Raise ValueError if training samples are missing, or labels of some parts alone."""
    if endings == ["_test"]:
        raise ValueError(f"{path} holds x_test without x_train; training needs x_train")
    names = [f"{label or 'y'}{ending}" for ending in endings]
    missing = [name for name in names if name not in arrays]
    if missing and (label or len(missing) < len(names)):
        raise ValueError(
            f"{path} holds no labels {' and '.join(missing)}; its arrays: "
            f"{', '.join(sorted(arrays))}"
        )


def _part(
    arrays: dict[str, np.ndarray],
    ending: str,
    y_name: str,
    path: Path,
    later: bool,
    notes: list[str],
    task: str,
    declared: str,
) -> Raw:
    """The arrays whose names have this ending."""
    x = arrays[f"x{ending}"]
    y = arrays.get(f"{y_name}{ending}")
    if x.ndim and not len(x):
        raise ValueError(f"{path}: x{ending} has the shape {x.shape}; give at least one sample")
    if x.ndim == 0 or (y is not None and not y.size):
        raise ValueError(f"{path}: x{ending} and {y_name}{ending} must have a row for each sample")
    labels = None
    if y is not None:
        read = of_later if later else of_task
        labels = read(y, f"{path}, {y_name}{ending}" if ending else str(path), task, notes)
    columns = {}
    if not ending:
        for name, array in arrays.items():
            column = None if name in ("x", y_name) else _natural_column(array)
            if column is not None and column.shape == (len(x),):
                columns[name] = column
    num_train = 0 if ending == "_test" else len(x)
    values, description = as_inputs(x, path, later, notes, declared)
    return Raw.of(values, labels, num_train, columns=columns, inputs=description)


def _natural_column(values: np.ndarray) -> np.ndarray | None:
    """Values (n,) as numbers or texts, dates as texts and "" where there is none; None for values
    of another type."""
    if values.dtype.kind in "biufU":
        return values
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind == "M":
        return np.where(np.isnat(values), "", np.datetime_as_string(values))
    return None
