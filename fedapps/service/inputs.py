"""Data to serve: images, arrays, tables or a node's folder, as the inputs of a run's network.

Labels in the data are kept apart from the client's share; they are used for scoring alone."""

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clients.core.evaluation import in_units
from fedapps.common.memory_limits import check_size, num_parts
from fedapps.common.tasks import LABELS, VALUES, Targets
from fedapps.results.card import Card
from partitions.arrays import as_tensor
from partitions.datasets.catalog import SENTIMENTS
from partitions.datasets.description import (
    AUTO,
    BY_WORD,
    CATEGORY,
    SIGNAL,
    TABLE,
    TOKENS,
    VECTOR,
    Description,
    listed,
)
from partitions.datasets.encoding import REFUSE
from partitions.datasets.labels import LACKING
from partitions.datasets.readers.broken import left_out
from partitions.datasets.readers.leaf import LABELS_OF_TWEETS
from partitions.datasets.readers.local import read_files
from partitions.datasets.readers.own_leaf import leaf_files
from partitions.datasets.readers.raw import UNLABELED, Raw
from partitions.datasets.readers.tables import read_frame
from partitions.datasets.words import of_length, renumbered
from partitions.shares import META, Samples, Share, without_labels

Data = str | Path | Tensor | np.ndarray  # unlabeled inputs, or where they are

SLACK = 0.01  # scaled inputs may leave [0, 1] by this, as interpolation does
PIXEL_MAX = 255.0
NUMBER = re.compile(r"-?[0-9]+")
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601-2, as PIL converts to grey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """`share` is the client's data, without labels if it is novel; `names` are its samples'.

    `labels`, as `Targets` says, were given with the data; −1 or NaN if not. Rows of `scored` count
    for the scores: all but a training client's own training samples."""

    names: list[str]
    share: Share
    labels: Tensor
    scored: Tensor
    notes: tuple[str, ...] = ()  # what was left out, filled or unknown

    def digest(self) -> str:
        """A digest of the inputs without their labels."""
        samples = self.share.everything
        shape = (len(samples), *samples.x.shape[1:])
        hasher = hashlib.sha256(repr(shape).encode())
        for rows in torch.arange(len(samples)).tensor_split(num_parts(shape)):
            hasher.update(samples[rows][0].contiguous().numpy().tobytes())
        return hasher.hexdigest()[:16]


def read_inputs(data: Data, card: Card) -> Inputs:
    """The data as a client's inputs for a run of this card."""
    if isinstance(data, str | Path):
        return read_input_files(Path(data), card)
    if hasattr(data, "columns"):  # a DataFrame
        notes: list[str] = []
        sizes = (len(data), 0)
        raw = read_frame(data, Path("DataFrame"), True, card.label, card.task, notes, sizes)
        return _read(raw, Path("DataFrame"), card)
    if isinstance(data, Mapping):
        raise ValueError(
            f"inputs are a {type(data).__name__} of columns; give a table: pandas.DataFrame(inputs)"
        )
    x = as_tensor(data)
    # Truth values are 0 and 1, as in files: no whole numbers of the dataset's scale.
    if x.dtype == torch.bool and card.inputs != TOKENS:
        x = x.float()
    return unlabeled(x, card)


def read_input_files(path: Path, card: Card) -> Inputs:
    """The samples at `path` for a run of this card. Raises ValueError if they do not fit it."""
    if (path / META).is_file():
        return _exported(path, card)
    # Pictures are scaled to the run's size only where that is one number.
    side = 0
    if len(card.shape) == 3 and card.shape[1] == card.shape[2]:
        side = card.shape[1]
    declared = card.inputs if card.inputs in (SIGNAL, TOKENS) else AUTO
    if card.texts and leaf_files(path):
        declared = card.texts
    raw = read_files(
        path,
        side,
        later=True,
        label=card.label,
        task=card.task,
        inputs=declared,
        skip=card.skip_broken,
    )
    for note in raw.notes:
        logger.warning("%s", note)
    return _read(raw, path, card)


