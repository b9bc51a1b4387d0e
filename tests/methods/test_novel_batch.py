"""A novel client's inputs in batches, and what serving it costs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_runs import FEW, federate, share, update
from torch.nn import functional as F

from clients.core.evaluation import score_samples
from fedapps.common.tasks import Targets
from strategies.core.replies import Node
from strategies.core.round_state import PersonalizationCost, Round
from strategies.core.strategy import PersonalizedStrategy


class Mean:
    """Predicts class 1 for inputs above the mean of those that it sees at once."""

    device, novel_batch, novel_stream, batchwise, supports_streaming = "cpu", 0, False, False, True
    criterion, targets, own_scores = staticmethod(F.cross_entropy), Targets(), {}

    def __init__(self, data, novel_batch):
        self.share, self.novel_batch = data, novel_batch
        self.seen, self.adaptation_metrics, self.intermediate_logits = [], {}, {}

    @property
    def scored_as_novel(self):
        return self.share.novel

    def predict(self, x):
        self.seen.append(x.flatten().tolist())
        self.adaptation_metrics = {"level": float(x.mean())}
        self.intermediate_logits = {"base": torch.stack([x, -x], 1)[:, :, 0]}
        return torch.stack([x.mean() - x, x - x.mean()], 1)[:, :, 0]


@pytest.mark.parametrize("novel", [True, False])
def test_each_batch_is_adapted_to_by_itself(novel):
    """Inputs 1, 3 | 7, 5 | 2 in batches of two: means 2, 6, 2; above them 3 and 7, so the classes
    are 0 1 1 0 0; labels 0 1 1 0 1 give 4/5. The stage predicts class 0 everywhere: 2/5. At once
    the mean is 3.6: classes 0 0 1 1 0; 2 are right."""
    data = replace(share([[1.0], [3.0], [7.0], [5.0], [2.0]], [0, 1, 1, 0, 1]), novel=novel)
    client = Mean(data, 2)
    _, count, metrics = score_samples(client, data.everything)
    assert count == 5
    if novel:
        assert client.seen == [[1, 3], [7, 5], [2]]
        assert metrics == pytest.approx(
            {"level": 10 / 3, "base-accuracy": 0.4, "accuracy": 0.8}, abs=1e-6
        )
    else:  # validation samples of a training client are predicted at once
        assert client.seen == [[1, 3, 7, 5, 2]]
        assert metrics["accuracy"] == pytest.approx(0.4)


def test_batches_reach_a_run():
    """For TENT, batches of five give another result than all inputs; FedAvg does not adapt."""
    for method, same in (("fedavg", True), ("tent", False)):
        config = FEW | {"method": method, "partition": "iid", "rounds": 1}
        whole, parts = (
            federate(**config, **{"novel-batch": size})[0].evaluate_metrics_clientapp[1]
            for size in (0, 5)
        )
        assert (whole["novel-loss"] == pytest.approx(parts["novel-loss"], rel=1e-5)) == same
        assert whole["train-accuracy"] == parts["train-accuracy"]


def test_what_a_novel_client_costs():
    """2 s of the server's time for a node, 1 and 4 s of two novel clients: 2 + 2.5. Models of 12
    and 20 bytes after 8 bytes of an exchange: 16 + 8; it sent 3. A training client's 100 s do not
    count, and a foreign client has no time."""
    nodes = [Node(1, 51, novel=True), Node(2, 52, novel=True), Node(3, 53, novel=True)]
    sent = {nodes[0]: {"w": torch.zeros(3).numpy()}, nodes[1]: {"w": torch.zeros(5).numpy()}}
    now = Round(payloads=sent, personalization_cost=PersonalizationCost(2.0, 8.0, 3.0))
    updates = [
        replace(update(i, {}, seconds=s), node=nodes[i - 1]) for i, s in ((1, 1.0), (2, 4.0))
    ]
    updates += [update(9, {}, seconds=100.0), replace(update(3, {}), node=nodes[2])]
    PersonalizedStrategy._report_serving(SimpleNamespace(now=now), updates)
    assert now.phases == {"novel-client": 4.5}
    assert now.report == {"novel-megabytes": {"down": 24e-6, "up": 3e-6}}


def test_bytes_of_a_model_and_of_a_descriptor(tmp_path):
    """FedAvg's novel client gets the model and sends nothing; ODPFL-HN's sends its descriptor."""
    for method, sends in (("fedavg", False), ("odpfl-hn", True)):
        federate(method=method, **{"output-dir": str(tmp_path / method)})
        line = json.loads((tmp_path / method / "metrics.jsonl").read_text().splitlines()[-1])
        assert "novel-client" in line["phases"]
        assert (line["novel-megabytes"]["up"] > 0) == sends
        if not sends:  # 64·200 + 200·200 + 200·10 weights and 410 biases, 4 bytes each
            assert line["novel-megabytes"]["down"] == pytest.approx(4 * 55210 / 1e6)
