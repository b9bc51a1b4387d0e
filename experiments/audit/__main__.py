"""Attacks every private path, and prints the table of stated and attacked ε.

    python -m experiments.audit [--page docs/concepts/privacy.md] [--seeds 300]

With `--page` it also writes the table there, between the lines `BEGIN` and `END`. `--seeds` are the
repeats in each of the two worlds. All noise is seeded: the same command prints the same table."""

import logging
from collections.abc import Iterable
from pathlib import Path as File

import typer

from experiments.audit.bound import CONFIDENCE
from experiments.audit.paths import PATHS, Path, attacked, others

BEGIN = "<!-- python -m experiments.audit -->"
END = "<!-- end -->"
COLUMNS = ("what leaves", "privacy", "through", "δ", "stated ε", "attacked ε")


def row(path: Path, stated: float, proved: float, released: str = "") -> str:
    """A line of the table; an attack that proves more than is stated is marked."""
    mark = " **exceeds**" if proved > stated else ""
    cells = (
        released or path.released,
        path.kind,
        path.entry,
        f"{path.delta:g}",
        f"{stated:.2f}",
        f"{proved:.2f}{mark}",
    )
    return f"| {' | '.join(cells)} |"


def rows(repeats: int) -> Iterable[str]:
    """A line for each path, and one for each kind of privacy of all other methods: that of the
    method whose ε comes nearest to the stated one."""
    for path in PATHS:
        yield row(path, *attacked(path, repeats))
    nearest: dict[str, tuple[float, Path, float, float]] = {}
    counts: dict[str, int] = {}
    for path in others():
        stated, proved = attacked(path, repeats)
        counts[path.kind] = counts.get(path.kind, 0) + 1
        ratio = proved / stated
        if path.kind not in nearest or ratio > nearest[path.kind][0]:
            nearest[path.kind] = (ratio, path, stated, proved)
    for kind, (_, path, stated, proved) in nearest.items():
        released = f"updates of {counts[kind]} other methods; most: {path.released}"
        yield row(path, stated, proved, released)


def with_table(page: str, lines: Iterable[str]) -> str:
    """The page with the table in its place. Raises ValueError for a page without one."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no table's place: a line {BEGIN!r}, and {END!r} below")
    table = "\n".join(lines)
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def main(page: File | None = None, seeds: int = 300) -> None:
    """Attack every private path."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # nodes log what they refuse
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print("\n".join(lines))
    for line in rows(seeds):
        print(line, flush=True)
        lines.append(line)
    print(f"{seeds} repeats in each world; lower bounds at {CONFIDENCE:.0%} confidence")
    if page is not None:
        text = page.read_text("utf-8")
        page.write_text(with_table(text, lines), "utf-8")


if __name__ == "__main__":
    typer.run(main)
