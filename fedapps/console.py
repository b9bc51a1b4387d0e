"""What the command says: as it is, whatever signs it holds. No text from outside is markup."""

from rich.console import Console
from rich.text import Text


def make_console(*, stderr: bool = False) -> Console:
    """A console to which square brackets are square brackets."""
    return Console(stderr=stderr, markup=False)


def visible(text: object) -> str:
    """`text` in one line, signs that no terminal shows, or that it obeys, escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def say(console: Console, text: object) -> None:
    """Print a sentence that names what came from files or clients."""
    console.print(visible(text), highlight=False, soft_wrap=True)


def say_error(console: Console, error: object, what: str = "error:") -> None:
    """Print `what` in red and the error."""
    shown = Text.assemble((visible(what), "red"), " ", visible(error))
    console.print(shown, soft_wrap=True)
