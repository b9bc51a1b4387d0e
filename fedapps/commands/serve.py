"""`fedapps serve`: a finished run serves the nodes of a SuperLink."""

import os
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from fedapps.commands.show import RunFolder, WhichRound
from fedapps.common.home import home_folder
from fedapps.common.signals import delayed, exit_code
from fedapps.console import Allowed, make_console, refusals, say, say_error

RECONNECT_SECONDS = 5.0  # between attempts to follow the log of a SuperLink that restarts


def serve(
    run: RunFolder,
    deployment: Annotated[
        Path | None, typer.Option(help="Folder of `fedapps deploy` whose SuperLink is used.")
    ] = None,
    superlink: Annotated[
        str, typer.Option(help="Else a SuperLink's name in Flower's config.toml.")
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Serve nodes that have their model, too.")
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between polls of the nodes.")] = 30.0,
    round_: WhichRound = "best",
    allow: Allowed = None,
) -> None:
    """Serve a finished run to the nodes of a SuperLink, until Ctrl-C: a line for each node."""
    with refusals(RuntimeError):
        if bool(deployment) == bool(superlink):
            raise ValueError("name either --deployment or --superlink")

        from fedapps.engines.flower import Flwr
        from fedapps.service.deploy import Deployment
        from fedapps.service.finished_run import FinishedRun
        from fedapps.service.serving import LINE, check_serving

        loaded = FinishedRun(run, round_)
        config = loaded.config | {"serve-dir": str(loaded.folder), "serving": loaded.card.line()}
        config |= {"serve-every": every, "serve-again": again, "serve-round": round_}
        check_serving(config)
        home = Path(os.environ.get("FLWR_HOME", home_folder() / ".flwr")).expanduser()
        flwr = Flwr(home, superlink)
        if deployment:
            served = Deployment.read(deployment)
            served.check_certificates()
            flwr = served.flwr()
    console = make_console()
    run_id = None
    shown = 0
    try:
        with refusals(RuntimeError), delayed():  # else the run might go on without this command
            run_id = flwr.submit(config)
        console.print(f"serving {loaded.method} as run {run_id}; Ctrl-C ends it", highlight=False)
        while True:  # a SuperLink that restarts ends the log, but not the run
            lines = (line.partition(LINE)[2] for line in flwr.follow(run_id) if LINE in line)
            for line in islice(lines, shown, None):
                say(console, line.strip())
                shown += 1
            if flwr.status(run_id)[0].startswith("finished"):
                break
            time.sleep(RECONNECT_SECONDS)
    except KeyboardInterrupt as error:
        with refusals(RuntimeError, code=1):
            if run_id is not None:
                flwr.cancel(run_id)
        console.print("stopped")
        raise typer.Exit(exit_code(error)) from None
    say_error(console, flwr.error(run_id) or "the run ended")
    raise typer.Exit(1)
