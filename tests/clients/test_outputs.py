"""Losses, predictions and scores of every task, against numbers by hand and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from small_runs import update
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.evaluation import (
    CRITERIA,
    binary_cross_entropy,
    determination,
    further_scores,
    in_units,
    label_vectors,
    macro_f1,
    macro_f1_of_labels,
    main_of,
    micro_f1,
    predicted,
    score_samples,
    value_sums,
)
from clients.core.own_scores import named_scores
from fedapps.common.tasks import BINARY, CLASSES, LABELS, TASKS, VALUES, Targets
from partitions.shares import Samples, Share
from strategies.core.evaluation import r2_scores

# Two outputs of different units: about 100 ± 20, and 0.5 ± 0.01.
UNITS = Targets(VALUES, mean=(100.0, 0.5), std=(20.0, 0.01))


def tensor(*rows) -> Tensor:
    return torch.tensor(rows)


def drawn(n, k, seed=0):
    """Outputs (n, k), and labels (n, k) that they explain in part."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, k, generator=generator)
    return z, 0.8 * z + 0.5 * torch.randn(n, k, generator=generator) + 0.3


def test_each_task_has_a_loss():
    assert CRITERIA.keys() == TASKS.keys()
    assert CRITERIA[CLASSES] is F.cross_entropy
    assert CRITERIA[BINARY] is CRITERIA[LABELS] is binary_cross_entropy
    # (1² + 3²) / 2 = 5, the mean over samples and outputs
    assert float(CRITERIA[VALUES](tensor([1.0], [2.0]), tensor([0.0], [5.0]))) == 5


def test_binary_cross_entropy_by_hand():
    """σ(ln 3) = ¾. One output: the labels 1 and 0 have the probabilities ¾ and ¼, hence
    (−ln ¾ − ln ¼) / 2. Several labels: the mean over all of them."""
    ln3 = math.log(3)
    z = tensor([ln3], [ln3])
    expected = -(math.log(3 / 4) + math.log(1 / 4)) / 2
    assert float(binary_cross_entropy(z, tensor(1, 0))) == pytest.approx(expected)
    z = tensor([ln3, -ln3], [ln3, ln3])
    y = tensor([1.0, 0.0], [0.0, 1.0])
    expected = -(3 * math.log(3 / 4) + math.log(1 / 4)) / 4
    assert float(binary_cross_entropy(z, y)) == pytest.approx(expected)
    assert float(binary_cross_entropy(z, y.to(torch.int8))) == pytest.approx(expected)


def test_binary_cross_entropy_agrees_with_scikit_learn():
    z, y = drawn(50, 1)
    y = (y[:, 0] > 0).long()
    expected = sklearn.log_loss(y, z.sigmoid().double())
    assert float(binary_cross_entropy(z, y)) == pytest.approx(expected, rel=1e-5)


def test_binary_is_the_softmax_of_0_and_z():
    z, y = drawn(50, 1)
    y = (y[:, 0] > 0).long()
    two = torch.cat([torch.zeros_like(z), z], 1)
    assert float(binary_cross_entropy(z, y)) == pytest.approx(float(F.cross_entropy(two, y)))
    assert torch.equal(predicted(z, Targets(BINARY)), predicted(two, Targets(CLASSES)))


def test_predictions():
    z = tensor([0.5, 2.0, -1.0], [-0.1, -2.0, -1.0])
    assert predicted(z, Targets(CLASSES)).tolist() == [1, 0]
    assert predicted(z[:, :1], Targets(BINARY)).tolist() == [1, 0]
    assert predicted(z, Targets(LABELS)).tolist() == [[1, 1, 0], [0, 0, 0]]
    for task in (CLASSES, BINARY, LABELS):  # F1 of classes counts whole numbers
        assert predicted(z, Targets(task)).dtype == torch.int64
    # A probability of exactly a half is no.
    assert predicted(tensor([0.0]), Targets(BINARY)).tolist() == [0]
    assert predicted(tensor([0.0]), Targets(LABELS)).tolist() == [[0]]
    # 1 and −2 deviations
    z = tensor([1.0, -2.0])
    assert predicted(z, UNITS)[0].tolist() == pytest.approx([120, 0.48])
    assert in_units(z, UNITS)[0].tolist() == pytest.approx([120, 0.48])
    assert predicted(z, Targets(VALUES)).tolist() == z.tolist()  # not standardised


