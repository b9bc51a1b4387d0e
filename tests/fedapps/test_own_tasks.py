"""What labels mean is declared to `client_app` and `server_app`: the loss and the scores follow."""

import math

import numpy as np
import pytest
import torch
from component_runs import run_components
from flwr.app import Context, RecordDict
from torch import nn
from torch.nn import functional as F

import fedapps
from fedapps.common.seeds import drawing
from fedapps.engines.in_process_grid import InProcessGrid

X = torch.rand(12, 5, generator=torch.Generator().manual_seed(0)) - 0.5
TWO = (X[:, 0] > 0).long()
SEVERAL = (X[:, :3] > 0).long()
NUMBERS = X[:, :1] * 7 + 2


def linear(outputs=1):
    return nn.Linear(5, outputs)


class Squeezed(nn.Module):
    """A regression as many write it: outputs (n,), and () for one sample."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.body(x)).squeeze()


class EndsInSigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(torch.relu(self.body(x))))


def one_step(loss, make=linear, labels=None, lr=0.1):
    """The parameters after one step of gradient descent on all samples, by torch alone."""
    with drawing(0):
        net = make()
    loss(net(X), labels).backward()
    return {n: (p - lr * p.grad).detach().numpy() for n, p in net.named_parameters()}


def trained(labels, task, model=linear, **settings):
    data = ((X, labels), (X, labels))
    settings = {"local_steps": 1, "batch_size": 12} | settings
    return run_components("fedavg", model, data, (5,), task=task, **settings)


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


def bce(z, y):
    return F.binary_cross_entropy_with_logits(z, y.float().view(z.shape))


@pytest.mark.parametrize(
    "form",
    [
        TWO,
        TWO.bool(),
        TWO.float(),
        TWO[:, None],
        2 * TWO - 1,
        TWO.numpy().astype(np.int32),
    ],
    ids=["0 and 1", "truth values", "decimals", "a column", "signs", "numpy"],
)
def test_two_classes_and_one_output(form):
    """One step of the binary cross entropy; an output above 0 is the second class."""
    arrays, scores = trained(form, "binary")
    expected = one_step(bce, labels=TWO)
    close(arrays, expected)
    z = X.numpy() @ expected["weight"].T + expected["bias"]
    assert scores["train-accuracy"] == pytest.approx(((z[:, 0] > 0) == TWO.numpy()).mean())
    assert scores["train-loss"] == pytest.approx(float(bce(torch.tensor(z), TWO)), rel=1e-5)


def test_several_labels_at_once():
    arrays, scores = trained(SEVERAL, "labels", lambda: linear(3))
    expected = one_step(bce, lambda: linear(3), SEVERAL)
    close(arrays, expected)
    z = X.numpy() @ expected["weight"].T + expected["bias"]
    assert scores["train-accuracy"] == pytest.approx(((z > 0) == SEVERAL.numpy()).all(1).mean())


@pytest.mark.parametrize("labels", [NUMBERS, NUMBERS[:, 0], NUMBERS[:, 0].numpy().astype(float)])
def test_values(labels):
    """One step of the mean square error, in the labels' own unit."""
    arrays, scores = trained(labels, "values")
    expected = one_step(F.mse_loss, labels=NUMBERS)
    close(arrays, expected)
    error = X.numpy() @ expected["weight"].T + expected["bias"] - NUMBERS.numpy()
    assert scores["train-rmse"] == pytest.approx(float(np.sqrt((error**2).mean())), rel=1e-5)
    assert scores["train-mae"] == pytest.approx(float(abs(error).mean()), rel=1e-5)


@pytest.mark.parametrize("batch_size", [12, 1])
def test_outputs_of_one_number_are_a_column(batch_size):
    """(12,) beside labels (12, 1) would be compared as (12, 12), by broadcasting."""
    arrays, _ = trained(NUMBERS, "values", Squeezed, batch_size=batch_size, seed=0)
    if batch_size == 12:
        close(arrays, one_step(lambda z, y: F.mse_loss(z[:, None], y), Squeezed, NUMBERS))
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_items_have_the_same_labels():
    """Each item's label is a number, a vector, or a column of one."""
    for task, labels, make in (
        ("binary", TWO, linear),
        ("labels", SEVERAL, lambda: linear(3)),
        ("values", NUMBERS, linear),
    ):
        items = list(zip(X, labels, strict=True))
        settings = {"local_steps": 1, "batch_size": 12, "task": task}
        as_items, scores = run_components("fedavg", make, (items, items), (5,), **settings)
        as_tensors, expected = trained(labels, task, make)
        close(as_items, as_tensors)
        assert scores.keys() == expected.keys()


def test_own_scores_are_functions_of_outputs_and_labels():
    seen = []

    def worst(outputs, labels):
        seen.append((tuple(outputs.shape), tuple(labels.shape)))
        return (outputs - labels).abs().max()

    _, scores = trained(NUMBERS, "values", scores={"worst": worst})
    expected = one_step(F.mse_loss, labels=NUMBERS)
    error = X.numpy() @ expected["weight"].T + expected["bias"] - NUMBERS.numpy()
    assert scores["train-worst"] == pytest.approx(float(abs(error).max()), rel=1e-5)
    _, scores = trained(TWO, "binary", scores={"worst": worst})
    assert seen == [((12,), (12,))] * 2


@pytest.mark.parametrize("name", ["accuracy", "loss", "macro_f1", "two words", "f1"])
def test_a_scores_name_must_be_free(name):
    with pytest.raises(ValueError, match=f"a score is called {name!r}, which is the name of ano"):
        trained(TWO, "binary", scores={name: lambda z, y: 0})


