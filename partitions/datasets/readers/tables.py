"""Tables: a CSV file, or splits of the `datasets` library."""

import codecs
import csv
import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.common.memory_limits import check_size
from fedapps.common.spelling import did_you_mean
from fedapps.common.tasks import AUTO
from partitions.datasets.alike import note_alike
from partitions.datasets.description import (
    CATEGORY,
    IMAGE,
    TABLE,
    Column,
    Description,
    names_in,
)
from partitions.datasets.labels import of_later, of_task
from partitions.datasets.readers import hub
from partitions.datasets.readers.broken import left_out
from partitions.datasets.readers.columns import (
    LARGEST_EXACT,
    UNNAMED,
    decimal_comma,
    mark_of_gaps,
    read_column,
)
from partitions.datasets.readers.convert import as_inputs, joined
from partitions.datasets.readers.csv_cells import (
    TEXTS_OF_GAPS,
    notes_on_gaps,
    notes_on_rows,
    rows_of,
    texts_of_gaps,
    unreadable,
)
from partitions.datasets.readers.pictures import images
from partitions.datasets.readers.raw import Raw

FEATURES = ("x", "features", "embedding", "input")  # names of a column of lists or arrays
TEXTS = ("string", "large_string")
WHOLE = re.compile(r"u?int(8|16|32|64)")
SEPARATORS = (",", ";", "\t")
OTHER_SEPARATOR = re.compile(r"[|:]| +(?=\S)")
SEP_LINE = re.compile(r"sep=.\r?\n")
DECIMAL = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")
CODE = re.compile(r"0\d+")
LEADING_ZERO = re.compile(r"[\s,;\"]0\d")


def read_csv(path: Path, notes: list[str], later: bool = False) -> Any:
    """A CSV file with a header as a DataFrame. A `later` client's may have columns without a name,
    which no run takes.

    Cells are separated by commas, semicolons or tabs; decimals have a point, or a comma where cells
    are separated otherwise. The text is UTF-8, or UTF-16 with a mark; else Windows-1252, which
    Latin-1 is a part of. Numbers with leading zeros, as in postal codes, stay texts. The texts that
    count as empty cells are in the frame's `attrs`, by column."""
    import pandas

    text = _decoded(path, notes)
    lines_before = 0
    if declared := SEP_LINE.match(text):  # a line for Excel
        text = text[declared.end() :]
        lines_before = 1
    header, separator = _header(text, path)
    if separator != ",":
        shown = "tabs" if separator == "\t" else "semicolons"
        notes.append(f"{path}: cells are separated by {shown}")
    try:
        with warnings.catch_warnings():
            # A warning means that pandas drops cells.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                io.StringIO(text),
                sep=separator,
                index_col=False,
                na_values=["?"],
                dtype=_codes(text, header, separator),
                skipinitialspace=True,
            )
    except pandas.errors.ParserWarning as error:
        raise ValueError(
            f"{path}: rows have more cells than the header; separate cells by commas, semicolons "
            "or tabs (decimals with a comma need one of the last two), and name each column"
        ) from error
    except (ValueError, OSError, csv.Error) as error:
        raise ValueError(unreadable(error, path, lines_before)) from error
    if not len(frame):
        raise ValueError(f"{path} has a header and no rows; add a row for each sample")
    frame.columns = [str(name).strip() for name in frame.columns]
    _check_names(frame, path, later)
    notes += notes_on_rows(path, frame, text, separator)
    written = texts_of_gaps(frame, text, separator)
    notes += notes_on_gaps(path, written)
    frame.attrs[TEXTS_OF_GAPS] = written
    if separator != ",":
        _convert_commas(frame, path)
    return frame


