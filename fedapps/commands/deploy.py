"""`fedapps deploy`: a small federation of real nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.console import make_console, refusals, say
from fedapps.service import DEPLOYMENT

LOOPBACK = "127.0.0.1"
LOG_LINES = 100  # that --logs prints


def deploy(
    folder: Annotated[Path, typer.Argument(help="Folder of the deployment.")],
    nodes: Annotated[int, typer.Option(help="Write a deployment of this many nodes.")] = 0,
    tls: Annotated[bool, typer.Option("--tls", help="Certificates, and a key per node.")] = False,
    own_keys: Annotated[
        bool, typer.Option("--own-keys", help="Nodes make their keys: --request, then --sign.")
    ] = False,
    request: Annotated[
        str, typer.Option(help="On a node's machine: make its key, and a request to sign.")
    ] = "",
    sign: Annotated[
        Path | None, typer.Option(help="On the SuperLink's machine: admit the node of a request.")
    ] = None,
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
        if not nodes and (tls or own_keys or data is not None or host != LOOPBACK):
            raise ValueError(
                "--tls, --own-keys, --host and --data belong to a new deployment: add --nodes"
            )
        if request:
            if nodes or sign or start or status or stop or logs or only:
                raise ValueError("--request makes a node's key; it goes with no other option")
            _make_request(folder, request, console)
            return
        if not nodes and not (folder / DEPLOYMENT).is_file():
            raise ValueError(
                f"{folder} holds no {DEPLOYMENT}; write it: fedapps deploy {folder} --nodes 3"
            )

        from fedapps.service.deploy import SUPERLINK, Deployment, plan

        if nodes:
            if (folder / "run").is_dir() and any((folder / "run").iterdir()):
                raise ValueError(f"{folder} may be running; first: fedapps deploy {folder} --stop")
            if (folder / DEPLOYMENT).is_file():
                raise ValueError(
                    f"{folder} holds a deployment, whose keys and addresses its nodes have; start "
                    f"it: fedapps deploy {folder} --start; for a new one name another folder, or "
                    "remove this one"
                )
            plan(folder, nodes, tls=tls, host=host, data=data, own_keys=own_keys).write()
        deployment = Deployment.read(folder)
        known = [SUPERLINK, *deployment.nodes]
        named = [name.strip() for name in only.split(",") if name.strip()]
        _check_known(named, known)
        _check_known([logs] if logs else [], known)
        chosen = named or deployment.startable()
        if only and not (start or status or stop):
            raise ValueError("--only chooses what --start, --status or --stop acts on; add one")
        if sign is not None:
            bundle = deployment.sign(sign)
            say(console, f"send the files of {bundle} to the node, into the folder of its request")
        if stop:
            deployment.stop(chosen)
        if start:
            warning = deployment.memory_warning(chosen)
            if warning:
                say(console, warning)
            deployment.start(chosen)
        if logs:
            for line in deployment.log(logs, LOG_LINES):
                console.print(line, highlight=False, soft_wrap=True)
    if status or start or stop:
        for name in chosen:
            state = "alive" if deployment.alive(name) else "down"
            console.print(f"{name}: {state}", highlight=False)
    if status:
        with refusals(RuntimeError, code=1):  # processes live on for a while after its end
            deployment.check_certificates()
    if nodes:
        console.print(
            f"{folder}: {len(deployment.startable())} start scripts; read {folder / 'README.md'}"
        )


def _make_request(folder: Path, node: str, console: Console) -> None:
    """Make the node's key, and its request for a certificate."""
    from fedapps.service.certificates import make_request

    file = make_request(folder, node)
    say(console, f"send {file} to the operator; {folder / 'keys' / node} stays here")


def _check_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name that no process of the deployment has."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
