"""Whatever dies in mid-run, the command says so in a sentence and leaves nothing behind.

Minutes of real processes: pytest -n0 -m slow tests/fedapps/test_processes.py"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fedapps.engines.process_group import RESUME_HINT

MARK = f"{os.getpid()}-processes"  # tells our processes from others' runs
COMMAND = [str(Path(sys.executable).parent / "fedapps"), "run", "num-clients=4", "rounds=30000"]
COMMAND += ["local-steps=1", "evaluate-every=100", "--methods", "fedavg,scaffold"]
SECONDS = 600  # for whatever a busy machine takes
SELF = "the command itself"
VICTIMS = {
    ("ray", "raylet"): "raylet",
    ("ray", "gcs_server"): "Ray's gcs_server has died, or was killed",
    ("ray", SELF): "fedapps was killed",
    ("flower", "flower-superlink"): "the SuperLink has died, or was killed (code -9); the rounds",
    ("flower", "flwr-simulation"): "the run's process has died, or was killed (No heartbeat",
    ("flower", SELF): "fedapps was killed",
}


def started():
    """The processes that were started under MARK, by the names of their commands."""
    found = {}
    for process in psutil.process_iter():
        try:
            block = Path(f"/proc/{process.pid}/environ").read_bytes()
            if f"FEDAPPS_TEST={MARK}\0".encode() in block:
                found[process.pid] = " ".join(process.cmdline())
        except (OSError, psutil.Error):
            continue
    return found


def until(done):
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by /proc")
@pytest.mark.parametrize(("engine", "victim"), VICTIMS)
def test_the_death_of_a_process_is_told_in_a_sentence(engine, victim, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPPS_TEST", MARK)
    monkeypatch.setenv("COLUMNS", "400")
    said, run = tmp_path / "said", tmp_path / "out" / "fedavg-seed0"
    metrics = run / "metrics.jsonl"
    with said.open("w") as output:
        process = subprocess.Popen(
            [*COMMAND, "--engine", engine, "--output", str(tmp_path / "out")],
            stdout=output, stderr=output,
        )  # fmt: skip
    until(lambda: metrics.is_file() or process.poll() is not None)
    households = set(re.findall(r"/fedapps-\w+", " ".join(started().values())))
    assert households
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
    until(lambda: not set(started()) - {os.getpid()})
    until(lambda: not any(Path(tempfile.gettempdir() + one).exists() for one in households))
