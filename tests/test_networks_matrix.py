"""Every method on every kind of network: a run with checkpoints, a resumed run, and serving.

A method that cannot use a kind says so before the first round. All pairs, and on Ray, where all
runs end with the same bits: pytest -n0 -m slow tests/test_networks_matrix.py"""

import os
import shutil
from pathlib import Path

import networks_with_parts
import numpy as np
import pytest
import torch
from small_runs import FEWER, NEEDS, WEE, Watched, left, states

import fedapps
import partitions
from clients.core.arrays import from_record
from clients.methods.memo import MEMOClient
from clients.models.roles import roles_of
from fedapps.building import method_model
from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.engines.in_process_grid import InProcessGrid, Simulated
from fedapps.engines.ray_actors import Actors
from fedapps.engines.ray_engine import ray_cluster
from fedapps.engines.ray_grid import RayGrid
from fedapps.methods import METHODS
from fedapps.serverapp import load_client_app, run
from fedapps.settings.config import defaults
from strategies.core.strategy import PersonalizedStrategy

KINDS = ("Norm", "Dropout", "Frozen", "Tied", "Buffers", "Everything")
SMALL = defaults() | WEE | FEWER
SMALL |= {"num-clients": 4, "rounds": 2, "local-steps": 2, "evaluate-every": 2}
SMALL |= {"checkpoint-every": 1, "lg-fedavg.fedavg-rounds": 1, "batch-size": 16}
NORMED = ("fedbn", "bn-adapt")
REFUSED = {(m, kind): f"{m} needs .*{kind}" for m in NORMED for kind in KINDS[1:5]} | {
    ("fedma", "Norm"): "fedma matches .*'norm'",
    ("fedma", "Frozen"): "fedma permutes .*'first.bias'",
    ("fedma", "Tied"): "fedma permutes .*'third.weight'",
    ("fedma", "Buffers"): "fedma matches .*'gain'",
    ("fedma", "Everything"): "fedma permutes .*'third.weight'",
}
# Each part alone with a few methods, all parts together with every method that takes them.
ALONE = ("fedavg", "pfedhn", "fedtta++")
QUICK = REFUSED.keys() | {(m, kind) for m in ALONE for kind in KINDS} | {("fedma", "Dropout")}
QUICK |= {(method, "Everything") for method in METHODS}
PAIRS = [
    pytest.param(method, kind, marks=() if (method, kind) in QUICK else pytest.mark.slow)
    for method in METHODS
    for kind in KINDS
]
TIED_HEADS = ("fedper", "fedrep", "fedbabu", "lg-fedavg", "shot")  # refused by these


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """tests/support/networks_with_parts.py is code from outside the package."""
    monkeypatch.setenv(
        external_code.VARIABLE,
        ",".join(f"networks_with_parts:{kind}" for kind in (*KINDS, "TiedHead")),
    )


def configuration(method, kind):
    needs = NEEDS.get(method, {}) if method not in NORMED else {}
    keys = {"model", f"{method}.model"} & SMALL.keys()
    return SMALL | needs | dict.fromkeys(keys, f"networks_with_parts:{kind}") | {"method": method}


def go(config, folder, **changes):
    config = config | {"output-dir": str(folder), **changes}
    grid = Watched.simulation(app, config, int(config["num-clients"]))
    return run(grid, config), grid


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_a_run_resumes_and_serves(method, kind, tmp_path, monkeypatch):
    config, whole, cut = configuration(method, kind), tmp_path / "whole", tmp_path / "cut"
    begin = PersonalizedStrategy.configure_train

    def configure_train(self, server_round, *args):
        if server_round == 2 and not cut.exists():
            shutil.copytree(whole, cut)
        elif server_round == 1:
            assert not cut.exists()  # a resumed run does not start again
        return begin(self, server_round, *args)

    monkeypatch.setattr(PersonalizedStrategy, "configure_train", configure_train)
    if (method, kind) in REFUSED:
        with pytest.raises(ValueError, match="^" + REFUSED[method, kind]):
            go(config, whole)
        return
    result, grid = go(config, whole)
    again, _ = go(config, cut, resume=True)
    assert left(whole) == left(cut) and bits(result) == bits(again)
    valid = [metrics["valid-replies"] for metrics in result.train_metrics_clientapp.values()]
    assert valid == [2, 2]
    assert not any(message.has_error() for message in grid.seen)
    check(method, config, result, grid)
    if METHODS[method].novel and method != "pfl-nearest":  # it needs the training clients
        samples, model = partitions.federation(config).share(0).everything, fedapps.load(whole)
        x = samples.x[samples.index]
        served = model.serve(model.inputs(x))
        with torch.no_grad():
            logits = served.module()(x)
        torch.testing.assert_close(logits, served.logits, rtol=1e-3, atol=1e-4)


