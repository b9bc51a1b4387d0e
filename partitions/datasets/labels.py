"""Labels in the forms that people bring, as the labels of a task.

A form with a single reading is read: a column (n, 1), whole decimals, truth values, texts. Where
all labels of a dataset are there, so are numbers from 1, the signs −1 and 1, one-hot rows, rows of
several truth values, and decimals. Every other form is refused by a sentence that names it and says
what to write."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from fedapps.common.tasks import AUTO, BINARY, CLASSES, LABELS, VALUES
from partitions.datasets.alike import note_alike

MISSING_TEXTS = {"", "?", "na", "n/a", "nan", "<na>", "none", "null"}
SIGNS = (-1, 1)
LACKING = np.iinfo(np.int64).min  # of a later client, for a sample without a label: −1 is a sign
LARGEST_VALUE = 1e30  # float32, in which networks compute, ends at 3.4e38
LARGEST = 2**53  # whole decimals beyond it have no exact neighbour
ONE_CLASS = "a label is one class for each sample, a whole number from 0 or a text"


@dataclass(frozen=True)
class Labels:
    """Classes `y` (n,) int64 of a whole dataset, and their names if the numbers are not the
    user's. `note` says how an unusual form was read."""

    y: np.ndarray
    classes: tuple[str, ...] = ()
    note: str = ""


def of_task(
    given: Any, source: str, task: str = AUTO, notes: list[str] | None = None
) -> np.ndarray:
    """Labels as the task has them: (n,) int64, bool or str for classes, as they are given; truth
    values (n, k) int8 for `labels`; numbers (n, k) float64 for `values`.

    For "auto" the labels decide, and an unusual reading is added to `notes`. Raises ValueError for
    labels with another reading, or with several."""
    notes = [] if notes is None else notes
    rows = np.asarray(given)
    if _are_amounts(rows):
        rows = rows.astype(np.float64)
    if task == VALUES:
        return _values(rows, source)
    if task == LABELS:
        return _truth_values(rows, source)
    if rows.ndim == 2 and rows.shape[1] > 1 and rows.dtype.kind in "biuf" and len(rows):
        count = one_hot_classes(rows)
        if count:
            notes.append(f"{source}: labels are one-hot: {count} classes")
            return rows.argmax(1)
        if task == AUTO:
            return _concluded(rows, source, notes)
    if task == AUTO and _has_fractions(rows):
        return _concluded(rows, source, notes)
    return one_per_sample(rows, source)


def of_later(given: Any, source: str, task: str, notes: list[str]) -> np.ndarray | None:
    """Labels of a later client, as `of_task` has them; None if no sample has a label.

    A sample without a label gets `LACKING` where labels are classes, "" where they are texts, and
    NaN where they are numbers. The number of these samples is added to `notes`."""
    rows = np.asarray(given)
    lacking = lacks_label(rows)
    if not lacking.any():
        return of_task(rows, source, task, notes)
    count = int(lacking.sum())
    notes.append(f"{source}: {count} of {len(rows)} samples have no label, and are not scored")
    if lacking.all():
        return None
    known = of_task(rows[~lacking], source, task, notes)
    nothing: Any = LACKING
    if known.dtype.kind == "U":
        nothing = ""
    elif known.ndim == 2:
        known = known.astype(np.float64)
        nothing = np.nan
    elif known.dtype.kind == "b":
        known = known.astype(np.int64)
    labels = np.full((len(rows), *known.shape[1:]), nothing, dtype=known.dtype)
    labels[~lacking] = known
    return labels


