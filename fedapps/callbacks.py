"""Callbacks of a run: early stopping, and trackers of experiments.

The setting `callbacks` names them, separated by commas: "tensorboard", "mlflow", "wandb", or a
class of your own as ``my_lab.hooks:Slack``, which is constructed without arguments. What a callback
lacks ends the run before its first round. One that fails later is logged and removed; the run goes
on."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedapps.common import external_code
from fedapps.common.class_members import check_members
from fedapps.common.errors import described, error_line
from fedapps.common.installed import check_installed
from fedapps.common.new_files import make_folder
from fedapps.common.tasks import AUTO, goodness, reported_name
from fedapps.saved import state_bytes
from fedapps.settings.config import Config
from strategies.core.round_state import Stop
from strategies.core.strategy import PersonalizedStrategy

Report = Mapping[str, Any]  # a line of metrics.jsonl


class Callback:
    """Override any of these. Raise `fedapps.strategies.Stop` to end training in order."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError for a name that seems to be a misspelling, see `class_members`."""
        super().__init_subclass__(**options)
        check_members(cls, {})

    def check(self, config: Config) -> None:
        """Raise ValueError for what is missing, before any work; also of other runs of a command.
        It opens nothing, since the run may never start."""

    def run_starts(self, config: Config) -> None:
        """Before the first message, with the run's whole configuration. An error ends the run."""

    def round_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """After every round."""

    def evaluation_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """After `round_ends`, in rounds that evaluate; the replies are `strategy.evaluation`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of it: arrays, numbers and texts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` when a run is resumed."""

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """At the end, also after an error, with the content of summary.json."""


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row without a new best score on the training
    clients' validation samples, the `selection-mean` of `selection-metric`. Where novel clients get
    another model, a new best of that one counts as well. Novel clients have no influence."""

    def __init__(self, patience: int, select: str = AUTO) -> None:
        self.patience = patience
        self.select = select
        self.best = -math.inf  # of the training clients' models
        self.best_global = -math.inf  # of the model that novel clients get
        self.since = 0  # evaluations without a new best score

    def evaluation_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """Count, unless a further phase of the method is still to come."""
        scores = report["evaluation"]
        reported = (name.removeprefix("train-") for name in scores)
        self.select = reported_name(self.select, reported)
        score = self._selection_mean(scores, self.select)
        global_score = self._selection_mean(scores, f"global-{self.select}")
        if score is None:
            raise RuntimeError(
                f"early-stopping needs training clients with validation samples that report their "
                f"{self.select}"
            )
        if not strategy.may_stop:
            return
        self.since += 1
        goodness_now = goodness(self.select, score)
        if goodness_now > self.best:
            self.best = goodness_now
            self.since = 0
        if global_score is not None:
            global_goodness = goodness(self.select, global_score)
            if global_goodness > self.best_global:
                self.best_global = global_goodness
                self.since = 0
        if self.since >= self.patience:
            raise Stop(f"no better validation in {self.since} evaluations")

    def _selection_mean(self, scores: Mapping[str, float], name: str) -> float | None:
        """The trimmed mean; without one, which is `selection-mean` "plain", the mean."""
        return scores.get(f"train-trimmed-{name}", scores.get(f"train-{name}"))

    def state(self) -> dict[str, Any]:
        """The best scores, and how many evaluations ago the last one was reached."""
        return {"best": self.best, "best-global": self.best_global, "since": self.since}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self.best = state["best"]
        self.best_global = state.get("best-global", -math.inf)  # earlier checkpoints have none
        self.since = state["since"]


class Logger(Callback):
    """Passes the numbers of every round to an experiment tracker: ``loss``,
    ``evaluation/train-accuracy``, …"""

    tracker = ""  # its name in the setting `callbacks`, and the package's extra that installs it
    libraries: tuple[str, ...] = ()  # that it needs

    def check(self, config: Config) -> None:
        """Raise ValueError without its libraries, or without a folder that names the run."""
        what = f"callbacks={self.tracker}"
        check_installed(what, self.libraries, self.tracker)
        if not config["output-dir"]:
            raise ValueError(f"{what} writes to the run's folder, but output-dir is not set")

    def run_starts(self, config: Config) -> None:
        """Open a run in the tracker, named after the run's folder."""
        self._open(config, Path(str(config["output-dir"])))

    def round_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """Pass on the round's numbers."""
        self.write(dict(numbers(report)), int(report["round"]))

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """Close the tracker's run."""
        self._close("error" in summary)

    def write(self, values: dict[str, float], round_: int) -> None:
        """The numbers of one round."""
        raise NotImplementedError

    def _open(self, config: Config, folder: Path) -> None:
        """Begin."""

    def _close(self, failed: bool) -> None:
        """End."""


