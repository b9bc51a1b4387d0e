"""Flower's records of arrays, written without numpy's file."""

import warnings
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from clients.core.arrays import (
    from_record,
    load_into_model,
    model_arrays,
    read_array,
    reply_with,
    to_metrics,
    to_record,
    to_tensors,
)

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


def test_arrays_that_are_not_copied_are_read_only_but_tensors_of_them_are_not():
    """The record keeps its entries [1, 2] whatever is written to a tensor. Entries behind a header
    of 129 bytes are misaligned, which torch refuses, and are copied."""
    record = to_record({"w": np.float32([1, 2]), "b": np.array(4.0)})
    read = from_record(record, copy=False)
    assert np.shares_memory(read["w"], np.frombuffer(record["w"].data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        read["w"] += 1
    for tensor in to_tensors(read).values():
        tensor.mul_(3)
    assert from_record(record)["w"].tolist() == [1, 2] and from_record(record)["b"] == 4
    data = bytearray(record["w"].data)
    data[8:10] = (len(data) - 8 - 10 + 1).to_bytes(2, "little")  # the header, one space longer
    data.insert(127, ord(" "))
    shifted = Array("float32", (2,), "numpy.ndarray", bytes(data))
    assert read_array(shifted, copy=False).flags.aligned
    assert read_array(shifted, copy=False).tolist() == [1, 2]


def test_a_model_takes_read_only_arrays_without_a_warning():
    model = nn.Linear(3, 2)
    arrays = from_record(to_record(model_arrays(nn.Linear(3, 2))), copy=False)
    torch.set_warn_always(True)  # else once in a process
    try:
        with warnings.catch_warnings(action="error"):
            load_into_model(model, arrays, {})
    finally:
        torch.set_warn_always(False)
    for name, array in model_arrays(model).items():
        assert np.array_equal(array, arrays[name])


def test_a_reply_has_the_metadata_that_flower_gives_it(monkeypatch):
    """The task's number is 5 and that of the node's task 9; the message came from node 0."""
    for name, value in {"run_id": 3, "node_id": 0, "task_id": 5}.items():
        monkeypatch.setattr(TaskIdentity, f"_{name}", value, raising=False)
        setattr(TaskIdentity, name, value)
    message = Message(RecordDict(), 8, "train.more", ttl=100.0, group_id="g", dst_task_id=9)
    vars(message.metadata)["_message_id"] = "asked"
    content = RecordDict({"metrics": MetricRecord({"loss": 0.5})})
    expected, reply = Message(content, reply_to=message), reply_with(content, message)
    assert reply.content is content and not reply.has_error()
    assert vars(reply).keys() == vars(expected).keys()
    ours, theirs = vars(reply.metadata), vars(expected.metadata)
    times = ("_created_at", "_ttl")
    assert {n: v for n, v in ours.items() if n not in times} == {
        n: v for n, v in theirs.items() if n not in times
    }
    for name in times:
        assert ours[name] == pytest.approx(theirs[name], abs=1.0)
    assert ours["_created_at"] + ours["_ttl"] == message.metadata.created_at + 100


@pytest.mark.parametrize("metrics", [{"a": 3, "b": 0.5}, {"a": [1, 2]}, {}])
def test_metrics_are_a_record(metrics):
    assert to_metrics(metrics) == MetricRecord(dict(metrics))
    assert type(to_metrics(metrics)) is MetricRecord


@pytest.mark.parametrize("value", [True, "text", np.float32(1), None])
def test_other_values_are_no_metrics(value):
    with pytest.raises(TypeError):
        to_metrics({"a": 1, "b": value})
