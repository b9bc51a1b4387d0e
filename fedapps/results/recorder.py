"""Writes the files of a run's folder and its checkpoints; docs/reference/run-folder.md has them."""

import json
import logging
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic_core import to_json
from rich.text import Text

from clients.core.arrays import Arrays
from fedapps.common.errors import described, error_line, is_sentence
from fedapps.common.external_code import named
from fedapps.common.new_files import remove_folder
from fedapps.common.tasks import MAIN_SCORES, goodness, main_score, reported_name
from fedapps.files import (
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
from fedapps.results.method_code import code_of
from fedapps.results.model_files import ARRAY_FILES, digests_of, model_files, write_final
from fedapps.results.progress import shown
from fedapps.results.schema import DECISION_METRICS, metric_names, with_present_names
from fedapps.saved import CHECKPOINTS, CLIENTS, DIGESTS, SUMMARY, State, state_bytes
from fedapps.settings.config import Config
from strategies.core.replies import Update
from strategies.core.strategy import PersonalizedStrategy

log = logging.getLogger("flwr")
# Templates of the training clients' metric that decides the round which a group reports; the first
# that is known counts. Novel clients get the global model, where training clients get others.
CHOICE = {"train": ("{}",), "novel": ("global-{}", "{}")}
SETTINGS = ("method", "dataset", "partition", "model", "seed")  # which the summary repeats
PRIVACY_KEYS = ("epsilon", "delta", "noise-multiplier", "sigma", "generator", "terms")
OF_SUB_POPULATIONS = ("sub-population", "head")  # of a single client, beside its accuracy
CHOSEN = "chosen-"  # prefix of metrics: the share of batches in which a correction was chosen


class Recorder:
    """Writes a line per round, summary and model at every evaluation, and a checkpoint every
    `checkpoint-every` rounds. Use as a context around the run.

    Files that the disk does not take are written later; OSError at the end if it never took them.
    Without a folder only the summary is kept. `former` is the checkpoint to resume from."""

    def __init__(
        self, config: Config, engine: str, folder: Path | None, former: State | None = None
    ) -> None:
        self.config = config
        self.folder = folder
        self.engine = engine
        self.rounds: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.strategy: PersonalizedStrategy | None = None  # whose last state is written at the end
        # The evaluation that each group reports, by role.
        self._best: dict[str, dict[str, Any]] = {}
        # The strategy's and the clients' states at the round that novel clients report.
        self._model: State = {}
        self._client_states: dict[int, Arrays] = {}
        # The clients' states after the present round; None until they were asked.
        self._present_states: dict[int, Arrays] | None = None
        self._phase = 0
        self._writer = Writer(folder)
        self._written_rounds = 0  # lines in metrics.jsonl
        self._failures: list[str] = []
        self._model_changed = False  # the folder's model is not `_model`
        self._digests: dict[str, str] = {}  # of the files with arrays in the folder, by name
        self._started = time.monotonic()
        # Seconds in which another run trained the rounds that this one has taken from it.
        self.training_elsewhere = 0.0
        if former is not None:
            self._restore(former["recorder"])
        if folder is not None:
            self._prepare(folder, former is not None)

    def _restore(self, saved: State) -> None:
        """Take over what `write_checkpoint_if_due` saved."""
        self.rounds = saved["rounds"]
        self.summary = saved["summary"]
        self._phase = saved["phase"]
        self._best = {role: _renamed(evaluation) for role, evaluation in saved["best"].items()}
        self._model = saved["model"]
        self._client_states = saved["memories"]
        self._started -= saved["seconds"]

    def _prepare(self, folder: Path, resumed: bool) -> None:
        """Restore the folder's state at the checkpoint; without one, remove former results."""
        folder.mkdir(parents=True, exist_ok=True)
        if not resumed:
            folders.clear(folder)
            # Privacy that lost rounds have spent stays spent.
            if not self.config["resume"]:
                (folder / PRIVACY).unlink(missing_ok=True)
            remove_folder(folder / CHECKPOINTS)
        write_configuration(folder, self.config, resumed=resumed)
        write_text(folder / CARD, make_card(self.config).text())
        if resumed:
            folders.clear(folder)
            self._model_changed = True
            self._write(results=bool(self.summary))

    def record(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Add a round's report; a later report of the same round replaces it."""
        if self.rounds and self.rounds[-1]["round"] == report["round"]:
            self._remove_last_round()
        self.rounds.append(report)
        self.strategy = strategy
        self._present_states = None
        evaluated = "evaluation" in report
        if evaluated:
            self._record_evaluation(report, strategy)
        self._write(results=evaluated)

    def _remove_last_round(self) -> None:
        """Forget the last round; all lines of metrics.jsonl are written again."""
        self.rounds.pop()
        if self.folder is not None:
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            self._written_rounds = 0

    def _record_evaluation(self, report: dict[str, Any], strategy: PersonalizedStrategy) -> None:
        """Keep the evaluation, and the model, if they are the best so far; make the summary."""
        evaluation = _evaluation_of(report, strategy)
        if strategy.selection_phase != self._phase:
            self._phase = strategy.selection_phase
            self._best = {}
        for role in CHOICE:
            if not self._is_best(role, evaluation, strategy):
                continue
            self._best[role] = evaluation
            if role == "novel":
                self._keep_reported_model(strategy)
        self.summary = self._summarize(evaluation)
        text = Text.from_markup("  ".join(shown(report).values())).plain
        log.info("round %s: %s", report["round"], text)

    def record_failure(self, text: str) -> None:
        """Add a cause to errors.log."""
        self._failures.append(text)
        if self.folder is not None:
            file = self.folder / ERRORS
            content = "\n\n".join(self._failures) + "\n"
            self._writer.write(ERRORS, lambda: write_text(file, content))

    def write_checkpoint_if_due(self, strategy: PersonalizedStrategy, more: State) -> None:
        """Write a checkpoint with the `more` state if one is due."""
        folder = self.folder
        every = int(self.config["checkpoint-every"])
        number = strategy.round
        if folder is None or every == 0 or number % every != 0:
            return
        try:
            client_states = self._client_states_now(strategy)
            strategy_state = strategy.state()
        except RuntimeError as error:
            log.warning("round %s: no checkpoint is written: %s", number, error)
            return
        recorder = {
            "rounds": self.rounds,
            "summary": self.summary,
            "phase": self._phase,
            "best": self._best,
            "model": self._model,
            "memories": self._client_states,
            "seconds": self._seconds,
        }
        state = {"clients": client_states, "strategy": strategy_state, **more}
        state["recorder"] = recorder
        content = state_bytes({"config": self.config, "state": state})
        self._writer.write(
            CHECKPOINTS, lambda: checkpoint.write_checkpoint(folder, number, content)
        )

    def _is_best(
        self, role: str, evaluation: dict[str, Any], strategy: PersonalizedStrategy
    ) -> bool:
        """Whether this evaluation is the best so far for a group of clients, by the trimmed mean of
        the training clients' scores; the mean breaks ties."""
        best = self._best.get(role)
        if best is None or strategy.report_last_round:
            return True
        selected = str(self.config["selection-metric"])
        reported = (key.removeprefix("train-") for key in evaluation["evaluation"])
        metric = reported_name(selected, reported)
        best_score = _selection_score(role, best["evaluation"], metric)
        score = _selection_score(role, evaluation["evaluation"], metric)
        if best_score is None:
            return True
        return score is not None and score > best_score

    @property
    def _may_ask_states(self) -> bool:
        """Whether to ask clients for their states: only simulated clients that may have one."""
        if self.folder is None or self.engine == "deployment":
            return False
        client = METHODS[str(self.config["method"])].client
        from_outside = not client.__module__.startswith("clients.")
        return from_outside or bool(client.needs_state)

    def _client_states_now(self, strategy: PersonalizedStrategy) -> dict[int, Arrays]:
        """The clients' states; they are asked once a round."""
        if self._present_states is None:
            states: dict[int, Arrays] = {}
            if self._may_ask_states:
                assert self.folder is not None
                states = spill(strategy.client_states(), self.folder)
            self._present_states = states
        return self._present_states

    def _keep_reported_model(self, strategy: PersonalizedStrategy) -> None:
        """Keep the present model as the one to report."""
        if self.folder is None:
            return
        self._model = deepcopy(_saved_state(strategy)) | {"token": strategy.token}
        try:
            self._client_states = self._client_states_now(strategy)
        except RuntimeError as error:
            message = "round %s: the model is kept without its clients: %s"
            log.warning(message, strategy.round, error)
            self._client_states = {}
        self._model_changed = True

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
        private = self.config["dp"] != "none"
        if isinstance(error, Exception) and not is_sentence(error):
            self.record_failure(f"server\n{described(error, private=private)}")
        if self.folder is not None:
            self._write_last_files(self.folder, finished=error is None)
        failure = error or self._missing_files()
        self.summary["finished"] = failure is None
        self.summary |= self._name()
        if failure is not None:
            self.summary["error"] = error_line(failure, private=private)
        self._write(results=True)
        if error is not None:
            return
        # Writing the summary can fail as well.
        failure = failure or self._missing_files()
        if failure is not None:
            raise failure
        if self.folder is not None:
            remove_folder(self.folder / CHECKPOINTS)

    def _write_last_files(self, folder: Path, *, finished: bool) -> None:
        """Write the last results, the clients' states, and the last model of a finished run."""
        states = self._client_states
        self._writer.due.pop(CHECKPOINTS, None)
        self._write(results=bool(self.summary))
        if self._may_ask_states:
            self._writer.write(CLIENTS, lambda: self._write_client_states(folder, states))
        if finished and self._model and self.strategy is not None:
            final = _saved_state(self.strategy)
            self._writer.write("the last model", lambda: self._write_final(folder, final))

    def _missing_files(self) -> OSError | None:
        """The error for files that are not written."""
        if not self._writer.due:
            return None
        assert self.folder is not None
        files = ", ".join(self._writer.due)
        return OSError(
            f"the disk did not take {files} of {self.folder} ({self._writer.error}); make room, "
            f"then: {resume_command(self.folder, named(self.config))}"
        )

    def _write(self, results: bool) -> None:
        """Write the rounds' lines; then, if there are new `results`, the model and the summary."""
        if self.folder is None:
            return
        if self._written_rounds < len(self.rounds):
            self._writer.write("metrics.jsonl", self._write_lines)
        if results:
            self._writer.write(SUMMARY, self._write_results)

    def _write_results(self) -> None:
        """The model, and last the summary, which vouches for all files with arrays."""
        assert self.folder is not None
        files: dict[Path, bytes] = {}
        digests = dict(self._digests)
        if self._model_changed:
            files = model_files(self.folder, self._model)
            for name in ARRAY_FILES:
                digests.pop(name, None)
            digests |= digests_of(files)
        summary = self.summary | {DIGESTS: digests}
        # json.dumps takes six times as long to indent.
        files[self.folder / SUMMARY] = to_json(summary, indent=1)
        write_files(files)
        # Only now: where the disk takes nothing, the same files are written again.
        self.summary = summary
        self._digests = dict(digests)
        self._model_changed = False

    def _write_client_states(self, folder: Path, states: Mapping[int, Arrays]) -> None:
        self._digests[CLIENTS] = folders.write_client_states(folder, states)

    def _write_final(self, folder: Path, state: State) -> None:
        self._digests |= write_final(folder, state)

    def _write_lines(self) -> None:
        """Append the rounds that are not in metrics.jsonl."""
        assert self.folder is not None
        new = self.rounds[self._written_rounds :]
        lines = [json.dumps(report) + "\n" for report in new]
        append_text(self.folder / "metrics.jsonl", "".join(lines))
        self._written_rounds = len(self.rounds)

    def _name(self) -> dict[str, str]:
        """The method's name in tables, if it has one."""
        name = METHODS[str(self.config["method"])].name
        return {"name": name} if name else {}

    def _per_client(self) -> dict[str, Any]:
        """Each client's scores at the round that its group reports, in the order of their ids."""
        reported: dict[str, Any] = {}
        for role in CHOICE:
            for client, scores in self._best[role]["per_client"].items():
                if scores["role"] == role:
                    reported[client] = scores
        return dict(sorted(reported.items(), key=lambda item: int(item[0])))

    def _summarize(self, last: dict[str, Any]) -> dict[str, Any]:
        """summary.json without `finished` and the digests; `last` is the last evaluation."""
        train = self._best["train"]
        novel = self._best["novel"]
        summary: dict[str, Any] = {key: self.config[key] for key in SETTINGS}
        summary |= self._name()
        summary["code"] = code_of(str(self.config["method"]))
        summary["engine"] = self.engine
        summary["rounds"] = sum(report["round"] > 0 for report in self.rounds)
        summary["best_round"] = train["round"]
        summary["novel_round"] = novel["round"]
        summary["last_round"] = last["round"]
        if self.strategy is not None and self.strategy.report_last_round:
            summary["reports_last_round"] = True
        if self.strategy is not None and self.strategy.saved_rounds:
            summary["earlier_rounds"] = self.strategy.saved_rounds
        of_training = _of_role("train", train["evaluation"])
        summary["evaluation"] = of_training | _of_role("novel", novel["evaluation"])
        summary["saved_model_train"] = _of_role("train", novel["evaluation"])
        summary["last"] = {key: last[key] for key in ("evaluation", "per_client")}
        summary["per_client"] = self._per_client()
        if "played" in self.rounds[-1]:
            summary["played"] = self.rounds[-1]["played"]
        summary |= self._totals()
        return summary

    def _totals(self) -> dict[str, Any]:
        """Traffic, time, privacy and counts of replies, over all rounds. With central privacy they
        are None: they reveal how many clients took part."""
        last = self.rounds[-1]
        private = "seconds" not in last
        totals: dict[str, Any] = {"megabytes_per_client_round": self._mean_megabytes()}
        totals["seconds"] = None if private else self._seconds
        privacy = _privacy(last)
        if privacy:
            totals["privacy"] = privacy
        totals["undone_rounds"] = sum(bool(report.get("undone")) for report in self.rounds)
        for name in ("clipped", "recounted"):
            count = sum(report.get(name, 0) for report in self.rounds)
            totals[f"{name}_replies"] = None if private else count
        totals |= self._late_replies()
        totals["dropped_replies"] = self._dropped_replies()
        return totals

    def _late_replies(self) -> dict[str, float]:
        """How many clients were late, and how many of their replies were used and dropped; the mean
        age of the used ones; the simulated seconds. {} for what the run does not have."""
        totals: dict[str, float] = {}
        if "simulated-seconds" in self.rounds[-1]:
            totals["simulated_seconds"] = self.rounds[-1]["simulated-seconds"]
        if "late" not in self.rounds[-1]:
            return totals
        for name in ("late", "late-used", "late-dropped"):
            totals[name.replace("-", "_")] = sum(report.get(name, 0) for report in self.rounds)
        ages = sum(report.get("late-age", 0) * report.get("late-used", 0) for report in self.rounds)
        if totals["late_used"]:
            totals["late_age"] = ages / totals["late_used"]
        return totals

    @property
    def _seconds(self) -> float:
        """The run's time so far, with the training of rounds that it has taken from another run."""
        return time.monotonic() - self._started + self.training_elsewhere

    def _mean_megabytes(self) -> dict[str, float | None]:
        """Traffic of a client in a round, the mean over rounds; None if it is secret."""
        traffic = [report["megabytes"] for report in self.rounds if "megabytes" in report]
        if not traffic:
            return {"down": None, "up": None}
        means: dict[str, float | None] = {}
        for direction in ("down", "up"):
            means[direction] = sum(megabytes[direction] for megabytes in traffic) / len(traffic)
        return means

    def _dropped_replies(self) -> int | None:
        """How many train replies were refused in all rounds; None if that is secret."""
        dropped = [report["dropped"] for report in self.rounds if "dropped" in report]
        if not dropped:
            return None
        return sum(sum(by_cause.values()) for by_cause in dropped)


def _saved_state(strategy: PersonalizedStrategy) -> State:
    """What a model's files hold of a strategy."""
    kept = {name: getattr(strategy, name) for name in strategy.persistent_attributes}
    return {"arrays": strategy.arrays, "kept": kept, "handout": strategy.published_models}


def _selection_score(
    role: str, evaluation: dict[str, Any], metric: str
) -> tuple[float, float] | None:
    """What decides the round of a group, larger for better models: the selection mean and the mean
    of the training clients' `metric` on validation samples. None if no client reported it."""
    for template in CHOICE[role]:
        name = template.format(metric)
        mean = evaluation.get(f"train-{name}")
        if mean is None:
            continue
        # There is no trimmed mean with `selection-mean` "plain", nor in old checkpoints.
        trimmed = evaluation.get(f"train-trimmed-{name}", mean)
        return goodness(metric, trimmed), goodness(metric, mean)
    return None


def _privacy(report: dict[str, Any]) -> dict[str, Any]:
    """The privacy budget spent so far; {} without privacy."""
    budget: dict[str, Any] = {}
    for name in PRIVACY_KEYS:
        if f"dp-{name}" in report:
            budget[name.replace("-", "_")] = report[f"dp-{name}"]  # a key, and no metric
    return budget


def _evaluation_of(report: dict[str, Any], strategy: PersonalizedStrategy) -> dict[str, Any]:
    """One evaluation as summary.json has it: the metrics of the training clients, and of the novel
    ones if some were scored."""
    metrics = _of_role("train", report["evaluation"])
    if not any(f"train-{name}" in metrics for name in MAIN_SCORES):
        metrics["train-accuracy"] = None
    if report["evaluation"].get("novel-clients"):
        metrics |= _of_role("novel", report["evaluation"])
    return {
        "round": report["round"],
        "evaluation": metrics,
        "per_client": {str(u.node.client): _client(u) for u in strategy.evaluation},
    }


def _renamed(evaluation: dict[str, Any]) -> dict[str, Any]:
    """An evaluation of a checkpoint, with metrics' names where an earlier release wrote others."""
    renamed: dict[str, Any] = dict(with_present_names(evaluation))
    per_client = evaluation["per_client"]
    renamed["per_client"] = {client: metric_names(got) for client, got in per_client.items()}
    return renamed


def _of_role(role: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a group of clients."""
    return {name: value for name, value in metrics.items() if name.startswith(f"{role}-")}


def _client(update: Update) -> dict[str, Any]:
    """What one client's evaluation reply says of it."""
    scores: dict[str, Any] = {
        "role": "novel" if update.node.novel else "train",
        # No whole number if a limit cut it, or if a foreign client sent a weight.
        "examples": round(update.num_examples),
    }
    main = main_score(update.metrics).name
    scores[main] = update.metrics.get(main)
    for name in OF_SUB_POPULATIONS:
        if name in update.metrics:
            scores[name] = update.metrics[name]
    return scores | _decision(update.metrics)


def _decision(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a client decided, and from what; of several batches the most frequent choice. {} for a
    client that chose nothing."""
    shares: dict[str, float] = {}
    for name in sorted(metrics):
        if name.startswith(CHOSEN):
            shares[name.removeprefix(CHOSEN)] = metrics[name]
    if not shares:
        return {}
    decision: dict[str, Any] = {"chosen": max(shares, key=lambda name: shares[name])}
    for name in DECISION_METRICS:
        if name in metrics:
            decision[name] = metrics[name]
    return decision
