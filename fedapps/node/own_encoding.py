"""A node's share in the encoding that all nodes of a run use: what it tells, and what it gets.

See `partitions.datasets.statistics`: a node sends sums over its training rows, never a row."""

from collections.abc import Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.core.protocol import ENCODING, SHAPE
from fedapps.common.errors import Refusal
from fedapps.common.once import say_once
from fedapps.common.tasks import VALUES
from partitions.datasets.description import IMAGE, TABLE, Description
from partitions.datasets.distance import farthest, threshold, warning, words
from partitions.datasets.encoding import MEAN, gaps_in
from partitions.datasets.readers.columns import read_column
from partitions.datasets.shared_encoding import SharedEncoding
from partitions.datasets.statistics import (
    Statistics,
    Sums,
    array_sums,
    kind_of_shape,
    number_sums,
    table_sums,
)
from partitions.datasets.statistics_reading import read_encoding
from partitions.items import parts_of
from partitions.shares import Samples, Share

SOURCE = "a table"
ASKS = "standardize='training-clients'"


class TableReader:
    """Reads the columns of a node's tables as inputs (n, d) of the run's `encoding`.

    Before there is one, the cells of the first table, which holds the training rows, stay in
    `training` for their sums, and inputs are zeros."""

    def __init__(self, encoding: SharedEncoding | None) -> None:
        self._encoding = encoding
        self.training: tuple[Description, np.ndarray] | None = None

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Inputs (n, d) float64 of columns by name. Raises ValueError for columns that the encoding
        does not have, or has otherwise."""
        description, cells = _read(columns)
        if self._encoding is None:
            if self.training is None:
                self.training = (description, cells)
            return np.zeros(cells.shape)
        if self._encoding.table is None:
            raise ValueError(
                f"data returned a table, but the run's inputs are a {self._encoding.inputs} "
                "without names; give all nodes the same form"
            )
        notes: list[str] = []
        encoded = self._encoding.table.encode(cells, description, SOURCE, notes)
        for note in notes:
            say_once(note, WARNING)
        return encoded


def _read(columns: Mapping[str, Any]) -> tuple[Description, np.ndarray]:
    """The columns' description and cells (n, columns)."""
    import pandas as pd

    read = []
    cells = []
    for name, given in columns.items():
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
        column, numbers = read_column(str(name), pd.Series(values))
        read.append(column)
        cells.append(numbers)
    if not read:
        raise ValueError(f"{SOURCE} has no column of inputs")
    return Description(TABLE, tuple(read)), np.stack(cells, 1)


def encoding_in(message: Mapping[str, Any]) -> SharedEncoding | None:
    """The encoding in a message's config; None if the server has none yet. Raises ValueError for
    a damaged one."""
    return read_encoding(message[ENCODING]) if ENCODING in message else None


def statistics_of(share: Share, reader: TableReader, missing: str, least_rows: int) -> Statistics:
    """The sums over the columns of the client's training rows.

    Raises Refusal for a novel client, and ValueError for inputs that cannot be scaled and for gaps
    unless `missing` is "mean"."""
    if share.novel:
        raise Refusal("a novel client sends no sums of its columns")
    samples = share.train
    _check_scalable(samples)
    if reader.training is None:
        kind, columns = _of_arrays(samples)
    else:
        kind = TABLE
        description, cells = reader.training
        for number, column in enumerate(description.columns):
            if column.refusal:
                raise ValueError(f"{SOURCE}: {column.refusal}")
            gaps = np.isnan(cells[:, number])
            if gaps.any() and missing != MEAN:
                raise ValueError(gaps_in(SOURCE, column, gaps))
        columns = table_sums(cells, description, least_rows)
    targets: tuple[Sums, ...] = ()
    if share.targets.task == VALUES:
        values = samples.labels().double().numpy()
        targets = tuple(number_sums(str(i), column) for i, column in enumerate(values.T))
    return Statistics(kind, len(samples), columns, targets)


