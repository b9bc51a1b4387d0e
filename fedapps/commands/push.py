"""`fedapps push`: a finished run as a model on the Hugging Face hub."""

from typing import Annotated

import typer

from fedapps.commands.show import RunFolder
from fedapps.console import Allowed, make_console, refusals, say


def push(
    run: RunFolder,
    repo: Annotated[str, typer.Argument(help="Its name on the hub, such as lab/fedtta-digits.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private one.")] = False,
    allow: Allowed = None,
) -> None:
    """Upload a finished run with a model card to the Hugging Face hub.

    The token of `hf auth login`, or HF_TOKEN, is used. Clients' states are not uploaded."""
    with refusals():
        from huggingface_hub.errors import HfHubHTTPError

        from fedapps.service import model_card
        from fedapps.service.finished_run import FinishedRun

        loaded = FinishedRun(run)
        with refusals(HfHubHTTPError, code=1):
            say(make_console(), model_card.push(loaded, repo, private=private))
