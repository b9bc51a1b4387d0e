"""Clients of one process: what is kept between their messages, and what is not."""

import json
import re

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from small_runs import SMALL, share
from torch import nn

from clients.core.arrays import from_record, to_record
from clients.models.foreign import adopted
from fedapps import building
from fedapps.building import (
    bytes_after_rounds,
    check_chosen,
    client_settings,
    held_out_note,
    method_caveats,
    network_around,
    replaced_settings,
    size_note,
)
from fedapps.clientapp import make_client
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.context import SIMULATED, SIMULATION
from fedapps.settings.config import completed, defaults, settings
from partitions.datasets.loading import Info


class InTrainingAlone(nn.Module):
    """Its body has gradients in training alone; `aside` is called in training alone."""

    def __init__(self, allowed):
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.aside = nn.Linear(8, 3)
        self.out = nn.Linear(8, 3)
        self.allowed = allowed

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and (self.training or self.allowed)):
            h = self.body(x.flatten(1)).relu()
        return (self.out(h) + self.aside(h)) if self.training else self.out(h)


@pytest.mark.parametrize(
    "method", ["tent", "shot", "memo", "atp", "fedtta", "fedthe+", "heterotent", "heterofedtta"]
)
def test_a_network_must_have_gradients_where_a_method_adapts_it_by_them(method):
    """Some failed after all rounds, others predicted without a word as if they had not adapted."""
    info = Info("mine", (1, 8, 8), 3, "")
    values = settings(defaults(), method)

    def built(allowed):
        base = adopted(InTrainingAlone(allowed), "mine", info.shape, 3)[0]
        return network_around(base, method, info, values)

    words = rf"{re.escape(method)} adapts .* in evaluation mode for body\.bias, body\.weight; leave"
    with pytest.raises(ValueError, match=words):
        built(False)
    if method in ("tent", "atp", "fedtta"):  # others need a head, which only `out` cannot be
        built(True)


def test_a_method_that_auto_chooses_is_asked_for_gradients_too():
    info = Info("mine", (1, 8, 8), 3, "")
    base = adopted(InTrainingAlone(False), "mine", info.shape, 3)[0]
    with pytest.raises(ValueError, match=r"^tent adapts the network by gradients"):
        check_chosen(base, "auto", info, {"candidates": "tent"})


def client(config, number, method="fedavg", **node):
    node = {"partition-id": number, "num-partitions": 6, SIMULATED: SIMULATION} | node
    return make_client(Context(1, number, node, RecordDict(), config), method)


def test_clients_of_a_configuration_share_their_network_and_nothing_else():
    one, other = client(SMALL, 0), client(SMALL, 1)
    one.state["personal/head.bias"], one.lr = "kept", 7.0
    assert one.model is other.model and one.initial is other.initial
    assert other.state == {} and other.lr == client(SMALL, 0).lr == SMALL["lr"]
    assert (other.client, other.share) != (one.client, one.share)


def test_a_changed_configuration_or_method_or_network_makes_other_clients():
    config = dict(SMALL)
    before = client(config, 2)
    config["lr"] = 0.25  # the same object
    assert (before.lr, client(config, 2).lr) == (0.3, 0.25)
    assert type(client(config, 2, "fedper")) is not type(before)
    mixed = SMALL | {"client-models": "mlp,mlp-small", "method": "fedmd"}
    names = [client(mixed, number, "fedmd").model_name for number in (0, 1, 2)]
    assert names[0] == names[2] != names[1]


def test_a_client_has_the_settings_of_its_configuration_default_or_not():
    chosen = {"momentum": 0.0, "weight-decay": 0.125, "batch-size": 3}
    given = client_settings(completed(SMALL | chosen), "fedavg")
    assert given["weight_decay"] == 0.125 and "momentum" not in given
    one = client(SMALL | chosen, 0)
    assert (one.momentum, one.weight_decay, one.batch_size) == (0.0, 0.125, 3)


def test_clients_and_server_write_into_their_copies_of_arrays_alone():
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = from_record(message.content["arrays"])
        reply = Message(RecordDict({"arrays": to_record(arrays)}), reply_to=message)
        arrays["w"] += 10
        torch.from_numpy(arrays["b"]).mul_(3)
        return reply

    grid = InProcessGrid.simulation(app, {}, 2)
    server = {"w": np.float32([1, 2]), "b": np.array(4.0)}
    record = to_record(server)
    messages = [Message(RecordDict({"arrays": record}), node, "train") for node in (1, 2)]
    for reply in grid.send_and_receive(messages):
        for _ in range(2):
            received = from_record(reply.content["arrays"])
            assert received["w"].tolist() == [1, 2] and received["b"] == 4
            received["w"][:] = 0
    assert server["w"].tolist() == [1, 2] and from_record(record)["b"] == 4


