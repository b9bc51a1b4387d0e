"""Runs with the same training share it, and have the digits that they have alone."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import SMALL, invoke

from clients.core.arrays import from_record
from clients.core.client import Client
from clients.core.protocol import round_of
from fedapps.clientapp import app
from fedapps.common.external_code import allow
from fedapps.common.settings import Interval
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.jobs import may_start
from fedapps.engines.run import run_jobs
from fedapps.files import ERRORS
from fedapps.methods import METHODS, NAMED, Method
from fedapps.planning import make_jobs, share_trainings, trainings_lines
from fedapps.results import checkpoint
from fedapps.saved import read_state
from fedapps.serverapp import APPS, run
from fedapps.settings.config import override
from fedapps.settings.sections import common, of_method, of_partitions
from fedapps.settings.variants import Variant
from fedapps.trainings import FOLDER, SETTINGS, VERSIONS, check_trains_as, training_of
from partitions import federation
from strategies.core.strategy import PersonalizedStrategy
from strategies.methods.fedavg import FedAvg
from strategies.methods.prior_em import PriorEM

SHARING = [name for name, entry in METHODS.items() if entry.trains_as and name != "fedavg"]
# Spans of rounds 1–2, 3–4 and 5.
FIVE = SMALL | {"rounds": 5, "evaluate-every": 2, "checkpoint-every": 2, "local-steps": 1}
TEST_SAMPLES = {"partition.test-fraction": 0.2}  # without them test-shift is refused


def another(key, setting):
    """A value of the setting that is not its default."""
    special = {
        "auto.candidates": "bbse",
        "auto.changes": "blur",
        "auto.plays": 2,
        "auto.stream-inputs": 50,
        "scores": "",  # code from outside
        "selection-metric": "loss",
        "partition.test-shift": "mixture",
        "report-generalization-bound": False,  # another test's, and slow
    }
    if key in special:
        return special[key]
    if isinstance(setting.values, tuple):
        return next(value for value in setting.values if value != setting.default)
    if isinstance(setting.default, bool):
        return not setting.default
    ends = Interval.parse(setting.values)
    kind = type(setting.default)
    return next(
        kind(value)
        for value in (1, 0.5, 2)
        if kind(value) in ends and kind(value) != setting.default
    )


def of_evaluations(method):
    """Another value of every setting that is declared to decide evaluations alone."""
    known = common() | of_partitions()
    known |= {f"{method}.{key}": s for key, s in of_method(method, METHODS[method]).items()}
    if not METHODS[method].client.few_shot:
        del known["novel-shots"]
    return {key: another(key, s) for key, s in known.items() if s.evaluation}


def trained(config):
    grid = InProcessGrid.simulation(app, config, config["num-clients"])
    return from_record(run(grid, config).arrays)


@pytest.fixture(scope="module")
def fedavg():
    config = SMALL | TEST_SAMPLES | {"model": "convnet-bn", "method": "fedavg"}
    return config, trained(config)


@pytest.mark.parametrize("method", SHARING)
def test_a_method_trains_what_it_says_whatever_decides_evaluations(method, fedavg):
    plain, arrays = fedavg
    changes = of_evaluations(method) | {"method": method}
    if method in ("bbse", "auto"):
        changes[f"{method}.held-out"] = 0.0
    config = override(plain, changes, all_methods=False)
    assert training_of(config) == training_of(plain)
    own = trained(config)
    assert list(own) == list(arrays)
    for name, array in arrays.items():
        assert np.array_equal(own[name], array), name


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("fedavg", "tent adapt-steps=1", True),
        ("tent novel-batch=5", "tent", True),
        ("bbse", "auto alpha=0.9", True),  # both hold samples out
        ("bbse", "prior-em", False),
        ("bbse held-out=0.0", "prior-em", True),
        ("bbse held-out=0.3", "bbse", False),
        ("fedavg lr=0.1", "tent", False),
        ("fedavg lr=0.1", "tent lr=0.1", True),
        ("fedavg evaluate-every=3", "fedavg", False),
        ("fedavg partition=iid", "fedavg", False),
    ],
)
def test_which_settings_decide_a_training(one, other, same):
    first, second = (training_of(Variant.parse(label).apply(SMALL)) for label in (one, other))
    assert (first == second) == same
    assert first is not None and second is not None


def test_a_network_from_outside_may_have_other_names_where_a_method_has_a_head():
    config = SMALL | {"model": "torchvision.models:resnet18"}
    fedavg, tent, t3a, shot = (
        training_of(config | {"method": method}) for method in ("fedavg", "tent", "t3a", "shot")
    )
    assert fedavg == tent
    assert len({json.dumps(training) for training in (fedavg, t3a, shot)}) == 3


def jobs_of(methods, folder, config=FIVE, seeds=(0,)):
    jobs = make_jobs(config | {"resume": True}, methods, seeds, folder)
    share_trainings(jobs)
    return jobs


def go(jobs, engine="in-process"):
    run_jobs(jobs, engine, APPS, follow=lambda _: None)


def without_time(value):
    """The value without seconds, and without digests, since safetensors' headers have no order."""
    if isinstance(value, dict):
        left_out = ("seconds", "phases", "files")
        return {k: without_time(v) for k, v in value.items() if k not in left_out}
    return [without_time(v) for v in value] if isinstance(value, list) else value


