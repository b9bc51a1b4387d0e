"""A personal model goes on with further inputs: as evaluation does, after a restart, on a node."""

import json
from copy import deepcopy
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_runs import ALL_SAMPLES, SMALL, invoke
from torch.nn import functional as F

import fedapps
import partitions
from clients.core.decision.choice import KEEP, Decision
from clients.methods import auto
from fedapps.common import external_code
from fedapps.files import in_use, locked
from fedapps.methods import METHODS
from fedapps.serverapp import run_in_process
from fedapps.service import onnx
from partitions.inspect import export

# One novel client. Settings that are no defaults, so that a lost one shows.
COMMON = (
    SMALL
    | ALL_SAMPLES
    | {"num-clients": 4, "train-fraction": 0.75, "model": "mlp-small", "rounds": 2}
)
COMMON |= {
    "novel-batch": 120,
    "novel-stream": True,
    "lr-decay": 0.5,
    "lr-decay-rounds": 1,
    "lr": 0.1,
}
NORMED = {"model": "convnet-bn"}
SETTINGS = {
    "atp": NORMED | {"atp.fedavg-rounds": 1},
    "auto": NORMED | {"auto.alpha": 0.5, "auto.plays": 30, "auto.stream-inputs": 50},
    "bbse": {"bbse.predictions": "soft"},
    "bn-adapt": NORMED | {"bn-adapt.prior-samples": 100.0},
    "flowdup": {"flowdup.dimension": 50},
    "hyperfedzero": {"hyperfedzero.granularity": "client", "hyperfedzero.chunk-size": 100},
    "prior-em": {"prior-em.source-prior": "training"},
    "shot": {"shot.diversity": 0.3},
    "t3a": {"t3a.supports": 3},
    "tent": NORMED | {"tent.adapt-steps": 3, "tent.parameters": "all"},
}
each = pytest.mark.parametrize("method", SETTINGS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Finished runs, made when first asked for."""
    root = tmp_path_factory.mktemp("runs")

    def load(method, **changes):
        place = root / "-".join((method, *map(str, changes.values())))
        if not place.is_dir():
            changes = {"method": method, "output-dir": str(place)} | changes
            run_in_process(COMMON | SETTINGS.get(method, {}) | changes)
        return fedapps.load(place, round="last")

    return load


@pytest.fixture(scope="module")
def novel():
    """The batches of the novel client's inputs, as they are stored, and its labels."""
    federation = partitions.federation(COMMON)
    (client,) = np.flatnonzero(federation.novel)
    samples = federation.share(int(client)).everything
    batches = samples.x[samples.index].split(120)
    assert len(batches) == 3
    return batches, samples[:][1]


@each
def test_updates_are_what_evaluation_scored(method, run, novel):
    """The loss and the accuracy over all batches; the model predicts as it answered."""
    batches, y = novel
    finished = run(method)
    model = finished.personalize(batches[0])
    logits = [model.last.logits]
    for batch in batches[1:]:
        logits.append(model.update(batch))
        torch.testing.assert_close(model(batch).detach(), logits[-1], rtol=1e-3, atol=1e-4)
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    scored = json.loads(lines[-1])["evaluation"]
    assert float(F.cross_entropy(torch.cat(logits), y)) == pytest.approx(scored["novel-loss"])
    right = (torch.cat(logits).argmax(1) == y).float().mean()
    assert float(right) == pytest.approx(scored["novel-accuracy"], abs=1e-6)
    alone = [finished.personalize(batch).last.logits for batch in batches]
    assert [torch.equal(*pair) for pair in zip(alone, logits, strict=True)] == [True, False, False]


@each
def test_a_restart_changes_no_bit_and_files_do_not_grow(method, run, novel, tmp_path):
    batches, _ = novel
    model = run(method).personalize(batches[0])
    model.save(tmp_path)
    digest, sizes = model.report["data"], []
    for number, batch in enumerate([*batches[1:3], batches[0], batches[2]], 1):
        again = fedapps.load_personal(tmp_path)
        assert torch.equal(again(batch), model(batch))
        with torch.inference_mode():
            logits = again.update(batch)
        assert torch.equal(logits, model.update(batch))
        again.save(tmp_path)
        assert (again.report["updates"], again.report["data"]) == (number, digest)
        sizes.append([a.size for a in load_file(tmp_path / "stream.safetensors").values()])
    assert all(size == sizes[1] for size in sizes[1:])  # after a few inputs T3A's sets are full


@pytest.mark.parametrize(("n", "choice_of_blank_inputs"), [(18, 0), (30, KEEP)])
def test_a_model_is_opened_by_the_choice_that_it_was_saved_with(
    n, choice_of_blank_inputs, run, novel, tmp_path, monkeypatch
):
    """T3A's network has no bias in its head. 18 inputs keep FedAvg's, 30 get T3A's; the two blank
    inputs that open the folder would get the other one."""

    def choose(choice):
        decision = Decision(choice, 0.0, 0, np.ones(1), np.ones(1))
        monkeypatch.setattr(auto, "decide", lambda *_: decision)

    choose(0)
    x = novel[0][0][:n]
    model = run("auto", **{"auto.candidates": "t3a"}).personalize(x)
    model.save(tmp_path)
    choose(choice_of_blank_inputs)
    again = fedapps.load_personal(tmp_path)
    assert model.report["choice"] == ("none" if n < 20 else "t3a")
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedavg", {}), ("fedtta", {}), ("odpfl-hn", {}), ("atp", {"atp.prediction": "batch"})],
)
def test_other_methods_say_which_can_go_on(method, changes, run, novel, tmp_path):
    """A folder in which another method's model went on no longer can."""
    run("tent").personalize(novel[0][0]).save(tmp_path)
    model = run(method, **changes).personalize(novel[0][0])
    model.save(tmp_path)
    able = ", ".join(name for name in METHODS if name in SETTINGS)
    for call in (lambda: model.update(novel[0][1]), lambda: fedapps.load_personal(tmp_path)):
        with pytest.raises(ValueError, match=f"with its settings {method} .* go on: {able}"):
            call()


