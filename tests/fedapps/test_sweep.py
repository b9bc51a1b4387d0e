"""Sweeps that go on: what is finished is kept, and nothing of it is lost."""

import json
import os
import re
import threading
import time

import numpy as np
import pytest
from small_runs import SMALL, fedapps

from fedapps.engines.jobs import Job
from fedapps.engines.run import run_jobs
from fedapps.files import write_configuration
from fedapps.planning import make_jobs
from fedapps.results import sweep
from fedapps.results.progress import seconds_left, shown
from fedapps.results.sweep import finished
from fedapps.serverapp import APPS
from fedapps.settings import own_files
from fedapps.settings.config import defaults, override
from fedapps.settings.saved_configurations import differences
from strategies.methods.fedavg import FedAvg

RUN = ["run", "num-clients=4", "rounds=1", "local-steps=1", "model=mlp-small",
       "partition.public-samples=1200", "--engine", "in-process"]  # fmt: skip


def written(folder):
    """When each run's metrics were last written, by run."""
    return {file.parent.name: file.stat().st_mtime_ns for file in folder.glob("*/metrics.jsonl")}


def test_what_is_finished_is_kept_and_the_rest_is_run(tmp_path):
    fedapps(*RUN, "--methods", "fedavg,local", "--output", tmp_path)
    before = written(tmp_path)
    (tmp_path / "local-seed0" / "summary.json").unlink()  # as if it had been killed
    said = fedapps(*RUN, "--methods", "fedavg,local,fedper", "--output", tmp_path)
    assert all(f"│ {method} │" in said for method in ("fedavg", "local", "fedper"))
    after = written(tmp_path)
    assert after["fedavg-seed0"] == before["fedavg-seed0"]
    assert after["local-seed0"] != before["local-seed0"]
    summary = tmp_path / "fedper-seed0" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"privacy": 3}))
    after = written(tmp_path)
    fedapps(*RUN, "--methods", "fedper", "--output", tmp_path)  # its summary is damaged: run again
    assert written(tmp_path)["fedper-seed0"] != after["fedper-seed0"]


def test_data_and_code_that_changed_since_a_run_are_named(tmp_path, monkeypatch, caplog):
    """The results stay those of the old file: repeating the command alone must not hide it."""
    monkeypatch.syspath_prepend(tmp_path)
    network = tmp_path / "my_nets.py"
    network.write_text(
        "from torch import nn\n"
        "def flat(num_classes: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3, num_classes))\n"
    )
    data = tmp_path / "d.npz"
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(data, x=x, y=np.arange(40) % 2)
    words = ["run", f"dataset={data}", "model=my_nets:flat", "partition=iid", "num-clients=4"]
    words += [
        "rounds=1",
        "--engine",
        "in-process",
        "--methods",
        "local",
        "--output",
        tmp_path / "o",
    ]
    fedapps(*words)
    fedapps(*words)
    assert "has changed since" not in caplog.text
    before = written(tmp_path / "o")
    for file in (data, network):
        caplog.clear()
        later = time.time() + 60
        os.utime(file, (later, later))
        fedapps(*words)
        assert f"local-seed0 is kept, but {file} has changed since it began" in caplog.text
        os.utime(file, (0, 0))
    assert written(tmp_path / "o") == before


