"""`fedapps data` and `fedapps partition show`: datasets and partitions before a run."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.table import Table

from fedapps.console import make_console, say_error, visible
from fedapps.settings.config import Config, defaults, override, parse_override
from partitions import trust

app = typer.Typer(pretty_exceptions_enable=False)
partition = typer.Typer(help="Partitions of a dataset.", no_args_is_help=True)
app.add_typer(partition, name="partition")

Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value overrides, such as partition=dirichlet.")
]


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="A name of `fedapps list datasets`.")],
    arguments: Overrides = None,
    info: Annotated[bool, typer.Option("--info", help="Only what is known unread.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the files again.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write one directory per client for real nodes.")
    ] = None,
) -> None:
    """Show a dataset: where it is found, sizes and class counts; or export it by client."""
    from partitions import federation, inspect
    from partitions.datasets import info as known
    from partitions.datasets import source

    console = make_console()
    handler = RichHandler(console=make_console(stderr=True))
    logging.basicConfig(handlers=[handler], format="%(message)s")
    try:
        config = _config(arguments, {"dataset": name})
        data_dir, entry = str(config["data-dir"]), known(name)
        console.print(f"{name}: {entry.line}; {entry.num_classes} classes, inputs {entry.shape}")
        console.print(f"from: {source(name, data_dir)}", highlight=False, soft_wrap=True)
        if entry.files:
            console.print(f"official files: {entry.files}", highlight=False)
        if info:
            return
        if export is not None:
            paths = inspect.export(federation(config), export)
            console.print(f"{len(paths)} clients in {export}; a node's own: {paths[0]}")
            return
        found = inspect.summary(name, data_dir, check)
    except (ValueError, OSError, ImportError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    console.print(f"{found.num_train} training and {found.num_test} test samples, {found.dtype}")
    for column, values in found.columns.items():
        console.print(f"column {visible(column)}: {values} values")
    table = Table("class", "samples")
    for label, count in list(found.class_counts.items())[:100]:
        table.add_row(visible(label), str(count))
    console.print(table)
    if check:
        console.print("the files are whole, shapes and labels as they should be")


@partition.command()
def show(
    arguments: Overrides = None,
    output: Annotated[Path, typer.Option(help="The figure: .png, .pdf or .svg.")] = Path(
        "partition.png"
    ),
) -> None:
    """Draw samples per class and client, and print the novel clients' distances."""
    from partitions import federation, inspect

    console = make_console()
    try:
        clients = federation(_config(arguments, {}))
        counts = inspect.class_counts(clients)
        inspect.figure(clients).savefig(output, dpi=120)
    except (ValueError, OSError, ImportError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    table = Table("role", "clients", "samples", "fewest", "most", "classes a client")
    for role, chosen in (("training", ~clients.novel), ("novel", clients.novel)):
        if chosen.any():
            sizes, held = counts[chosen].sum(1), (counts[chosen] > 0).sum(1)
            row = (chosen.sum(), sizes.sum(), sizes.min(), sizes.max(), f"{held.mean():.1f}")
            table.add_row(role, *map(str, row))
    console.print(table)
    if clients.novel.any():
        variation, divergence = inspect.distances(counts, clients.novel)
        console.print(
            "novel clients to the nearest training client: total variation "
            f"{variation.mean():.3f} (largest {variation.max():.3f}), KL {divergence.mean():.3f}"
        )
    console.print(f"figure: {output}", highlight=False)


def _config(arguments: list[str] | None, changes: Config) -> Config:
    asked = changes | dict(map(parse_override, arguments or []))
    trust.allow(*trust.named(asked))
    return override(defaults() | changes, asked)
