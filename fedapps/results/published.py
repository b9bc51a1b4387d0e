"""Published values: the [published] tables of an experiment, and which runs they belong to.

    [[published]]
    at = { num-clients = 10 }        # settings that select this column of the paper's table
    train = { fedavg = 95.06 }       # accuracy in % of the training clients, by method
    novel = { fedavg = 94.69 }       # … of novel clients; "test" of test samples; "f1", "f1-users"

A single column is a plain ``[published]`` without `at`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedapps.results.runs import SCORES, label_without, own_settings
from fedapps.settings.config import Value, effective

if TYPE_CHECKING:
    from pandas import DataFrame

DEFINING = ("dataset", "partition")  # a run that differs in these does not belong to the paper
IGNORED = {
    "output-dir",
    "seed",
    "evaluate-every",
    "device",
    "stacked-clients",
    "data-dir",
    "method",
}


@dataclass(frozen=True)
class Published:
    """The columns in an experiment's file, and the settings under which they hold."""

    settings: Mapping[str, Any]
    columns: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, settings: Mapping[str, Any], tables: Any) -> "Published":
        """Raises ValueError for a table that does not follow the module's docstring."""
        columns = tables if isinstance(tables, list) else [tables]
        for column in columns:
            inner = column.values() if isinstance(column, dict) else [None]
            if not all(isinstance(table, dict) for table in inner):
                raise ValueError(f"[published] holds {column!r:.100}; it must hold tables")
            if unknown := column.keys() - SCORES.keys() - {"at"}:
                known = ", ".join(["at", *SCORES])
                raise ValueError(f"[published] has {min(unknown)!r}; known: {known}")
            for score in column.keys() - {"at"}:
                for method, value in column[score].items():
                    if type(value) not in (int, float) or not isfinite(value):
                        raise ValueError(
                            f"[published] {score} of {method} is {value!r:.100}, no number"
                        )
        return cls(settings, columns)

    def value(self, label: str, config: Mapping[str, Any], score: str) -> float | None:
        """The paper's value for a run's method and settings, None if there is none."""
        for column in self.columns:
            at = column.get("at", {})
            fixed = {key: self.settings[key] for key in DEFINING if key in self.settings} | at
            value = column.get(score, {}).get(label_without(label, at))
            if value is not None and all(effective(config, k) == v for k, v in fixed.items()):
                return float(value)
        return None

    def of(self, runs: "DataFrame", score: str) -> float | None:
        """The value for a group of runs: that of the first run that has one."""
        values = (self.value(run.variant, run.config, score) for run in runs.itertuples())
        return next((value for value in values if value is not None), None)

    def deviations(self, runs: "DataFrame") -> dict[str, Value]:
        """The settings in which runs with published values differ from the experiment."""
        selecting = {key for column in self.columns for key in column.get("at", {})} | IGNORED
        differing: dict[str, Value] = {}
        for label, config in zip(runs.variant, runs.config, strict=True):
            if all(self.value(label, config, score) is None for score in SCORES):
                continue
            for key, value in self.settings.items():
                name = key.removeprefix(f"{config['method']}.")
                if key in selecting or name in own_settings(label):
                    continue
                if config.get(key, value) != value:
                    differing[key] = config[key]
        return differing