def test_inputs_that_cannot_be_leave_the_model_as_it_was(run, novel, tmp_path):
    """Wrong shapes, a training client's, and what makes the network predict NaN."""
    x = novel[0][1]
    model = run("tent").personalize(novel[0][0])
    before, report = model(x).detach(), model.report
    with pytest.raises(ValueError, match="inputs have shape"):
        model.update(x[:, :, :3])
    federation = partitions.federation(COMMON)
    folders = export(federation, tmp_path / "nodes")
    with pytest.raises(ValueError, match="a training client's folder"):
        model.update(folders[int(np.flatnonzero(~federation.novel)[0])])
    good = model.stream
    bad = good.left | {"head.bias": np.full(10, np.nan, np.float32)}
    model.stream = replace(good, left=bad)
    with pytest.raises(ValueError, match="would predict NaN"):
        model.update(x)
    assert torch.equal(model(x), before) and model.report is report
    assert model.last and deepcopy(model).last is None  # no inputs in a pickle
    model.stream = good
    model.save(tmp_path)
    with pytest.raises(ValueError, match="no update since"):
        fedapps.load_personal(tmp_path).save(tmp_path)


def test_the_command_goes_on_in_the_folder(run, novel, tmp_path):
    for name, batch in zip("ab", novel[0][:2], strict=True):
        np.save(tmp_path / f"{name}.npy", batch.numpy())
    finished, mine = run("tent"), tmp_path / "mine"

    def command(*words, code=0):
        return invoke("personalize", *words, code=code).output

    command(finished.folder, tmp_path / "a.npy", "--output", mine, "--round", "last")
    got = command(mine, tmp_path / "b.npy", "--update", "--output", tmp_path / "next")
    assert "120 samples, tent: adapt-steps 3" in got
    expected = finished.personalize(novel[0][0])
    expected.update(novel[0][1])
    command(mine, tmp_path / "b.npy", "--update")
    for folder in (mine, tmp_path / "next"):
        assert (folder / "predictions.csv").read_text() == expected.last.predictions()
        assert json.loads((folder / "report.json").read_text())["updates"] == 1
    said = command(finished.folder, tmp_path / "b.npy", "--update", code=2)
    assert "holds no model.json; name a folder of a delivered model" in said
    for option in (("--round", "last"), ("--epsilon", "1")):
        assert "neither" in command(mine, tmp_path / "b.npy", "--update", *option, code=2)


def test_two_commands_at_once_lose_no_update(run, novel, tmp_path):
    """The second one waits until the first has written what it has learnt."""
    np.save(tmp_path / "a.npy", novel[0][0].numpy())
    finished, mine = run("tent"), tmp_path / "mine"
    finished.personalize(tmp_path / "a.npy").save(mine)
    words = ("personalize", mine, tmp_path / "a.npy", "--update")
    second = Thread(target=invoke, args=words)
    with locked(mine):
        model = fedapps.load_personal(mine)
        model.update(tmp_path / "a.npy")
        second.start()
        second.join(1)
        model.save(mine)
    second.join()
    assert json.loads((mine / "report.json").read_text())["updates"] == 2


@pytest.mark.parametrize("update", [False, True])
def test_nobody_comes_between_a_model_and_its_onnx_file(update, run, tmp_path, monkeypatch):
    """The file would be of another model than the folder's."""
    finished, mine, data = run("tent"), tmp_path / "mine", tmp_path / "x.npy"
    np.save(data, np.zeros((4, 8, 8), np.uint8))
    finished.personalize(data).save(mine)
    used = []
    monkeypatch.setattr(onnx, "check_installed", lambda: None)
    monkeypatch.setattr(onnx, "export", lambda model, shape, folder: used.append(in_use(folder)))
    start = (mine, data, "--update") if update else (finished.folder, data)
    invoke("personalize", *start, "--output", mine, "--onnx")
    assert used == [True]
    assert not in_use(mine)


def test_a_folder_without_updates_says_what_gives_the_model(run, tmp_path):
    model = run("fedavg").personalize(torch.rand(4, 1, 8, 8))
    model.save(tmp_path)
    with pytest.raises(
        ValueError, match=r"no start for updates. Its run gives the model, .*load\("
    ):
        fedapps.load_personal(tmp_path)


@pytest.mark.parametrize("method", ["atp", "bn-adapt", "tent"])
def test_what_a_network_of_a_narrow_type_goes_on_from_keeps_its_type(method, tmp_path, monkeypatch):
    """Saved and loaded, it predicts further inputs as it would have without. The folder was taken
    for damaged."""
    reference = "unusual_networks:NarrowNorm"
    monkeypatch.setenv(external_code.VARIABLE, reference)
    run_in_process(COMMON | {"method": method, "model": reference, "output-dir": str(tmp_path)})
    federation = partitions.federation(COMMON)
    samples = federation.share(int(np.flatnonzero(federation.novel)[0])).everything
    x = samples.x[samples.index]
    model = fedapps.load(tmp_path).personalize(x[:60])
    model.save(tmp_path / "personal")
    loaded = fedapps.load_personal(tmp_path / "personal")
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.update(x[60:]), model.update(x[60:]))
    types = {name: tensor.dtype for name, tensor in loaded.network.state_dict().items()}
    assert types["norm.running_mean"] == torch.bfloat16
