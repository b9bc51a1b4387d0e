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
# Statistics of a normalisation layer, by the last part of their names: torch's, then Keras's.
MEANS = ("running_mean", "moving_mean")
VARIANCE = ("running_var", "moving_variance")
NUMPY_FLOATS = {torch.float16, torch.float32, torch.float64}
NUMPY = "numpy.ndarray"  # Flower's name of a serialised .npy file


def group(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays under ``prefix/``, without the prefix."""
    start = f"{prefix}/"
    return {name[len(start) :]: a for name, a in arrays.items() if name.startswith(start)}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays as the group ``prefix/``."""
    return {f"{prefix}/{name}": a for name, a in arrays.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of the arrays, names kept."""
    return filled(ArrayRecord(), {n: write_array(np.asarray(a)) for n, a in arrays.items()})


def filled(record: R, entries: Mapping[str, Any]) -> R:
    """Flower's `record` with `entries` of the right types, which its constructor would check one
    by one, in a tenth of a short round's time."""
    vars(record)["_data"].update(entries)
    return record


def reply_with(content: RecordDict, message: Message) -> Message:
    """``Message(content, reply_to=message)`` in a third of the time."""
    metadata, reply = Metadata.__new__(Metadata), Message.__new__(Message)
    asked, now = vars(message.metadata), time.time()
    vars(metadata).update(
        asked,
        _message_id="",
        _src_node_id=asked["_dst_node_id"],
        _dst_node_id=asked["_src_node_id"],
        _src_task_id=asked["_dst_task_id"],
        _dst_task_id=asked["_src_task_id"],
        _reply_to_message_id=asked["_message_id"],
        _created_at=now,
        _ttl=asked["_created_at"] + asked["_ttl"] - now,
        _delivered_at="",
    )
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
    dtype, header = _described(array.dtype, array.shape)
    data = b"".join((header, np.ascontiguousarray(array).data))
    result = Array.__new__(Array)  # its constructor would compare the types of all arguments
    vars(result).update(dtype=dtype, shape=array.shape, stype=NUMPY, data=data)
    return result


@lru_cache(maxsize=1024)
def _described(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, bytes]:
    """The dtype's name, and the header of a .npy file."""
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype}; its entries must be plain numbers")
    descr = np.lib.format.dtype_to_descr(dtype)
    file = BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return str(dtype), file.getvalue()


def from_record(record: ArrayRecord, *, copy: bool = True) -> Arrays:
    """The named arrays of Flower's record, which is not trusted.

    Without `copy` they are read-only and share the record's memory. Raises ValueError for bytes
    that are not an array, or an error of numpy's header reader."""
    return {name: read_array(array, copy=copy) for name, array in record.items()}


def read_array(array: Array, *, copy: bool = True) -> np.ndarray:
    """The array in the bytes of a .npy file; it takes no more memory than the bytes.

    Without `copy` it is read-only and, unless its entries are misaligned, in the same memory.

    Raises ValueError for any other file, for entries that are not plain numbers, and for a header
    that does not match the number of bytes."""
    try:
        shape, fortran, dtype, start = _cached_header(array.data[:HEADER_BYTES])
    except ValueError:  # a longer header, or none
        shape, fortran, dtype, start = _header(array.data)
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise ValueError(f"an array of {dtype}; its entries must be plain numbers")
    if start + math.prod(shape) * dtype.itemsize != len(array.data):
        raise ValueError(f"{len(array.data) - start} bytes for an array of {dtype}, shape {shape}")
    order: Any = "F" if fortran else "C"
    view = np.ndarray(shape, dtype, array.data, start, order=order)
    return view.copy(order) if copy or not view.flags.aligned else view


def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, whether in column-major order, dtype, and where the entries start."""
    file = BytesIO(data)
    version = np.lib.format.read_magic(file)  # a zip or a pickle has another magic
    if version not in HEADERS:
        raise ValueError(f"an array of .npy version {version}; known: {list(HEADERS)}")
    return *HEADERS[version](file), file.tell()


HEADER_BYTES = 128  # of the header that numpy writes for arrays of a few dimensions
_cached_header = lru_cache(maxsize=1024)(_header)  # numpy parses each as Python code
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def to_numpy(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors as numpy arrays; they share no memory with a model.

    Floats of a width that numpy lacks, such as bfloat16, become float32, which holds them all."""
    return {name: as_known_type(t).numpy(force=True).copy() for name, t in tensors.items()}


def as_known_type(tensor: Tensor) -> Tensor:
    """The tensor, or in float32 if numpy lacks its type."""
    lacks = tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS
    return tensor.float() if lacks else tensor


def to_tensors(arrays: Arrays, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The arrays as tensors on `device`; on the CPU they share the memory of writable arrays."""
    writable = {name: np.require(a, requirements="W") for name, a in arrays.items()}
    return {name: torch.from_numpy(a).to(device) for name, a in writable.items()}


def model_arrays(model: nn.Module, without: Collection[str] = ()) -> Arrays:
    """Copies of parameters and buffers of a model under the names of its ``state_dict``, but for
    the names in `without`."""
    layout = layout_of(model)
    if layout.views is None:
        return to_numpy({n: t for n, t in layout.tensors.items() if n not in without})
    return {name: view.copy() for name, view in layout.views.items() if name not in without}


def load_into_model(model: nn.Module, arrays: Arrays, fallback: Arrays) -> None:
    """Set all arrays of the model, from `arrays` or else from `fallback`.

    Of a tied parameter's names the first one counts. Raises ValueError for an array that the model
    lacks, for one that is missing and for one of another shape."""
    layout = layout_of(model)
    if unknown := arrays.keys() - layout.tensors.keys():
        known = list(layout.tensors)
        raise ValueError(f"arrays {sorted(unknown)} are unknown to the model: {known}")
    for name in layout.first:
        source = arrays[name] if name in arrays else fallback.get(name)
        if source is None:
            raise ValueError(f"no value for the model's array {name!r}")
        target = layout.tensors[name] if layout.views is None else layout.views[name]
        if source.shape != target.shape:
            raise ValueError(
                f"array {name!r} has shape {source.shape}, the model {tuple(target.shape)}"
            )
        if isinstance(target, Tensor):
            array = np.asarray(source)  # torch warns of a read-only one
            target.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
        else:
            np.copyto(target, source, casting="unsafe")


def is_statistic(name: str, array: np.ndarray) -> bool:
    """Whether the array is averaged and never trained: a running statistic of a normalisation
    layer, or an array of integers or booleans."""
    return array.dtype.kind != "f" or re.split(r"[./]", name)[-1] in (*MEANS, *VARIANCE)


def unclear_statistics(arrays: Arrays) -> list[str]:
    """Names of arrays that may be a normalisation layer's statistics, but do not tell: numbers of
    neighbouring vectors of one length. None where some array has a name of its own."""
    if not all(name.isdecimal() for name in arrays):
        return []
    found: list[str] = []
    for (name, array), (following, other) in pairwise(arrays.items()):
        floats = array.dtype.kind == other.dtype.kind == "f"
        if floats and array.ndim == 1 and array.shape == other.shape:
            found += [name, following]
    return list(dict.fromkeys(found))


def is_counter(array: np.ndarray) -> bool:
    """Whether the entries are integers or booleans, as in a normalisation layer's count of steps.

    Such an array says how often a client trained, not how far its model moved. It counts in no norm
    and no distance, and does not leave a private client."""
    return array.dtype.kind in "biu"


def wide(array: np.ndarray) -> np.ndarray:
    """The array in float32, or in a type that holds more: to sum and to measure in.

    A sum of thousands of float16 numbers stops to grow, and a square above 65 504 is infinite."""
    return array.astype(np.promote_types(array.dtype, np.float32), copy=False)


def as_type(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in the dtype; integers and booleans are rounded and clipped."""
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        array = np.clip(np.rint(array), low, high)
    return np.asarray(array, dtype)  # numpy's arithmetic makes scalars of arrays without dimensions


def settled(arrays: Arrays, like: Arrays) -> Arrays:
    """The arrays in the order and dtypes of `like`, further ones last. Variances are at least 0:
    extrapolation and noise could make them negative."""
    result: Arrays = {}
    for name in (*(name for name in like if name in arrays), *arrays):
        array = np.asarray(arrays[name])
        if name in like and array.dtype != like[name].dtype:
            array = as_type(array, like[name].dtype)
        if name.endswith(VARIANCE) and (array < 0).any():
            array = np.maximum(array, 0)
        result[name] = array
    return result


def num_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of the arrays' contents."""
    return sum(a.nbytes for a in arrays)
