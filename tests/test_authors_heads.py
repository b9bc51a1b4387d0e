"""Our FedTHE, FedTHE+ and BTFL beside the authors' code, which FEDAPPS_AUTHORS_DIR/FedTHE and
FEDAPPS_AUTHORS_DIR/BTFL hold (github.com/LINs-lab/FedTHE, commit 9eeff19; github.com/ZhouYuCS/BTFL,
commit ada7b55). In float64. FedTHE in its order: the first input of each later batch repeats the
old history. BTFL's integral is divided by that of its density.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_heads.py"""

import ast
import copy
import itertools
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import nn
from torch.nn import functional as F

from clients.methods import btfl, fedthe
from clients.methods._two_heads import TwoHeads, mixed
from clients.methods.fedthe import HeadMixing, history
from clients.methods.fedthe_plus import FedTHEPlusNetwork
from clients.methods.memo import MEMONetwork
from clients.models.head import HeadedNetwork

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "FedTHE" / "pcode"
WORKER = FOLDER / "local_training" / "THE_worker.py"
BTFL = FOLDER.parents[1] / "BTFL" / "pcode" / "local_training" / "BTFL_worker.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (WORKER.is_file() and BTFL.is_file()), reason="FEDAPPS_AUTHORS_DIR names no such folder"
    ),
]
SIZES = (7, 7, 4)  # of the batches


class Network(HeadedNetwork):
    """A convolution, ReLU, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 36, 4)

    def features(self, x):
        return F.relu(self.conv(x)).flatten(1)


class Hooked(nn.Module):
    """The authors' `rep_layer`, which holds the last features."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    @property
    def rep(self):
        return self.network.head.rep


def definition(path, name):
    """A class or a function of their file, whose imports need GPUs and MPI."""
    nodes = ast.parse(path.read_text("utf-8")).body
    return next(n for n in nodes if getattr(n, "name", "") == name)


@pytest.fixture
def authors(monkeypatch):
    """Their worker around our network, with the batches that it reads."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    entropy = definition(FOLDER / "local_training" / "utils.py", "marginal_entropy")
    worker = definition(WORKER, "THEWorker")
    module = ast.Module([entropy, worker], type_ignores=[])
    views = SimpleNamespace(given=None)
    names = {"torch": torch, "nn": nn, "F": F, "BaseWorker": object, "np": np}
    names |= {"copy": copy, "itertools": itertools, "transforms": Transforms}
    names |= {"aug": lambda image, normalize: next(views.given)}
    names |= {"RuntimeTracker": lambda metrics_to_track: None}
    loading = {"load_data_batch": lambda conf, x, y, is_training: {"input": x, "target": y}}
    names |= {"create_dataset": SimpleNamespace(**loading)}
    exec(compile(module, str(WORKER), "exec"), names)
    names["utils"] = SimpleNamespace(
        get_normalization=lambda data: (None, None), marginal_entropy=names["marginal_entropy"]
    )
    network = Network()
    with torch.no_grad():
        network.head.weight.mul_(4)
    network.head.register_forward_hook(lambda m, i, o: setattr(m, "rep", i[0]))
    it = names["THEWorker"].__new__(names["THEWorker"])
    it.alpha, it.beta, it.is_rep_history_reused, it.is_tune_net = 0.1, 0.1, False, False
    it.conf, it.agg_weight = SimpleNamespace(data=""), torch.zeros(1, 2)
    it.num_head = 2
    it.metrics = SimpleNamespace(metric_names=[])
    it._get_round_lr, it.rep_layer = lambda: 0.01, Hooked(network)
    it.personal_head = nn.Linear(108, 4, bias=False)
    with torch.no_grad():
        it.personal_head.weight.mul_(4)
    x, logits = torch.randn(18, 1, 8, 8) * torch.linspace(0.2, 3, 18)[:, None, None, None], []
    it.local_rep, it.global_rep = network.features(x[[2, 10]]).detach()

    def inference(data_batch, model, tracker, g=None, p=None):
        e = it.agg_weight.detach().softmax(1)
        with torch.no_grad():
            g = model(data_batch["input"]) if g is None else g
            p = it.personal_head(it.rep_layer.rep) if p is None else p
        logits.append(mixed(e, g, p))
        weights.append(e)

    weights = []
    it._multi_head_inference = inference

    def run():
        batches = [(b, torch.zeros(len(b)).long()) for b in x.split(SIZES)]
        it._validate_training({"model": network}, batches, 20)
        return torch.cat(weights), torch.cat(logits)

    yield SimpleNamespace(it=it, network=network, x=x, run=run, views=views)
    torch.set_default_dtype(dtype)


class Transforms:
    """Images stay tensors."""

    ToPILImage = staticmethod(lambda: None)
    Compose = staticmethod(lambda steps: lambda image: image)


def their_history(f, rate):
    """a of the authors' order."""
    parts = []
    for part in f.split(SIZES):
        if not parts:
            parts.append(history(part, rate))
            continue
        rows = [parts[-1][-1]]
        for row in part[1:]:
            rows.append(rows[-1].lerp(row, rate))
        parts.append(torch.stack(rows))
    return torch.cat(parts)