def _of_arrays(samples: Samples) -> tuple[str, tuple[Sums, ...]]:
    """The kind of inputs without names, and the sums of their columns."""
    x = samples.x[samples.index]
    kind = kind_of_shape(tuple(x.shape[1:]))
    if x.is_floating_point() and not x.isfinite().all():
        row = int((~x.flatten(1).isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"row {row} of the inputs holds NaN or infinity; fill them in, leave these rows out, "
            "or give a table with names of columns and missing='mean'"
        )
    return kind, array_sums(x.numpy(), kind)


def encoded(share: Share, encoding: SharedEncoding) -> Share:
    """The share, whose inputs and values to predict are those of the run's encoding."""
    _check_scalable(share.everything)
    shape = tuple(share.everything.x.shape[1:])
    if encoding.table is None and kind_of_shape(shape) != encoding.inputs:
        raise ValueError(
            f"inputs are of shape {shape}, but the run's are a {encoding.inputs}; give all nodes "
            "the same form"
        )
    if encoding.table is not None and shape != (len(encoding.mean),):
        raise ValueError(
            f"data returned arrays {shape}, but the run's inputs are a table; give a table with "
            f"the columns {', '.join(f.name for f in encoding.table.features):.500}"
        )
    mean, std = encoding.mean, encoding.std
    if encoding.inputs != IMAGE and shape[0] != len(mean):
        raise ValueError(f"inputs have {shape[0]} columns or channels; the run's have {len(mean)}")

    def scaled(samples: Samples) -> Samples:
        y = samples.y
        if encoding.targets.std and y.is_floating_point():
            y = (y - y.new_tensor(encoding.targets.mean)) / y.new_tensor(encoding.targets.std)
            y = y.float()
        if encoding.inputs == IMAGE:
            return replace(samples, y=y, mean=mean[0], std=std[0])
        return replace(samples, y=y, mean=mean, std=std)

    if share.public is not None and encoding.table is not None:
        raise ValueError(f"public= gives inputs without names, which {ASKS} cannot read as a table")
    return replace(
        share.with_samples(scaled),
        public=None if share.public is None else scaled(share.public),
        targets=encoding.targets if encoding.targets.std else share.targets,
    )


def say_distance(share: Share, encoding: SharedEncoding) -> None:
    """Say once whether a novel client's inputs, which are `encoded`, look like training."""
    x = share.everything[:][0].double()
    if encoding.inputs == IMAGE:
        means = [float(x.mean())]
    else:
        means = x.reshape(*x.shape[:2], -1).mean((0, 2)).tolist()
    distances = {name: means[position] for position, name in encoding.numbers().items()}
    if not distances:
        return
    limit = threshold(encoding.largest, len(x))
    beyond = warning(distances, limit)
    if beyond:
        say_once(f"{beyond}; compare units and columns with training's", WARNING)
        return
    ((name, distance),) = list(farthest(distances).items())[:1]
    say_once(f"inputs look like training; the farthest is {words(name, distance)}")


def unencoded(share: Share, message: Mapping[str, Any]) -> Share:
    """The share with zeros as inputs, of the shape that the server names: it says who the client
    is, before there is an encoding. Raises Refusal if the server makes none."""
    if SHAPE not in message:
        raise Refusal(
            f"client_app was given {ASKS}, and the server's messages hold no encoding of inputs; "
            f"give server_app {ASKS}, or scale the samples in `data=`"
        )
    _check_scalable(share.everything)
    shape = tuple(int(size) for size in message[SHAPE])

    def blank(samples: Samples) -> Samples:
        x = torch.zeros(1).expand(len(samples.x), *shape)
        return replace(samples, x=x)

    return share.with_samples(blank)


def _check_scalable(samples: Samples) -> None:
    """Raise ValueError for samples that are read anew for each mini-batch, or are packed."""
    if samples.fixed and not parts_of(samples):
        return
    what = "items" if not samples.fixed else "several input tensors"
    raise ValueError(
        f"data returned {what}, and {ASKS} scales tables (a DataFrame, a dict of columns), arrays "
        "and tensors; return one of these, or leave it out and scale the samples in `data=`"
    )
