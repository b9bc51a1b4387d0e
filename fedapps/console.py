"""What the command says when something is wrong: in one line, as it is, whatever signs it holds."""

from rich.console import Console
from rich.text import Text


def say_error(console: Console, error: object, what: str = "error:") -> None:
    """Print `what` in red and the error, signs that no terminal shows escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))
    console.print(Text.assemble((what, "red"), " ", shown), soft_wrap=True)