def test_an_encoder_far_larger_than_the_network_is_said():
    """lenet-small has 0.86 million weights for STL-10's images, and its encoder 4.86 million."""
    config = defaults() | {"method": "odpfl-hn", "dataset": "stl10", "model": "lenet-small"}
    assert size_note(config) == (
        "odpfl-hn: a client has 5.72 million weights, 7 times the 0.86 million of lenet-small: "
        "encoder alone 4.86 million; rounds take longer, and so do messages"
    )
    assert size_note(config | {"method": "fedavg"}) == ""
    assert size_note(config | {"dataset": "digits", "model": "mlp"}) == ""  # both are small


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_what_it_has_to_before_a_run(method):
    """All that the planner asks a method for, also one that hides settings of its parent, as shot
    hides `parameters`."""
    model = "mlp" if method == "fedma" else "convnet-bn"  # a chain; batch normalisation
    config = defaults() | {"method": method, "model": model, "num-clients": 5}
    config |= {"fedembed.embedding-dim": 8, "global+.embedding-dim": 8}
    assert all(isinstance(note, str) for note in method_caveats(config))
    assert bytes_after_rounds(config) >= 0
    assert set(replaced_settings([config])) <= {key for key in config if key.startswith(method)}


def test_what_auto_cannot_choose_is_said_before_a_run():
    config = defaults() | {"method": "auto", "num-clients": 5, "auto.alpha": 0.5}
    lacking = "candidates none, mean-matching; bn16 needs batch normalisation, which mlp lacks"
    assert method_caveats(config) == [lacking]
    assert method_caveats(config | {"model": "convnet-bn"}) == []
    assert method_caveats(config | {"auto.candidates": "bn0,bn64,bbse"}) == [
        "candidates none, bbse; bn0, bn64 need batch normalisation, which mlp lacks"
    ]
    nobody = (
        "no training client plays a newcomer, which takes 20 held-out samples and auto.plays above "
        "0, so none holds out any, and all keep FedAvg's model; raise auto.held-out, or take fewer "
        "clients or more samples"
    )
    assert method_caveats(config | {"auto.plays": 0}) == [nobody, lacking]
    assert method_caveats(config | {"method": "bbse"}) == []
    (note,) = method_caveats(config | {"model": "convnet-bn", "early-stopping": 3})
    assert note.startswith("early-stopping=3 ends no run: the rule belongs to the last model")


def test_what_autos_clients_send_is_said_where_it_is_much(monkeypatch):
    """resnet50 has 53 layers with batch statistics, of 64 to 2048 channels: their d² add up to
    28 209 152. With 10² and 4², and 10 · (1 + 10 + 26 574) sums and counts, of 8 bytes each, these
    are 228 MB."""
    of_25 = [share(torch.zeros(1000, 3, 32, 32), [0] * 1000)] * 25
    monkeypatch.setattr(building, "training_shares", lambda config: of_25)
    large, small = "torchvision.models:resnet50", "torchvision.models:resnet18"
    monkeypatch.setenv("FEDAPPS_ALLOW", f"{large},{small}")
    config = defaults() | {"method": "auto", "num-clients": 50, "dataset": "cifar10"}
    (note,) = method_caveats(config | {"model": large})
    assert note.startswith("after the last round each training client sends 228 MB twice")
    assert "at once: 5695 MB of 25 clients" in note
    assert method_caveats(config | {"model": small}) == []


def test_a_saved_network_that_was_trained_on_held_out_samples_is_said(tmp_path):
    """FedAvg trains on all samples, also where a run without rounds lies between."""

    def saved(name, method, **changes):
        values = {"method": method, "from-dir": "", "rounds": 3} | changes
        lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in values.items()]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("".join(lines))
        return str(tmp_path / name)

    def note(folder, method="auto", **changes):
        return held_out_note(defaults() | {"method": method, "from-dir": folder} | changes)

    everything = saved("everything", "fedavg")
    unseen = saved("unseen", "bbse", **{"bbse.held-out": 0.2})
    words = (
        "the saved network was trained with held-out=0, so on samples that are held out now, and "
        "looks better on them than on new ones; start from a run of bbse or auto with held-out=0.2"
    )
    assert note(everything) == note(everything, "bbse") == words
    assert note(unseen) == note(everything, "tent") == note("") == ""
    assert note(everything, **{"auto.held-out": 0.0}) == ""
    assert "with held-out=0.2, so" in note(unseen, **{"auto.held-out": 0.5})
    between = {"from-dir": everything, "rounds": 0, "auto.held-out": 0.2}
    assert note(saved("scored", "auto", **between)) == words


def test_where_nobody_can_play_newcomers_auto_holds_out_nothing():
    """20 clients of the digits would hold out 15 samples each; five hold out 59. One seed in which
    somebody can play is enough. With nothing to hold out clients play with what they train on."""
    few = defaults() | {"method": "auto", "num-clients": 20}
    enough = few | {"num-clients": 5}
    assert replaced_settings([few, few]) == {"auto.held-out": 0.0, "auto.plays": 0}
    assert replaced_settings([enough]) == replaced_settings([few, enough]) == {}
    assert replaced_settings([few | {"auto.held-out": 0.0}]) == {}
    assert replaced_settings([enough | {"auto.plays": 0}]) == replaced_settings([few])
    assert replaced_settings([few | {"method": "bbse"}]) == {}


def test_what_a_method_says_of_its_settings_may_depend_on_the_training_clients():
    """Three of six train; each has a hundred samples, and 85 of these without validation."""
    config = SMALL | {"method": "auto", "auto.held-out": 0.0}
    assert any("0, 3 of 3 training clients play" in line for line in method_caveats(config))