def test_runs_share_one_look_at_their_data(tmp_path, monkeypatch, caplog):
    """Three finished runs on one folder of 3 files: each file is looked at once, though 9 times
    without a share. `fedapps status` does not look."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / str(number)).write_text("")
    jobs = []
    for seed in range(3):
        folder = tmp_path / f"fedavg-seed{seed}"
        folder.mkdir()
        (folder / "config.toml").write_text(f'dataset = "{data}"\nseed = {seed}\n')
        os.utime(folder / "config.toml", (5, 5))
        config = override(defaults(), {"dataset": str(data), "seed": seed})
        jobs.append(Job("fedavg", seed, config, folder, done=True))
    looks = []
    plain = own_files.file_states
    monkeypatch.setattr(own_files, "file_states", lambda place: looks.append(place) or plain(place))
    sweep._warn_of_changes(jobs)
    assert looks == [data]
    assert caplog.text.count("has changed since it began") == 3
    [sweep.begun_job(run, to_resume=False) for run in sweep.begun_folders(tmp_path)]
    assert looks == [data]


DAMAGES = {
    "cut short": lambda text: text[: len(text) // 2],
    "another format": lambda text: re.sub("results = .*", 'results = "0"', text),
    "an unknown key": lambda text: f"old-key = 1\n{text}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_whose_configuration_cannot_be_read_is_not_lost(damage, tmp_path):
    fedapps(*RUN, "--methods", "local", "--output", tmp_path)
    before, file = written(tmp_path), tmp_path / "local-seed0" / "config.toml"
    file.write_text(DAMAGES[damage](file.read_text()))
    said = fedapps(*RUN, "--methods", "local", "--output", tmp_path, code=2)
    assert "local-seed0 holds a finished run whose config.toml is damaged or of another" in said
    assert written(tmp_path) == before
    fedapps(*RUN, "--methods", "local", "--output", tmp_path, "--fresh", "--yes")
    assert written(tmp_path) != before


def test_a_setting_of_another_method_does_not_concern_a_finished_run(tmp_path):
    fedapps(*RUN, "--methods", "fedavg", "--output", tmp_path)
    before = written(tmp_path)
    both = [*RUN, "tent.adapt-steps=1", "--methods", "fedavg,tent", "--output", tmp_path]
    fedapps(*both)
    assert written(tmp_path)["fedavg-seed0"] == before["fedavg-seed0"]


def test_a_finished_run_of_another_configuration_is_not_lost(tmp_path):
    fedapps(*RUN, "--methods", "fedavg", "--output", tmp_path)
    before = written(tmp_path)
    other = [*RUN, "lr=0.2", "--methods", "fedavg", "--output", tmp_path]
    said = fedapps(*other, code=2)
    assert "lr is 0.3 there, 0.2 here" in said
    assert "--fresh" in said
    assert "fedavg-seed0" in fedapps(*other, "--fresh", input="n\n", code=1)
    assert written(tmp_path) == before
    fedapps(*other, "--fresh", input="y\n")
    assert (again := written(tmp_path)) != before
    fedapps(*other, "--fresh", "--yes")
    assert written(tmp_path) != again


def test_the_folder_is_no_part_of_the_configuration(tmp_path):
    one, two = (make_jobs(SMALL, ["tent"], [3], tmp_path / name)[0].config for name in "ab")
    assert differences(one, two) == ""
    assert differences(one, two | {"rounds": 9}) == "rounds is 2 there, 9 here"
    assert differences(one, two | {"tent.adapt-steps": 5}) == "tent.adapt-steps is 3 there, 5 here"
    unread = {"pfedhn.lr": 0.5, "fedtta.inner-lr": 0.1, "partition.alpha": 5.0}  # of other runs
    assert differences(one, two | unread) == ""
    dirichlet = {"partition": "dirichlet"}
    assert "alpha" in differences(one | dirichlet, two | dirichlet | unread)


def test_resume_runs_what_had_not_begun(tmp_path, monkeypatch):
    """Of three runs the first is stopped in its second round."""
    aggregate = FedAvg.aggregate_train

    def stops(self, server_round, replies):
        if server_round == 2:
            raise KeyboardInterrupt
        return aggregate(self, server_round, replies)

    config = SMALL | {"rounds": 3, "local-steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "aggregate_train", stops)
        patch.setattr(threading, "excepthook", lambda _: None)
        run_jobs(
            make_jobs(config, ["fedavg", "local", "tent lr=0.1"], [0], tmp_path),
            "in-process",
            APPS,
            follow=lambda _: None,
        )
    fedapps("run", "--engine", "in-process", "--resume", tmp_path)
    ended = [f.name for f in sorted(tmp_path.iterdir()) if f.is_dir() and finished(f)]
    assert ended == ["fedavg-seed0", "local-seed0", "tent,lr=0.1-seed0"]


@pytest.mark.parametrize(("parallel", "expected"), [(1, 7 * 3.0 + 8 * 2.0), (2, 18.5)])
def test_time_left(tmp_path, parallel, expected):
    """3 of 10 rounds in 9 s: 7 more of 3 s. Not begun: 8 rounds at the mean (9 + 1) s / 5 = 2 s.
    The third is done, the fourth has more rounds than planned: both need nothing."""

    def job(method, planned, novel_rounds=0, **so_far):
        config = {"method": method, "rounds": planned, "novel-rounds": novel_rounds}
        return Job(method, 0, config, tmp_path, **so_far)

    jobs = [
        job("pfedhn", 6, 4, rounds=3, seconds=9.0),
        job("local", 8, 4),  # it has no novel rounds
        job("tent", 8, done=True),
        job("pfedhn", 1, rounds=2, seconds=1.0),
    ]
    assert seconds_left(jobs, parallel) == pytest.approx(expected)
    assert seconds_left(jobs[1:3], 1) is None


def test_causes_of_dropped_replies_are_words():
    assert shown({"dropped": {"error": 2, "\x1bnan": 1}}) == {
        "dropped": "[red]dropped: error 2, \\x1bnan 1[/red]"
    }


def test_a_run_that_resumes_keeps_the_time_of_its_beginning(tmp_path):
    """Changed code is named at each later command, not only at the first."""
    write_configuration(tmp_path, {"lr": 0.1})
    os.utime(tmp_path / "config.toml", (1000, 1000))
    write_configuration(tmp_path, {"lr": 0.1}, resumed=True)
    assert (tmp_path / "config.toml").stat().st_mtime == 1000
    write_configuration(tmp_path, {"lr": 0.1})
    assert (tmp_path / "config.toml").stat().st_mtime > 1000
