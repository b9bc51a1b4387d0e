"""Every strategy with clients that nobody here wrote: it is what its page says that it is,
by numbers worked out here, or it stops in the first round and says what is missing.

The page's table is what this file finds. WRITE_PAGE=1 pytest -n0 tests/fedapps/test_foreign.py
writes it."""

import importlib
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from third_party_clients import SIZES, Noted, clients

import strategies
from clients.core.arrays import from_record
from fedapps.common.seeds import drawing, seed_of
from strategies.core.strategy import PersonalizedStrategy
from strategies.maths.hypernetwork import Hypernetwork

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "flower-app.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.S))


def is_strategy(name):
    """Whether the package offers a strategy of a method under this name."""
    offered = getattr(strategies, name)
    if not isinstance(offered, type) or offered is PersonalizedStrategy:
        return False
    return issubclass(offered, PersonalizedStrategy)


NAMES = [name for name in strategies.__all__ if is_strategy(name)]
WEIGHTS = {"float64": {i: n + 0.5 for i, n in enumerate(SIZES, 1)}}
ROUNDS = 2


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Clients by kind; the page's package has another name than in other tests."""
    root = tmp_path_factory.mktemp("foreign")
    (root / "their_app").mkdir()
    (root / "their_app" / "__init__.py").touch()
    for name in ("task.py", "client_app.py"):
        text = FILES[name].replace("my_app", "their_app")
        (root / "their_app" / name).write_text(text, "utf-8")
    sys.path.insert(0, str(root))
    task, app = (importlib.import_module(f"their_app.{name}") for name in ("task", "client_app"))
    yield clients(task, app.app)
    sys.path.remove(str(root))


def go(strategy, client_app, initial):
    grid = Noted.of(client_app)
    config = ConfigRecord({"epochs": 1})
    return strategy.start(grid, initial, num_rounds=ROUNDS, train_config=config), grid


# What the server makes of what came, in numpy: (arrays before, what came by node, weights) → after


def by_samples(_, came, weights):
    total = sum(weights.values())
    return {n: sum(weights[i] / total * came[i][n] for i in came) for n in came[1]}


def plain(before, came, _):
    return by_samples(before, came, dict.fromkeys(came, 1.0))


def mixed(before, came, weights):
    mean = plain(before, came, weights)
    return {n: 0.25 * before[n] + 0.75 * mean[n] for n in mean}


def masked(before, came, _):
    """FedGMA: τ = 0.8, hence entries on whose sign one of three disagrees are damped by 1/3."""
    after = {}
    for n, x in before.items():
        deltas = np.stack([came[i][n] - x for i in came])
        agreement = abs(np.sign(deltas).mean(0))
        after[n] = x + np.where(agreement >= 0.8, 1, agreement) * deltas.mean(0)
    return after


class Adam:
    """x ← x − lr m̂ / (√v̂ + 1e-8) with the gradient x − mean; NaN, which is not compared, where
    nobody changes anything, as Adam makes steps of what is lost in rounding."""

    def __init__(self):
        self.m, self.v, self.t = {}, {}, 0

    def __call__(self, before, came, weights):
        mean, after, self.t = plain(before, came, weights), {}, self.t + 1
        for n, x in before.items():
            g = x.astype(float) - mean[n]
            g[abs(g) < 1e-6] = np.nan
            self.m[n] = 0.9 * self.m.get(n, 0) + 0.1 * g
            self.v[n] = 0.999 * self.v.get(n, 0) + 0.001 * g**2
            rate = 0.01 / (1 - 0.9**self.t)
            after[n] = x - rate * self.m[n] / (np.sqrt(self.v[n] / (1 - 0.999**self.t)) + 1e-8)
        return after


def one_model(step):
    """Whether all nodes always have what `step` makes of what came in the round before."""

    def check(result, grid, initial, weights):
        now = step() if isinstance(step, type) else step
        arrays = from_record(initial)
        for round_ in range(1, ROUNDS + 1):
            for sent in grid.sent["train", round_].values():
                close(sent, arrays)
            arrays = now(sent, grid.came["train", round_], weights)
            for sent in grid.sent["evaluate", round_].values():
                close(sent, arrays)
        close(from_record(result.arrays), arrays)

    return check


def clouds(result, grid, initial, weights):
    """FedAMP: nodes get Σ_j ξ_ij w_j, ξ_ij = e^(−‖w_i − w_j‖² / 10) / 10, scaled where Σ > 1."""
    w = grid.came["train", 1]
    for i, sent in grid.sent["train", 2].items():
        d = {j: sum(((w[i][n] - w[j][n]) ** 2).sum() for n in w[i]) for j in w if j != i}
        xi = {j: np.exp(-d[j] / 10) / 10 for j in d}
        xi = {j: x / max(1, sum(xi.values())) for j, x in xi.items()}
        mine = 1 - sum(xi.values())
        close(sent, {n: mine * w[i][n] + sum(xi[j] * w[j][n] for j in xi) for n in w[i]})
    last = {f"{i}/{n}": a for i, came in grid.came["train", 2].items() for n, a in came.items()}
    start = {f"initial/{n}": a for n, a in from_record(initial).items()}
    close(from_record(result.arrays), start | last)


