"""FedTTA: steps, losses and the meta-gradient by hand; networks with buffers."""

import math

import numpy as np
import pytest
import torch
from small_runs import share
from torch import nn

from clients.core.client import Client
from clients.methods._divergence import kl_categorical
from clients.methods.fedtta import (
    FedTTAClient,
    FedTTAPlusPlusClient,
    FedTTAProxClient,
    GuardedFedTTAPlusPlusClient,
    Step,
)
from clients.models import build_model
from clients.models.adaptable import Adaptable, Adaptation
from partitions.datasets.loading import Info
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import Samples, Share
from strategies.core.replies import Node, Update
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedtta import FedTTA


def samples_of(x, y):
    return Samples(x, y, torch.arange(len(y)), scale=1.0)


def samples(n, dim=3, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator)
    return samples_of(x, torch.randint(classes, (n,), generator=generator))


def doubles(n):
    x, y = samples(n)[:]
    return x.double(), y


def make_share(train, novel=False):
    return Share(train=train, validation=train, test=None, everything=train, novel=novel)


def network(*layers, classes=4, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = nn.Sequential(nn.Linear(3, 5), *layers, nn.Linear(5, classes))
        return Adaptable(base, Adaptation(classes, 6))


def line(*, w, a):
    """f(x) = w x and g(z) = a·z, for one-dimensional inputs and two classes."""
    base, adaptation = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        base.weight.copy_(torch.tensor(w)[:, None])
        adaptation.weight.copy_(torch.tensor(a)[None])
    return Adaptable(base, adaptation)


ONE = samples_of(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))


def test_one_sample_by_hand():
    """x = 1, y = 0, w = (2, 1), a = (1, −1), η_inner = ½, batch size 1.

    ℓ_per = |a·w| = 1, ∇_w ℓ_per = a, ψ̃ = w − a/2 = (1.5, 1.5), so CE = ln 2 and its gradient at
    ψ̃ is p − y = (−½, ½). sign(a·w)·a does not depend on w: ∇_w L = (−½, ½). dψ̃/da = −½:
    ∇_a L = (¼, −¼)."""
    client = FedTTAClient(line(w=[2.0, 1.0], a=[1.0, -1.0]), make_share(ONE), batch_size=1)
    loss = client.loss(*ONE[:])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert client.base.weight.grad.flatten().tolist() == pytest.approx([-0.5, 0.5])
    assert client.adaptation.weight.grad.flatten().tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("direction", ["student-teacher", "teacher-student"])
def test_equation_13_by_hand(direction):
    """x = 1, y = 0, w = (ln 3, 0), a = (1, −1), η_inner = ½ ln 3, so that ψ̃ = (½ ln 3, ½ ln 3):
    CE = ln 2 with the gradient (−½, ½). p = (¾, ¼), the server's q = (½, ½), μ = 0.7.

    As printed KL(p‖q) = ¾ ln 1.5 + ¼ ln ½, and ∂KL(p‖q)/∂z_k = p_k (ln(p_k/q_k) − KL): with
    ln 1.5 − ln ½ = ln 3 that is ±(3/16) ln 3. The reverse is KL(q‖p) = ½ ln ⅔ + ½ ln 2, and
    ∂KL(q‖p)/∂z = p − q = (¼, −¼)."""
    client = FedTTAClient(
        line(w=[0.0, 0.0], a=[1.0, -1.0]), make_share(ONE), mu=0.7, inner_lr=math.log(3) / 2,
        batch_size=1, kl_direction=direction,
    )  # fmt: skip
    client.keep_server()
    with torch.no_grad():
        client.base.weight.copy_(torch.tensor([[math.log(3)], [0.0]]))
    loss = client.loss(*ONE[:])
    loss.backward()
    if direction == "student-teacher":
        kl_, slope = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 3 / 16 * math.log(3)
    else:
        kl_, slope = 0.5 * math.log(2 / 3) + 0.5 * math.log(2), 0.25
    assert loss.item() == pytest.approx(math.log(2) + 0.7 * kl_, rel=1e-5)
    gradient = client.base.weight.grad.flatten().tolist()
    assert gradient == pytest.approx([-0.5 + 0.7 * slope, 0.5 - 0.7 * slope], rel=1e-5)


THREE = torch.tensor([[1.0], [2.0], [3.0]])


