"""`fedapps run model=module:NAME` with networks of one output, of other types, and with `head`."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import defaults

NAMES = ("SingleLogit", "EndsInSigmoid", "Squeezed", "Mixed", "Complex", "Scaled", "ViewFlattens",
         "LogProbabilities")  # fmt: skip


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv(
        external_code.VARIABLE, ",".join(f"unusual_networks:{name}" for name in NAMES)
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Digits 8 × 8 with odd and even numbers, and with the mean brightness, as labels."""
    folder = tmp_path_factory.mktemp("digits")
    digits = load_digits()
    x = digits.images[:600].astype(np.float32)[:, None] / 16
    np.savez(folder / "odd.npz", x=x, y=digits.target[:600] % 2)
    np.savez(folder / "bright.npz", x=x, y=x.mean((1, 2, 3)) * 50)
    return folder


def trained(network, method="fedavg", **changes):
    config = defaults() | {
        "method": method, "model": f"unusual_networks:{network}", "num-clients": 4,
        "partition": "iid", "rounds": 2, "local-steps": 10, "evaluate-every": 2, "lr": 0.1,
    }  # fmt: skip
    config |= changes
    result = run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    return result.arrays, result.evaluate_metrics_clientapp[2]


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_one_output_serves_two_classes_and_one_value(method, files):
    changes = {"dataset": str(files / "odd.npz"), "task": "binary"}
    network = "SingleLogit" if method == "fedavg" else "Squeezed"
    _, scores = trained(network, method, **changes)
    assert scores["train-accuracy"] > 0.6
    changes = {"dataset": str(files / "bright.npz"), "task": "values", "local-steps": 100}
    _, scores = trained("Squeezed", method, **changes)
    assert scores["train-r2"] > 0.3


@pytest.mark.parametrize(
    ("network", "changes", "words"),
    [
        ("SingleLogit", {}, r"gives one output; .*10 outputs, or declare task=binary"),
        ("ViewFlattens", {"task": "binary"}, r"gives 10 outputs, and task=binary needs one"),
        ("EndsInSigmoid", {"task": "binary"}, r"gives probabilities.*leave the sigmoid out$"),
        ("Complex", {}, r"Complex has complex parameters or buffers.*: weight; keep real"),
        ("Scaled", {"method": "fedper"}, r"does not end in .*name the layer .* as head=out"),
        ("Scaled", {"head": "uot", "method": "fedper"}, r"head is 'uot', but .*no layer.*'out'"),
        ("Scaled", {"head": "out", "method": "t3a"}, r"t3a computes with the features before"),
    ],
)
def test_what_does_not_fit_names_the_declaration(network, changes, words, files):
    if changes.get("task"):
        changes = changes | {"dataset": str(files / "odd.npz")}
    with pytest.raises(ValueError, match=words):
        trained(network, **changes)


@pytest.mark.parametrize(
    ("network", "head", "shared"),
    [
        ("Scaled", "out", ["body.body.bias", "body.body.weight", "body.temperature"]),
        ("LogProbabilities", "second", ["body.first.bias", "body.first.weight"]),
    ],
)
def test_a_declared_head_stays_on_the_client(network, head, shared):
    """What stands behind it is shared, and the network computes what it did."""
    arrays, scores = trained(network, "fedper", head=head)
    assert sorted(arrays) == shared
    assert scores["train-accuracy"] > 0.2


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "apfl", "pfedme", "flowdup"])
def test_trained_and_frozen_parameters_of_other_types(method):
    arrays, scores = trained("Mixed", method)
    assert not any("fixed" in name for name in arrays)
    assert 0 <= scores["train-accuracy"] <= 1
