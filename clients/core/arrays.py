"""Named arrays: the contents of models, messages and state.

Groups of arrays are name prefixes, e.g. ``control/fc1.weight``."""

import math
import re
import time
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, Metadata, MetricRecord, RecordDict
from torch import Tensor, nn

from clients.core.layout import layout_of

Arrays = dict[str, np.ndarray]
R = TypeVar("R", ArrayRecord, MetricRecord, RecordDict)
# Running statistics of a normalisation layer have these names in torch and in Keras.
MEANS = ("running_mean", "moving_mean")
VARIANCE = ("running_var", "moving_variance")
# Torch's floating-point types that numpy has as well.
NUMPY_FLOATS = {torch.float16, torch.float32, torch.float64}
# Flower's name of the serialisation as a .npy file.
NUMPY = "numpy.ndarray"


def group(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays under ``prefix/``, without the prefix."""
    start = f"{prefix}/"
    return {name[len(start) :]: a for name, a in arrays.items() if name.startswith(start)}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays as the group ``prefix/``."""
    return {f"{prefix}/{name}": a for name, a in arrays.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of the arrays, under the same names."""
    entries = {name: write_array(np.asarray(array)) for name, array in arrays.items()}
    return filled(ArrayRecord(), entries)


def filled(record: R, entries: Mapping[str, Any]) -> R:
    """Flower's `record` with the `entries`, which must have the right types.

    The record's own methods check every entry, which takes a tenth of a short round's time."""
    vars(record)["_data"].update(entries)
    return record


def reply_with(content: RecordDict, message: Message) -> Message:
    """``Message(content, reply_to=message)`` in a third of the time."""
    request = vars(message.metadata)
    now = time.time()
    metadata = Metadata.__new__(Metadata)
    vars(metadata).update(
        request,
        _message_id="",
        _src_node_id=request["_dst_node_id"],
        _dst_node_id=request["_src_node_id"],
        _src_task_id=request["_dst_task_id"],
        _dst_task_id=request["_src_task_id"],
        _reply_to_message_id=request["_message_id"],
        _created_at=now,
        _ttl=request["_created_at"] + request["_ttl"] - now,
        _delivered_at="",
    )
    reply = Message.__new__(Message)
    vars(reply).update(_metadata=metadata, _content=content, _error=None)
    return reply


def to_metrics(metrics: Mapping[str, Any]) -> MetricRecord:
    """Flower's record of the metrics. Raises TypeError for a value that it cannot hold."""
    if all(type(value) in (int, float) for value in metrics.values()):
        return filled(MetricRecord(), metrics)
    return MetricRecord(dict(metrics))


def write_array(array: np.ndarray) -> Array:
    """``Array(array)`` in a fifth of the time, in row-major order.

    Raises ValueError for entries that are not plain numbers or texts."""
    dtype, header = _npy_header(array.dtype, array.shape)
    data = b"".join((header, np.ascontiguousarray(array).data))
    result = Array.__new__(Array)  # the constructor compares the types of all arguments
    vars(result).update(dtype=dtype, shape=array.shape, stype=NUMPY, data=data)
    return result


@lru_cache(maxsize=1024)
def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, bytes]:
    """The dtype's name, and the header of a .npy file for such an array."""
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype}; its entries must be plain numbers")
    descr = np.lib.format.dtype_to_descr(dtype)
    file = BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return str(dtype), file.getvalue()


def from_record(record: ArrayRecord, *, copy: bool = True) -> Arrays:
    """The named arrays of Flower's record, which is not trusted.

    Without `copy` the arrays are read-only and share the record's memory. Raises ValueError for
    bytes that are not an array, or an error of numpy's header reader."""
    return {name: read_array(array, copy=copy) for name, array in record.items()}


def read_array(array: Array, *, copy: bool = True) -> np.ndarray:
    """The array in the bytes of a .npy file, which takes no more memory than the bytes.

    Without `copy` the array is read-only. It then shares the memory of the bytes unless its entries
    are misaligned there.

    Raises ValueError for any other file, for entries that are not plain numbers, and for a header
    that does not match the number of bytes."""
    try:
        shape, fortran, dtype, start = _parsed_header_cached(array.data[:HEADER_BYTES])
    except ValueError:  # the header is longer, or there is none
        shape, fortran, dtype, start = _parsed_header(array.data)
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise ValueError(f"an array of {dtype}; its entries must be plain numbers")
    if start + math.prod(shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"{len(array.data) - start} bytes for an array of {dtype}, shape {shape}")
    order: Any = "F" if fortran else "C"
    view = np.ndarray(shape, dtype, array.data, start, order=order)
    if copy or not view.flags.aligned:
        return view.copy(order)
    return view


def _parsed_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, whether the order is column-major, dtype, and the offset of the first entry."""
    file = BytesIO(data)
    version = np.lib.format.read_magic(file)  # raises ValueError for a zip file or a pickle
    if version not in HEADERS:
        raise ValueError(f"an array of .npy version {version}; known: {list(HEADERS)}")
    return *HEADERS[version](file), file.tell()


HEADER_BYTES = 128  # length of numpy's header for an array of a few dimensions
# Numpy parses each header as Python code, which is slow.
_parsed_header_cached = lru_cache(maxsize=1024)(_parsed_header)
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def to_numpy(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors as numpy arrays, which share no memory with a model.

    Floating-point types that numpy lacks, such as bfloat16, become float32 without loss."""
    return {name: as_known_type(t).numpy(force=True).copy() for name, t in tensors.items()}