def _read(raw: Raw, path: Path, card: Card) -> Inputs:
    """What was read at `path` as inputs of the run."""
    notes = list(raw.notes)
    rows = list(raw.rows)
    if raw.inputs is not None and raw.inputs.texts:
        raw = _tokens(raw, path, card)
    elif card.texts and (raw.samples or raw.inputs is None or raw.inputs.kind != VECTOR):
        raise ValueError(
            f"{path} holds no texts; the run takes texts as {card.texts}, in LEAF's JSON: a file, "
            "or its folder"
        )
    if raw.inputs is not None and raw.inputs.kind == TABLE:
        description = raw.inputs
        if card.skip_broken and card.encoding is not None:
            raw, rows = _complete(raw, card, str(path), notes)
        cells = _encoded(raw.x, description, card, str(path), notes)
        for note in notes[len(raw.notes) :]:
            logger.warning("%s", note)
        x = torch.from_numpy(cells)
    else:
        x = torch.from_numpy(np.ascontiguousarray(_match_channels(raw.x, card.shape)))
        if card.encoding is not None:
            columns = listed([feature.name for feature in card.encoding.features])
            notes.append(f"{path} names no columns; they are taken in the run's order: {columns}")
            logger.warning("%s", notes[-1])
    labels = _labels(raw, card, path)
    picture = bool(raw.samples)
    names = list(raw.samples) or list(map(str, rows))
    found = unlabeled(x, card, names=names, labels=labels, picture=picture)
    return replace(found, notes=tuple(notes))


def _tokens(raw: Raw, path: Path, card: Card) -> Raw:
    """Texts as the tokens of the run: its words, or as many characters as it takes. Raises
    ValueError if the run takes no such tokens."""
    assert raw.inputs is not None
    if raw.inputs.texts != card.texts:
        takes = f"texts as {card.texts}" if card.texts else f"numbers of shape {card.shape}"
        raise ValueError(f"{path} holds texts, and the run takes {takes}")
    x = raw.x
    if card.texts == BY_WORD:
        if not card.words:
            raise ValueError(
                "the run does not say which word each of its tokens is; it was made by an older "
                "version: train it again"
            )
        x = renumbered(x, raw.words, card.words)
    y = raw.y
    if card.classes == SENTIMENTS and not raw.classes and raw.labeled:
        numbers = {**LABELS_OF_TWEETS, str(LACKING): LACKING}
        y = np.array([numbers.get(str(label), UNLABELED) for label in y.tolist()])
    return replace(raw, x=of_length(x, card.shape[0]), y=y)


def _complete(raw: Raw, card: Card, source: str, notes: list[str]) -> tuple[Raw, list[int]]:
    """The rows of a table without gaps in the columns that the run takes and does not fill, and
    their numbers."""
    assert raw.inputs is not None and card.encoding is not None
    taken = [feature.name for feature in card.encoding.features]
    if card.encoding.missing != REFUSE:
        taken = []
    known = raw.inputs.names
    used = [known.index(name) for name in taken if name in known]
    gaps = np.isnan(raw.x[:, used]).any(1)
    incomplete = np.flatnonzero(gaps).tolist()
    names = [f"{source}, row {row} has empty cells" for row in incomplete]
    notes += left_out(names, len(gaps), card.skip_broken, "rows")
    return replace(raw, x=raw.x[~gaps], y=raw.y[~gaps]), np.flatnonzero(~gaps).tolist()


def _encoded(
    cells: np.ndarray, description: Description, card: Card, source: str, notes: list[str]
) -> np.ndarray:
    """A table's cells (n, columns) as the columns that the run's network takes, (n, d) float64.

    Raises ValueError for a table that has other columns, or texts where the run knows no names."""
    if card.encoding is not None:
        encoded = card.encoding.encode(cells, description, source, notes)
        used = {feature.name for feature in card.encoding.features}
        others = [name for name in description.names if name not in used]
        if others:
            notes.append(f"{source}: columns that the run does not use: {', '.join(others):.300}")
        return encoded
    for column in description.columns:
        if column.kind == CATEGORY or column.refusal:
            raise ValueError(
                f"{source}: {column.refusal or f'column {column.name} holds texts'}; the run takes "
                f"numbers of shape {card.shape}"
            )
    return cells


