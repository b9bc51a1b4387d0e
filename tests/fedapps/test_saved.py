"""A saved run is opened whole and finite, as its summary vouches for it, or is refused.

A run is cut before each change of its folder in turn, as SIGKILL would: what is opened is of one
round, or a sentence says what to do. Then the run goes on, and ends as if nobody had cut it."""

import json
import logging
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from run_folders import vouch
from safetensors.numpy import load, load_file, save_file
from small_runs import SMALL, Cut, fedapps, left

import fedapps as package
from fedapps import saved
from fedapps.files import array_bytes
from fedapps.planning import check_start
from fedapps.results.recorder import Recorder
from fedapps.results.runs import read_rounds
from fedapps.saved import (
    MODEL,
    SUMMARY,
    read_arrays,
    read_client_states,
    read_former,
    read_json,
)
from fedapps.serverapp import run_in_process
from fedapps.service.figures import predictions
from fedapps.service.finished_run import FinishedRun
from fedapps.service.model_card import write_model
from fedapps.settings.config import defaults

CONFIG = SMALL | {"num-clients": 4, "train-fraction": 0.75, "rounds": 3, "local-steps": 1}
CONFIG |= {"checkpoint-every": 1, "evaluate-every": 1}
CONFIG |= {"model": "mlp-small"}
CHANGES = ("replace", "rename", "unlink", "link")  # of a folder, as functions of os
INPUTS = np.zeros((3, 1, 8, 8), np.uint8)


class Changes:
    """Calls `before`, with their number, before each change of a folder."""

    def __init__(self, patch, folder, before):
        self.folder, self.before, self.seen = str(folder), before, 0
        for name in CHANGES:
            patch.setattr(os, name, self.watched(getattr(os, name)))
        patch.setattr(shutil, "rmtree", self.watched(shutil.rmtree))

    def watched(self, function):
        def call(*arguments, **options):
            places = [str(a) for a in arguments if isinstance(a, str | Path)]
            if any(place.startswith(self.folder) and ".lock" not in place for place in places):
                self.before(self.seen)
                self.seen += 1
            return function(*arguments, **options)

        return call


def config_of(method, folder, **changes):
    return CONFIG | {"method": method, "output-dir": str(folder)} | changes


def test_the_order_of_saved_arrays_is_the_same_in_every_process(tmp_path):
    """safetensors' own order is random: it passes once in 20! times."""
    save_file({f"{i}/weight": np.zeros(1) for i in range(20)}, tmp_path / MODEL)
    by_name = sorted(f"{i}/weight" for i in range(20))
    assert list(saved.SavedFiles(tmp_path, None).arrays(MODEL)) == by_name


def test_equal_arrays_and_metadata_give_equal_bytes():
    """safetensors' own order of three entries is random: it passes once in 6 ** 19 times."""
    arrays = {"b": np.arange(3.0, dtype=np.float32), "a": np.ones((2, 1), np.int64)}
    metadata = {"state": '{"ü": ["\\n"]}', "format": "1", "digest": "0f"}
    contents = {array_bytes(arrays, metadata) for _ in range(20)}
    (content,) = contents
    assert load(content)["b"].tolist() == [0, 1, 2]
    assert load(content)["a"].tolist() == [[1], [1]]
    size = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + size])["__metadata__"] == metadata


def round_of_arrays(arrays, rounds):
    """The rounds of an undisturbed run that ended with these arrays."""
    return {
        number
        for number, state in rounds.items()
        if state.keys() == arrays.keys()
        and all(state[name].tobytes() == array.tobytes() for name, array in arrays.items())
    }


class RoundsOf:
    """The server's arrays after each round, as the recorder hears of them."""

    def __init__(self, patch):
        self.arrays = {}
        record = Recorder.record

        def heard(recorder, report, strategy):
            self.arrays[report["round"]] = {n: a.copy() for n, a in strategy.arrays.items()}
            record(recorder, report, strategy)

        patch.setattr(Recorder, "record", heard)


def check_one_round(folder, rounds):
    """What can be opened in the folder is of the round that its summary names; the sentence of what
    refuses it says what to do."""
    opened = 0
    for which in ("best", "last"):
        try:
            former = read_former(folder, which)
            states = read_client_states(folder)
        except ValueError as error:
            text = str(error)
            assert "fedapps run --resume" in text or "--fresh" in text or "round best" in text or (
                "holds no model.safetensors; name the folder" in text
            ), text  # fmt: skip
            continue
        summary = read_json(folder / SUMMARY)
        assert len(read_rounds(folder)) >= summary["rounds"]
        name = "last_round" if which == "last" else "novel_round"
        assert summary[name] in round_of_arrays(former["arrays"], rounds)
        assert summary["finished"] if which == "last" else True
        assert not states or summary["rounds"] == CONFIG["rounds"]
        opened += 1
    return opened


