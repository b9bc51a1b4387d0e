"""Facts and figures where labels are values, or several at once."""

import numpy as np
import pytest
from small_runs import invoke

from fedapps.settings.config import defaults, override
from partitions import federation, inspect


@pytest.fixture
def files(tmp_path):
    """Twelve samples: values 0, 2.5, …, 27.5; the second label is always there."""
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    np.savez(tmp_path / "values.npz", x=x, y=2.5 * np.arange(12))
    labels = np.stack([np.arange(12) % 3 == 0, np.arange(12) >= 0], 1).astype(int)
    np.savez(tmp_path / "labels.npz", x=x, y=labels)
    return tmp_path


def clients(file):
    changes = {"dataset": str(file), "partition": "iid", "num-clients": 2}
    return federation(override(defaults(), changes))


def test_values_have_quantiles_in_their_unit(files):
    file = files / "values.npz"
    facts = inspect.summary(str(file))
    assert facts.quantiles == {"0": [0, 6.875, 13.75, 20.625, 27.5]}
    assert not facts.class_counts
    found = np.concatenate(inspect.client_values(clients(file)))
    assert np.sort(found[:, 0]) == pytest.approx(2.5 * np.arange(12), abs=1e-5)
    panels = inspect.figure(clients(file)).axes
    assert [axis.get_title() for axis in panels] == ["1 training clients", "1 novel clients"]
    output = invoke("data", file).output
    assert "1 value to predict (regression), inputs (2,)" in output and "13.75" in output
    shown = invoke("partition", "show", f"dataset={file}", "partition=iid", "num-clients=2",
                   "--output", files / "x.png").output  # fmt: skip
    assert "medians of clients" in shown and "total variation" not in shown


def test_several_labels_are_counted_one_by_one(files):
    facts = inspect.summary(str(files / "labels.npz"))
    assert facts.class_counts == {"0": 4, "1": 12}
    federated = clients(files / "labels.npz")
    assert inspect.class_counts(federated).sum(0).tolist() == [4, 12]
    assert inspect.sample_counts(federated).tolist() == [6, 6]
    assert "2 labels, several at once" in invoke("data", files / "labels.npz").output