def test_a_score_must_be_a_function_and_give_a_number(caplog):
    with pytest.raises(ValueError, match="the score 'mine' is 3; it must be a function of outputs"):
        trained(TWO, "binary", scores={"mine": 3})
    _, scores = trained(TWO, "binary", scores={"mine": lambda z, y: z})
    assert "train-mine" not in scores and "train-accuracy" in scores
    assert scores["train-not-finite-mine"] == 1
    assert "the score 'mine' gave tensor" in caplog.text
    assert "it must give one number; such clients are left out of the mean mine" in caplog.text


REFUSED = [
    (TWO, "classes", linear, r"gives one output; task=classes .*task=binary .* or task=values"),
    (TWO, "binary", lambda: linear(2), r"gives 2 outputs, and task=binary needs one.*task=classes"),
    (torch.arange(12) % 3, "binary", linear, r"the label 2; task=binary needs 0 and 1"),
    (torch.arange(12) % 3 - 1, "binary", linear, r"the label -1"),
    (NUMBERS[:, 0], "classes", lambda: linear(2), r"labels are decimals.*set task=values"),
    (SEVERAL, "classes", lambda: linear(3), r"labels have 3 columns.*task=labels"),
    (SEVERAL, "labels", lambda: linear(2), r"3 labels or values, but the network has 2 outputs"),
    (SEVERAL + 1, "labels", lambda: linear(3), r"task=labels needs 0 and 1"),
    (NUMBERS * math.nan, "values", linear, r"row 0 has the label .*fill them in"),
    (TWO, "auto", linear, r"task is 'auto', but the labels of one node cannot tell"),
    (TWO, "regression", linear, r"task.*'regression'"),
]


@pytest.mark.parametrize(("labels", "task", "model", "words"), REFUSED)
def test_what_does_not_fit_together_names_the_declaration(labels, task, model, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        trained(labels, task, model)


def test_both_halves_need_the_same_task():
    """A linear layer of one output serves both, so that nothing else would tell."""
    data = ((X, NUMBERS), (X, NUMBERS))
    client = fedapps.client_app("fedavg", model=linear, data=lambda _: data, task="values")
    server = fedapps.server_app(
        "fedavg", model=linear, shape=(5,), rounds=1, min_available_nodes=1, task="binary"
    )
    grid = InProcessGrid(client, {}, [{"partition-id": 0}])
    with pytest.raises(RuntimeError, match="client_app has task 'values' and server_app 'binary'"):
        server(grid, Context(1, 0, {}, RecordDict(), {}))


def test_a_method_refuses_a_task_that_it_does_not_serve():
    for half in (fedapps.client_app, fedapps.server_app):
        options = {"data": lambda _: X} if half is fedapps.client_app else {"shape": (5,)}
        with pytest.raises(ValueError, match="tent serves classes, binary, not task=values"):
            half("tent", model=linear, task="values", **options)


def test_a_sigmoid_at_the_end_is_never_squashed_twice():
    """Refused, or declared: then one step is that of the cross entropy of the probabilities, and
    a probability above a half is the second class."""
    with pytest.raises(RuntimeError, match=r"EndsInSigmoid gives probabilities.*outputs='probab"):
        trained(TWO, "binary", EndsInSigmoid)
    for loss in (None, nn.BCELoss()):
        arrays, scores = trained(TWO, "binary", EndsInSigmoid, outputs="probabilities", loss=loss)
        expected = one_step(lambda p, y: F.binary_cross_entropy(p, y.float()[:, None]),
                            EndsInSigmoid, TWO)  # fmt: skip
        close(arrays, expected)
        net = EndsInSigmoid()
        net.load_state_dict({name: torch.tensor(a) for name, a in expected.items()})
        right = ((net(X)[:, 0] > 0.5).long() == TWO).float().mean()
        assert scores["train-accuracy"] == pytest.approx(float(right))


def test_a_softmax_at_the_end_is_never_squashed_twice():
    def net():
        return nn.Sequential(linear(3), nn.Softmax(1))

    labels = torch.arange(12) % 3
    with pytest.raises(RuntimeError, match=r"gives probabilities, as a softmax.*leave the softmax"):
        trained(labels, "classes", net)
    arrays, _ = trained(labels, "classes", net, outputs="probabilities")
    close(arrays, one_step(lambda p, y: F.nll_loss(p.log(), y), net, labels))


def test_outputs_is_checked():
    with pytest.raises(ValueError, match="outputs is 'percent'; it must be 'logits' or 'probab"):
        trained(TWO, "binary", outputs="percent")


def test_head_methods_serve_one_output():
    """FedPer's head stays on the client."""
    data = ((X, TWO), (X, TWO))
    arrays, scores = run_components("fedper", Squeezed, data, (5,), task="binary", count=2)
    assert sorted(arrays) == ["body.body.bias", "body.body.weight"]
    assert 0 <= scores["train-accuracy"] <= 1


def test_labels_of_test_samples_are_checked_as_those_of_training():
    """The network has two outputs, and a test sample the label 2."""
    wrong = TWO.clone()
    wrong[5] = 2
    parts = ((X, TWO), (X, TWO), (X, wrong))
    with pytest.raises(RuntimeError, match="row 5 has the label 2, but the network has 2 outputs"):
        run_components("fedavg", lambda: linear(2), parts, (5,), local_steps=1, batch_size=12)