def results(folder):
    """Everything that a run has written, apart from times."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    files = {}
    for file in folder.rglob("*.safetensors"):
        content = read_state(file) if file.name.startswith("strategy") else file.read_bytes()
        files[file.name] = repr(content)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    return without_time([summary, [json.loads(line) for line in lines]]), files


@pytest.fixture
def rounds_trained(monkeypatch):
    """The method and the round of each training."""
    trained: list[tuple[str, int]] = []
    real = PersonalizedStrategy.configure_train

    def counted(strategy, number, *arguments):
        trained.append((type(strategy).__name__, number))
        return real(strategy, number, *arguments)

    monkeypatch.setattr(PersonalizedStrategy, "configure_train", counted)
    return trained


METHODS_OF_TWO = ["fedavg", "tent", "bbse", "prior-em", "auto"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder with runs of the methods that each have trained by themselves."""
    folder = tmp_path_factory.mktemp("alone")
    go(make_jobs(FIVE, METHODS_OF_TWO, [0], folder))
    return folder


def test_methods_with_one_training_have_the_digits_that_they_have_alone(
    alone, tmp_path, rounds_trained
):
    jobs = jobs_of(METHODS_OF_TWO, tmp_path)
    assert trainings_lines(jobs) == [
        "5 methods, 2 trainings: fedavg, tent, prior-em share one; bbse, auto share one"
    ]
    go(jobs)
    assert rounds_trained == [(name, r) for name in ("FedAvg", "BBSE") for r in range(1, 6)]
    for job in jobs:
        assert not job.error
        assert results(job.folder) == results(alone / job.name)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_every_engine_trains_once_and_gives_the_digits_alone(alone, engine, tmp_path):
    jobs = jobs_of(["fedavg", "tent"], tmp_path)
    go(jobs, engine)
    shared = set()
    for job in jobs:
        assert not job.error
        shared.add(job.config["training-dir"])
        (ours, rounds), files = results(job.folder)
        (theirs, rounds_alone), files_alone = results(alone / job.name)
        assert ours.pop("engine") == engine and theirs.pop("engine") == "in-process"
        assert ours == theirs and rounds == rounds_alone and files == files_alone
    assert len(shared) == 1 and shared != {""}


def test_a_killed_training_is_continued_by_the_next_method_and_by_itself(
    alone, tmp_path, rounds_trained, monkeypatch
):
    real = PersonalizedStrategy.aggregate_evaluate

    def dies(strategy, number, replies):
        if number == 4 and type(strategy).__name__ == "FedAvg":
            raise OSError("killed")
        return real(strategy, number, replies)

    jobs = jobs_of(["fedavg", "prior-em"], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PersonalizedStrategy, "aggregate_evaluate", dies)
        go(jobs)
    assert [bool(job.error) for job in jobs] == [True, False]
    # FedAvg has kept round 4, in whose evaluation it has died.
    assert rounds_trained == [("FedAvg", r) for r in range(1, 5)] + [("PriorEM", 5)]
    again = jobs_of(["fedavg"], tmp_path)
    go(again)
    assert len(rounds_trained) == 5  # it resumes after round 2, and takes the others
    for job in jobs:
        assert results(job.folder) == results(alone / job.name)
    assert not (tmp_path / FOLDER).exists()


def test_a_span_that_is_missing_or_damaged_is_trained_again(alone, tmp_path, rounds_trained):
    first, second = jobs_of(["fedavg", "prior-em"], tmp_path)
    kept = Path(str(first.config["training-dir"]))
    carry_out(first)
    (kept / "round-00000002.safetensors").write_bytes(b"damaged")
    (kept / "round-00000004.safetensors").unlink()
    del rounds_trained[:]
    carry_out(second)
    assert [number for _, number in rounds_trained] == [1, 2, 3, 4]
    assert results(second.folder) == results(alone / second.name)


