"""What the commands print. Text from files and clients is escaped and is never markup."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from fedapps.common.errors import printable, without_escape_codes
from fedapps.common.signals import exit_code, sigterm_raises, terminate

visible = printable
Parameters = ParamSpec("Parameters")


def _allow(references: list[str] | None) -> list[str] | None:
    if references:
        from fedapps.common import external_code

        try:
            external_code.allow(*references)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return references


Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        callback=_allow,
        metavar="MODULE:NAME",
        help="Code from outside the package that a saved run may use; can be repeated.",
    ),
]


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints square brackets as they are; `options` as rich's."""
    return Console(stderr=stderr, markup=False, **options)


def say(console: Console, text: object) -> None:
    """Print a line that may hold text from files or clients."""
    console.print(visible(text), highlight=False, soft_wrap=True)


def say_error(console: Console, error: object, what: str = "error:") -> None:
    """Print `what` in red and the error."""
    shown = Text.assemble((visible(what), "red"), " ", visible(error))
    console.print(shown, soft_wrap=True)


@contextmanager
def refusals(*kinds: type[Exception], code: int = 2) -> Iterator[None]:
    """Print a ValueError, an OSError or one of `kinds` as one sentence and exit with `code`."""
    errors: tuple[type[Exception], ...] = (ValueError, OSError, *kinds)
    try:
        yield
    except errors as error:
        say_error(make_console(), error)
        raise typer.Exit(code) from error


def stoppable(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The command, which Ctrl-C and SIGTERM end in order.

    A command that has more to say than "stopped", or something to end, catches KeyboardInterrupt,
    and exits with its `exit_code`."""

    @wraps(command)
    def called(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        with sigterm_raises(terminate):
            try:
                command(*arguments, **options)
            except KeyboardInterrupt as error:
                say(make_console(stderr=True), "stopped")
                raise typer.Exit(exit_code(error)) from None

    return called


def spreadsheet_cell(name: str) -> str:
    """A name as a spreadsheet's text: a formula gets a single quote in front, a number does not.
    Control characters are escaped."""
    name = without_escape_codes(name)
    formula = re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n]", name)
    number = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", name)
    return f"'{name}" if formula and not number else name
