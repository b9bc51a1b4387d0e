"""What may follow a run: one contract, early stopping, and loggers by their own writers.

Named in `callbacks`, separated by commas: "tensorboard", "mlflow", "wandb", or an own one as
``my_lab.hooks:Slack``, which is constructed without arguments. One that fails is taken off and
logged; the run goes on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedapps.results.checkpoint import state_bytes
from fedapps.settings.config import Config
from partitions import references
from strategies.base import PersonalizedStrategy
from strategies.round import Stop


class Callback:
    """Override what is of interest. Raise `strategies.base.Stop` to end training in order."""

    def run_starts(self, config: Config) -> None:
        """Before the first message; `config` is the run's whole configuration."""

    def round_ends(self, report: Mapping[str, Any], strategy: PersonalizedStrategy) -> None:
        """After every round; `report` is its line of metrics.jsonl."""

    def evaluation_ends(self, report: Mapping[str, Any], strategy: PersonalizedStrategy) -> None:
        """After `round_ends`, in rounds that evaluate; the replies are `strategy.evaluation`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint is to hold of it: arrays, numbers and texts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on, in a run that is resumed, from a `state`."""

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """At the end, be it by an error; `summary` is the run's summary.json."""


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row of which none has a new best accuracy on
    the training clients' validation samples; novel clients have no say."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best, self.since = -math.inf, 0

    def evaluation_ends(self, report: Mapping[str, Any], strategy: PersonalizedStrategy) -> None:
        """Count, but while a phase of the method's own is to come."""
        accuracy = report["evaluation"].get("train-accuracy")
        if accuracy is None:
            raise RuntimeError("early-stopping needs training clients with validation samples")
        if not strategy.may_stop:
            return
        self.since = 0 if accuracy > self.best else self.since + 1
        self.best = max(accuracy, self.best)
        if self.since >= self.patience:
            raise Stop(f"no better validation in {self.since} evaluations")

    def state(self) -> dict[str, Any]:
        """The best accuracy, and how many evaluations ago it was."""
        return {"best": self.best, "since": self.since}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.best, self.since = state["best"], state["since"]


class Logger(Callback):
    """Numbers of every round to a writer: ``loss``, ``evaluation/train-accuracy``, …"""

    def round_ends(self, report: Mapping[str, Any], strategy: PersonalizedStrategy) -> None:
        """Hand the round's numbers to the writer."""
        self.write(dict(numbers(report)), int(report["round"]))

    def write(self, values: dict[str, float], round_: int) -> None:
        """Numbers of one round."""
        raise NotImplementedError


class TensorBoard(Logger):
    """Event files in the run's folder (`pip install fedapps[tensorboard]`)."""

    def run_starts(self, config: Config) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(_folder(config) / "tensorboard")
        text = "\n".join(f"    {key} = {value!r}" for key, value in config.items())
        self.writer.add_text("configuration", text)

    def write(self, values: dict[str, float], round_: int) -> None:
        """A scalar each."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round_)
        self.writer.flush()

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """Close the writer."""
        self.writer.close()


class MLflow(Logger):
    """A run of the experiment "fedapps", in `MLFLOW_TRACKING_URI` or beside the results
    (`pip install fedapps[mlflow]`)."""

    def run_starts(self, config: Config) -> None:
        """Open the run, with the configuration as its parameters."""
        import os

        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{_folder(config).parent / 'mlflow.db'}")
        mlflow.set_experiment("fedapps")
        mlflow.start_run(run_name=_folder(config).name)
        mlflow.log_params({_plain(key): value for key, value in config.items()})

    def write(self, values: dict[str, float], round_: int) -> None:
        """A metric each."""
        import mlflow

        mlflow.log_metrics({_plain(k): v for k, v in values.items()}, step=round_)

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """Close the run."""
        import mlflow

        mlflow.end_run("FAILED" if "error" in summary else "FINISHED")


class WandB(Logger):
    """A run of the project "fedapps"; WANDB_MODE=offline needs no account
    (`pip install fedapps[wandb]`)."""

    def run_starts(self, config: Config) -> None:
        """Open the run."""
        import wandb

        folder = _folder(config)
        self.run = wandb.init(
            project="fedapps",
            name=folder.name,
            dir=folder,
            config=dict(config),
            reinit="create_new",
        )

    def write(self, values: dict[str, float], round_: int) -> None:
        """All of a round at once."""
        self.run.log(values, step=round_)

    def run_ends(self, summary: Mapping[str, Any]) -> None:
        """Close the run."""
        self.run.finish(exit_code=int("error" in summary))


LOGGERS: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class Callbacks:
    """The callbacks of one run, told in turn."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    @contextmanager
    def run(self, config: Config, summary: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Around the run: its start, and its end with the summary that it then has."""
        self._tell("run_starts", config)
        try:
            yield
        finally:
            self._tell("run_ends", summary())

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint holds of each; one whose state it cannot hold is taken off."""
        states = []
        for callback in list(self.callbacks):
            with self._guarded(callback):
                own = callback.state()
                state_bytes({"state": own})
                states.append(own)
        return states

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a `state`; if a callback was taken off since, each starts anew."""
        if len(state) == len(self.callbacks):
            for callback, own in zip(list(self.callbacks), state, strict=True):
                with self._guarded(callback):
                    callback.load_state(own)

    def round_ends(self, report: Mapping[str, Any], strategy: PersonalizedStrategy) -> None:
        """Tell a round, and its evaluation if it has one."""
        self._tell("round_ends", report, strategy)
        if "evaluation" in report:
            self._tell("evaluation_ends", report, strategy)

    def _tell(self, event: str, *news: Any) -> None:
        stop = None
        for callback in list(self.callbacks):
            try:
                with self._guarded(callback):
                    getattr(callback, event)(*news)
            except Stop as asked:
                stop = asked
        if stop is not None:
            raise stop

    @contextmanager
    def _guarded(self, callback: Callback) -> Iterator[None]:
        """Around a call of it: an error takes it off; that of early stopping, and `Stop`, pass."""
        try:
            yield
        except Stop:
            raise
        except Exception as error:
            if isinstance(callback, EarlyStopping):
                raise
            log(WARNING, "%s failed and is taken off: %s", type(callback).__name__, error)
            self.callbacks.remove(callback)


def make_callbacks(config: Config) -> Callbacks:
    """Those that a configuration names. Raises ValueError for unknown ones."""
    patience, names = int(config["early-stopping"]), str(config["callbacks"])
    if patience < 0:
        raise ValueError(f"early-stopping is {patience}; it must not be negative")
    found: list[Callback] = [_make(name.strip()) for name in names.split(",") if name.strip()]
    return Callbacks([*found, *[EarlyStopping(patience)] * (patience > 0)])


def numbers(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a report, those of inner tables as ``evaluation/train-accuracy``."""
    for key, value in report.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield prefix + key, float(value)


def _make(name: str) -> Callback:
    if name in LOGGERS:
        return LOGGERS[name]()
    if not references.is_reference(name):
        known = ", ".join(LOGGERS)
        raise ValueError(f"unknown callback {name!r}; known: {known}, or module:NAME of your own")
    found = references.load(name)
    if not references.makes(found, Callback):
        raise ValueError(f"callback {name!r} is {found!r:.200}, no fedapps.callbacks.Callback")
    made: Callback = found()
    return made


def _folder(config: Config) -> Path:
    if not config["output-dir"]:
        raise ValueError("output-dir is not set")
    return Path(str(config["output-dir"]))


def _plain(name: str) -> str:
    return name.replace("+", "p")  # MLflow knows no "+"