def carry_out(job):
    APPS.run(InProcessGrid.simulation(app, job.config, 6), job.config, "in-process")


def test_what_is_the_runs_own_is_not_kept(tmp_path, monkeypatch):
    """BBSE's statistics and its token are its own. A run has checkpoints of the rounds whose
    state it has: not of 1 and 3."""
    first, second = jobs_of(["bbse", "bbse mixing=0.1"], tmp_path, FIVE | {"checkpoint-every": 1})
    carry_out(first)
    for file in Path(str(first.config["training-dir"])).glob("*.safetensors"):
        assert not {"kept", "token", "privacy"} & read_state(file)["state"].keys()
    written = []
    monkeypatch.setattr(
        checkpoint, "write_checkpoint", lambda _, number, __: written.append(number)
    )
    carry_out(second)
    assert written == [2, 4, 5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"early-stopping": 2}, "early-stopping ends each method's training by its own scores"),
        ({"dp": "local"}, "dp=local draws noise for each run"),
        ({"latency": "lognormal", "round-quorum": 0.5}, "rounds end before their last reply"),
        ({"callbacks": "my_lab.hooks:Slack"}, "callbacks=my_lab.hooks:Slack may end or change"),
    ],
)
def test_methods_that_may_end_apart_train_apart(changes, reason, tmp_path):
    jobs = jobs_of(["fedavg", "t3a"], tmp_path, FIVE | changes)
    assert [job.config["training-dir"] for job in jobs] == ["", ""]
    [line] = trainings_lines(jobs)
    assert line.startswith(f"fedavg, t3a train apart: {reason}")


def test_loggers_do_not_keep_methods_apart(tmp_path):
    jobs = jobs_of(["fedavg", "t3a"], tmp_path, FIVE | {"callbacks": "tensorboard"})
    assert jobs[0].config["training-dir"]


def test_runs_wait_for_the_first_one_of_their_training_alone(tmp_path):
    jobs = jobs_of(["fedavg", "tent", "fedprox"], tmp_path, seeds=(0, 1))
    waiting = [job.name for job in jobs if not may_start(job, jobs)]
    assert waiting == ["tent-seed0", "tent-seed1"]
    jobs[0].done = True
    assert [job.name for job in jobs if not may_start(job, jobs)] == ["tent-seed1"]
    assert trainings_lines(jobs)[0].startswith("5 runs, 4 trainings: ")


def test_rounds_of_another_training_are_refused(tmp_path):
    first, second = jobs_of(["fedavg", "tent"], tmp_path)
    carry_out(first)
    second.config["lr"] = 0.1
    with pytest.raises(ValueError, match=r"another training: lr is 0\.3 there and 0\.1 here"):
        carry_out(second)
    second.config["method"] = "fedprox"
    with pytest.raises(ValueError, match="fedprox trains as no other method"):
        carry_out(second)


def test_where_nobody_can_play_newcomers_auto_shares_fedavgs_training(tmp_path):
    """Each of 25 training clients would hold out six samples; of five, each 59."""
    words = ["run", "--methods", "fedavg,bbse,auto", "--dry-run", "--engine", "in-process"]
    printed = invoke(*words, "--output", tmp_path).output
    assert "auto: no training client plays a newcomer, which takes 20" in printed
    assert "3 methods, 2 trainings: fedavg, auto share one" in printed
    printed = invoke(*words, "num-clients=10", "auto.alpha=0.2", "--output", tmp_path).output
    assert "3 methods, 2 trainings: bbse, auto share one" in printed


class OtherLoss(Client):
    def loss(self, x, y):
        return 0.1 * super().loss(x, y)


class Personal(Client):
    personal = ("head.",)


class WithState(Client):
    needs_state = NAMED["ditto"].client.needs_state


class Predicting(Client):
    def predict(self, x):
        return 0.5 * super().predict(x)


class PersonalizedTraining(FedAvg):
    def personalize(self, arrays, nodes):
        return dict.fromkeys(nodes, arrays)


