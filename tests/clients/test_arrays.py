"""Flower's records of arrays, written without numpy's file."""

from io import BytesIO

import numpy as np
import pytest
from flwr.app import ArrayRecord

from clients.arrays import to_record

WHOLE = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "array",
    [
        WHOLE.astype(np.float32),
        np.int64([3, -1]),
        np.float16(2.5),
        np.zeros((0, 4)),
        np.array(True),
    ],
)
def test_a_record_holds_the_bytes_that_numpy_saves(array):
    file = BytesIO()
    np.save(file, array)
    written = to_record({"a": array})["a"]
    assert written.data == file.getvalue()
    assert written == ArrayRecord({"a": ArrayRecord([np.asarray(array)])["0"]})["a"]


@pytest.mark.parametrize("view", [WHOLE.T, WHOLE[:, ::2], np.asfortranarray(WHOLE), WHOLE[..., 1]])
def test_views_are_written_row_by_row(view):
    written = to_record({"a": view})["a"]
    assert np.array_equal(np.load(BytesIO(written.data)), view)
    assert (written.dtype, written.shape) == ("float64", view.shape)


def test_objects_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="plain numbers"):
            to_record({"a": np.array([None, "text"])})