def _decoded(path: Path, notes: list[str]) -> str:
    """The text of a file, in one of the usual encodings."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} is no CSV file with a header ({error})") from error
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return content.decode("utf-16")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        notes.append(f"{path}: the file is not UTF-8; it is read as Windows-1252 (Latin-1)")
        return content.decode("cp1252", errors="replace")


def _header(text: str, path: Path) -> tuple[list[str], str]:
    """The names in the first line, and the mark that separates most of them. Raises ValueError for
    two columns of one name, which pandas would rename, and for a line of numbers."""
    lines = text.lstrip("\r\n").splitlines()[:1]
    rows = {}
    for mark in SEPARATORS:
        rows[mark] = next(csv.reader(lines, delimiter=mark, skipinitialspace=True), [])
    separator = max(SEPARATORS, key=lambda mark: len(rows[mark]))
    names = [name.strip() for name in rows[separator]]
    other = OTHER_SEPARATOR.search(names[0]) if len(names) == 1 else None
    if other:
        raise ValueError(
            f"{path}: the header is one name, {names[0]!r:.80}; separate cells by commas, "
            f"semicolons or tabs, not by {other[0]!r}"
        )
    if any(DECIMAL.fullmatch(name) for name in names):
        raise ValueError(
            f"{path}: the first line holds numbers such as {names[0]!r:.40}; add a line of the "
            "columns' names before it"
        )
    for name in names:
        if name.isdecimal() and names.count(name) > 1:
            raise ValueError(
                f"{path}: the first line holds numbers, and {name} twice; add a line of the "
                "columns' names before it"
            )
        if name and names.count(name) > 1:
            raise ValueError(f"{path}: two columns are called {name!r}; rename one of them")
    return names, separator


def _codes(text: str, header: list[str], separator: str) -> dict[str, type]:
    """The columns with whole numbers that begin with 0 and have further digits, as texts."""
    if not LEADING_ZERO.search(text):
        return {}
    coded: dict[str, type] = {}
    rows = rows_of(text, separator)
    next(rows, None)
    for row in rows:
        for name, cell in zip(header, row, strict=False):
            if name not in coded and CODE.fullmatch(cell.strip()):
                coded[name] = str
    return coded


def _convert_commas(frame: Any, path: Path) -> None:
    """Make numbers of the columns with decimal commas. Raises ValueError where other columns of the
    file have a point, which may separate decimals or thousands."""
    points = [name for name in frame.columns if frame[name].dtype.kind == "f"]
    converted = []
    for name in frame.columns:
        if name in points:
            continue
        frame[name] = decimal_comma(frame[name])
        if frame[name].dtype.kind == "f":
            converted.append(name)
    for name in points:
        numbers = frame[name].dropna()
        decimals = numbers[numbers % 1 != 0]
        if converted and len(decimals):
            raise ValueError(
                f"{path}: column {converted[0]} has a decimal comma, but column {name} has a point "
                f"({decimals.iloc[0]:g}), which may separate thousands; write all numbers alike"
            )


def _check_names(frame: Any, path: Path, later: bool) -> None:
    """Raise ValueError for two columns of one name, and unless they are of a `later` client, for
    columns without a name that do not number the rows."""
    doubled = frame.columns[frame.columns.duplicated()]
    if len(doubled):
        raise ValueError(f"{path}: two columns are called {doubled[0]!r}; rename one of them")
    if later:
        return
    for name in frame.columns:
        if UNNAMED.fullmatch(name) and not read_column(name, frame[name])[0].identifier:
            raise ValueError(
                f"{path}: column {name.removeprefix('Unnamed: ')} (from 0) has no name; name it, "
                "or leave it out"
            )


def read_table(
    loaded: Any,
    source: Path,
    size: int,
    later: bool,
    label: str,
    task: str = AUTO,
    inputs: str = AUTO,
    skip: float = 0.0,
) -> Raw:
    """Splits of the `datasets` library: inputs in one column of images, lists or arrays, else a
    table of plain columns.

    Raises ValueError where two columns have usual names of labels, or of inputs."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    validation: list[str] = []
    if len(splits) == 1:
        used = list(splits)  # whatever its name
    else:
        train = [name for name in hub.TRAIN if name in splits][:1]
        validation = [name for name in hub.OWN_VALIDATION if name in splits][:1]
        test = [name for name in hub.OWN_TEST if name in splits][:1]
        if not train:
            raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
        used = train + validation + test
    notes = hub.unused_splits(splits, used, source)
    first = splits[used[0]]
    label_columns = _label_columns(first.column_names, source, later, label)
    if len(label_columns) == 1 and _numbers_differ([splits[name] for name in used], *label_columns):
        notes.append(f"{source}: the splits number their classes differently; names are matched")
        splits = {name: _with_names(splits[name], *label_columns) for name in used}
        first = splits[used[0]]
    if _is_plain(first, label_columns):
        frame, lengths = _joined_frame([splits[name] for name in used], source, notes)
        classes: tuple[str, ...] = ()
        if len(label_columns) == 1:
            classes = tuple(getattr(first.features[label_columns[0]], "names", None) or ())
        sizes = (lengths[0], lengths[1] if validation else 0)
        return read_frame(frame, source, later, label, task, notes, sizes, classes, skip)
    parts = []
    for name in used:
        is_train = name == used[0]
        split = splits[name]
        part = _part(split, source, size, later, label, is_train, notes, task, inputs, skip)
        if name in validation:
            part = replace(part, num_validation=len(part.x))
        parts.append(part)
    labeled = [part.labeled for part in parts]
    if not later and any(labeled) and not all(labeled):
        raise ValueError(f"{source}: only some of the splits {', '.join(used)} have labels")
    return joined(parts, source, later=later, task=task).noted(*notes)


