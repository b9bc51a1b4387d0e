"""Our FedTTA, FedTTA-Prox, FedTTA++, HeteroFedTTA and HeteroTENT beside the code of Ye et al.
which FEDAPPS_AUTHORS_DIR/FedTTA holds (github.com/anonymous-federated-learning/code, commit
840b24d). In float64, with the settings of experiments/fedtta/table1-mnist.toml and, for networks of
several sizes, figure5-lambda.toml, and the released program's other defaults. Their FedTTA++
multiplies log2 p by the patience counter, not by p. Needs `higher`.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_fedtta.py"""

import importlib
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from small_runs import Wide, share

from clients.core.protocol import LR_FACTOR, lr_factor
from clients.methods import fedmd
from clients.methods.fedmd import HeteroTENTClient
from clients.methods.fedtta import FedTTAClient, FedTTAPlusPlusClient, FedTTAProxClient
from clients.methods.heterofedtta import HeteroFedTTAClient
from clients.models import build_model
from clients.models.adaptable import Adaptable, Adaptation
from strategies.core.replies import Node, Update
from strategies.methods.fedtta import FedTTA

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "FedTTA"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
EXPERIMENTS = Path(__file__).parents[1] / "experiments" / "fedtta"
EXPERIMENT = EXPERIMENTS / "table1-mnist.toml"
ROUND = 37  # counted from 0: rates × 0.99 ** 3.7
# Imported and not needed.
UNUSED = (
    "torchvision", "torchvision.transforms", "data", "data.cifar10", "data.cifar10.cifar10_dataset",
    "data.cifar10.cifar10_diri_dataset", "data.mnist", "data.mnist.mnist_dataset", "data.cifar100",
    "data.cifar100.cifar100_dataset", "data.femnist", "data.femnist.femnist_dataset",
    "data.fashion_mnist", "data.fashion_mnist.fashion_mnist",
)  # fmt: skip
METHODS = {
    "fedtta": ("fedtta", FedTTAClient),
    "fedtta-prox": ("fedtta_prox", FedTTAProxClient),
    "fedtta++": ("fedtta_pp", FedTTAPlusPlusClient),
}
HETERO = {
    "heterofedtta": ("hetero_fedtta", HeteroFedTTAClient),
    "heterotent": ("hetero_tent", HeteroTENTClient),
}


@pytest.fixture
def authors(monkeypatch):
    """Their modules: of clients, by method, and "utils"; tensors are float64."""
    pytest.importorskip("higher")
    monkeypatch.syspath_prepend(str(FOLDER))
    with monkeypatch.context() as patch:
        for name in UNUSED:
            patch.setitem(sys.modules, name, MagicMock())
        clients = {
            method: importlib.import_module(f"algorithm.{folder}.client")
            for method, (folder, _) in METHODS.items()
        }
        for method in HETERO:
            module = f"algorithm.{HETERO[method][0]}.client"
            clients[method] = importlib.import_module(module)
        clients["utils"] = importlib.import_module("utils.utils")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield clients
    torch.set_default_dtype(dtype)
    for name in list(sys.modules):
        if name.split(".")[0] in ("algorithm", "models", "utils"):
            del sys.modules[name]


class Loader(list):
    """Mini-batches (x, y) with the data set that their client counts."""

    def __init__(self, samples, rows):
        super().__init__(samples[row] for row in rows)
        self.dataset = samples


def data(n, *, scale):
    """Noisy images of ten classes; from the scale 6 on, gradients are clipped."""
    y = torch.arange(n) % 10
    centers = torch.randn(10, 1, 28, 28)
    x = scale * (centers[y] + torch.randn(n, 1, 28, 28))
    return Wide(x, y, torch.arange(n))


def settings(method):
    """Of the experiment: those of all methods and the method's, under our clients' names."""
    table = tomllib.loads(EXPERIMENT.read_text("utf-8"))
    of_all = {n: table[n] for n in ("batch-size", "short-batches", "weight-decay")}
    known = of_all | table[method]
    assert known.pop("weighting") == "samples"
    return {name.replace("-", "_"): value for name, value in known.items()}


