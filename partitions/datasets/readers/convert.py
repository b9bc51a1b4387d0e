"""Arrays of a user's data in the forms that datasets have: inputs, and parts joined to one."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedapps.common.memory_limits import check_size
from fedapps.common.tasks import AUTO, BINARY, CLASSES, LABELS, VALUES
from partitions.datasets.description import (
    IMAGE,
    KINDS,
    OF_ARRAYS,
    SIGNAL,
    TOKENS,
    VECTOR,
    Description,
    listed,
)
from partitions.datasets.labels import LACKING, Labels, check_binary, is_sparse, named, numbered
from partitions.datasets.readers.columns import out_of_range
from partitions.datasets.readers.raw import Raw, concatenate

# What inputs with so many axes, that of the samples included, may be; the first by default.
AXES = {2: (VECTOR, TOKENS), 3: (IMAGE, SIGNAL), 4: (IMAGE,)}
MANY_CLASSES = 50  # above it, and with fewer samples of each than the next, labels may be values
MANY_TEXTS = 20
SAMPLES_OF_A_CLASS = 5
LARGEST_IN_FLOAT32 = 2**24  # it has all whole numbers up to this one
MAX_FLOAT = 10.0  # larger floats in images are hardly scaled or standardized

logger = logging.getLogger(__name__)


def as_inputs(
    x: np.ndarray, source: Path | str, later: bool, notes: list[str], declared: str = AUTO
) -> tuple[np.ndarray, Description]:
    """Inputs in the form that datasets have, and what they are: as `declared`, or what their axes
    and type leave no choice of.

    Tokens are int64. Vectors and signals of float64 stay float64, since they are scaled by column.
    Their whole numbers become float64 where float32 would round them. Inputs of whole numbers 0 and
    1 alone are truth values, as float32. Other inputs are as `scaled_pixels` makes them. With
    `later`, for a later client, the axes decide. Raises ValueError for inputs with several
    readings, and for those that are not what was declared."""
    x = _numbers(x, source)
    if x.ndim and not len(x):
        raise ValueError(f"{source}: inputs have the shape {x.shape}; give at least one sample")
    kind = _kind(x, source, declared, later)
    if declared == AUTO and not later and _may_be_tokens(x, kind):
        notes.append(
            f"{source}: inputs are decimals that are whole numbers up to {x.max():g}: quantities "
            f"(inputs={VECTOR}); inputs={TOKENS} reads token ids"
        )
    if kind == TOKENS:
        return _tokens(x, source), Description(TOKENS)
    if kind in (VECTOR, SIGNAL) and _float32_rounds(x):
        x = x.astype(np.float64)
    if kind in (VECTOR, SIGNAL) and x.dtype.kind == "f":
        check_finite(x, source)
        if wrong := out_of_range(x):
            raise ValueError(f"{source}: inputs hold {wrong}")
    if kind == VECTOR and x.dtype == np.float64:
        check_size(x.nbytes, source)
        return x, Description(VECTOR)
    if kind == SIGNAL:
        if x.dtype != np.float64:
            x = x.astype(np.float32)
        check_size(x.nbytes, source)
        return x, Description(SIGNAL)
    if not later and x.dtype.kind in "iu" and x.size and x.min() == 0 and x.max() == 1:
        notes.append(
            f"{source}: inputs are the whole numbers 0 and 1: truth values, not divided by 255"
        )
        x = x.astype(np.float32)
    return scaled_pixels(x, source, later, notes), Description(kind)


def truth_pictures(raw: Raw, source: Path | str) -> Raw:
    """The same samples; pictures whose pixels are all 0 or 1 are truth values, as float32."""
    x = raw.x
    if x.dtype != np.uint8 or not x.size or x.min() != 0 or x.max() != 1:
        return raw
    check_size(4 * x.size, source)
    note = f"{source}: all pixels are 0 or 1: truth values, not divided by 255"
    return replace(raw, x=x.astype(np.float32)).noted(note)


def _float32_rounds(x: np.ndarray) -> bool:
    """Whether these are whole numbers that float32 does not hold, as points in time."""
    if x.dtype.kind not in "iu" or not x.size:
        return False
    return int(x.max()) > LARGEST_IN_FLOAT32 or int(x.min()) < -LARGEST_IN_FLOAT32


def _numbers(x: np.ndarray, source: Path | str) -> np.ndarray:
    """Inputs (n, …) as numbers: truth values become 0 and 1. Raises ValueError for other types,
    and for samples without an axis of their own."""
    if x.dtype.kind == "b":
        return x.astype(np.float32)
    if not x.dtype.isnative:  # of another machine, or of a format such as FITS
        x = x.astype(x.dtype.newbyteorder("="))
    if x.dtype == object and x.ndim == 1:
        lengths = {len(row) for row in x if isinstance(row, np.ndarray | list)}
        if len(lengths) > 1:
            raise ValueError(
                f"{source}: inputs are lists of {min(lengths)} to {max(lengths)} values; pad them "
                "to one length"
            )
    if x.dtype.kind not in "uif":
        raise ValueError(
            f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed, or a table "
            "(.csv) with a column for each of them"
        )
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise ValueError(
            f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed, one number for "
            "each sample as (n, 1): x[:, None]"
        )
    return x


def _kind(x: np.ndarray, source: Path | str, declared: str, later: bool) -> str:
    """The kind of inputs x (n, …). Raises ValueError if their axes cannot be of the declared kind,
    and if it is undeclared and there are several."""
    axes = AXES.get(x.ndim, (IMAGE,))
    if declared not in (AUTO, *OF_ARRAYS):
        raise ValueError(
            f"{source}: inputs are {x.dtype} {x.shape}; inputs={declared} needs texts, in LEAF's "
            f"JSON; set it to one of {', '.join(OF_ARRAYS)}"
        )
    if declared != AUTO:
        if declared not in axes:
            raise ValueError(
                f"{source}: inputs have the shape {x.shape}; inputs={declared} needs (n, "
                f"*{KINDS[declared]})"
            )
        return declared
    is_whole = x.dtype.kind in "iu" and x.dtype != np.uint8
    if later or x.dtype.kind not in "iuf" or not x.size:
        return axes[0]
    if x.ndim == 2 and is_whole and x.min() >= 0 and x.max() > 1:
        raise ValueError(
            f"{source}: inputs are whole numbers from {x.min()} to {x.max()}, {x.shape}; set "
            f"inputs={TOKENS} if they number words or characters, for an embedding, or "
            f"inputs={VECTOR} if they are quantities"
        )
    if x.ndim == 4 and _may_have_channels_last(x.shape):
        raise ValueError(
            f"{source}: inputs have the shape {x.shape}; if these are images of {x.shape[3]} "
            "channels, write the channels first: x.transpose(0, 3, 1, 2); if they are images of "
            f"{x.shape[2]}×{x.shape[3]} pixels with {x.shape[1]} channels, set inputs={IMAGE}"
        )
    if x.ndim == 3 and x.dtype.kind == "f":
        raise ValueError(
            f"{source}: inputs are decimals with the shape {x.shape}; set inputs={SIGNAL} for "
            f"{x.shape[1]} channels of {x.shape[2]} steps each, or inputs={IMAGE} for images of "
            f"{x.shape[1]}×{x.shape[2]} pixels with one channel"
        )
    if x.ndim == 3 and is_whole and (x.min() < 0 or x.max() > 255):
        raise ValueError(
            f"{source}: inputs {x.shape} are whole numbers from {x.min()} to {x.max()}; give bytes "
            f"from 0 to 255 if these are grey images, or set inputs={SIGNAL} for {x.shape[1]} "
            f"channels of {x.shape[2]} steps each"
        )
    return axes[0]


def _may_be_tokens(x: np.ndarray, kind: str) -> bool:
    """Whether decimals are whole numbers, and some are above 1, as token ids are."""
    if kind != VECTOR or x.dtype.kind != "f" or not x.size or x.shape[1] < 2:
        return False
    return bool(x.min() >= 0 and x.max() > 1 and (x % 1 == 0).all())


def _tokens(x: np.ndarray, source: Path | str) -> np.ndarray:
    """Whole numbers (n, time) as int64. Raises ValueError for others."""
    with np.errstate(invalid="ignore"):
        wrong = x.dtype.kind not in "iuf" or (x % 1 != 0).any() or (x < 0).any()
    if wrong:
        raise ValueError(
            f"{source}: inputs={TOKENS} needs whole numbers from 0 on; these are {x.dtype}, and "
            "some are none"
        )
    check_size(8 * x.size, source)
    return x.astype(np.int64)


def check_finite(x: np.ndarray, source: Path | str) -> None:
    """Raise ValueError for NaN and infinity, naming the first sample."""
    finite = np.isfinite(x).reshape(len(x), -1).all(1)
    if not finite.all():
        raise ValueError(
            f"{source}: inputs hold NaN or infinity, the first in sample {int(finite.argmin())}; "
            "fill it in, or leave such samples out"
        )


def scaled_pixels(
    x: np.ndarray, source: Path | str, later: bool = False, notes: list[str] | None = None
) -> np.ndarray:
    """Inputs in the form that datasets have: uint8 (0 … 255) or float32, images channels first.

    Images may come as (n, H, W) or (n, H, W, C). Whole numbers in images must be bytes: ValueError
    for numbers outside of 0 … 255. With `later`, for a later client, whole numbers of other types
    than uint8 become int64 instead. Remarks for the user are added to `notes`, or logged if `notes`
    is None."""
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise ValueError(f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed")
    remarks: list[str] = []
    dtype: np.dtype
    may_be_bytes = x.dtype.kind == "f" or not later  # a later client's whole numbers stay whole
    if x.dtype == np.uint8 or (may_be_bytes and _are_bytes(x, source, remarks)):
        dtype = np.dtype(np.uint8)
    elif later and x.dtype.kind in "ui":
        dtype = np.dtype(np.int64)
    else:
        dtype = np.dtype(np.float32)
    if notes is not None:
        notes += remarks
    else:
        for remark in remarks:
            logger.warning("%s", remark)
    check_size(dtype.itemsize * x.size, source)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and _has_channels_last(x.shape):
        x = x.transpose(0, 3, 1, 2)
    x = x.astype(dtype, copy=False)
    if x.dtype.kind == "f":
        check_finite(x, source)
    return x


def _may_have_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether four sizes may be (n, H, W, C), though C is no usual number of channels: H and W are
    the same, or C is the smallest of the three."""
    _, first, second, last = shape
    if _has_channels(shape):
        return False
    return first == second != last or last < min(first, second)


