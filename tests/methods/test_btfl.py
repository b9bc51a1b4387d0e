"""BTFL: summaries, and the weights of two heads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import share
from torch import nn
from two_head_clients import INFO, Plain, X, two_heads

from clients.core.arrays import model_arrays
from clients.methods import btfl
from clients.methods._two_heads import SUMMARY
from clients.methods.btfl import BTFLClient, evidence, expected_weight, odds


def test_evidence_by_hand():
    """Shares ¾ of level 1 in the first feature, ¼ in the second; levels 1 and 0: both 0.65."""
    shares = torch.tensor([[0.25, 0.75], [0.75, 0.25]])
    f = torch.tensor([[2.0, 0.1], [0.1, 2.0]])
    expected = [2 * math.log(0.65), 2 * math.log(0.35)]
    assert evidence(f, shares).tolist() == pytest.approx(expected)


def test_odds_and_weights_by_hand():
    """λ(2) = 1 + 4 tanh 1, λ(½) its inverse, λ(1) = 1. With λ = 1 and a = b = 1 the integral is
    the mean of m, ½; a large λ takes the global head's weight away, a prior of many global samples
    gives it back."""
    far = 1 + 4 * math.tanh(1)
    assert odds(torch.tensor([2.0, 0.5, 1.0])).tolist() == pytest.approx([far, 1 / far, 1])
    one, five = expected_weight(torch.tensor([1.0, 5.0]), 1, 1).tolist()
    assert one == pytest.approx(0.5)
    m = np.linspace(0.01, 0.99, 100)
    assert five == pytest.approx(np.trapezoid(m / (m + (1 - m) * 5), m) / 0.98)
    assert float(expected_weight(torch.tensor([5.0]), 30, 1)[0]) > 0.8 > 0.4 > five
    assert float(expected_weight(torch.tensor([5.0]), 1e6, 1)[0]) > 0.9


def test_a_batchs_evidence_reaches_the_next_batch_alone():
    """Three inputs for which all speaks for the global head raise a by 3 after their batch; the
    fourth speaks for neither."""
    shares = torch.tensor([[0.1, 0.1], [0.9, 0.9]]), torch.tensor([[0.9, 0.9], [0.1, 0.1]])
    sure, unsure = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    g, p = torch.stack([sure] * 3 + [unsure]), torch.stack([unsure] * 4)
    f = torch.full((4, 2), 3.0)
    means = torch.tensor(0.5), torch.tensor(0.4)  # entropies 0.33 and 0.69
    weigh = btfl.ModelMixing(shares, means, 3)
    e = weigh(g, p, f)
    h_g, h_l = 0.6931, 0.6931
    s_g, s_l = 2 * math.log(0.74), 2 * math.log(0.26)
    rho = math.exp((s_l * math.exp(h_l / 0.4 - 1) - s_g * math.exp(h_g / math.log(100) - 1)) / 2)
    assert rho < 1
    lam = torch.tensor([1 / (1 + 4 * math.tanh(1 / rho - 1))])
    assert float(e[3, 0]) == pytest.approx(float(expected_weight(lam, 4.0, 1.0)), rel=1e-4)
    whole = replace(weigh, batch_size=4)(g, p, f)
    torch.testing.assert_close(e[:3], whole[:3])
    assert float(whole[3, 0]) == pytest.approx(float(expected_weight(lam, 1.0, 1.0)), rel=1e-4)
    swapped = replace(weigh, shares=shares[::-1], means=means[::-1])(p, g, f)
    assert swapped[3, 0] < replace(weigh, shares=shares[::-1], batch_size=4)(p, g, f)[3, 0]


def test_a_personal_head_without_entropy_in_training_gives_finite_weights():
    """It is sure of its one class, in training and of these inputs: H̄_l = H_l = 0."""
    shares = torch.full((2, 4), 0.5), torch.full((2, 4), 0.5)
    sure = torch.tensor([[200.0, 0, 0]] * 3).log_softmax(1)
    means = torch.tensor(0.1), torch.tensor(0.0)
    e = btfl.ModelMixing(shares, means, 32)(sure, sure, torch.rand(3, 4))
    assert e.isfinite().all() and ((e > 0) & (e < 1)).all()


def test_the_prior_counts_inputs_that_shares_and_both_entropies_decide():
    """H̄_g = 0.5, H̄_l = 0.4; entropies 0.325, 0.423, 0.611 and 0.693. Three of eight inputs speak
    for the global head, and one for the personal head: a = 4, b = 2 for the ninth."""
    low, mid, high, flat = (torch.tensor([q, 1 - q]).log() for q in (0.9, 0.85, 0.7, 0.5))
    to_global, to_personal = torch.full((2,), 3.0), torch.full((2,), 0.1)
    inputs = [
        (low, flat, to_global),  # a
        (mid, flat, to_global),  # a: 0.423 < H̄_g
        (low, mid, to_global),  # a: 0.423 > H̄_l
        (low, low, to_global),  # the personal head is sure as well
        (flat, flat, to_global),  # the global head is not
        (flat, low, to_personal),  # b
        (flat, mid, to_personal),  # 0.423 > H̄_l
        (mid, low, to_personal),  # 0.423 < H̄_g
        (flat, high, to_global),
    ]
    g, p, f = map(torch.stack, zip(*inputs, strict=True))
    shares = torch.tensor([[0.45, 0.45], [0.55, 0.55]]), torch.tensor([[0.55, 0.55], [0.45, 0.45]])
    e = btfl.ModelMixing(shares, (torch.tensor(0.5), torch.tensor(0.4)), 8)(g, p, f)
    h_g, h_l = math.log(2), -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    s_g, s_l = 2 * math.log(0.53), 2 * math.log(0.47)
    rho = math.exp((s_l * math.exp(h_l / 0.4 - 1) - s_g * math.exp(h_g / math.log(100) - 1)) / 2)
    lam = 1 / (1 + 4 * math.tanh(1 / rho - 1))
    m = np.linspace(0.01, 0.99, 100)
    density = m**3 * (1 - m)
    expected = np.trapezoid(density * m / (m + (1 - m) * lam), m) / np.trapezoid(density, m)
    assert 0.3 < rho < 0.5  # where tanh is not saturated
    assert e[8].tolist() == pytest.approx([expected, 1 - expected], rel=1e-5)


def test_btfl_adds_the_sum_of_its_features():
    """Zero logits cost ln 2; features (1, −2) and (3, 2) add 0.5 · 8 / 32."""
    client = BTFLClient(BTFLClient.build(Plain(), INFO), share(torch.zeros(2, 2), [0, 1]))
    client.sparsity = 0.5
    nn.init.zeros_(client.model.head.weight)
    nn.init.zeros_(client.model.head.bias)
    seen = []
    client.fit_locally = lambda config: seen.append(
        client.loss(torch.tensor([[1.0, -2.0], [3.0, 2.0]]), torch.tensor([0, 1])).item()
    )
    client.train(model_arrays(client.model.eval()), {})
    assert seen == [pytest.approx(math.log(2) + 0.5 * 8 / 32)]
    assert not client.model.head._forward_pre_hooks


def test_btfl_mixes_log_probabilities():
    client, sent = two_heads(BTFLClient)
    client.receive(sent, {})
    body = client.network()
    f = body.features(X).detach()
    log_p = [z.log_softmax(1).detach() for z in (body.head(f), f @ client.personal_head.T)]
    h = [-(z.exp() * z).sum(1).mean() for z in log_p]
    received = torch.from_numpy(sent[SUMMARY])
    e = btfl.ModelMixing((received, client.summary(f)), tuple(h), 32)(*log_p, f)
    expected = e[:, :1] * log_p[0] + e[:, 1:] * log_p[1]
    torch.testing.assert_close(client.predict(X), expected)
    assert not torch.allclose(received, torch.full_like(received, 0.5))
