import copy
import itertools

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from small_runs import SMALL, federate, share, update
from torch import nn

from clients.core.arrays import from_record, model_arrays, prefixed
from clients.methods.fedma import FedMAClient, resize
from clients.models import build_model
from fedapps.clientapp import answer
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from strategies.core.replies import Node, Update
from strategies.methods.fedma import FedMA

SHAPE = (1, 16, 16)


class WithoutRetraining(FedMA):
    def retrain(self, frozen, networks):
        return networks


def permuted(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose hidden neurons are shuffled, layer by layer, the function the same."""
    model = copy.deepcopy(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    generator = torch.Generator().manual_seed(seed)
    for here, following in itertools.pairwise(layers):
        order = torch.randperm(len(here.bias), generator=generator)
        here.weight.data, here.bias.data = here.weight.data[order], here.bias.data[order]
        blocks = following.weight.data.unflatten(1, (len(order), -1))
        following.weight.data = blocks[:, order].flatten(1, 2)
    return model


def function_of(arrays, name, x):
    model = build_model(name, SHAPE, 3, 1)
    resize(model, arrays)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("name", ["mlp", "convnet", "lenet"])
def test_permuted_copies_of_one_network_give_that_network(name):
    x = torch.randn(4, *SHAPE, generator=torch.manual_seed(0))
    model = build_model(name, SHAPE, 3, 0)
    copies = [model_arrays(permuted(model, seed)) for seed in (1, 2, 3)]
    weight = next(n for n in copies[0] if n.endswith("weight"))
    assert not np.allclose(copies[0][weight], copies[1][weight])
    expected = function_of(copies[0], name, x)
    strategy = WithoutRetraining()
    arrays = strategy.initialize(model_arrays(model))
    merged = strategy.aggregate(arrays, [update(i, a, n=i + 1) for i, a in enumerate(copies)])
    assert {n: a.shape for n, a in merged.items()} == {n: a.shape for n, a in arrays.items()}
    assert float((function_of(merged, name, x) - expected).abs().max()) < 1e-5
    assert strategy.report() == {"growth": 1.0}


@pytest.mark.parametrize("name", ["mlp", "convnet", "lenet"])
def test_each_client_gets_its_own_neurons_back(name):
    """Merge two different networks, wide enough to keep all apart: each client's part of the
    global network has its own hidden layers, in its own order."""
    networks = [model_arrays(build_model(name, SHAPE, 3, seed)) for seed in (0, 1)]
    strategy = WithoutRetraining(new_neuron_cost=0.0, max_growth=2.0, sweeps=0)
    strategy.initialize(networks[0])
    merged = strategy.aggregate(networks[0], [update(i, a) for i, a in enumerate(networks)])
    assert strategy.report()["growth"] > 1.9
    nodes = [Node(0, 50), Node(1, 51)]
    parts = strategy.broadcast(merged, nodes)
    for node, own in zip(nodes, networks, strict=True):
        for array in own:
            if not array.startswith("head."):
                np.testing.assert_allclose(parts[node][array], own[array], atol=1e-6)
    stranger = strategy.broadcast(merged, [Node(7, 57)])[Node(7, 57)]
    assert {n: a.shape for n, a in stranger.items()} == {n: a.shape for n, a in own.items()}


def test_growth_stays_within_its_bound_over_rounds():
    settings = {"model": "convnet-small", "rounds": 3, "fedma.new-neuron-cost": 0.0}
    settings["fedma.max-growth"] = 1.25
    result, _ = federate(method="fedma", **settings)
    arrays = from_record(result.arrays)
    widths = {name: len(a) for name, a in arrays.items() if name.endswith("bias")}
    assert widths == {"conv1.bias": 20, "conv2.bias": 40, "fc.bias": 640, "head.bias": 10}
    assert arrays["fc.weight"].shape == (640, 40 * 2 * 2)
    assert result.evaluate_metrics_clientapp[3]["novel-clients"] == 3  # all take the wide network
    assert result.train_metrics_clientapp[3]["valid-replies"] == 3


def failing_when_retraining():
    """The method's ClientApp, in which client 0 of the training clients fails to retrain."""
    bad = {}

    def handle(message, context):
        if message.metadata.message_type == "train.retrain":
            bad.setdefault("node", context.node_id)
            if context.node_id == bad["node"]:
                raise OSError("disk full")
        return answer(message, context)

    client_app = ClientApp()
    client_app.query()(handle)
    client_app.train()(handle)
    client_app.train("retrain")(handle)
    client_app.evaluate()(handle)
    return client_app


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"on-client-failure": "stop"}, "a client failed"), ({"min-valid-replies": 3}, "2 valid")],
)
def test_a_client_that_fails_to_retrain_is_left_out_and_counted(setting, message):
    config = SMALL | {"method": "fedma", "model": "mlp-small", "rounds": 1}
    grid = InProcessGrid.simulation(failing_when_retraining(), config, 6)
    metrics = run(grid, config).train_metrics_clientapp[1]
    assert metrics["valid-replies"] == 3 and metrics["dropped-error"] == 1
    with pytest.raises(RuntimeError, match=message):
        run(InProcessGrid.simulation(failing_when_retraining(), config, 6), config | setting)


