"""`fedapps deploy`: a small federation of real nodes."""

from pathlib import Path
from typing import Annotated

import typer

from fedapps.console import make_console, refusals
from fedapps.service import DEPLOYMENT

LOOPBACK = "127.0.0.1"
LOG_LINES = 100  # that --logs prints


def deploy(
    folder: Annotated[Path, typer.Argument(help="Folder of the deployment.")],
    nodes: Annotated[int, typer.Option(help="Write a deployment of this many nodes.")] = 0,
    tls: Annotated[bool, typer.Option("--tls", help="Certificates, and a key per node.")] = False,
    host: Annotated[str, typer.Option(help="The SuperLink's address or name.")] = LOOPBACK,
    data: Annotated[
        Path | None, typer.Option(help="A folder for each node, from `fedapps data --export`.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start it on this machine.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show which processes run.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop what --start started.")] = False,
    logs: Annotated[
        str, typer.Option(help='Print the end of the log of "superlink" or a node: "node-0".')
    ] = "",
    only: Annotated[str, typer.Option(help='Only these processes: "superlink,node-0".')] = "",
) -> None:
    """Write the files of a small federation of real nodes; start, check and stop it."""
    console = make_console()
    with refusals(RuntimeError):
        if not nodes and (tls or data is not None or host != LOOPBACK):
            raise ValueError("--tls, --host and --data belong to a new deployment: add --nodes")
        if not nodes and not (folder / DEPLOYMENT).is_file():
            raise ValueError(
                f"{folder} holds no {DEPLOYMENT}; write it: fedapps deploy {folder} --nodes 3"
            )

        from fedapps.service.deploy import SUPERLINK, Deployment, plan

        if nodes:
            if (folder / "run").is_dir() and any((folder / "run").iterdir()):
                raise ValueError(f"{folder} may be running; first: fedapps deploy {folder} --stop")
            plan(folder, nodes, tls=tls, host=host, data=data).write()
        deployment = Deployment.read(folder)
        names = [SUPERLINK, *deployment.nodes]
        chosen = [name.strip() for name in only.split(",") if name.strip()] or names
        if unknown := sorted(set(chosen) - set(names)):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(names)}")
        if logs and logs not in names:
            raise ValueError(f"unknown {logs}; known: {', '.join(names)}")
        if only and not (start or status or stop):
            raise ValueError("--only chooses what --start, --status or --stop acts on; add one")
        if stop:
            deployment.stop(chosen)
        if start:
            deployment.start(chosen)
        if logs:
            for line in deployment.log(logs, LOG_LINES):
                console.print(line, highlight=False, soft_wrap=True)
    for name in chosen if status or start or stop else ():
        state = "alive" if deployment.alive(name) else "down"
        console.print(f"{name}: {state}", highlight=False)
    if status:
        with refusals(RuntimeError, code=1):  # processes live on for a while after its end
            deployment.check_certificates()
    if nodes:
        console.print(f"{folder}: {len(names)} start scripts; read {folder / 'README.md'}")
