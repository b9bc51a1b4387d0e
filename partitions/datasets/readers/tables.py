"""Tables: a CSV file, or splits of the `datasets` library."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.common.memory_limits import check_size
from fedapps.common.tasks import AUTO
from partitions.datasets.labels import of_task
from partitions.datasets.readers import hub
from partitions.datasets.readers.convert import joined, scaled_pixels
from partitions.datasets.readers.pictures import images
from partitions.datasets.readers.raw import UNLABELED, Raw

FEATURES = ("x", "features", "embedding", "input")  # names of a column of lists or arrays
NATURAL = ("string", "large_string", "int64")  # types of natural columns
TEXTS = ("string", "large_string")
NUMBERS = ("int", "uint", "float", "double", "bool")


def read_csv(path: Path) -> Any:
    """A CSV file with a header as a table of the `datasets` library."""
    import datasets
    import pandas

    try:
        with warnings.catch_warnings():
            # A warning means that pandas drops cells.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(path, index_col=False)
    except pandas.errors.ParserWarning as error:
        raise ValueError(
            f"{path}: rows have more cells than the header; separate cells by commas, write "
            "decimals with points, and name each column"
        ) from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no CSV file with a header ({error})") from error
    if not len(frame):
        raise ValueError(f"{path} has a header and no rows; add a row for each sample")
    unnamed = [name for name in frame.columns if str(name).startswith("Unnamed: ")]
    if unnamed:
        raise ValueError(
            f"{path}: column {unnamed[0].removeprefix('Unnamed: ')} (from 0) has no name; name it, "
            "or leave it out if it holds row numbers (pandas: to_csv(…, index=False))"
        )
    try:
        return datasets.Dataset.from_pandas(frame, preserve_index=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no CSV file with a header ({error})") from error


def read_table(
    loaded: Any, source: Path, size: int, whole: bool, label: str, task: str = AUTO
) -> Raw:
    """Splits of the `datasets` library; columns of texts and numbers are natural columns.

    Raises ValueError where two columns have usual names of labels, or of inputs."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if len(splits) == 1:
        used = list(splits)  # whatever its name
    else:
        train = [name for name in hub.TRAIN if name in splits][:1]
        test = [name for name in hub.TEST if name in splits][:1]
        if not train:
            raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
        used = train + test
    notes: list[str] = []
    parts = []
    for name in used:
        is_train = name == used[0]
        parts.append(_part(splits[name], source, size, whole, label, is_train, notes, task))
    notes += hub.unused_splits(splits, used, source)
    labeled = [part.labeled for part in parts]
    if not whole and any(labeled) and not all(labeled):
        raise ValueError(f"{source}: only one of the splits {used[0]} and {used[1]} has labels")
    return joined(parts, source, later=whole, task=task).noted(*notes)


def _part(
    split: Any,
    source: Path,
    size: int,
    whole: bool,
    label: str,
    is_train: bool,
    notes: list[str],
    task: str,
) -> Raw:
    """One split."""
    label_column = _label_column(split, source, whole, label)
    x, inputs, pictures = _inputs(split, source, size, whole, (label, label_column), notes)
    columns = {}
    for name, feature in split.features.items():
        if name not in (label_column, *inputs) and _dtype(feature) in NATURAL:
            columns[name] = np.asarray(split[name][:])
    notes += _left_out(split, source, label_column, inputs)
    classes: tuple[str, ...] = ()
    y = np.full(len(x), UNLABELED)
    if label_column:
        classes = tuple(getattr(split.features[label_column], "names", None) or ())
        y = of_task(_cells(split, label_column), f"{source}, column {label_column}", task, notes)
    return Raw(
        x,
        y,
        num_train=len(x) if is_train else 0,
        columns=columns,
        classes=classes,
        samples=tuple(map(str, range(len(x)))) if pictures else (),
        labeled=bool(label_column),
    )


def _cells(split: Any, name: str) -> np.ndarray:
    """The cells of a column; Python objects where some are missing."""
    cells = split[name][:]
    if any(cell is None for cell in cells):
        array = np.empty(len(cells), dtype=object)
        array[:] = cells
        return array
    return np.asarray(cells)