@pytest.mark.parametrize("method", ["fedper", "scaffold"])
def test_a_run_cut_before_any_change_of_its_folder_is_of_one_round_and_goes_on(method, tmp_path):
    """FedPer's clients keep their heads, SCAFFOLD's server its control variate beside the model.
    One run's folder is copied before each of its changes: what SIGKILL would leave of it there."""
    whole = tmp_path / "whole"

    def cut(number):
        if whole.exists():
            copy(whole, tmp_path / f"cut-{number}")

    copy = shutil.copytree
    with pytest.MonkeyPatch.context() as patch:
        rounds = RoundsOf(patch).arrays
        changes = Changes(patch, whole, cut)
        run_in_process(config_of(method, whole))
    expected = left(whole)
    assert check_one_round(whole, rounds) == 2
    opened = 0
    for number in range(changes.seen):
        folder = tmp_path / f"cut-{number}"
        opened += check_one_round(folder, rounds)
        if number % 9 == 0 or number > changes.seen - 5:  # the others agree, and take time
            run_in_process(config_of(method, folder, resume=True))
            assert left(folder) == expected, number
    assert 0 < opened < 2 * changes.seen


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Finished runs by method: TENT's and FedPer's."""
    root = tmp_path_factory.mktemp("finished")
    for method in ("tent", "fedper"):
        run_in_process(config_of(method, root / f"{method}-seed0", **{"checkpoint-every": 0}))
    return root


@pytest.fixture
def copied(finished, tmp_path):
    """Copies a finished run; returns its folder."""

    def copy(method):
        return Path(shutil.copytree(finished / f"{method}-seed0", tmp_path / f"{method}-seed0"))

    return copy


def nan(folder):
    arrays = load_file(folder / MODEL)
    name = sorted(arrays)[0]
    arrays[name] = np.full_like(arrays[name], np.nan)
    save_file(arrays, folder / MODEL)
    vouch(folder)


def swapped(folder):
    """Another run's model, of the same shapes."""
    arrays = load_file(folder / MODEL)
    save_file({name: array + 1 for name, array in arrays.items()}, folder / MODEL)


def without_summary(folder):
    (folder / SUMMARY).unlink()


SPOILT = {
    nan: r"model\.safetensors holds NaN or infinity, in \S+; .*--fresh$",
    swapped: r"model\.safetensors is of another round or run than the summary: .*; .*--fresh$",
    without_summary: r"holds no summary\.json, which vouches for the run's files; .*--fresh$",
}


def by_command(*words):
    """Runs a command, and raises its sentence."""
    raise ValueError(fedapps(*words, code=2).strip())


OPENINGS = {
    "FinishedRun": lambda run, out: FinishedRun(run),
    "load": lambda run, out: package.load(run).personalize(INPUTS),
    "read_arrays": lambda run, out: read_arrays(run),
    "predictions": lambda run, out: predictions(run),
    "from-dir": lambda run, out: run_in_process(
        config_of("tent", out, **{"from-dir": str(run), "rounds": 0})
    ),
    "check_start": lambda run, out: check_start(config_of("tent", out, **{"from-dir": str(run)})),
    "push": lambda run, out: write_model(FinishedRun(run), out, "lab/tent"),
    "personalize": lambda run, out: by_command("personalize", run, out / "x.npy", "--output", out),
    "serve": lambda run, out: by_command("serve", run, "--superlink", "none"),
    "show": lambda run, out: by_command("show", run),
    "plot": lambda run, out: by_command("plot", run, "traces", "--output", out / "a.png"),
    "--from": lambda run, out: by_command(
        "run", "--from", run, "--engine", "in-process", "--output", out / "later"
    ),
}


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_run_is_refused_wherever_it_is_opened(spoil, opening, copied, tmp_path):
    run, out = copied("tent"), tmp_path / "out"
    out.mkdir()
    np.save(out / "x.npy", INPUTS)
    spoil(run)
    if spoil is without_summary and opening == "plot":
        pattern = "no summary.json; the run was never evaluated"  # as tables say it
    else:
        pattern = SPOILT[spoil]
    with pytest.raises(ValueError, match=pattern):
        OPENINGS[opening](run, out)
    assert not (out / "later").exists()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("clients/0.safetensors", r"/clients is of another round or run"),
        ("clients/9.safetensors", r"/clients is of another round or run"),
    ],
)
def test_clients_states_are_those_that_the_summary_vouches_for(name, pattern, copied):
    """One state is replaced, one added."""
    run = copied("fedper")
    states = sorted((run / "clients").iterdir())
    shutil.copy(states[-1], states[0] if name.endswith("/0.safetensors") else run / name)
    with pytest.raises(ValueError, match=pattern):
        read_client_states(run)