@pytest.mark.parametrize("passes", [1, 3, 100])
@pytest.mark.parametrize("clip", [0.0, 1.0, 9.0])
def test_a_step_over_unequal_batches_by_hand(clip, passes):
    """x = 1, 2, 3 in batches of two, w = (2, 1), a = (1, −1): g_j = x_j, and the mean of
    ‖(1, 2)‖ = √5 and ‖(3)‖ = 3 is ℓ_per = (√5 + 3)/2 with the gradient ℓ_per·a, of norm √2 ℓ_per.

    A step of η = 0.1 with the weight decay 0.5 leads to w − 0.1 (ℓ_per·a + 0.5 w), clipped at 1 to
    w − 0.1 (a/√2 + 0.5 w); a bound of 9 is not reached. The logits differ by x_j, so the entropy
    is the mean of H(σ(x_j)). In batches of three ℓ_per is ‖(1, 2, 3)‖ = √14."""
    client = FedTTAClient(
        line(w=[2.0, 1.0], a=[1.0, -1.0]), make_share(ONE), inner_lr=0.1, weight_decay=0.5,
        inner_loss="batches", batch_size=2, adapt_clip_norm=clip, adapt_batch_size=passes,
    )  # fmt: skip
    before, after = client.steps(THREE, 1)
    ell = (5**0.5 + 3) / 2
    assert before.personalization == pytest.approx(ell)
    sure = 1 / (1 + np.exp([-1, -2, -3]))
    entropy = -np.mean(sure * np.log(sure) + (1 - sure) * np.log(1 - sure))
    assert before.entropy == pytest.approx(entropy, rel=1e-5)
    assert next(client.steps(THREE, 0, 3)).personalization == pytest.approx(14**0.5)
    length = 1 / 2**0.5 if clip == 1 else ell
    expected = [2 - 0.1 * (length + 1.0), 1 - 0.1 * (-length + 0.5)]
    assert after.parameters["weight"].flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_trained_step_on_a_short_batch_by_hand():
    """One of two samples, x = 3: ‖g‖ = |3 (w₁ − w₂)| as it is, or times √(2/1). With the weight
    decay 0.5 and η = 0.1: ψ̃ = w − 0.1 (‖g‖·a + 0.5 w), and f(3; ψ̃) = 3 ψ̃."""
    for inner_loss, length in (("batches", 3.0), ("whole", 3 * 2**0.5)):
        client = FedTTAClient(
            line(w=[2.0, 1.0], a=[1.0, -1.0]), make_share(ONE), inner_lr=0.1, weight_decay=0.5,
            inner_loss=inner_loss, batch_size=2,
        )  # fmt: skip
        adapted = client.adapt(THREE[2:])[1].flatten().tolist()
        expected = [3 * (2 - 0.1 * (length + 1.0)), 3 * (1 - 0.1 * (-length + 0.5))]
        assert adapted == pytest.approx(expected, rel=1e-5)


def test_momentum_of_the_adaptation_model_alone():
    """Two steps under gradients that do not change, g = (1, −1): φ moves by η g and η (1 + m) g,
    ψ by η_outer g twice. With y = 0 and w = (0, 0), g(z) = a·z with a = 0 leaves ψ̃ = ψ; so CE's
    gradient is set by hand."""
    model = line(w=[0.0, 0.0], a=[0.0, 0.0])
    client = FedTTAClient(
        model, make_share(ONE), lr=0.1, adapt_lr=0.01, adapt_momentum=0.9, clip_norm=0.0,
        local_steps=2, batch_size=1,
    )  # fmt: skip

    def loss(x, y):
        z = model.base.weight.flatten() + model.adaptation.weight.flatten()
        return z[0] - z[1]

    client.loss = loss
    client.fit_locally({})
    assert model.base.weight.flatten().tolist() == pytest.approx([-0.2, 0.2])
    assert model.adaptation.weight.flatten().tolist() == pytest.approx([-0.029, 0.029])


def test_the_two_networks_have_draws_of_their_own():
    """g's first weights are not f's first draws, scaled by the two layers' widths."""
    info = Info("test", (4,), 4, "")
    base = build_model("mlp", (4,), 4, seed=0)
    model = FedTTAClient.build_network(base, info, seed=0)
    f, g = model.base.layers[0].weight.flatten(), model.adaptation[0].weight.flatten()
    assert abs(np.corrcoef(f[:128].detach(), g.detach())[0, 1]) < 0.5
    other = FedTTAClient.build_network(base, info, seed=1)
    assert not torch.equal(other.adaptation[0].weight, model.adaptation[0].weight)


