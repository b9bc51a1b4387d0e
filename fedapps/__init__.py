"""The Flower apps, the table of methods, the in-process grid and the command."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapps.service.run import Run

__all__ = ["load"]


def load(run: str | Path) -> "Run":
    """A finished run, by its folder: ``load(run).personalize(x)`` is the model for inputs x."""
    from fedapps.service.run import Run  # here: whoever needs a strategy alone loads no more

    return Run(run)
