"""BN-adapt, prior-EM, BBSE and MEMO: corrections of FedAvg's model, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_runs import SMALL, federate, share
from torch import nn

import partitions
from clients.core.client import Client
from clients.methods._batchwise import HoldingOut
from clients.methods.bbse import BBSEClient
from clients.methods.bn_adapt import BNAdaptClient
from clients.methods.memo import MEMOClient, MEMONetwork, marginal_entropy, mirrored
from clients.methods.prior_em import PriorEMClient
from clients.models import build_model
from partitions.datasets.loading import described
from strategies.methods.bbse import BBSE, conditional
from strategies.methods.prior_em import PriorEM, prior


class Logits(nn.Module):
    """head(x) = x: the inputs are the logits."""

    def __init__(self, classes=2):
        super().__init__()
        self.head = nn.Linear(classes, classes, bias=False)
        self.head.weight.data = torch.eye(classes)

    def forward(self, x):
        return self.head(x)


def over(cls, model, x, source=None, **settings):
    """A novel client of `cls` with inputs x, which has received the model and `source`."""
    novel = replace(share(x, [0] * len(x)), novel=True)
    client = cls(model, novel, **settings)
    client.receive({f"source/{n}": np.array(a, np.float32) for n, a in (source or {}).items()}, {})
    return client


def image_client(cls, count, name="convnet-bn", **settings):
    x = torch.rand(count, 1, 8, 8, generator=torch.manual_seed(0))
    return over(cls, build_model(name, (1, 8, 8), 3, 0), x, **settings), x


# Prior-EM

P = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]])


@pytest.mark.parametrize(
    ("steps", "source", "expected"),
    [
        (1, None, [0.716667, 0.283333]),
        (2, None, [0.858289, 0.141711]),
        (1, {"prior": [0.2, 0.8]}, [0.716667, 0.283333]),
    ],
)
def test_em_by_hand(steps, source, expected):
    """p = (¾, ¼), (½, ½), (0.9, 0.1). From q = π, r = p: q = (2.15, 0.85)/3. With π uniform the
    second r are q·p normalised: 0.883562, 0.716667, 0.957921, of mean 0.852717."""
    if steps == 2:
        q = np.array([2.15, 0.85]) / 3
        r = P.numpy() * q
        expected = (r / r.sum(1, keepdims=True)).mean(0)
        assert expected[0] == pytest.approx(0.852717, abs=1e-5)
    kind = "training" if source else "uniform"
    client = over(PriorEMClient, Logits(), P.log(), source, em_steps=steps, source_prior=kind)
    assert client.log_q(P.log()).exp().tolist() == pytest.approx(list(expected), abs=1e-5)
    pi = np.array(source["prior"] if source else [0.5, 0.5])
    z = client.predict(P.log())
    assert z.numpy() == pytest.approx(P.log().numpy() + np.log(np.array(expected) / pi), abs=1e-5)
    torch.testing.assert_close(client.personal_model(P.log())(P.log()), z)
    assert torch.equal(client.intermediate_logits["base"], P.log())


@pytest.mark.parametrize("source", [None, {"prior": [0.3, 0.7]}])
def test_no_em_step_is_fedavg_to_the_last_bit(source):
    kind = "training" if source else "uniform"
    client = over(PriorEMClient, Logits(), P.log(), source, em_steps=0, source_prior=kind)
    assert torch.equal(client.predict(P.log()), Client.predict(client, P.log()))


def test_em_never_lowers_the_likelihood():
    """Σ_i log Σ_c (q_c / π_c) p_ic of random predictions of five classes, π not uniform."""
    z = 3 * torch.randn(30, 5, generator=torch.manual_seed(1), dtype=torch.float64)
    pi = np.array([0.1, 0.3, 0.3, 0.2, 0.1])
    likelihoods = []
    for steps in range(8):
        client = over(PriorEMClient, Logits(5), z, {"prior": pi}, em_steps=steps,
                      source_prior="training")  # fmt: skip
        ratio = client.log_q(z) - client.log_prior
        likelihoods.append(float((z.log_softmax(1) + ratio).logsumexp(1).sum()))
    assert likelihoods == sorted(likelihoods) and likelihoods[-1] > likelihoods[0] + 1


def test_one_sure_sample_keeps_its_class_and_finite_logits():
    """p_1 = e^−200 is 0 as a float; after 50 steps log q_1 is about −10000."""
    z = torch.tensor([[200.0, 0.0]])
    client = over(PriorEMClient, Logits(), z, em_steps=50)
    logits = client.predict(z)
    assert logits.isfinite().all() and int(logits.argmax()) == 0


def test_each_batch_has_its_own_distribution_and_a_served_network_one():
    """Batches of two: q from the first two, and from the third alone."""
    client = over(PriorEMClient, Logits(), P.log(), em_steps=1, test_batch_size=2)
    q = np.array([[0.625, 0.375], [0.625, 0.375], [0.9, 0.1]])
    expected = P.log().numpy() + np.log(2 * q)
    assert client.predict(P.log()).numpy() == pytest.approx(expected, abs=1e-5)
    client.stream = {}
    network, logits = client.serve({}, {})
    assert logits.numpy() == pytest.approx(
        P.log().numpy() + np.log(2 * P.mean(0).numpy()), abs=1e-5
    )
    torch.testing.assert_close(network(P.log()), logits)


def test_the_training_prior_is_asked_for_only_if_it_is_used(tmp_path):
    """Add-one smoothing of (3, 0, −1), a liar's: (4, 1, 1)/6. In a run π is that of the training
    clients' samples; a finished run keeps it. Without it a client says so."""
    assert prior(np.array([3.0, 0.0, -1.0])).tolist() == pytest.approx([4 / 6, 1 / 6, 1 / 6])
    assert PriorEM().requires is None
    with pytest.raises(ValueError, match="no prior: no training client"):
        over(PriorEMClient, Logits(), P, source_prior="training").predict(P)
    common = {"method": "prior-em", "output-dir": str(tmp_path), "partition": "iid"}
    federate(**common, **{"prior-em.source-prior": "training"})
    federation = partitions.federation(SMALL | common)
    counts = sum(
        federation.share(i).train[:][1].bincount(minlength=10).numpy()
        for i, novel in enumerate(federation.novel)
        if not novel
    )
    (kept,) = load_file(tmp_path / "strategy.safetensors").values()
    assert kept == pytest.approx((counts + 1) / (counts.sum() + 10))