def ours(authors, monkeypatch):
    """Our weighing in their order, and both heads."""
    monkeypatch.setattr(fedthe, "history", their_history)
    means = authors.it.global_rep, authors.it.local_rep
    authors.network.requires_grad_(True).head._forward_hooks.clear()
    heads = TwoHeads(authors.network, authors.it.personal_head.weight.detach().clone())
    return HeadMixing(means, 0.1, 0.1, 20, 0.1), heads


def agree(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_fedthe(authors, monkeypatch):
    e, logits = authors.run()
    weigh, heads = ours(authors, monkeypatch)
    outputs = heads.outputs_of(authors.x, 64)
    agree(weigh(*outputs), e)
    agree(mixed(weigh(*outputs), *outputs[:2]), logits)
    assert e[:, 0].std() > 0.05


def test_fedthe_plus(authors, monkeypatch):
    """On the same views, which our network makes; at a larger rate, so that steps show."""
    settings = {"views": 16, "crop_share": 0.125, "flips": False, "adapt_steps": 3}
    settings |= {"adapt_lr": 0.0005, "pass_megabytes": 64}
    views = MEMONetwork(nn.Identity(), 0, settings).views(authors.x, 3)
    authors.views.given = iter(views.flatten(0, 1))
    authors.it.is_tune_net = True
    _, logits = authors.run()
    weigh, heads = ours(authors, monkeypatch)
    network = FedTHEPlusNetwork(heads, 0, settings)
    network.weigh = weigh
    agree(network(authors.x).detach(), logits)
    outputs = heads.outputs_of(authors.x, 64)
    assert (mixed(weigh(*outputs), *outputs[:2]) - logits).abs().max() > 1e-3


def test_btfl(monkeypatch):
    """Three batches; the second and the third have other priors."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    names = {"torch": torch, "nn": nn, "F": F, "BaseWorker": object, "math": math, "beta": beta}
    trapezoid = SimpleNamespace(**vars(np) | {"trapz": np.trapezoid})
    names |= {"np": trapezoid, "copy": copy}
    parts = [definition(BTFL, n) for n in ("CategoryDistributionModel", "BTFLWorker")]
    exec(compile(ast.Module(parts, type_ignores=[]), str(BTFL), "exec"), names)
    torch.manual_seed(1)
    f, g, p = (3 * torch.randn(18, d, dtype=torch.float64) for d in (12, 4, 4))
    f = f.abs() * (torch.arange(12) < torch.arange(18)[:, None])
    shares = [torch.stack([1 - high, high]) for high in torch.rand(2, 12, dtype=torch.float64)]
    means = torch.tensor(0.5), torch.tensor(0.6)
    it = names["BTFLWorker"].__new__(names["BTFLWorker"])
    it.global_pro, it.pro = (names["CategoryDistributionModel"](12, 2) for _ in shares)
    for model, share in zip((it.global_pro, it.pro), shares, strict=True):
        model.category_parameters = nn.Parameter(share)
    it.kb, it.q_level, it.conf = 4, 2, SimpleNamespace(rep_len=12)
    it.temperature, it.cos, it.local_rep = 1.0, nn.CosineSimilarity(dim=-1), f[0]
    it.global_en, it.local_en, it.update_condition = *map(float, means), 1e9
    it.beta_alpha = it.beta_beta = 1.0
    it.bin_size, it.bin_count, it.beta_distribution = 0.05, [0] * 21, beta(1, 1)
    m, found = np.linspace(0.01, 0.99, 100), []
    for batch in zip(*(t.split(7) for t in (f, g, p)), strict=True):
        it.rep_layer = SimpleNamespace(rep=batch[0])
        it.agg_weight = torch.ones(len(batch[0]), 2, dtype=torch.float64)
        inside = np.trapezoid(it.beta_distribution.pdf(m), m)
        it._calculate_samplewise_weight(*batch)
        found.append(it.agg_weight[:, 0] / inside)
    weigh = btfl.ModelMixing(tuple(shares), means, 7)
    e = weigh(g.log_softmax(1), p.log_softmax(1), f)
    agree(e[:, 0], torch.cat(found))
    assert it.beta_alpha > 1 and it.beta_beta > 1 and e[:, 0].std() > 0.05
