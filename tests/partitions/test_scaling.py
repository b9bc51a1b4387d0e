"""Inputs of a user's own data are scaled by the training clients' training rows, by column or
channel."""

import numpy as np
import pytest
import torch

from fedapps.results.reference import reference
from fedapps.settings.config import defaults
from partitions.datasets.catalog import Info
from partitions.datasets.description import SIGNAL, VECTOR, Description
from partitions.datasets.loading import Dataset
from partitions.datasets.readers.local import read_files
from partitions.federations import Federation

pytestmark = pytest.mark.usefixtures("own_cache")
SPLIT = {
    "partition": "iid",
    "num-clients": 4,
    "train-fraction": 0.5,
    "partition.validation-fraction": 0.25,
    "partition.test-fraction": 0.25,
}


def federation(x, kind, **changes):
    """A federation of inputs x of this kind, with labels 0 and 1 in turn."""
    y = torch.arange(len(x)) % 2
    info = Info("mine", x.shape[1:], 2, "", scale=1.0, inputs=Description(kind))
    dataset = Dataset(info, torch.from_numpy(x), y, len(x), {})
    return Federation(defaults() | SPLIT | changes, dataset)


def training_rows(clients):
    """The rows on which the training clients train."""
    training = np.flatnonzero(~clients.novel)
    return np.concatenate([clients.rows(int(client))["train"] for client in training])


def test_columns_have_their_own_scale():
    """Training clients' training rows, half of the rows of two clients of four, decide: rows of
    validation, of test and of novel clients are set to 1000, which would move every mean."""
    x = np.arange(160.0).reshape(80, 2) * (1, 100)
    rows = training_rows(federation(x, VECTOR))
    others = np.setdiff1d(np.arange(80), rows)
    x[others] = 1000
    scaled = federation(x, VECTOR)
    mean = [sum(x[rows, column].tolist()) / len(rows) for column in (0, 1)]
    assert len(rows) == 20
    assert scaled._mean == pytest.approx(mean)
    client = int(np.flatnonzero(~scaled.novel)[0])
    given = scaled.share(client).train[:][0].numpy()
    deviation = np.sqrt(((x[rows] - mean) ** 2).sum(0) / len(rows))
    expected = (x[scaled.rows(client)["train"]] - mean) / deviation
    np.testing.assert_allclose(given, expected, rtol=1e-6)


@pytest.mark.parametrize("offset", [3e6, 1e9])
def test_a_large_mean_costs_no_digits(offset):
    """±1 beside 10⁹ is lost in a float32, whose neighbours there differ by 64."""
    signs = np.where(np.arange(40) % 3 == 0, 1.0, -1.0)
    scaled = federation(np.stack([offset + signs, signs], axis=1), VECTOR)
    x, _ = scaled.share(0).everything[:]
    np.testing.assert_allclose(x[:, 0], x[:, 1], rtol=1e-6)
    assert len(x[:, 0].unique()) == 2


def test_channels_of_a_signal_have_their_own_scale():
    x = np.ones((40, 2, 5)) * np.arange(40)[:, None, None] * [[1], [7]]
    scaled = federation(x.astype(np.float32), SIGNAL)
    rows = training_rows(scaled)
    assert scaled._mean == pytest.approx((rows.mean(), 7 * rows.mean()))
    assert scaled._std == pytest.approx((rows.std(), 7 * rows.std()))
    given, _ = scaled.share(0).everything[:]
    assert given.shape[1:] == (2, 5)
    torch.testing.assert_close(given[:, 0], given[:, 1])


def test_a_constant_column_becomes_zero():
    x = np.stack([np.arange(40.0), np.full(40, 5.0)], axis=1)
    given, _ = federation(x, VECTOR).share(0).everything[:]
    assert given[:, 1].tolist() == [0] * len(given)


@pytest.mark.parametrize("kind", [VECTOR, SIGNAL])
def test_equal_numbers_whose_mean_rounds_are_not_scaled(kind):
    """Of 20 times 0.1 numpy's mean is another number, by 10⁻¹⁷. Divided by such a deviation, 0.2 of
    a novel client became 10¹⁵ and more: it is 0.1 from the mean, divided by 1."""
    x = np.stack([np.arange(40.0), np.full(40, 0.1)], axis=1)
    if kind == SIGNAL:
        x = x[:, :, None]
    rows = training_rows(federation(x, kind))
    assert x[rows].std(0)[1].max() > 0
    others = np.setdiff1d(np.arange(len(x)), rows)
    x[others, 1] = 0.2
    scaled = federation(x, kind)
    assert (scaled._mean[1], scaled._std[1]) == (0.1, 1)
    client = int(np.flatnonzero(scaled.novel)[0])
    given, _ = scaled.share(client).everything[:]
    np.testing.assert_allclose(given[:, 1].flatten(), 0.1, rtol=1e-6)
    assert reference(scaled).std[1] == 0  # so no distance is told


def test_equal_values_to_predict_whose_mean_rounds_are_refused(tmp_path):
    path = tmp_path / "equal.npz"
    np.savez(path, x=np.arange(40.0)[:, None], y=np.full(40, 0.1))
    with pytest.raises(ValueError, match="output 0 is the same number in all training samples"):
        Federation(defaults() | SPLIT | {"dataset": str(path)})


def test_a_moment_for_each_channel_of_an_image_keeps_its_bits(divide):
    """The package's datasets have no description, and stay as they are by default."""
    plain, auto = divide(dataset=None, standardize="none"), divide(dataset=None)
    for client in (0, 7):
        left, right = plain.share(client).train[:][0], auto.share(client).train[:][0]
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", ["int64", "uint32", ">i8", ">f8"])
@pytest.mark.parametrize("kind", [VECTOR, SIGNAL])
@pytest.mark.parametrize("later", [False, True])
def test_large_whole_numbers_keep_their_digits(tmp_path, dtype, kind, later):
    """Around 1.7·10⁹ s, a time in float32 has steps of 128 s: all these were one number."""
    seconds = 1_700_000_000 + np.arange(40)
    x = np.stack([seconds, np.arange(40) % 7], axis=1).astype(dtype)
    if kind == SIGNAL:
        x = x[:, :, None]
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(40) % 2)
    raw = read_files(tmp_path / "d.npz", inputs=kind, later=later)
    assert raw.x[:, 0].astype(np.int64).flatten().tolist() == seconds.tolist()
    assert torch.from_numpy(raw.x).dtype == torch.float64