def generated(result, grid, initial, weights):
    """PFedHN, by torch's own SGD on mean_i ½‖θ̃_i − h(v_i)‖² for φ, its terms alone for v_i."""
    shapes = {n: a.shape for n, a in from_record(initial).items()}
    dtype = torch.from_numpy(next(iter(from_record(initial).values()))).dtype
    with drawing(seed_of(0, "hypernetwork")):
        h = Hypernetwork(shapes, 4, 8).to(dtype)
    v = {}
    for i in (1, 2, 3):
        draws = torch.Generator().manual_seed(seed_of(0, "embedding", i))
        v[i] = torch.nn.Parameter(torch.randn(4, generator=draws).to(dtype))
    optimizer = torch.optim.SGD(
        [*h.parameters(), *v.values()], 0.01, momentum=0.9, weight_decay=0.001
    )
    for round_ in range(1, ROUNDS + 1):
        models = {i: {n: t[0] for n, t in h(v[i][None]).items()} for i in v}
        losses = []
        for i, theta in models.items():
            close(grid.sent["train", round_][i], {n: t.detach() for n, t in theta.items()})
            came = grid.came["train", round_][i]
            losses += [((torch.as_tensor(came[n]) - t) ** 2).sum() / 2 for n, t in theta.items()]
        optimizer.zero_grad()
        sum(losses).backward()
        for parameter in h.parameters():
            parameter.grad /= 3
        torch.nn.utils.clip_grad_norm_([*h.parameters(), *v.values()], 50.0)
        optimizer.step()
    with torch.no_grad():
        for i, sent in grid.sent["evaluate", ROUNDS].items():
            close(sent, {n: t[0] for n, t in h(v[i][None]).items()})


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        known = np.asarray(expected[name])
        assert np.isnan(known).mean() < 0.9
        compared = np.where(np.isnan(known), known, array)
        np.testing.assert_allclose(compared, known, rtol=1e-3, atol=1e-5)


# By strategy: what it is with any client, its options, and the check of that.
SERVED = {
    "FedAvg": ("the mean, weighted by samples", {}, one_model(by_samples)),
    "PriorEM": ("FedAvg; its own clients correct predictions", {}, one_model(by_samples)),
    "FedTHE": ("FedAvg; its own clients mix two heads", {}, one_model(by_samples)),
    "FedGMA": ("the masked mean of the changes", {"agreement": 0.8}, one_model(masked)),
    "CentralAdam": ("Adam on the mean change", {"server_lr": 0.01}, one_model(Adam)),
    "PFedHN": (
        "a model for each client, from a hypernetwork",
        {"embedding_dim": 4, "hidden_dim": 8},
        generated,
    ),
}
LENIENT = {
    "AFL": ({}, one_model(plain)),
    "PFedMe": ({"server_beta": 0.75}, one_model(mixed)),
    "FedRep": ({}, one_model(by_samples)),
    "FedTTA": ({}, one_model(plain)),
    "FedAMP": ({}, clouds),
    "PFL": ({}, one_model(by_samples)),
    "PFLEnsemble": ({}, one_model(by_samples)),
    "PFLNearest": ({}, one_model(by_samples)),
    "PFedKM": ({"server_lr": 0.01, "sub_populations": 2}, one_model(Adam)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_is_what_the_page_says_or_stops(name, kinds):
    strategy, cells = getattr(strategies, name), []
    needs = strategy.requires
    for kind, (client_app, initial) in kinds.items():
        weights = WEIGHTS.get(kind, dict(enumerate(SIZES, 1)))
        if name in SERVED:
            _, options, check = SERVED[name]
            result, grid = go(strategy(evaluate_every=1, **options), client_app, initial)
            check(result, grid, initial, weights)
            own_metrics(result, grid, weights)
            cells.append("yes")
            continue
        grid = Noted.of(client_app)
        with pytest.raises((RuntimeError, ValueError)) as stopped:
            strategy().start(grid, initial, ROUNDS, train_config=ConfigRecord({"epochs": 1}))
        assert needs.usage in str(stopped.value) or "use FedAvg" in str(stopped.value)
        assert not {round_ for _, round_ in grid.sent} - {1}
        cells.append("stops")
        if name in LENIENT:
            options, check = LENIENT[name]
            result, grid = go(
                strategy(lenient=True, evaluate_every=1, **options), client_app, initial
            )
            check(result, grid, initial, weights)
        else:
            with pytest.raises(ValueError, match=f"{name} cannot be lenient"):
                strategy(lenient=True)
    what, more = SERVED[name][0] if name in SERVED else "", "–"
    if needs is not None:
        what = f"needs clients that {needs.behaviour}: `{needs.usage}`"
        more = needs.fallback or "–"
    check_row(name, f"| `{name}` | {' | '.join(cells)} | {what} | {more} |")


def check_row(name, row):
    """The page's row of a strategy; with WRITE_PAGE it is written."""
    lines = PAGE.read_text("utf-8").splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith(f"| `{name}` |"))
    if "WRITE_PAGE" in os.environ:
        lines[place] = row
        PAGE.write_text("\n".join(lines) + "\n", "utf-8")
    assert lines[place] == row


def own_metrics(result, grid, weights):
    """What clients tell comes back under their own names: the means by their weights."""
    for kind, got in (
        ("train", result.train_metrics_clientapp),
        ("evaluate", result.evaluate_metrics_clientapp),
    ):
        for round_, metrics in got.items():
            came = grid.got[kind, round_]
            names = set.intersection(*(set(one) for one in came.values())) - {"num-examples"}
            assert names >= ({"train_loss"} if kind == "train" else {"eval_acc"})
            for name in names:
                values = [came[i][name] for i in sorted(came)]
                expected = np.average(values, 0, [weights[i] for i in sorted(came)])
                assert metrics[name] == pytest.approx(expected)