def unlabeled(
    x: Tensor,
    card: Card,
    *,
    names: list[str] | None = None,
    labels: Tensor | None = None,
    picture: bool = False,
) -> Inputs:
    """Inputs x (n, *shape) of a novel client: whole numbers as the run's dataset stores them (in a
    `picture` from 0 to 255), or floats in [0, 1].

    Raises ValueError if the run does not know how to standardize them, for NaN or infinity, and for
    floats outside [0, 1]."""
    if card.shape == (1, *x.shape[1:]):  # images without their only channel
        x = x[:, None]
    if tuple(x.shape) == (0, *card.shape):
        raise ValueError(f"inputs have shape {tuple(x.shape)}; give at least one sample")
    if not x.ndim or not len(x) or tuple(x.shape[1:]) != card.shape:
        raise ValueError(f"inputs have shape {tuple(x.shape)}; the run takes (n, *{card.shape})")
    if card.mean is None or card.std is None:
        raise ValueError(
            "the run standardized inputs by constants that only its nodes know; serve a folder "
            "that `fedapps data --export` wrote, which holds them"
        )
    _check_size(x, card)
    scale = card.scale
    if x.is_floating_point():
        scale = 1.0
    elif picture and not (card.scale == 1 and int(x.max()) <= 1):
        # Whatever the run's dataset stores, unless its pixels and these are truth values.
        scale = PIXEL_MAX
    check_values(x, scale, card)
    no_labels = _no_labels(len(x), card)
    # The client never sees the labels.
    index = torch.arange(len(x))
    whole = card.inputs == TOKENS
    samples = Samples(x, no_labels, index, scale, card.mean, card.std, whole=whole)
    if labels is None:
        labels = no_labels
    if not names:
        names = list(map(str, range(len(x))))
    share = _novel(samples, card.targets)
    return Inputs(names, share, labels, torch.ones(len(x)).bool())


def _no_labels(count: int, card: Card) -> Tensor:
    """Labels of `count` samples that have none."""
    if card.task in (LABELS, VALUES):
        return torch.full((count, card.info().num_outputs), torch.nan)
    return torch.full((count,), UNLABELED)


def _novel(samples: Samples, targets: Targets, public: Samples | None = None) -> Share:
    nothing = Samples(samples.x, samples.y, samples.index[:0], samples.scale)
    return Share(nothing, nothing, None, samples, True, {}, public, targets=targets)


def _exported(path: Path, card: Card) -> Inputs:
    share, info = Share.load(path)
    if tuple(info.shape) != card.shape or info.num_classes != len(card.classes):
        raise ValueError(
            f"{path} holds inputs of shape {tuple(info.shape)} and {info.num_classes} classes; the "
            f"run has {card.shape} and {len(card.classes)}"
        )
    samples = share.everything
    x, labels = samples.x, samples.y
    _check_size(x, card)
    _check_finite(x, str(path))
    if not x.is_floating_point():
        _check_range(x, samples.scale, card)
    if card.targets.std:  # the node's folder may have been made with another federation's moments
        labels = _standardised(in_units(labels.double(), share.targets), card)
    scored = torch.ones(len(labels), dtype=torch.bool)
    if share.novel:
        hidden = replace(samples, y=without_labels(samples.y))
        share = _novel(hidden, card.targets, share.public)
    else:
        scored[share.train.index] = False
    return Inputs(list(map(str, range(len(x)))), share, labels, scored)


def check_values(x: Tensor, scale: float, card: Card) -> None:
    """Raise ValueError for NaN and infinity, for whole numbers outside 0 … `scale`, and for floats
    outside [0, 1], unless the run takes any numbers."""
    _check_finite(x, "the array")  # files are checked where they are read
    _check_range(x, 1.0 if x.is_floating_point() else scale, card)


def _check_finite(x: Tensor, where: str) -> None:
    """Raise ValueError for values that are no finite float32: one would spoil all predictions."""
    if not x.is_floating_point():
        return
    parts = x.tensor_split(num_parts(x.shape))
    bad = torch.cat([torch.isfinite(p.float()).logical_not().flatten(1).sum(1) for p in parts])
    if bad.any():
        raise ValueError(
            f"{where} holds {int(bad.sum())} values that are NaN, infinite or too large, the first "
            f"in sample {int(bad.nonzero()[0])}; fill them in, or leave such samples out"
        )