def _concluded(rows: np.ndarray, source: str, notes: list[str]) -> np.ndarray:
    """Labels that cannot be classes, as several labels or as values."""
    if rows.ndim == 2 and ((rows == 0) | (rows == 1)).all():
        notes.append(
            f"{source}: each sample has {rows.shape[1]} truth values: task {LABELS} (several "
            "labels at once)"
        )
        return _truth_values(rows, source)
    if _are_shares(rows):
        raise ValueError(
            f"{source}: each sample has {rows.shape[1]} decimals that add up to 1, such as "
            f"{rows[0].tolist()!s:.80}; set task={VALUES} to learn these shares, or give one class "
            "for each sample, as y.argmax(1)"
        )
    if _has_fractions(rows):
        notes.append(f"{source}: labels are decimals: task {VALUES} (regression)")
        return _values(rows, source)
    gaps = np.argwhere(~np.isfinite(rows))
    if len(gaps):
        row, column = gaps[0]
        raise ValueError(
            f"{source}: row {row}, column {column} of the labels is {rows[row, column]}, one of "
            f"{len(gaps)} that are no finite numbers; fill them in, or leave these rows out"
        )
    raise ValueError(
        f"{source}: labels have {rows.shape[1]} columns of whole numbers; set task={VALUES} to "
        f"learn these numbers, task={LABELS} if they are 0 and 1, or give one class for each sample"
    )


def _are_amounts(rows: np.ndarray) -> bool:
    """Whether these are Python's decimals, as amounts of money in databases are."""
    if rows.dtype.kind != "O" or not rows.size:
        return False
    return all(isinstance(cell, Decimal) for cell in rows.flat)


def _has_fractions(rows: np.ndarray) -> bool:
    """Whether these are numbers without gaps, (n,) or (n, k), and some are not whole."""
    if rows.dtype.kind != "f" or rows.ndim not in (1, 2) or not np.isfinite(rows).all():
        return False
    return bool((rows % 1 != 0).any())


def _are_shares(rows: np.ndarray) -> bool:
    """Whether each row (k,) has decimals in [0, 1] that add up to 1, as the probabilities of
    classes do."""
    if rows.ndim != 2 or rows.shape[1] < 2 or not _has_fractions(rows):
        return False
    return bool((rows >= 0).all() and np.allclose(rows.sum(1, dtype=float), 1, atol=1e-3))


def _truth_values(rows: np.ndarray, source: str) -> np.ndarray:
    """Rows of 0 and 1, (n, k) int8. Raises ValueError for others, naming the first."""
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise ValueError(
            f"{source}: labels are {rows.dtype} {rows.shape}; task={LABELS} needs a column of 0 "
            "and 1 for each label, (n, k)"
        )
    wrong = np.argwhere((rows != 0) & (rows != 1))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(
            f"{source}: row {row}, column {column} of the labels is {rows[row, column]}; "
            f"task={LABELS} needs 0 and 1"
        )
    return rows.astype(np.int8)


def _values(rows: np.ndarray, source: str) -> np.ndarray:
    """Numbers (n,) or (n, k) as (n, k) float64. Raises ValueError for others and for gaps."""
    if rows.dtype.kind == "O":
        rows = _of_one_type(rows, source)
    if rows.ndim not in (1, 2) or rows.dtype.kind not in "iuf":
        raise ValueError(
            f"{source}: labels are {rows.dtype} {rows.shape}; task={VALUES} needs numbers, (n,) or "
            "(n, k)"
        )
    values = rows.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(wrong):
        raise ValueError(
            f"{source}: row {wrong[0]} has the label {rows[wrong[0]]}, one of {len(wrong)} that "
            "are no finite numbers; fill them in, or leave these rows out"
        )
    if np.abs(values).max(initial=0) > LARGEST_VALUE:
        raise ValueError(
            f"{source}: labels go up to {np.abs(values).max():g}; give them in a larger unit"
        )
    return values.reshape(len(values), -1)


def check_binary(labels: Labels, source: str) -> None:
    """Raise ValueError if there are more than two classes."""
    if len(labels.y) and labels.y.max() > 1:
        raise ValueError(
            f"{source}: labels go up to {labels.y.max()} or have more than two texts; "
            f"task={BINARY} needs two classes; set task={CLASSES}"
        )


def one_per_sample(given: Any, source: str) -> np.ndarray:
    """Labels (n,) of type int64, bool or str, as they are given.

    Raises ValueError for several numbers for each sample, decimals, gaps and other types."""
    labels = np.asarray(given)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{source}: {_several(labels)}")
    if labels.dtype.kind == "O":
        labels = _of_one_type(labels, source)
    kind = labels.dtype.kind
    if kind == "f":
        return _whole(labels, source)
    if kind in "US":
        return _texts(labels, source)
    if kind == "u" and labels.size and labels.max() > LARGEST:
        raise ValueError(f"{source}: labels go up to {labels.max()}; {ONE_CLASS}")
    if kind in "iu":
        return labels.astype(np.int64, copy=False)
    if kind == "b":
        return labels
    raise ValueError(f"{source}: labels are {labels.dtype}; {ONE_CLASS}")


