"""The engines with real processes: the same bits, and nothing that remains when one dies.

The deaths take minutes: pytest -n0 -m slow tests/fedapps/test_engines.py"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from small_runs import DEAD_PROXY, UNUSUAL, wait

from fedapps.engines import flower
from fedapps.engines.flower import free_port, superlink
from fedapps.engines.process_group import RESUME_HINT
from fedapps.engines.run import run_jobs
from fedapps.planning import make_jobs
from fedapps.saved import read_client_states
from fedapps.serverapp import APPS
from fedapps.settings.config import defaults

SMALL = {"num-clients": 4, "rounds": 2, "local-steps": 3, "evaluate-every": 2}
MARK = os.environ["FEDAPPS_TEST"] = str(os.getpid())  # tells our processes from others' runs
COMMAND = [str(Path(sys.executable).parent / "fedapps"), "run"]
OURS = r"ray|flower|flwr|fedapps run|/fedapps-"  # of commands that are ours
# The command as if the machine had one core: Ray starts an actor for each.
ON_ONE_CORE = """
import os
os.sched_getaffinity = lambda process: {0}
from fedapps.__main__ import main
main()
"""
SECONDS = 600  # for whatever a busy machine takes
SELF = "the command itself"
VICTIMS = {
    ("ray", "raylet"): "raylet",
    ("ray", "gcs_server"): "Ray's gcs_server has died, or was killed",
    ("ray", SELF): "fedapps was killed",
    ("flower", "flower-superlink"): "the SuperLink has died, or was killed (code -9); finished",
    ("flower", "flwr-simulation"): "the run's process has died, or was killed (No heartbeat",
    ("flower", SELF): "fedapps was killed",
}
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found by /proc"
)


def nothing(jobs):
    """Follow a run without showing it."""


def numbers(summary):
    """What must agree to the last bit, whichever engine ran."""
    keys = ("evaluation", "last", "best_round", "megabytes_per_client_round")
    accuracies = {c: got["accuracy"] for c, got in summary["per_client"].items()}
    return [summary[key] for key in keys], accuracies


def in_order(states):
    """Clients' states as a text, each with its arrays in the order of their names."""
    return repr({client: dict(sorted(state.items())) for client, state in states.items()})


def test_all_engines_agree_to_the_last_bit(tmp_path, monkeypatch):
    """Methods whose clients have states and whose server has; Ray's agree in test_ray_grid.py. The
    user has a proxy, which Flower's processes must not use for each other."""
    for name, value in DEAD_PROXY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(flower, "STATUS_SECONDS", SECONDS)  # each question starts a process
    submit = flower.Flwr.submit

    def submit_to_one_actor(link, config, federation):
        """Two nodes as ever, by one process in place of one for each core."""
        return submit(link, config, re.sub(r"(init-args-num-cpus)=\d+", r"\1=1", federation))

    monkeypatch.setattr(flower.Flwr, "submit", submit_to_one_actor)
    config = defaults() | SMALL | {"fraction-train": 0.5, "pfedhn.hidden-dim": 8}
    jobs = {
        engine: make_jobs(config, ["fedper", "pfedhn"], [3], tmp_path / engine)
        for engine in ("in-process", "flower")
    }
    for engine, runs in jobs.items():
        run_jobs(runs, engine, APPS, follow=nothing)
    for one, two in zip(*jobs.values(), strict=True):
        assert (one.error, two.error) == ("", "")
        assert numbers(one.summary()) == numbers(two.summary())
        names = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"}
        names |= {"serving.json", "token.json", "model-final.safetensors"}
        names |= {
            "fedper": {"clients"},
            "pfedhn": {"strategy.safetensors", "strategy-final.safetensors"},
        }[one.method]
        for engine, job in zip(jobs, (one, two), strict=True):
            assert job.summary()["engine"] == engine
            assert {file.name for file in job.folder.iterdir()} == names
            memories = read_client_states(job.folder)
            assert in_order(memories) == in_order(read_client_states(one.folder))
            assert list(memories) == [0] * (one.method == "fedper")  # both rounds draw client 0


