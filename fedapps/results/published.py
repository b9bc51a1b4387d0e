"""Published values: the [published] tables of an experiment, and what of them fits a run.

    [[published]]
    at = { num-clients = 10 }        # settings that tell this column of the paper from the others
    train = { fedavg = 95.06 }       # accuracy in % of the training clients, by method
    novel = { fedavg = 94.69 }       # … of the novel ones; "test" of test samples; "f1", "f1-users"

One column alone is a plain ``[published]`` without `at`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedapps.engines.jobs import Job
from fedapps.results.kinds import anything, finite, table
from fedapps.settings.config import Value, effective

SCORES = {
    "train": "training clients",
    "novel": "novel clients",
    "test": "test samples",
    "f1": "F1",
    "f1-users": "F1, users",
}
DEFINING = ("dataset", "partition")  # a run that differs in these has nothing to do with the paper
ASIDE = {"output-dir", "seed", "evaluate-every", "device", "cohort", "data-dir", "method"}


@dataclass(frozen=True)
class Published:
    """The columns that an experiment's file gives, and the settings under which they hold."""

    settings: Mapping[str, Any]
    columns: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, settings: Mapping[str, Any], tables: Any) -> "Published":
        """Raises ValueError for a table that says something else than the module's docstring."""
        columns = tables if isinstance(tables, list) else [tables]
        for column in columns:
            if not table(table(anything))(column):
                raise ValueError(f"[published] holds {column!r:.100}; it must hold tables")
            if unknown := column.keys() - SCORES.keys() - {"at"}:
                known = ", ".join(["at", *SCORES])
                raise ValueError(f"[published] has {min(unknown)!r}; known: {known}")
            for score in column.keys() - {"at"}:
                for method, value in column[score].items():
                    if not finite(value):
                        raise ValueError(
                            f"[published] {score} of {method} is {value!r:.100}, no number"
                        )
        return cls(settings, columns)

    def value(self, job: Job, score: str) -> float | None:
        """What the paper prints for this run's method and settings, None if nothing."""
        for column in self.columns:
            at = column.get("at", {})
            fixed = {key: self.settings[key] for key in DEFINING if key in self.settings} | at
            words = [w for w in job.method.split() if w.partition("=")[0] not in at]
            found = column.get(score, {}).get(" ".join(words))
            if found is not None and all(effective(job.config, k) == v for k, v in fixed.items()):
                return float(found)
        return None

    def deviations(self, jobs: Sequence[Job]) -> dict[str, Value]:
        """Settings in which runs beside published values differ from the experiment, and theirs."""
        told = {key for column in self.columns for key in column.get("at", {})} | ASIDE
        found: dict[str, Value] = {}
        for job in jobs:
            if any(self.value(job, score) is not None for score in SCORES):
                own = {word.partition("=")[0] for word in job.method.split()}
                for key, value in self.settings.items():
                    swept = key in told or key.removeprefix(f"{job.config['method']}.") in own
                    if not swept and job.config.get(key, value) != value:
                        found[key] = job.config[key]
        return found