def test_a_run_whose_clients_states_were_removed_says_so(copied, caplog):
    """The user may keep them to itself; methods whose predictions need them are refused."""
    run = copied("fedper")
    shutil.rmtree(run / "clients")
    with caplog.at_level(logging.WARNING):
        assert read_client_states(run) == {}
    assert "holds no clients/ any more: its clients begin without state" in caplog.text
    with pytest.raises(ValueError, match="holds no clients/ of fedper"):
        predictions(run)


def test_an_uploaded_run_vouches_for_what_was_uploaded(copied, tmp_path):
    """Neither clients' states nor the last round's model are uploaded."""
    run, out = copied("fedper"), tmp_path / "out"
    out.mkdir()
    write_model(FinishedRun(run), out, "lab/fedper")
    assert [*read_json(out / SUMMARY)["files"]] == [MODEL]
    assert FinishedRun(out).summary["files"] == {MODEL: read_json(run / SUMMARY)["files"][MODEL]}
    swapped(out)
    with pytest.raises(ValueError, match="of another round or run"):
        FinishedRun(out)


def test_a_run_of_an_earlier_release_is_used_with_a_warning(copied, caplog):
    """Its summary has no digests: a swapped model passes, NaN does not. It is said once."""
    run = copied("tent")
    summary = read_json(run / SUMMARY)
    del summary["files"]
    (run / SUMMARY).write_text(json.dumps(summary))
    saved._warn_of_earlier_release.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert package.load(run).personalize(INPUTS)
        swapped(run)
        assert package.load(run).personalize(INPUTS)
    said = [record.getMessage() for record in caplog.records if "earlier" in record.getMessage()]
    assert len(said) == 1
    assert f"{run} is of an earlier release: its summary.json vouches for no file" in said[0]
    nan(run)
    (run / SUMMARY).write_text(json.dumps(summary))
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        package.load(run)


@pytest.mark.parametrize("files", [[], "x", {MODEL: 3}, {MODEL: "ab"}, None])
def test_digests_that_are_none_are_refused(files, copied):
    run = copied("tent")
    summary = read_json(run / SUMMARY) | {"files": files}
    (run / SUMMARY).write_text(json.dumps(summary))
    with pytest.raises(
        ValueError, match=r"summary\.json is damaged: its files are no SHA-256|no run's"
    ):
        FinishedRun(run)


def cut_at(last, number):
    if number == last:
        raise Cut


def test_a_delivered_model_is_of_one_update(tmp_path):
    """Cut before each change of its folder, the second model is not mixed with the first."""
    run_in_process(config_of("t3a", tmp_path / "run") | defaults() | CONFIG | {
        "method": "t3a", "output-dir": str(tmp_path / "run")
    })  # fmt: skip
    loaded, rng = package.load(tmp_path / "run"), np.random.default_rng(0)
    first, second = rng.integers(0, 17, (2, 5, 1, 8, 8)).astype(np.uint8)
    folder = tmp_path / "personal"

    def files():
        return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}

    loaded.personalize(second).save(folder)
    after = load_file(folder / "stream.safetensors")
    shutil.rmtree(folder)
    loaded.personalize(first).save(folder)
    before, kept = load_file(folder / "stream.safetensors"), files()
    number, refused = 0, 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            changes = Changes(patch, folder, partial(cut_at, number))
            try:
                loaded.personalize(second).save(folder)
            except Cut:
                pass
            else:
                break
        assert changes.seen == number
        try:
            model = package.load_personal(folder)
        except ValueError as error:
            assert "personalize the client's data again" in str(error)
            refused += 1
        else:
            report = read_json(folder / "report.json")
            assert model.report == {k: v for k, v in report.items() if k != "files"}
            assert files() == kept
        shutil.rmtree(folder)
        loaded.personalize(first).save(folder)
        kept = files()
        number += 1
    assert refused
    assert any(not np.array_equal(before[name], after[name]) for name in before)
