"""Named arrays: what models, messages and state are made of.

Groups of arrays are name prefixes, e.g. ``control/fc1.weight``."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]


def group(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays under ``prefix/``, without the prefix."""
    start = f"{prefix}/"
    return {name[len(start) :]: a for name, a in arrays.items() if name.startswith(start)}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """The arrays as the group ``prefix/``."""
    return {f"{prefix}/{name}": a for name, a in arrays.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of the arrays, names kept."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    """The named arrays of Flower's record."""
    return {name: array.numpy() for name, array in record.items()}


def to_numpy(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors as numpy arrays; they share no memory with a model."""
    return {name: t.detach().cpu().numpy().copy() for name, t in tensors.items()}


def to_tensors(arrays: Arrays, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The arrays as tensors on `device`; on the CPU they share the arrays' memory."""
    return {name: torch.from_numpy(np.asarray(a)).to(device) for name, a in arrays.items()}


def model_arrays(model: nn.Module) -> Arrays:
    """Parameters and buffers of a model under the names of its ``state_dict``."""
    return to_numpy(model.state_dict())


def is_statistic(name: str) -> bool:
    """Whether the array is a normalisation layer's running statistic: averaged, never trained."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def num_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of the arrays' contents."""
    return sum(a.nbytes for a in arrays)
