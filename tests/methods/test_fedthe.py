"""FedTHE: training, summaries and the weights of two heads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import Watched, federate, share, states, update
from torch import nn
from two_head_clients import INFO, Plain, X, two_heads

from clients.core.arrays import model_arrays
from clients.core.client import Client
from clients.methods import fedthe
from clients.methods._two_heads import PERSONAL_HEAD, SUMMARY
from clients.methods.fedthe import FedTHEClient, history, objective
from clients.models import build_model
from strategies.methods.fedthe import FedTHE


def test_balanced_softmax_by_hand():
    """Two samples of class 0 and none of class 1 add ln 3 and ln 1: logits (0, 0) become
    (ln 3, 0), so class 0 has probability ¾. A sample of class 1 costs ln 4."""
    client = FedTHEClient(FedTHEClient.build(Plain(), INFO), share(torch.zeros(2, 2), [0, 0]))
    nn.init.zeros_(client.model.head.weight)
    nn.init.zeros_(client.model.head.bias)
    client.lr = 0.0
    client.train(model_arrays(client.model), {})
    x = torch.zeros(1, 2)
    assert client.loss(x, torch.tensor([0])).item() == pytest.approx(math.log(4 / 3))
    assert client.loss(x, torch.tensor([1])).item() == pytest.approx(math.log(4))


def test_the_personal_head_takes_steps_on_the_frozen_body():
    """One step of all three samples from W = 0: W = −lr/3 Σ (p − 1_y) xᵀ with p = ½."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), torch.tensor([0, 1, 0])
    client = FedTHEClient(FedTHEClient.build(Plain(), INFO), share(x, y), lr=0.3, batch_size=3)
    client.state[PERSONAL_HEAD] = np.zeros((2, 2), np.float32)
    sent = model_arrays(client.model)
    client.train(sent, {})
    expected = 0.3 / 3 * torch.tensor([[0.5 + 0.5, -1 + 0.5], [-0.5 - 0.5, 1 - 0.5]])
    torch.testing.assert_close(torch.from_numpy(client.state[PERSONAL_HEAD]), expected)
    before = client.state[PERSONAL_HEAD].copy()
    client.receive(sent, {})
    assert client.personal_head.shape == (2, 2)
    assert not torch.allclose(client.personal_head, expected)  # one more epoch
    assert np.array_equal(client.state[PERSONAL_HEAD], before)


def test_without_the_personal_parts_training_is_fedavgs():
    """Equal counts shift all logits alike, which changes no softmax: FedAvg's model."""
    x, y = X[:6], torch.tensor([0, 1, 2, 0, 1, 2])
    model = build_model("mlp-small", (1, 8, 8), 3, 0)
    fedavg = Client(model, share(x, y))
    plain, *_ = fedavg.train(model_arrays(model), {})
    other = FedTHEClient.build(build_model("mlp-small", (1, 8, 8), 3, 0), INFO)
    found, *_ = FedTHEClient(other, share(x, y)).train(model_arrays(other), {})
    assert found.keys() - plain.keys() == {SUMMARY}
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_the_server_takes_the_plain_mean_of_summaries():
    """Summaries 1 and 5 have the mean 3; the models 1 and 5, of 3 and 1 samples, the mean 2."""
    strategy = FedTHE()
    start = {"w": np.zeros(1, np.float32), SUMMARY: np.ones(1, np.float32)}
    replies = [
        update(i, {name: np.full(1, value, np.float32) for name in start}, n)
        for i, value, n in ((0, 1, 3), (1, 5, 1))
    ]
    found = strategy.aggregate(start, replies)
    assert (found["w"].item(), found[SUMMARY].item()) == (2, 3)
    alone = [update(i, {"w": np.full(1, i, np.float32)}) for i in (2, 4)]
    assert strategy.aggregate({"w": start["w"]}, alone)["w"].item() == 3


def test_summaries_of_the_training_clients_alone_reach_everybody():
    """The server's summary is the mean of the clients' replies of the same round."""
    _, grid = federate(Watched, method="fedthe", rounds=1)
    replies = [
        m.content["arrays"][SUMMARY].numpy()
        for m in grid.seen
        if m.metadata.message_type == "train" and m.metadata.reply_to_message_id
    ]
    assert len(replies) == 3
    evaluated = [m for m in grid.seen if m.metadata.message_type == "evaluate"]
    got = [
        m.content["arrays"][SUMMARY].numpy()
        for m in evaluated
        if not m.metadata.reply_to_message_id
    ]
    assert len(got) == 6
    for array in got:
        np.testing.assert_allclose(array, np.mean(replies, axis=0), rtol=1e-6)
    kept = states(grid, "fedthe")
    assert len(kept) == 3 and all(list(state) == [PERSONAL_HEAD] for state in kept.values())


# FedTHE's weights


@pytest.mark.parametrize(("rate", "expected"), [(0.1, 0.1), (0.0, 0.2)])
def test_the_rate_of_the_weights_is_ten_times_lr_without_one_of_its_own(rate, expected):
    """lr is 0.02."""
    network = FedTHEClient.build(Plain(), INFO)
    samples = share(torch.zeros(2, 2), [0, 1])
    client = FedTHEClient(network, samples, lr=0.02, mixing_lr=rate)
    assert client.weighing(torch.ones(3, 2), torch.zeros(3)).lr == pytest.approx(expected)


