import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import share
from torch import nn

from clients.core.normalisation import batch_statistics, entropy, with_statistics
from clients.methods.shot import SHOTClient
from clients.methods.tent import TENTClient


def linear(w, **options):
    """f(x) = w x for one input and two classes."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(w, dtype=torch.float32)[:, None])
    return TENTClient(model, share(torch.ones(1, 1), [0]), **options)


def client(*layers, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 4))
        x = torch.randn(30, 3)
    novel = replace(share(x, torch.arange(30) % 4), novel=True)
    return TENTClient(model, novel, **options), x


def test_entropy_by_hand():
    """H(¾, ¼) = ln 4 − ¾ ln 3 and H(½, ½) = ln 2: their mean."""
    z = torch.tensor([[3.0, 1.0], [1.0, 1.0]]).log()
    expected = (math.log(4) - 0.75 * math.log(3) + math.log(2)) / 2
    assert entropy(z).item() == pytest.approx(expected)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_in_bits_with_weight_decay_by_hand(clip):
    """w = (ln 3, 0) at x = 1: p = (¾, ¼), ∂H/∂z_k = −p_k (ln p_k + H). In bits the gradient is
    ∓(3/16) ln 3 / ln 2, of norm √2 (3/16) ln 3 / ln 2, or 0.1 if clipped; a step of lr ½ also
    takes ½·0.2 w off."""
    options = {"adapt_steps": 1, "bits": True, "adapt_clip_norm": clip, "weight_decay": 0.2}
    tent = linear([math.log(3), 0.0], lr=0.5, **options)
    slope = 0.1 / 2**0.5 if clip else 3 / 16 * math.log(3) / math.log(2)
    expected = [math.log(3) * 0.9 + 0.5 * slope, -0.5 * slope]
    assert tent.predict(torch.ones(1, 1))[0].tolist() == pytest.approx(expected, rel=1e-4)
    assert tent.intermediate_logits["base"][0].tolist() == pytest.approx([math.log(3), 0.0])


def test_two_steps_by_hand_without_the_momentum_of_training():
    """z ← z + lr·p (ln p + H) at the p of each step; the first logits are those reported as
    the base model's, the entropy that of the last ones."""
    z = np.array([math.log(3), 0.0])
    tent = linear(z, lr=0.7, adapt_steps=2, momentum=0.9)
    first = z
    for _ in range(3):
        p = np.exp(z) / np.exp(z).sum()
        h = -(p * np.log(p)).sum()
        last, z = z, z + 0.7 * p * (np.log(p) + h)
    assert tent.predict(torch.ones(1, 1))[0].tolist() == pytest.approx(last.tolist())
    assert tent.intermediate_logits["base"][0].tolist() == pytest.approx(first.tolist())
    assert tent.adaptation_metrics == {"adapt-steps": 2, "entropy": pytest.approx(h)}
    served = tent.personal_model(torch.ones(1, 1)).weight.flatten().tolist()
    assert served == pytest.approx(last.tolist())
    assert tent.model.weight.flatten().tolist() == pytest.approx(first.tolist())


def test_a_served_network_normalises_by_the_statistics_of_the_inputs_it_adapted_to():
    """Their very mean and variance, which made the predictions, whatever the running ones were
    before; for a convolution's maps over all of their pixels."""
    tent, x = client(nn.BatchNorm1d(8), nn.ReLU(), adapt_steps=1)
    tent.model[1].running_mean += 3
    h = tent.model[0](x).detach()
    logits = tent.predict(x)
    served = tent.personal_model(x)
    norm = served[1]
    torch.testing.assert_close(served(x), logits)
    assert norm.running_mean.tolist() == pytest.approx(h.mean(0).tolist(), abs=1e-6)
    assert norm.running_var.tolist() == pytest.approx(h.var(0, correction=0).tolist(), rel=1e-5)
    maps = torch.arange(16.0).view(2, 1, 2, 4)  # 0 … 15: variance (16² − 1) / 12 = 21.25
    assert with_statistics(nn.BatchNorm2d(1), maps).running_var.item() == pytest.approx(21.25)


LAYERS = {
    "batchnorm": lambda: (nn.BatchNorm1d(8), nn.ReLU()),
    "layernorm": lambda: (nn.LayerNorm(8), nn.ReLU()),
    "rmsnorm": lambda: (nn.RMSNorm(8), nn.ReLU()),
    "dropout": lambda: (nn.ReLU(), nn.Dropout(0.5)),
    "none": lambda: (nn.ReLU(),),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("parameters", ["auto", "all"])
def test_which_parameters_adapt(layers, parameters):
    """Affine ones of normalisation layers where there are any, else all."""
    tent, _ = client(*LAYERS[layers](), parameters=parameters)
    whole = list(tent.model.parameters())
    if parameters == "auto" and layers in ("batchnorm", "layernorm", "rmsnorm"):
        expected = list(tent.model[1].parameters())
    else:
        expected = whole
    assert {id(p) for p in tent.trainable()} == {id(p) for p in expected}


@pytest.mark.parametrize("layers", LAYERS)
def test_adapting_lowers_entropy_and_leaves_the_model_as_it_was(layers):
    tent, x = client(*LAYERS[layers](), lr=0.05)
    before = {name: a.copy() for name, a in tent.initial.items()}
    logits = tent.predict(x)
    assert torch.equal(logits, tent.predict(x))
    unadapted = batch_statistics(tent.model)(x)
    assert entropy(logits) < entropy(unadapted)
    got = tent.score(before, {})
    after = tent.model.state_dict()
    assert all(np.array_equal(after[name].numpy(), before[name]) for name in before)
    assert tent.score(before, {}) == got


def test_a_single_sample_uses_the_running_statistics():
    tent, x = client(nn.BatchNorm1d(8), nn.ReLU())
    assert tent.predict(x[:1]).isfinite().all()


def test_tent_adapts_the_rest_where_normalisation_is_frozen():
    tent, _ = client(nn.BatchNorm1d(8), nn.ReLU())
    assert len(tent.trainable()) == 2
    tent.model[1].requires_grad_(False)
    assert [id(p) for p in tent.trainable()] == [id(p) for p in tent.model.parameters()]


def test_no_gradient_is_computed_for_parameters_that_stay():
    tent, x = client(nn.BatchNorm1d(8), nn.ReLU())
    computed = set()
    for name, parameter in tent.model.named_parameters():
        parameter.register_hook(lambda _, name=name: computed.add(name))
    tent.predict(x)
    assert computed == {"1.weight", "1.bias"}
    assert all(parameter.grad is None for parameter in tent.model.parameters())


class FixedBody(nn.Module):
    """Normalisation that is trained by name and by no gradient, as features often are."""

    def __init__(self, fixed=True):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.fixed = fixed

    def features(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.fixed):
            return self.norm(x)

    def forward(self, x):
        return self.head(self.features(x))


@pytest.mark.parametrize("kind", [TENTClient, SHOTClient])
def test_what_no_gradient_reaches_is_said_before_the_run(kind):
    """It predicted without a word as if it had adapted."""
    (line,) = kind.caveats(FixedBody(), parameters="auto", shape=(3,))
    assert line.startswith("no gradient reaches what would adapt (norm.weight, norm.bias)")
    assert kind.caveats(FixedBody(fixed=False), parameters="auto", shape=(3,)) == []
    frozen = FixedBody()
    frozen.norm.requires_grad_(False)
    assert kind.caveats(frozen, parameters="auto", shape=(3,)) == []


def test_all_parameters_that_adapt_need_no_gradient_each():
    assert TENTClient.caveats(FixedBody(), parameters="all", shape=(3,)) == []
