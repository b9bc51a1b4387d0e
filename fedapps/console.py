"""What the commands print. Text from files and clients is escaped and is never markup."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fedapps.common.errors import printable, without_escape_codes
from fedapps.common.signals import call_command, exit_code, interrupts, raise_swallowed

visible = printable
WORDS = "fedapps.words"  # in a context of the command: the words after `fedapps`


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


def invocation() -> str:
    """The command that runs, as a shell takes it; in Python, the script's name."""
    context = click.get_current_context(silent=True)
    if context is None:
        return f"fedapps.run in {visible(Path(sys.argv[0]).name or 'Python')}"
    return visible(shlex.join(["fedapps", *context.meta[WORDS]]))


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints square brackets as they are; `options` as rich's."""
    escape_unencodable()
    return Console(stderr=stderr, markup=False, **options)


def escape_unencodable() -> None:
    """Let the standard streams escape what their encoding lacks, as ε in the latin-1 of a pipe:
    they would raise UnicodeEncodeError, after hours of training. UTF-8 has everything but half
    surrogates, which undecodable names of files have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


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
    before = interrupts()
    try:
        yield
    except errors as error:
        raise_swallowed(before)  # the error is of what a signal interrupted
        say_error(make_console(), error)
        raise typer.Exit(code) from error


class StoppableGroup(TyperGroup):
    """Commands that Ctrl-C and SIGTERM end in order, at any moment, also while options are parsed.

    A command that has more to say than "stopped", or something to end, catches KeyboardInterrupt,
    and exits with its `exit_code`."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """As typer's; exits with the status of a signal that came."""
        escape_unencodable()  # also for what is printed without a console, as CSV
        return call_command(partial(super().main, *arguments, **options))

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Parse the options of the group, as typer does."""
        with _stopped():
            return super().make_context(*arguments, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words before they are read, and put the home folder in place of ~."""
        ctx.meta[WORDS] = [*args]
        return super().parse_args(ctx, [_with_home(word) for word in args])

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the options of a command and call it, as typer does."""
        with _stopped():
            return super().invoke(ctx)


def _with_home(word: str) -> str:
    """The word with the home folder in place of a ~ that the shell has left, as many do in
    ``--output=~/runs`` and ``data-dir=~/data``."""
    name, equals, value = word.rpartition("=")
    return name + equals + os.path.expanduser(value)


@contextmanager
def _stopped() -> Iterator[None]:
    """Say that the command was stopped, if it was, and exit with the signal's status."""
    try:
        yield
    except KeyboardInterrupt as error:
        say(make_console(stderr=True), "stopped")
        raise typer.Exit(exit_code(error)) from None


def spreadsheet_cell(name: str) -> str:
    """A name as a spreadsheet's text: a formula gets a single quote in front, a number or a sign
    alone does not. Control characters are escaped."""
    name = without_escape_codes(name)
    formula = re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n]", name)
    number = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", name)
    if number or name in ("+", "-"):
        return name
    return f"'{name}" if formula else name