def both(authors, method, samples, *, model="mlp", steps=6, head=1.0, phi=None, **changes):
    """Their client and ours, with the same weights, and with the rates of the round."""
    folder, cls = METHODS[method]
    known = settings(method) | changes
    config = SimpleNamespace(
        cuda_no=-1, algorithm=folder, num_classes=10, local_iters=steps, inner_iters=1,
        finetune_iters=1, patience=known.get("patience"), tta_prox=known.get("mu"),
        model={"mlp": "mnist-2nn", "convnet": "fashion_mnist"}[model], inner_lr=known["inner_lr"],
        outer_lr=known["lr"], loss_nn_lr=known["adapt_lr"], inner_lr_decay=0.99,
        outer_lr_decay=0.99, lossnn_lr_decay=0.99, inner_decay_step=10, outer_decay_step=10,
        lossnn_decay_step=10,
    )  # fmt: skip
    theirs = authors[method].CLIENT(0, None, None, None, config)
    with torch.no_grad():
        [*theirs.model.modules()][-1].weight.mul_(head)
    if phi is not None:
        phi(theirs.loss_nn)
    adaptable = Adaptable(build_model(model, (1, 28, 28), 10, 0), Adaptation(10))
    for part, network in ((adaptable.base, theirs.model), (adaptable.adaptation, theirs.loss_nn)):
        named = zip(part.state_dict(), network.state_dict().values(), strict=True)
        part.load_state_dict(dict(named))
    held = replace(share(samples.x, samples.y), train=samples)
    ours = cls(adaptable, held, local_steps=steps, **known)
    table = tomllib.loads(EXPERIMENT.read_text("utf-8"))
    round_config = {
        "server-round": ROUND + 1,
        LR_FACTOR: lr_factor(table["lr-decay"], table["lr-decay-rounds"], ROUND + 1),
    }
    ours.begin("train", round_config)
    return theirs, ours, round_config


def agree(found, expected, rtol=1e-7, atol=1e-9):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("method", "model", "scale"),
    [(method, "mlp", scale) for method in METHODS for scale in (0.3, 6.0)]
    + [("fedtta++", "convnet", 0.3)],
)
def test_train(authors, method, model, scale):
    """Passes of 64, 64 and 22 samples."""
    samples = data(150, scale=scale)
    theirs, ours, config = both(authors, method, samples, model=model)
    theirs.train_loader = Loader(samples, ours.rows(config))
    n, psi, phi, _ = theirs.train(ROUND)
    reply, found, _ = ours.train(dict(ours.initial), config)
    assert found == n == 150
    agree([torch.from_numpy(a) for a in reply.values()], [*psi.values(), *phi.values()])


def test_server(authors):
    """The mean of three clients, by samples."""
    sizes, names = (7, 20, 150), ("base.a", "adaptation.b")
    replies = [{name: torch.randn(3) for name in names} for _ in sizes]
    updates = [
        Update(Node(c, c), {name: t.numpy() for name, t in reply.items()}, n, {})
        for c, (n, reply) in enumerate(zip(sizes, replies, strict=True))
    ]
    arrays = {name: np.zeros(3) for name in names}
    found = FedTTA(weighting="samples").aggregate(arrays, updates)
    average = authors["utils"].fed_average(list(zip(sizes, replies, strict=True)))
    agree({name: torch.from_numpy(a) for name, a in found.items()}, average)


# Adaptation to a novel client's 150 samples


def watch(theirs, samples):
    """Their loader, in the samples' order, and a list of ψ and (n, accuracy, loss) at each test."""
    loader, seen, real = Loader(samples, torch.arange(len(samples)).split(64)), [], theirs.test

    def test(model, data_loader):
        scores = real(model, data_loader)
        seen.append(([p.detach().clone() for p in model.parameters()], scores))
        return scores

    theirs.test = test
    return loader, seen


def finetune(theirs, loader, **patience):
    return theirs.finetune(theirs.model, theirs.loss_nn, ROUND, loader, **patience)[1]


def accuracy(logits, samples):
    return float((logits.argmax(1) == samples.y).double().mean())


@pytest.mark.parametrize("scale", [0.3, 6.0])
def test_steps(authors, scale):
    """ψ and the accuracy before and after each of ten steps; those on large inputs are clipped."""
    samples = data(150, scale=scale)
    theirs, ours, _ = both(authors, "fedtta++", samples, head=scale)
    loader, seen = watch(theirs, samples)
    finetune(theirs, loader, patience=9)
    assert len(seen) == 11
    for step, (psi, scores) in zip(ours.steps(samples.x, 10), seen, strict=True):
        agree([*step.parameters.values()], psi)
        assert accuracy(step.logits, samples) == pytest.approx(scores[1])


