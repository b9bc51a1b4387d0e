"""A user's own scores: what they are given, how they are named, and what is refused."""

import re

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedapps
from clients.core.own_scores import TAKEN, load_scores, named_scores
from fedapps.common import external_code
from fedapps.common.tasks import BINARY, CLASSES, LABELS, VALUES, Targets
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core.reply_checks import READERS


class Largest:
    """A metric as torchmetrics has them: it collects what it sees."""

    higher_is_better = False

    def __init__(self):
        self.seen = []

    def reset(self):
        self.seen = []

    def __call__(self, outputs, labels):
        self.seen.append((outputs - labels).abs().max())
        return max(self.seen)


def mean_error(outputs, labels):
    """Shapes must be equal, or the difference would be a matrix."""
    assert outputs.shape == labels.shape
    return (outputs - labels).mean()


def test_values_have_the_unit_of_the_labels():
    """Stored outputs 0, 1 and labels 1, 1 with mean 50 and deviation 10: errors −10 and 0."""
    targets = Targets(VALUES, (50.0,), (10.0,))
    outputs, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [1.0]])
    (score,) = named_scores([mean_error]).values()
    assert score.of(outputs, labels, targets) == -5


def test_several_values_and_several_labels_keep_their_columns():
    shapes = []

    def shape(outputs, labels):
        shapes.append((tuple(outputs.shape), tuple(labels.shape), labels.dtype))
        return 0

    score = named_scores({"shape": shape})["shape"]
    two = torch.zeros(3, 2)
    score.of(two, two, Targets(VALUES, (0.0, 0.0), (1.0, 1.0)))
    score.of(two, two, Targets(LABELS))
    score.of(torch.zeros(3, 1), torch.zeros(3).long(), Targets(BINARY))
    score.of(two, torch.zeros(3).long(), Targets(CLASSES))
    assert shapes == [
        ((3, 2), (3, 2), torch.float64),  # values in their unit, which may be far from 0
        ((3, 2), (3, 2), torch.int64),
        ((3,), (3,), torch.int64),
        ((3, 2), (3,), torch.int64),
    ]


def test_a_metric_sees_one_client_at_a_time_and_its_direction_is_in_its_name():
    scores = named_scores({"largest_error": Largest})
    score = scores["-largest-error"]
    nothing = torch.zeros(2, 1)
    targets = Targets(VALUES, (0.0,), (1.0,))
    assert score.of(nothing + 3, nothing, targets) == 3
    assert score.of(nothing + 1, nothing, targets) == 1


def test_a_score_that_fails_is_left_out_with_one_warning(caplog):
    def of_two_classes(outputs, labels):
        raise ValueError("only one class")

    score = named_scores([of_two_classes])["of-two-classes"]
    args = torch.zeros(2, 3), torch.zeros(2).long(), Targets()
    assert score.of(*args) is None
    assert score.of(*args) is None
    (record,) = caplog.records
    said = "ValueError: only one class; such clients are left out of the mean of-two-classes"
    assert said in record.message


def test_a_score_that_is_no_number_is_left_out_as_one_that_fails(caplog):
    """Scikit-learn's roc_auc_score gives NaN for a single class."""
    score = named_scores({"auroc": lambda outputs, labels: float("nan")})["auroc"]
    assert score.of(torch.zeros(2, 3), torch.zeros(2).long(), Targets()) is None
    assert "the score 'auroc' gave NaN for outputs (2, 3) and labels (2,)" in caplog.text


@pytest.mark.parametrize("name", [*READERS, "f1", "f1-2", "sem", "clients", "trimmed-x", "auto"])
def test_names_of_the_packages_numbers_are_refused(name):
    assert TAKEN.fullmatch(name)
    with pytest.raises(ValueError, match=re.escape(f"a score is called {name!r}")):
        named_scores({name: mean_error})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"two words": mean_error}, "name it otherwise"),
        ({"x": 3}, "the score 'x' is 3; it must be a function"),
        ({"x": dict}, "{}; it must be a function"),
        ({"x": nn.Linear}, "is a class that needs arguments"),
    ],
)
def test_what_is_no_score_is_refused(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        named_scores(given)


def test_a_text_that_is_no_reference_is_refused():
    with pytest.raises(ValueError, match="'auroc' is no module:NAME"):
        load_scores("auroc")


def test_references_name_scores_and_need_the_users_permission(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text("def root_error(outputs, labels):\n    return 1.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(external_code.VARIABLE, "")
    with pytest.raises(ValueError, match="you have not allowed it"):
        load_scores("my_scores:root_error")
    external_code.allow("my_scores:root_error")
    assert set(load_scores("my_scores:root_error")) == {"root-error"}


def test_a_client_app_reports_them_and_the_server_averages_them():
    """Two clients that hold 3 and 5 validation samples: the mean over clients is 4. The round of
    the least is chosen where the strategy is asked to."""

    def count(outputs, labels):
        return len(labels)

    def data(context):
        number = 3 + 2 * context.node_config["partition-id"]
        x, y = np.ones((8, 4), np.float32), np.arange(8) % 2
        return (x, y), (x[:number], y[:number])

    def model():
        return nn.Sequential(nn.Linear(4, 2))

    app = fedapps.client_app("fedavg", model=model, data=data, scores={"-count": count})
    results = []
    server = fedapps.server_app(
        "fedavg", model=model, shape=(4,), rounds=1, selection_metric="count",
        then=lambda result, _: results.append(result.evaluate_metrics_clientapp),
    )  # fmt: skip
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    grid = InProcessGrid(app, {}, nodes)
    server(grid, Context(0, 0, {}, RecordDict(), {}))
    (metrics,) = results[0].values()
    assert metrics["train--count"] == metrics["train-trimmed--count"] == 4