def _has_channels(shape: tuple[int, ...]) -> bool:
    """Whether the second or the last of four sizes is a usual number of channels."""
    return shape[1] in (1, 3) or _has_channels_last(shape)


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether a shape of four sizes is (n, H, W, C): C is 1, 3 or 4, and the second is no C."""
    _, first, _, last = shape
    if last in (1, 3):
        return first not in (1, 3)
    return last == 4 and first > 4


def _are_bytes(x: np.ndarray, source: Path | str, remarks: list[str]) -> bool:
    """Whether x holds images of whole numbers, though not as uint8; ValueError for numbers outside
    of 0 … 255. Adds a remark about them, and about large floats."""
    if x.ndim < 3 or not x.size or x.dtype == np.uint8:
        return False
    low, high = x.min(), x.max()
    if x.dtype.kind == "f":
        return _float_bytes(x, source, float(low), float(high), remarks)
    if low < 0 or high > 255:
        raise ValueError(
            f"{source}: images hold whole numbers from {low} to {high}; give bytes from 0 to 255, "
            "or scale them to [0, 1] and store them as float32"
        )
    remarks.append(
        f"{source}: {x.dtype} images hold whole numbers up to {high}; they are divided by 255, as "
        "bytes are"
    )
    return True


def _float_bytes(
    x: np.ndarray, source: Path | str, low: float, high: float, remarks: list[str]
) -> bool:
    """Whether images of floats from `low` to `high` are bytes that were stored as floats."""
    if max(-low, high) <= MAX_FLOAT:
        return False
    if low >= 0 and high <= 255 and (x % 1 == 0).all():
        remarks.append(
            f"{source}: images hold whole floats up to {high:g}; they are divided by 255, as bytes "
            "are"
        )
        return True
    remarks.append(
        f"{source}: images hold floats from {low:g} to {high:g}; only bytes (whole numbers from 0 "
        "to 255) are divided by 255: divide these, or set standardize=training-clients"
    )
    return False


def joined(parts: list[Raw], source: Path | str, later: bool = False, task: str = AUTO) -> Raw:
    """The parts of a dataset as one, with classes 0, 1, … as `partitions.datasets.labels` numbers
    them. For a `later` client labels keep their numbers: the run has numbered its classes. `task`
    is what the labels were declared to be."""
    _check_fit(parts, source)
    raw = concatenate(parts)
    if not raw.labeled:
        return raw
    if raw.y.ndim == 2:
        return replace(raw, task=VALUES if raw.y.dtype.kind == "f" else LABELS)
    if task == BINARY:
        raw = replace(raw, task=BINARY)
    if raw.classes:
        return raw
    if task == AUTO and not later:
        _check_few_classes(raw.y, source)
    labels = _later(raw.y) if later else numbered(raw.y)
    if task == BINARY:
        check_binary(labels, str(source))
    raw = replace(raw, y=labels.y, classes=labels.classes)
    if labels.note:
        raw = raw.noted(f"{source}: {labels.note}")
    if not later:
        raw = raw.noted(*_empty_classes(raw, source), *_unseen_classes(raw, source))
    return raw


def _check_fit(parts: list[Raw], source: Path | str) -> None:
    """Raise ValueError if a part's inputs, labels or columns do not fit to those of the first."""
    first = parts[0]
    for part in parts:
        if part.y.shape[:1] != part.x.shape[:1]:
            raise ValueError(f"{source}: {len(part.x)} inputs, but {len(part.y)} labels")
        if part.y.shape[1:] != first.y.shape[1:]:
            raise ValueError(
                f"{source}: training labels have the shape {first.y.shape}, test labels "
                f"{part.y.shape}; set task= to what both are"
            )
        if part.x.shape[1:] != first.x.shape[1:] or part.x.dtype.kind != first.x.dtype.kind:
            raise ValueError(f"{source}: training and test inputs differ in shape or type")
        missing = sorted(first.columns.keys() - part.columns.keys())
        if missing:
            raise ValueError(
                f"{source}: the training samples have columns that the test samples lack: "
                f"{', '.join(missing)}; both need them"
            )
        if (part.y.dtype.kind == "U") != (first.y.dtype.kind == "U"):
            raise ValueError(
                f"{source}: training and test labels differ in type; give both as texts or both as "
                "numbers"
            )


