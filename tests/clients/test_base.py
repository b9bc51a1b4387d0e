"""The client's base: one SGD step by hand, names, state, scoring."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.base import NAMES, UNLABELED, Client
from clients.fedper import FedPerClient
from clients.fedprox import FedProxClient
from clients.sgd import batches
from partitions.shares import Samples, Share


class Tiny(nn.Module):
    """Logits x·w (one feature, two classes), and a head that scales them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.body.weight.zero_()
            self.head.weight.copy_(torch.eye(2))

    def forward(self, x):
        return self.head(self.body(x))


def samples(x, y):
    return Samples(torch.tensor(x), torch.tensor(y), torch.arange(len(y)), scale=1.0)


def share(x=((1.0,), (2.0,)), y=(0, 1), novel=False):
    data = samples(x, y)
    return Share(data, data, None, data, novel)


def client(cls=Client, **options):
    settings = {"local_steps": 1, "batch_size": 2, "lr": 0.1}
    data = options.pop("share", share())
    return cls(Tiny(), data, **settings | options)


ZERO = {"body.weight": np.zeros((2, 1), np.float32), "head.weight": np.eye(2, dtype=np.float32)}


def test_one_step_of_sgd_by_hand():
    """At w = 0 both classes have probability ½, so dCE/dlogits is (−½, ½) for y = 0 and (½, −½)
    for y = 1. With x = 1 and 2: dL/dbody = mean(−½·1 + ½·2, ½·1 − ½·2) = (0.25, −0.25); the
    head's gradient is zero, since its input is. lr 0.1 gives body (−0.025, 0.025)."""
    arrays, n, metrics = client().train(ZERO, {})
    np.testing.assert_allclose(arrays["body.weight"], [[-0.025], [0.025]], atol=1e-7)
    np.testing.assert_allclose(arrays["head.weight"], np.eye(2), atol=1e-7)
    assert n == 2
    assert metrics["loss"] == pytest.approx(np.log(2))


def test_weight_decay_and_momentum_reach_sgd():
    """Two steps on x = 0: no gradient but weight decay 0.5 on the head I. v1 = 0.5, w1 = 0.95;
    v2 = 0.9·0.5 + 0.5·0.95 = 0.925, w2 = 0.95 − 0.0925 = 0.8575 on the diagonal."""
    still = client(share=share(x=((0.0,), (0.0,))), local_steps=2, momentum=0.9, weight_decay=0.5)
    arrays, _, _ = still.train(ZERO, {})
    np.testing.assert_allclose(np.diag(arrays["head.weight"]), 0.8575, atol=1e-6)


def test_fedprox_pulls_towards_the_server():
    """The second of two steps has the gradient of CE plus μ(w − w_server). With μ = 10 and
    lr 0.1 the proximal part alone takes the body back by all of its first step."""
    free = client(local_steps=2).train(ZERO, {})[0]["body.weight"]
    held = client(FedProxClient, local_steps=2, mu=10.0).train(ZERO, {})[0]["body.weight"]
    first = np.array([[-0.025], [0.025]], np.float32)
    np.testing.assert_allclose(free - held, first, atol=1e-6)


def test_fedprox_without_mu_is_fedavg():
    plain, _, _ = client(local_steps=5).train(ZERO, {"server-round": 2})
    prox, _, _ = client(FedProxClient, local_steps=5, mu=0.0).train(ZERO, {"server-round": 2})
    assert all(np.array_equal(plain[name], prox[name]) for name in plain)
    with pytest.raises(ValueError, match="mu is -1"):
        client(FedProxClient, mu=-1.0)


def test_personal_arrays_stay_and_persist():
    one = client(FedPerClient, share=share(x=((1.0,), (2.0,))), local_steps=3)
    shared = {"body.weight": np.array([[1.0], [0.5]], np.float32)}
    arrays, _, _ = one.train(shared, {})
    assert list(arrays) == ["body.weight"]
    head = one.state["personal/head.weight"]
    assert not np.array_equal(head, np.eye(2))
    again = client(FedPerClient)
    again.state = one.state
    again.load(shared)
    assert np.array_equal(again.model.head.weight.detach().numpy(), head)
    fresh = client(FedPerClient)
    fresh.load(shared)
    assert np.array_equal(fresh.model.head.weight.detach().numpy(), np.eye(2))


def test_fit_keeps_names_in_any_order_and_falls_back_to_the_models():
    arrays = list(reversed(ZERO.items()))
    config = {NAMES: "\n".join(name for name, _ in arrays)}
    values, _, metrics = client().fit([a for _, a in arrays], config)
    named = dict(zip(metrics[NAMES].split("\n"), values, strict=True))
    np.testing.assert_allclose(named["body.weight"], [[-0.025], [0.025]], atol=1e-7)
    stock, _, plain = client().fit(list(ZERO.values()), {})
    np.testing.assert_allclose(stock[0], [[-0.025], [0.025]], atol=1e-7)
    assert NAMES not in plain
    assert [a.shape for a in client().get_parameters({})] == [(2, 1), (2, 2)]


def test_load_refuses_unknown_names_and_shapes():
    with pytest.raises(ValueError, match=r"'nonsense'.*unknown"):
        client().load({"nonsense": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"body.weight.*\(1, 1\)"):
        client().load(ZERO | {"body.weight": np.zeros((1, 1), np.float32)})
    with pytest.raises(ValueError, match="1 arrays for 2 names"):
        client().fit([ZERO["body.weight"]], {})


def test_scores_count_labeled_samples_only():
    """Logits (x, 0): class 0 for x > 0, class 1 for x < 0. Of four labeled samples three are
    right; the fifth has no label."""
    data = share(x=((1.0,), (2.0,), (-1.0,), (-2.0,), (3.0,)), y=(0, 0, 1, 0, UNLABELED))
    arrays = ZERO | {"body.weight": np.array([[1.0], [0.0]], np.float32)}
    loss, n, metrics = client(share=data).score(arrays, {})
    assert (n, metrics["accuracy"]) == (4, 0.75)
    expected = np.mean([np.log1p(np.exp(-m)) for m in (1, 2, 1, -2)])
    assert loss == pytest.approx(expected, rel=1e-5)
    nothing = share(x=((1.0,),), y=(UNLABELED,), novel=True)
    assert client(share=nothing).score(arrays, {}) == (0.0, 0, {})


def test_rounds_and_clients_draw_other_batches_and_repeat_exactly():
    wide = share(x=tuple((float(i),) for i in range(50)), y=tuple([0, 1] * 25))

    def draw(number, server_round):
        one = client(share=wide, client=number, local_steps=4, batch_size=8)
        return torch.stack(list(one.rows({"server-round": server_round})))

    assert draw(0, 1).equal(draw(0, 1))
    assert not draw(0, 1).equal(draw(0, 2))
    assert not draw(0, 1).equal(draw(1, 1))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 9), st.integers(0, 3))
def test_batches_pass_over_all_samples(n, batch_size, steps, epochs):
    generator = torch.Generator().manual_seed(0)
    rows = batches(n, batch_size, steps=steps, epochs=epochs, generator=generator)
    drawn = torch.cat(list(rows)) if len(rows) else torch.empty(0)
    counts = np.bincount(drawn.int().numpy(), minlength=n)
    if epochs:
        assert (counts == epochs).all()
        assert all(len(r) <= batch_size for r in rows)
    else:
        assert [len(r) for r in rows] == [min(batch_size, n)] * steps
        assert counts.max() - counts.min() <= 1
