"""Hooks: what each gets and when, what stops a run, and that a failing logger ends nothing."""

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from small_runs import SMALL, fedapps, federate

from fedapps.callbacks import Callback, Callbacks, EarlyStopping, make_callbacks, numbers
from fedapps.common import external_code
from strategies.core.round_state import Stop

HEARD = []  # what Diary got, in order


class Diary(Callback):
    """Writes down what it gets."""

    def run_starts(self, config):
        HEARD.append(("starts", config["method"]))

    def round_ends(self, report, strategy):
        HEARD.append(("round", report["round"]))

    def evaluation_ends(self, report, strategy):
        HEARD.append(("evaluation", report["round"], len(strategy.evaluation)))

    def run_ends(self, summary):
        HEARD.append(("ends", summary.get("finished"), summary.get("error", "")))


class Broken(Callback):
    """A logger whose server is gone."""

    def round_ends(self, report, strategy):
        HEARD.append(("broken", report["round"]))
        raise OSError("no route to host")


class Enough(Callback):
    """Ends training after a round."""

    def round_ends(self, report, strategy):
        if report["round"] == 1:
            raise Stop("enough")


def own(*classes):
    names = [f"{__name__}:{one.__name__}" for one in classes]
    external_code.allow(*names)
    return ",".join(names)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))
    HEARD.clear()


def test_everybody_is_told_in_order_and_a_failing_one_ends_nothing(tmp_path):
    """Two rounds, the second evaluated, of three training and three novel clients."""
    output = {"output-dir": str(tmp_path), "evaluate-every": 2}
    federate(method="tent", callbacks=own(Broken, Diary), **output)
    assert HEARD == [
        ("starts", "tent"), ("broken", 1), ("round", 1),
        ("round", 2), ("evaluation", 2, 6), ("ends", True, ""),
    ]  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text())["finished"]
    written = (tmp_path / "errors.log").read_text()
    assert written.startswith("callback Broken") and "OSError: no route to host" in written


class Late(Diary):
    """Would end training when it has ended."""

    def run_ends(self, summary):
        super().run_ends(summary)
        raise Stop("too late")


def test_a_stop_at_the_end_of_a_run_ends_nothing(tmp_path):
    federate(callbacks=own(Late, Diary), **{"output-dir": str(tmp_path)})
    assert HEARD[-2:] == [("ends", True, "")] * 2
    assert json.loads((tmp_path / "summary.json").read_text())["finished"]


class Keeper(Callback):
    """Its state is that of the tests' choice; an error is raised."""

    own = None

    def state(self):
        if isinstance(self.own, Exception):
            raise self.own
        return self.own

    def load_state(self, state):
        raise KeyError("seen")


CIRCLE = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    "state",
    [OSError("no route to host"), {"best": np.int64(3)}, {"name": b"raw"}, {"z": 1j},
     {"x": np.array([None])}, CIRCLE],
    ids=["raises", "numpy", "bytes", "complex", "objects", "circle"],
)  # fmt: skip
def test_a_state_that_no_checkpoint_can_hold_ends_nothing(state, tmp_path, monkeypatch):
    """It is taken off after round 1; the other one hears of round 2 and of the end."""
    monkeypatch.setattr(Keeper, "own", state)
    output = {"output-dir": str(tmp_path), "checkpoint-every": 1}
    federate(callbacks=own(Keeper, Diary), **output)
    assert ("round", 2) in HEARD and HEARD[-1] == ("ends", True, "")


def test_a_state_is_kept_beside_one_that_fails():
    """The failing one is removed, while states are saved and while they are restored."""
    stopping = EarlyStopping(2)
    stopping.best, stopping.best_global, stopping.since = 0.5, 0.4, 1
    keeper = Keeper()
    keeper.own = {"best": np.int64(3)}
    got = Callbacks([keeper, stopping])
    assert got.state() == [{"best": 0.5, "best-global": 0.4, "since": 1}]
    assert got.callbacks == [stopping]
    again = Callbacks([Keeper(), EarlyStopping(2)])
    again.load_state([{}, got.state()[0]])
    (left,) = again.callbacks
    assert (left.best, left.best_global, left.since) == (0.5, 0.4, 1)


