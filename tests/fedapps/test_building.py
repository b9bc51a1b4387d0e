"""Clients of one process: what is kept between their messages, and what is not."""

from flwr.app import Context, RecordDict
from tiny import SMALL

from fedapps.clientapp import make_client


def client(config, number, method="fedavg", **node):
    node = {"partition-id": number, "num-partitions": 6, "simulated": True} | node
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