def _numbers_differ(splits: Sequence[Any], label: str) -> bool:
    """Whether the same number is another class in another split, as `class_encode_column` makes it
    where a split lacks a class."""
    numberings = set()
    for split in splits:
        names = getattr(split.features.get(label), "names", None)
        if names is None:
            return False
        numberings.add(tuple(names))
    return len(numberings) > 1


def _with_names(split: Any, label: str) -> Any:
    """The split with the names of its classes in place of their numbers; None for −1, no class."""
    names = split.features[label].names
    texts = []
    for number in split[label][:]:
        texts.append(None if number is None or number < 0 else names[number])
    return split.remove_columns([label]).add_column(label, texts)


def _joined_frame(splits: Sequence[Any], source: Path, notes: list[str]) -> tuple[Any, list[int]]:
    """The rows of all splits in one DataFrame, and the number of each split's rows. A note is added
    about columns that are left out."""
    import pandas

    frames = [_frame(split, source) for split in splits]
    first = splits[0]
    others = [name for name in first.column_names if name not in frames[0].columns]
    if others:
        kinds = ", ".join(f"{name} ({_kind(first.features[name])})" for name in others)
        notes.append(f"{source}: columns are left out, whose cells are no single values: {kinds}")
    return pandas.concat(frames, ignore_index=True), [len(frame) for frame in frames]


