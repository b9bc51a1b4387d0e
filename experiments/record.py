"""Writes a record of measurements from run folders: ``python -m experiments.record NAME FOLDER …``.

A record is a file of experiments/measured/, from which `experiments.coverage` makes its page. Each
cell is the mean over the seeds of a row and a column. `--column "α = {partition.novel-alpha}"` is
the text of a column with the settings of a run. A row is a variant as its run's folder names it,
without the settings of the column.

A record has the methods' fingerprints (`experiments.fingerprint`), taken now: record runs before
their code changes. Where the method's files have changed since the run, there is none.

What an existing record says beside its cells stays, unless an option replaces it, so that
``python -m experiments.record NAME FOLDER`` is enough after the commands of a record have run
again."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.fingerprint import fingerprint, settings_of
from fedapps.reproduction import Cell, as_record, cells_of
from fedapps.results.method_code import code_of
from fedapps.results.runs import NUMBERS, failures, label_without, read_runs, score_keys
from fedapps.settings.config import Config, defaults, effective
from fedapps.settings.experiments import experiments_root
from fedapps.settings.published_tables import score_key

if TYPE_CHECKING:
    from pandas import DataFrame

MEASURED = experiments_root() / "measured"
TEXTS = ("page", "note", "columns", "scores")  # of a record, beside its table, command and cells
SETTING = re.compile(r"\{([^{}]+)\}")
Place = tuple[str, str]  # column and row


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
    groups = groups_of(runs, template)
    found: list[Cell] = []
    for score in scores or score_keys(runs):
        for (column, row), places in groups.items():
            found += cells_of(column, row, score, runs.iloc[places])
    return found


def groups_of(runs: "DataFrame", template: str) -> dict[Place, list[int]]:
    """The runs' numbers by column and row."""
    in_column = SETTING.findall(template)
    groups: dict[Place, list[int]] = {}
    for number, run in enumerate(runs.itertuples()):
        column = column_of(template, defaults() | run.config)
        row = label_without(run.variant, in_column)
        groups.setdefault((column, row), []).append(number)
    return groups


def settings_by_place(runs: "DataFrame", template: str) -> dict[Place, dict[str, Any]]:
    """The settings of the fingerprint by column and row, where the method's files are those of the
    runs."""
    settings: dict[Place, dict[str, Any]] = {}
    for place, numbers in groups_of(runs, template).items():
        scored = runs.iloc[numbers]
        config = scored.iloc[0].config
        if {summary.code for summary in scored.summary} == {code_of(str(config["method"]))}:
            settings[place] = settings_of(defaults() | config)
        else:
            print(f"{place}: the method's files have changed since the runs, so no fingerprint")
    return settings


def with_fingerprints(
    cells: list[Cell], settings: dict[Place, dict[str, Any]]
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """The cells with the numbers of their fingerprints, and the fingerprints."""
    distinct: list[dict[str, Any]] = []
    numbered = []
    for cell in cells:
        place = (cell.column, cell.row)
        number = None
        if place in settings:
            if settings[place] not in distinct:
                distinct.append(settings[place])
            number = distinct.index(settings[place])
        numbered.append(replace(cell, fingerprint=number))
    return numbered, [{"settings": one, "numbers": fingerprint(one)} for one in distinct]


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
    settings: dict[Place, dict[str, Any]] = {}
    for folder in folders:
        runs, problems = read_runs(folder)
        for problem in [*problems, *failures(runs)]:
            print(f"{folder}: {problem}")
        finished = runs[runs.error == ""]
        chosen = [score_key(score) for score in head["scores"].split(",") if score]
        cells += recorded(finished, head["columns"], chosen)
        settings |= settings_by_place(finished, head["columns"])
    check_seeds(cells)
    cells, fingerprints = with_fingerprints(cells, settings)
    texts = {key: head[key] for key in TEXTS if head[key]}
    text = as_record(head["table"], head["command"], {}, cells, fingerprints, **texts)
    file.write_text(text, "utf-8")
    for cell in cells:
        print(f"{cell.column}, {cell.row}, {cell.score}: {cell.value:.4g} ± {cell.spread}")


if __name__ == "__main__":
    typer.run(main)
