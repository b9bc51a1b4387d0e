"""A run's folder: what others go on from, written and read back, replaced whole, cleared."""

import os
from pathlib import Path
from unittest.mock import Mock

import documented_code
import numpy as np
import pytest
from run_folders import vouch

import partitions
from fedapps import files
from fedapps.files import spill, write_files
from fedapps.results import folder as folders
from fedapps.results.checkpoint import newest_checkpoint, write_checkpoint
from fedapps.results.folder import (
    check_former,
    check_unseen,
    clear,
    write_client_states,
)
from fedapps.results.model_files import model_files, write_final
from fedapps.saved import CHECKPOINTS, STRATEGY, read_client_states, read_former, state_bytes
from fedapps.settings.config import defaults

ARRAYS, HANDOUT = {"w": np.arange(3.0)}, {"3/w": np.ones((2, 1))}
KEPT = {"v": {"7": np.array([1, 2])}, "seen": {4, 2}, "rounds": [1, 2.5, "a"]}


def state(handout=None, kept=None):
    return {"arrays": ARRAYS, "handout": handout or {}, "kept": kept or {}}


def test_what_a_strategy_keeps_lies_beside_its_model(tmp_path):
    files = model_files(tmp_path, state(HANDOUT, KEPT))
    assert len(files) == 3
    write_files(files)
    vouch(tmp_path)
    former = read_former(tmp_path)
    assert sorted(former) == ["arrays", "handout", "kept"]
    np.testing.assert_equal(former, state(HANDOUT, KEPT))
    assert isinstance(former["kept"]["seen"], set)
    assert [file.name for file in model_files(tmp_path, state())] == ["model.safetensors"]
    kept = tmp_path / STRATEGY
    kept.write_bytes(kept.read_bytes()[:-1])
    vouch(tmp_path)
    with pytest.raises(ValueError, match=r"strategy.safetensors is refused: it"):
        read_former(tmp_path)


def test_the_last_rounds_state_lies_beside_the_best_rounds(tmp_path):
    """The handout is the same in both rounds: one file under two names. A later run's best state
    leaves the last one's files alone."""
    write_files(model_files(tmp_path, state(HANDOUT, KEPT)))
    last = {"arrays": {"w": np.arange(3.0) + 7}, "handout": HANDOUT, "kept": {"rounds": [9]}}
    for _ in range(2):
        write_final(tmp_path, last)
    vouch(tmp_path)
    np.testing.assert_equal(read_former(tmp_path, "last"), last)
    np.testing.assert_equal(read_former(tmp_path), state(HANDOUT, KEPT))
    shared = {f.name for f in tmp_path.iterdir() if f.stat().st_nlink == 2}
    assert shared == {"handout.safetensors", "handout-final.safetensors"}
    write_files(model_files(tmp_path, state({"4/w": np.zeros(1)})))
    vouch(tmp_path)
    np.testing.assert_equal(read_former(tmp_path, "last"), last)
    (tmp_path / "model-final.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model-final.safetensors; .* --fresh"):
        read_former(tmp_path, "last")
    vouch(tmp_path)
    with pytest.raises(ValueError, match=r"holds no model-final.safetensors: .* use round best"):
        read_former(tmp_path, "last")


def test_a_disk_without_links_has_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("no links")))
    write_files(model_files(tmp_path, state(HANDOUT)))
    write_final(tmp_path, state(HANDOUT))
    assert {f.stat().st_nlink for f in tmp_path.iterdir()} == {1}
    vouch(tmp_path)
    np.testing.assert_equal(read_former(tmp_path, "last"), {"arrays": ARRAYS, "handout": HANDOUT})


