"""A run that was cut short goes on from its checkpoint, and ends bit for bit as if it had not been.

Methods one by one, in process: interrupted after a round, resumed by nothing but the folder."""

import errno
import json
import logging
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from small_runs import FEWER, NEEDS, WEE, Cut, cut_before, left

from fedapps import files
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.results.checkpoint import newest_checkpoint
from fedapps.results.recorder import Recorder
from fedapps.saved import read_client_states, read_state, state_bytes
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.strategy import PersonalizedStrategy

SMALL = defaults() | WEE | {"num-clients": 4, "rounds": 4, "local-steps": 2, "evaluate-every": 2}
SMALL |= {"checkpoint-every": 1, "fraction-train": 0.5, "train-fraction": 0.75}
SMALL |= {"model": "mlp-small", "batch-size": 16} | FEWER
TWO_PHASE = {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": 2}
ADAM = {"odpfl-hn.server-optimizer": "adam", "odpfl-hn.server-lr": 0.001}
LATE = {"latency": "lognormal", "latency-sigma": 0.0, "latency-slow-share": 0.34,
        "latency-slow-factor": 2.5, "round-quorum": 0.6, "fraction-train": 1.0}  # fmt: skip
THREE = {"rounds": 3}
CASES: dict[str, tuple[str, dict]] = {method: (method, THREE) for method in METHODS} | {
    "fedma": ("fedma", {"fedma.new-neuron-cost": 0.1}),  # so that layers grow
    "fedembed-som": ("fedembed", {"fedembed.assignment": "som", "rounds": 3}),
    "fedembed-held": (
        "fedembed",
        {"fedembed.assignment": "personal", "fedembed.heads": "server"},
    ),
    "odpfl-hn-adam": ("odpfl-hn", ADAM | {"odpfl-hn.encoder-lr": 0.01}),
    "odpfl-hn-two-phase": ("odpfl-hn", ADAM | TWO_PHASE),
    "pfedhn-novel": ("pfedhn", {"rounds": 2, "novel-rounds": 2}),
    "pfl-nearest-pfedhn": ("pfl-nearest", {"pfl-nearest.base": "pfedhn"}),
    "atp": ("atp", {"atp.fedavg-rounds": 1}),
    "lg-fedavg-phases": ("lg-fedavg", {"lg-fedavg.fedavg-rounds": 1}),
    "early-stopping": ("fedavg", {"early-stopping": 2, "evaluate-every": 1, "lr": 0.0}),
    "flowdup-unlabeled": ("flowdup", {"partition.labeled-clients": 0.5, "fraction-train": 1.0}),
    # One client is late, for one round and more; its state and its message are saved.
    "late": ("scaffold", LATE), "late-hypernetwork": ("pfedhn", LATE),
    "private": ("fedavg", {"dp": "local", "dp-noise-multiplier": 1.0, "dp-generator": "seeded"}
                | {"dp-covers": "model-updates"}),
}  # fmt: skip


def go(folder, method, config, **more):
    config = SMALL | NEEDS.get(method, {}) | config
    config |= {"method": method, "output-dir": str(folder), **more}
    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    return run(grid, config, "in-process")


@contextmanager
def copied_before(number, folder, copy):
    """The run's folder is copied when round `number` begins: what SIGKILL would leave of it."""
    begin = PersonalizedStrategy.configure_train

    def configure_train(self, server_round, *arguments):
        if server_round == number:
            shutil.copytree(folder, copy)
        return begin(self, server_round, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PersonalizedStrategy, "configure_train", configure_train)
        yield


@pytest.mark.parametrize("name", CASES)
def test_resumed_is_as_good_as_undisturbed(name, tmp_path):
    method, config = CASES[name]
    with copied_before(3, tmp_path / "whole", tmp_path / "cut"):
        last = go(tmp_path / "whole", method, config)
    resumed = go(tmp_path / "cut", method, config, resume=True)
    assert left(tmp_path / "whole") == left(tmp_path / "cut")
    assert {n: a.data for n, a in last.arrays.items()} == {
        n: a.data for n, a in resumed.arrays.items()
    }
    assert not (tmp_path / "cut" / "checkpoints").exists()
    if name in METHODS and name not in (
        "odpfl-hn",
        "lg-fedavg",
    ):  # they keep no state in these runs
        assert bool(read_client_states(tmp_path / "whole")) == bool(
            METHODS[method].client.needs_state
        )


FEDPER = {"rounds": 3, "evaluate-every": 1}


def test_killed_between_any_two_writes(tmp_path, monkeypatch):
    """A file is written by renaming it: the run dies before, or after, the first rename, the
    second, … until it has none left, and what it had begun to append is half a line."""
    config = FEDPER | {"num-clients": 3, "train-fraction": 0.67}
    go(tmp_path / "whole", "fedper", config)
    expected, written, survived = left(tmp_path / "whole"), 0, False
    while not survived:
        folder, renames, replace = tmp_path / f"cut-{written}", [], os.replace

        def dying(source, target, renames=renames, replace=replace, last=written):
            if len(renames) == last // 2 and not last % 2:
                raise Cut
            replace(source, target)
            renames.append(target)
            if len(renames) == last // 2 + 1:
                raise Cut

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying)
            patch.setattr(Recorder, "__exit__", dead_or_done(Recorder.__exit__))
            try:
                go(folder, "fedper", config)
                survived = True
            except Cut:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write('{"round": 7, "los')
        go(folder, "fedper", config, resume=True)
        assert left(folder) == expected, written
        written += 1
    assert written > 2 * 3 * 4  # before and after config, then model, summary, checkpoint a round