def as_known_type(tensor: Tensor) -> Tensor:
    """The tensor, converted to float32 if numpy lacks its floating-point type."""
    if tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS:
        return tensor.float()
    return tensor


def to_tensors(arrays: Arrays, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The arrays as tensors on `device`; on the CPU they share the memory of writable arrays."""
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        writable = np.require(array, requirements="W")  # torch warns of a read-only array
        tensors[name] = torch.from_numpy(writable).to(device)
    return tensors


def model_arrays(model: nn.Module, without: Collection[str] = ()) -> Arrays:
    """Copies of a model's parameters and buffers under the names of its ``state_dict``.

    Names in `without` are left out."""
    layout = layout_of(model)
    if layout.views is None:
        return to_numpy({n: t for n, t in layout.tensors.items() if n not in without})
    return {name: view.copy() for name, view in layout.views.items() if name not in without}


class OtherShapeError(ValueError):
    """An array of another shape than the model's."""


def load_into_model(model: nn.Module, arrays: Arrays, fallback: Arrays) -> None:
    """Set every array of the model, from `arrays` or else from `fallback`.

    If a parameter has several names, the array of its first name is used. Raises ValueError for a
    name that the model lacks and for a missing array, OtherShapeError for an array of another
    shape."""
    layout = layout_of(model)
    unknown = arrays.keys() - layout.tensors.keys()
    if unknown:
        known = list(layout.tensors)
        raise ValueError(f"arrays {sorted(unknown)} are unknown to the model: {known}")
    for name in layout.first:
        source = arrays[name] if name in arrays else fallback.get(name)
        if source is None:
            raise ValueError(f"no value for the model's array {name!r}")
        target = layout.tensors[name] if layout.views is None else layout.views[name]
        if source.shape != target.shape:
            raise OtherShapeError(
                f"array {name!r} has shape {source.shape}, the model {tuple(target.shape)}"
            )
        if isinstance(target, Tensor):
            array = np.asarray(source)
            if not array.flags.writeable:  # torch warns of a read-only array
                array = array.copy()
            target.copy_(torch.from_numpy(array))
        else:
            np.copyto(target, source, casting="unsafe")


def is_statistic(name: str, array: np.ndarray) -> bool:
    """Whether the array is averaged and never trained.

    It is a running statistic of a normalisation layer, or has integers or booleans as entries."""
    last_part = re.split(r"[./]", name)[-1]
    return array.dtype.kind != "f" or last_part in (*MEANS, *VARIANCE)


def unclear_statistics(arrays: Arrays) -> list[str]:
    """Names of arrays that could be running statistics, if all arrays are only numbered.

    Running means and variances are neighbouring vectors of one length. The list is empty if some
    array has a proper name."""
    if not all(name.isdecimal() for name in arrays):
        return []
    candidates: dict[str, None] = {}  # an ordered set
    for (name, array), (next_name, next_array) in pairwise(arrays.items()):
        both_floats = array.dtype.kind == next_array.dtype.kind == "f"
        if both_floats and array.ndim == 1 and array.shape == next_array.shape:
            candidates[name] = None
            candidates[next_name] = None
    return list(candidates)


def is_counter(array: np.ndarray) -> bool:
    """Whether the entries are integers or booleans, as in a normalisation layer's count of steps.

    Such an array says how often a client trained, not how far its model moved. Norms and distances
    leave it out, and it does not leave a private client."""
    return array.dtype.kind in "biu"


def wide(array: np.ndarray) -> np.ndarray:
    """The array in float32 or a wider type, for sums and norms.

    In float16, a sum of thousands of numbers stops growing and a square above 65 504 overflows."""
    return array.astype(np.promote_types(array.dtype, np.float32), copy=False)


def as_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in the dtype; for integers and booleans it is rounded and clipped."""
    if dtype.kind == "b":
        array = np.clip(np.rint(array), 0, 1)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        array = np.clip(np.rint(array), limits.min, limits.max)
    # `asarray`, because numpy's arithmetic turns an array without dimensions into a scalar.
    return np.asarray(array, dtype)


def settled(arrays: Arrays, like: Arrays) -> Arrays:
    """The arrays in the order and dtypes of `like`; arrays that `like` lacks come last.

    Variances are raised to at least 0: extrapolation and noise could make them negative."""
    common = [name for name in like if name in arrays]
    result: Arrays = {}
    for name in (*common, *arrays):
        array = np.asarray(arrays[name])
        if name in like and array.dtype != like[name].dtype:
            array = as_type(array, like[name].dtype)
        if name.endswith(VARIANCE) and (array < 0).any():
            array = np.maximum(array, 0)
        result[name] = array
    return result


def num_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Size of the arrays' entries in bytes."""
    return sum(array.nbytes for array in arrays)
