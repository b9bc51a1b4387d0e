"""A finished run gives a later client its model: in Python, by command, from data of any kind."""

import csv
import json
import math
import shutil

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image
from safetensors.torch import load_file
from small_runs import FEW, NEEDS, WEE, invoke

import fedapps
import partitions
from clients.core.arrays import to_record
from clients.models import build_model
from fedapps.building import Builder
from fedapps.common import external_code
from fedapps.methods import METHODS
from fedapps.node.bridge import reply_of
from fedapps.serverapp import run_in_process
from fedapps.service import delivery
from fedapps.service.figures import predictions
from fedapps.service.inputs import read_input_files
from fedapps.settings.config import defaults
from partitions.inspect import export

SMALL = defaults() | WEE | FEW
SMALL |= {"num-clients": 4, "rounds": 2, "local-steps": 3, "evaluate-every": 1}
ABLE = [name for name, method in METHODS.items() if method.novel and name != "pfl-nearest"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folders of finished runs, made when first asked for."""
    root = tmp_path_factory.mktemp("runs")

    def folder(name, **changes):
        place = root / name
        if not place.is_dir():
            changes |= NEEDS.get(name, {}) if name in ABLE else {}
            key = f"{name}.test-batch-size"  # a served client adapts to all of its inputs
            changes |= {key: 0} if key in SMALL and name != "btfl" else {}
            run_in_process(SMALL | {"method": name, "output-dir": str(place)} | changes)
        return place

    return folder


def novel():
    """Client id and share of the first novel client of SMALL."""
    federation = partitions.federation(SMALL)
    client = int(np.flatnonzero(federation.novel)[0])
    return client, federation.share(client).everything


def command(*arguments, code=0):
    return invoke(*arguments, code=code).output


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("method", ABLE)
def test_a_novel_client_gets_what_it_was_scored_with(method, run):
    """Served with a novel client's inputs, the run gives a network that reproduces the logits and,
    but for draws and for the expectation over models that pfl-sampled scores, the accuracy that
    the run's evaluation found."""
    client, samples = novel()
    served = (loaded := fedapps.load(run(method))).serve(loaded.inputs(samples.x[samples.index]))
    network = served.module()
    with torch.no_grad():
        again = network(samples.x[samples.index])
    torch.testing.assert_close(again, served.logits, rtol=1e-3, atol=1e-4)
    right = (served.logits.argmax(1) == samples[:][1]).float().mean()
    scored = json.loads((run(method) / "summary.json").read_text())["per_client"][str(client)]
    if not METHODS[method].client.needs_public and method != "pfl-sampled":
        assert float(right) == pytest.approx(scored["accuracy"], abs=1e-6)
    assert served.report()["role"] == "novel" and "accuracy" not in served.report()


def test_a_personal_models_preprocessing_moves_and_is_saved_with_it(run):
    """Scale, mean and deviation are buffers. What an update gives is where the model was moved to;
    torch's device without values stands for a GPU."""
    _, samples = novel()
    x = samples.x[samples.index]
    model, other = (fedapps.load(run("prior-em")).personalize(x) for _ in range(2))
    model.mean += 0.25
    model.std *= 2
    model.scale *= 3
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    model.to("meta").update(x)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_predictions_of_no_sample_or_without_its_axis_are_refused(run):
    """By the same words as a client's inputs. Of one channel the axis may be missing."""
    _, samples = novel()
    x = samples.x[samples.index]
    model = fedapps.load(run("tent")).personalize(x)
    assert torch.equal(model.predict(x[:3, 0]), model.predict(x[:3]))
    for inputs in (x[:0], x[0, 0], x[:, None], x[0, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"have shape \(.*; the run takes \(n, \*\(1, 8"):
            model.predict(inputs)


@pytest.mark.parametrize(
    ("method", "lr"), [("fedavg", 1.2), ("pfl-ensemble", 1.5), ("odpfl-hn", 1.5)]
)
def test_the_last_rounds_model_is_served_if_asked(method, lr, run, tmp_path):
    """At this learning rate the loss is least before the last of four rounds. Each of the two
    models has the accuracy that its round's evaluation found."""
    name = f"{method}-of-four"
    changes = {f"{method}.lr" if f"{method}.lr" in SMALL else "lr": lr, "rounds": 4}
    changes |= {"selection-metric": "loss"}
    folder = run(name, **changes | {"method": method})
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["novel_round"] < summary["last_round"] == 4
    client, samples = novel()
    x, y = samples.x[samples.index], samples[:][1]
    found = {}
    for which, scores in (("best", summary), ("last", summary["last"])):
        loaded = fedapps.load(folder, round=which)
        served = loaded.serve(loaded.inputs(x))
        right = float((served.logits.argmax(1) == y).float().mean())
        assert right == pytest.approx(scores["per_client"][str(client)]["accuracy"], abs=1e-6)
        found[which] = served.predictions()
    np.save(tmp_path / "x.npy", x.numpy())
    command("personalize", folder, tmp_path / "x.npy", "--output", tmp_path, "--round", "last")
    assert (tmp_path / "predictions.csv").read_text() == found["last"] != found["best"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_adaptation_needs_no_gradients_of_its_caller(mode, run):
    x = novel()[1].x[:7]
    expected = fedapps.load(run("tent")).personalize(x)(x)
    with mode():
        assert torch.equal(fedapps.load(run("tent")).personalize(x)(x), expected)


def test_a_run_without_its_last_model_says_so(run, tmp_path):
    old = shutil.copytree(run("fedavg"), tmp_path / "old")
    (old / "model-final.safetensors").unlink()
    np.save(tmp_path / "x.npy", novel()[1].x[:5].numpy())
    asked = ("personalize", old, tmp_path / "x.npy", "--output", tmp_path / "out")
    got = command(*asked, "--round", "last", code=2)
    assert "holds no model-final.safetensors" in got
    assert "unknown round 'first'; known: best, last" in command(*asked, "--round", "first", code=2)
    command(*asked)


@pytest.mark.parametrize("method", ["tent", "odpfl-hn"])
def test_labels_only_score(method, run, tmp_path):
    """Labels of 3 for all, then the predicted ones: predictions and network are the same to the
    last bit, and the second accuracy is 1."""
    _, samples = novel()
    x, out = samples.x[samples.index].numpy(), tmp_path / "out"
    labels, predicted = np.full(len(x), 3), []
    for _ in range(2):
        np.savez(tmp_path / "x.npz", x=x, y=labels)
        got = command("personalize", run(method), tmp_path / "x.npz", "--output", out)
        assert f"{len(x)} given, used for scoring alone" in got
        predicted.append([(out / f).read_bytes() for f in ("predictions.csv", "model.safetensors")])
        with (out / "predictions.csv").open() as file:
            labels = np.array([int(row["class"]) for row in csv.DictReader(file)])
    assert predicted[0] == predicted[1]
    assert json.loads((out / "report.json").read_text())["accuracy"] == 1.0


def test_the_report_is_json_whatever_the_network_gives(run, tmp_path, monkeypatch):
    """NaN and Infinity are no JSON."""

    def refuse(word):
        raise ValueError(word)

    numbers = {"entropy": math.nan, "shares": [0.5, {"a": -math.inf}]}
    report_of = delivery.PersonalizationResult.report
    monkeypatch.setattr(
        delivery.PersonalizationResult, "report", lambda result: report_of(result) | numbers
    )
    x, out = tmp_path / "x.npy", tmp_path / "out"
    np.save(x, np.zeros((3, 1, 8, 8), np.float32))
    command("personalize", run("fedavg"), x, "--output", out)
    report = json.loads((out / "report.json").read_text(), parse_constant=refuse)
    assert (report["entropy"], report["shares"]) == (None, [0.5, {"a": None}])


def test_a_later_client_needs_no_code_of_the_runs_own_scores(run, tmp_path):
    """They scored the clients of the run; the module is not on this machine."""
    folder = tmp_path / "run"
    shutil.copytree(run("fedavg"), folder)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('scores = ""', 'scores = "gone:auroc"'))
    model = fedapps.load(folder).personalize(np.zeros((3, 1, 8, 8), np.uint8))
    assert model.report["samples"] == 3
    true, predicted = predictions(folder)
    assert len(true) == len(predicted) > 0


def test_the_files_of_a_folder_of_images(run, tmp_path):
    """Two pictures in folders of their classes' names: named, predicted, scored; the network's
    file fits the registered network, under its plain names."""
    for digit, shade in (("3", 200), ("7", 90)):
        (tmp_path / "in" / digit).mkdir(parents=True)
        picture = Image.new("RGB", (16, 16), (shade, shade, shade))
        picture.save(tmp_path / "in" / digit / "a.png")
    out = tmp_path / "out"
    command("personalize", run("fedtta"), tmp_path / "in", "--output", out, "--onnx")
    with (out / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == ["3/a.png", "7/a.png"]
    assert all(row["class"] in "0123456789" and 0.1 < float(row["probability"]) < 1 for row in rows)
    described = json.loads((out / "model.json").read_text())
    assert described["shape"] == [1, 8, 8] and described["classes"] == list("0123456789")
    assert described["preprocessing"]["scale"] == 16.0
    network = build_model(described["architecture"]["name"], (1, 8, 8), 10, 1)
    network.load_state_dict(load_file(out / "model.safetensors"))
    with torch.no_grad():  # a picture's pixels lie between 0 and 255
        z = network(torch.tensor([200.0, 90.0]).div(255)[:, None, None, None].expand(-1, 1, 8, 8))
    assert [str(int(i)) for i in z.argmax(1)] == [row["class"] for row in rows]
    files = {"model.json", "model.onnx", "model.safetensors", "predictions.csv", "report.json"}
    assert {f.name for f in out.iterdir()} == files
    command("personalize", run("fedavg"), tmp_path / "in", "--output", out)
    assert {f.name for f in out.iterdir()} == files - {"model.onnx"}  # which was FedTTA's


def test_an_exported_novel_folder_is_served_without_its_labels(run, tmp_path):
    client, samples = novel()
    folder = export(partitions.federation(SMALL), tmp_path)[client]
    inputs = read_input_files(folder, fedapps.load(run("fedavg")).card)
    assert inputs.share.everything[:][1].unique().tolist() == [-1]
    assert torch.equal(inputs.labels, samples[:][1])
    torch.testing.assert_close(inputs.share.everything[:][0], samples[:][0])


def test_a_training_client_is_scored_on_what_it_did_not_learn_from(run, tmp_path):
    """Its node is served, and keeps its labels: none of what it trained on is scored."""
    federation = partitions.federation(SMALL)
    client = int(np.flatnonzero(~federation.novel)[0])
    share, folder = federation.share(client), export(federation, tmp_path)[client]
    inputs = read_input_files(folder, fedapps.load(run("fedavg")).card)
    seen = {x.numpy().tobytes() for x in share.train[:][0]}
    fresh = [x.numpy().tobytes() not in seen for x in inputs.share.everything[:][0]]
    assert inputs.scored.tolist() == fresh
    assert sum(fresh) == len(share.validation) != len(share.train)


@pytest.mark.parametrize(
    ("method", "data", "epsilon", "words"),
    [
        ("fedavg", "training", None, "its own node serves it"),
        ("fedavg", "nothing", None, "there is no"),
        ("fedavg", "other.npy", None, "(3, 1, 5, 5); the run takes (n, *(1, 8, 8))"),
        ("fedavg", "x.npy", 1, "epsilon is 1, but fedavg's clients send no descriptor"),
        ("pfedhn", "nothing", None, "pfedhn cannot serve clients without labels; those that can: "),
        ("pfl-nearest", "x.npy", None, "asks the training clients how near they are"),
        ("odpfl-hn", "x.npy", -1, "odpfl-hn.descriptor-epsilon is -1"),
        ("odpfl-hn", "x.npy", "nan", "odpfl-hn.descriptor-epsilon is nan"),
        ("odpfl-hn", "x.npy", 0.5, "no bounded sensitivity"),
    ],
)
def test_clients_that_cannot_be_served(method, data, epsilon, words, run, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.uint8))
    np.save(tmp_path / "other.npy", np.zeros((3, 5, 5), np.uint8))
    if data == "training":
        federation = partitions.federation(SMALL)
        exported = export(federation, tmp_path)[int(np.flatnonzero(~federation.novel)[0])]
        exported.rename(tmp_path / data)
    options = [] if epsilon is None else ["--epsilon", epsilon]
    said = command("personalize", run(method), tmp_path / data, *options, code=2)
    assert words in " ".join(said.split()) and "Traceback" not in said


@pytest.mark.parametrize(
    ("spoiled", "reason"), [("inputs", "the method has none for it"), ("node", "see the log")]
)
def test_a_client_without_a_model_learns_why(spoiled, reason, run, monkeypatch):
    """A descriptor of NaN is no valid reply; an error that is no ValueError stands in the log."""
    _, samples = novel()
    loaded = fedapps.load(run("odpfl-hn"))
    inputs = loaded.inputs(samples.x[samples.index].float() / 16)
    if spoiled == "inputs":
        inputs.share.everything.x[:] = np.nan
    else:
        monkeypatch.setattr("fedapps.service.finished_run.result_of", None)
    with pytest.raises(ValueError, match=f"odpfl-hn gives no model for these inputs: .*{reason}"):
        loaded.serve(inputs)


def test_a_private_client_pays_its_own_epsilon(run):
    """With ε = 0.5 and δ = 0.01 the descriptor is noised, so another network is generated each
    time; the run's own setting has no noise, so there it is always the same."""
    folder = run("odpfl-hn-sphere", method="odpfl-hn", **{"odpfl-hn.encoder": "ds-sphere"})
    _, samples = novel()
    loaded = fedapps.load(folder)
    inputs = loaded.inputs(samples.x[samples.index])
    plain = [loaded.serve(inputs).logits for _ in range(2)]
    noisy = [loaded.serve(inputs, 0.5) for _ in range(2)]
    assert torch.equal(*plain)
    assert not torch.equal(noisy[0].logits, noisy[1].logits)
    assert noisy[0].report()["epsilon"] == 0.5 and "epsilon" not in loaded.serve(inputs).report()


def test_show_tells_a_run_in_ten_lines(run):
    lines = command("show", run("odpfl-hn")).splitlines()
    assert len(lines) == 10
    got = "\n".join(lines)
    for words in ("Amosy et al.", "digits", "(1, 8, 8)", "a model of its own", "unlabeled inputs"):
        assert words in got


@pytest.mark.parametrize("method", ["fedavg", "tent", "t3a", "odpfl-hn"])
def test_a_single_input_needs_running_statistics(method, tmp_path, monkeypatch):
    """Said by the network's part that lacks them, in serving and to a node that is evaluated."""
    reference = "unusual_networks:BatchStatistics"
    monkeypatch.setenv(external_code.VARIABLE, reference)
    keys = {"model", f"{method}.model"} & SMALL.keys()
    config = SMALL | dict.fromkeys(keys, reference) | {"method": method}
    run_in_process(config | {"output-dir": str(tmp_path), "rounds": 1})
    loaded = fedapps.load(tmp_path)
    _, samples = novel()
    x = samples.x[samples.index]
    assert loaded.personalize(x[:2]).report["samples"] == 2
    message = "norm keeps no running statistics, so the network cannot predict a single input: give"
    with pytest.raises(ValueError, match=message):
        loaded.personalize(x[:1])
    builder = Builder(config, method, loaded.card.info())
    client = builder.client(loaded.inputs(x[:1]).share, 0)
    asked = RecordDict({"arrays": to_record(client.initial), "config": ConfigRecord({})})
    with pytest.raises(ValueError, match=message):
        reply_of(client, Message(asked, 0, "evaluate"), Context(0, 0, {}, RecordDict(), {}))