def dead_or_done(leave):
    """Recorder.__exit__ of a process that a Cut kills."""

    def exit_(self, kind, error, trace):
        if kind is not Cut:
            leave(self, kind, error, trace)

    return exit_


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(tmp_path, caplog):
    go(tmp_path / "whole", "fedper", FEDPER)
    with cut_before(3):
        go(tmp_path / "cut", "fedper", FEDPER)
    with cut_before(3):
        go(tmp_path / "other", "fedper", FEDPER | {"lr": 0.1})
    checkpoints = tmp_path / "cut" / "checkpoints"
    newest, before = checkpoints / "round-00000002.safetensors", "round-00000001.safetensors"
    whole = newest.read_bytes()
    config = SMALL | FEDPER | {"method": "fedper"}
    middle = len(whole) // 2
    for damaged, reason in [
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "digest differ"),
        (whole[: middle + 1], "cannot be read"),
        (b"", "cannot be read"),
        (whole.replace(b'"format":"1"', b'"format":"9"'), "its format is '9'"),
        ((tmp_path / "other" / "checkpoints" / newest.name).read_bytes(), "lr is 0.1 there, 0.3"),
    ]:
        newest.write_bytes(damaged)
        state, refused = newest_checkpoint(tmp_path / "cut", config)
        assert state["strategy"]["round"] == 1
        assert len(refused) == 1
        assert newest.name in refused[0]
        assert reason in refused[0]
    with caplog.at_level(logging.WARNING, "flwr"):
        go(tmp_path / "cut", "fedper", FEDPER, resume=True)
    assert left(tmp_path / "cut") == left(tmp_path / "whole")
    assert f"{newest.name} is refused" in caplog.text
    assert before not in caplog.text


def test_a_full_disk_at_a_checkpoint_costs_that_checkpoint(tmp_path, monkeypatch, caplog):
    """Round 2's is not written: the run says so and goes on, killed later it goes on from 1."""
    go(tmp_path / "whole", "fedper", FEDPER)
    create = files.create

    @contextmanager
    def full(path, *mode):
        with create(path, *mode) as file:
            if "round-00000002" in path.name:
                file.write(b"half of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file

    monkeypatch.setattr(files, "create", full)
    with caplog.at_level(logging.WARNING, "flwr"), cut_before(3):
        go(tmp_path / "cut", "fedper", FEDPER)
    assert "checkpoints is not written ([Errno 28] No space left" in caplog.text
    state, refused = newest_checkpoint(tmp_path / "cut", SMALL | FEDPER | {"method": "fedper"})
    assert (state["strategy"]["round"], refused) == (1, [])
    go(tmp_path / "cut", "fedper", FEDPER, resume=True)  # which the full disk does not end, either
    assert left(tmp_path / "cut") == left(tmp_path / "whole")


def test_every_state_comes_back_as_it_was(tmp_path):
    """Ints as keys, sets, the order of dicts, 0-d and empty arrays, exact numbers, infinity."""
    state = {
        "b": {10: 0.1 + 0.2, 2: {"x/y": np.float32([[1, 2]]).T}},
        "a": [{3, 1}, None, True, "ε", np.array(7), np.zeros((0, 4), np.int64), float("inf")],
    }
    (tmp_path / "state").write_bytes(state_bytes(state))
    back = read_state(tmp_path / "state")
    assert list(back) == ["b", "a"]
    assert list(back["b"]) == [10, 2]
    assert repr(back) == repr(state)
    assert back["a"][4].shape == ()
    assert b"pickle" not in (tmp_path / "state").read_bytes()


def test_a_state_is_refused_where_anything_of_it_was_changed(tmp_path):
    """The kind of an array whose bytes stay, a text, a number; and a file that is gone or none."""
    file = tmp_path / "state"
    content = {"v": np.ones(2, np.float32), "step": 17, "got": ("one", np.ones(2))}
    file.write_bytes(state_bytes(content))
    whole = file.read_bytes()
    np.testing.assert_equal(read_state(file)["got"], ["one", np.ones(2)])
    for old, new in ((b"F32", b"I32"), (b"17", b"18"), (b"one", b"two"), (b'/v"', b'/w"')):
        assert whole.count(old)
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="content and digest differ"):
            read_state(file)
    for place in (tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match="it cannot be read"):
            read_state(place)


def test_a_state_has_one_form(tmp_path):
    """Sets in order, arrays row by row wherever their entries lay."""
    words = {f"word {i}" for i in range(40)}
    got = json.dumps(sorted(words)).encode().replace(b'"', b'\\"')
    assert got in state_bytes({"s": words})
    table = np.arange(6).reshape(2, 3)
    for same in (np.asfortranarray(table), np.repeat(table, 2, 1)[:, ::2]):
        (tmp_path / "state").write_bytes(state_bytes({"v": same}))
        np.testing.assert_equal(read_state(tmp_path / "state"), {"v": table})