def _empty_classes(raw: Raw, source: Path | str) -> list[str]:
    """A note on classes without a sample, as 3 is where samples have 2 and 4."""
    present = np.unique(raw.y)
    # The caller refuses numbers below 0, and those that leave most classes empty.
    if not len(present) or present[0] < 0 or is_sparse(0, int(present[-1]), len(present)):
        return []
    count = len(raw.classes) or int(present[-1]) + 1
    empty = np.setdiff1d(np.arange(count), present).tolist()
    if not empty:
        return []
    names = [raw.classes[label] if raw.classes else str(label) for label in empty]
    return [
        f"{source}: no sample has the class {listed(names)} (empty: {len(empty)} of {count} "
        "classes), but the network has an output for each class; give the labels as texts if these "
        "numbers are no classes"
    ]


def _unseen_classes(raw: Raw, source: Path | str) -> list[str]:
    """A note on classes that no training sample has."""
    if not 0 < raw.num_train < len(raw.y):
        return []
    held_out = raw.y[raw.num_train :]
    unseen = np.setdiff1d(held_out, raw.y[: raw.num_train]).tolist()
    if not unseen:
        return []
    names = [raw.classes[label] if raw.classes else str(label) for label in unseen]
    count = int(np.isin(held_out, unseen).sum())
    return [
        f"{source}: no training sample has the class {listed(names)}, of {count} samples held out: "
        "no network can learn it"
    ]


