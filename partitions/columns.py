"""Which columns of a user's table are inputs, which one names the clients, and which rows are
complete in them."""

import hashlib
from dataclasses import replace

import numpy as np
import torch

from fedapps.common.spelling import did_you_mean
from partitions.datasets.description import TABLE, Description, names_in
from partitions.datasets.encoding import REFUSE
from partitions.datasets.loading import Dataset, Info
from partitions.datasets.readers.broken import left_out
from partitions.rules.registry import Config, options_of


def owner_column(config: Config, info: Info) -> str:
    """The column whose values are the clients; "" if the partition reads none. Raises ValueError
    if a user's own data have several that it may be."""
    if "column" not in options_of(config):
        return ""
    column = str(config["partition.column"])
    if column or info.inputs is None:
        return column
    if len(info.columns) > 1:
        kind = "columns of texts" if info.inputs.kind == TABLE else "columns"
        raise ValueError(
            f"{info.name} has several {kind} that may be the clients: "
            f"{', '.join(info.columns)}; set partition.column to one of them"
        )
    return next(iter(info.columns), "")


def chosen_columns(config: Config, info: Info) -> tuple[list[str], list[str]]:
    """The names of a table's columns that are inputs, and notes about those that are not. Raises
    ValueError for names in `columns` and `ignore` that are no columns."""
    description = info.inputs or Description()
    known = description.names
    asked = [config["columns"]] if config["columns"] in known else names_in(config["columns"])
    ignored = [config["ignore"]] if config["ignore"] in known else names_in(config["ignore"])
    for key, names in (("columns", asked), ("ignore", ignored)):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{key} names {name!r}, but {info.name} has no such column of inputs"
                    f"{did_you_mean(str(name), known)}; its columns: {', '.join(known):.500}"
                )
    owner = owner_column(config, info)
    chosen: list[str] = []
    notes: list[str] = []
    for column in description.columns:
        name = column.name
        if name == owner or name in ignored or (asked and name not in asked):
            continue
        if column.identifier and not asked:
            notes.append(
                f"{info.name}: column {name} is left out, because {column.identifier}; "
                "columns=… asks for the columns that are inputs"
            )
            continue
        chosen.append(name)
    if notes and not chosen:
        raise ValueError(f"{notes[0]}; no other column is left")
    return chosen, notes


def complete_rows(config: Config, dataset: Dataset) -> tuple[Dataset, list[str]]:
    """A user's data without the rows that have an empty cell in the clients' column, and of a table
    also in its inputs, and notes that name them. Raises ValueError if they are more than the share
    `skip-broken`."""
    description = dataset.info.inputs
    allowed = float(config.get("skip-broken", 0.0))
    if not allowed or description is None:
        return dataset, []
    names: list[str] = []
    if description.kind == TABLE and config["missing"] == REFUSE:
        names, _ = chosen_columns(config, dataset.info)
    owner = owner_column(config, dataset.info)
    gaps = np.zeros(len(dataset.y), dtype=bool)
    if owner in dataset.columns:
        gaps |= dataset.columns[owner] == ""
    elif owner in description.names:
        names = [*names, owner]
    if names:
        used = [description.names.index(name) for name in names]
        gaps |= np.isnan(dataset.x.numpy()[:, used]).any(1)
    if not gaps.any():
        return dataset, []
    rows = np.flatnonzero(gaps).tolist()
    texts = [f"{dataset.info.name}, row {row} has empty cells" for row in rows]
    notes = left_out(texts, len(gaps), allowed, "rows")
    kept = torch.from_numpy(np.flatnonzero(~gaps))
    columns = {name: values[~gaps] for name, values in dataset.columns.items()}
    return replace(
        dataset,
        x=dataset.x[kept],
        y=dataset.y[kept],
        num_train=int((~gaps[: dataset.num_train]).sum()),
        num_validation=int((~gaps[dataset.num_train :][: dataset.num_validation]).sum()),
        columns=columns,
        key=hashlib.sha256(dataset.key.encode() + gaps.tobytes()).hexdigest(),
    ), notes
