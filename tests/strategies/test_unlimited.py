"""By default no reply is limited: FedAvg is Flower's weighted mean, in weights and in metrics."""

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from torch import nn

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedtta import FedTTA

START = {"w": np.zeros(2, np.float32)}
FEDERATIONS = {  # sample counts, changes, and the mean change by hand
    "one large client": ([10] * 5 + [400], [0.0] * 5 + [1.0], 400 / 450),
    "sizes that differ": ([5, 8, 12, 20, 60, 300], [0.0] * 5 + [1.0], 300 / 405),
    "one long change": ([20] * 6, [0.1] * 5 + [1.0], 1.5 / 6),
}


@pytest.mark.parametrize(("cls", "ratio"), [(FedAvg, 3.5), (FedTTA, 2.0)])
def test_protect_turns_both_ratios_on_and_a_given_ratio_wins(cls, ratio):
    plain = cls()
    protected = cls(protect=True)
    assert (plain.max_update_ratio, plain.max_examples_ratio) == (0.0, 0.0)
    assert (protected.max_update_ratio, protected.max_examples_ratio) == (ratio, 3.0)
    assert cls(protect=True, max_update_ratio=7.0).max_update_ratio == 7.0


def federation(counts, changes):
    """Clients of somebody else's app: node i adds its change, and measures it."""
    app = ClientApp()

    def numbers(node):
        return MetricRecord({"num-examples": counts[node - 1], "size": changes[node - 1]})

    @app.train()
    def train(message, context):
        sent = from_record(message.content["arrays"])
        moved = {name: a + np.float32(changes[context.node_id - 1]) for name, a in sent.items()}
        content = {"arrays": to_record(moved), "metrics": numbers(context.node_id)}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": numbers(context.node_id)}), reply_to=message)

    return InProcessGrid.simulation(app, {}, len(counts))


@pytest.mark.parametrize("name", FEDERATIONS)
def test_fedavg_is_flowers_fedavg(name):
    """The mean change by hand, Flower's own strategy, and ours; metrics of training and of
    evaluation too, whose weights are all the samples."""
    counts, changes, expected = FEDERATIONS[name]
    ours = FedAvg(evaluate_every=1).start(
        federation(counts, changes), to_record(START), num_rounds=2
    )
    flower = FlowersFedAvg(min_available_nodes=len(counts))
    theirs = flower.start(federation(counts, changes), to_record(START), num_rounds=2)
    assert from_record(ours.arrays)["w"] == pytest.approx([2 * expected] * 2)
    assert from_record(theirs.arrays)["w"] == pytest.approx([2 * expected] * 2)
    for round_ in (1, 2):
        for got, wanted in (
            (ours.train_metrics_clientapp, theirs.train_metrics_clientapp),
            (ours.evaluate_metrics_clientapp, theirs.evaluate_metrics_clientapp),
        ):
            assert got[round_]["size"] == pytest.approx(wanted[round_]["size"])
            assert got[round_]["size"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["one large client", "one long change"])
def test_what_protect_cuts_is_reported(name):
    """In the metrics of the round's result; without it there is nothing to report."""
    counts, changes, expected = FEDERATIONS[name]
    key = {"one large client": "recounted", "one long change": "clipped"}[name]
    result = FedAvg(protect=True).start(federation(counts, changes), to_record(START), num_rounds=1)
    assert from_record(result.arrays)["w"][0] < 0.9 * expected
    assert result.train_metrics_clientapp[1][key] == 1
    plain = FedAvg().start(federation(counts, changes), to_record(START), num_rounds=1)
    assert not {"clipped", "recounted"} & set(plain.train_metrics_clientapp[1])


class Shift(nn.Module):
    """One linear layer whose training moves it by a gradient of one size for each client."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(1, 2)

    def forward(self, x):
        return self.out(x)


def test_server_app_weighs_clients_by_their_samples():
    """One step of lr 1 from w = 0: client i's change is the mean gradient of its samples, so the
    mean by samples is the gradient of all samples. 10 ×5 and 400 samples, the last's differ."""
    counts = [10] * 5 + [400]
    xs = [torch.full((n, 1), 1.0 if n == 400 else -0.5) for n in counts]
    settings = {"lr": 1.0, "local_steps": 1, "batch_size": 400, "seed": 3}

    def data(context):
        x = xs[context.node_config["partition-id"]]
        return x, torch.zeros(len(x)).long()

    found = []
    client = fedapps.client_app("fedavg", model=Shift, data=data, **settings)
    server = fedapps.server_app(
        "fedavg", model=Shift, shape=(1,), rounds=1, min_available_nodes=6,
        then=lambda result, _: found.append(result), **settings,
    )  # fmt: skip
    places = [{"partition-id": i, "num-partitions": 6} for i in range(6)]

    server(InProcessGrid(client, {}, places), Context(1, 0, {}, RecordDict(), {}))
    torch.manual_seed(3)
    network = Shift()
    steps = []
    for x in xs:
        loss = nn.functional.cross_entropy(network(x), torch.zeros(len(x)).long())
        (slope,) = torch.autograd.grad(loss, [network.out.weight])
        steps.append(network.out.weight.detach() - slope)
    expected = sum(n * w for n, w in zip(counts, steps, strict=True)) / sum(counts)
    got = found[0].arrays["out.weight"].numpy()
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)
