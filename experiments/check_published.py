"""Holds experiments against the papers' tables: ``python -m experiments.check_published [NAME…]``.

An experiment that names its tables (``published = "fedtta/table1"``) must have every value that the
paper states, or the authors' program where it differs. Any other value has its reason in the file:

    [reasons]
    evaluate-every = "every round would take a third of the time"
    "fedprox.lr" = "…"            # of one method, for which the paper states it
    released = "…"                # the file takes nothing from the authors' program

Every row and every column of a table is in some experiment, unless the table's file says why not
(`without-experiment`). Other files of a paper's folder are held to `LIMITS` alone. A reason that
nothing needs is refused. The exit code is 1 for a problem."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedapps import reproduction
from fedapps.common.tasks import AUTO
from fedapps.reproduction import RELEASED
from fedapps.settings.config import Config, effective
from fedapps.settings.experiments import (
    Experiment,
    experiments,
    experiments_root,
    read_experiment,
)
from fedapps.settings.published_tables import (
    cells,
    published_tables,
    read_table,
    row_of,
)
from fedapps.settings.variants import Variant
from partitions.datasets.description import NO_SCALING

# Limits of clients' influence, also on the choice of the round. No paper has one.
LIMITS = {
    "selection-mean": "plain",
    "protect": False,
    "max-update-ratio": 0.0,
    "max-examples-ratio": 0.0,
    "max-update-norm": 0.0,
    "robust": "none",
}
# How often a run looks at its clients and what it writes: a paper's table does not depend on it.
FREE = frozenset({"evaluate-every", "checkpoint-every", "report-generalization-bound"})
DEFINING = frozenset({"dataset", "partition"})


@dataclass
class Run:
    """One run of an experiment: its label and its whole configuration."""

    label: str
    config: Config
    method: str = field(init=False)

    def __post_init__(self) -> None:
        self.method = str(self.config["method"])
        if self.config["standardize"] == AUTO:  # of the package's datasets, which papers use
            self.config["standardize"] = NO_SCALING

    def has(self, wanted: Mapping[str, Any]) -> bool:
        """Whether all these settings hold in the run."""
        return reproduction.has(self.config, wanted)


def runs_of(experiment: Experiment) -> list[Run]:
    """The runs of an experiment, without its seeds."""
    return [Run(label, config) for label, config in reproduction.runs_of(experiment)]


def of_method(method: str, *tables: Mapping[str, Any]) -> dict[str, Any]:
    """What settings in the form of an experiment's say for a method: its section wins, then the
    later table."""
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            if key == method:
                own |= value
            elif not isinstance(value, Mapping):
                common[key] = value
    return common | own


def keys_of_method(method: str, *tables: Mapping[str, Any]) -> set[str]:
    """The keys that these settings have for this method in particular."""
    keys: set[str] = set()
    for table in tables:
        keys.update(table.get(method, {}))
    return keys


class Check:
    """The problems of one experiment with one table, and the reasons that it used."""

    def __init__(self, experiment: Experiment, table: str) -> None:
        self.experiment = experiment
        self.content = read_table(table, experiments_root())
        self.table = table
        self.runs = runs_of(experiment)
        self.methods: dict[tuple[str, str], list[str]] = {}  # by key and what is wrong with it
        self.stated_for_method: set[str] = set()  # keys of the present run's method in particular
        self.used: set[str] = set()
        for run in self.runs:
            for column in self.content["columns"]:
                row = row_of(run.label, cells(column))
                if row is not None and run.has(column["at"]):
                    self.check_run(run, column)
        seeds = [seed for seed in experiment.seeds.split(",") if seed]
        if len(seeds) < self.content["seeds"]:
            self.report(
                "seeds", f"{len(seeds) or 'no'} seeds; the paper has {self.content['seeds']}"
            )

    def check_run(self, run: Run, column: Mapping[str, Any]) -> None:
        """Compare a run with what the paper has for it."""
        method = run.method
        content = self.content
        stated = of_method(method, content.get("settings", {}), column.get("settings", {}))
        released = of_method(method, content.get("released", {}), column.get("released", {}))
        grids = of_method(method, content.get("grids", {}))
        per_round = content.get("clients-per-round", {}).get(method)
        tables = [one.get(kind, {}) for one in (content, column) for kind in ("settings", RELEASED)]
        self.stated_for_method = keys_of_method(method, *tables)

        for key, value in stated.items():
            self.compare(run, key, [value, released[key]] if key in released else [value])
        for key, value in released.items():
            if key not in stated:
                self.compare(run, key, [value], of_program=True)
        for key, values in grids.items():
            if key not in stated and key not in released:
                self.compare_with_grid(run, key, values)
        for key, value in LIMITS.items():
            self.compare(run, key, [value])
        if per_round is not None and "fraction-train" not in stated:
            self.compare_clients(run, per_round)

        known = {*stated, *released, *grids, *LIMITS, *column["at"], *FREE, *DEFINING}
        if per_round is not None:
            known.add("fraction-train")
        row_words = (row_of(run.label, cells(column)) or "").split()[1:]
        known |= {word.partition("=")[0] for word in row_words}
        for key in self.set_for(run):
            if key not in known:
                self.report(f"{method}.{key}", f"{effective(run.config, key)}; the paper is silent")

    def set_for(self, run: Run) -> Iterator[str]:
        """The keys that the experiment sets for a run, without their section."""
        words = Variant.parse(run.label).settings
        for key in (*self.experiment.keys, *words):
            section, _, name = key.rpartition(".")
            if section in ("", "partition"):
                if f"{run.method}.{key}" not in self.experiment.keys:
                    yield key
            elif section == run.method:
                yield name

    def compare(self, run: Run, key: str, values: list[Any], of_program: bool = False) -> None:
        """Report a setting whose value is none of `values`."""
        actual = effective(run.config, key)
        if actual is None:
            raise ValueError(f"{self.table} has the setting {key!r}, which {run.method} lacks")
        if actual in values:
            return
        if of_program and RELEASED in self.experiment.reasons:
            self.used.add(RELEASED)
            return
        source = "the authors' program has" if of_program else "the paper has"
        wanted = " or ".join(map(str, values))
        self.report(f"{run.method}.{key}", f"{actual}; {source} {wanted}")

    def compare_with_grid(self, run: Run, key: str, values: list[Any]) -> None:
        """Report a choice that the paper does not print, and one outside what it searched."""
        actual = effective(run.config, key)
        if actual is None:  # the method has it fixed
            return
        where = "searched" if actual in values else "outside what the paper searched"
        text = f"{actual}; {where}: {', '.join(map(str, values))}"
        self.report(f"{run.method}.{key}", text)

    def compare_clients(self, run: Run, wanted: int) -> None:
        """Report another number of clients in a round."""
        fraction, number = run.config["train-fraction"], run.config["num-clients"]
        training = round(float(fraction) * int(number))
        if run.config["restrict-to-model"]:
            training //= str(run.config["client-models"]).count(",") + 1
        share = float(effective(run.config, "fraction-train") or 0)
        clients = max(1, round(training * share))
        if clients != wanted:
            key = f"{run.method}.fraction-train"
            self.report(key, f"{clients} clients a round; the paper has {wanted} [{run.label}]")

    def report(self, key: str, text: str) -> None:
        """Note a problem, unless the experiment gives its reason. A reason without a method's name
        does not hold where the paper states the value for the method in particular."""
        name = key.partition(".")[2]
        for known in [key] if name in self.stated_for_method else [key, name]:
            if known in self.experiment.reasons:
                self.used.add(known)
                return
        method = key.partition(".")[0]
        methods = self.methods.setdefault((name or key, text), [])
        if name and method not in methods:
            methods.append(method)

    @property
    def problems(self) -> list[str]:
        """A line for each key and what is wrong with it."""
        lines = []
        for (key, text), methods in self.methods.items():
            of = f" of {', '.join(methods)}" if methods else ""
            lines.append(f"{self.table}: {key}{of} is {text}")
        return lines


def papers() -> set[str]:
    """The folders of the papers."""
    return {table.partition("/")[0] for table in published_tables(experiments_root())}


def limited(experiment: Experiment) -> dict[str, str]:
    """What departs from `LIMITS`, by key."""
    found: dict[str, str] = {}
    for run in runs_of(experiment):
        for key, value in LIMITS.items():
            actual = effective(run.config, key)
            if actual != value:
                found[key] = f"{key} of {run.method} is {actual}; the paper has {value}"
    return found


def problems_of(experiment: Experiment, paper: str = "") -> list[str]:
    """What departs from the experiment's tables, or from `LIMITS` where it names no table and is of
    a `paper`, without a reason; and reasons without a use."""
    found: list[str] = []
    used: set[str] = set()
    if paper in papers() and not experiment.tables:
        departs = limited(experiment)
        used = departs.keys() & experiment.reasons.keys()
        found = [text for key, text in departs.items() if key not in used]
    for table in experiment.tables:
        check = Check(experiment, table)
        found += check.problems
        used |= check.used
    for key in sorted(experiment.reasons.keys() - used):
        found.append(f"[reasons] has {key}, which needs none")
    return found


def uncovered(read: Mapping[str, Experiment]) -> list[str]:
    """The rows and columns of the tables that no experiment runs."""
    missing = []
    for name in published_tables(experiments_root()):
        content = read_table(name, experiments_root())
        if content.get("without-experiment"):
            continue
        runs: list[Run] = []
        for experiment in read.values():
            if name in experiment.tables:
                runs += runs_of(experiment)
        for column in content["columns"]:
            in_column = [run for run in runs if run.has(column["at"])]
            rows = cells(column)
            found = {row_of(run.label, rows) for run in in_column}
            lacks = [row for row in content["rows"] if row in rows - found]
            if not lacks:
                continue
            which = ", ".join(lacks) if found else "row"
            missing.append(f"{name}, {column['name']}: no {which}")
    return missing


def all_problems(names: list[str]) -> list[str]:
    """The problems of these experiments, by default of all, and what no experiment covers."""
    read = {name: read_experiment(name) for name in names or experiments()}
    found: list[str] = []
    for name, experiment in read.items():
        for problem in problems_of(experiment, paper=name.partition("/")[0]):
            found.append(f"{name}: {problem}")
    if not names:
        found += uncovered(read)
    return found


if __name__ == "__main__":
    problems = all_problems(sys.argv[1:])
    print("\n".join(problems) or "every setting is the paper's or has its reason")
    sys.exit(bool(problems))
