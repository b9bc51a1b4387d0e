"""Writes the files of a run's folder and its checkpoints; docs/reference/run-folder.md has them."""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.text import Text

from clients.core.arrays import Arrays
from fedapps.common.errors import described, error_line, is_sentence
from fedapps.common.external_code import named
from fedapps.files import (
    CHECKPOINTS,
    ERRORS,
    PRIVACY,
    Writer,
    append_text,
    resume_command,
    spill,
    write_configuration,
    write_files,
    write_text,
)
from fedapps.methods import METHODS
from fedapps.results import checkpoint
from fedapps.results import folder as folders
from fedapps.results.card import FILE as CARD
from fedapps.results.card import make_card
from fedapps.results.checkpoint import State
from fedapps.results.progress import shown
from fedapps.saved import CLIENTS, DIGESTS, SUMMARY
from fedapps.settings.config import Config
from strategies.core.evaluation import goodness
from strategies.core.rounds import PersonalizedStrategy

log = logging.getLogger("flwr")
# What decides the round that a group reports: training clients' scores of the model that it gets.
CHOICE = {"train": ("{}",), "novel": ("global_{}", "{}")}


class Recorder:
    """Writes a line per round, summary and model at every evaluation, and a checkpoint every
    `checkpoint-every` rounds. Use as a context around the run.

    Files that the disk does not take are written later; OSError at the end if it never took them.
    Without a folder only the summary is kept. `former` is the checkpoint to resume from."""

    def __init__(
        self, config: Config, engine: str, folder: Path | None, former: State | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.engine = engine
        self.rounds: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._best: dict[str, dict[str, Any]] = {}  # the evaluation that each group reports
        self._model: State = {}  # the strategy's state at the round that novel clients report
        self._client_states: dict[int, Arrays] = {}  # its clients' states at that round
        self._present: dict[int, Arrays] | None = None  # the clients' states in this round
        self._writer = Writer(folder)
        self._lines = 0  # of metrics.jsonl
        self._failures: list[str] = []
        name = METHODS[str(config["method"])].name
        self._name = {"name": name} if name else {}
        self._changed = False  # whether the model is not the one in the folder
        self._digests: dict[str, str] = {}  # of the files with arrays in the folder, by name
        self._phase = 0
        self.strategy: PersonalizedStrategy | None = None  # whose last state is written at the end
        self._started = time.monotonic()
        if former is not None:
            saved = former["recorder"]
            self.rounds, self.summary = saved["rounds"], saved["summary"]
            self._phase, self._best = saved["phase"], saved["best"]
            self._model, self._client_states = saved["model"], saved["memories"]
            self._started -= saved["seconds"]
        if folder is not None:
            self._prepare(folder, former is not None)

    def _prepare(self, folder: Path, resumed: bool) -> None:
        """Restore the folder's state at the checkpoint; without one, remove former results."""
        folder.mkdir(parents=True, exist_ok=True)
        if not resumed:
            folders.clear(folder)
            if not self.config["resume"]:  # privacy that lost rounds have spent stays spent
                (folder / PRIVACY).unlink(missing_ok=True)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        write_configuration(folder, self.config)
        write_text(folder / CARD, make_card(self.config).text())
        if resumed:
            folders.clear(folder)
            self._changed = True
            self._write(bool(self.summary))

    def record(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Add a round's report; a later report of the same round replaces it."""
        if self.rounds and self.rounds[-1]["round"] == report["round"]:
            self.rounds.pop()
            if self.folder is not None:  # write all lines again
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)
                self._lines = 0
        self.rounds.append(report)
        self._present, self.strategy = None, strategy
        if "evaluation" in report:
            result = _result(report, strategy)
            if strategy.selection_phase != self._phase:
                self._phase, self._best = strategy.selection_phase, {}
            better = {role: self._is_best(role, result, strategy) for role in CHOICE}
            self._best |= {role: result for role in CHOICE if better[role]}
            if better["novel"]:
                self._keep_reported_model(strategy)
            self.summary = self._summarize(result)
            words = Text.from_markup("  ".join(shown(report).values())).plain
            log.info("round %s: %s", report["round"], words)
        self._write("evaluation" in report)

    def record_failure(self, text: str) -> None:
        """Add a cause to errors.log."""
        self._failures.append(text)
        if self.folder is not None:
            file, content = self.folder / ERRORS, "\n\n".join(self._failures) + "\n"
            self._writer.write(ERRORS, lambda: write_text(file, content))

    def write_checkpoint_if_due(self, strategy: PersonalizedStrategy, more: State) -> None:
        """Write a checkpoint with the `more` state if one is due."""
        every, folder, number = int(self.config["checkpoint-every"]), self.folder, strategy.round
        if folder is None or not every or number % every:
            return
        recorder = {
            "rounds": self.rounds,
            "summary": self.summary,
            "phase": self._phase,
            "best": self._best,
            "model": self._model,
            "memories": self._client_states,
            "seconds": time.monotonic() - self._started,
        }
        try:
            state = {
                "clients": self._client_states_now(strategy),
                "strategy": strategy.state(),
            } | more
        except RuntimeError as error:
            log.warning("round %s: no checkpoint is written: %s", number, error)
            return
        state |= {"recorder": recorder}
        content = checkpoint.state_bytes({"config": self.config, "state": state})
        self._writer.write(
            CHECKPOINTS, lambda: checkpoint.write_checkpoint(folder, number, content)
        )

    def _is_best(self, role: str, result: dict[str, Any], strategy: PersonalizedStrategy) -> bool:
        """Whether this evaluation is the best so far for a group of clients, by the trimmed mean of
        the training clients' scores; the mean breaks ties."""
        best, select = self._best.get(role), str(self.config["selection-metric"])
        if best is None or strategy.report_last_round:
            return True
        value, former = (_choice(role, e["train"], select) for e in (result, best))
        return former is None or (value is not None and value > former)

    @property
    def _may_ask_states(self) -> bool:
        """Whether to ask clients for their states: simulated ones that may have some, as all
        clients from outside the package may."""
        client = METHODS[str(self.config["method"])].client
        may = bool(client.needs_state) or not client.__module__.startswith("clients.")
        return may and self.engine != "deployment" and self.folder is not None

    def _client_states_now(self, strategy: PersonalizedStrategy) -> dict[int, Arrays]:
        """The clients' states; they are asked once a round."""
        if self._present is None:
            folder = self.folder if self._may_ask_states else None
            self._present = {} if folder is None else spill(strategy.client_states(), folder)
        return self._present

    def _keep_reported_model(self, strategy: PersonalizedStrategy) -> None:
        """Keep the present model as the one to report."""
        if self.folder is None:
            return
        self._model = deepcopy(_state(strategy)) | {"token": strategy.token}
        try:
            self._client_states = self._client_states_now(strategy)
        except RuntimeError as error:
            message = "round %s: the model is kept without its clients: %s"
            log.warning(message, strategy.round, error)
            self._client_states = {}
        self._changed = True

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mark the summary as that of a finished run, or write the error into it. Raises OSError if
        the disk did not take all files."""
        folder, memories = self.folder, self._client_states
        private = self.config["dp"] != "none"
        if isinstance(error, Exception) and not is_sentence(error):
            self.record_failure(f"server\n{described(error, private=private)}")
        if folder is not None:
            self._writer.due.pop(CHECKPOINTS, None)
            self._write(bool(self.summary))
            if self._may_ask_states:
                self._writer.write(CLIENTS, lambda: self._write_client_states(folder, memories))
            if error is None and self._model and (strategy := self.strategy) is not None:
                final = _state(strategy)
                self._writer.write("the last model", lambda: self._write_final(folder, final))
        missing = self._missing() if error is None else None
        failed = error or missing
        self.summary["finished"] = failed is None
        self.summary |= self._name
        if failed is not None:
            self.summary["error"] = error_line(failed, private=private)
        self._write(True)
        if error is None and (failed := missing or self._missing()):
            raise failed
        if error is None and folder is not None:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    def _missing(self) -> OSError | None:
        """The error for files that are not written."""
        if not self._writer.due:
            return None
        assert self.folder is not None
        files, folder = ", ".join(self._writer.due), self.folder
        return OSError(
            f"the disk did not take {files} of {folder} ({self._writer.error}); make room, then: "
            f"{resume_command(folder, named(self.config))}"
        )

    def _write(self, results: bool) -> None:
        """Write the rounds' lines; then, if there are new `results`, the model and the summary."""
        if self.folder is None:
            return
        if self._lines < len(self.rounds):
            self._writer.write("metrics.jsonl", self._write_lines)
        if results:
            self._writer.write(SUMMARY, self._write_results)

    def _write_results(self) -> None:
        """The model, and last the summary, which vouches for all files with arrays."""
        assert self.folder is not None
        files = folders.model_files(self.folder, self._model) if self._changed else {}
        digests = self._digests
        if self._changed:
            others = {n: d for n, d in digests.items() if n not in folders.ARRAY_FILES}
            digests = others | folders.digests_of(files)
        summary = self.summary | {DIGESTS: dict(digests)}
        content = json.dumps(summary, indent=1).encode()
        write_files(files | {self.folder / SUMMARY: content})
        self.summary, self._digests = summary, digests
        self._changed = False

    def _write_client_states(self, folder: Path, states: Mapping[int, Arrays]) -> None:
        self._digests[CLIENTS] = folders.write_client_states(folder, states)

    def _write_final(self, folder: Path, state: State) -> None:
        self._digests |= folders.write_final(folder, state)

    def _write_lines(self) -> None:
        """The rounds that are not in metrics.jsonl."""
        assert self.folder is not None
        lines = [json.dumps(report) + "\n" for report in self.rounds[self._lines :]]
        append_text(self.folder / "metrics.jsonl", "".join(lines))
        self._lines = len(self.rounds)

    def _per_client(self) -> dict[str, Any]:
        """Each client's scores at the round that its group reports."""
        found = {
            client: scores
            for role in CHOICE
            for client, scores in self._best[role]["per_client"].items()
            if scores["role"] == role
        }
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    def _summarize(self, last: dict[str, Any]) -> dict[str, Any]:
        keys = ("method", "dataset", "partition", "model", "seed")
        private = "seconds" not in self.rounds[-1]  # they reveal how many took part
        megabytes = [r["megabytes"] for r in self.rounds if "megabytes" in r]  # private: none
        dropped = [r["dropped"] for r in self.rounds if "dropped" in r]
        earlier = self.strategy.saved_rounds if self.strategy is not None else 0
        return {
            **{key: self.config[key] for key in keys},
            **self._name,
            "engine": self.engine,
            "rounds": sum(report["round"] > 0 for report in self.rounds),
            "best_round": self._best["train"]["round"],
            "novel_round": self._best["novel"]["round"],
            "last_round": last["round"],
            **({"earlier_rounds": earlier} if earlier else {}),
            "train": self._best["train"]["train"],
            "novel": self._best["novel"]["novel"],
            "saved_model_train": self._best["novel"]["train"],
            "last": {key: last[key] for key in ("train", "novel", "per_client")},
            "per_client": self._per_client(),
            "megabytes_per_client_round": {
                way: sum(m[way] for m in megabytes) / len(megabytes) if megabytes else None
                for way in ("down", "up")
            },
            "seconds": None if private else time.monotonic() - self._started,
            **({"privacy": spent} if (spent := _privacy(self.rounds[-1])) else {}),
            "undone_rounds": sum(bool(r.get("undone")) for r in self.rounds),
            "clipped_replies": None if private else sum(r.get("clipped", 0) for r in self.rounds),
            "recounted_replies": None
            if private
            else sum(r.get("recounted", 0) for r in self.rounds),
            "dropped_replies": sum(sum(d.values()) for d in dropped) if dropped else None,
        }


def _state(strategy: PersonalizedStrategy) -> State:
    """What a model's files hold of a strategy."""
    kept = {name: getattr(strategy, name) for name in strategy.persistent_attributes}
    return {"arrays": strategy.arrays, "kept": kept, "handout": strategy.published_models}


def _choice(role: str, train: dict[str, Any], select: str) -> tuple[float, float] | None:
    """What decides the round of a group: the trimmed mean and the mean of training clients' scores
    on validation samples. Evaluations that were saved before have no trimmed mean."""
    names = [name.format(select.replace("-", "_")) for name in CHOICE[role]]
    name = next((name for name in names if train.get(name) is not None), None)
    if name is None:
        return None
    scores = train.get(f"trimmed_{name}", train[name]), train[name]
    return goodness(select, scores[0]), goodness(select, scores[1])


def _privacy(report: dict[str, Any]) -> dict[str, Any]:
    """The privacy budget spent so far; {} without privacy."""
    names = ("epsilon", "delta", "noise-multiplier", "sigma", "generator", "terms")
    present = [name for name in names if f"dp-{name}" in report]
    return {name.replace("-", "_"): report[f"dp-{name}"] for name in present}


def _result(report: dict[str, Any], strategy: PersonalizedStrategy) -> dict[str, Any]:
    """One evaluation as the summary shows it."""
    numbers = report["evaluation"]
    groups: dict[str, dict[str, Any] | None] = {}
    for role in ("train", "novel"):
        groups[role] = {"accuracy": None, "clients": 0} | {
            key.removeprefix(f"{role}-").replace("-", "_"): value
            for key, value in numbers.items()
            if key.startswith(f"{role}-")
        }
    if not numbers.get("novel-clients"):
        groups["novel"] = None
    return {
        "round": report["round"],
        **groups,
        "per_client": {
            str(update.node.client): {
                "role": "novel" if update.node.novel else "train",
                "accuracy": update.metrics.get("accuracy"),
                "examples": round(update.num_examples),  # a limited count, a foreign weight
            }
            | {
                key.replace("-", "_"): update.metrics[key]
                for key in ("sub-population", "head")
                if key in update.metrics
            }
            for update in strategy.evaluation
        },
    }
