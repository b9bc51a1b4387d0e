"""The reproduction of a paper's table: the experiments that run its rows and columns, the check of
the data, and our values beside the published ones."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapps.results.formats import (
    UNKNOWN,
    TextTable,
    number_cell,
    spread_cell,
    summarize,
)
from fedapps.results.runs import NUMBERS, SCORE_COLUMNS
from fedapps.settings.config import Config, defaults, effective, override
from fedapps.settings.experiments import (
    Experiment,
    experiments,
    experiments_root,
    read_experiment,
)
from fedapps.settings.published_tables import cells, published_tables, read_table, row_of
from fedapps.settings.variants import Variant, combinations

if TYPE_CHECKING:
    from pandas import DataFrame

SUBSTITUTES = ("fashion-mnist", "mnist")
NOVEL_SUBSTITUTES = {"mnist": "digits"}  # another dataset with the same classes, for novel clients
RELEASED = "released"  # the key of the reason for an experiment that follows the text alone
# Facts that must be the paper's, with the relative difference that rounding may make. The others
# depend on how samples are dealt, for which an experiment has its reasons.
BINDING = {"classes": 0.0, "features": 0.0, "samples": 0.0, "samples-per-client": 0.01}
FILE = "reproduced.json"
PAGE = "table.md"
Column = Mapping[str, Any]


@dataclass
class Part:
    """An experiment with the columns of the table that it runs. `substitute` is the dataset in the
    place of the paper's, "" for the paper's own."""

    name: str
    experiment: Experiment
    columns: list[Column] = field(default_factory=list)
    substitute: str = ""

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that the substitute needs.

        It has no superclasses, so that each class stands for one. With fewer types than the paper's
        data, a type stands for several. Raises ValueError if novel clients need a second dataset
        with the same classes, and there is none."""
        if not self.substitute:
            return {}
        changes: dict[str, Any] = {"dataset": self.substitute}
        partition = self.experiment.settings.get("partition")
        if partition == "coarse":
            changes |= {"partition": "pathological", "partition.classes-per-client": 1}
        elif partition == "preference":
            changes |= _with_types_of(self.substitute, self.experiment.settings)
        elif partition == "cross-dataset":
            if self.substitute not in NOVEL_SUBSTITUTES:
                able = " or ".join(f"--data {name}" for name in NOVEL_SUBSTITUTES)
                raise ValueError(
                    f"novel clients of {self.name} hold another dataset with the same classes, and "
                    f"there is none for {self.substitute}; use {able}"
                )
            changes["partition.novel-dataset"] = NOVEL_SUBSTITUTES[self.substitute]
        return changes

    @property
    def notes(self) -> list[str]:
        """What the substitute has in the place of the paper's data, apart from its samples."""
        notes = []
        if "partition" in self.changes:
            notes.append(f"{self.substitute} has no superclasses: a client has one class")
        if shares := self.changes.get("partition.shares"):
            count = len(shares.split(","))
            notes.append(f"{self.substitute} has {count} types: type k has the users of types k, "
                         f"k + {count}, … of the paper's data")  # fmt: skip
        if novel := self.changes.get("partition.novel-dataset"):
            notes.append(f"novel clients have {novel}")
        return notes

    def at(self, column: Column) -> dict[str, Any]:
        """The settings that tell the column's runs from others."""
        return {key: self.changes.get(key, value) for key, value in column["at"].items()}

    @property
    def folder(self) -> str:
        """The name of its folder in that of the table."""
        name = self.name.rpartition("/")[2]
        return f"{name}-with-{self.substitute}" if self.substitute else name


