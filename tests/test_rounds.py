"""Two whole rounds of each averaging method against a reference in numpy.

Three clients of 4, 6 and 9 samples under a network of two linear layers, logits = H B x, whose
gradients are written out: with P = softmax(logits) − onehot, over n samples,
∂L/∂H = Pᵀ(B x)/n and ∂L/∂B = (P H)ᵀx/n. A batch holds all of a client's samples."""

import numpy as np
import pytest
import torch
from small_runs import share, update
from torch import nn

from clients.core.client import Client
from clients.methods.afl import AFLClient
from clients.methods.fedper import FedPerClient
from clients.methods.fedprox import FedProxClient
from clients.methods.fedrep import FedRepClient
from clients.methods.lgfedavg import LGFedAvgClient
from clients.methods.perfedavg import PerFedAvgClient
from clients.methods.pfedme import PFedMeClient
from clients.methods.scaffold import ScaffoldClient
from strategies.core.replies import Node
from strategies.methods.afl import AFL
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedgma import FedGMA
from strategies.methods.lgfedavg import LGFedAvg
from strategies.methods.pfedme import PFedMe
from strategies.methods.scaffold import Scaffold

B, H = "body.weight", "head.weight"
SIZES, STEPS, LR, ROUNDS = (4, 6, 9), 3, 0.2, 2
RNG = np.random.default_rng(3)
DATA = [(RNG.normal(size=(n, 3)), RNG.integers(0, 3, n)) for n in SIZES]
START = {B: RNG.normal(size=(2, 3)), H: RNG.normal(size=(3, 2))}
SENT = {n: a.astype(np.float32) for n, a in START.items()}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


def clients(cls, **settings):
    settings = {"lr": LR, "local_steps": STEPS, "batch_size": 64, "initial": SENT} | settings
    return [
        cls(Two(), share(x, torch.as_tensor(y)), client=i, **settings)
        for i, (x, y) in enumerate(DATA)
    ]


def ours(strategy, members, sampled=((0, 1, 2), (0, 1, 2))):
    """The server's arrays after each round, the clients training on what broadcast sends."""
    strategy.nodes = [Node(i, 50 + i) for i in range(3)]
    shared = {n: a for n, a in SENT.items() if not type(members[0]).is_personal(n)}
    arrays, found = strategy.initialize(shared), []
    for number, chosen in enumerate(sampled, 1):
        strategy.now.number = number
        sent = strategy.broadcast(arrays, [strategy.nodes[i] for i in chosen])
        replies = []
        for node, payload in sent.items():
            reply, n, metrics = members[node.client].train(payload, strategy.message_config())
            replies.append(update(node.client, reply, n, **metrics))
        arrays = strategy.aggregate(arrays, replies)
        found.append(arrays)
    return found


def risk(w, x, y):
    z = x @ w[B].T @ w[H].T
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


def gradient(w, x, y):
    z = x @ w[B].T @ w[H].T
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return {H: p.T @ (x @ w[B].T) / len(y), B: (p @ w[H]).T @ x / len(y)}


def descend(w, i, extra=lambda w: dict.fromkeys(w, 0.0), names=(B, H), steps=STEPS):
    """`steps` of w ← w − η(∇L_i(w) + extra(w)) on the arrays of `names`."""
    for _ in range(steps):
        g, e = gradient(w, *DATA[i]), extra(w)
        w = {n: w[n] - LR * (g[n] + e[n]) if n in names else w[n] for n in w}
    return w


def average(models, weights):
    return {n: np.average([m[n] for m in models], axis=0, weights=weights) for n in models[0]}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=2e-5, err_msg=name)


def test_the_reference_gradient_is_that_of_finite_differences():
    g = gradient(START, *DATA[1])
    for name, array in START.items():
        for at in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[at] = 1e-6
            up, down = ({**START, name: array + s * step} for s in (1, -1))
            numeric = (risk(up, *DATA[1]) - risk(down, *DATA[1])) / 2e-6
            assert g[name][at] == pytest.approx(numeric, abs=1e-7)


