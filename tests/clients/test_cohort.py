"""Clients of a cohort come out as clients one after the other."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from small_runs import NEEDS, SMALL, share, wait
from torch import nn

from clients.core import cohort
from clients.core.client import Client
from clients.core.cohort import Cohort
from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.run import run_jobs
from fedapps.planning import make_jobs
from fedapps.serverapp import APPS, run


class Slope(nn.Module):
    """w·x, and a weight that no loss reaches."""

    def __init__(self, w=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))
        self.idle = nn.Parameter(torch.tensor([7.0]))

    def forward(self, x):
        return self.w * x[:, 0]


def half_square(z, y):
    return (z - y).square().mean() / 2


class Two(Client):
    """Client 0 takes two steps on one sample each, client 1 one step on both."""

    def __init__(self, w, client, **options):
        every = share(torch.tensor([[1.0], [2.0]]), torch.tensor([2.0, 1.0]))
        super().__init__(Slope(w), every, client=client, lr=0.2, **options)
        self.criterion = half_square

    def rows(self, config, *_):
        return [torch.tensor(each) for each in ([[0], [1]], [[0, 1]])[self.client]]


def test_two_clients_by_hand(monkeypatch):
    """Momentum 0.5, weight decay 0.1, rate 0.2; one of two steps, one of one step on two samples.

    First: x = 1, y = 2, w = 1: g = −1 + 0.1 = −0.9, w = 1.18; then x = 2, y = 1: the gradient is
    2·(2.36 − 1) = 2.72, g = −0.45 + 2.72 + 0.118 = 2.388, w = 1.18 − 0.4776 = 0.7024.
    Second: w = 0, x = 1 and 2, y = 2 and 1: (−2 − 2)/2 = −2, w = 0.4.
    Losses: (½·1 + ½·1.36²)/2 = 0.7124 and (½·4 + ½·1)/2 = 1.25."""
    clients = [
        Two(1.0, 0, momentum=0.5, weight_decay=0.1),
        Two(0.0, 1, momentum=0.5, weight_decay=0.1),
    ]
    for client in clients:
        client.share = clients[0].share
    done = watched(monkeypatch)
    run = Cohort(2).run([lambda c=client: c.fit_locally({}) for client in clients[::-1]])
    losses = [loss for loss, _ in run]
    assert done == [2]
    assert losses == pytest.approx([1.25, 0.7124])
    assert [c.model.w.item() for c in clients] == pytest.approx([0.7024, 0.4])
    assert [c.model.idle.item() for c in clients] == [7.0, 7.0]


def test_a_cohort_clips_each_clients_gradient(monkeypatch):
    """As above without momentum and decay, clipped to 1.
    First: the gradient −1 stays, w = 1.2; then 2 · (2.4 − 1) = 2.8 becomes 1, w = 1.0.
    Second: −2 becomes −1, w = 0.2."""
    clients = [Two(1.0, 0, local_clip_norm=1.0), Two(0.0, 1, local_clip_norm=1.0)]
    for client in clients:
        client.share = clients[0].share
    done = watched(monkeypatch)
    Cohort(2).run([lambda c=client: c.fit_locally({}) for client in clients])
    assert done == [2]
    assert [c.model.w.item() for c in clients] == pytest.approx([1.0, 0.2])
    assert [c.model.idle.item() for c in clients] == [7.0, 7.0]


def watched(monkeypatch):
    """The sizes of the stacks that are trained from now on."""
    done = []
    real = cohort.train_together

    def train_together(works):
        done.append(len(works))
        return real(works)

    monkeypatch.setattr(cohort, "train_together", train_together)
    return done


def results(method, size, **changes):
    """All arrays that a run ends with, and all numbers that it tells."""
    own = {"method": method, "num-clients": 10, "batch-size": 16, "short-batches": True}
    own |= {"partition.equal-sizes": False, "weight-decay": 0.01}
    config = SMALL | own | NEEDS.get(method, {}) | changes
    result = run(InProcessGrid.simulation(app, config, 10, size), config, "in-process")
    got = [
        {**result.train_metrics_clientapp[i], **result.evaluate_metrics_clientapp[i]}
        for i in (1, 2)
    ]
    return {n: a.numpy() for n, a in result.arrays.items()}, got


@pytest.mark.parametrize(
    ("method", "loops"),
    [
        ("fedprox", 1),
        ("scaffold", 1),
        ("fedrep", 2),
        ("odpfl-hn", 1),
        ("fedsr", 0),
        ("fedthe", 1),
        ("ditto", 2),
    ],
)
def test_a_cohort_gives_what_clients_in_turn_give(method, loops, monkeypatch):
    """Five clients train for two rounds, each in so many `loops` that a cohort shares."""
    alone, reported_alone = results(method, 1)
    done = watched(monkeypatch)
    warned = pytest.warns(
        UserWarning, match=f"{method}: stacked-clients=3 has no effect.*FedSRClient"
    )
    with nullcontext() if loops else warned:
        together, got = results(method, 3)
    assert sum(done) == 2 * 5 * loops
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    for round_, round_alone in zip(got, reported_alone, strict=True):
        assert round_.keys() == round_alone.keys()
        for key, value in round_alone.items():
            assert round_[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("method", ["fedprox", "scaffold"])
@pytest.mark.parametrize("kind", ["Frozen", "Tied"])
@pytest.mark.filterwarnings("error:clients train one by one")
def test_frozen_parameters_stay_and_tied_ones_are_one(method, kind, monkeypatch):
    monkeypatch.setenv(external_code.VARIABLE, f"networks_with_parts:{kind}")
    alone, _ = results(method, 1, model=f"networks_with_parts:{kind}")
    done = watched(monkeypatch)
    together, _ = results(method, 3, model=f"networks_with_parts:{kind}")
    assert sum(done) > 0
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_each_reads_its_own_tensors():
    """From w = 0, where the loss's gradient is −2, (w − near)²/2 with near = 1 adds −1."""

    class Near(Two):
        vmapped_tensors = ("near",)

        def loss(self, x, y):
            return super().loss(x, y) + (self.model.w - self.near[0]).square().sum() / 2

    clients = [Near(0.0, 1), Near(0.0, 1)]
    for client, near in zip(clients, (1.0, 0.0), strict=True):
        client.near = [torch.tensor([near]), torch.tensor([7.0])]
        client.share = clients[0].share
    Cohort(2).run([lambda c=client: c.fit_locally({}) for client in clients])
    assert [c.model.w.item() for c in clients] == pytest.approx([0.6, 0.4])