def _label_column(split: Any, source: Path, whole: bool, label: str) -> str:
    """The name of the column of labels, "" if there is none. ValueError if several columns have
    usual names of labels."""
    known = [label] if label else hub.LABELS
    present = [name for name in known if name in split.column_names]
    if label and not present and not whole:
        raise ValueError(
            f"{source} has no column {label!r} of labels; label=NAME must be one of "
            f"{', '.join(split.column_names)}"
        )
    if len(present) > 1:
        raise ValueError(
            f"{source}: the columns {' and '.join(present)} may both hold the labels; set "
            "label=NAME, or leave one of them out"
        )
    return present[0] if present else ""


def _inputs(
    split: Any,
    source: Path,
    size: int,
    whole: bool,
    labels: tuple[str, ...],
    notes: list[str],
) -> tuple[np.ndarray, list[str], bool]:
    """The inputs, the names of their columns, and whether they are pictures.

    The inputs are the column of images, lists or arrays that has one of the usual names, else all
    columns of numbers without those in `labels`."""
    numbers = []
    for name, feature in split.features.items():
        if name not in labels and _dtype(feature).startswith(NUMBERS):
            numbers.append(name)
    usual_names = (*hub.IMAGES, *FEATURES)
    candidates = []
    for name in usual_names:
        is_other_column = name in split.column_names and name not in (*labels, *numbers)
        if is_other_column and _dtype(split.features[name]) not in TEXTS:
            candidates.append(name)
    if numbers and not candidates:
        return _numbers(split, numbers, source, whole, notes), numbers, False
    inputs = hub.column(split.select_columns(candidates or split.column_names), usual_names, source)
    rows = split.select_columns([inputs])
    if type(split.features[inputs]).__name__ == "Image":
        files = []
        for number, row in enumerate(rows):
            # Only embedded bytes are read: an image's path may be a URL.
            content = (row[inputs] or {}).get("bytes") or b""
            files.append((f"{source}, row {number}", io.BytesIO(content)))
        return images(files, size, notes), [inputs], True
    check_size(rows.data.nbytes, source)
    x = np.asarray(rows.with_format("numpy")[inputs][:])
    if _stored(split.features[inputs]) == "uint8":  # numpy's format widens it
        x = x.astype(np.uint8)
    return scaled_pixels(x, source, whole, notes), [inputs], False


def _numbers(
    split: Any, numbers: list[str], source: Path, whole: bool, notes: list[str]
) -> np.ndarray:
    """Columns of numbers as inputs (n, columns). ValueError for an empty cell, by its column."""
    check_size(8 * len(split) * len(numbers), source)
    table = split.select_columns(numbers).to_pandas()
    for name in numbers:
        gaps = np.flatnonzero(table[name].isna().to_numpy())
        if len(gaps):
            raise ValueError(
                f"{source}: column {name} has {len(gaps)} cells without a number, the first in row "
                f"{gaps[0]}; inputs hold NaN there: fill them in, or leave the rows or the column "
                "out"
            )
        if table[name].dtype.kind in "bO":
            table[name] = table[name].astype(np.int64)
    return scaled_pixels(table.to_numpy(), source, whole, notes)


def _left_out(split: Any, source: Path, label_column: str, inputs: list[str]) -> list[str]:
    """Notes about the columns that are neither labels nor inputs. Columns in which most cells are
    numbers, but some are texts, have a note of their own."""
    import pandas

    mixed: list[str] = []
    others: list[str] = []
    for name, feature in split.features.items():
        if name in (label_column, *inputs):
            continue
        kind = _dtype(feature) or type(feature).__name__
        if kind in TEXTS:
            cells = pandas.Series(split[name][:])
            texts = cells[pandas.to_numeric(cells, errors="coerce").isna() & cells.notna()]
            if 0 < 2 * len(texts) <= cells.count():
                mixed.append(f"{name} ({len(texts)} cells such as {texts.iloc[0]!r:.50})")
                continue
            kind = "texts"
        others.append(f"{name} ({kind})")
    notes = []
    if mixed:
        why = "columns are no inputs because some cells are not numbers"
        notes.append(f"{source}: {why}: {', '.join(mixed)}")
    if others:
        taken = f"column {inputs[0]}" if len(inputs) == 1 else f"{len(inputs)} columns of numbers"
        notes.append(f"{source}: inputs are {taken}; other columns: {', '.join(others)}")
    return notes


def _dtype(feature: Any) -> str:
    """The type of a column of single numbers or texts; "" for other columns."""
    single = type(feature).__name__ in ("Value", "ClassLabel")
    return str(feature.dtype) if single else ""


def _stored(feature: Any) -> str:
    """The type of the numbers in a column of lists or arrays."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))
