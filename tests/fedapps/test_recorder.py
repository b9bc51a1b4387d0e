"""Which round a run's summary reports."""

import json

import pytest
from tiny import federate

from fedapps.config import defaults
from fedapps.results.recorder import Recorder


class Told:
    """What the recorder reads of a strategy."""

    phase, reports_last = 0, False

    def __init__(self):
        self.arrays, self.evaluation = {}, []


def best_round(*accuracies, reports_last=False, phases=()):
    """The round that a run with these accuracies of training clients reports."""
    recorder, strategy = Recorder(defaults(), "", None), Told()
    strategy.reports_last = reports_last
    for number, accuracy in enumerate(accuracies, 1):
        strategy.phase = int(number in phases)
        told = {} if accuracy is None else {"train-accuracy": accuracy, "train-clients": 2}
        recorder.record({"round": number, "evaluation": told}, strategy)
    return recorder.summary["best_round"]


@pytest.mark.parametrize(
    ("accuracies", "options", "expected"),
    [
        ((0.5, 0.7, 0.7, 0.6), {}, 2),  # the first of the best
        ((None, None, None), {}, 3),  # nothing to choose by
        ((0.9, 0.7, 0.8), {"phases": (2, 3)}, 3),
        ((0.9, 0.7, 0.7), {"reports_last": True}, 3),
    ],
)
def test_the_round_is_chosen_by_training_clients_validation(accuracies, options, expected):
    assert best_round(*accuracies, **options) == expected


def summary(folder, **changes):
    """The summary of a small run, every round of it evaluated."""
    federate(**{"output-dir": str(folder)} | changes)
    return json.loads((folder / "summary.json").read_text())


def test_novel_labeled_clients_are_reported_at_the_end_of_their_rounds(tmp_path):
    """φ is frozen in rounds 3 to 5, so training clients' accuracy is the same in all of them."""
    told = summary(tmp_path, method="pfedhn", **{"novel-rounds": 3})
    assert told["best_round"] == 5
    assert told["novel"] == told["last"]["novel"]


def test_a_private_novel_client_is_in_the_summary(tmp_path):
    """It answers in round 4 alone; without any local step the first round would be the best."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    told = summary(tmp_path, method="odpfl-hn", rounds=4, **private | {"local-steps": 0})
    assert told["best_round"] == 4
    assert told["novel"]["clients"] == 3
