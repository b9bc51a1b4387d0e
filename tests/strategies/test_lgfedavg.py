import json

import numpy as np
import pytest
import torch
from tiny import SMALL, federate, share, states, update

from clients.arrays import from_record, group
from clients.lgfedavg import OWN_BODIES, LGFedAvgClient
from clients.models import build_model
from fedapps.clientapp import app
from fedapps.engines.grid import InProcessGrid
from fedapps.serverapp import run
from strategies.lgfedavg import LGFedAvg
from strategies.replies import Node
from strategies.round import Round

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


def test_the_body_starts_from_fedavgs_and_then_parts():
    settings = {"lg-fedavg.fedavg-rounds": 2}
    result, grid = federate(method="lg-fedavg", rounds=4, **settings)
    fedavg = from_record(federate(method="fedavg", rounds=2)[0].arrays)
    arrays = from_record(result.arrays)
    bodies = [group(state, "personal") for state in states(grid, "lg-fedavg").values()]
    assert len(bodies) == 3
    for name in ALL - HEAD:
        np.testing.assert_array_equal(arrays[name], fedavg[name])
        values = [body[name] for body in bodies]
        assert not np.array_equal(values[0], values[1])
        assert not np.array_equal(values[0], fedavg[name])
    assert not np.array_equal(arrays["head.weight"], fedavg["head.weight"])


def test_the_round_that_is_reported_has_bodies_of_their_own(tmp_path):
    """Validation never chooses one of FedAvg's rounds, be it better: here it is the same."""
    changes = {"method": "lg-fedavg", "rounds": 5, "lg-fedavg.fedavg-rounds": 3, "lr": 0.0}
    federate(**changes, **{"output-dir": str(tmp_path)})
    assert json.loads((tmp_path / "summary.json").read_text())["best_round"] == 4


def test_a_run_that_goes_on_is_in_the_second_phase(tmp_path):
    """Two of three clients have trained a body in the first run. In the second one the third is
    sent all and tells the head, and the others are sent the head alone, from round 1 on."""
    common = {"method": "lg-fedavg", "lg-fedavg.fedavg-rounds": 1, "fraction-train": 0.67}
    federate(**common, rounds=2, **{"output-dir": str(tmp_path)})
    config = SMALL | common | {"from-dir": str(tmp_path), "rounds": 1, "fraction-train": 1.0}
    grid = Watched.simulation(app, config, 6)
    grid.names = {}
    run(grid, config, "in-process")
    assert sorted(map(len, grid.names["train", "down", 1])) == [2, 2, len(ALL)]
    assert grid.names["train", "up", 1] == [HEAD] * 3


def test_a_client_late_to_the_second_phase_starts_from_fedavgs_body():
    """One of three clients a round: each is sent the body when its turn first comes."""
    config = SMALL | {"method": "lg-fedavg", "rounds": 6, "fraction-train": 0.34}
    config |= {"lg-fedavg.fedavg-rounds": 1}
    grid = Watched.simulation(app, config, 6)
    grid.names = {}
    run(grid, config, "in-process")
    sent = [grid.names["train", "down", i] for i in range(2, 7)]
    trained = len(states(grid, "lg-fedavg"))
    assert sum(names == [ALL] for names in sent) == trained
    assert sum(names == [HEAD] for names in sent) == 5 - trained > 0


def test_the_client_trains_the_body_of_its_state():
    model = build_model("mlp-small", (4,), 2, 0)
    client = LGFedAvgClient(
        model, share(torch.ones(2, 4), torch.tensor([0, 1])), lr=0.0, local_steps=1
    )
    own = {f"personal/{n}": a + 1 for n, a in client.initial.items() if not n.startswith("head.")}
    client.state = dict(own)
    head = {name: client.initial[name] for name in HEAD}
    reply, _, _ = client.train(head, {"server-round": 2, OWN_BODIES: True})
    assert reply.keys() == HEAD
    for name, array in own.items():
        np.testing.assert_array_equal(client.state[name], array)
        np.testing.assert_array_equal(model.state_dict()[name.removeprefix("personal/")], array)


def test_bad_settings_and_models_without_head():
    with pytest.raises(ValueError, match="fedavg-rounds is -1"):
        LGFedAvg(fedavg_rounds=-1)
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
