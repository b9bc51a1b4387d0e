"""HyperFedZero's client: chunks, embeddings and penalty by hand."""

import math

import pytest
import torch
from small_runs import share
from torch import nn
from torch.nn import functional as F

from clients.methods.hyperfedzero import GeneratedHead, HyperFedZeroClient, imbalance
from clients.models import build_model
from partitions.datasets.loading import Info

INFO = Info("tiny", (1, 2, 2), 3, "")
SIZES = {"embedding_dim": 3, "chunk_size": 5, "chunk_dim": 2, "hidden_dim": 4}


class Plain(nn.Module):
    """head(x) for two classes: the features are the two inputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)


def make(granularity="sample", n=5, **settings):
    torch.manual_seed(0)
    base = build_model("mlp-small", INFO.shape, 3, 0)
    model = HyperFedZeroClient.build_network(base, INFO, granularity=granularity, **SIZES)
    x, y = torch.randn(n, 1, 2, 2, generator=torch.manual_seed(1)), torch.arange(n) % 3
    return HyperFedZeroClient(model, share(x, y), **settings), x, y


def written_out(net, x):
    """The logits, one sample and one chunk after the other."""
    result = []
    for features in net.body(x):
        e = torch.softmax(net.embed(features), 0)
        flat = torch.cat([net.mlp(torch.cat([e, u])) for u in net.chunks])
        weights = flat[: math.prod(net.shape)].view(net.shape)
        result.append(weights[:, :-1] @ features + weights[:, -1])
    return torch.stack(result)


def test_chunks_by_hand_with_a_surplus():
    """Two classes and two features are six weights: chunks of 4 are two, whose last two weights
    are dropped. w_j = relu(e_0 + u_j) (1, 2, 3, 4) with e = (½, ½) and u = 1, 3: hidden 1.5, 3.5
    give (1.5, 3, 4.5), (6, 3.5, 7). Features (2, −1): logits 3 − 3 + 4.5 and 12 − 3.5 + 7."""
    net = GeneratedHead(Plain(), 2, 4, 1, 1, False).eval()
    with torch.no_grad():
        net.embed.weight.zero_(), net.embed.bias.zero_()
        net.chunks.copy_(torch.tensor([[1.0], [3.0]]))
        net.mlp[0].weight.copy_(torch.tensor([[1.0, 0.0, 1.0]])), net.mlp[0].bias.zero_()
        net.mlp[2].weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        net.mlp[2].bias.zero_()
    heads = net.heads(torch.tensor([[0.5, 0.5]]))
    assert heads.tolist() == [[[1.5, 3.0, 4.5], [6.0, 3.5, 7.0]]]
    assert net(torch.tensor([[2.0, -1.0]])).tolist() == [[4.5, 15.5]]


@pytest.mark.parametrize("granularity", ["sample", "client"])
def test_a_hypernetwork_that_ignores_the_embedding_gives_one_classifier(granularity):
    client, x, _ = make(granularity)
    net = client.model.eval()
    e = net.embedding(net.body(x)).exp()
    assert not torch.allclose(net.heads(e)[0], net.heads(e)[1])
    with torch.no_grad():
        net.mlp[0].weight[:, :3] = 0
    heads = net.heads(e)
    assert torch.equal(heads, heads[:1].expand_as(heads))
    weights = heads[0]
    plain = net.body(x) @ weights[:, :-1].T + weights[:, -1]
    torch.testing.assert_close(client.predict(x), plain)


def test_without_penalty_and_noise_it_is_a_conditional_network():
    client, x, y = make(balance=0.0, entropy_weight=0.0)
    net = client.model.eval()
    expected = written_out(net, x)
    torch.testing.assert_close(client.predict(x), expected)
    torch.testing.assert_close(client.loss(x, y), F.cross_entropy(expected, y))


def test_noise_in_training_alone():
    """z = A f(x) + ζ softplus(B f(x)): over draws, log-odds of e have means of A f(x) and, as ζ are
    independent, variances σ_0² + σ_1²."""
    client, x, _ = make()
    net = client.model
    features = net.body(x[:1]).detach()
    net.train()
    draws = net.embedding(features.expand(20000, -1)).detach()
    odds = draws[:, 0] - draws[:, 1]
    z = net.embed(features)[0].detach()
    sigma = F.softplus(net.noisy(features))[0].detach()
    assert float(odds.mean()) == pytest.approx(float(z[0] - z[1]), abs=0.03)
    assert float(odds.var()) == pytest.approx(float(sigma[0] ** 2 + sigma[1] ** 2), rel=0.05)
    assert torch.equal(client.model.eval()(x), client.model(x))


def test_penalty_by_hand():
    """e = (¾, ¼), (½, ½): s = (1.25, 0.75), mean 1, var 0.125; H = (0.562335 + 0.693147)/2. A mean
    of one embedding more would double mean and s."""
    e = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    assert float(imbalance(e)) == pytest.approx(0.125)
    assert float(imbalance(torch.cat([e, e]))) == pytest.approx(0.25)
    client, x, y = make(balance=0.3, entropy_weight=0.7)
    net = client.model.eval()
    net.embedding = lambda features: torch.cat([e, e, e[:1]]).log()
    net.classify = lambda features, e: torch.zeros(5, 3)
    s = torch.tensor([3.25, 1.75])
    h = (3 * 0.562335 + 2 * 0.693147) / 5
    expected = math.log(3) + 0.3 * float(s.var() / s.mean()) + 0.7 * h
    assert float(client.loss(x, y)) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_the_loss_agrees_with_finite_differences():
    client, x, y = make(balance=0.5, entropy_weight=2.0)
    net = client.model.double().eval()
    x = x.double()
    torch.manual_seed(3)
    direction = {n: torch.randn_like(p) for n, p in net.named_parameters()}
    client.loss(x, y).backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()
    }
    slope = sum(float((grads[n] * d).sum()) for n, d in direction.items())

    start = {n: p.detach().clone() for n, p in net.named_parameters()}

    def at(t):
        net.load_state_dict({n: p + t * direction[n] for n, p in start.items()})
        return float(client.loss(x, y).detach())

    assert slope == pytest.approx((at(1e-6) - at(-1e-6)) / 2e-6, rel=1e-6)


def test_the_variance_of_the_embedding_shows_a_collapse():
    """Entry by entry, over the samples; one point has none."""
    client, x, _ = make()
    client.receive(client.initial, {})
    client.predict(x)
    e = client.model.embedding(client.model.body(x)).exp()
    expected = float(((e - e.mean(0)) ** 2).mean(0).sum())
    assert (
        client.adaptation_metrics["embedding-variance"] == pytest.approx(expected)
        and expected > 1e-5
    )
    with torch.no_grad():
        client.model.embed.weight.zero_()
    client.predict(x)
    assert client.adaptation_metrics["embedding-variance"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("granularity", ["sample", "client"])
def test_a_clients_network_predicts_as_the_client_did_however_it_is_split(granularity):
    """For a client it is the target network, with the head of the mean embedding."""
    client, x, _ = make(granularity, n=9)
    client.receive(client.initial, {})
    logits = client.predict(x)
    served = client.personal_model(x)
    torch.testing.assert_close(served(x), logits)
    if granularity == "client":
        assert list(served.state_dict()) == list(
            build_model("mlp-small", (1, 2, 2), 3, 0).state_dict()
        )
        net = client.model
        head = net.heads(net.embedding(net.body(x)).exp().mean(0, keepdim=True))[0]
        torch.testing.assert_close(served.head.weight, head[:, :-1])
    else:
        torch.testing.assert_close(served(x[4:5]), logits[4:5])  # whatever else is in the batch
    client.pass_megabytes = 1e-5  # parts of one sample
    torch.testing.assert_close(client.predict(x), logits)