def _with_types_of(substitute: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sub-populations of users, if the substitute has T types, fewer than the paper's data:
    users of the types k, k + T, … prefer type k."""
    from partitions.datasets.loading import info

    paper_types = info(str(settings["dataset"])).num_classes
    types = info(substitute).num_classes
    changes: dict[str, Any] = {}
    if types >= paper_types:
        return changes
    for key, value in settings.items():
        if key.endswith(".sub-populations") and value == paper_types:
            changes[key] = types
    words = str(settings.get("partition.shares", ""))
    if words:
        shares = [float(word) for word in words.split(",")]
        sums = [sum(shares[k::types]) for k in range(types)]
        changes["partition.shares"] = ",".join(f"{share:.6g}" for share in sums)
    return changes


def runs_of(experiment: Experiment) -> list[tuple[str, Config]]:
    """The label and the configuration of each run of an experiment, without its seeds."""
    config = override(defaults(), experiment.settings)
    labels = combinations(experiment.methods.split(","), experiment.grid, experiment.settings)
    return [(label, Variant.parse(label).apply(config)) for label in labels]


def has(config: Config, wanted: Mapping[str, Any]) -> bool:
    """Whether all these settings hold in a run."""
    return all(effective(config, key) == value for key, value in wanted.items())


def parts_of(table: str, data: str = "") -> list[Part]:
    """The experiments that run a table, each column by the one that has most of its rows; of equal
    ones, by that which follows the authors' program. With `data` only the columns of that dataset;
    if the table has none, those of a dataset with as many classes, which `data` replaces.

    Raises ValueError for an unknown table or dataset, and for a table that other runs fill."""
    if data and data not in SUBSTITUTES:
        raise ValueError(f"--data is {data!r}; choose one of {', '.join(SUBSTITUTES)}")
    known = published_tables(experiments_root())
    if table not in known:
        raise ValueError(f"unknown table {table!r}; known: {', '.join(known)}")
    content = read_table(table, experiments_root())
    if reason := content.get("without-experiment"):
        raise ValueError(f"{table} has no runs of its own: {reason}")
    candidates: dict[str, Experiment] = {}
    for name, file in experiments().items():
        if table not in file.read_text("utf-8"):  # to read all experiments takes half a second
            continue
        experiment = read_experiment(name)
        if table in experiment.tables:
            candidates[name] = experiment
    chosen: list[tuple[Column, str, str]] = []
    for column in content["columns"]:
        name, dataset = _experiment_of(table, column, candidates)
        chosen.append((column, name, dataset))
    substitute = ""
    if data:
        own = [one for one in chosen if one[2] == data]
        if not own:
            substitute = data
            own = _with_classes_of(data, chosen)
        chosen = own
    parts: dict[str, Part] = {}
    for column, name, _ in chosen:
        part = parts.setdefault(name, Part(name, candidates[name], [], substitute))
        part.columns.append(column)
    return list(parts.values())


def _experiment_of(
    table: str, column: Column, candidates: Mapping[str, Experiment]
) -> tuple[str, str]:
    """The experiment that runs a column, and its dataset."""
    best: tuple[int, bool] = (0, False)
    found = ("", "")
    for name, experiment in candidates.items():
        rows: set[str] = set()
        dataset = ""
        for label, config in runs_of(experiment):
            row = row_of(label, cells(column))
            if row is not None and has(config, column["at"]):
                rows.add(row)
                dataset = str(config["dataset"])
        rank = (len(rows), RELEASED not in experiment.reasons)
        if rows and rank > best:
            best = rank
            found = (name, dataset)
    if not found[0]:
        raise ValueError(f"no experiment runs the column {column['name']} of {table}")
    return found


def _with_classes_of(
    data: str, chosen: list[tuple[Column, str, str]]
) -> list[tuple[Column, str, str]]:
    """The columns whose dataset has as many classes as `data`; all columns if none has."""
    from partitions.datasets.loading import info

    wanted = info(data).num_classes
    alike = [one for one in chosen if info(one[2]).num_classes == wanted]
    return alike or chosen


def requested(part: Part, rounds: int, seeds: str) -> Experiment:
    """The experiment of a part with the changes of the command, its references allowed."""
    changes: dict[str, Any] = {}
    methods = ""
    if rounds:
        changes["rounds"] = rounds
        methods = _without_rounds(part.experiment.methods)
    changes |= part.changes
    experiment = part.experiment | Experiment(changes, methods=methods, seeds=seeds)
    experiment.allow()
    return experiment


def _without_rounds(methods: str) -> str:
    """The labels without their own numbers of rounds."""
    labels = []
    for label in methods.split(","):
        words = [word for word in label.split() if not word.startswith("rounds=")]
        labels.append(" ".join(words))
    return ",".join(dict.fromkeys(labels))


def check_present(parts: Iterable[Part]) -> None:
    """Raise ValueError for the first dataset that is not there. The others are named, too: the
    search for each takes time."""
    from partitions.datasets.loading import configured

    needed: dict[str, Config] = {}
    for part in parts:
        config = _config(part, part.columns[0])
        needed.setdefault(str(config["dataset"]), config)
    choices = " or ".join(f"--data {name}" for name in SUBSTITUTES)
    for config in needed.values():
        try:
            configured(config)
        except ValueError as error:
            raise ValueError(
                f"{error}. The table needs {', '.join(needed)}; {choices} runs its structure with "
                "other data"
            ) from error


def check_facts(part: Part) -> list[str]:
    """A line for each column: what the data hold, beside what the paper states of them.

    Raises ValueError if the data are not the paper's. A substitute is not compared."""
    lines = []
    for column in part.columns:
        found = facts(_config(part, column))
        stated = {} if part.substitute else column.get("facts", {})
        wrong = []
        words = []
        for name, value in found.items():
            word = f"{name.replace('-', ' ')} {value:g}"
            if name in stated and value != stated[name]:
                word += f" (the paper has {stated[name]:g})"
                if name in BINDING and abs(value - stated[name]) > BINDING[name] * stated[name]:
                    wrong.append(word)
            words.append(word)
        if wrong:
            raise ValueError(
                f"the data of {column['name']} are not the paper's: {', '.join(wrong)}. "
                f"`fedapps run {part.name}` runs them all the same"
            )
        lines.append(f"{column['name']}: {', '.join(words + part.notes)}")
    return lines


def facts(config: Config) -> dict[str, float]:
    """What the papers state of data and split, counted: classes, samples, numbers in an input,
    clients, mean samples of a client, validation samples, most samples of a novel client."""
    import numpy as np

    from fedapps.building import with_public
    from partitions import federation
    from partitions.federations import Federation

    split = federation(with_public(config, str(config["method"])))
    info = split.info
    counted: dict[str, float] = {"clients": len(split.novel)}
    counted["classes"] = info.num_classes
    counted["features"] = int(np.prod(info.shape))
    if type(split) is not Federation:  # users with preferences share samples
        return counted
    counted["samples"] = len(split.dataset.y)
    sizes = []
    validation = 0
    for client in range(len(split.novel)):
        rows = split.rows(client)
        sizes.append(sum(map(len, rows.values())))
        validation += len(rows["validation"])
    counted["samples-per-client"] = float(np.mean(sizes))
    counted["validation-samples"] = validation
    if split.novel.any():
        counted["most-samples-of-a-new-client"] = int(np.array(sizes)[split.novel].max())
    return counted


def _config(part: Part, column: Column) -> Config:
    """The configuration of the first run of a column."""
    for label, config in runs_of(part.experiment):
        if row_of(label, cells(column)) is not None and has(config, column["at"]):
            return config | part.changes
    raise ValueError(f"{part.name} has no run of the column {column['name']}")


@dataclass(frozen=True)
class Cell:
    """One of our values, the mean over seeds, and the published one; None where there is none."""

    column: str
    row: str
    score: str
    value: float
    spread: float | None  # standard deviation over seeds
    seeds: list[int]
    rounds: int
    dataset: str
    published: float | None
    code: str  # the version of the method, as in summary.json
    fingerprint: int | None = None  # which one of the record's


def measured(part: Part, runs: "DataFrame") -> list[Cell]:
    """The cells of a part's columns that the runs have filled."""
    found: list[Cell] = []
    runs = runs[runs.error == ""]
    for column in part.columns:
        rows = cells(column)
        at = part.at(column)
        groups: dict[str, list[int]] = {}  # the runs' places, by row
        for place, run in enumerate(runs.itertuples()):
            row = row_of(run.variant, rows)
            if row is not None and has(run.config, at):
                groups.setdefault(row, []).append(place)
        for score in [name for name in SCORE_COLUMNS if name in column]:
            for row, values in column[score].items():
                if row in groups:
                    scored = runs.iloc[groups[row]]
                    found += cells_of(column["name"], row, score, scored, values)
    return found


def cells_of(
    column: str, row: str, score: str, runs: "DataFrame", published: Sequence[float] = ()
) -> list[Cell]:
    """The cell of these runs, at their best rounds; [] if they lack the score. A score is one of
    `SCORE_COLUMNS`, or a number of `NUMBERS`, which belongs to no round."""
    key = score if score in NUMBERS else f"best {score}"
    scored = runs.dropna(subset=[key]) if key in runs else runs[:0]
    if scored.empty:
        return []
    mean, deviation = summarize(scored[key])
    first = scored.iloc[0]
    return [
        Cell(
            column,
            row,
            score,
            mean,
            None if deviation != deviation else deviation,
            sorted(map(int, scored.seed)),
            int(first.config["rounds"]),
            str(first.config["dataset"]),
            published[0] if published else None,
            first.summary.code,
        )
    ]


def as_table(table: str, parts: Sequence[Part], found: Sequence[Cell]) -> TextTable:
    """Our values, the published ones and the difference. A substitute has none: its data are
    others."""
    content = read_table(table, experiments_root())
    substitute = parts[0].substitute
    lines = []
    for cell in found:
        shown = SCORE_COLUMNS[cell.score].decimals(cell.value)
        spread = float("nan") if cell.spread is None else cell.spread
        published = float("nan") if cell.published is None else cell.published
        difference = UNKNOWN
        if not substitute:
            difference = number_cell(cell.value - published, shown, signed=True)
        lines.append(
            [
                cell.column,
                content["rows"][cell.row],
                SCORE_COLUMNS[cell.score].title,
                spread_cell(cell.value, spread, shown),
                number_cell(published, shown),
                difference,
                str(len(cell.seeds)),
            ]
        )
    title = f"{content['paper']}, {content['item']}: {content['title']}"
    caption = f"ours: mean ± standard deviation over seeds; published: {content['reported']}"
    if substitute:
        caption += f". Our data are {substitute}, those of the column are the paper's"
    headings = ["column", "row", "score", "ours", "published", "difference", "seeds"]
    return TextTable(title, headings, lines, caption)


def as_record(
    table: str,
    command: str,
    changes: Mapping[str, Any],
    found: Iterable[Cell],
    fingerprints: Sequence[Mapping[str, Any]] = (),
    **more: str,
) -> str:
    """The cells as JSON, which the coverage page is made from; `more` texts stand at its head.
    `fingerprints` are those of `experiments.fingerprint`, with their settings."""
    lines = []
    for cell in found:
        line = {key: value for key, value in vars(cell).items() if key != "published"}
        line["value"] = round(cell.value, 4)
        if cell.spread is not None:
            line["spread"] = round(cell.spread, 4)
        if cell.fingerprint is None:
            del line["fingerprint"]
        lines.append(json.dumps(line, ensure_ascii=False))
    head = {
        "table": table,
        **more,
        "command": command,
        "commit": commit(),
        "version": version("fedapps"),
        "changes": dict(changes),
    }
    text = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}")
    if fingerprints:
        entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in fingerprints)
        text += f',\n "fingerprints": [\n  {entries}\n ]'
    cells_text = ",\n  ".join(lines)
    return f'{text},\n "cells": [\n  {cells_text}\n ]\n}}\n'


def commit() -> str:
    """The commit of the checkout that the package lies in, with "+" if files differ from it; "" for
    an installed package."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    words = ("describe", "--always", "--dirty=+", "--exclude=*")
    try:
        asked = subprocess.run(
            ["git", *words],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