def test_an_error_is_told_at_the_end():
    with pytest.raises(RuntimeError, match="valid replies"):
        federate(callbacks=own(Diary), **{"min-valid-replies": 9})
    assert HEARD[-1][:2] == ("ends", False)
    assert "valid replies" in HEARD[-1][2]


def test_a_stopped_run_is_a_finished_one(tmp_path):
    result, _ = federate(callbacks=own(Enough, Diary), **{"output-dir": str(tmp_path)})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["finished"], summary["rounds"]) == (True, 1)
    assert ("round", 1) in HEARD and ("round", 2) not in HEARD
    assert result.arrays.keys()  # the model of the round that was the last


@pytest.mark.parametrize(
    ("patience", "accuracies", "phases", "expected"),
    [
        (2, (0.5, 0.6, 0.6, 0.59, 0.9), (), 4),  # equal is not better
        (3, (0.5, 0.6, 0.6, 0.59, 0.9), (), None),
        (1, (0.5, 0.6, 0.7), (), None),
        (1, (0.9, 0.2, 0.1, 0.3, 0.2), (1, 2), 5),  # best of its phase alone
    ],
)
def test_patience_counts_evaluations_without_a_better_validation(
    patience, accuracies, phases, expected
):
    """`expected` is the evaluation after which training ends; in `phases` it may not."""
    stopping, stopped = EarlyStopping(patience), None
    for number, accuracy in enumerate(accuracies, 1):
        strategy = SimpleNamespace(may_stop=number not in phases)
        scores = {"train-trimmed-accuracy": accuracy, "train-accuracy": 1 - accuracy}
        try:
            stopping.evaluation_ends({"evaluation": scores}, strategy)
        except Stop:
            stopped = number
            break
    assert stopped == expected


def test_patience_follows_the_score_that_chooses_the_round():
    """The least loss is 0.7; it does not fall in the next two evaluations. Accuracy rises."""
    stopping = make_callbacks(SMALL | {"early-stopping": 2, "selection-metric": "loss"}).callbacks[
        0
    ]
    strategy, read = SimpleNamespace(may_stop=True), []
    with pytest.raises(Stop):
        for number, loss in enumerate((0.9, 0.7, 0.7, 0.8, 0.1), 1):
            read.append(loss)
            scores = {"train-trimmed-loss": loss, "train-trimmed-accuracy": number / 9}
            stopping.evaluation_ends({"evaluation": scores}, strategy)
    assert read == [0.9, 0.7, 0.7, 0.8]
    with pytest.raises(RuntimeError, match="that report their loss"):
        stopping.evaluation_ends({"evaluation": {"train-trimmed-accuracy": 1.0}}, strategy)


def test_patience_follows_the_plain_mean_where_none_is_trimmed():
    """As `selection-mean` "plain" has it. The best is 0.7; a second and a third are not better."""
    stopping, strategy, read = EarlyStopping(2), SimpleNamespace(may_stop=True), []
    with pytest.raises(Stop):
        for accuracy in (0.2, 0.7, 0.7, 0.6, 0.9):
            read.append(accuracy)
            stopping.evaluation_ends({"evaluation": {"train-accuracy": accuracy}}, strategy)
    assert read == [0.2, 0.7, 0.7, 0.6]


def test_patience_follows_also_the_model_that_novel_clients_get():
    """Personal models are best in the first evaluation, the global one in the third."""
    stopping, strategy, read = EarlyStopping(2), SimpleNamespace(may_stop=True), []
    with pytest.raises(Stop):
        for accuracy in (0.2, 0.2, 0.6, 0.5, 0.6, 0.9):
            read.append(accuracy)
            scores = {"train-trimmed-accuracy": 0.9, "train-trimmed-global-accuracy": accuracy}
            stopping.evaluation_ends({"evaluation": scores}, strategy)
    assert read == [0.2, 0.2, 0.6, 0.5, 0.6]