def test_kl_by_hand():
    """p = (¾, ¼), q = (½, ½): KL(p‖q) = ¾ ln 1.5 + ¼ ln ½; KL(q‖p) = ½ ln ⅔ + ½ ln 2. A second
    sample whose p and q are the same halves the mean."""
    p, q = (
        torch.tensor([[3.0, 1.0], [1.0, 4.0]]).log(),
        torch.tensor([[1.0, 1.0], [1.0, 4.0]]).log(),
    )
    assert kl_categorical(p, q).item() == pytest.approx(
        (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    )
    assert kl_categorical(q, p).item() == pytest.approx(
        (0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2
    )


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize(
    "layers",
    [lambda: (), lambda: (nn.BatchNorm1d(5),), lambda: (nn.LayerNorm(5),)],
    ids=["plain", "batchnorm", "layernorm"],
)
def test_the_meta_gradient_equals_central_differences(layers, mu):
    """∂L/∂ψ and ∂L/∂φ of every parameter, in float64, relative error < 1e-5."""
    x, y = doubles(6)
    model = network(*layers(), nn.Tanh()).double()
    client = FedTTAClient(model, make_share(ONE), mu=mu, batch_size=8)
    client.model.train()
    client.keep_server()
    with torch.no_grad():  # away from the server's model, or the KL term has no gradient
        for p in client.base.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    client.loss(x, y).backward()
    eps = 1e-6
    for p in client.model.parameters():
        numeric = torch.zeros_like(p)
        for i in range(p.numel()):
            values = []
            for sign in (1, -1):
                p.data.view(-1)[i] += sign * eps
                values.append(client.loss(x, y).item())
                p.data.view(-1)[i] -= sign * eps
            numeric.view(-1)[i] = (values[0] - values[1]) / (2 * eps)
        scale = max(numeric.norm().item(), 1e-3)
        assert (p.grad - numeric).norm().item() / scale < 1e-5


def test_first_order_keeps_the_adaptation_models_gradient_and_drops_the_curvature():
    """∂L/∂φ is that of second order; ∂L/∂ψ is the loss's gradient at ψ̃."""
    x, y = doubles(6)
    exact = FedTTAClient(network(nn.Tanh()).double(), make_share(ONE))
    cheap = FedTTAClient(network(nn.Tanh()).double(), make_share(ONE), first_order=True)
    for client in (exact, cheap):
        client.loss(x, y).backward()
    for a, b in zip(exact.adaptation.parameters(), cheap.adaptation.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    steps = torch.autograd.grad(exact.personalization(exact.base(x)), list(exact.base.parameters()))
    moved = network(nn.Tanh()).double()
    with torch.no_grad():
        for p, step in zip(moved.base.parameters(), steps, strict=True):
            p.sub_(0.5 * step)
    nn.functional.cross_entropy(moved(x), y).backward()
    for a, b in zip(moved.base.parameters(), cheap.base.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert any(
        not torch.allclose(a.grad, b.grad)
        for a, b in zip(exact.base.parameters(), cheap.base.parameters(), strict=True)
    )


def updates(make, strategy, arrays):
    clients = [make(i) for i in range(3)]
    for round_ in (1, 2):
        replies = []
        for i, client in enumerate(clients):
            sent, n, metrics = client.train(arrays, {"server-round": round_})
            replies.append(Update(Node(i, 50 + i), sent, n, metrics))
        arrays = strategy.aggregate(arrays, replies)
    return arrays


def test_without_inner_step_and_clipping_it_is_fedavg_bit_for_bit():
    options = {"lr": 0.1, "local_steps": 4, "batch_size": 5}

    def base(i):
        return Client(network(nn.ReLU()).base, make_share(samples(20, seed=i)), client=i, **options)

    def meta(i):
        data = make_share(samples(20, seed=i))
        own = {"inner_lr": 0.0, "clip_norm": 0.0} | options
        return FedTTAClient(network(nn.ReLU()), data, client=i, **own)

    plain = updates(base, FedAvg(), base(0).initial)
    both = updates(meta, FedTTA(), meta(0).initial)
    assert plain.keys() == {n[5:] for n in both if n.startswith("base.")}
    for name, array in plain.items():
        assert np.array_equal(array, both[f"base.{name}"]), name
        assert not np.array_equal(array, base(0).initial[name])


def test_the_servers_mean_by_hand():
    """(1 + 4) / 2, whatever the sample counts are, or (9·1 + 1·4) / 10 by them."""
    replies = [
        Update(Node(i, 50 + i), {"w": np.float32([w])}, n, {})
        for i, (w, n) in enumerate([(1, 9), (4, 1)])
    ]
    assert FedTTA().aggregate({}, replies)["w"].tolist() == [2.5]
    by_samples = FedTTA(weighting="samples").aggregate({}, replies)["w"]
    assert by_samples.tolist() == pytest.approx([1.3])
    with pytest.raises(ValueError, match=r"'equal'.*uniform"):
        FedTTA(weighting="equal")


def test_each_network_is_clipped_apart():
    """Gradients (3, 4) and (0, 5) shrink to norm 1 each, (0, 0.5) stays."""
    client = FedTTAClient(line(w=[0.0, 0.0], a=[0.0, 0.0]), make_share(ONE), clip_norm=1.0)
    for length, shrunk in ((0.5, 0.5), (5.0, 1.0)):
        client.base.weight.grad = torch.tensor([[3.0], [4.0]])
        client.adaptation.weight.grad = torch.tensor([[0.0, length]])
        client.clip()
        assert client.base.weight.grad.flatten().tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
        assert client.adaptation.weight.grad[0].tolist() == pytest.approx([0.0, shrunk], rel=1e-5)


@pytest.mark.parametrize("batches", [100, 4])
def test_a_step_on_n_samples_is_the_step_that_was_meta_learnt(batches):
    """12 samples with batch size 12: `predict` gives f(x; ψ̃) of `adapt`, in one pass or three.
    Every sample twice: ‖g‖₂ grows by √2, the scale undoes it, the step stays the same."""
    x, _ = doubles(12)
    options = {"batch_size": 12, "adapt_batch_size": batches}
    client = FedTTAClient(network(nn.Tanh()).double(), make_share(ONE), **options)
    expected = client.adapt(x)[1].detach()
    torch.testing.assert_close(client.predict(x), expected)
    torch.testing.assert_close(client.predict(torch.cat([x, x])), torch.cat([expected, expected]))


def test_a_guarded_step_must_agree_with_the_first():
    """w = (1, −0.2), a = (1, −1): d = w₁ − w₂ = 1.2 goes by ∓2η = 1 a step: 0.2, then −0.8, which
    changes the prediction. Its entropy is lower, as |d| is larger, but the guard keeps step 1."""
    model = line(w=[1.0, -0.2], a=[1.0, -1.0])
    client = GuardedFedTTAPlusPlusClient(model, make_share(ONE), batch_size=1)
    z = client.predict(torch.ones(1, 1))[0]
    assert client.adaptation_metrics["adapt-steps"] == 1 and (z[0] - z[1]).item() == pytest.approx(
        0.2
    )


def test_agreement_by_hand():
    """Predictions 0, 1, 1, 0 after the first step and 0, 1, 0, 0 after another: three of four."""
    client = FedTTAPlusPlusClient(network(nn.ReLU(), classes=2), make_share(ONE))
    first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    later = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0], [9.0, 0.0]])
    client.intermediate_logits = {"one-step": first}
    for bound, expected in ((0.0, True), (0.75, True), (0.76, False), (1.0, False)):
        client.min_agreement = bound
        assert client.agrees(Step(2, {}, later, 0.0, 0.0)) is expected
    with pytest.raises(ValueError, match=r"min-agreement is 1\.5"):
        FedTTAClient(network(nn.ReLU()), make_share(ONE), min_agreement=1.5)


def test_which_step_is_kept_and_when_adapting_ends_by_hand():
    """Entropies 0.1, then 0.9, 0.8, 0.85, 0.7, 0.7, 0.75: with patience 2 step 3 is forgiven, for
    step 4 falls again; 5, a tie, and 6 are two in a row, so that 7 is never asked for. Step 4 is
    kept. With patience 1 step 3 is the end, and 2 is kept."""
    entropies = [0.1, 0.9, 0.8, 0.85, 0.7, 0.7, 0.75, 0.2]
    for patience, kept, taken in ((2, 4, 7), (1, 2, 4)):
        client = FedTTAPlusPlusClient(network(nn.ReLU()), make_share(ONE), patience=patience)
        asked = []

        def steps(x, count, asked=asked):
            for number, entropy in enumerate(entropies):
                asked.append(number)
                yield Step(number, {}, torch.full((1, 2), float(number)), 0.0, entropy)

        client.steps = steps
        assert client.predict(torch.ones(1, 3)).tolist() == [[kept, kept]]
        assert len(asked) == taken
        got = {"adapt-steps": kept, "entropy": entropies[kept], "entropy-before": 0.1}
        assert client.adaptation_metrics == got
        assert [client.intermediate_logits[n][0, 0] for n in ("base", "one-step")] == [0, 1]


def test_the_proxy_term_pulls_to_the_model_that_was_sent_this_round():
    """Not to a former round's; with μ = 0 there is no such term. It is nothing at first, where ψ
    is the server's, and normalises by the batch at hand as the student does."""
    client, free = (
        FedTTAClient(
            network(nn.BatchNorm1d(5), nn.Tanh()), make_share(samples(12)), mu=mu, local_steps=3
        )
        for mu in (5.0, 0.0)
    )
    for factor in (1.0, 2.0):
        sent = {n: a if a.dtype.kind == "i" else factor * a for n, a in client.initial.items()}
        reply, got = client.train(sent, {})[0], free.train(sent, {})[0]
        assert not np.allclose(reply["base.0.weight"], got["base.0.weight"])
        for name, parameter in client.server.named_parameters():
            assert np.array_equal(parameter.detach(), sent[f"base.{name}"])
        client.load(sent)
        free.load(sent)
        client.model.train()
        free.model.train()
        x, y = client.share.train[:]
        assert client.loss(x, y).item() == pytest.approx(free.loss(x, y).item(), rel=1e-5)


def test_adaptation_normalises_by_the_inputs_at_hand_and_leaves_the_model_alone():
    """As the training step does; what a client is served is a copy."""
    x, _ = samples(12)[:]
    client = FedTTAClient(network(nn.BatchNorm1d(5), nn.Tanh()), make_share(ONE), batch_size=12)
    client.base.train()
    expected = client.adapt(x)[1].detach()
    client.load(client.initial)
    assert client.predict(x).numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)
    moved = client.personal_model(x)[0].weight.detach()
    assert not np.array_equal(moved, client.initial["base.0.weight"])
    for name, tensor in client.model.state_dict().items():
        assert np.array_equal(tensor, client.initial[name]), name