class TensorBoard(Logger):
    """Event files in the run's folder (`pip install fedapps[tensorboard]`)."""

    tracker = "tensorboard"
    libraries = ("tensorboard",)

    def _open(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(folder / "tensorboard")
        self.writer: Any = SummaryWriter(folder / "tensorboard")
        # TensorBoard shows texts as Markdown: indented lines are code.
        text = "\n".join(f"    {key} = {value!r}" for key, value in config.items())
        self.writer.add_text("configuration", text)

    def write(self, values: dict[str, float], round_: int) -> None:
        """A scalar each."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round_)
        self.writer.flush()

    def _close(self, failed: bool) -> None:
        self.writer.close()


class MLflow(Logger):
    """A run of the experiment "fedapps", in `MLFLOW_TRACKING_URI` or beside the results
    (`pip install fedapps[mlflow]`)."""

    tracker = "mlflow"
    libraries = ("mlflow",)

    def check(self, config: Config) -> None:
        """Also what the store beside the results needs, if there is no other one."""
        super().check(config)
        if "MLFLOW_TRACKING_URI" not in os.environ:
            check_installed("callbacks=mlflow", ("sqlalchemy", "alembic"), "mlflow")

    def _open(self, config: Config, folder: Path) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder.parent / 'mlflow.db'}")
        mlflow.set_experiment("fedapps")
        mlflow.start_run(run_name=folder.name)
        # MLflow refuses a plus sign in names, as in fedtta++.
        mlflow.log_params({key.replace("+", "p"): value for key, value in config.items()})

    def write(self, values: dict[str, float], round_: int) -> None:
        """A metric each."""
        self.mlflow.log_metrics({k.replace("+", "p"): v for k, v in values.items()}, step=round_)

    def _close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class WandB(Logger):
    """A run of the project "fedapps"; WANDB_MODE=offline needs no account
    (`pip install fedapps[wandb]`)."""

    tracker = "wandb"
    libraries = ("wandb",)

    def _open(self, config: Config, folder: Path) -> None:
        import wandb

        named: dict[str, Any] = {"project": "fedapps", "name": folder.name, "dir": folder}
        # A process may train several runs; each gets one of its own.
        self.run: Any = wandb.init(**named, config=dict(config), reinit="create_new")

    def write(self, values: dict[str, float], round_: int) -> None:
        """All numbers of a round at once."""
        self.run.log(values, step=round_)

    def _close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


LOGGERS: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class Callbacks:
    """The callbacks of one run, called in turn."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        self.on_failure: Callable[[str], None] = lambda text: None  # gets each error as text

    @contextmanager
    def run(self, config: Config, summary: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Around the run: its start, and its end with the summary at that time.

        Raises RuntimeError, naming the callback, if one cannot start; those that have started are
        ended."""
        self._start(config)
        try:
            yield
        finally:
            self._end(summary())

    def _start(self, config: Config) -> None:
        all_callbacks = list(self.callbacks)
        for number, callback in enumerate(all_callbacks):
            try:
                callback.run_starts(config)
            except Exception as error:
                reason = f"callback {_name(callback)} cannot start: {error_line(error)}"
                self.callbacks = all_callbacks[:number]  # those that have started are ended
                self._end({"finished": False, "error": reason})
                raise RuntimeError(
                    f"{reason}; mend it, or leave it out of callbacks: nothing was trained"
                ) from error

    def _end(self, summary: Mapping[str, Any]) -> None:
        """Call `run_ends`. A `Stop` has nothing to end there, and the run is as it was."""
        with suppress(Stop):
            self._call("run_ends", summary)

    def state(self) -> list[dict[str, Any]]:
        """The states for a checkpoint; a callback whose state cannot be stored is removed."""
        states = []
        for callback in list(self.callbacks):
            with self._guarded(callback):
                state = callback.state()
                state_bytes({"state": state})  # an error here removes it, not the checkpoint
                states.append(state)
        return states

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `states`; if one was removed since, all of them start again."""
        if len(states) == len(self.callbacks):
            for callback, state in zip(list(self.callbacks), states, strict=True):
                with self._guarded(callback):
                    callback.load_state(state)

    def round_ends(self, report: Report, strategy: PersonalizedStrategy) -> None:
        """Call `round_ends`, and `evaluation_ends` if the round has an evaluation."""
        self._call("round_ends", report, strategy)
        if "evaluation" in report:
            self._call("evaluation_ends", report, strategy)

    def _call(self, event: str, *arguments: Any) -> None:
        stop = None
        for callback in list(self.callbacks):
            try:
                with self._guarded(callback):
                    getattr(callback, event)(*arguments)
            except Stop as reason:  # the others are called first
                stop = reason
        if stop is not None:
            raise stop

    @contextmanager
    def _guarded(self, callback: Callback) -> Iterator[None]:
        """An error removes the callback; `Stop` and errors of early stopping are raised."""
        try:
            yield
        except Stop:
            raise
        except Exception as error:
            if isinstance(callback, EarlyStopping):
                raise
            name = _name(callback)
            logging.getLogger("flwr").warning("%s failed and is removed: %s", name, error)
            self.on_failure(f"callback {name}, which is removed\n{described(error)}")
            self.callbacks.remove(callback)


def make_callbacks(config: Config) -> Callbacks:
    """The callbacks that a configuration names. Raises ValueError for unknown ones, and for what
    they lack."""
    patience = int(config["early-stopping"])
    if patience < 0:
        raise ValueError(f"early-stopping is {patience}; it must not be negative")
    callbacks: list[Callback] = []
    for name in str(config["callbacks"]).split(","):
        if name.strip():
            callbacks.append(_make(name.strip()))
    for callback in callbacks:
        callback.check(config)
    # Last, so that the others see the round that ends training.
    if patience:
        callbacks.append(EarlyStopping(patience, str(config["selection-metric"])))
    return Callbacks(callbacks)


def numbers(report: Report, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a report, those of inner tables as ``evaluation/train-accuracy``."""
    for key, value in report.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield prefix + key, float(value)


def _name(callback: Callback) -> str:
    """The name in the setting `callbacks`, or the class's."""
    kind = type(callback)
    for name, known in LOGGERS.items():
        if kind is known:
            return name
    return kind.__name__


def _make(name: str) -> Callback:
    if name in LOGGERS:
        return LOGGERS[name]()
    if not external_code.is_reference(name):
        known = ", ".join(LOGGERS)
        raise ValueError(f"unknown callback {name!r}; known: {known}, or module:NAME of your own")
    factory = external_code.load(name)
    if not external_code.declares_return_type(factory, Callback):
        raise ValueError(f"callback {name!r} is {factory!r:.200}, no fedapps.callbacks.Callback")
    callback: Callback = factory()
    return callback