@pytest.mark.parametrize(
    ("method", "keys", "rounds"),
    [
        ("fedavg", {"early-stopping": 2}, 3),  # lr is 0: no evaluation is better than the first
        ("lg-fedavg", {"early-stopping": 1, "lg-fedavg.fedavg-rounds": 4}, 6),  # a phase is to come
    ],
)
def test_a_run_stops_early_by_validation(tmp_path, method, keys, rounds):
    federate(method=method, lr=0.0, rounds=9, **keys, **{"output-dir": str(tmp_path)})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["rounds"], summary["finished"]) == (rounds, True)
    with pytest.raises(RuntimeError, match="validation samples"):
        Callbacks([EarlyStopping(1)]).round_ends({"round": 1, "evaluation": {}}, None)


class Unable(Callback):
    """Its server is not there."""

    def run_starts(self, config):
        raise ConnectionError("no route to host")


def test_what_a_callback_lacks_ends_the_run_before_its_first_round(tmp_path):
    """The error names it; the one that has started is ended, the one after it never starts."""
    with pytest.raises(RuntimeError, match=r"callback Unable cannot start: .*no route to host"):
        federate(callbacks=own(Diary, Unable, Broken), **{"output-dir": str(tmp_path)})
    (start, (event, finished, error)) = HEARD
    assert (start, event, finished) == (("starts", "fedavg"), "ends", False)
    assert "callback Unable cannot start" in error
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "library"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("mlflow", "alembic"),
     ("wandb", "wandb")],
)  # fmt: skip
def test_a_trackers_library_is_looked_for_before_the_run(name, library, monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if find_spec(name) is None:  # only the library of the case is missing
        present = ModuleType(name)
        present.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, present)
    monkeypatch.setitem(sys.modules, library, None)
    options = [f"callbacks={name}", "num-clients=4", "rounds=1", "--output", tmp_path / "out"]
    got = fedapps("run", *options, code=2)
    assert f"callbacks={name} needs {library}" in got
    assert f"pip install 'fedapps[{name}]'" in got
    assert not (tmp_path / "out").exists()


def test_the_numbers_of_a_report():
    report = {"round": 3, "loss": None, "dropped": {"error": 2}, "evaluation": {"novel-sem": 0.5}}
    expected = {"round": 3.0, "dropped/error": 2.0, "evaluation/novel-sem": 0.5}
    assert dict(numbers(report | {"bad": float("nan")})) == expected


def test_tensorboard_holds_the_rounds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    federate(callbacks="tensorboard", **{"output-dir": str(tmp_path)})
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    got = [(e.step, e.value) for e in events.Scalars("evaluation/train-accuracy")]
    assert [step for step, _ in got] == [1, 2]
    expected = [line["evaluation"]["train-accuracy"] for line in lines]
    assert [value for _, value in got] == pytest.approx(expected)


def test_mlflow_holds_the_rounds(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'ml.db'}")
    federate(method="fedtta++", callbacks="mlflow", **{"output-dir": str(tmp_path / "run")})
    run = mlflow.search_runs(experiment_names=["fedapps"], output_format="list")[0]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert run.data.metrics["evaluation/novel-accuracy"] == line["evaluation"]["novel-accuracy"]
    assert run.data.params["lr"] == "0.3"
    assert run.info.status == "FINISHED"


def test_wandb_writes_its_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    federate(callbacks="wandb", **{"output-dir": str(tmp_path)})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"callbacks": "tensorbord"}, ["'tensorbord'", "tensorboard, mlflow"]),
        ({"callbacks": "no_such_lab:Slack"}, ["'no_such_lab:Slack'", "no_such_lab"]),
        ({"callbacks": "json:JSONDecoder"}, ["json:JSONDecoder", "Callback"]),
        ({"early-stopping": -1}, ["early-stopping", "-1"]),
    ],
)
def test_bad_settings_are_refused(keys, words):
    external_code.allow(*external_code.named(keys))
    with pytest.raises(ValueError) as error:
        make_callbacks(SMALL | keys)
    assert all(word in str(error.value) for word in words)
