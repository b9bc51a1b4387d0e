"""Prior-EM: the estimated distribution of labels, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from clients_with_sources import Logits, novel_client
from safetensors.numpy import load_file
from small_runs import SMALL, federate

import partitions
from clients.core.client import Client
from clients.methods.prior_em import PriorEMClient
from strategies.maths.label_shift import prior
from strategies.methods.prior_em import PriorEM

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
    client = novel_client(
        PriorEMClient, Logits(), P.log(), source, em_steps=steps, source_prior=kind
    )
    assert client.log_q(P.log()).exp().tolist() == pytest.approx(list(expected), abs=1e-5)
    pi = np.array(source["prior"] if source else [0.5, 0.5])
    z = client.predict(P.log())
    assert z.numpy() == pytest.approx(P.log().numpy() + np.log(np.array(expected) / pi), abs=1e-5)
    torch.testing.assert_close(client.personal_model(P.log())(P.log()), z)
    assert torch.equal(client.intermediate_logits["base"], P.log())


@pytest.mark.parametrize("source", [None, {"prior": [0.3, 0.7]}])
def test_no_em_step_is_fedavg_to_the_last_bit(source):
    kind = "training" if source else "uniform"
    client = novel_client(PriorEMClient, Logits(), P.log(), source, em_steps=0, source_prior=kind)
    assert torch.equal(client.predict(P.log()), Client.predict(client, P.log()))


def test_em_never_lowers_the_likelihood():
    """Σ_i log Σ_c (q_c / π_c) p_ic of random predictions of five classes, π not uniform."""
    z = 3 * torch.randn(30, 5, generator=torch.manual_seed(1), dtype=torch.float64)
    pi = np.array([0.1, 0.3, 0.3, 0.2, 0.1])
    likelihoods = []
    for steps in range(8):
        client = novel_client(PriorEMClient, Logits(5), z, {"prior": pi}, em_steps=steps,
                      source_prior="training")  # fmt: skip
        ratio = client.log_q(z) - client.log_prior
        likelihoods.append(float((z.log_softmax(1) + ratio).logsumexp(1).sum()))
    assert likelihoods == sorted(likelihoods) and likelihoods[-1] > likelihoods[0] + 1


def test_one_sure_sample_keeps_its_class_and_finite_logits():
    """p_1 = e^−200 is 0 as a float; after 50 steps log q_1 is about −10000."""
    z = torch.tensor([[200.0, 0.0]])
    client = novel_client(PriorEMClient, Logits(), z, em_steps=50)
    logits = client.predict(z)
    assert logits.isfinite().all() and int(logits.argmax()) == 0


def test_each_batch_has_its_own_distribution_and_a_served_network_one():
    """Batches of two: q from the first two, and from the third alone."""
    client = novel_client(PriorEMClient, Logits(), P.log(), em_steps=1, test_batch_size=2)
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
        novel_client(PriorEMClient, Logits(), P, source_prior="training").predict(P)
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


@pytest.mark.parametrize(("novel", "sizes"), [(False, [2, 1]), (True, [1, 1, 1])])
def test_novel_batch_is_the_batch_of_a_novel_client(novel, sizes):
    client = novel_client(PriorEMClient, Logits(), P.log(), test_batch_size=2, novel_batch=1)
    client.share = replace(client.share, novel=novel)
    assert [len(batch) for batch in client.test_batches(torch.ones(3, 1))] == sizes
