"""Our EM, BBSE, MEMO, BN-adapt and ATP beside the code of Bao et al. (NeurIPS 2023), which
FEDAPPS_AUTHORS_DIR/ATP holds (github.com/baowenxuan/ATP, commit 430f6c7). In float64, on one
network with normalised convolutions and linear layers, batches of 20, 20 and 5:

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors.py"""

import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import Wide, share
from torch import nn
from torch.utils.data import TensorDataset

from clients.methods.atp import RATES, ATPClient, adaptable
from clients.methods.bbse import BBSEClient
from clients.methods.bn_adapt import BNAdaptClient
from clients.methods.memo import MEMOClient, MEMONetwork
from clients.methods.prior_em import PriorEMClient
from strategies.maths.label_shift import conditional

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "ATP" / "src"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
ARGS = SimpleNamespace(
    batch_size=20, num_workers=0, device="cpu", num_labels=4, conf_mode="hard", lm_opt="sgd",
    lm_lr=0.05, memo_aug_size=16, grad_norm="sqrt_numel", dataset="digit", test="batch",
    em_epochs=2,
)  # fmt: skip


class Headed(nn.Module):
    """The authors' network as ``head(features(x))``."""

    def __init__(self, cnn):
        super().__init__()
        self.features, self.head = cnn.get_featurizer(), cnn.linear5

    def forward(self, x):
        return self.head(self.features(x))


@pytest.fixture
def authors(monkeypatch):
    """Their modules, their network, the same as ours, data, and all logits that they score."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before, dtype = set(sys.modules), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    import algorithm.ATP
    import algorithm.ATPTest
    import algorithm.BatchNorm
    import algorithm.BBSE
    import algorithm.EM
    import algorithm.MEMO
    from model.CNN import ShallowCNN

    cnn = ShallowCNN((1, 18, 18), 4)
    cnn.train()
    for scale in (1.0, 2.0):
        cnn(scale * torch.randn(50, 1, 18, 18))  # running statistics
    for p in (cnn.linear5.weight, cnn.linear4.weight):
        p.data.mul_(3)
    cnn.eval()
    x, y = torch.randn(45, 1, 18, 18), torch.arange(45) % 4
    logits = []
    for name in ("ATP", "ATPTest", "BatchNorm", "BBSE", "EM", "MEMO"):
        module = getattr(algorithm, name)

        def recorded(name, real=module.create_loss):
            def loss(z, target):
                logits.append(z.detach().clone())
                return real(name)(z, target)

            return loss if name == "ce" else real(name)

        monkeypatch.setattr(module, "create_loss", recorded)
    ours = Headed(deepcopy(cnn))
    yield SimpleNamespace(algorithm=algorithm, cnn=cnn, ours=ours, x=x, y=y, logits=logits)
    torch.set_default_dtype(dtype)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(str(FOLDER)):
            del sys.modules[name]


def theirs(cls, authors, **changes):
    args = SimpleNamespace(**vars(ARGS) | changes)
    return cls(0, {"test": TensorDataset(authors.x, authors.y)}, args), args


def our(cls, authors, **settings):
    client = cls(authors.ours, share(authors.x, authors.y), **settings)
    client.receive({}, {})
    client.held = Wide(authors.x, authors.y, torch.arange(45))
    return client


def agree(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_em(authors, steps):
    client, args = theirs(authors.algorithm.EM.EMClient, authors, em_epochs=steps)
    client.local_eval(authors.cnn, args)
    found = our(PriorEMClient, authors, em_steps=steps).predict(authors.x)
    agree(found.log_softmax(1), torch.cat(authors.logits))


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_bbse(authors, mode):
    client, args = theirs(authors.algorithm.BBSE.BBSEClient, authors, conf_mode=mode)
    counts = client.local_confusion(authors.cnn, args)
    bbse = our(BBSEClient, authors, held_out=0.0, predictions=mode)
    bbse.test_batch_size = 20
    found = bbse.confusion(bbse.initial, {})[0]["confusion"]
    assert found == pytest.approx(counts.numpy())
    client.local_eval(authors.cnn, torch.pinverse(counts / counts.sum(0)), args)
    bbse.source = {"confusion": conditional(found)}
    agree(bbse.predict(authors.x).log_softmax(1), torch.cat(authors.logits).log_softmax(1))


def test_batch_norm(authors):
    authors.cnn.change_bn(mode="prior", prior=16 / 36)
    client, args = theirs(authors.algorithm.BatchNorm.BatchNormClient, authors)
    client.local_eval(authors.cnn, args)
    agree(our(BNAdaptClient, authors).predict(authors.x), torch.cat(authors.logits))


def test_memo(authors):
    """On the same views, which our network makes."""
    client, args = theirs(authors.algorithm.MEMO.MEMOClient, authors)
    settings = {"views": 16, "crop_share": 0.125, "flips": True}
    views = MEMONetwork(nn.Identity(), 0, settings).views(authors.x)
    given = iter(views.flatten(0, 1))
    client.tr_pre = client.tr_post = lambda image: image
    client.aug = lambda image: next(given)
    client.local_eval(authors.cnn, args)
    memo = our(MEMOClient, authors, adapt_lr=0.05, flips=True)
    memo.views_seed = 0
    agree(memo.predict(authors.x), torch.cat(authors.logits))
    assert (memo.predict(authors.x) - memo.intermediate_logits["base"]).abs().max() > 1e-3


def their_rates(authors, atp, alpha):
    """α by the authors' order of parameters, from ours by name."""
    ours = dict(zip(adaptable(atp.model), alpha, strict=True))
    names = [n for n, _ in authors.cnn.named_parameters()]
    place = {n: n if n in ours else f"features.{n}" for n in names}
    place = {n: p.replace("features.linear5", "head") for n, p in place.items()}
    return torch.stack([ours[place[n]] for n in names])


def atp_client(authors, **settings):
    ATPClient.build(authors.ours, None)
    atp = our(ATPClient, authors, held_out=0.0, **settings)
    authors.cnn.change_bn(mode="grad")
    authors.cnn.eval()
    return atp


@pytest.mark.parametrize("kind", ["batch", "online"])
def test_atp_adapts(authors, kind):
    atp = atp_client(authors, prediction=kind)
    atp.alpha[:] = 0.3 * torch.randn(len(atp.alpha))
    way = "online_avg" if kind == "online" else "batch"
    client, args = theirs(authors.algorithm.ATPTest.ATPTestClient, authors, test=way)
    rates = their_rates(authors, atp, atp.alpha)
    client.local_eval(authors.cnn, rates, args)
    agree(atp.predict(authors.x), torch.cat(authors.logits))
    assert (atp.predict(authors.x) - authors.ours(authors.x)).abs().max() > 1e-2


def test_atp_learns_its_rates(authors):
    atp = atp_client(authors, rates_lr=10.0)
    start = 0.05 * torch.randn(len(atp.alpha))
    atp.alpha[:] = start
    rates = their_rates(authors, atp, start)
    client, args = theirs(authors.algorithm.ATP.ATPClient, authors, lm_lr=10.0)
    client.local_train(authors.cnn, rates, args)
    sent = {n: t.numpy().copy() for n, t in atp.model.state_dict().items()}
    reply, _, metrics = atp.train(sent, {"learn-rates": True})
    found = their_rates(authors, atp, torch.from_numpy(reply[RATES]))
    agree(found, rates)
    assert np.abs(reply[RATES] - start.numpy()).max() > 1e-2 and metrics["loss"] > 0
