"""Output of the command. Text from files, clients and users is never markup."""

import re
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text


def _allow(references: list[str] | None) -> list[str] | None:
    from partitions import trust

    try:
        trust.allow(*references or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return references


Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        callback=_allow,
        metavar="MODULE:NAME",
        help="Code from outside that a saved run may use, once for each.",
    ),
]


def make_console(*, stderr: bool = False) -> Console:
    """A console that takes square brackets literally."""
    return Console(stderr=stderr, markup=False)


def visible(text: object) -> str:
    """`text` in one line, with escaped control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def say(console: Console, text: object) -> None:
    """Print a sentence, which may quote files or clients."""
    console.print(visible(text), highlight=False, soft_wrap=True)


def say_error(console: Console, error: object, what: str = "error:") -> None:
    """Print `what` in red and the error."""
    shown = Text.assemble((visible(what), "red"), " ", visible(error))
    console.print(shown, soft_wrap=True)


def spreadsheet_cell(name: str) -> str:
    """A name as text to spreadsheets: a single quote in front of what they would take for a
    formula. Numbers, also negative ones, stay as they are."""
    formula = re.match(r"[=+\-@\t\r]", name) and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", name)
    return f"'{name}" if formula else name
