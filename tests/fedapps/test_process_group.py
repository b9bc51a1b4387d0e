"""A command's processes end with it, however it ends; Ray that does not start, or dies."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fedapps import planning
from fedapps.engines import process_group, ray_engine
from fedapps.engines import run as engines
from fedapps.engines.process_group import GROUP
from fedapps.settings.config import defaults

# Starts a member of its group in another session, prints its id, and sleeps.
COMMAND = f"""
import os, subprocess, sys, time
from fedapps.engines.process_group import process_group
with process_group() as folder:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    environment = os.environ | {{"{GROUP}": str(folder)}}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    print(folder, child.pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("killed", [True, False])
def test_a_group_ends_with_its_command(killed, tmp_path):
    """Soon after the command was killed; before the command ends in order."""
    command = [sys.executable, "-c", COMMAND, "600" if killed else "0"]
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
    with running:
        folder, child = running.stdout.readline().split()
        if killed:
            running.kill()
    deadline = time.monotonic() + (60 if killed else 0)
    while alive(int(child)) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert running.returncode == (-signal.SIGKILL if killed else 0)
    assert (tmp_path / "said").read_text() == (f"{process_group.KILLED}\n" if killed else "")


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    """TMPDIR of 140 bytes."""
    folder = tmp_path / ("a" * (139 - len(bytes(tmp_path))))
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked up again
    assert len(tempfile.gettempdir()) == 140
    return folder


def test_a_long_folder_for_temporary_files_is_replaced_by_a_short_one(long_folder):
    """Sockets of Ray's longest names fit there."""
    with process_group.process_group() as folder:
        assert folder.parent == Path("/tmp")
    deepest = "/" + "f" * (process_group.MAX_FOLDER - 1) + process_group.SOCKET
    with socket.socket(socket.AF_UNIX) as probe:
        with pytest.raises(OSError, match="No such file"):  # and not that the path is too long
            probe.connect(deepest)
        with pytest.raises(OSError, match="too long"):
            probe.connect(deepest + "f")


def test_a_long_folder_is_refused_where_there_is_no_short_one(long_folder, monkeypatch):
    monkeypatch.setattr(process_group, "SHORT_FOLDER", "/nowhere")
    with (
        pytest.raises(RuntimeError, match=f"{long_folder}, has more than .* set TMPDIR to a short"),
        process_group.process_group(),
    ):
        pass


def test_a_full_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "MIN_FREE", 10**18)
    with (
        pytest.raises(RuntimeError, match=r"has .* MB left, and at least 1e\+12 MB are needed"),
        process_group.process_group(),
    ):
        pass


def test_a_signal_while_a_group_begins_leaves_nothing(tmp_path, monkeypatch):
    """It comes between the folder and the watcher that removes it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process_group, "MAX_FOLDER", 200)

    start = subprocess.Popen

    def begun(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", begun)
    with pytest.raises(KeyboardInterrupt), process_group.process_group():
        pass
    assert not list(tmp_path.iterdir())


def test_a_process_that_ignores_sigterm_is_killed_and_no_other(tmp_path, monkeypatch):
    """Neither one without a group nor one of another group."""
    monkeypatch.setattr(process_group, "TERMINATE_SECONDS", 0.5)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    groups = (str(tmp_path), "/another/group", "")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", deaf],
            env=os.environ | ({GROUP: group} if group else {}),
            stdout=subprocess.PIPE,
        )
        for group in groups
    ]
    for one in started:
        one.stdout.readline()
    process_group.end_group(str(tmp_path))
    assert started[0].wait() == -signal.SIGKILL
    assert [one.poll() for one in started[1:]] == [None, None]
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="a program's first word may not be another's")
def test_rays_processes_that_lost_the_variable_are_known_by_their_logs(tmp_path):
    """Other programs that read a file of the folder live on."""
    program = (
        "import sys, time; log = open(sys.argv[1], 'a'); print(1, flush=True); time.sleep(600)"
    )
    started = {}
    try:
        for title, log in (
            ("ray::DashboardAgent", "agent.log"),
            ("ray::Elsewhere", "../elsewhere.log"),
            ("viewer", "agent.log"),
        ):
            file = tmp_path / "group" / log
            file.parent.mkdir(exist_ok=True)
            words = [title, "-c", program, str(file)]
            started[title] = subprocess.Popen(
                words, executable=sys.executable, stdout=subprocess.PIPE
            )
            started[title].stdout.readline()
        process_group.end_group(str(tmp_path / "group"))
        assert started["ray::DashboardAgent"].wait(10) == -signal.SIGTERM
        assert started["ray::Elsewhere"].poll() is None
        assert started["viewer"].poll() is None
        assert not (tmp_path / "group").exists()
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="Linux alone tells the limit")
def test_too_few_open_files_for_ray_are_said_at_once(monkeypatch):
    """Ray's own runs leave some open; with one file more it would start."""
    started = []
    monkeypatch.setattr(ray_engine, "_init", lambda **options: started.append(options))
    monkeypatch.setattr(psutil.Process, "num_fds", lambda self: 924)
    monkeypatch.setattr(psutil.Process, "rlimit", lambda self, kind: (1023, 4096))
    with pytest.raises(RuntimeError, match="924 open files of the 1023"), ray_engine.ray_cluster():
        pass
    assert not started
    monkeypatch.setattr(psutil.Process, "rlimit", lambda self, kind: (1024, 4096))
    with ray_engine.ray_cluster():
        assert started


@pytest.mark.parametrize("failures", [1, ray_engine.MAX_STARTS])
def test_ray_that_does_not_start_is_tried_again(failures, monkeypatch):
    """Each try has a new folder; those of failed tries are removed."""
    folders = []

    def start(*, _temp_dir, **options):
        assert os.environ[GROUP] == _temp_dir
        assert not any(map(os.path.exists, folders))
        folders.append(_temp_dir)
        if len(folders) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_engine, "_init", start)
    if failures < ray_engine.MAX_STARTS:
        with ray_engine.ray_cluster() as check:
            check()
            assert os.path.exists(folders[-1])
    else:
        with (
            pytest.raises(RuntimeError, match=r"not start, in 3 tries .*timed out.*in-process"),
            ray_engine.ray_cluster(),
        ):
            pass
    assert len(folders) == min(failures + 1, ray_engine.MAX_STARTS)
    assert not any(map(os.path.exists, folders))
    assert GROUP not in os.environ


@pytest.mark.parametrize("hangs", [True, False])
def test_runs_end_when_what_they_need_has_died(hangs, tmp_path, monkeypatch, capsys):
    """The current run fails, or hangs; its error and the next run's say what happened."""
    monkeypatch.setattr(engines, "EXIT_SECONDS", 0.3)
    work = planning.make_jobs(defaults(), ["local", "fedavg", "scaffold"], [0], tmp_path)
    begun = []

    def carry_out(config, pause):
        begun.append(config["method"])
        if len(begun) == 2:
            time.sleep(60 if hangs else 0)
            raise OSError("broken pipe")

    def check():
        if len(begun) == 2:
            raise RuntimeError("it has died")

    engines.run_in_turn(work, carry_out, lambda _: None, check)
    assert begun == ["local", "fedavg"]
    assert [job.done for job in work] == [True] * 3
    said = "RuntimeError: it has died"
    expected = ["", said if hangs else "OSError: broken pipe", said]
    errors = [job.error.partition(" (")[0] for job in work]  # without their places
    assert errors == expected
    assert not hangs or capsys.readouterr().err == "it has died\n"