def test_fedavg_with_momentum_and_weight_decay():
    """v ← 0.5 v + ∇L + 0.1 w, w ← w − η v, v fresh each round; then Σ n_i w_i / Σ n."""
    w = START
    found = ours(FedAvg(), clients(Client, momentum=0.5, weight_decay=0.1))
    for round_ in range(ROUNDS):
        models = []
        for i in range(3):
            y, v = dict(w), dict.fromkeys(w, 0.0)
            for _ in range(STEPS):
                g = gradient(y, *DATA[i])
                v = {n: 0.5 * v[n] + g[n] + 0.1 * y[n] for n in y}
                y = {n: y[n] - LR * v[n] for n in y}
            models.append(y)
        w = average(models, SIZES)
        assert_same(found[round_], w)


def test_fedprox():
    """∇L(y) + μ(y − w) + 0.1 y."""
    w, mu = START, 0.7
    found = ours(FedAvg(), clients(FedProxClient, mu=mu, weight_decay=0.1))
    for round_ in range(ROUNDS):
        models = [
            descend(w, i, lambda y, w=w: {n: mu * (y[n] - w[n]) + 0.1 * y[n] for n in y})
            for i in range(3)
        ]
        w = average(models, SIZES)
        assert_same(found[round_], w)


@pytest.mark.parametrize("length", [{}, {"local_epochs": STEPS, "local_steps": 20}])
def test_scaffold_with_partial_participation(length):
    """Clients 0 and 2, then 1 and 2, of N = 3: y ← y − η(∇L − c_i + c), K times, however K is set;
    c_i⁺ = c_i − c + (x − y)/(Kη); x ← x + 1.5·mean(y − x); c ← c + ⅔·mean(c_i⁺ − c_i)."""
    sampled = ((0, 2), (1, 2))
    found = ours(Scaffold(server_lr=1.5), clients(ScaffoldClient, **length), sampled)
    zero = {n: np.zeros_like(a) for n, a in START.items()}
    x, c, own = START, zero, [zero, zero, zero]
    for round_, chosen in enumerate(sampled):
        moves, changes = [], []
        for i in chosen:
            y = descend(x, i, lambda y, i=i, c=c: {n: c[n] - own[i][n] for n in y})
            plus = {n: own[i][n] - c[n] + (x[n] - y[n]) / (STEPS * LR) for n in x}
            moves.append({n: y[n] - x[n] for n in x})
            changes.append({n: plus[n] - own[i][n] for n in x})
            own[i] = plus
        x = {n: x[n] + 1.5 * (moves[0][n] + moves[1][n]) / 2 for n in x}
        c = {n: c[n] + 2 / 3 * (changes[0][n] + changes[1][n]) / 2 for n in c}
        assert_same(found[round_], x | {f"control/{n}": a for n, a in c.items()})


def simplex(v, mass=1.0):
    """The nearest point of {λ ≥ 0, Σλ = mass}: max(v − θ, 0), θ by bisection."""
    low, high = v.min() - mass, v.max()
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(v - theta, 0).sum() > mass else (low, theta)
    return np.maximum(v - theta, 0)


def test_afl():
    """w ← Σ λ_i w_i with λ = ⅓ at first, then λ ← Π(λ + γ L(w)) at the w that was sent."""
    gamma, mixture, w = 0.4, np.full(3, 1 / 3), START
    strategy = AFL(mixture_lr=gamma)
    found = ours(strategy, clients(AFLClient))
    for round_ in range(ROUNDS):
        models = [descend(w, i) for i in range(3)]
        risks = np.array([risk(w, *DATA[i]) for i in range(3)])
        w, mixture = average(models, mixture), simplex(mixture + gamma * risks)
        assert_same(found[round_], w)
    assert [strategy.mixture[i] for i in range(3)] == pytest.approx(mixture.tolist())
    assert np.ptp(mixture) > 0.05  # the clients' weights do differ


def test_fedgma():
    """Entries on whose sign the three agree move by η_g·mean Δ, the others by a third of it."""
    w, eta = START, 1.5
    found = ours(FedGMA(server_lr=eta, agreement=0.5), clients(Client))
    for round_ in range(ROUNDS):
        deltas = [{n: a - w[n] for n, a in descend(w, i).items()} for i in range(3)]
        step = {}
        for name in w:
            one, two, three = (d[name] for d in deltas)
            agree = (np.sign(one) == np.sign(two)) & (np.sign(two) == np.sign(three))
            step[name] = np.where(agree, 1, 1 / 3) * (one + two + three) / 3
            assert agree.any() and not agree.all()
        w = {n: w[n] + eta * step[n] for n in w}
        assert_same(found[round_], w)


