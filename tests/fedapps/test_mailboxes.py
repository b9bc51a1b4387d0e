"""Mailboxes: what one process puts, another takes; nothing of them stays."""

import multiprocessing
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from fedapps.engines import mailboxes
from fedapps.engines.mailboxes import MEMORY, Mailboxes

if not MEMORY.is_dir():
    pytest.skip("no files in memory on this system", allow_module_level=True)


@pytest.fixture
def two():
    made = Mailboxes.made(2)
    yield made
    made.close()


def _answer(paths, left):
    own = Mailboxes(paths)
    found = [own.take(number, None) for number in (0, 1)]
    left.put([own.put(number, thing * 2) for number, thing in enumerate(found)])


def test_another_process_takes_and_puts(two):
    things = [np.arange(300_000.0), "short"]
    assert [two.put(number, thing) for number, thing in enumerate(things)] == [None, None]
    spawn = multiprocessing.get_context("spawn")
    left = spawn.SimpleQueue()
    other = spawn.Process(target=_answer, args=(two.paths, left))
    other.start()
    assert left.get() == [None, None]
    other.join()
    assert np.array_equal(two.take(0, None), things[0] * 2)
    assert two.take(1, None) == "shortshort"


def test_what_comes_last_is_taken_be_it_shorter(two):
    two.put(0, list(range(10_000)))
    two.put(0, ["one"])
    assert two.take(0, None) == ["one"]
    assert two.take(0, None) == ["one"]


def test_what_finds_no_mailbox_is_given_back():
    thing = ["a"]
    assert Mailboxes(["/nowhere/at/all"]).put(0, thing) is thing
    assert Mailboxes([]).take(0, thing) is thing


def test_a_system_without_files_in_memory_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(mailboxes, "MEMORY", tmp_path / "none")
    assert len(Mailboxes.made(2)) == 0


def test_where_memory_is_short_the_thing_is_given_back_and_nothing_is_kept(two):
    thing = np.zeros(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert two.put(0, thing) is thing
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.stat(two.paths[0]).st_size == 0
    assert two.put(0, thing) is None


def test_what_is_too_large_is_given_back(two, monkeypatch):
    """Its bytes and what the pickle adds, at most 200 bytes."""
    monkeypatch.setattr(mailboxes, "LIMIT", 1000)
    small, large = bytes(800), [bytes(500), bytes(501)]
    assert two.put(0, small) is None
    assert two.put(0, large) is large
    assert os.stat(two.paths[0]).st_size == 0


def test_without_their_names_they_serve_on_and_closed_they_are_gone(two):
    other = Mailboxes(two.paths)
    two.hide()
    assert not any(Path(path).exists() for path in two.paths)
    two.put(1, {"a": 1})
    assert other.take(1, None) == {"a": 1}
    two.close()
    assert two.put(1, "b") == "b"
    other.close()


def test_closed_before_anybody_opened_them_they_leave_no_file():
    made = Mailboxes.made(1)
    made.close()
    assert not Path(made.paths[0]).exists()
