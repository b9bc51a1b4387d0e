"""The options of `fedapps run`, in groups."""

from pathlib import Path
from typing import Annotated

import typer

from fedapps.commands import completion
from fedapps.engines import ENGINES

HOW, EARLIER = "How it runs", "Earlier runs"  # groups

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="An experiment: a .toml file or a name of `fedapps list experiments`; key=value; "
        "lr=0.01,0.1 spans a grid. Default: the main job.",
        autocompletion=completion.arguments,
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        help='Methods, separated by commas; "tent adapt-steps=5" is one, too.',
        autocompletion=completion.methods,
    ),
]
Seeds = Annotated[str, typer.Option(help="Seeds, separated by commas.")]

Output = Annotated[Path, typer.Option(help="Folder for the results.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the runs and an estimate of their cost.")
]
Bound = Annotated[bool, typer.Option(help="Show the generalization bound's terms.")]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="Folder of finished runs to start from, those of the same methods or else FedAvg's; "
        "0 rounds by default.",
        rich_help_panel=EARLIER,
    ),
]
Resume = Annotated[
    Path | None, typer.Option(help="Folder of unfinished runs to resume.", rich_help_panel=EARLIER)
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Repeat finished runs; asks.", rich_help_panel=EARLIER)
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.", rich_help_panel=EARLIER)]
Engine = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(ENGINES)}. Default: in-process or ray, whichever is faster by the "
        "measured seconds of a client's turn.",
        autocompletion=completion.one_of(ENGINES),
        rich_help_panel=HOW,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        help="Runs side by side. Default: all cores; 1 if --engine is named.", rich_help_panel=HOW
    ),
]
GpusPerClient = Annotated[
    float, typer.Option(help="Share of a GPU per client.", rich_help_panel=HOW)
]
RayAddress = Annotated[
    str,
    typer.Option(
        help='Ray cluster to join, host:port; "auto": that of this machine.', rich_help_panel=HOW
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Raise a client's or server's error here, at once.", rich_help_panel=HOW
    ),
]
