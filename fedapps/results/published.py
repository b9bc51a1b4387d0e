"""Published values: the [published] tables of an experiment, and which runs they belong to.

    [[published]]
    at = { num-clients = 10 }        # settings that select this column of the paper's table
    train-accuracy = { fedavg = 95.06 }   # accuracy in % of the training clients, by method
    novel-accuracy = { fedavg = 94.69 }   # … of novel clients
    train-rmse = { fedavg = 53.4 }   # errors of values in their unit

The keys are those of `SCORE_COLUMNS`. Earlier releases wrote `train`, `novel`, `test`, `f1`,
`f1-users` and `test-rmse`, which are still read. A single column is a plain ``[published]`` without
`at`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedapps.results.runs import SCORE_COLUMNS, label_without, own_settings
from fedapps.settings.config import Value, effective
from fedapps.settings.published_tables import with_score_keys

if TYPE_CHECKING:
    from pandas import DataFrame

DEFINING = ("dataset", "partition")  # a run that differs in these does not belong to the paper
IGNORED = {
    "output-dir",
    "training-dir",
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
        named = []
        for column in columns:
            _check_tables(column)
            present = with_score_keys(column)
            _check_scores(present)
            named.append(present)
        return cls(settings, named)

    def value(self, label: str, config: Mapping[str, Any], score: str) -> float | None:
        """The paper's value for a run's method and settings, None if there is none."""
        for column in self.columns:
            at = column.get("at", {})
            # A label that sets what selects the column is written there without it.
            value = column.get(score, {}).get(label_without(label, at))
            if value is None:
                continue
            fixed = {key: self.settings[key] for key in DEFINING if key in self.settings}
            fixed |= at
            if all(effective(config, key) == wanted for key, wanted in fixed.items()):
                return float(value)
        return None

    def of(self, runs: "DataFrame", score: str) -> float | None:
        """The value for a group of runs: that of the first run that has one."""
        for label, config in zip(runs.variant, runs.config, strict=True):
            value = self.value(label, config, score)
            if value is not None:
                return value
        return None

    def deviations(self, runs: "DataFrame") -> dict[str, Value]:
        """The settings in which runs with published values differ from the experiment."""
        # What selects a column differs between columns, not between the paper and the runs.
        selecting = set(IGNORED)
        for column in self.columns:
            selecting |= column.get("at", {}).keys()
        differing: dict[str, Value] = {}
        for label, config in zip(runs.variant, runs.config, strict=True):
            if all(self.value(label, config, score) is None for score in SCORE_COLUMNS):
                continue
            of_label = own_settings(label)
            for key, value in self.settings.items():
                # A label's settings are visible in the table, beside the value.
                name = key.removeprefix(f"{config['method']}.")
                if key in selecting or name in of_label:
                    continue
                if config.get(key, value) != value:
                    differing[key] = config[key]
        return differing


def _check_tables(column: Any) -> None:
    """Raise ValueError unless the column maps names to tables."""
    tables = column.values() if isinstance(column, dict) else [None]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"[published] holds {column!r:.100}; it must hold tables")


def _check_scores(column: Mapping[str, Any]) -> None:
    """Raise ValueError unless the names are "at" and known scores, and each score's table maps
    methods to finite numbers."""
    unknown = column.keys() - SCORE_COLUMNS.keys() - {"at"}
    if unknown:
        known = ", ".join(["at", *SCORE_COLUMNS])
        raise ValueError(f"[published] has {min(unknown)!r}; known: {known}")
    for score, values in column.items():
        if score == "at":
            continue
        for method, value in values.items():
            # By `type`, since a boolean is an instance of int; TOML also has NaN and infinity.
            if type(value) not in (int, float) or not isfinite(value):
                raise ValueError(f"[published] {score} of {method} is {value!r:.100}, no number")
