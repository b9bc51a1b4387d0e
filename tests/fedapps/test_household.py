"""What a command starts is gone with it, however it ends; Ray that does not start, or dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedapps.engines import cluster, jobs
from fedapps.engines import household as house
from fedapps.engines.household import MEMBER, household
from fedapps.settings.config import defaults

# Starts a member in a session of its own, says who it is, and sleeps.
MOTHER = f"""
import os, subprocess, sys, time
from fedapps.engines.household import household
with household() as folder:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    own = os.environ | {{"{MEMBER}": str(folder)}}
    child = subprocess.Popen(command, env=own, start_new_session=True)
    print(folder, child.pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_household_is_gone_with_its_command(killed, tmp_path):
    """Killed, it is gone soon; left in order, it is gone by then."""
    mother = [sys.executable, "-c", MOTHER, "600" if killed else "0"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(mother, stdout=subprocess.PIPE, stderr=said, text=True)
    with process:
        folder, child = process.stdout.readline().split()
        if killed:
            process.kill()
    deadline = time.monotonic() + (60 if killed else 0)
    while alive(int(child)) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert process.returncode == (-signal.SIGKILL if killed else 0)
    assert (tmp_path / "said").read_text() == (f"{house.KILLED}\n" if killed else "")


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_who_does_not_heed_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "SECONDS", 0.5)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    own = os.environ | {MEMBER: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", deaf], env=own, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        house.end(str(tmp_path))
    assert process.returncode == -signal.SIGKILL


def test_others_are_left_alone():
    """Neither who is in no household nor who is in another one."""
    with household() as other:
        command = [sys.executable, "-c", "input()"]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        own = os.environ | {MEMBER: str(other)}
        two = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=own)
        with household() as folder:
            (folder / "file").touch()
        assert (folder.exists(), other.exists()) == (False, True)
        assert (one.poll(), two.poll()) == (None, None)
    assert two.wait() == -signal.SIGTERM
    assert one.poll() is None
    one.kill()
    one.wait()


@pytest.mark.parametrize("failures", [1, cluster.TRIES])
def test_ray_that_does_not_start_is_tried_again(failures, monkeypatch):
    """Each try has a folder of its own, which is gone when it failed."""
    folders = []

    def start(*, _temp_dir, **options):
        assert os.environ[MEMBER] == _temp_dir
        assert not any(map(os.path.exists, folders))
        folders.append(_temp_dir)
        if len(folders) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster, "_init", start)
    if failures < cluster.TRIES:
        with cluster.ray_cluster() as check:
            check()
            assert os.path.exists(folders[-1])
    else:
        with (
            pytest.raises(RuntimeError, match=r"not start, in 3 tries .*timed out.*in-process"),
            cluster.ray_cluster(),
        ):
            pass
    assert len(folders) == min(failures + 1, cluster.TRIES)
    assert not any(map(os.path.exists, folders))
    assert MEMBER not in os.environ


@pytest.mark.parametrize("hangs", [True, False])
def test_runs_end_when_what_they_need_has_died(hangs, tmp_path, monkeypatch, capsys):
    """The run at hand fails, or hangs; in both cases it and the next one say what happened."""
    monkeypatch.setattr(jobs, "LAST_SECONDS", 0.3)
    work = jobs.make_jobs(defaults(), ["local", "fedavg", "scaffold"], [0], tmp_path)
    begun = []

    def carry_out(config):
        begun.append(config["method"])
        if len(begun) == 2:
            time.sleep(60 if hangs else 0)
            raise OSError("broken pipe")

    def check():
        if len(begun) == 2:
            raise RuntimeError("it has died")

    jobs._run_here(work, carry_out, lambda _: None, check)
    assert begun == ["local", "fedavg"]
    assert [job.done for job in work] == [True] * 3
    said = "RuntimeError: it has died"
    assert [job.error for job in work] == ["", said if hangs else "OSError: broken pipe", said]
    assert not hangs or capsys.readouterr().err == "it has died\n"