# BBSE

Z = torch.tensor([[2.0, 0.0, 0.0]] * 2 + [[0.0, 1.0, 0.0]] * 5 + [[0.0, 0.0, 1.0]] * 3)


@pytest.mark.parametrize(
    ("k", "q"),
    [
        (np.eye(3), [0.2, 0.5, 0.3]),  # q = m
        # m = K q: 0.2 = 0.8 q_0 + 0.1 q_1, 0.5 = 0.2 q_0 + 0.9 q_1
        ([[0.8, 0.1, 0], [0.2, 0.9, 0], [0, 0, 1]], [0.13 / 0.7, 0.36 / 0.7, 0.3]),
        # q_0 would be −0.1 and q_1 0.8: projected, by (0.1 / 2 each) to (0, 0.75, 0.25)
        ([[1, 0.375, 0], [0, 0.625, 0], [0, 0, 1]], [0, 0.75, 0.25]),
    ],
)
def test_bbse_by_hand(k, q):
    """Two, five and three predictions: m = (0.2, 0.5, 0.3); z + log(3 q), ε = 0.001 mixed in."""
    client = over(BBSEClient, Logits(3), Z, {"confusion": k})
    mixed = 0.999 * np.array(q) + 0.001 / 3
    assert client.predict(Z).numpy() == pytest.approx(Z.numpy() + np.log(3 * mixed), abs=1e-4)
    torch.testing.assert_close(client.personal_model(Z)(Z), client.predict(Z))


def test_soft_predictions_full_mixing_and_a_prior():
    """K = I: q is the mean prediction. Mixed fully, q is uniform, and π alone corrects."""
    client = over(BBSEClient, Logits(3), Z, {"confusion": np.eye(3)}, predictions="soft")
    mean = 0.999 * Z.softmax(1).mean(0) + 0.001 / 3
    torch.testing.assert_close(client.log_q(Z).exp(), mean)
    source = {"confusion": np.eye(3), "prior": [0.5, 0.25, 0.25]}
    client = over(BBSEClient, Logits(3), Z, source, mixing=1.0)
    assert torch.equal(client.predict(Z).argmax(1), Z.argmax(1))
    client.source_prior = "training"
    expected = Z + torch.tensor([2 / 3, 4 / 3, 4 / 3]).log()
    torch.testing.assert_close(client.predict(Z), expected)


def test_bbse_takes_the_training_prior_from_its_confusion_matrix():
    """It needs no label counts beside it."""
    result, _ = federate(method="bbse", rounds=1, **{"bbse.source-prior": "training"})
    assert "novel-accuracy" in result.evaluate_metrics_clientapp[1]


