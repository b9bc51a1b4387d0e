"""What a run leaves in its folder, and how it is shown."""

from pathlib import Path

ENDINGS = (".pdf", ".svg", ".png")  # of figures


def check_ending(output: Path) -> None:
    """Raise ValueError for a figure's file with another ending than those of `ENDINGS`."""
    if output.suffix.lower() not in ENDINGS:
        raise ValueError(f"{output} must end in one of {', '.join(ENDINGS)}")
