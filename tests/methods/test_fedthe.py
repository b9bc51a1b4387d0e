"""FedTHE, FedTHE+ and BTFL: training, weights of two heads, and what an unseen client gets."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import Watched, federate, share, states, update
from torch import nn

from clients.core.arrays import model_arrays
from clients.core.client import Client
from clients.methods import btfl, fedthe
from clients.methods._two_heads import PERSONAL_HEAD, SUMMARY, TwoHeads
from clients.methods.btfl import BTFLClient, levels
from clients.methods.fedthe import FedTHEClient, history, objective
from clients.methods.fedthe_plus import FedTHEPlusClient
from clients.methods.memo import MEMOClient, MEMONetwork, marginal_entropy
from clients.models import build_model
from clients.models.head import HeadedNetwork
from partitions.datasets.loading import described
from strategies.methods.fedthe import FedTHE

INFO = described({"dataset": "digits", "data-dir": ""})
X = torch.rand(24, 1, 8, 8, generator=torch.manual_seed(5))
Y = torch.arange(24) % 5 % 3  # 10, 9 and 5 samples of three classes
ALL = (FedTHEClient, FedTHEPlusClient, BTFLClient)


class Plain(HeadedNetwork):
    """Features are the inputs; dropout, which only training shows."""

    def __init__(self, width=2):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(width, 2)

    def features(self, x):
        return self.drop(x)


def two_heads(cls=FedTHEClient, name="mlp-small", **settings):
    """A trained training client, and the arrays that the server sends it."""
    model = cls.build(build_model(name, (1, 8, 8), 3, 0), INFO)
    client = cls(model, share(X, Y), **{"views": 3} if cls is FedTHEPlusClient else {}, **settings)
    client.begin("train", {})
    sent, *_ = client.train(model_arrays(model), {"server-round": 1})
    return client, sent


# Training


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


def test_the_summary_is_of_the_received_body_in_evaluation_mode():
    """Features (1, 2) and (3, 6) have the mean (2, 4), whatever dropout and training do. BTFL:
    tanh(0.4) = 0.38 and tanh(0.6) = 0.54 are 0 and 1; a negative feature is 0."""
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    client = FedTHEClient(FedTHEClient.build(Plain(), INFO), share(x, [0, 1]))
    sent, *_ = client.train(model_arrays(client.model), {})
    assert sent[SUMMARY].tolist() == [2, 4]
    x = torch.tensor([[0.4, 0.6], [0.6, 0.6], [-5.0, 0.6], [0.0, 0.0]])
    assert levels(x).tolist() == [[0, 1], [1, 1], [0, 1], [0, 0]]
    client = BTFLClient(BTFLClient.build(Plain(), INFO), share(x, [0, 1, 0, 1]))
    sent, *_ = client.train(model_arrays(client.model), {})
    assert sent[SUMMARY].tolist() == [[0.75, 0.25], [0.25, 0.75]]


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


# The server


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


# Clients


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("name", ["mlp-small", "convnet-bn"])
def test_an_unseen_client_gets_the_global_model(cls, name):
    """Its logits are those of e = (1, 0); FedTHE+ gives those of MEMO at its settings. It keeps no
    head, and its network has no summary."""
    client, sent = two_heads(cls, name)
    novel = cls(client.model, replace(share(X, Y), novel=True), views=3) if (
        cls is FedTHEPlusClient
    ) else cls(client.model, replace(share(X, Y), novel=True))  # fmt: skip
    novel.receive(sent, {})
    assert novel.personal_head is None and not novel.state
    found, network = novel.predict(X), novel.personal_model(X)
    assert SUMMARY not in "".join(network.state_dict())
    body = client.network()
    with torch.no_grad():
        torch.testing.assert_close(found, network(X))
        heads = TwoHeads(client.network(), torch.randn(3, body.head.in_features))
        torch.testing.assert_close(body(X), heads(X, torch.tensor([1.0, 0.0])))
    if cls is not FedTHEPlusClient:
        assert torch.equal(found, body(X))
        return
    memo = MEMOClient(body, share(X, Y), views=3, adapt_lr=0.0005, adapt_steps=3)
    memo.receive({n: a for n, a in sent.items() if n != SUMMARY}, {})
    torch.testing.assert_close(found, memo.predict(X))
    novel.adapt_lr = 0.3
    assert not torch.allclose(novel.predict(X), body(X), atol=1e-3)


@pytest.mark.parametrize("cls", ALL)
def test_a_training_client_mixes_both_heads(cls):
    """Prediction twice is the same; without labels or after `load` the global model predicts."""
    client, sent = two_heads(cls)
    client.receive(sent, {})
    one, again = client.predict(X), client.predict(X)
    assert torch.equal(one, again) and not client.intermediate_logits
    with torch.no_grad():
        torch.testing.assert_close(deepcopy(client.personal_model(X))(X), one)
    Client.receive(client, sent, {})
    other = client.predict(X)
    assert not torch.allclose(one, other, atol=1e-3)
    client.share = share(X, torch.full_like(Y, -1))
    client.receive(sent, {})
    assert torch.equal(client.predict(X), other)


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


@pytest.mark.parametrize("kind", [FedTHEClient, FedTHEPlusClient, BTFLClient])
def test_what_weighs_the_heads_moves_and_is_saved_with_the_network(kind):
    """The means, and BTFL's shares, are buffers: the state of another client's network brings
    them."""
    models = []
    for shift in (0.0, 0.5):
        client, sent = two_heads(kind)
        client.receive(sent | {SUMMARY: sent[SUMMARY] + np.float32(shift)}, {})
        models.append(client.personal_model(X))
    one, other = models
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(other(X[:3]), one(X[:3]))
    places = {t.device.type for t in other.to("meta").state_dict().values()}
    assert places == {"meta"} and any("weigh" in name for name in other.state_dict())


def test_fedthe_plus_adapts_all_of_the_network_to_each_input():
    """Two steps by hand for each image alone, each on further views, at its e."""
    client, sent = two_heads(FedTHEPlusClient, adapt_lr=0.2, adapt_steps=2)
    client.receive(sent, {})
    found, heads, rows = client.predict(X[:4]), client.two_heads(), []
    e = client.weigh(*heads.outputs_of(X[:4], 64))
    views = MEMONetwork(nn.Identity(), client.views_seed, vars(client) | settings()).views(X[:4], 2)
    for image, mixture, some in zip(X[:4], e, views, strict=True):
        copy = client.two_heads()
        for step in (0, 1):
            loss = marginal_entropy(copy(some[3 * step : 3 * step + 3], mixture))
            slopes = torch.autograd.grad(loss, list(copy.parameters()))
            with torch.no_grad():
                for weight, slope in zip(copy.parameters(), slopes, strict=True):
                    weight.sub_(0.2 * slope)
        rows.append(copy(image[None], mixture)[0].detach())
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, heads(X[:4], e), atol=1e-3)
    client.adapt_lr = 0.0
    torch.testing.assert_close(client.predict(X[:4]), heads(X[:4], e))


def settings():
    return {"views": 3, "crop_share": 0.125, "flips": False}


# BTFL


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