def test_a_novel_client_without_labels_gets_predictions_and_no_accuracy():
    x, y = samples(9)[:]
    unlabeled = samples_of(x, torch.full_like(y, UNLABELED))
    client = FedTTAPlusPlusClient(network(nn.ReLU()), make_share(unlabeled, novel=True))
    loss, count, metrics = client.score(client.initial, {})
    assert (loss, count) == (0.0, 0)
    assert metrics.keys() == {"adapt-steps", "entropy", "entropy-before"}
    assert client.predict(x).shape == (9, 4)
    labeled = FedTTAPlusPlusClient(network(nn.ReLU()), make_share(samples_of(x, y), novel=True))
    got = labeled.score(labeled.initial, {})[2]
    assert {k: got[k] for k in metrics} == metrics  # labels reach the accuracies alone
    assert got.keys() - metrics.keys() == {"accuracy", "base-accuracy", "one-step-accuracy"}


class Counted(nn.Module):
    """Batch normalisation and dropout, as a target network may have them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(36, 4)

    def forward(self, x):
        return self.head(self.dropout(self.layers(x)))


def counted(**options):
    torch.manual_seed(0)
    model = Adaptable(Counted(), Adaptation(4, 6))
    own = {"local_steps": 3, "batch_size": 8, "lr": 0.1} | options
    data = share(torch.rand(20, 1, 8, 8), torch.arange(20) % 4, validation=range(20))
    return FedTTAProxClient(model, data, **own)


def test_buffers_and_dropout():
    """Running statistics count each mini-batch once; scoring draws nothing and changes nothing;
    training repeats exactly."""
    client = counted()
    arrays, config = client.initial, {"server-round": 1}
    reply = dict(zip(arrays, client.fit(list(arrays.values()), config)[0], strict=True))
    again = dict(zip(arrays, counted().fit(list(arrays.values()), config)[0], strict=True))
    assert all(np.array_equal(reply[name], again[name]) for name in arrays)
    assert reply["base.layers.1.num_batches_tracked"] == 3
    assert not np.array_equal(
        reply["base.layers.1.running_mean"], arrays["base.layers.1.running_mean"]
    )
    first = client.evaluate(list(reply.values()), config)
    assert client.evaluate(list(reply.values()), config) == first
    state = client.model.state_dict()
    assert all(np.array_equal(state[name].numpy(), reply[name]) for name in reply)


def test_a_single_sample_is_adapted_by_running_statistics():
    logits = counted().predict(torch.rand(1, 1, 8, 8))
    assert logits.shape == (1, 4) and logits.isfinite().all()