@pytest.mark.parametrize("method", ["fedtta", "fedtta-prox"])
def test_one_step(authors, method):
    samples = data(150, scale=0.3)
    theirs, ours, _ = both(authors, method, samples)
    score = finetune(theirs, watch(theirs, samples)[0])
    assert accuracy(ours.predict(samples.x), samples) == pytest.approx(score)


def repaired(authors, monkeypatch):
    """Their FedTTA++ with p·log2 p."""
    module = authors["fedtta++"]
    source = Path(module.__file__).read_text("utf-8")
    line = "b = p * torch.log2(probability)"
    assert source.count(line) == 1
    names = dict(vars(module))
    exec(compile(source.replace(line, line.replace("p *", "probability *")), "", "exec"), names)
    monkeypatch.setattr(module, "CLIENT", names["CLIENT"])


@pytest.mark.parametrize("patience", [1, 5])
def test_their_stopping_rule_as_released(authors, patience):
    """Counter 0: the entropy before the first step is 0, and nothing is below it."""
    samples = data(128, scale=0.3)
    theirs, ours, _ = both(authors, "fedtta++", samples, patience=patience)
    loader, seen = watch(theirs, samples)
    score = finetune(theirs, loader, patience=patience)
    assert len(seen) == patience + 2
    found = accuracy(ours.predict(samples.x), samples)
    before = accuracy(ours.intermediate_logits["base"], samples)
    assert seen[0][1][1] == pytest.approx(score) == pytest.approx(before)
    assert abs(found - before) > 0.01 and ours.adaptation_metrics["adapt-steps"] > 0


@pytest.mark.parametrize("patience", [1, 5])
@pytest.mark.parametrize("confident", [False, True])
def test_their_stopping_rule_repaired(authors, monkeypatch, confident, patience):
    """It is ours, but that theirs may keep the un-adapted model: here a confident one, for which
    g = Σ|z|, so that a step makes logits smaller."""
    repaired(authors, monkeypatch)
    samples = data(128, scale=0.3)
    changes = {"head": 30.0, "inner_lr": 0.001, "phi": absolute} if confident else {}
    theirs, ours, _ = both(authors, "fedtta++", samples, patience=patience, **changes)
    loader, seen = watch(theirs, samples)
    _, _, loss = theirs.finetune(theirs.model, theirs.loss_nn, ROUND, loader, patience=patience)
    kept = [scores[2] for _, scores in seen].index(loss)
    logits = ours.predict(samples.x)
    if confident:
        assert (kept, ours.adaptation_metrics["adapt-steps"]) == (0, 1)
    else:
        assert kept == ours.adaptation_metrics["adapt-steps"] > 1
        assert len(seen) == kept + patience + 2
        assert float(ours.criterion(logits, samples.y)) == pytest.approx(loss)


def absolute(phi):
    """g(z) = Σ|z|."""
    with torch.no_grad():
        for p in phi.parameters():
            p.fill_(0.0 if p.ndim == 1 or len(p) > 1 else 1.0)
        first, *others = (layer.weight for layer in list(phi.model)[:-1:2])
        first[:10], first[10:20] = torch.eye(10), -torch.eye(10)
        for weight in others:
            weight.copy_(torch.eye(32))


# Networks of several sizes, inside FedMD

PUBLIC, PUBLIC_BATCH, DIGEST_EPOCHS = 110, 50, 2  # their server's passes keep the order of samples