def test_retraining_leaves_the_frozen_layers_alone():
    """Wider frozen layers are taken as they come; only the upper ones change and come back."""
    model = build_model("convnet-small", (1, 8, 8), 3, 0)
    data = share(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)
    client = FedMAClient(model, data, local_steps=2, lr=0.5)
    arrays = dict(client.initial)
    frozen = {"conv1.weight": np.ones((20, 1, 5, 5), np.float32) / 9}
    frozen["conv1.bias"] = np.full(20, 0.1, np.float32)
    upper = {n: a for n, a in arrays.items() if n not in frozen}
    upper["conv2.weight"] = np.random.default_rng(0).normal(size=(32, 20, 5, 5)).astype("f") / 9
    reply, _ = client.retrain(prefixed("frozen", frozen) | upper, {"server-round": 1})
    assert reply.keys() == upper.keys()
    for name, array in frozen.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), array)
    for name, array in upper.items():
        assert reply[name].shape == array.shape
        assert not np.array_equal(reply[name], array), name
    client.train(client.initial, {"server-round": 2})  # and back to the usual size
    assert model.conv1.out_channels == 16


def chained(hidden, last):
    """Of one input, one hidden neuron and one output; biases 0."""
    arrays = {"a.weight": [[hidden]], "a.bias": [0.0], "b.weight": [[last]], "b.bias": [0.0]}
    return {name: np.array(a, np.float32) for name, a in arrays.items()}


def test_neurons_and_the_last_layer_are_weighed_by_samples():
    """Clients of 1 and 3 samples: (1 + 3·1.4)/4 = 1.3 in the hidden, (2 + 3·4)/4 = 3.5 in the last
    layer."""
    strategy = FedMA(new_neuron_cost=9.0)
    start = strategy.initialize(chained(0, 0))
    strategy.retrain = lambda frozen, networks: networks
    replies = [
        Update(Node(i, 50 + i), chained(*got), n, {})
        for i, (got, n) in enumerate([((1, 2), 1), ((1.4, 4), 3)])
    ]
    after = strategy.aggregate(start, replies)
    assert after["a.weight"].item() == pytest.approx(1.3)
    assert after["b.weight"].item() == pytest.approx(3.5)


def test_a_newcomer_starts_from_the_neurons_that_most_clients_own():
    """Of three hidden neurons, owned by 1, 3 and 2 clients, two."""
    strategy = FedMA()
    two = {"a.weight": np.zeros((2, 1)), "a.bias": np.zeros(2),
           "b.weight": np.zeros((1, 2)), "b.bias": np.zeros(1)}  # fmt: skip
    strategy.initialize(two)
    strategy.support["a"] = np.array([1, 3, 2])
    wide = {"a.weight": np.array([[5.0], [6], [7]]), "a.bias": np.arange(3),
            "b.weight": np.array([[8.0, 9, 10]]), "b.bias": np.zeros(1)}  # fmt: skip
    (sent,) = strategy.broadcast(wide, [Node(0, 50)]).values()
    assert sent["a.weight"].tolist() == [[6], [7]] and sent["a.bias"].tolist() == [1, 2]
    assert sent["b.weight"].tolist() == [[9, 10]]


def test_who_was_lost_or_absent_starts_as_a_newcomer_does():
    """Three layers: client 1 trains, but does not answer when the second one is retrained; client
    7's assignments are of a round before. Only client 0 has some of this round."""
    layers = {f"{name}.{part}": np.ones((1, 1) if part == "weight" else 1, np.float32)
              for name in "abc" for part in ("weight", "bias")}  # fmt: skip
    strategy, answered = FedMA(), []
    start = strategy.initialize(layers)
    strategy.assignments = {7: {"a": np.array([0]), "b": np.array([0])}}
    nodes = [Node(i, 50 + i) for i in (0, 1, 7)]

    def retrain(frozen, networks):
        answered.append([node.client for node in networks])
        return {node: n for node, n in networks.items() if node.client == 0 or len(answered) < 2}

    strategy.retrain = retrain
    strategy.aggregate(start, [Update(node, dict(layers), 1, {}) for node in nodes[:2]])
    assert answered == [[0, 1], [0, 1]]
    assert strategy.assignments.keys() == {0}
    assert strategy.broadcast(start, nodes).keys() == set(nodes)
