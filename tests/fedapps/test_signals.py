"""SIGTERM and Ctrl-C: one place handles them for every command."""

import faulthandler
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from small_runs import COMMAND
from typer import rich_utils

import fedapps
from fedapps.__main__ import main
from fedapps.common import signals
from fedapps.common.signals import (
    Terminated,
    delayed,
    guarded_in_c,
    handlers_kept,
    interrupt,
    interrupts,
    sigterm_raises,
)
from fedapps.engines import ray_engine
from fedapps.engines import run as engines
from fedapps.results import recorder, table
from fedapps.results.progress import Display

NUMBERS = [signal.SIGINT, signal.SIGTERM]
RUN = ["run", "num-clients=4", "train-fraction=0.75", "local-steps=1", "rounds=2",
       "--methods", "fedavg", "--engine", "in-process", "--output"]  # fmt: skip
run_command = sys.modules["fedapps.commands.run"]  # the package's name is the function


@pytest.fixture(autouse=True)
def usual():
    """The handlers of a process that was just started; conftest.py puts back the former ones."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signals._interrupts.clear()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs"


def once(number):
    """A function that sends the signal to this process when it is called first."""
    left = [number]

    def send():
        if left:
            os.kill(os.getpid(), left.pop())

    return send


def sends_first(monkeypatch, target, name, number):
    """Make the function send the signal before it begins."""
    function = getattr(target, name)
    send = once(number)

    def called(*arguments, **options):
        send()
        return function(*arguments, **options)

    monkeypatch.setattr(target, name, called)


def check_stopped(words, number):
    """The command exits with the signal's status and says so in one line."""
    done = CliRunner().invoke(COMMAND, list(map(str, words)))
    lines = done.output.splitlines()
    assert done.exit_code == 128 + number, done.output
    assert sum(line.startswith("stopped") for line in lines) == 1, done.output
    assert "error:" not in done.output and "Traceback" not in done.output
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


MOMENTS = {
    "parsing of arguments": (click.Command, "parse_args"),
    "planning": (run_command, "plan"),
    "preparation": (run_command, "prepare"),
    "writing of a file": (recorder, "write_text"),
    "progress": (Display, "follow"),
    "end of the progress": (Display, "__exit__"),
    "tidying": (engines, "_forget_trainings"),
    "the table": (table, "results"),
    "the report": (run_command, "make_report"),
    "a second line": (run_command, "say_failures"),
}


def test_a_stopped_command_does_not_stop_a_later_run(monkeypatch, folder, tmp_path):
    with monkeypatch.context() as patch:
        sends_first(patch, run_command, "plan", signal.SIGINT)
        check_stopped([*RUN, folder], signal.SIGINT)
    assert interrupts() == 0
    settings = {"num_clients": 4, "local_steps": 1, "rounds": 1, "engine": "in-process"}
    runs = fedapps.run("fedavg", output=tmp_path / "later", progress=False, **settings)
    assert runs.names == ["fedavg-seed0"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_ends_a_run_with_its_status_and_one_line(
    moment, number, monkeypatch, folder
):
    sends_first(monkeypatch, *MOMENTS[moment], number)
    check_stopped([*RUN, folder], number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_a_refusal_is_printed(number, monkeypatch):
    sends_first(monkeypatch, rich_utils, "rich_format_error", number)
    done = CliRunner().invoke(COMMAND, ["run", "--nothing"])
    assert (done.exit_code, done.stderr.count("stopped\n")) == (128 + number, 1)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_error_while_a_command_ends_changes_no_status(number, monkeypatch, folder):
    sends_first(monkeypatch, Display, "follow", number)

    def fail(jobs):
        raise OSError("not empty")

    monkeypatch.setattr(engines, "_forget_trainings", fail)
    check_stopped([*RUN, folder], number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_library_that_raises_another_error_instead_changes_no_status(number, monkeypatch, folder):
    send = once(number)

    def convert(*arguments):
        try:
            send()
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import") from None

    monkeypatch.setattr(run_command, "plan", convert)
    check_stopped([*RUN, folder], number)
    send = once(number)

    def refuse(*arguments):
        try:
            send()
        except KeyboardInterrupt:
            raise ValueError("a value that was half read") from None

    monkeypatch.setattr(run_command, "plan", refuse)
    check_stopped([*RUN, folder], number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", NUMBERS)
def test_an_interrupt_that_python_drops_is_raised_again(number, monkeypatch, folder):
    send = once(number)
    rounds = []

    class Sender:
        def __del__(self):
            send()

    def follow(self, jobs):
        Sender()
        rounds.append(jobs)

    monkeypatch.setattr(Display, "follow", follow)
    long = ["rounds=300" if word == "rounds=2" else word for word in RUN]
    check_stopped([*long, folder], number)
    assert len(rounds) <= 3  # with the last one, when the display is left


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_the_command_is_imported(number, monkeypatch, capsys):
    class Finder:
        def find_spec(self, name, *_):
            if name == "fedapps.commands.main":
                os.kill(os.getpid(), number)

    monkeypatch.delitem(sys.modules, "fedapps.commands.main")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "stopped\n"
    # What comes while Python ends, ends it at once.
    assert [signal.getsignal(n) for n in NUMBERS] == [signal.SIG_DFL] * 2


def test_the_installed_command_handles_signals_before_its_imports():
    project = Path(fedapps.__file__).parents[1] / "pyproject.toml"
    scripts = tomllib.loads(project.read_text("utf-8"))["project"]["scripts"]
    assert scripts == {"fedapps": f"{main.__module__}:{main.__name__}"}


def test_a_parent_that_ignores_a_signal_keeps_it_so_in_a_command(monkeypatch, folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sends_first(monkeypatch, run_command, "plan", signal.SIGINT)
    assert CliRunner().invoke(COMMAND, [*RUN, str(folder)]).exit_code == 0


def test_a_library_replaces_no_handler():
    with sigterm_raises(interrupt):
        with handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_meets_rays_own_handler_is_one_of_the_command(monkeypatch):
    """Ray sets its handler before it has started."""
    import ray

    def start(**options):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", start)
    with sigterm_raises(interrupt), pytest.raises(Terminated):
        ray_engine._init()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_c_code_sets_is_replaced(tmp_path):
    """As that of `faulthandler`, which `signal` does not see."""
    with (tmp_path / "dump").open("w") as file, sigterm_raises(interrupt):
        try:
            with guarded_in_c(), pytest.raises(Terminated):
                faulthandler.register(signal.SIGTERM, file)
                assert signal.getsignal(signal.SIGTERM) is interrupt
                time.sleep(0.2)  # the guard looks every millisecond
                signal.raise_signal(signal.SIGTERM)
        finally:
            faulthandler.unregister(signal.SIGTERM)
    assert not (tmp_path / "dump").read_text()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_delayed_signal_comes_afterwards(number):
    """Also where what was done meanwhile failed."""
    done = []
    with sigterm_raises(interrupt):
        for error in (None, RuntimeError("failed")):
            with pytest.raises(KeyboardInterrupt), delayed():
                signal.raise_signal(number)
                done.append(error)
                if error:
                    raise error
    assert done[0] is None and len(done) == 2


def test_a_parent_that_ignores_sigterm_keeps_it_so():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with sigterm_raises(interrupt):
        signal.raise_signal(signal.SIGTERM)