@pytest.mark.slow
@pytest.mark.parametrize("case", UNUSUAL)
def test_flowers_engine_agrees_without_labels_in_streams_and_on_shifted_tests(case, tmp_path):
    """Ray's runs are compared in test_ray_grid.py."""
    changes = dict(UNUSUAL[case])
    config, method = defaults() | SMALL | {"num-clients": 6} | changes, changes.pop("method")
    found = []
    for engine in ("in-process", "flower"):
        runs = make_jobs(config, [method], [3], tmp_path / engine)
        run_jobs(runs, engine, APPS, follow=nothing)
        assert runs[0].error == ""
        found.append(runs[0].summary())
    assert numbers(found[0]) == numbers(found[1])
    assert ("train-test-accuracy" in found[0]["evaluation"]) == ("shifted" in case)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_on_ray_a_failing_method_is_reported_and_a_signal_stops_everything(number, tmp_path):
    """The first of two methods fails, the second one is stopped in its rounds. Ray replaces the
    handler of SIGTERM; its sockets find no room in the folder for temporary files."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    environment = os.environ | {"COLUMNS": "200", "PATH": os.defpath, "TMPDIR": str(long)}
    methods = "fedavg min-valid-replies=3,tent"
    process = subprocess.Popen(
        [sys.executable, "-c", ON_ONE_CORE, "run", "num-clients=4", "rounds=5000",
         "--methods", methods, "--engine", "ray", "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    metrics = tmp_path / "tent-seed0" / "metrics.jsonl"
    until(lambda: metrics.is_file() or process.poll() is not None)
    process.send_signal(number)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert errors == "" and f"to continue: fedapps run --resume {tmp_path}" in said
    assert re.search(r"fedavg,min-valid-replies=3-seed0 .* failed", said)
    assert "fedavg,min-valid-replies=3-seed0 failed: RuntimeError: round 1: 2 valid" in said
    until(lambda: not started())


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="root alone may mount a file system",
)
def test_ray_runs_with_the_shared_memory_of_a_container(tmp_path):
    """Docker gives /dev/shm 64 MB, which messages with a network of 26 MB each fill."""
    x = np.random.default_rng(0).integers(0, 256, (160, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(160) % 2)
    command = [*COMMAND, f"dataset={tmp_path / 'images.npz'}", "partition=iid", "num-clients=8",
               "rounds=2", "model=convnet-2048", "--methods", "fedavg", "--engine", "ray",
               "--output", str(tmp_path / "runs")]  # fmt: skip
    small = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {shlex.join(command)}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", small], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "runs/fedavg-seed0/metrics.jsonl").read_text().splitlines()) == 2


def started():
    """The command lines of processes that this file's tests started and that still run, by id."""
    found = {}
    for process in psutil.process_iter():
        try:
            block = Path(f"/proc/{process.pid}/environ").read_bytes()
            line = " ".join(process.cmdline())
            if f"FEDAPPS_TEST={MARK}\0".encode() in block and re.search(OURS, line):
                found[process.pid] = line
        except (OSError, psutil.Error):
            continue
    return found


def until(done):
    wait(done, SECONDS, started)


@pytest.mark.slow
def test_real_supernodes(tmp_path):
    """FedAvg and FedPer for two rounds on three SuperNodes; the same numbers as in process."""
    config = defaults() | SMALL | {"num-clients": 3, "train-fraction": 0.7}
    jobs = make_jobs(config, ["fedavg", "fedper"], [0], tmp_path / "here")
    run_jobs(jobs, "in-process", APPS, follow=nothing)
    output = tmp_path / "nodes"
    with superlink(tmp_path / "superlink.log", simulation=False) as link:
        for i in range(3):
            node = f'partition-id={i} num-partitions=3 state-dir="{tmp_path}/state-{i}"'
            link.start(
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link.port}",
                "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", node,
            )  # fmt: skip
        run_id = link.submit(config | {"method": "fedavg,fedper", "output-dir": str(output)})
        deadline = time.monotonic() + 900
        while not (status := link.status(run_id))[0].startswith("finished"):
            assert time.monotonic() < deadline, (tmp_path / "superlink.log").read_text()
            time.sleep(3)
        assert status[0] == "finished:completed", link.error(run_id)
    for job in jobs:
        summary = json.loads((output / job.name / "summary.json").read_text())
        assert numbers(summary) == numbers(job.summary())
        assert summary["engine"] == "deployment"
    heads = list(tmp_path.glob("state-*/fedper-*.safetensors"))
    assert len(heads) == 2  # of the two training clients
    until(lambda: not started())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "victim"), VICTIMS)
def test_the_death_of_a_process_is_told_in_a_sentence(engine, victim, tmp_path, monkeypatch):
    """The rounds so far stay, and no process and no folder remains."""
    monkeypatch.setenv("COLUMNS", "400")
    said, run = tmp_path / "said", tmp_path / "out" / "fedavg-seed0"
    metrics = run / "metrics.jsonl"
    with said.open("w") as output:
        process = subprocess.Popen(
            [*COMMAND, "num-clients=4", "rounds=30000", "local-steps=1", "evaluate-every=100",
             "--methods", "fedavg,scaffold", "--engine", engine, "--output", str(tmp_path / "out")],
            stdout=output, stderr=output,
        )  # fmt: skip
    until(lambda: metrics.is_file() or process.poll() is not None)
    folders = set(re.findall(r"/fedapps-\w+", " ".join(started().values())))
    assert folders
    if victim == SELF:
        process.kill()
    else:
        pids = [pid for pid, line in started().items() if victim in line.partition(" --")[0]]
        os.kill(max(pids), signal.SIGKILL)
    code = process.wait(SECONDS)
    assert code == (-signal.SIGKILL if victim == SELF else 1)
    until(lambda: VICTIMS[engine, victim] in said.read_text())
    assert RESUME_HINT in said.read_text() and "Traceback" not in said.read_text()
    rounds = [json.loads(line)["round"] for line in metrics.read_text().splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))
    until(lambda: not started())
    until(lambda: not any(Path(tempfile.gettempdir() + one).exists() for one in folders))