def both_of_one_size(authors, monkeypatch, method, samples, public, steps=6):
    """Their client and ours on a network of the middle size, and the message's config."""
    folder, cls = HETERO[method]
    table = tomllib.loads((EXPERIMENTS / "figure5-lambda.toml").read_text("utf-8"))
    known = table[method] | {"weight-decay": table["weight-decay"]}
    known = {name.replace("-", "_"): value for name, value in known.items()}
    known["public_batch_size"] = PUBLIC_BATCH
    rate = known.setdefault("lr", table["lr"])
    config = SimpleNamespace(
        cuda_no=-1, algorithm=folder, num_classes=10, local_iters=steps, inner_iters=1,
        finetune_iters=1, local_distillation_epochs=DIGEST_EPOCHS, model="mnist-2nn",
        inner_lr=known.get("inner_lr"), outer_lr=rate, lr=rate, loss_nn_lr=known.get("adapt_lr"),
        inner_lr_decay=0.99, outer_lr_decay=0.99, lossnn_lr_decay=0.99, lr_decay=0.99,
        inner_decay_step=10, outer_decay_step=10, lossnn_decay_step=10, decay_step=10,
        base_distillation=HeteroFedTTAClient.base_weight,
    )  # fmt: skip
    module = authors[method]
    make = module.select_model
    monkeypatch.setattr(module, "select_hetero_model", lambda config, model_type: make(config))
    theirs = module.CLIENT(1, None, None, None, config)  # the second of three sizes
    model = build_model("mlp", (1, 28, 28), 10, 0)
    pairs = [(model, theirs.model)]
    if method == "heterofedtta":
        model = Adaptable(model, Adaptation(10, 64))
        pairs = [(model.base, theirs.model), (model.adaptation, theirs.loss_nn)]
    for part, network in pairs:
        named = zip(part.state_dict(), network.state_dict().values(), strict=True)
        part.load_state_dict(dict(named))
    held = replace(share(samples.x, samples.y), train=samples, public=public)
    monkeypatch.setattr(fedmd, "Samples", lambda x, y, index, **_: Wide(x, y, index))
    monkeypatch.setattr(fedmd, "batches", in_order)
    ours = cls(model, held, local_steps=steps, **known)
    monkeypatch.setattr(ours, "resume", lambda config: None)  # keeps the weights of above
    round_config = {"server-round": ROUND + 1, LR_FACTOR: lr_factor(0.99, 10, ROUND + 1)}
    ours.begin("train", round_config)
    return theirs, ours, round_config, [network for _, network in pairs]


def in_order(n, size, *, epochs, generator):
    """Stands in for shuffled passes."""
    return [*torch.arange(n).split(size)] * epochs


def weights_of(networks):
    return [p.detach() for network in networks for p in network.parameters()]


@pytest.mark.parametrize("scale", [0.3, 6.0])
@pytest.mark.parametrize("method", HETERO)
def test_digest_and_revisit(authors, monkeypatch, method, scale):
    """Passes over the public logits, then six steps on own samples. Logits are float32 here."""
    samples, public = data(150, scale=scale), data(PUBLIC, scale=scale)
    sets = ("logits/base", "logits/personalized") if method == "heterofedtta" else ("logits",)
    teacher = {name: torch.randn(PUBLIC, 10, dtype=torch.float32) for name in sets}
    theirs, ours, config, networks = both_of_one_size(authors, monkeypatch, method, samples, public)
    columns = (public.x, public.y, *(t.double() for t in teacher.values()))
    theirs.public_dataloader = [
        tuple(column[rows] for column in columns)
        for rows in torch.arange(PUBLIC).split(PUBLIC_BATCH)
    ]
    before = [p.clone() for p in weights_of(networks)]
    theirs.train(ROUND, digest=True, revisit=False)
    ours.digest({n: t.numpy() for n, t in teacher.items()}, config, 2 * DIGEST_EPOCHS)
    agree([p.detach() for p in ours.model.parameters()], weights_of(networks), 1e-5, 1e-7)
    assert all(not torch.equal(p, q) for p, q in zip(weights_of(networks), before, strict=True))
    theirs.train_loader = Loader(samples, ours.rows(config))
    theirs.train(ROUND, digest=False, revisit=True)
    ours.train({}, config)
    agree([p.detach() for p in ours.model.parameters()], weights_of(networks), 1e-5, 1e-7)


@pytest.mark.parametrize("method", HETERO)
def test_public_logits(authors, monkeypatch, method):
    """Of the base model, and of the model after one step to the whole public set."""
    samples, public = data(150, scale=1.0), data(PUBLIC, scale=1.0)
    theirs, ours, _, networks = both_of_one_size(authors, monkeypatch, method, samples, public)
    loader = Loader(public, torch.arange(PUBLIC).split(PUBLIC_BATCH))
    options = {"round_th": ROUND, "data_loader": loader, "return_finetuned_model": True}
    if method == "heterofedtta":
        options["loss_nn"] = theirs.loss_nn
    adapted = theirs.finetune(model=theirs.model, **options).eval()
    found = ours.communicate()
    with torch.no_grad():
        expected = [adapted(public.x)]
        if method == "heterofedtta":
            expected = [networks[0].eval()(public.x), *expected]
    agree([logits.detach() for logits in found.values()], expected)
    assert (expected[-1] - networks[0](public.x)).abs().max() > 1e-3