def numbered(labels: np.ndarray) -> Labels:
    """Labels of `one_per_sample`, all that a dataset has, as classes 0, 1, …

    Truth values, signs and numbers from above 0 keep their names, as texts do. Other numbers below
    0 stay as they are, for the caller to refuse."""
    if labels.dtype.kind == "U":
        return named(labels)
    if labels.dtype.kind == "b":
        return Labels(labels.astype(np.int64), ("False", "True"))
    values = np.unique(labels)
    if tuple(values) == SIGNS:
        return Labels((labels > 0).astype(np.int64), ("-1", "1"), "labels are -1 and 1: 2 classes")
    if not len(values) or values[0] <= 0:
        return Labels(labels)
    low, high = int(values[0]), int(values[-1])
    if is_sparse(low, high, len(values)):
        return Labels(labels)
    names = tuple(str(number) for number in range(low, high + 1))
    note = f"labels are {low} to {high}: {len(names)} classes, called by these numbers"
    return Labels(labels - low, names, note)


def named(texts: np.ndarray) -> Labels:
    """Texts as classes in alphabetical order. Those that look alike are noted."""
    classes, y = np.unique(texts, return_inverse=True)
    names = tuple(classes.tolist())
    note = note_alike(names, "labels", "classes")
    return Labels(y.astype(np.int64), names, note)


def of_node(given: Any, source: str) -> np.ndarray:
    """The classes (n,) int64 of one node's samples, which alone cannot tell how the federation
    numbers its classes. Raises ValueError for all but whole numbers from 0 and truth values."""
    rows = np.asarray(given)
    if rows.ndim == 2 and (count := one_hot_classes(rows)):
        raise ValueError(
            f"{source}: labels are one-hot rows of {count} classes; give their numbers, y.argmax(1)"
        )
    labels = one_per_sample(rows, source)
    if labels.dtype.kind == "U":
        raise ValueError(
            f"{source}: labels are texts such as {str(labels[0])!r:.80}; number the classes 0, 1, "
            "…, alike on all nodes"
        )
    y = labels.astype(np.int64)
    check_not_negative(y, source)
    return y


def check_not_negative(y: np.ndarray, source: str) -> None:
    """Raise ValueError for labels below 0, naming the first."""
    rows = np.flatnonzero(y < 0)
    if len(rows):
        raise ValueError(
            f"{source}: row {rows[0]} has the label {y[rows[0]]}, which is no class; number the "
            "classes from 0 (0 and 1 in place of -1 and 1), leave out samples without a label, and "
            "give a client without labels its inputs alone"
        )


def check_below(y: np.ndarray, num_classes: int, source: str, task: str = CLASSES) -> None:
    """Raise ValueError for labels that have no output of the network, naming the first."""
    rows = np.flatnonzero(y >= num_classes)
    if len(rows) and task == BINARY:
        raise ValueError(
            f"{source}: row {rows[0]} has the label {y[rows[0]]}; task={BINARY} needs 0 and 1 (or "
            f"-1 and 1); set task={CLASSES} for more classes"
        )
    if len(rows):
        raise ValueError(
            f"{source}: row {rows[0]} has the label {y[rows[0]]}, but the network has "
            f"{num_classes} outputs, for labels from 0 to {num_classes - 1}"
        )


def one_hot_classes(rows: np.ndarray) -> int:
    """The number of columns if each row of `rows` (n, k), k > 1, has one 1 and else 0; 0 if not."""
    if rows.dtype.kind not in "biuf" or rows.shape[1] < 2 or not len(rows):
        return 0
    marks = (rows == 0) | (rows == 1)
    ones = (rows == 1).sum(1)
    return rows.shape[1] if marks.all() and (ones == 1).all() else 0


def is_sparse(low: int, high: int, count: int) -> bool:
    """Whether `count` different numbers from `low` to `high` are no numbers of classes."""
    return high - low >= 10 * count + 100


