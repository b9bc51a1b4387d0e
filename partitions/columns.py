"""Which columns of a user's table are inputs, and which one names the clients."""

from partitions.datasets.description import TABLE, Description, did_you_mean, names_in
from partitions.datasets.loading import Info
from partitions.rules.registry import Config, options_of


def owner_column(config: Config, info: Info) -> str:
    """The column whose values are the clients; "" if the partition reads none. Raises ValueError
    if a table has several that it may be."""
    if "column" not in options_of(config):
        return ""
    column = str(config["partition.column"])
    if column or info.inputs is None or info.inputs.kind != TABLE:
        return column
    if len(info.columns) > 1:
        raise ValueError(
            f"{info.name} has several columns of texts that may be the clients: "
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
    chosen = []
    notes = []
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
    return chosen, notes
