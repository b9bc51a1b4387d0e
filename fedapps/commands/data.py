"""`fedapps data` and `fedapps partition show`: datasets and partitions before a run."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedapps.common.new_files import replaced
from fedapps.console import make_console, refusals, say, visible
from fedapps.results import ENDINGS, check_ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from fedapps.settings.config import Config
    from partitions.datasets.description import Column
    from partitions.inspect import Summary

partition = typer.Typer(help="Partitions of a dataset.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value overrides, such as partition=dirichlet.")
]
Request = Annotated[
    list[str] | None,
    typer.Argument(help="An experiment, and key=value overrides. Default: the main job's."),
]


def data(
    name: Annotated[str, typer.Argument(help="A name of `fedapps list datasets`.")],
    arguments: Overrides = None,
    info: Annotated[bool, typer.Option("--info", help="Do not read the data.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the files again.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write one directory per client for real nodes.")
    ] = None,
) -> None:
    """Show a dataset's source, sizes and labels, or export it by client."""
    from rich.logging import RichHandler

    console = make_console()
    handler = RichHandler(console=make_console(stderr=True))
    logging.basicConfig(handlers=[handler], format="%(message)s")
    with refusals(ImportError):
        from fedapps.common import external_code
        from fedapps.settings.config import defaults, override, parse_override, set_twice
        from partitions.datasets import loading

        if sum((info, check, export is not None)) > 1:
            raise ValueError("--info, --check and --export exclude each other; give one of them")
        name = name.removeprefix("dataset=")  # as `fedapps run` takes it
        for note in set_twice(arguments or []):
            say(make_console(stderr=True), note)
        overrides = dict(map(parse_override, arguments or []))
        if "dataset" in overrides:
            raise ValueError(f"the dataset is {name}; remove dataset={overrides['dataset']}")
        overrides["dataset"] = name
        external_code.allow(*external_code.named(overrides))
        config = override(defaults() | {"dataset": name}, overrides)
        entry = loading.described(config)
        _, data_dir, options = loading.named(config)
        kind = "" if entry.inputs is None else f" ({entry.inputs.kind})"
        say(console, f"{name}: {entry.summary}; {entry.labels_text}, inputs {entry.shape}{kind}")
        say(console, f"from: {loading.source(name, data_dir)}")
        if entry.files:
            say(console, f"official files: {entry.files}")
        if info:
            return
        from partitions import federation, inspect

        if export is not None:
            whole = config | {"novel-shots": 0}  # a node draws them itself
            folders = inspect.export(federation(whole), export)
            console.print(f"{len(folders)} clients in {export}; a node's own: {folders[0]}")
            return
        if entry.inputs is not None and entry.inputs.columns:
            cells = loading.configured(config).x.numpy()
            print_columns(console, entry.inputs.columns, cells)
        print_summary(console, inspect.summary(name, data_dir, check, **options))
    if check:
        console.print("the files are complete; shapes and labels are as expected")


def print_columns(console: Console, columns: "Sequence[Column]", cells: "np.ndarray") -> None:
    """Name, kind, range and gaps of each column of a table, with `cells` (n, columns)."""
    import numpy as np

    table = Table()
    for title in ("column", "kind", "values", "gaps", ""):
        table.add_column(title, overflow="fold")  # in a narrow terminal nothing is cut
    for number, column in enumerate(columns):
        known = cells[~np.isnan(cells[:, number]), number]
        values = ", ".join(column.categories[:5]) + ", …" * (len(column.categories) > 5)
        if not column.categories and len(known):
            values = f"{known.min():g} to {known.max():g}"
        gaps = str(len(cells) - len(known)) if len(known) < len(cells) else ""
        remark = column.refusal
        if column.identifier:
            remark = f"left out: {column.identifier}"
        table.add_row(*map(visible, (column.name, column.kind, values, gaps, remark)))
    console.print(table)


def print_summary(console: Console, summary: "Summary") -> None:
    """Sizes, columns, and class counts or the quantiles of values."""
    from fedapps.common.tasks import LABELS

    validation = f", {summary.num_validation} validation" if summary.num_validation else ""
    console.print(f"{summary.num_train} training{validation} and {summary.num_test} test samples, "
                  f"{summary.dtype}")  # fmt: skip
    for column, values in summary.columns.items():
        console.print(f"column {visible(column)}: {values} values")
    if summary.quantiles:
        from partitions.inspect import QUANTILES

        table = Table("value", *QUANTILES)
        for number, quantiles in summary.quantiles.items():
            table.add_row(number, *(f"{quantile:.4g}" for quantile in quantiles))
        console.print(table)
        return
    table = Table("label" if summary.task == LABELS else "class", "samples")
    for label, count in list(summary.class_counts.items())[:100]:
        table.add_row(visible(label), str(count))
    console.print(table)


@partition.command()
def show(
    arguments: Request = None,
    output: Annotated[Path, typer.Option(help=f"The figure: {', '.join(ENDINGS)}.")] = Path(
        "partition.png"
    ),
) -> None:
    """Draw samples per class and client, and print the novel clients' distances. Of values, draw
    each client's quartiles."""
    import numpy as np

    console = make_console()
    with refusals(ImportError):
        check_ending(output)
        config = requested(arguments or [])

        from fedapps.common.tasks import LABELS, VALUES
        from partitions import federation, inspect

        clients = federation(config)
        task = clients.info.task
        with replaced(output) as file:
            inspect.figure(clients).savefig(file, dpi=120)
    last = {LABELS: "labels a client", VALUES: "medians of clients"}
    table = Table(
        "role", "clients", "samples", "fewest", "most", last.get(task, "classes a client")
    )
    all_sizes = inspect.sample_counts(clients)
    if task == VALUES:
        medians = np.array([np.median(values[:, 0]) for values in inspect.client_values(clients)])
    else:
        counts = inspect.class_counts(clients)
    for role, chosen in (("training", ~clients.novel), ("novel", clients.novel)):
        if not chosen.any():
            continue
        if task == VALUES:
            text = f"{medians[chosen].min():.4g} – {medians[chosen].max():.4g}"
        else:
            text = f"{(counts[chosen] > 0).sum(1).mean():.1f}"
        sizes = all_sizes[chosen]
        row = (chosen.sum(), sizes.sum(), sizes.min(), sizes.max(), text)
        table.add_row(role, *map(str, row))
    console.print(table)
    if clients.novel.any() and task != VALUES:
        variation, divergence = inspect.distances(counts, clients.novel)
        console.print(
            "novel clients to the nearest training client: total variation "
            f"{variation.mean():.3f} (largest {variation.max():.3f}), KL {divergence.mean():.3f}"
        )
    console.print(f"figure: {output}", highlight=False)


def requested(arguments: list[str]) -> "Config":
    """The settings of a federation that an experiment and key=value arguments describe."""
    from fedapps.planning import configured
    from fedapps.settings.config import override
    from fedapps.settings.experiments import read_arguments

    experiment = read_arguments(arguments)
    experiment.check_single("the experiment", "show")
    experiment.allow()
    if experiment.grid:
        raise ValueError(f"{min(experiment.grid)} has several values; show one partition at a time")
    seed = {"seed": int(experiment.seeds.split(",")[0])} if experiment.seeds else {}
    config, _ = configured(experiment)
    return override(config, seed)
