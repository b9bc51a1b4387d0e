"""Runs in which some training clients have no labels."""

import numpy as np
import pytest
from small_runs import SMALL, Watched, bits, federate
from torch.nn import functional as F

import partitions
from clients.core.arrays import from_record
from clients.core.evaluation import CRITERIA
from fedapps.methods import METHODS
from strategies.core.privacy import Privacy
from strategies.core.replies import Node
from strategies.methods.flowdup import FLowDUP

HALF = {"partition.labeled-clients": 0.5, "num-clients": 8, "rounds": 3, "local-steps": 2}
UNLABELED = set(np.flatnonzero(partitions.federation(SMALL | HALF).unlabeled).tolist())


def heard(grid):
    """The clients that got a message of each type."""
    clients: dict[str, set[int]] = {}
    for message in grid.seen:
        assert not message.has_error(), message.error
        if not message.metadata.reply_to_message_id:
            node = grid.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            clients.setdefault(message.metadata.message_type, set()).add(int(node))
    return clients


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "fedbabu", "pefll", "pfedhn", "odpfl-hn", "pfl-ensemble"]
)
def test_methods_that_need_labels_ask_only_clients_that_have_some(method):
    """In training, in exchanges and in evaluations."""
    result, grid = federate(Watched, method=method, **HALF)
    clients = heard(grid)
    assert len(UNLABELED) == 2 and clients.pop("query") == set(range(8))
    assert all(not asked & UNLABELED for asked in clients.values())
    assert {m["valid-replies"] for m in result.train_metrics_clientapp.values()} == {2}
    assert result.evaluate_metrics_clientapp[3]["train-clients"] == 2


def test_under_privacy_flowdup_trains_on_labels_alone():
    """The noise is that of one mean; clients without labels would be another."""
    server = FLowDUP(privacy=Privacy(dp="central", dp_noise_multiplier=1.0))
    server.nodes = nodes = [Node(0, 50), Node(1, 51, properties={"unlabeled": True})]
    assert server.training_nodes() == nodes[:1]
    assert FLowDUP.trains_unlabeled


def test_flowdup_learns_from_all_and_is_chosen_by_those_with_labels(monkeypatch):
    """Cross entropies are of labeled samples; a training loss is reported by two clients."""
    seen = []
    real = F.cross_entropy
    monkeypatch.setitem(CRITERIA, "classes", lambda z, y: seen.append(y) or real(z, y))
    result, grid = federate(Watched, method="flowdup", **HALF)
    clients = heard(grid)
    assert clients["train"] > UNLABELED and not UNLABELED & clients["evaluate"]
    assert {m["valid-replies"] for m in result.train_metrics_clientapp.values()} == {4}
    assert result.evaluate_metrics_clientapp[3]["train-clients"] == 2
    assert len(seen) >= 2 * 2 * 3 and all((y >= 0).all() for y in seen)
    losses = [
        "loss" in message.content["metrics"]
        for message in grid.seen
        if message.metadata.message_type == "train" and message.metadata.reply_to_message_id
    ]
    assert losses.count(True) == losses.count(False) == 6


def test_what_a_client_without_labels_sends_ignores_what_they_were():
    """Other labels of these clients change nothing; other inputs do."""
    federation = partitions.federation(SMALL | HALF)
    rows = federation.share(min(UNLABELED)).train.index
    data, results = federation.dataset, [federate(method="flowdup", **HALF)[0]]
    kept = data.y.clone(), data.x.clone()
    try:
        data.y[rows] = (kept[0][rows] + 3) % 10
        results += [federate(method="flowdup", **HALF)[0]]
        data.x[rows] = kept[1][rows].flip(0).flip(-1)
        results += [federate(method="flowdup", **HALF)[0]]
    finally:
        data.y.copy_(kept[0]), data.x.copy_(kept[1])
    assert bits(results[0]) == bits(results[1])
    assert bits(results[0])[0] != bits(results[2])[0]


def test_small_changes_of_clients_without_labels_do_not_limit_the_others():
    """Of ten training clients two have labels and move ψ a thousand times as far; nothing is
    clipped, so without a limit the bits are the same."""
    few = HALF | {"num-clients": 20, "partition.labeled-clients": 0.2, "rounds": 2}
    one, two = (federate(method="flowdup", **few, **{"max-update-ratio": r})[0] for r in (3.5, 0.0))
    assert {m["valid-replies"] for m in one.train_metrics_clientapp.values()} == {10}
    assert from_record(one.arrays).keys() == from_record(two.arrays).keys()
    assert bits(one)[0] == bits(two)[0]


def test_noise_for_a_mean_over_all_is_refused_where_some_have_no_labels():
    able = [method for method, entry in METHODS.items() if "central" in entry.dp]
    assert "flowdup" in able
    private = {"dp": "central", "dp-noise-multiplier": 1.0, "method": "flowdup"}
    with pytest.raises(ValueError, match=r"labeled-clients 0\.5; the noise"):
        federate(**HALF, **private)