def _check_size(x: Tensor, card: Card) -> None:
    """Raise ValueError if inputs, logits and predictions of all samples are above the limit."""
    row = 4 * math.prod(card.shape) + 8 * len(card.classes) + 200
    check_size(row * len(x), f"the model's answer to {len(x)} samples")


def _check_range(x: Tensor, scale: float, card: Card) -> None:
    """Raise ValueError for values outside 0 … `scale`, unless the run takes any numbers."""
    if card.scale == 1:  # the run's dataset stores features, which have no range
        return
    slack = 0.0
    values: Tensor | np.ndarray = x
    if x.is_floating_point():
        slack = SLACK
    else:
        values = x.cpu().numpy()  # torch has no minimum of some unsigned integers
    low = float(values.min())
    high = float(values.max())
    if not -slack <= low <= high <= scale + slack:
        raise ValueError(
            f"inputs are numbers from {low:g} to {high:g}; the run takes whole numbers (of an "
            f"integer dtype) from 0 to {card.scale:g}, or these divided by it"
        )


def _match_channels(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Images (n, c, h, w) with the channels of `shape`; other inputs unchanged."""
    if x.ndim != 4 or len(shape) != 3 or x.shape[1] == shape[0]:
        return x
    if shape[0] == 1 and x.shape[1] == 3:
        grey = np.tensordot(LUMA, x, (0, 1))[:, None]
        if x.dtype.kind in "ui":
            grey = grey.round().astype(x.dtype)
        return grey
    if x.shape[1] == 1:
        return np.repeat(x, shape[0], axis=1)
    return x  # its shape is refused later, with the run's


def _numbers(raw: Raw, card: Card, path: Path) -> Tensor:
    """Several labels or standardised values (n, k). Raises ValueError for another number of them
    than the run has."""
    outputs = card.info().num_outputs
    y = torch.from_numpy(np.asarray(raw.y, dtype=np.float64))
    if y.ndim != 2 or y.shape[1] != outputs:
        raise ValueError(f"{path} holds labels {tuple(y.shape)}; the run takes (n, {outputs})")
    return _standardised(y, card) if card.targets.std else y.float()


def _standardised(values: Tensor, card: Card) -> Tensor:
    """Values (n, k) in their own unit as the run's networks give them."""
    mean = torch.tensor(card.targets.mean, dtype=torch.float64)
    deviation = torch.tensor(card.targets.std, dtype=torch.float64)
    return ((values - mean) / deviation).float()


def _labels(raw: Raw, card: Card, path: Path) -> Tensor:
    """Labels as the run numbers its classes; −1 for other classes, with a warning.

    Names are matched with the run's. Numbers are, where the run calls its classes by numbers; else
    they are the run's own numbers."""
    if not raw.labeled:
        return _no_labels(len(raw.y), card)
    if card.task in (LABELS, VALUES):
        return _numbers(raw, card, path)
    classes = {name: number for number, name in enumerate(card.classes)}
    named_by_numbers = all(NUMBER.fullmatch(name) for name in card.classes)
    values, at, counts = np.unique(raw.y, return_inverse=True, return_counts=True)
    numbers = []
    lacking = 0  # samples without a label, which the reader has named
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        number = UNLABELED
        if value == LACKING:
            lacking += count
        if raw.classes:
            # A sample without a label is below 0, which would name one of the last classes.
            if value >= 0:
                number = classes.get(raw.classes[value], UNLABELED)
        elif named_by_numbers:
            number = classes.get(str(value), UNLABELED)
        elif 0 <= value < len(classes):
            number = value
        numbers.append(number)
    labels = np.array(numbers, dtype=np.int64)[at]
    if unknown := int((labels == UNLABELED).sum()) - lacking:
        logger.warning(
            "%s: %d labels are none of the run's %d classes (%s); their samples are not scored",
            path, unknown, len(classes), ", ".join(list(classes)[:10]),
        )  # fmt: skip
    return torch.from_numpy(labels)
