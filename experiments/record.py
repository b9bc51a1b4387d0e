"""Writes a record of measurements from run folders: ``python -m experiments.record NAME FOLDER …``.

A record is a file of experiments/measured/, from which `experiments.coverage` makes its page. Each
cell is the mean over the seeds of a row and a column. `--column "α = {partition.novel-alpha}"` is
the text of a column with the settings of a run. A row is a variant as its run's folder names it,
without the settings of the column.

What an existing record says beside its cells stays, unless an option replaces it, so that
``python -m experiments.record NAME FOLDER`` is enough after the commands of a record have run
again."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedapps.reproduction import Cell, as_record, cells_of
from fedapps.results.runs import NUMBERS, failures, label_without, read_runs, score_keys
from fedapps.settings.config import Config, defaults, effective
from fedapps.settings.experiments import experiments_root

if TYPE_CHECKING:
    from pandas import DataFrame

MEASURED = experiments_root() / "measured"
TEXTS = ("page", "note", "columns", "scores")  # of a record, beside its table, command and cells
SETTING = re.compile(r"\{([^{}]+)\}")


def column_of(template: str, config: Config) -> str:
    """The template with the run's settings. Raises ValueError for a setting that there is not."""

    def value(found: re.Match[str]) -> str:
        setting = effective(config, found[1])
        if setting is None:
            raise ValueError(f"--column names {found[1]!r}, which is no setting of the runs")
        return str(setting)

    return SETTING.sub(value, template)


def recorded(runs: "DataFrame", template: str, scores: list[str]) -> list[Cell]:
    """The cells of finished runs by column, row and score, in the order of the runs; all scores of
    `scores`, or by default those that the runs have. Raises ValueError for an unknown score."""
    known = [*score_keys(runs), *NUMBERS]
    for score in scores:
        if score not in known:
            raise ValueError(f"--scores names {score!r}; known: {', '.join(known)}")
    in_column = SETTING.findall(template)
    groups: dict[tuple[str, str], list[int]] = {}  # the runs' places
    for place, run in enumerate(runs.itertuples()):
        column = column_of(template, defaults() | run.config)
        row = label_without(run.variant, in_column)
        groups.setdefault((column, row), []).append(place)
    found: list[Cell] = []
    for score in scores or score_keys(runs):
        for (column, row), places in groups.items():
            found += cells_of(column, row, score, runs.iloc[places])
    return found


def check_seeds(cells: list[Cell]) -> None:
    """Raise ValueError for a row and a column that have a seed twice: their runs differ in a
    setting that neither names."""
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for cell in cells:
        seeds.setdefault((cell.column, cell.row, cell.score), []).extend(cell.seeds)
    for (column, row, _), values in seeds.items():
        if len(set(values)) < len(values):
            raise ValueError(
                f"column {column!r}, row {row!r} has the seeds {values}; name the setting in which "
                "its runs differ, as --column '{partition.alpha}'"
            )


def main(
    name: str,
    folders: list[Path],
    command: Annotated[str, typer.Option(help="The commands that made the runs.")] = "",
    table: Annotated[str, typer.Option(help="A name of `fedapps list tables`.")] = "",
    page: Annotated[str, typer.Option(help="The page of docs/results with the rows.")] = "",
    note: Annotated[str, typer.Option(help="What the rows differ in from a paper's.")] = "",
    column: Annotated[str, typer.Option(help="The text of a column.")] = "",
    scores: Annotated[str, typer.Option(help="Scores; default: all of the runs.")] = "",
) -> None:
    """Write experiments/measured/NAME.json from the runs in FOLDERS."""
    file = MEASURED / f"{name}.json"
    head: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    given = {"command": command, "table": table, "page": page, "note": note, "columns": column,
             "scores": scores}  # fmt: skip
    for key, value in given.items():
        head[key] = value or head.get(key, "")
    if not head["command"] or not head["columns"]:
        raise typer.BadParameter(f"{name} is a new record: it needs --command and --column")
    cells: list[Cell] = []
    for folder in folders:
        runs, problems = read_runs(folder)
        for problem in [*problems, *failures(runs)]:
            print(f"{folder}: {problem}")
        finished = runs[runs.error == ""]
        cells += recorded(finished, head["columns"], [s for s in head["scores"].split(",") if s])
    check_seeds(cells)
    texts = {key: head[key] for key in TEXTS if head[key]}
    file.write_text(as_record(head["table"], head["command"], {}, cells, **texts), "utf-8")
    for cell in cells:
        print(f"{cell.column}, {cell.row}, {cell.score}: {cell.value:.4g} ± {cell.spread}")


if __name__ == "__main__":
    typer.run(main)