@pytest.mark.parametrize("cls", [FedPerClient, FedRepClient])
def test_fedper_and_fedrep(cls):
    """The head stays: FedPer trains both at once, FedRep the head for 2 epochs, then the body."""
    settings = {"head_epochs": 2} if cls is FedRepClient else {}
    found = ours(FedAvg(), clients(cls, **settings))
    body, heads = START[B], [START[H]] * 3
    for round_ in range(ROUNDS):
        bodies = []
        for i in range(3):
            w = {B: body, H: heads[i]}
            if cls is FedRepClient:
                w = descend(descend(w, i, names=(H,), steps=2), i, names=(B,))
            else:
                w = descend(w, i)
            bodies.append({B: w[B]})
            heads[i] = w[H]
        body = average(bodies, SIZES)[B]
        assert_same(found[round_], {B: body})


def test_lg_fedavg():
    """One round of FedAvg; from then on the heads alone are averaged, each trained on the body that
    its client keeps and trains further."""
    members = clients(LGFedAvgClient)
    found = ours(LGFedAvg(fedavg_rounds=1), members, [(0, 1, 2)] * 4)
    first = average([descend(START, i) for i in range(3)], SIZES)
    assert_same(found[0], first)
    bodies, head = [first[B]] * 3, first[H]
    for round_ in (1, 2, 3):
        w = [descend({B: bodies[i], H: head}, i) for i in range(3)]
        bodies, head = [one[B] for one in w], average(w, SIZES)[H]
        assert_same(found[round_], {B: first[B], H: head})


def test_pfedme():
    """λ = 2, two inner steps of rate 0.1 from where θ is, η = 0.2, β = 0.6, three batches."""
    lam, rate, beta, w = 2.0, 0.1, 0.6, START
    members = clients(PFedMeClient, penalty=lam, inner_steps=2, personal_lr=rate)
    found = ours(PFedMe(server_beta=beta), members)
    for round_ in range(ROUNDS):
        local, personal = [], []
        for i in range(3):
            theta, mine = w, w
            for _ in range(STEPS):
                for _ in range(2):
                    g = gradient(theta, *DATA[i])
                    theta = {
                        n: theta[n] - rate * (g[n] + lam * (theta[n] - mine[n])) for n in theta
                    }
                mine = {n: mine[n] - LR * lam * (mine[n] - theta[n]) for n in mine}
            local.append(mine)
            personal.append(theta)
        mean = average(local, [1, 1, 1])
        w = {n: (1 - beta) * w[n] + beta * mean[n] for n in w}
        assert_same(found[round_], w)
    for member, theta in zip(members, personal, strict=True):
        assert_same(member.state, {f"theta/{n}": a for n, a in theta.items()})


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Client, {"lr": 0.0}),
        (FedProxClient, {"lr": 0.0, "mu": 3.0}),
        (ScaffoldClient, {"lr": 1e-9}),
        (AFLClient, {"lr": 0.0}),
        (FedPerClient, {"lr": 0.0}),
        (FedRepClient, {"lr": 0.0, "head_epochs": 2}),
        (LGFedAvgClient, {"lr": 0.0}),
        (PerFedAvgClient, {"lr": 0.0, "inner_lr": 0.0}),
        (PFedMeClient, {"lr": 0.0, "personal_lr": 1e-9}),
    ],
)
def test_the_reported_loss_is_the_mean_over_the_batches(cls, settings):
    """Without a step to speak of it is L_i(w) in every batch of all the samples; the reply has
    the client's sample count."""
    for i, client in enumerate(clients(cls, **settings)):
        control = {f"control/{n}": np.zeros_like(a) for n, a in SENT.items()}
        sent = SENT | (control if cls is ScaffoldClient else {})
        _, n, metrics = client.train(sent, {"server-round": 1})
        assert metrics["loss"] == pytest.approx(risk(START, *DATA[i]), rel=1e-5)
        assert n == SIZES[i]