def _several(labels: np.ndarray) -> str:
    """What is wrong with labels that are not (n,)."""
    if labels.ndim == 2:
        return (
            f"labels have {labels.shape[1]} columns; {ONE_CLASS}; set task={LABELS} for several "
            f"labels of 0 and 1, task={VALUES} for several numbers"
        )
    if labels.ndim > 2:
        return (
            f"labels have the shape {labels.shape}, as masks have; segmentation is not served: "
            f"{ONE_CLASS}"
        )
    return f"labels are a single value, {labels!r:.80}; {ONE_CLASS}"


def _of_one_type(labels: np.ndarray, source: str) -> np.ndarray:
    """Python objects as an array of texts or of numbers. Raises ValueError for gaps, by row."""
    for row, label in enumerate(labels):
        if _is_missing(label):
            raise _missing(row, label, source)
    texts = [isinstance(label, str) for label in labels]
    if all(texts):
        return labels.astype(str)
    if any(texts):
        row = texts.index(not texts[0])
        raise ValueError(
            f"{source}: row 0 has the label {labels[0]!r:.80}, row {row} {labels[row]!r:.80}; give "
            "all labels as texts or all as numbers"
        )
    converted = np.array(labels.tolist())
    if converted.ndim != 1 or converted.dtype.kind == "O":
        raise ValueError(f"{source}: labels are {type(labels[0]).__name__}; {ONE_CLASS}")
    return converted


def lacks_label(y: np.ndarray) -> np.ndarray:
    """Whether each row of labels (n, …) is a missing value, or has one, (n,)."""
    if y.dtype.kind == "f":
        lacking = np.isnan(y)
    elif y.dtype.kind == "O":
        lacking = np.array([_is_missing(label) or _is_mark(label) for label in y.flat])
    elif y.dtype.kind == "U":
        lacking = np.isin(np.char.lower(np.char.strip(y)), list(MISSING_TEXTS))
    else:
        lacking = np.zeros(y.shape, dtype=bool)
    return lacking.reshape(len(y), -1).any(1)


def _is_mark(label: Any) -> bool:
    """Whether it is a text that marks a missing label."""
    return isinstance(label, str) and label.strip().lower() in MISSING_TEXTS


def _is_missing(label: Any) -> bool:
    """Whether it is None, NaN or the missing value of pandas, which equals nothing."""
    if label is None or type(label).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(label, float | np.floating) and bool(np.isnan(label))


def _whole(labels: np.ndarray, source: str) -> np.ndarray:
    """Whole decimals as int64."""
    gaps = np.flatnonzero(np.isnan(labels))
    if len(gaps):
        raise _missing(int(gaps[0]), labels[gaps[0]], source)
    infinite = np.flatnonzero(np.isinf(labels))
    if len(infinite):
        raise ValueError(
            f"{source}: row {infinite[0]} has the label {labels[infinite[0]]}, one of "
            f"{len(infinite)} that are no finite numbers; fill them in, or leave these rows out"
        )
    sizes = np.abs(labels.astype(np.float64))  # LARGEST is no float16
    wrong = np.flatnonzero((labels % 1 != 0) | (sizes > LARGEST))
    if len(wrong):
        raise ValueError(
            f"{source}: labels are decimals such as {labels[wrong[0]]:g} (row {wrong[0]}); "
            f"{ONE_CLASS}; set task={VALUES} to learn these numbers (regression)"
        )
    return labels.astype(np.int64)


def _texts(labels: np.ndarray, source: str) -> np.ndarray:
    """Texts without blanks around them, and without marks of a missing value."""
    try:
        texts = labels.astype(str)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: labels are bytes that are no ASCII text, such as {error.object!r:.40}; "
            "give texts: np.char.decode(y, 'utf-8')"
        ) from error
    for text in np.unique(texts):
        if str(text).strip().lower() in MISSING_TEXTS:
            raise _missing(int(np.flatnonzero(texts == text)[0]), str(text), source)
    return np.char.strip(texts)


def _missing(row: int, label: Any, source: str) -> ValueError:
    shown = repr(label) if isinstance(label, str) else str(label)
    return ValueError(
        f"{source}: row {row} has no label ({shown:.20}); fill it in, or leave the row out"
    )
