"""Measures speed and memory as ratios: ``python -m experiments.benchmarks [NAME …]``.

A ratio compares two programs that run in turn, so it holds on any machine. Needs MNIST below
FEDAPPS_DATA_DIR; `peers` also needs `uv` and the package registry."""

import logging
import sys

import torch
from rich.console import Console
from rich.table import Table

import partitions
from experiments.benchmarks import (
    auto,
    choice,
    cohort,
    corrections,
    data,
    engines,
    memory,
    methods,
    registered,
    replies,
    simulators,
    turn,
)

MEASUREMENTS = {
    "in-process": engines.in_process,
    "ray": lambda: engines.side_by_side("ray", "1.15"),
    "flower": lambda: engines.side_by_side("flower", "1.40"),
    "start": engines.start,
    "fedtta": methods.fedtta,
    "convolution": methods.convolution,
    "pfedhn": methods.pfedhn,
    "odpfl-hn": methods.odpfl_hn,
    "auto": auto.rows,
    "corrections": corrections.rows,
    "fedembed": registered.fedembed,
    "data": lambda: data.start() + data.memory(),
    "clients": registered.in_process,
    "clients-ray": registered.on_ray,
    "choice": choice.rows,
    "memory": memory.rows,
    "replies": replies.rows,
    "cohort": cohort.rows,
    "turn": turn.rows,
    "peers": simulators.rows,
}

NO_MNIST = {"memory", "replies", "convolution", "corrections"}


def main(names: list[str]) -> None:
    """Print the table of the named measurements, by default of all."""
    if unknown := set(names) - MEASUREMENTS.keys():
        raise SystemExit(f"unknown {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    if set(names or MEASUREMENTS) - NO_MNIST:
        try:
            partitions.federation(engines.protocol())  # fails here, not in each client of each run
        except ValueError as error:
            raise SystemExit(str(error)) from error
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table = Table("what", "ratio", "limit", "values", title="Ratios in one run")
    console = Console()
    for name in names or MEASUREMENTS:
        with console.status(f"measuring {name}"):
            for row in MEASUREMENTS[name]():
                # A measurement of minutes that is stopped has shown what it found.
                console.print(f"{row.what}: {row.ratio:.2f} ({row.values})")
                limit = f"≤ {row.limit}" if row.limit else ""
                table.add_row(row.what, f"{row.ratio:.2f}", limit, row.values)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
