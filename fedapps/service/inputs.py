"""Data to serve: images, arrays, tables or a node's own folder, as the inputs that a run knows.

Labels that come along are kept apart from what a client holds; they can only score."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedapps.results.card import Card
from partitions.readers.local import read_local
from partitions.readers.raw import UNLABELED
from partitions.shares import META, Samples, Share

SLACK = 0.01  # that numbers in [0, 1] may lie outside, as an interpolation leaves them
PICTURE = 255.0  # largest value of a picture's pixel
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601-2, as PIL makes grey


@dataclass(frozen=True)
class Inputs:
    """`share` is what the client holds, without labels if it is novel; `names` of its samples.

    `labels` (n,) are those that came along, −1 where none did. Rows of `scored` may be scored:
    a training client's own training samples may not."""

    names: list[str]
    share: Share
    labels: Tensor
    scored: Tensor

    def digest(self) -> str:
        """Tells data apart; labels do not count."""
        x = self.share.everything[:][0].contiguous().numpy()
        return hashlib.sha256(repr(x.shape).encode() + x.tobytes()).hexdigest()[:16]


def read_inputs(path: Path, card: Card) -> Inputs:
    """The samples at `path` for a run of this card. Raises ValueError for what does not fit it."""
    if (path / META).is_file():
        return _exported(path, card)
    square = len(card.shape) == 3 and card.shape[1] == card.shape[2]
    raw = read_local(path, card.shape[1] if square else 0, whole=True)
    x = torch.from_numpy(np.ascontiguousarray(_fitted(raw.x, card.shape, path)))
    names = list(raw.samples) or [str(row) for row in range(len(x))]
    labels = _labels(raw.y, raw.classes, card)
    return unlabeled(x, card, names=names, labels=labels, picture=bool(raw.samples))


def unlabeled(
    x: Tensor,
    card: Card,
    *,
    names: list[str] | None = None,
    labels: Tensor | None = None,
    picture: bool = False,
) -> Inputs:
    """Inputs x (n, *shape) of a novel client: whole numbers as the run's dataset stores them (a
    `picture`'s from 0 to 255), others scaled to [0, 1] already.

    Raises ValueError if the run does not tell how to standardise them, for NaN or infinity, and for
    numbers that are neither whole nor scaled."""
    if not len(x) or tuple(x.shape[1:]) != card.shape:
        raise ValueError(f"inputs have shape {tuple(x.shape)}; the run takes (n, *{card.shape})")
    if card.mean is None or card.std is None:
        raise ValueError(
            "the run standardised inputs by constants that only its nodes know; serve a folder "
            "that `fedapps data --export` wrote, which holds them"
        )
    scale = 1.0 if x.is_floating_point() else PICTURE if picture else card.scale
    _check_finite(x, "the array")  # files are checked where they are read
    if x.is_floating_point() and card.scale != 1 and not -SLACK <= x.min() <= x.max() <= 1 + SLACK:
        raise ValueError(
            f"inputs are numbers from {float(x.min()):g} to {float(x.max()):g}; the run takes "
            f"whole numbers (of an integer dtype) from 0 to {card.scale:g}, or these divided by it"
        )
    none = torch.full((len(x),), UNLABELED)
    labels = none if labels is None else labels
    everything = Samples(x, none, torch.arange(len(x)), scale, card.mean, card.std)
    names = names or [str(row) for row in range(len(x))]
    return Inputs(names, _novel(everything, None), labels, torch.ones(len(x), dtype=torch.bool))


def _novel(samples: Samples, public: Samples | None) -> Share:
    nothing = Samples(samples.x, samples.y, samples.index[:0], samples.scale)
    return Share(nothing, nothing, None, samples, True, {}, public)


def _exported(path: Path, card: Card) -> Inputs:
    share, info = Share.load(path)
    if tuple(info.shape) != card.shape or info.num_classes != len(card.classes):
        raise ValueError(
            f"{path} holds inputs of shape {tuple(info.shape)} and {info.num_classes} classes; the "
            f"run has {card.shape} and {len(card.classes)}"
        )
    every = share.everything
    labels, n = every[:][1], len(every)
    _check_finite(every.x, str(path))
    scored = torch.ones(n, dtype=torch.bool)
    if share.novel:
        hidden = Samples(every.x, torch.full((n,), UNLABELED), every.index, every.scale,
                         every.mean, every.std)  # fmt: skip
        share = _novel(hidden, share.public)
    else:
        scored[share.train.index] = False
    return Inputs([str(row) for row in range(n)], share, labels, scored)


def _check_finite(x: Tensor, where: str) -> None:
    """Raise ValueError for values that are no finite float32: one spoils what all are served."""
    bad = ~torch.isfinite(x.float())
    if bad.any():
        first = int(bad.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"{where} holds {int(bad.sum())} values that are NaN, infinite or too large, the first "
            f"in sample {first}; fill them in, or leave such samples out"
        )


def _fitted(x: np.ndarray, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Images with the run's number of channels; flat inputs as they are."""
    if x.ndim == 4 and len(shape) == 3 and x.shape[1] != shape[0]:
        if shape[0] == 1 and x.shape[1] == 3:
            grey = np.tensordot(LUMA, x, (0, 1))[:, None]
            x = grey.round().astype(x.dtype) if x.dtype.kind in "ui" else grey
        elif x.shape[1] == 1:
            x = np.repeat(x, shape[0], axis=1)
    if x.shape[1:] != shape:
        raise ValueError(f"{path} holds inputs of shape {x.shape[1:]}; the run takes {shape}")
    return x


def _labels(y: np.ndarray, names: tuple[str, ...], card: Card) -> Tensor:
    """Labels as the run numbers its classes, by name where there are names; −1 where they are
    none of its classes."""
    if names:
        number = {name: i for i, name in enumerate(card.classes)}
        places = np.array([number.get(name, UNLABELED) for name in names])
        y = np.where(y >= 0, places[np.maximum(y, 0)], UNLABELED)
    y = np.where((y >= 0) & (y < len(card.classes)), y, UNLABELED)
    return torch.from_numpy(y.astype(np.int64))