class Sets(Two):
    vmapped_tensors = ()

    def loss(self, x, y):
        self.last = x
        return super().loss(x, y)


class Reads(Two):
    vmapped_tensors = ()

    def loss(self, x, y):
        return super().loss(x, y) * (1 + self.client)


class ReadsModel(Two):
    vmapped_tensors = ()

    def __init__(self, w, client):
        super().__init__(w, client)
        self.model.factor = torch.tensor(1.0 + client)

    def loss(self, x, y):
        return super().loss(x, y) * self.model.factor


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Sets, "sets self.last"), (Reads, "reads self.client"), (ReadsModel, "self.model's factor")],
)
def test_a_loss_that_a_cohort_would_compute_wrongly_is_refused(kind, what):
    clients = [kind(0.0, 0), kind(0.0, 1)]
    clients[1].share = clients[0].share
    with pytest.raises(ValueError, match=rf"{kind.__name__}.loss .*{what}.*stacked-clients=1"):
        Cohort(2).run([lambda c=client: c.fit_locally({}) for client in clients])


def test_unlike_clients_do_not_share_a_stack(monkeypatch):
    """Other inputs (y = x·10: gradient −(10 + 40)/2), another rate, gradients changed by hand."""
    own_data, slow, stopped, plain = (Two(0.0, 1) for _ in range(4))
    own_data.share = share(torch.tensor([[1.0], [2.0]]), torch.tensor([10.0, 20.0]))
    slow.lr = 0.1
    slow.share = stopped.share = plain.share

    def stop():
        stopped.model.w.grad.zero_()

    done = watched(monkeypatch)
    tasks = [lambda c=client: c.fit_locally({}) for client in (own_data, slow, plain)]
    Cohort(4).run([lambda: stopped.fit_locally({}, adjust=stop), *tasks])
    weights = [c.model.w.item() for c in (own_data, slow, stopped, plain)]
    assert weights == pytest.approx([5.0, 0.2, 0.0, 0.4])
    assert done == [1, 1, 1]