def test_history_by_hand():
    """α = ¼: 8, ¼ · 4 + ¾ · 8 = 7, ¼ · 0 + ¾ · 7 = 5.25."""
    f = torch.tensor([[8.0], [4.0], [0.0]])
    assert history(f, 0.25)[:, 0].tolist() == [8, 7, 5.25]
    assert history(f[:1], 0.25)[:, 0].tolist() == [8]


def test_objective_by_hand():
    """g = (ln 3, 0) and p = (0, ln 3): σ are (¾, ¼) and (¼, ¾), s = 6/10. ω = (ln 2, 0):
    e = (⅔, ⅓), mixed logits (⅔ ln 3, ⅓ ln 3)."""
    g, p = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, math.log(3)]])
    omega = torch.tensor([[math.log(2), 0.0]])
    q = 1 / (1 + 3 ** (-1 / 3))
    entropy = -q * math.log(q) - (1 - q) * math.log(1 - q)
    expected = 0.6 * entropy + 0.4 * (2 / 3 * 5 + 1 / 3 * 2)
    assert float(objective(omega, g, p, torch.tensor([[5.0, 2.0]]))) == pytest.approx(expected)


def weighing(**changes):
    means = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 3.0, 1.0])
    return replace(fedthe.HeadMixing(means, 0.1, 0.2, 20, 0.1), **changes)


def outputs(n=6):
    generator = torch.manual_seed(2)
    return [torch.randn(n, d, generator=generator, dtype=torch.float64) * 2 for d in (4, 4, 3)]


def test_the_first_step_of_an_inputs_weights_has_the_sign_of_its_central_difference():
    """Adam's first step is lr times the sign; the objective's gradient is that of differences."""
    g, p, f = outputs()
    weigh = weighing(steps=1, lr=0.01, means=(f[1], f[2]), history_rate=0.9)
    a = [f[0]]
    for row in f[1:]:
        a.append(0.9 * row + 0.1 * a[-1])
    h = 0.2 * f + 0.8 * torch.stack(a)
    distances = torch.stack([(h - mean).norm(dim=1) for mean in weigh.means], 1)
    ones, step = torch.ones(6, 2, dtype=torch.float64), 1e-5
    slopes = torch.zeros(6, 2, dtype=torch.float64)
    for column in (0, 1):
        shift = torch.zeros_like(ones)
        shift[:, column] = step
        up, down = (objective(ones + k * shift, g, p, distances) for k in (1, -1))
        slopes[:, column] = (up - down) / (2 * step)
    omega = ones.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(omega, g, p, distances).sum(), omega)
    torch.testing.assert_close(slope, slopes, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(weigh(g, p, f), (ones - 0.01 * slopes.sign()).softmax(1))
    assert (slopes[:, 0] > 0).any() and (slopes[:, 0] < 0).any()


def test_batches_do_not_matter_but_the_order_does():
    """An input's weights depend on those before it, not on those after it, nor on their number."""
    g, p, f = outputs()
    weigh = weighing()
    e = weigh(g, p, f)
    torch.testing.assert_close(weigh(g[:4], p[:4], f[:4]), e[:4])
    order = [1, 0, 2, 3, 4, 5]
    assert not torch.allclose(weigh(g[order], p[order], f[order])[order], e)
    torch.testing.assert_close(e.sum(1), torch.ones(6, dtype=torch.float64))


def test_beta_decides_between_an_input_and_those_before_it():
    """α = 0: a = f_1 = 0. The second input, 4, is h^g, f_1 is h^l; β = 1 counts the input alone."""
    g, f = torch.tensor([[9.0, -9.0], [9.0, -9.0]]), torch.tensor([[0.0], [4.0]])
    for beta, side in ((1.0, 0), (0.0, 1)):
        weigh = weighing(means=(f[1], f[0]), history_rate=0.0, feature_share=beta)
        assert weigh(g, -g, f)[1].argmax() == side


def test_features_near_the_clients_mean_get_the_personal_head():
    """Where the heads disagree (s near 0), the nearer mean decides."""
    g, p = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    for near, side in ((0, 0), (1, 1)):
        weigh = weighing()
        e = weigh(g, p, weigh.means[near][None])
        assert e[0].argmax() == side and e[0].max() > 0.9


def test_fedthe_mixes_by_its_weights():
    """By hand: e of the received and of the client's mean, e_g g + e_l p."""
    client, sent = two_heads()
    client.receive(sent, {})
    body = client.network()
    f = body.features(X).detach()
    g, p = body.head(f).detach(), f @ client.personal_head.T
    means = torch.from_numpy(sent[SUMMARY]), f.mean(0)
    e = fedthe.HeadMixing(means, 0.1, 0.1, 20, 0.1)(g, p, f)
    torch.testing.assert_close(client.predict(X), e[:, :1] * g + e[:, 1:] * p)
    assert float((e[:, 0] - 0.5).abs().max()) > 0.01