def test_a_run_has_its_token_beside_its_model(tmp_path):
    write_files(model_files(tmp_path, state() | {"token": "a5"}))
    vouch(tmp_path)
    assert read_former(tmp_path)["token"] == "a5"
    for damaged in ("", "{", "[]", "{}", "[" * 100_000):
        (tmp_path / "token.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"token.json is damaged"):
            read_former(tmp_path)
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_memories_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """Client 3 kept something once, and 11 does now; a former try was killed within client 5's. An
    error on the way leaves what was there."""
    write_client_states(tmp_path, {3: ARRAYS})
    begun = tmp_path / f".{folders.CLIENTS}"
    begun.mkdir()
    (begun / "5.safetensors").write_text("half")
    write_client_states(tmp_path, {11: ARRAYS, 2: HANDOUT})
    vouch(tmp_path)
    np.testing.assert_equal(read_client_states(tmp_path), {11: ARRAYS, 2: HANDOUT})

    def full(contents):
        next(iter(contents)).write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(folders, "write_files", full)
    with pytest.raises(OSError, match="no space left"):
        write_client_states(tmp_path, {4: ARRAYS})
    assert sorted(read_client_states(tmp_path)) == [2, 11]
    assert not begun.exists()


KEPT_BY = {
    5: {"w": np.arange(4.0)},
    2: {
        "t": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "none": np.empty((0, 2)),
        "b": np.bool_(1),
    },
    9: {"w": np.float32([[1.5]]), "x/y": np.arange(3)},
}


def test_what_clients_keep_beyond_some_bytes_lies_in_a_file_without_a_name(tmp_path, monkeypatch):
    """Client 5's 32 bytes stay in memory as they are; the others' arrays, of 13 and 28 bytes, are
    the same by order, name, shape and dtype, and nobody can change them."""
    monkeypatch.setattr(files, "IN_MEMORY", 32)
    found = spill(KEPT_BY.items(), tmp_path)
    assert not list(tmp_path.iterdir())
    np.testing.assert_equal(found, KEPT_BY)
    assert list(found) == [5, 2, 9]
    assert found[5] is KEPT_BY[5]
    for client in (2, 9):
        for name, array in found[client].items():
            assert array.dtype == KEPT_BY[client][name].dtype
            assert not array.flags.writeable
            assert array.flags.aligned
    assert write_client_states(tmp_path, found) == write_client_states(tmp_path, KEPT_BY)
    vouch(tmp_path)
    np.testing.assert_equal(read_client_states(tmp_path), {k: dict(v) for k, v in KEPT_BY.items()})


def test_little_that_clients_keep_needs_no_disk(tmp_path):
    assert spill(KEPT_BY.items(), tmp_path / "not there") == KEPT_BY


def test_a_new_run_clears_the_former_ones_results_and_nothing_else(tmp_path):
    results = ["metrics.jsonl", "summary.json", *(f.name for f in model_files(
        tmp_path, state(HANDOUT, KEPT)
    ))]  # fmt: skip
    results += [name.replace(".", "-final.") for name in results[2:]]
    kept = ("config.toml", "serving.json", "privacy.json")
    unfinished = [f".{name}.{os.getpid()}" for name in (*results, *kept)]
    for name in (*results, *kept, *unfinished, "notes.txt"):
        (tmp_path / name).write_text("")
    for name in (folders.CLIENTS, f".{folders.CLIENTS}", "checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    clear(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(["checkpoints", "notes.txt", *kept])


def test_what_a_methods_predictions_need_is_asked_for(tmp_path):
    """FedPer's clients keep their heads; FedAvg's keep nothing, but the model must be there."""
    for method in ("fedper", "fedavg"):
        with pytest.raises(ValueError, match=r"holds no model.safetensors"):
            check_former(tmp_path, method)
    write_files(model_files(tmp_path, state()))
    vouch(tmp_path)
    check_former(tmp_path, "fedavg")
    with pytest.raises(ValueError, match="holds no clients/"):
        check_former(tmp_path, "fedper")
    write_client_states(tmp_path, {1: ARRAYS})
    with pytest.raises(ValueError, match="holds no clients/"):  # killed before the summary
        check_former(tmp_path, "fedper")
    vouch(tmp_path)
    check_former(tmp_path, "fedper")


SAVED = defaults() | {"partition": "iid", "num-clients": 6}


@pytest.mark.parametrize(
    "key", ["seed", "data-seed", "num-clients", "partition.validation-fraction"]
)
def test_who_is_dealt_otherwise_is_scored_by_what_was_trained_on(key):
    value = {"num-clients": 5, "partition.validation-fraction": 0.3}.get(key, 1)
    with pytest.raises(ValueError, match=f"were trained on in run, where {key} was {SAVED[key]};"):
        check_unseen(Path("run"), SAVED, SAVED | {key: value}, "fedavg")
    check_unseen(Path("run"), SAVED, SAVED | {"lr": 0.5}, "fedavg")


def test_who_trained_and_is_novel_now_is_scored_by_all_it_has():
    """Three of six clients trained, on 300 − 45 or 299 − 45 digits each; two train now. The third
    is scored by all of its digits, and it trained on 254 or 255 of them; by no others' of those."""
    fewer = SAVED | {"train-fraction": 0.34}
    former, present = (partitions.federation(config).novel for config in (SAVED, fewer))
    (other,) = np.flatnonzero(present & ~former)
    seen = len(partitions.federation(SAVED).rows(other)["train"])
    assert seen in (254, 255)
    with pytest.raises(ValueError, match=f"^{seen} of the .* where train-fraction was 0.5;"):
        check_unseen(Path("run"), SAVED, fewer, "fedavg")


def test_users_and_other_datasets_samples_are_not_those_that_were_trained_on(tmp_path):
    """Users draw anew from all; rows of one dataset are not rows of another."""
    users = SAVED | {"partition": "preference"}
    check_unseen(Path("run"), users, users | {"seed": 1}, "global")
    with documented_code.written(tmp_path):
        check_unseen(Path("run"), SAVED, SAVED | {"dataset": documented_code.RINGS}, "fedavg")


def test_the_latest_two_checkpoints_up_to_the_round_at_hand_are_kept(tmp_path):
    """Rounds 2, 4 and 6 of a run; one that went on from 4 writes 5, and leaves 6 alone."""
    content = state_bytes({"config": SAVED, "state": {"round": 1}})

    def kept():
        return [int(file.stem[6:]) for file in sorted((tmp_path / CHECKPOINTS).iterdir())]

    for round_, expected in ((2, [2]), (4, [2, 4]), (6, [4, 6]), (5, [4, 5, 6]), (7, [6, 7])):
        write_checkpoint(tmp_path, round_, content)
        assert kept() == expected
    for round_ in (9, 10):
        content = state_bytes({"config": SAVED, "state": {"round": round_}})
        write_checkpoint(tmp_path, round_, content)
    assert newest_checkpoint(tmp_path, SAVED) == ({"round": 10}, [])
