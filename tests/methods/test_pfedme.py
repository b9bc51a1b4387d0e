import numpy as np
import pytest
import torch
from small_runs import federate, share, states, update
from torch import nn

from clients.methods.pfedme import PFedMeClient
from strategies.methods.pfedme import PFedMe


class Squared(PFedMeClient):
    """½ mean (x·θ − y)², whose proximal point is (XᵀX/n + λI)⁻¹ (Xᵀy/n + λw)."""

    def loss(self, x, y):
        return (self.model(x)[:, 0] - y).square().mean() / 2


def scalar(**settings):
    """x = 1, y = 3: L(θ) = ½(θ − 3)²."""
    model = nn.Linear(1, 1, bias=False)
    return Squared(model, share(torch.ones(2, 1), torch.full((2,), 3.0)), **settings)


def w(value):
    return {"weight": np.array([[value]], np.float32)}


def test_inner_steps_converge_to_the_proximal_point():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    start, penalty = torch.randn(3, dtype=torch.float64), 2.0
    model = nn.Linear(3, 1, bias=False).double()
    client = Squared(model, share(x, y), penalty=penalty, inner_steps=400, personal_lr=0.1)
    client.solve(x, y, {"weight": start[None]})
    expected = torch.linalg.solve(
        x.T @ x / 6 + penalty * torch.eye(3), x.T @ y / 6 + penalty * start
    )
    torch.testing.assert_close(model.weight[0].detach(), expected, atol=1e-9, rtol=0)


def test_a_round_by_hand():
    """λ = 2, η = ¼, w = 1: θ = (3 + 2)/3 = 5/3, w → 1 − ¼·2·(1 − 5/3) = 4/3;
    then θ = (3 + 8/3)/3 = 17/9, w → 4/3 + ½·5/9 = 29/18."""
    client = scalar(lr=0.25, penalty=2.0, inner_steps=200, personal_lr=0.2, local_steps=2)
    reply, n, _ = client.train(w(1.0), {})
    assert n == 2 and reply.keys() == {"weight"}
    assert reply["weight"].item() == pytest.approx(29 / 18)
    assert client.state["theta/weight"].item() == pytest.approx(17 / 9)


def test_one_inner_step_by_hand():
    """From θ = w = 1: θ = 1 − 0.1·((1 − 3) + λ·0) = 1.2, then 1.2 − 0.1·(−1.8 + 2·0.2) = 1.34."""
    client = scalar(lr=0.5, penalty=2.0, inner_steps=2, personal_lr=0.1, local_steps=1)
    client.train(w(1.0), {})
    assert client.state["theta/weight"].item() == pytest.approx(1.34)


def test_inner_steps_clip_the_gradient_of_the_loss_and_not_the_pull():
    """As above with θ − 3 clipped to −1: 1 + 0.1 · 1 = 1.1, then 1.1 + 0.1 · (1 − 0.2) = 1.18."""
    client = scalar(
        lr=0.5, penalty=2.0, inner_steps=2, personal_lr=0.1, local_steps=1, local_clip_norm=1.0
    )
    client.train(w(1.0), {})
    assert client.state["theta/weight"].item() == pytest.approx(1.18)


def test_a_few_labels_find_the_point_near_the_servers_model():
    """λ = 1: two batches, and both pull to w = 1, not to where the first one has led."""
    client = scalar(penalty=1.0, inner_steps=200, personal_lr=0.2, local_steps=2)
    client.load(w(1.0))
    client.tune({})
    assert client.model.weight.item() == pytest.approx(2.0)
    assert not client.model.training


def test_the_personal_model_is_scored_and_a_new_client_scores_the_servers():
    x, y = torch.eye(2), torch.tensor([0, 1])
    client = PFedMeClient(nn.Linear(2, 2, bias=False), share(x, y, validation=[0, 1]))
    wrong = {"weight": np.array([[0, 1], [1, 0]], np.float32)}
    assert client.score(wrong, {})[2]["accuracy"] == 0.0
    client.state = {"theta/weight": np.eye(2, dtype=np.float32)}
    assert client.score(wrong, {})[2]["accuracy"] == 1.0


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 4.0), (0.5, 2.5), (2.0, 7.0)])
def test_server_by_hand(beta, expected):
    """w = 1, mean w_i = (2 + 6)/2 = 4, whatever the sample counts: (1 − β)·1 + β·4."""
    replies = [update(0, w(2.0), n=1), update(1, w(6.0), n=9)]
    after = PFedMe(server_beta=beta).aggregate(w(1.0), replies)
    assert after["weight"].item() == pytest.approx(expected)


def test_theta_survives_rounds_without_its_client():
    settings = {"method": "pfedme", "num-clients": 10, "fraction-train": 0.4}
    early = states(federate(**settings, rounds=1)[1], "pfedme")
    late = states(federate(**settings, rounds=2)[1], "pfedme")
    kept = [n for n in early if all((early[n][k] == late[n][k]).all() for k in early[n])]
    assert len(early) == 2 and kept and len(late) > 2


@pytest.mark.parametrize(("robust", "statistic"), [("none", 5.6), ("median", 6.0)])
def test_running_statistics_are_averaged_and_not_mixed(robust, statistic):
    """β = ½ mixes the weights alone: ½ · 1 + ½ · 6. Of 2, 6 and 6 from 1, 4 and 5 samples the
    statistics have the mean (2 + 54) / 10, the weights 14/3 and the median 6."""
    start = {"weight": np.ones(1, np.float32), "norm.running_mean": np.zeros(1, np.float32)}
    replies = [
        update(i, dict.fromkeys(start, np.full(1, value, np.float32)), n)
        for i, (value, n) in enumerate(((2, 1), (6, 4), (6, 5)))
    ]
    after = PFedMe(server_beta=0.5, robust=robust).aggregate(start, replies)
    middle = 6 if robust == "median" else 14 / 3
    assert after["weight"].item() == pytest.approx(0.5 + middle / 2)
    assert after["norm.running_mean"].item() == pytest.approx(statistic)
