import json

import numpy as np
import pytest
from small_runs import SMALL, federate, share, update

from clients.core.arrays import model_arrays
from clients.methods.lgfedavg import OWN_BODIES, LGFedAvgClient
from clients.models.networks import MLP
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from strategies.core.replies import Node
from strategies.core.round_state import Round
from strategies.methods.lgfedavg import LGFedAvg

HEAD = {"head.weight", "head.bias"}
ALL = HEAD | {f"layers.{i}.{part}" for i in range(2) for part in ("weight", "bias")}


class Watched(InProcessGrid):
    def _deliver(self, message):
        reply = super()._deliver(message)
        for way, one in (("down", message), ("up", reply)):
            for record in one.content.array_records.values():
                kind = message.metadata.message_type
                round_ = int(message.content["config"]["server-round"])
                self.names.setdefault((kind, way, round_), []).append(set(record))
        return reply


def test_names_on_the_wire_in_both_phases():
    """Two rounds of FedAvg, then the body once down to each client and never up again."""
    config = SMALL | {"method": "lg-fedavg", "rounds": 4, "lg-fedavg.fedavg-rounds": 2}
    grid = Watched.simulation(app, config, 6)
    grid.names = {}
    run(grid, config, "in-process")
    names = {key: set().union(*found) for key, found in grid.names.items() if key[0] == "train"}
    assert names == {
        ("train", "down", 1): ALL,
        ("train", "up", 1): ALL,
        ("train", "down", 2): ALL,
        ("train", "up", 2): ALL,
        ("train", "down", 3): ALL,
        ("train", "up", 3): HEAD,
        ("train", "down", 4): HEAD,
        ("train", "up", 4): HEAD,
    }
    assert grid.names["evaluate", "down", 4] == [HEAD] * 3


def test_the_authors_layers_of_cifar_are_shared_under_personal_ones():
    """Their `weight_keys` ends with both convolutions, and --num_layers_keep 2 shares both;
    fully connected layers, the last one too, stay on the client."""
    config = SMALL | {"method": "lg-fedavg", "rounds": 2, "lg-fedavg.fedavg-rounds": 1}
    config |= {"model": "convnet-small", "lg-fedavg.shared-layers": "conv1, conv2"}
    grid = Watched.simulation(app, config, 6)
    grid.names = {}
    result = run(grid, config, "in-process")
    convolutions = {f"conv{i}.{part}" for i in (1, 2) for part in ("weight", "bias")}
    assert grid.names["train", "up", 1] == [{*result.arrays}] * 3
    assert grid.names["train", "up", 2] == [convolutions] * 3
    assert grid.names["evaluate", "down", 2] == [convolutions] * 3


def test_personal_layers_are_trained_and_kept():
    """Of MLP(1, 1) with layers.0 and the head; after a step each array has moved, the shared first
    layer is in the reply and the head in the state."""
    model = MLP((1,), 2, (1,))
    client = LGFedAvgClient(model, share([[1.0]] * 2, [0, 1]), shared_layers="layers.0")
    sent = {n: np.ones_like(a) for n, a in model_arrays(model).items()}
    reply, _, _ = client.train(sent, {OWN_BODIES: True})
    assert reply.keys() == {"layers.0.weight", "layers.0.bias"}
    kept = {name.removeprefix("personal/") for name in client.state}
    assert kept == {"head.weight", "head.bias"}
    client.load({name: np.full_like(a, 3) for name, a in reply.items()})
    assert model.layers[0].weight.item() == 3
    np.testing.assert_array_equal(
        model.head.weight.detach().numpy(), client.state["personal/head.weight"]
    )


@pytest.mark.parametrize("layers", ["conv9", "", "conv1,fc1"])
def test_a_shared_layer_that_the_network_lacks_is_refused(layers):
    """The whole configuration, before anything runs."""
    changes = {"method": "lg-fedavg", "model": "convnet", "lg-fedavg.shared-layers": layers}
    with pytest.raises(ValueError, match="each of its entries must be a layer of ConvNet"):
        federate(**changes)


def test_all_layers_shared_are_no_lg_fedavg():
    with pytest.raises(ValueError, match="only shared layers"):
        federate(method="lg-fedavg", **{"lg-fedavg.shared-layers": "layers,head"})


def test_the_round_that_is_reported_has_bodies_of_their_own(tmp_path):
    """Validation never chooses one of FedAvg's rounds, even a better one: here it is the same."""
    changes = {"method": "lg-fedavg", "rounds": 5, "lg-fedavg.fedavg-rounds": 3, "lr": 0.0}
    federate(**changes, **{"output-dir": str(tmp_path)})
    assert json.loads((tmp_path / "summary.json").read_text())["best_round"] == 4


def test_a_run_that_goes_on_is_in_the_second_phase(tmp_path):
    """Two of three clients have trained a body in the first run. In the second one the third is
    sent all and returns the head, and the others are sent the head alone, from round 1 on."""
    common = {"method": "lg-fedavg", "lg-fedavg.fedavg-rounds": 1, "fraction-train": 0.67}
    federate(**common, rounds=2, **{"output-dir": str(tmp_path)})
    config = SMALL | common | {"from-dir": str(tmp_path), "rounds": 1, "fraction-train": 1.0}
    grid = Watched.simulation(app, config, 6)
    grid.names = {}
    run(grid, config, "in-process")
    assert sorted(map(len, grid.names["train", "down", 1])) == [2, 2, len(ALL)]
    assert grid.names["train", "up", 1] == [HEAD] * 3


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="head"):
        LGFedAvg().initialize({"w": np.zeros(1)})


def test_bodies_become_personal_in_the_round_after_fedavgs_last():
    """Of those who replied: client 1 was asked as well, and is sent the whole model again."""
    strategy = LGFedAvg(fedavg_rounds=2)
    arrays = {"body.w": np.zeros(1, np.float32), "head.w": np.zeros(1, np.float32)}
    nodes = [Node(0, 50), Node(1, 51)]
    for round_, started in ((2, set()), (3, {0})):
        strategy.now = Round(round_, payloads=dict.fromkeys(nodes, arrays))
        own = strategy.expected(arrays)
        assert own.keys() == ({"head.w"} if started else arrays.keys())
        after = strategy.aggregate(arrays, [update(0, {n: a + 1 for n, a in own.items()})])
        assert after["body.w"].item() == (0 if started else 1)
        assert after["head.w"].item() == 1
        assert strategy.started == started
        assert strategy.may_stop == bool(started)
    sent = strategy.personalize(arrays, nodes)
    assert [sent[node].keys() for node in nodes] == [{"head.w"}, arrays.keys()]
