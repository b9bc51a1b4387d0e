"""SIGTERM and Ctrl-C: one place handles them for every command."""

import signal
import sys

import pytest
import typer
from typer.testing import CliRunner

from fedapps.commands.data import partition
from fedapps.commands.main import cli
from fedapps.common.signals import Terminated, delayed, handlers_kept, sigterm_raises, terminate
from fedapps.console import stoppable
from fedapps.engines import ray_engine

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def usual():
    """The handlers of a process that was just started; conftest.py puts back the former ones."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_command_says_that_it_stopped_and_exits_with_the_signals_code(number):
    app = typer.Typer()

    @app.command()
    @stoppable
    def command(words: list[str]) -> None:
        """Wait."""
        signal.raise_signal(number)

    done = CliRunner().invoke(app, ["a", "b"])
    assert (done.exit_code, done.stderr) == (128 + number, "stopped\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_every_command_ends_so():
    commands = [*cli.registered_commands, *partition.registered_commands]
    assert len(commands) > 12
    handler = stoppable(print).__code__
    assert [c.name for c in commands if c.callback.__code__ is not handler] == []


def test_a_library_replaces_no_handler():
    with sigterm_raises(terminate):
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
    with sigterm_raises(terminate), pytest.raises(Terminated):
        ray_engine._init()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", NUMBERS)
def test_a_delayed_signal_comes_afterwards(number):
    """Also where what was done meanwhile failed."""
    done = []
    with sigterm_raises(terminate):
        for error in (None, RuntimeError("failed")):
            with pytest.raises(KeyboardInterrupt), delayed():
                signal.raise_signal(number)
                done.append(error)
                if error:
                    raise error
    assert done[0] is None and len(done) == 2


def test_a_parent_that_ignores_sigterm_keeps_it_so():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with sigterm_raises(terminate):
        signal.raise_signal(signal.SIGTERM)