@pytest.mark.parametrize(
    ("strategy", "client", "trains_as", "reason"),
    [
        (FedAvg, OtherLoss, "fedavg", "OtherLoss replaces loss, which decides training"),
        (FedAvg, Personal, "fedavg", "Personal replaces personal"),
        (FedAvg, WithState, "fedavg", "WithState keeps a state of each client"),
        (NAMED["fedgma"].strategy, Client, "fedavg", "FedGMA replaces aggregate"),
        (PersonalizedTraining, Client, "fedavg", "override broadcast as well"),
        (FedAvg, Client, "fedavgg", "did you mean 'fedavg'"),
        (FedAvg, Client, "tent", "write trains_as='fedavg'"),
    ],
)
def test_a_method_that_cannot_train_as_it_says_is_refused(
    strategy, client, trains_as, reason, monkeypatch
):
    method = Method(strategy, client, "ours", "a test", trains_as=trains_as)
    monkeypatch.setitem(METHODS, "mine", method)
    with pytest.raises(ValueError, match=reason):
        training_of(SMALL | {"method": "mine"})


@pytest.mark.parametrize(("strategy", "client"), [(FedAvg, Predicting), (PriorEM, Client)])
def test_a_method_that_trains_as_it_says_is_taken(strategy, client, monkeypatch):
    method = Method(strategy, client, "ours", "a test", trains_as="fedavg")
    monkeypatch.setitem(METHODS, "mine", method)
    check_trains_as("mine")


def test_causes_of_dropped_replies_are_those_of_a_run_alone(tmp_path, monkeypatch):
    """A client fails in the first span of rounds and in a later one, by another cause."""
    real = Client.train
    failing = int(federation(FIVE).novel.argmin())  # a training client

    def fails(client, arrays, config):
        number = round_of(config)
        if client.client == failing and number == 1:
            raise RuntimeError("tired")
        if client.client == failing and number >= 3:
            raise ValueError("asleep")
        return real(client, arrays, config)

    monkeypatch.setattr(Client, "train", fails)
    jobs = jobs_of(["fedavg", "prior-em"], tmp_path / "shared")
    [alone] = make_jobs(FIVE, ["prior-em"], [0], tmp_path / "alone")
    go([*jobs, alone])
    causes = (alone.folder / ERRORS).read_text("utf-8")
    assert "RuntimeError: tired" in causes
    assert "ValueError: asleep" in causes
    for job in jobs:
        assert (job.folder / ERRORS).read_text("utf-8") == causes


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A file of a network of the user's own."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "nets_of_test_trainings.py"
    file.write_text(
        "from torch import nn\n"
        "def flat(num_classes: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    return file


def change(file):
    later = time.time() + 60
    os.utime(file, (later, later))


def test_rounds_of_changed_code_are_trained_anew(tmp_path, network, rounds_trained, caplog):
    reference = f"{network.stem}:flat"
    allow(reference)
    config = FIVE | {"model": reference}
    first, *_ = jobs_of(["fedavg", "tent"], tmp_path, config)
    carry_out(first)
    [second] = jobs_of(["tent"], tmp_path, config)
    assert "tent: rounds that are trained already are in" in trainings_lines([second])[0]
    change(network)
    assert trainings_lines([second]) == []
    del rounds_trained[:]
    go([second])
    assert [number for _, number in rounds_trained] == [1, 2, 3, 4, 5]
    assert f"are trained anew: {network} has changed since" in caplog.text


def test_rounds_of_other_libraries_are_trained_anew(tmp_path, rounds_trained, caplog):
    first, second = jobs_of(["fedavg", "prior-em"], tmp_path)
    carry_out(first)
    file = Path(str(first.config["training-dir"])) / SETTINGS
    settings = json.loads(file.read_text("utf-8"))
    settings[VERSIONS]["torch"] = "1.0"
    file.write_text(json.dumps(settings), "utf-8")
    go([second])
    assert len(rounds_trained) == 10
    assert "other versions of libraries" in caplog.text


def test_a_run_that_continues_with_changed_code_keeps_rounds_for_no_other(tmp_path):
    first, second, third = make_jobs(FIVE, ["fedavg", "tent", "shot"], [0], tmp_path)
    first.changed_file = "nets.py"
    share_trainings([first, second, third])
    assert first.config["training-dir"] == ""
    assert second.config["training-dir"] == third.config["training-dir"] != ""


def test_runs_of_one_method_are_no_methods_and_one_run_shares_with_none(tmp_path):
    jobs = jobs_of(["tent adapt-steps=1", "tent adapt-steps=5"], tmp_path)
    assert trainings_lines(jobs)[0].startswith("2 runs, 1 training: ")
    carry_out(jobs[0])
    [line] = trainings_lines(jobs_of(["fedavg"], tmp_path))
    assert line.startswith(f"fedavg: rounds that are trained already are in {tmp_path}")