def bits(result):
    return {name: array.data for name, array in (result.arrays or {}).items()}


def check(method, config, result, grid):
    """The network's arrays keep their shapes, dtypes and order in all messages. Variances are not
    negative. Frozen arrays are nowhere, and tied names have one value, in messages and in the
    clients' states."""
    model, initial = method_model(method, config, partitions.task(config))
    roles = roles_of(model)
    places = {name: i for i, name in enumerate(initial)}
    sent = [m.content.array_records.get("arrays", {}) for m in grid.seen if m.has_content()]
    saved = [model for state in states(grid, method).values() for model in models(state)]
    for record in (*map(from_record, sent), from_record(result.arrays), *saved):
        order = [places[name] for name in record if name in places]
        assert order == sorted(order)
        for full, array in record.items():
            name = full.rpartition("/")[2]
            if name in places and not full.startswith("hypernetwork/"):
                assert (array.dtype, array.shape) == (initial[name].dtype, initial[name].shape)
            if name.endswith("running_var"):
                assert (array >= 0).all()
            same = roles.tied.get(full)
            assert same is None or same not in record or np.array_equal(array, record[same])
            assert name not in roles.frozen


def models(state):
    """The models in a client's state, by group."""
    for group in ("own/", "personal/", "theta/"):
        yield {n.removeprefix(group): a for n, a in state.items() if n.startswith(group)}


@pytest.mark.parametrize("method", TIED_HEADS)
def test_a_personal_part_must_not_be_tied_to_the_rest(method, tmp_path):
    message = f"^{method} .*'head.weight' and 'second.weight'.* one parameter of TiedHead"
    with pytest.raises(ValueError, match=message):
        go(configuration(method, "TiedHead"), tmp_path)


def test_the_page_names_the_networks_that_a_method_cannot_use():
    """What the runs above refuse, and methods that make views of images."""
    page = (Path(__file__).parents[1] / "docs/how-to/flower-components.md").read_text("utf-8")
    parts = {
        "Norm": "batch normalisation",
        "Frozen": "frozen parameters",
        "Tied": "tied parameters",
        "Buffers": "buffers",
    }
    refused = [words for kind, words in parts.items() if ("fedma", kind) in REFUSED]
    for normed in NORMED:
        assert {k for method, k in REFUSED if method == normed} == {*KINDS} - {"Norm", "Everything"}
    heads = ", ".join(f"`{method}`" for method in TIED_HEADS)
    views = ", ".join(f"`{m}`" for m, it in METHODS.items() if issubclass(it.client, MEMOClient))
    rows = ["| `fedbn`, `bn-adapt` | a network without batch normalisation |",
            f"| `fedma` | {', '.join(refused)} |",
            f"| {heads} | a head that is tied to the rest of the network |",
            f"| {views} | inputs that are no images (channels, height, width) |"]  # fmt: skip
    start = page.index("| method | cannot use |")
    assert page[start:].split("\n\n")[0].splitlines()[2:] == rows


class Disturbed(InProcessGrid):
    """Reseeds torch's generator before each reply."""

    calls = 0

    def _deliver(self, message):
        self.calls += 1
        torch.manual_seed(self.calls)
        return super()._deliver(message)


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].client.exchanges])
def test_dropout_depends_only_on_the_message(method):
    config = configuration(method, "Dropout")
    one, two = (
        bits(run(grid.simulation(app, config, 4), config)) for grid in (InProcessGrid, Disturbed)
    )
    assert one == two


@pytest.mark.slow
def test_on_ray_the_bits_are_the_same():
    with pytest.MonkeyPatch.context() as env:
        env.setenv("PYTHONPATH", str(Path(networks_with_parts.__file__).parent), prepend=os.pathsep)
        with ray_cluster(), Actors(load_client_app, 2) as actors:
            for method in METHODS:
                kind = "Dropout" if method == "fedma" else "Everything"
                config = configuration(method, kind)
                one = run(InProcessGrid.simulation(app, config, 4), config)
                two = run(RayGrid(actors, config, Simulated(4)), config, "ray")
                assert bits(one) == bits(two), method
                metrics = [dict(result.evaluate_metrics_clientapp[2]) for result in (one, two)]
                assert metrics[0] == metrics[1], method