def test_a_class_that_no_sample_has_and_one_that_nobody_predicts():
    """Counts by predicted class and label: label 2 has no sample and counts as recognised; class 1
    is never predicted, so K is singular, and q is finite all the same."""
    k = conditional(np.array([[3.0, 2.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))
    assert k.tolist() == [[0.75, 0.5, 0], [0, 0, 0], [0.25, 0.5, 1]]
    client = over(BBSEClient, Logits(3), Z, {"confusion": k})
    assert client.predict(Z).isfinite().all()
    assert client.predict(Z[:1]).isfinite().all()
    with pytest.raises(ValueError, match="no confusion: no training client"):
        over(BBSEClient, Logits(3), Z).predict(Z)


def test_a_frozen_head_that_is_never_sent_is_refused():
    """The server counts the classes by its rows."""
    arrays = {"layers.0.weight": np.zeros((3, 4), np.float32)}
    assert PriorEM().initialize(arrays) == arrays
    for strategy in (PriorEM(source_prior="training"), BBSE()):
        with pytest.raises(ValueError, match="leave the head's weights unfrozen"):
            strategy.initialize(arrays)


def test_a_client_counts_its_held_out_samples():
    """Of ten samples the two at places 0 and 5 are held out: predicted 0 and 1, labeled 0 and 2."""
    y = torch.tensor([0, 1, 1, 1, 1, 2, 1, 1, 1, 1])
    client = BBSEClient(Logits(3), share(Z, y), held_out=0.2)
    assert len(client.share.train) == 8 and client.get_properties({})["num-examples"] == 8
    assert client.share.train.index.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    counts = client.confusion(client.initial, {})[0]["confusion"]
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    client.predictions = "soft"
    counts = client.confusion(client.initial, {})[0]["confusion"]
    assert counts[:, 0] == pytest.approx(Z[0].softmax(0).numpy())
    assert counts[:, 2] == pytest.approx(Z[5].softmax(0).numpy())


@pytest.mark.parametrize(("n", "fraction", "held"), [(1, 0.5, 1), (3, 0.9, 2), (4, 0.0, 4)])
def test_a_client_always_trains_on_something(n, fraction, held):
    client = HoldingOut(Logits(3), share(Z[:n], [0] * n), held_out=fraction)
    assert len(client.held) == held
    assert len(client.share.train) == (n - held or n)


# BN-adapt


@pytest.mark.parametrize(("novel", "sizes"), [(False, [2, 1]), (True, [1, 1, 1])])
def test_novel_batch_is_the_batch_of_a_novel_client(novel, sizes):
    client = over(PriorEMClient, Logits(), P.log(), test_batch_size=2, novel_batch=1)
    client.share = replace(client.share, novel=novel)
    assert [len(batch) for batch in client.test_batches(torch.ones(3, 1))] == sizes


def test_statistics_by_hand():
    """Inputs 1, 3, 8: mean 4, unbiased variance 13; running 10 and 4. N = 6 and batches of 3 give
    ρ = ⅔: mean 8, variance 7. In batches of 2 ρ is ¾, also for the one left over, which has no
    variance and keeps 10 and 4."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    model[0].running_mean += 10
    model[0].running_var += 3
    x = torch.tensor([[1.0], [3.0], [8.0]])
    client = over(BNAdaptClient, model, x, prior_samples=6.0, test_batch_size=3)
    found = client.changes(x)
    assert found["0.running_mean"].item() == pytest.approx(8)
    assert found["0.running_var"].item() == pytest.approx(7)
    expected = (x - 8) / math.sqrt(7 + 1e-5)
    torch.testing.assert_close(client.predict(x), model[1](expected).detach())
    client.test_batch_size = 2
    logits = client.predict(x)
    torch.testing.assert_close(logits[2:], model[1]((x[2:] - 10) / math.sqrt(4 + 1e-5)).detach())
    first, last = (client.changes(b) for b in client.test_batches(x))
    assert first["0.running_mean"].item() == pytest.approx(0.75 * 10 + 0.25 * 2)
    assert first["0.running_var"].item() == pytest.approx(0.75 * 4 + 0.25 * 2)
    assert (last["0.running_mean"].item(), last["0.running_var"].item()) == (10, 4)
    client.test_batch_size = 4  # which three inputs count for: ρ is 6/10
    client.predict(x)
    short = client.personal_model(x)[0]
    assert (short.running_mean.item(), short.running_var.item()) == pytest.approx((7.6, 7.6))
    client.stream = {}
    client.update(x)
    served = client.personal_model(x)[0]
    assert (served.running_mean.item(), served.running_var.item()) == pytest.approx((8, 7))
    assert (model[0].running_mean.item(), model[0].running_var.item()) == (10, 4)


def test_a_second_layer_sees_what_the_adapted_first_one_gives():
    """N = 0: both layers normalise by the batch, as in training mode, but for the variance's n − 1;
    a large N is FedAvg."""
    client, x = image_client(BNAdaptClient, 12, prior_samples=0.0)
    changes = client.changes(x)
    model = client.model
    h = model.conv1(x)
    m = h.numel() / h.shape[1]
    torch.testing.assert_close(changes["norm1.running_mean"], h.mean((0, 2, 3)))
    h = (h - h.mean((0, 2, 3), keepdim=True)) / (
        h.var((0, 2, 3), keepdim=True) + model.norm1.eps
    ).sqrt()
    second = model.conv2(torch.relu(torch.max_pool2d(h, 2)))
    torch.testing.assert_close(changes["norm2.running_mean"], second.mean((0, 2, 3)))
    torch.testing.assert_close(changes["norm2.running_var"], second.var((0, 2, 3)))
    assert m > 500
    client.prior_samples = 1e6
    torch.testing.assert_close(client.predict(x), model(x), rtol=1e-3, atol=1e-4)


# MEMO


def test_marginal_entropy_by_hand():
    """Views (¾, ¼) and (¼, ¾) have the mean (½, ½), of entropy ln 2; equal ones their own. A class
    of probability 0 counts 0."""
    z = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    assert float(marginal_entropy(z)) == pytest.approx(math.log(2))
    own = math.log(4) - 0.75 * math.log(3)
    assert float(marginal_entropy(z[[0, 0]])) == pytest.approx(own)
    assert float(marginal_entropy(torch.tensor([[0.0, -math.inf]]))) == 0


@pytest.mark.parametrize("name", ["mlp-small", "convnet-bn"])
def test_each_image_adapts_the_network_for_itself(name):
    """vmap takes the first network, not the second. Without shifts all views are the image: one
    step on H(p) by hand for each image alone, from the network as it was sent."""
    client, x = image_client(MEMOClient, 3, name, adapt_lr=0.3, crop_share=0.0, views=2)
    network, rows = client.personal_model(x).network, []
    before = {n: t.clone() for n, t in client.model.state_dict().items()}
    for image in x:
        copy = build_model(name, (1, 8, 8), 3, 0).eval()
        log_p = copy(image[None]).log_softmax(1)
        slopes = torch.autograd.grad(-(log_p.exp() * log_p).sum(), list(copy.parameters()))
        with torch.no_grad():
            for weight, slope in zip(copy.parameters(), slopes, strict=True):
                weight.sub_(0.3 * slope)
            rows.append(copy(image[None])[0])
    torch.testing.assert_close(client.predict(x), torch.stack(rows), rtol=1e-4, atol=1e-5)
    client.pass_megabytes = 0.01  # one image at once
    torch.testing.assert_close(client.predict(x), torch.stack(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(torch.stack(rows), network(x), atol=1e-3)
    assert all(torch.equal(t, before[n]) for n, t in client.model.state_dict().items())


def test_no_rate_or_step_is_fedavg_and_a_served_network_adapts_as_the_client_did():
    client, x = image_client(MEMOClient, 4, adapt_lr=0.0)
    torch.testing.assert_close(client.predict(x), client.model(x))
    assert torch.equal(client.intermediate_logits["base"], client.model(x))
    client.adapt_lr, client.adapt_steps = 0.5, 0
    torch.testing.assert_close(client.predict(x), client.model(x))
    client.adapt_steps = 1
    with torch.no_grad():
        assert torch.equal(client.predict(x), client.personal_model(x)(x))
    assert not torch.allclose(client.predict(x), client.model(x), atol=1e-3)


def test_views_are_shifted_and_mirrored_at_the_border():
    """One row 0 … 7, a margin of 1: shifts by −1, 0 and 1 repeat the pixel at the border. With
    flips half of the views run backwards. Views of an image differ from those of the next."""
    assert mirrored(torch.tensor([-2, -1, 0, 3, 4, 5]), 4).tolist() == [1, 0, 0, 3, 3, 2]
    x = torch.arange(8.0).expand(2, 2, 1, 8) + torch.tensor([0.0, 100.0])[None, :, None, None]
    settings = {"views": 50, "crop_share": 0.125, "flips": False}
    views = MEMONetwork(nn.Identity(), 3, settings).views(x)
    assert views.shape == (2, 50, 2, 1, 8)
    assert torch.equal(views[:, :, 1], views[:, :, 0] + 100)
    found = {tuple(v.int().tolist()) for v in views[:, :, 0, 0].flatten(0, 1)}
    shifted = {(0, 0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 7)}
    assert found == shifted
    assert not torch.equal(views[0], views[1])
    flipped = MEMONetwork(nn.Identity(), 3, settings | {"flips": True}).views(x)
    found = {tuple(v.int().tolist()) for v in flipped[:, :, 0, 0].flatten(0, 1)}
    assert found == shifted | {v[::-1] for v in shifted}


def test_memo_refuses_what_is_no_image():
    info = replace(described({"dataset": "digits", "data-dir": ""}), shape=(64,))
    with pytest.raises(ValueError, match=r"memo needs images.*\(64,\)"):
        MEMOClient.build(Logits(), info)


@pytest.mark.parametrize("cls", [BNAdaptClient, MEMOClient])
def test_one_image_is_predicted(cls):
    client, x = image_client(cls, 1)
    assert client.predict(x).isfinite().all()