def read_frame(
    frame: Any,
    source: Path,
    later: bool,
    label: str,
    task: str,
    notes: list[str],
    sizes: tuple[int, int],
    classes: tuple[str, ...] = (),
    skip: float = 0.0,
) -> Raw:
    """A DataFrame of plain columns: cells (n, columns) float64 of all columns but the labels, with
    their description. `sizes` are the numbers of its training rows and of its validation rows.
    Texts and dates are natural columns, too, and so are whole numbers that float64 rounds.
    `classes` names labels that are numbers. Up to a share `skip` of the rows may lack a label."""
    names = [str(name) for name in frame.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{source}: two columns are called {twice[0]!r}; rename one of them")
    label_columns = _label_columns(list(frame.columns), source, later, label)
    if skip and label_columns and not later:
        frame, sizes, left = _without_unlabeled(frame, label_columns, source, skip, sizes)
        notes += left
    inputs = [name for name in frame.columns if name not in label_columns]
    if not inputs:
        raise ValueError(f"{source} has no columns of inputs beside {', '.join(label_columns)}")
    check_size(8 * len(frame) * len(inputs), source)
    cells = np.empty((len(frame), len(inputs)))
    columns = []
    natural = {}
    for number, name in enumerate(inputs):
        column, cells[:, number] = read_column(str(name), frame[name])
        columns.append(column)
        mark = mark_of_gaps(column, cells[:, number])
        if mark:
            notes.append(f"{source}, {mark}")
        if column.kind == CATEGORY:
            note = note_alike(column.categories, f"column {name}:", "categories")
            if note:
                notes.append(f"{source}, {note}")
        owners = _owners(column, frame[name])
        if owners is not None:
            natural[column.name] = owners
    y = None
    if label_columns:
        y, classes = _labels(frame, label_columns, source, task, notes, classes, later)
    raw = Raw.of(
        cells,
        y,
        sizes[0],
        columns=natural,
        classes=classes,
        inputs=Description(TABLE, tuple(columns)),
        num_validation=sizes[1],
    )
    return joined([raw], source, later=later, task=task).noted(*notes)


def _owners(column: Column, series: Any) -> np.ndarray | None:
    """The values (n,) of a column that is natural: texts, dates as texts, and whole numbers that
    float64 rounds; "" where there is none. None for other columns."""
    if column.kind == CATEGORY:
        return np.asarray(series.fillna("").astype(str).str.strip().to_numpy(str))
    if series.dtype.kind == "M":
        return np.asarray(series.astype(str).where(series.notna(), "").to_numpy(str))
    if _is_rounded(series):
        return np.asarray(series.to_numpy())
    return None


def _is_rounded(series: Any) -> bool:
    """Whether these are whole numbers that have no exact decimals, such as account numbers."""
    if series.dtype.kind not in "iu" or series.isna().any():
        return False
    return bool(series.max() > LARGEST_EXACT or series.min() < -LARGEST_EXACT)


def _without_unlabeled(
    frame: Any, label_columns: Sequence[str], source: Path, skip: float, sizes: tuple[int, int]
) -> tuple[Any, tuple[int, int], list[str]]:
    """The rows that have all labels, the numbers of their training and of their validation rows,
    and a note about the others. Raises ValueError if these are more than a share `skip`."""
    has_none = frame[list(label_columns)].isna().any(axis=1).to_numpy()
    unlabeled = [f"{source}, row {row} has no label" for row in np.flatnonzero(has_none).tolist()]
    notes = left_out(unlabeled, len(frame), skip, "rows")
    num_train, num_validation = sizes
    of_train = int(has_none[:num_train].sum())
    of_validation = int(has_none[num_train:][:num_validation].sum())
    kept = frame[~has_none].reset_index(drop=True)
    return kept, (num_train - of_train, num_validation - of_validation), notes


def _labels(
    frame: Any,
    names: Sequence[str],
    source: Path,
    task: str,
    notes: list[str],
    classes: tuple[str, ...],
    later: bool,
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The labels of a column (n,), or of several (n, k), and the names of classes or outputs. A
    `later` client's samples may lack labels; None if all do."""
    where = f"{source}, column {', '.join(names)}"
    if not later:
        _check_texts_of_gaps(frame, names, source)
    read = of_later if later else of_task
    if len(names) == 1:
        y = read(_cells(frame[names[0]]), where, task, notes)
        is_value = y is not None and y.ndim == 2
        return y, tuple(names) if is_value else classes  # a value has its column's name
    columns = []
    for name in names:
        column, values = read_column(name, frame[name])
        if column.kind == CATEGORY or column.refusal:
            raise ValueError(
                f"{where}: column {name} holds no numbers; several labels are numbers, or 0 and 1"
            )
        columns.append(values)
    y = read(np.stack(columns, axis=1), where, task, notes)
    return y, tuple(names)


def _check_texts_of_gaps(frame: Any, names: Sequence[str], source: Path) -> None:
    """Raise ValueError for a column of labels with a text that counts as an empty cell."""
    for name in names:
        counts = frame.attrs.get(TEXTS_OF_GAPS, {}).get(name)
        gaps = np.flatnonzero(frame[name].isna())
        if counts and len(gaps):
            text, count = counts.most_common(1)[0]
            raise ValueError(
                f"{source}, column {name}: row {gaps[0]} has no label, since {text!r} counts as "
                f"none ({count} cells hold it); write another text if it is a class, else fill it "
                "in, or leave the row out"
            )


def _cells(series: Any) -> np.ndarray:
    """The cells of a column of labels: (n,), or (n, k) of lists of one length; Python objects where
    some are missing."""
    lists = [cell for cell in series if isinstance(cell, np.ndarray | list)]
    if lists and len(lists) == len(series) and len({len(cell) for cell in lists}) == 1:
        return np.stack([np.asarray(cell) for cell in lists])
    if series.isna().any() or series.dtype.kind == "O":
        return np.asarray(series.to_numpy(dtype=object))
    return np.asarray(series.to_numpy())


def _natural(cells: Sequence[Any]) -> np.ndarray:
    """The cells of a natural column (n,): as they are, or as texts where some are missing, which
    are ""."""
    if not any(cell is None for cell in cells):
        return np.asarray(cells)
    return np.asarray(["" if cell is None else str(cell) for cell in cells])


def _is_plain(split: Any, label_columns: Sequence[str]) -> bool:
    """Whether the inputs are single values in columns, and not one column of images or lists."""
    plain = False
    for name, feature in split.features.items():
        if name in label_columns:
            continue
        if _dtype(feature):
            plain = True
        elif name in (*hub.IMAGES, *FEATURES):
            return False
    return plain


def _frame(split: Any, source: Path) -> Any:
    """The plain columns of a split as a DataFrame; numbers of classes as their names, unless they
    are labels."""
    names = [name for name, feature in split.features.items() if _dtype(feature)]
    check_size(8 * len(split) * len(names), source)
    frame = split.select_columns(names).to_pandas()
    for name in names:
        classes = getattr(split.features[name], "names", None)
        if classes and name not in hub.LABELS:
            frame[name] = frame[name].map(dict(enumerate(classes)))
    return frame


def _kind(feature: Any) -> str:
    return _dtype(feature) or type(feature).__name__


def _part(
    split: Any,
    source: Path,
    size: int,
    later: bool,
    label: str,
    is_train: bool,
    notes: list[str],
    task: str,
    declared: str,
    skip: float,
) -> Raw:
    """One split with its inputs in one column."""
    label_columns = _label_columns(split.column_names, source, later, label)
    if len(label_columns) > 1:
        raise ValueError(f"{source}: label is {label!r}; beside images or lists it is one column")
    label_column = label_columns[0] if label_columns else ""
    labels = (label, label_column)
    x, description, inputs, kept = _inputs(
        split, source, size, later, labels, notes, declared, skip
    )
    if len(kept) < len(split):
        split = split.select(kept)
    pictures = type(split.features[inputs]).__name__ == "Image"
    columns = {}
    others = []
    for name, feature in split.features.items():
        if name in (label_column, inputs):
            continue
        if _may_be_owner(feature):
            columns[name] = _natural(split[name][:])
        others.append(f"{name} ({'texts' if _dtype(feature) in TEXTS else _kind(feature)})")
    if others:
        notes.append(f"{source}: inputs are column {inputs}; other columns: {', '.join(others)}")
    classes: tuple[str, ...] = ()
    y = None
    if label_column:
        classes = tuple(getattr(split.features[label_column], "names", None) or ())
        cells = _cells(split.select_columns([label_column]).to_pandas()[label_column])
        read = of_later if later else of_task
        y = read(cells, f"{source}, column {label_column}", task, notes)
    return Raw.of(
        x,
        y,
        num_train=len(x) if is_train else 0,
        columns=columns,
        classes=classes,
        samples=tuple(map(str, kept)) if pictures else (),
        inputs=description,
    )


def _label_columns(names: Sequence[str], source: Path, later: bool, label: str) -> list[str]:
    """The names of the columns of labels, [] if there are none. ValueError if several columns have
    usual names of labels, and for names in `label` that are no columns."""
    if not label:
        present = [name for name in hub.LABELS if name in names]
        if len(present) > 1:
            raise ValueError(
                f"{source}: the columns {' and '.join(present)} may both hold the labels; set "
                "label=NAME, or leave one of them out"
            )
        return present
    chosen = [label] if label in names else names_in(label)
    missing = [name for name in chosen if name not in names]
    if missing and not later:
        raise ValueError(
            f"{source} has no column {missing[0]!r} of labels{did_you_mean(missing[0], names)}; "
            f"label=NAME must be one of {', '.join(names):.500}"
        )
    return [] if missing else chosen


def _inputs(
    split: Any,
    source: Path,
    size: int,
    later: bool,
    labels: tuple[str, ...],
    notes: list[str],
    declared: str,
    skip: float,
) -> tuple[np.ndarray, Description, str, Sequence[int]]:
    """The inputs, what they are, the name of their column, and the rows that were read."""
    usual_names = (*hub.IMAGES, *FEATURES)
    candidates = []
    for name in usual_names:
        is_other_column = name in split.column_names and name not in labels
        if is_other_column and not _dtype(split.features[name]):
            candidates.append(name)
    inputs = hub.column(split.select_columns(candidates or split.column_names), usual_names, source)
    rows = split.select_columns([inputs])
    if type(split.features[inputs]).__name__ == "Image":
        files = []
        for number, row in enumerate(rows):
            # Only embedded bytes are read: an image's path may be a URL.
            content = (row[inputs] or {}).get("bytes") or b""
            files.append((f"{source}, row {number}", io.BytesIO(content)))
        pictures, kept = images(files, size, notes, skip)
        return pictures, Description(IMAGE), inputs, kept
    check_size(rows.data.nbytes, source)
    x = np.asarray(rows.with_format("numpy")[inputs][:])
    if _stored(split.features[inputs]) == "uint8":  # numpy's format widens it
        x = x.astype(np.uint8)
    values, description = as_inputs(x, source, later, notes, declared)
    return values, description, inputs, range(len(values))


def _dtype(feature: Any) -> str:
    """The type of a column of single numbers or texts; "" for other columns."""
    single = type(feature).__name__ in ("Value", "ClassLabel")
    return str(feature.dtype) if single else ""


def _may_be_owner(feature: Any) -> bool:
    """Whether a column may name clients: by texts, whole numbers or truth values."""
    kind = _dtype(feature)
    return kind in (*TEXTS, "bool") or bool(WHOLE.fullmatch(kind))


def _stored(feature: Any) -> str:
    """The type of the numbers in a column of lists or arrays."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))