class Unmapped(Slope):
    """Asks for a number, which `vmap` does not give."""

    def forward(self, x):
        return super().forward(x) if float(x.sum()) else x


def test_what_vmap_does_not_know_is_done_one_by_one():
    """w = 0.4 as above, for both."""
    clients = [Two(0.0, 1), Two(0.0, 1)]
    for client in clients:
        client.model, client.share = Unmapped(), clients[0].share
    with pytest.warns(UserWarning, match="one by one"):
        run = Cohort(2).run([lambda c=client: c.fit_locally({}) for client in clients])
    assert [loss for loss, _ in run] == pytest.approx([1.25, 1.25])
    assert [c.model.w.item() for c in clients] == pytest.approx([0.4, 0.4])


def test_clients_share_the_seconds_of_common_steps(monkeypatch):
    """The clock ticks once a look. Clients 0 and 1 work alone for a second before their common
    steps and for one after them; these take a second, and each client has half of it. The third
    one works for a second and takes no step."""
    ticks = iter(range(1000))
    monkeypatch.setattr(cohort.time, "monotonic", lambda: float(next(ticks)))
    clients = [Two(0.0, 1), Two(0.0, 1)]
    for client in clients:
        client.share = clients[0].share
    tasks = [lambda c=client: c.fit_locally({}) for client in clients]
    done = Cohort(3).run([*tasks, lambda: None])
    assert [seconds for _, seconds in done] == [2.5, 2.5, 1.0]


def test_what_others_draw_changes_nothing():
    """Each draws what it would alone, before and after its training."""

    def task(client):
        torch.manual_seed(client.seed)
        before = torch.rand(2)
        client.fit_locally({})
        return torch.cat([before, torch.rand(2)]).tolist()

    clients = [Two(0.0, 1, seed=seed) for seed in (5, 6, 7)]
    for client in clients:
        client.share = clients[0].share
    drawn = Cohort(3).run([lambda c=client: task(c) for client in clients])
    for client, (values, _) in zip(clients, drawn, strict=True):
        torch.manual_seed(client.seed)
        assert values == torch.rand(4).tolist()


def test_an_error_reaches_the_caller_and_ends_the_threads_of_the_others():
    def fail():
        raise ArithmeticError("spilt")

    threads = threading.enumerate()
    with pytest.raises(ArithmeticError, match="spilt"):
        Cohort(3).run([lambda: Two(0.0, 1).fit_locally({}), fail, lambda: None])
    wait(lambda: threading.enumerate() == threads, 60, lambda: str(threading.enumerate()))


def test_a_run_asks_for_its_cohort(tmp_path, monkeypatch):
    done = watched(monkeypatch)
    config = SMALL | {"stacked-clients": 2, "output-dir": str(tmp_path)}
    jobs = make_jobs(config, ["fedavg"], [0], tmp_path)
    with pytest.raises(ValueError, match="in-process, not ray"):
        run_jobs(jobs, "ray", APPS, follow=lambda _: None)
    run_jobs(jobs, "in-process", APPS, follow=lambda _: None)
    assert not jobs[0].error
    assert done == [2, 1, 2, 1]  # three clients train, in two rounds