def test_labels_as_vectors():
    assert label_vectors(tensor(2, 0), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert label_vectors(tensor(1, 0), 1).tolist() == [[1], [0]]
    values = tensor([0.5, -1.0], [2.0, 0.0])
    assert label_vectors(values, 2) is values
    assert label_vectors(values[:, :1], 1).tolist() == [[0.5], [2.0]]


def test_the_main_score_by_hand():
    z = tensor([2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [1.0, 2.0])
    assert main_of(z, tensor(0, 1, 1, 1), Targets(CLASSES)) == 0.75
    assert main_of(z[:, 1:] - 1.5, tensor(0, 1, 1, 1), Targets(BINARY)) == 0.75
    # All labels of a sample must be right: half of these three are, but only one sample.
    z = tensor([1.0, 1.0], [1.0, -1.0], [-1.0, 1.0])
    y = tensor([1.0, 1.0], [1.0, 1.0], [1.0, 0.0])
    assert main_of(z, y, Targets(LABELS)) == pytest.approx(1 / 3)
    # Errors of 20, 40 in one unit, 0.01, 0 in the other: √((400 + 1600 + 0.0001) / 4).
    z = tensor([0.0, 1.0], [0.0, 0.0])
    y = tensor([1.0, 0.0], [-2.0, 0.0])
    assert main_of(z, y, UNITS) == pytest.approx(math.sqrt(2000.0001 / 4))
    assert main_of(z, y, Targets(VALUES)) == pytest.approx(math.sqrt(6 / 4))
    scores = further_scores(z, y, UNITS)
    assert scores["mae"] == pytest.approx(60.01 / 4)


@pytest.mark.parametrize("targets", [UNITS, Targets(VALUES)])
def test_scores_of_values_agree_with_scikit_learn(targets):
    """RMSE, MAE and R² of values in their unit, of outputs with different ones."""
    z, y = drawn(60, 2)
    given = in_units(y, targets).double()
    prediction = in_units(z, targets).double()
    scores = further_scores(z, y, targets)
    assert scores.keys() == {"mae", "r2"}
    rmse = sklearn.mean_squared_error(given, prediction) ** 0.5
    assert main_of(z, y, targets) == pytest.approx(rmse, rel=1e-5)
    assert scores["mae"] == pytest.approx(sklearn.mean_absolute_error(given, prediction), rel=1e-5)
    assert scores["r2"] == pytest.approx(sklearn.r2_score(given, prediction), rel=1e-5)


def test_scores_of_labels_by_hand():
    """Label 0: TP 1, FP 1, FN 0, F1 ⅔. Label 1: TP 0, FN 1, F1 0. Label 2 neither occurs nor is
    predicted, and does not count. Over all: 2·1 / (2·1 + 1 + 1)."""
    y = tensor([1, 0, 0], [0, 1, 0])
    prediction = tensor([1, 0, 0], [1, 0, 0])
    assert macro_f1_of_labels(y, prediction) == pytest.approx((2 / 3 + 0) / 2)
    assert micro_f1(y, prediction) == 0.5
    nothing = torch.zeros_like(y)
    assert micro_f1(nothing, nothing) == macro_f1_of_labels(nothing, nothing) == 1
    assert micro_f1(nothing, prediction) == macro_f1_of_labels(nothing, prediction) == 0


def test_scores_of_labels_agree_with_scikit_learn():
    z, y = drawn(60, 3)
    y = (y > 0.5).float()
    scores = further_scores(z, y, Targets(LABELS))
    prediction = (z > 0).int().numpy()
    y = y.int().numpy()
    assert scores.keys() == {"micro-f1", "macro-f1"}
    assert scores["micro-f1"] == pytest.approx(sklearn.f1_score(y, prediction, average="micro"))
    assert scores["macro-f1"] == pytest.approx(sklearn.f1_score(y, prediction, average="macro"))
    accuracy = main_of(z, torch.tensor(y), Targets(LABELS))
    assert accuracy == pytest.approx(sklearn.accuracy_score(y, prediction))


def test_macro_f1_of_classes():
    """Class 0: TP 1, FN 1, F1 ⅔; class 1: never a label, FP 1, F1 0; class 2: never either; class
    3: F1 1."""
    y = tensor(0, 0, 3)
    prediction = tensor(0, 1, 3)
    assert macro_f1(y, prediction) == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert macro_f1(prediction, y) == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert sklearn.f1_score(y, prediction, average="macro") == pytest.approx((2 / 3 + 0 + 1) / 3)
    # The largest class is never predicted, or never a label: F1 ⅔, 0 and 0.
    assert macro_f1(y, tensor(0, 1, 1)) == pytest.approx(2 / 9)
    assert macro_f1(tensor(0, 1, 1), y) == pytest.approx(2 / 9)
    assert further_scores(torch.zeros(3, 4), y, Targets(CLASSES)) == {}
    assert further_scores(torch.zeros(3, 1), y, Targets(BINARY)) == {}


def test_sums_of_values_by_hand():
    """y = 1, 2, z = 1, 4: n 2, Σ y 3, Σ y² 5, Σ (z − y)² 4; then the second output."""
    z = tensor([1.0, 0.0], [4.0, 0.0])
    y = tensor([1.0, 3.0], [2.0, -3.0])
    assert value_sums(z, y) == [2, 3, 5, 4, 2, 0, 18, 18]
    # 1 − 4 / (5 − 9/2) = −7 and 1 − 18/18 = 0
    assert determination([2, 3, 5, 4]) == -7
    assert determination([2, 3, 5, 4, 2, 0, 18, 18]) == -3.5


def test_values_that_are_all_equal_have_no_determination():
    y = torch.full((3, 1), 0.1)
    assert determination(value_sums(y + 1, y)) is None
    assert determination(value_sums(y[:1] + 1, y[:1])) is None
    assert determination([2, 0, 0, 1]) is None
    # Σ y² − (Σ y)² / n of three numbers 123456.7 is 8e-6, by rounding alone.
    y = torch.full((3, 1), 123456.7, dtype=torch.float64)
    assert determination(value_sums(y + 1, y)) is None
    y = torch.full((3, 1), 0.1)
    assert "r2" not in further_scores(y + 1, y, Targets(VALUES))
    # One of two outputs is enough: its term is not known.
    assert determination([2, 3, 5, 4, 2, 2, 2, 0]) is None
    # A small spread around a large mean is one: (1000, 1000.1).
    sums = value_sums(torch.zeros(2, 1), tensor([1000.0], [1000.1]).double())
    assert determination(sums) is not None


def test_sums_of_unequal_clients_give_the_determination_of_all_samples():
    """Five samples and fifty, about different means, of two outputs: R² of all 55, not the mean of
    two clients' R²."""
    z_1, y_1 = drawn(5, 2)
    z_2, y_2 = drawn(50, 2, seed=1)
    y_2 = y_2 * 3 - 7
    sums = np.array([value_sums(z_1, y_1), value_sums(z_2, y_2)])
    pooled = determination(sums.sum(0).tolist())
    z = torch.cat([z_1, z_2])
    y = torch.cat([y_1, y_2])
    assert pooled == pytest.approx(sklearn.r2_score(y, z), rel=1e-6)
    assert pooled == pytest.approx(determination(value_sums(z, y)))
    each = [determination(row.tolist()) for row in sums]
    assert abs(sum(each) / 2 - pooled) > 0.1
    replies = [update(i, {}, **{"value-sums": row.tolist()}) for i, row in enumerate(sums)]
    assert r2_scores(replies) == {"train-r2": pooled}


def scored(targets, x, y, predict):
    """The evaluation of a client that predicts by a linear layer with these weights."""
    network = nn.Linear(x.shape[1], len(predict), bias=False)
    network.weight.data = torch.tensor(predict)
    rows = torch.arange(len(y))
    samples = Samples(x, y, rows, scale=1.0)
    share = Share(samples, samples, None, samples, novel=False, targets=targets)
    client = Client(network, share)
    client.own_scores = named_scores({"count": lambda z, y: torch.tensor(float(len(z) + len(y)))})
    return score_samples(client, samples)


def test_a_client_is_scored_on_labeled_samples_alone():
    """The third sample has no label. Errors of half a deviation of 20, once up and once down."""
    nan = math.nan
    x = tensor([1.0], [2.0], [5.0])
    targets = Targets(VALUES, mean=(100.0,), std=(20.0,))
    loss, count, metrics = scored(targets, x, tensor([1.5], [1.5], [nan]), [[1.0]])
    assert (count, loss) == (2, 0.25)
    assert metrics["rmse"] == metrics["mae"] == pytest.approx(10)
    assert metrics["count"] == 4
    assert metrics["value-sums"] == [2, 3, 4.5, 0.5]
    assert "r2" not in metrics  # both labels are equal
    loss, count, metrics = scored(Targets(LABELS), x, tensor([1.0], [0.0], [nan]), [[1.0]])
    assert count == 2
    assert metrics["accuracy"] == 0.5
    assert metrics["micro-f1"] == pytest.approx(2 / 3)
    loss, count, metrics = scored(Targets(BINARY), x, tensor(1, 0, -1), [[1.0]])
    assert count == 2
    assert metrics["accuracy"] == 0.5
    assert loss == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2)
    assert scored(Targets(BINARY), x, tensor(-1, -1, -1), [[1.0]]) == (0.0, 0, {})


def test_values_far_from_0_keep_their_digits():
    """Points in time around 1.7·10⁹ s, deviation 100 s: z − y = 0.01 is 1 s; float32 has steps of
    128 s there."""
    targets = Targets(VALUES, (1.7e9,), (100.0,))
    y = tensor([0.0], [1.0], [-1.0]).float()
    z = y + 0.01
    assert main_of(z, y, targets) == pytest.approx(1, rel=1e-4)
    assert further_scores(z, y, targets)["mae"] == pytest.approx(1, rel=1e-4)
    found = predicted(z, targets)[:, 0].tolist()
    assert found == pytest.approx([1.7e9 + 1, 1.7e9 + 101, 1.7e9 - 99], abs=1e-3)
