"""A table of the simulated time to an accuracy: ``python -m experiments.time_to_accuracy FOLDER``.

The runs in FOLDER have `latency`. The accuracy is the mean over training clients on validation
samples, in %; ``--accuracy`` says which one, by default 90. Time and rounds are those of the first
evaluation that reaches it, and so not below the true ones by up to `evaluate-every` rounds."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedapps.results.formats import TextTable, as_markdown, seeds_cell
from fedapps.results.runs import read_runs, rounds_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ALL = 10**9  # points of a run
COLUMNS = ("method", "simulated s", "rounds", "at the end, %", "s of all rounds", "late", "age")


def first_at(scores: "DataFrame", accuracy: float) -> "Series | None":
    """The row of the first evaluation of a run that reaches the accuracy; None if none does."""
    reached = scores[scores["train-accuracy"] >= accuracy].sort_values("round")
    return None if reached.empty else reached.iloc[0]


def time_to(runs: "DataFrame", accuracy: float) -> TextTable:
    """A row for each method: mean ± standard deviation over seeds. How many seeds reach the
    accuracy stands beside the time, if not all do."""
    from pandas import Series

    rounds = rounds_of(runs, ALL)
    rows = []
    for method, group in runs.groupby("method", sort=False):
        times = []
        numbers = []
        finals = []
        for seed in group.seed:
            of_run = rounds[(rounds.method == method) & (rounds.seed == seed)].sort_values("round")
            finals.append(of_run["train-accuracy"].iloc[-1])
            first = first_at(of_run, accuracy)
            if first is not None:
                times.append(first.time)
                numbers.append(first["round"])
        time = "never"
        if times:
            time = seeds_cell(Series(times, dtype=float), 1)
        if times and len(times) < len(group):
            time += f" ({len(times)} of {len(group)} seeds)"
        rows.append(
            [
                str(method),
                time,
                seeds_cell(Series(numbers, dtype=float), 0) if numbers else "–",
                seeds_cell(Series(finals, dtype=float), 2),
                seeds_cell(group.simulated, 0),
                seeds_cell(group.late, 0) if group.late.notna().all() else "–",
                seeds_cell(group["late-age"], 1) if group["late-age"].notna().all() else "–",
            ]
        )
    caption = "validation samples of training clients; ± standard deviation over seeds"
    return TextTable(f"time to {accuracy:g} %", list(COLUMNS), rows, caption)


def main() -> None:
    """Print the table of a folder's runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accuracy", type=float, default=90.0)
    arguments = parser.parse_args()
    runs, problems = read_runs(arguments.folder)
    for problem in problems:
        print(problem)
    print(as_markdown(time_to(runs[runs.error == ""], arguments.accuracy)), end="")


if __name__ == "__main__":
    main()
