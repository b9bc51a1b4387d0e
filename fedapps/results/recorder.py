"""What a run leaves in its folder, as docs/run-folder.md tells it, and its checkpoints."""

import json
import shutil
import time
from copy import deepcopy
from logging import WARNING
from pathlib import Path
from types import TracebackType
from typing import Any

from flwr.common.logger import log

from clients.arrays import Arrays
from fedapps.files import (
    CHECKPOINTS,
    PRIVACY,
    Writer,
    append_text,
    spill,
    write_configuration,
    write_files,
)
from fedapps.methods import METHODS
from fedapps.results import checkpoint
from fedapps.results import folder as folders
from fedapps.results.card import make_card, write_card
from fedapps.results.checkpoint import State
from fedapps.settings.config import Config
from strategies.base import PersonalizedStrategy


class Recorder:
    """Writes a line a round, summary and model at every evaluation, and a checkpoint every
    `checkpoint-every` rounds, so that a killed server can go on. Use as a context around the run.
    What the disk does not take is written later; OSError at the end for what it never took.
    Without a folder it only keeps the summary; `former` is the checkpoint to go on from, if there
    is one."""

    def __init__(
        self, config: Config, engine: str, folder: Path | None, former: State | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.engine = engine
        self.rounds: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._best: dict[str, Any] = {}
        self._model: State = {}  # the strategy at the best round: arrays, and what it keeps
        self._memories: dict[int, Arrays] = {}  # what its clients kept then
        self._told: dict[int, Arrays] | None = None  # what they keep in the round at hand
        self._writer = Writer(folder)
        self._lines = 0  # of metrics.jsonl
        self._changed = False  # whether the model is not the one in the folder
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
        if not again:
            folders.clear(folder)
            if not self.config["resume"]:  # what lost rounds spent stays spent
                (folder / PRIVACY).unlink(missing_ok=True)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        write_configuration(folder, self.config)
        write_card(folder, make_card(self.config))
        if again:
            folders.clear(folder)
            self._changed = True
            self._write(bool(self.summary))

    def record(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Take in one round's report, or what an evaluation after its end adds to it."""
        if self.rounds and self.rounds[-1]["round"] == report["round"]:
            self.rounds.pop()
            if self.folder is not None:  # its lines are written anew
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)
                self._lines = 0
        self.rounds.append(report)
        self._told = None
        if "evaluation" in report:
            result = _result(report, strategy)
            if self._choose(result, strategy):
                self._keep(strategy)
            self.summary = self._summarize(result)
        self._write("evaluation" in report)

    def check_point(self, strategy: PersonalizedStrategy, more: State) -> None:
        """Write a checkpoint, with what else lives through the run, if one is due; the ones before
        it stay until it is written."""
        every, folder, number = int(self.config["checkpoint-every"]), self.folder, strategy.round
        if folder is None or not every or number % every:
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
        except RuntimeError as error:
            log(WARNING, "round %s: no checkpoint is written: %s", number, error)
            return
        content = checkpoint.checkpoint_bytes(self.config, state | {"recorder": recorder})
        self._writer.write(
            CHECKPOINTS, lambda: checkpoint.write_checkpoint(folder, number, content)
        )

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
            folder = self.folder if self._asks else None
            self._told = {} if folder is None else spill(strategy.client_states(), folder)
        return self._told

    def _keep(self, strategy: PersonalizedStrategy) -> None:
        """The model at hand is the one to report."""
        if self.folder is None:
            return
        kept = {name: getattr(strategy, name) for name in strategy.kept}
        self._model = deepcopy(
            {"arrays": strategy.arrays, "kept": kept, "handout": strategy.handout}
        ) | {"token": strategy.token}
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
        self._changed = True

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mark the summary as that of a finished run, or leave the error in it. Raises OSError if
        the disk did not take all that a finished run leaves."""
        folder, memories = self.folder, self._memories
        if folder is not None:
            self._writer.due.pop(CHECKPOINTS, None)  # of no use any more
            self._write(bool(self.summary))
            if self._asks:
                self._writer.write("clients", lambda: folders.write_memories(folder, memories))
        untold = self._untold() if error is None else None
        failed = error or untold
        self.summary["finished"] = failed is None
        if failed is not None:
            self.summary["error"] = f"{type(failed).__name__}: {failed}"
        self._write(True)
        if error is None and (failed := untold or self._untold()):
            raise failed
        if error is None and folder is not None:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    def _untold(self) -> OSError | None:
        """What to say of files that are not written."""
        if not self._writer.due:
            return None
        files, folder = ", ".join(self._writer.due), self.folder
        return OSError(
            f"the disk did not take {files} of {folder} ({self._writer.error}); make room, then: "
            f"fedapps run --resume {folder}"
        )

    def _write(self, results: bool) -> None:
        """Bring the folder up to date: the rounds' lines, and the `results`."""
        if self.folder is None:
            return
        if results:
            self._writer.write("summary.json", self._write_results)
        if self._lines < len(self.rounds):
            self._writer.write("metrics.jsonl", self._write_lines)

    def _write_results(self) -> None:
        """The summary, together with the model that it tells of."""
        assert self.folder is not None
        files = folders.model_files(self.folder, self._model) if self._changed else {}
        summary = json.dumps(self.summary, indent=1)
        write_files(files | {self.folder / "summary.json": summary.encode()})
        self._changed = False

    def _write_lines(self) -> None:
        """The rounds that are not in metrics.jsonl."""
        assert self.folder is not None
        lines = [json.dumps(report) + "\n" for report in self.rounds[self._lines :]]
        append_text(self.folder / "metrics.jsonl", "".join(lines))
        self._lines = len(self.rounds)

    def _summarize(self, last: dict[str, Any]) -> dict[str, Any]:
        keys = ("method", "dataset", "partition", "model", "seed")
        private = "seconds" not in self.rounds[-1]  # they tell how many took part
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
            "seconds": None if private else time.monotonic() - self._started,
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