def _check_few_classes(y: np.ndarray, source: Path | str) -> None:
    """Raise ValueError for whole numbers that may be values as well as classes: many of them, with
    few samples each."""
    count = len(np.unique(y))
    if y.dtype.kind == "U" and count > MANY_TEXTS and len(y) < SAMPLES_OF_A_CLASS * count:
        raise ValueError(
            f"{source}: labels are {count} different texts such as {str(y[0])!r:.40} in {len(y)} "
            f"samples; set task={CLASSES} if each is a class, and write numbers with a decimal "
            "point and without a unit"
        )
    if y.dtype.kind not in "iu":
        return
    if count > MANY_CLASSES and len(y) < SAMPLES_OF_A_CLASS * count:
        raise ValueError(
            f"{source}: labels are {count} different whole numbers in {len(y)} samples; set "
            f"task={VALUES} to learn these numbers (regression), or task={CLASSES} if each is a "
            "class"
        )


def _later(y: np.ndarray) -> Labels:
    """The labels of a later client: texts as classes, numbers as they are. An empty text is none,
    `LACKING`."""
    if y.dtype.kind != "U":
        return Labels(y.astype(np.int64))
    known = y != ""
    labels = named(y[known])
    numbers = np.full(len(y), LACKING)
    numbers[known] = labels.y
    return replace(labels, y=numbers)
