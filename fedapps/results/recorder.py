"""What a run leaves in its folder, as docs/run-folder.md tells it, and its checkpoints."""

import json
import platform
import shutil
import sys
import time
from copy import deepcopy
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w
from flwr.common.logger import log

from clients.arrays import Arrays
from fedapps.config import Config
from fedapps.files import PRIVACY, write_text
from fedapps.methods import METHODS
from fedapps.results import checkpoint
from fedapps.results import folder as folders
from fedapps.results.checkpoint import State
from fedapps.service.card import make_card, write_card
from strategies.base import PersonalizedStrategy

FORMAT = "1"  # of what a run leaves; docs/run-folder.md tells it
LIBRARIES = ("fedapps", "flwr", "ray", "torch", "torchvision", "numpy", "flwr-datasets")


class Recorder:
    """Writes a line a round, summary and model at every evaluation, and a checkpoint every
    `checkpoint-every` rounds, so that a killed server can go on. Use as a context around the run.
    Without a folder it only keeps the summary; `engine` "" means whichever of Flower's engines
    runs it. `former` is the checkpoint to go on from, if there is one."""

    def __init__(
        self, config: Config, engine: str, folder: Path | None, former: State | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.engine = engine or ("flower" if "ray" in sys.modules else "deployment")
        self.rounds: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._best: dict[str, Any] = {}
        self._model: State = {}  # the strategy at the best round: arrays, and what it keeps
        self._memories: dict[int, Arrays] = {}  # what its clients kept then
        self._told: dict[int, Arrays] | None = None  # what they keep in the round at hand
        self._phase = 0
        self._started = time.monotonic()
        if former is not None:
            told = former["recorder"]
            self.rounds, self.summary, self._phase = told["rounds"], told["summary"], told["phase"]
            self._best, self._model, self._memories = told["best"], told["model"], told["memories"]
            self._started -= told["seconds"]
        if folder is not None:
            self._begin(folder, former is not None)

    def _begin(self, folder: Path, again: bool) -> None:
        """The folder as it was at the checkpoint; empty of former results without one."""
        folder.mkdir(parents=True, exist_ok=True)
        for stale in ("metrics.jsonl", "summary.json"):
            (folder / stale).unlink(missing_ok=True)
        folders.clear(folder)
        versions = {name: version(name) for name in LIBRARIES}
        versions |= {"python": platform.python_version(), "results": FORMAT}
        settings = self.config | {"resume": False, "versions": versions}
        write_text(folder / "config.toml", tomli_w.dumps(settings))
        write_card(folder, make_card(self.config))
        if not again:
            (folder / PRIVACY).unlink(missing_ok=True)
            shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
            return
        write_text(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in self.rounds))
        if self.summary:
            self._write_summary()
            folders.write_model(folder, self._model)

    def record(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Take in one round's report."""
        self.rounds.append(report)
        self._told = None
        if "evaluation" in report:
            result = _result(report, strategy)
            if self._choose(result, strategy):
                self._keep(strategy)
            self.summary = self._summarize(result)
            self._write_summary()
        if self.folder is not None:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")

    def check_point(self, strategy: PersonalizedStrategy, more: State) -> None:
        """Write a checkpoint, with what else lives through the run, if one is due; where that
        fails the run goes on, and the one before it stays."""
        every = int(self.config["checkpoint-every"])
        if self.folder is None or not every or strategy.round % every:
            return
        recorder = {
            "rounds": self.rounds,
            "summary": self.summary,
            "phase": self._phase,
            "best": self._best,
            "model": self._model,
            "memories": self._memories,
            "seconds": time.monotonic() - self._started,
        }
        try:
            state = {"clients": self._ask(strategy), "strategy": strategy.state()} | more
            state["recorder"] = recorder
            checkpoint.write_checkpoint(self.folder, self.config, strategy.round, state)
        except (OSError, RuntimeError) as error:
            log(WARNING, "round %s: no checkpoint is written: %s", strategy.round, error)

    def _choose(self, result: dict[str, Any], strategy: PersonalizedStrategy) -> bool:
        """Whether this evaluation is the one to report, as far as is known."""
        if strategy.phase != self._phase:
            self._phase, self._best = strategy.phase, {}
        accuracy = result["train"]["accuracy"]
        best = self._best.get("train", {}).get("accuracy")
        better = best is None or (accuracy is not None and accuracy > best)
        if better or strategy.reports_last:
            self._best = result
            return True
        return False

    @property
    def _asks(self) -> bool:
        """Whether clients may have something to tell, as those from outside the package always
        may, and are simulated: real ones tell nobody."""
        client = METHODS[str(self.config["method"])].client
        may = bool(client.needs_state) or not client.__module__.startswith("clients.")
        return may and self.engine != "deployment" and self.folder is not None

    def _ask(self, strategy: PersonalizedStrategy) -> dict[int, Arrays]:
        """What the clients keep; they are asked once a round."""
        if self._told is None:
            self._told = strategy.ask_memories() if self._asks else {}
        return self._told

    def _keep(self, strategy: PersonalizedStrategy) -> None:
        """The model at hand is the one to report."""
        if self.folder is None:
            return
        kept = {name: getattr(strategy, name) for name in strategy.kept}
        self._model = deepcopy(
            {"arrays": strategy.arrays, "kept": kept, "handout": strategy.handout}
        )
        try:
            self._memories = self._ask(strategy)
        except RuntimeError as error:
            log(
                WARNING,
                "round %s: the model is kept without its clients: %s",
                strategy.round,
                error,
            )
            self._memories = {}
        folders.write_model(self.folder, self._model)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mark the summary as that of a finished run, or leave the error in it."""
        if self._asks and self.folder is not None:
            folders.write_memories(self.folder, self._memories)
        self.summary["finished"] = error is None
        if error is not None:
            self.summary["error"] = f"{type(error).__name__}: {error}"
        self._write_summary()
        if error is None and self.folder is not None:
            shutil.rmtree(self.folder / checkpoint.FOLDER, ignore_errors=True)

    def _write_summary(self) -> None:
        if self.folder is not None:
            write_text(self.folder / "summary.json", json.dumps(self.summary, indent=1))

    def _summarize(self, last: dict[str, Any]) -> dict[str, Any]:
        keys = ("method", "dataset", "partition", "model", "seed")
        megabytes = [r["megabytes"] for r in self.rounds if "megabytes" in r]  # private: none
        dropped = [r["dropped"] for r in self.rounds if "dropped" in r]
        return {
            **{key: self.config[key] for key in keys},
            "engine": self.engine,
            "rounds": len(self.rounds),
            "best_round": self._best["round"],
            "train": self._best["train"],
            "novel": self._best["novel"],
            "last": {key: last[key] for key in ("train", "novel", "per_client")},
            "per_client": self._best["per_client"],
            "megabytes_per_client_round": {
                way: sum(m[way] for m in megabytes) / len(megabytes) if megabytes else None
                for way in ("down", "up")
            },
            "seconds": time.monotonic() - self._started,
            **({"privacy": told} if (told := _privacy(self.rounds[-1])) else {}),
            "dropped_replies": sum(sum(d.values()) for d in dropped) if dropped else None,
        }


def _privacy(report: dict[str, Any]) -> dict[str, Any]:
    """ε spent so far, at which δ, by which noise, and on which terms; {} without privacy."""
    names = ("epsilon", "delta", "noise-multiplier", "sigma", "generator", "terms")
    found = {name: report[f"dp-{name}"] for name in names if f"dp-{name}" in report}
    return {name.replace("-", "_"): value for name, value in found.items()}


def _result(report: dict[str, Any], strategy: PersonalizedStrategy) -> dict[str, Any]:
    """One evaluation as the summary shows it."""
    numbers = report["evaluation"]
    groups: dict[str, dict[str, Any] | None] = {}
    for role in ("train", "novel"):
        prefix = f"{role}-"
        told = {
            key.removeprefix(prefix).replace("-", "_"): value
            for key, value in numbers.items()
            if key.startswith(prefix)
        }
        groups[role] = {"accuracy": None, "clients": 0} | told
    if not numbers.get("novel-clients"):
        groups["novel"] = None
    return {
        "round": report["round"],
        **groups,
        "per_client": {
            str(update.node.client): {
                "role": "novel" if update.node.novel else "train",
                "accuracy": update.metrics.get("accuracy"),
                "examples": update.num_examples,
            }
            | {
                key.replace("-", "_"): update.metrics[key]
                for key in ("sub-population", "head")
                if key in update.metrics
            }
            for update in strategy.evaluation
        },
    }
