"""ODPFL-HN's client: one encoding in two passes, privacy of a novel client."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from clients.core.arrays import to_numpy
from clients.methods.odpfl_hn import DESCRIPTOR, ODPFLHNClient, noise_scale
from clients.models import build_model
from partitions.datasets.loading import Info
from partitions.shares import Samples, Share

INFO = Info("tiny", (6,), 3, "")
DIM = 4


def share(n=9, novel=False):
    generator = torch.Generator().manual_seed(1)
    samples = Samples(
        torch.rand(n, 6, generator=generator),
        torch.randint(3, (n,), generator=generator),
        torch.arange(n),
        scale=1.0,
    )
    return Share(samples, samples, None, samples, novel)


SIZES = {"num_clients": 20, "train_fraction": 0.5}


def client(encoder="ds", novel=False, double=False, n=9, **options):
    torch.manual_seed(0)
    target = build_model("mlp-small", (6,), 3, 0)
    model = ODPFLHNClient.build_network(target, INFO, encoder=encoder, descriptor_dim=DIM, **SIZES)
    if double:
        model.double()
        model.encoder.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    return ODPFLHNClient(model, share(n, novel), client=3, **options)


def gamma(of):
    return to_numpy(dict(of.model.encoder.named_parameters(prefix="encoder")))


@pytest.mark.parametrize("options", [{}, {"encode_samples": 5}, {"encode_batch_size": 4}])
@pytest.mark.parametrize("encoder", ["ds", "dss", "st", "ds-sphere"])
def test_backprop_is_the_gradient_of_this_rounds_encoding(encoder, options):
    """⟨g_γ, d⟩ against central differences of ⟨g_e, encode(γ + t d)⟩, for a random direction d.

    That also shows that both passes see the same inputs, where a random part of them is used."""
    one = client(encoder, double=True, **options)
    rng = np.random.default_rng(0)
    now, g_e, config = gamma(one), rng.normal(size=DIM), {"server-round": 7}
    g_gamma, _ = one.backprop(now | {DESCRIPTOR: g_e}, config)
    direction = {name: rng.normal(size=a.shape) for name, a in now.items()}

    def at(t):
        moved = {name: a + t * direction[name] for name, a in now.items()}
        return float(g_e @ one.encode(moved, config)[0][DESCRIPTOR])

    slope = (at(1e-8) - at(-1e-8)) / 2e-8
    assert sum((g_gamma[n] * direction[n]).sum() for n in now) == pytest.approx(slope, rel=1e-5)


def test_batched_encoding_of_a_mean_equals_the_encoding_in_one_pass():
    """Ten inputs in batches of 4, 3 and 3, which weigh by their sizes."""
    whole, batched = (client("ds-sphere", double=True, n=10, encode_batch_size=b) for b in (0, 4))
    e, b = (c.encode(gamma(c), {"server-round": 1})[0][DESCRIPTOR] for c in (whole, batched))
    np.testing.assert_allclose(b, e, rtol=1e-12)


def test_training_leaves_the_encoder_alone_and_replies_with_the_target_alone():
    one = client()
    sent = {n: a for n, a in one.initial.items() if n.startswith("target.")}
    reply, n, _ = one.train(sent, {"server-round": 1})
    assert reply.keys() == sent.keys()
    assert n == 9
    assert any((reply[name] != sent[name]).any() for name in sent)
    for name, array in gamma(one).items():
        np.testing.assert_array_equal(array, one.initial[name])


def test_the_encoder_is_fitted_by_clipped_steps_on_the_squared_distance():
    """‖g − e‖² before the first step is reported; that step's gradient, of a norm above 1, is
    clipped to 1, so that lr 0.25 moves γ by 0.25 in norm."""
    one = client(encoder_steps=1, encoder_local_lr=0.25)
    far = np.array([3.0, -2.0, 5.0, 0.0], np.float32)
    e = one.encode(gamma(one), {})[0][DESCRIPTOR]
    before = gamma(one)
    reply, _, metrics = one.train(one.initial | {DESCRIPTOR: far}, {})
    assert metrics["encoder-loss"] == pytest.approx(np.square(e - far).sum(), rel=1e-5)
    moved = sum(np.square(reply[n] - before[n]).sum() for n in before) ** 0.5
    assert moved == pytest.approx(0.25, rel=1e-3)


def test_a_training_client_describes_what_it_trains_on_and_a_novel_one_all_it_has():
    """In every round anew, where a part of the inputs is used."""
    got = {}
    for novel in (False, True):
        one = client("ds-sphere", novel=novel)
        every = one.share.everything
        one.share = replace(one.share, train=replace(every, index=every.index[:4]))
        got[novel] = one.encode(gamma(one), {})[0][DESCRIPTOR]
        one.encode_samples = 2
        e = [one.encode(gamma(one), {"server-round": r})[0][DESCRIPTOR] for r in (1, 1, 2)]
        assert (e[0] == e[1]).all() and (e[0] != e[2]).any()
        x = every[slice(None) if novel else slice(4)][0]
        with torch.no_grad():
            expected = one.encoder(x).numpy()
        assert got[novel] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_noise_is_that_of_the_inputs_that_were_described():
    """Five of nine: Δ = 2√d/5; and by hand at ε = ½, δ = 0.01: s = Δ·√(2 ln 125)/½."""
    one = client("ds-sphere", novel=True, descriptor_epsilon=0.5, encode_samples=5)
    sigma = one.encode(gamma(one), {})[1]["dp-sigma"]
    assert sigma == pytest.approx(2 * 2 / 5 * math.sqrt(2 * math.log(125)) / 0.5)


@pytest.mark.parametrize(("clients", "fraction", "dim"), [(30, 0.9, 7), (20, 0.5, 3), (8, 0.5, 1)])
def test_a_descriptor_has_a_quarter_of_the_training_clients_entries_rounded_up(
    clients, fraction, dim
):
    """⌈27/4⌉, ⌈10/4⌉, ⌈4/4⌉."""
    target = build_model("mlp-small", (6,), 3, 0)
    model = ODPFLHNClient.build_network(target, INFO, num_clients=clients, train_fraction=fraction)
    assert model.encoder.out.out_features == dim


def test_labels_play_no_part_in_the_descriptor():
    one, other = client(novel=True), client(novel=True)
    other.share.everything.y.fill_(0)
    np.testing.assert_array_equal(
        one.encode(gamma(one), {})[0][DESCRIPTOR], other.encode(gamma(other), {})[0][DESCRIPTOR]
    )


# Differential privacy


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 0.99])
def test_small_epsilon_is_the_classic_mechanism(epsilon):
    """s² = 2 Δ² ln(1.25/δ)/ε², with Δ = 0.5, δ = 0.01: s = 0.5·√(2·4.828314)/ε."""
    assert noise_scale(0.5, epsilon, 0.01) == pytest.approx(0.5 * 3.107512 / epsilon, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_large_epsilon_is_the_analytic_mechanism(epsilon):
    """δ = Φ(Δ/2s − εs/Δ) − e^ε Φ(−Δ/2s − εs/Δ), Balle and Wang, Theorem 8."""
    delta, ratio = 0.01, noise_scale(0.5, epsilon, 0.01) / 0.5
    found = norm.cdf(1 / (2 * ratio) - epsilon * ratio) - math.exp(epsilon) * norm.cdf(
        -1 / (2 * ratio) - epsilon * ratio
    )
    assert found == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_noise_has_the_scale_that_is_reported(epsilon):
    """Σ (noise/σ)² over 4 · 600 entries is χ² distributed; a two-sided test at 1e-6."""
    plain = client("ds-sphere", novel=True)
    private = client("ds-sphere", novel=True, descriptor_epsilon=epsilon, dp_generator="seeded")
    exact = plain.encode(gamma(plain), {})[0][DESCRIPTOR]
    replies = []
    for r in range(600):  # as many clients, each asked once
        private.state = {}
        replies.append(private.encode(gamma(private), {"server-round": r}))
    sigma = replies[0][1]["dp-sigma"]
    assert sigma == noise_scale(2 * DIM**0.5 / 9, epsilon, 0.01)
    noise = np.array([e[DESCRIPTOR] - exact for e, _ in replies], np.float64) / sigma
    low, high = chi2.ppf([5e-7, 1 - 5e-7], noise.size)
    assert low < np.square(noise).sum() < high
    assert abs(noise.mean()) < 5 / math.sqrt(noise.size)


def test_the_systems_noise_does_not_repeat_and_seeded_noise_does():
    def draws(kind):
        twins = [client("ds-sphere", novel=True, descriptor_epsilon=1.0, dp_generator=kind)] * 2
        got = []
        for one in twins:
            one.state = {}
            got.append(one.encode(gamma(one), {"server-round": 1})[0][DESCRIPTOR])
        return got

    assert (draws("system")[0] != draws("system")[1]).any()
    np.testing.assert_array_equal(*draws("seeded"))


def test_seeded_noise_is_each_clients_and_each_rounds_own():
    """The same inputs, in another order: without noise their descriptors are the same but for
    rounding."""
    answers = []
    for number, round_ in ((3, 1), (4, 1), (3, 2)):
        one = client("ds-sphere", novel=True, descriptor_epsilon=1.0, dp_generator="seeded")
        one.client = number
        answers.append(one.encode(gamma(one), {"server-round": round_})[0][DESCRIPTOR])
    assert all(np.abs(a - b).max() > 0.01 for a, b in itertools.combinations(answers, 2))


def scaled(factor):
    return {name: factor * array for name, array in gamma(client("ds-sphere")).items()}


def test_a_private_client_answers_one_encoder_and_always_alike():
    """Also in another round, on other rows, and as another object that found the state."""
    one = client("ds-sphere", novel=True, descriptor_epsilon=1.0, encode_samples=5)
    answers = [one.encode(gamma(one), {"server-round": r})[0][DESCRIPTOR] for r in (1, 2)]
    np.testing.assert_array_equal(*answers)
    later = client("ds-sphere", novel=True, descriptor_epsilon=1.0)
    later.state = one.state
    with pytest.raises(ValueError, match="has answered what descriptor-epsilon 1 and"):
        later.encode(scaled(2), {})
    np.testing.assert_array_equal(later.encode(gamma(one), {})[0][DESCRIPTOR], answers[0])
    later.share.everything.x[0] += 1  # an old answer would describe other data
    with pytest.raises(ValueError, match="or its data have changed"):
        later.encode(gamma(one), {})


def test_several_answers_share_one_budget():
    """Four answers at ε = 0.5, so Σ (Δ/σ)² is that of one: σ is doubled, √4. The fifth is refused,
    and so is any after the budget has been lowered."""
    options = {"novel": True, "descriptor_epsilon": 0.5}
    one = client("ds-sphere", **options, descriptor_answers=4)
    got = [one.encode(scaled(1 + k), {})[1]["dp-sigma"] for k in range(4)]
    assert got == pytest.approx([2 * noise_scale(2 * DIM**0.5 / 9, 0.5, 0.01)] * 4)
    assert one.encode(scaled(3), {})[1]["dp-sigma"] == got[2]
    with pytest.raises(ValueError, match="descriptor-answers 4 allow"):
        one.encode(scaled(9), {})
    lower = client("ds-sphere", **options | {"descriptor_epsilon": 0.4}, descriptor_answers=9)
    lower.state = one.state
    with pytest.raises(ValueError, match=r"descriptor-epsilon 0\.4"):
        lower.encode(scaled(9), {})


def test_training_clients_add_no_noise():
    plain, one = (client("ds-sphere", descriptor_epsilon=e) for e in (0.0, 0.1))
    np.testing.assert_array_equal(
        one.encode(gamma(one), {})[0][DESCRIPTOR], plain.encode(gamma(plain), {})[0][DESCRIPTOR]
    )


def test_a_private_novel_client_answers_nothing_that_its_budget_does_not_cover():
    """Whatever the server asks; a training client of the same run answers as always."""
    asked = ("train", "backprop", "domain")
    for novel in (True, False):
        one = client("ds-sphere", novel=novel, descriptor_epsilon=0.5)
        arrays = one.initial
        sent = {
            "train": {n: a for n, a in arrays.items() if n.startswith("target.")},
            "backprop": gamma(one) | {DESCRIPTOR: np.ones(DIM, np.float32)},
            "domain": {"weights": np.zeros((1, 7), np.float32)},
        }
        for action in asked:
            answer = partial(getattr(one, action), sent[action], {"side": 1.0})
            if novel:
                with pytest.raises(ValueError, match=r"descriptor-epsilon is 0\.5, and covers no"):
                    answer()
            else:
                answer()
        assert one.encode(gamma(one), {})[0].keys() == {DESCRIPTOR}


@pytest.mark.parametrize("encoder", ["ds", "dss", "st"])
def test_an_unbounded_encoder_is_refused(encoder):
    with pytest.raises(ValueError, match="no bounded sensitivity"):
        client(encoder, novel=True, descriptor_epsilon=1.0)
