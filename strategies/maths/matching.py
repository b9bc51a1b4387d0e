"""Matching of neurons, the maths of FedMA (Wang et al., ICLR 2020, Sections 2.1 and 2.2).

A network is a chain of layers: arrays ``<layer>.weight`` (out, in, …) and ``<layer>.bias``
(out,), in the order of the forward pass. A neuron is a row of the weight with its bias. An
assignment is an index array: entry l is the global neuron of the client's neuron l."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy  # loads its modules on first use

from clients.core.arrays import Arrays, wide


@dataclass(frozen=True)
class Matched:
    """A layer's global neurons (L, d), each client's assignment, and the number of clients of
    each neuron."""

    neurons: np.ndarray
    assignments: list[np.ndarray]
    support: np.ndarray


def chain(arrays: Arrays) -> list[str]:
    """The names of the layers. Raises ValueError unless each one's outputs are the next's inputs,
    channels of a convolution before a linear layer flattened channel by channel."""
    layers = [name.removesuffix(".weight") for name in arrays if name.endswith(".weight")]
    layers = [n for n in layers if arrays[f"{n}.weight"].ndim in (2, 4) and f"{n}.bias" in arrays]
    known = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    if others := [name for name in arrays if name not in known]:
        layer = others[0].rpartition(".")[0] or others[0]
        raise ValueError(
            f"fedma matches linear and convolutional layers with biases; {layer!r} is none; with "
            "other networks use FedAvg"
        )
    for layer, following in pairwise(layers):
        channels, inputs = width(arrays, layer), arrays[f"{following}.weight"].shape[1]
        dims = arrays[f"{layer}.weight"].ndim, arrays[f"{following}.weight"].ndim
        if inputs % channels or (dims != (4, 2) and inputs != channels):  # (4, 2): flattened
            raise ValueError(
                f"fedma matches chains of layers; {layer!r} has {channels} outputs, but "
                f"{following!r}, which comes next, {inputs} inputs; with other networks use FedAvg"
            )
    return layers


def width(arrays: Arrays, layer: str) -> int:
    """The layer's number of neurons or channels."""
    return len(arrays[f"{layer}.bias"])


def neurons(arrays: Arrays, layer: str) -> np.ndarray:
    """The layer's neurons (out, d): incoming weights and bias, in float32 at least."""
    weight = wide(arrays[f"{layer}.weight"])
    bias = wide(arrays[f"{layer}.bias"])
    return np.hstack([weight.reshape(len(bias), -1), bias[:, None]])


def layer_arrays(rows: np.ndarray, layer: str, like: Arrays) -> Arrays:
    """The layer made of these neurons; other dimensions and dtypes as in `like`."""
    weight, bias = like[f"{layer}.weight"], like[f"{layer}.bias"]
    return {
        f"{layer}.weight": rows[:, :-1].reshape(-1, *weight.shape[1:]).astype(weight.dtype),
        f"{layer}.bias": rows[:, -1].astype(bias.dtype),
    }


def scatter_columns(weight: np.ndarray, assignment: np.ndarray, inputs: int) -> np.ndarray:
    """The next layer's weight (out, in, …) on `inputs` global neurons: input l moves to
    assignment[l], others get 0. After a flattening each neuron has a block of inputs."""
    blocks = weight.reshape(len(weight), len(assignment), -1)
    wide = np.zeros((len(weight), inputs, blocks.shape[2]), weight.dtype)
    wide[:, assignment] = blocks
    return wide.reshape(len(weight), -1, *weight.shape[2:])


def take(weight: np.ndarray, assignment: np.ndarray, inputs: int) -> np.ndarray:
    """The inverse of `spread`: only the inputs from the assigned of `inputs` global neurons."""
    chosen = weight.reshape(len(weight), inputs, -1)[:, assignment]
    return chosen.reshape(len(weight), -1, *weight.shape[2:])


def match(
    clients: Sequence[np.ndarray],
    weights: Sequence[float],
    *,
    new_neuron_cost: float,
    max_width: int,
    sweeps: int = 1,
) -> Matched:
    """Match the clients' neurons (L_j, d): each client in turn against the others' mean.

    Matching l with i costs ‖w_l − θ_i‖²; opening the k-th new global neuron costs
    `new_neuron_cost`·(1 + log k) mean squared norms, ε + f(i) of the paper, and is impossible
    beyond `max_width`. After the first pass each client is matched again `sweeps` times.
    θ_i is the mean of the neurons matched to it, with the clients' `weights`."""
    scale = float(np.mean([np.square(w).sum(1).mean() for w in clients]))
    total, mass = np.zeros((0, clients[0].shape[1])), np.zeros(0)  # Σ weight·neuron, Σ weight
    support, assignments = np.zeros(0, int), list[np.ndarray]()
    for j in list(range(len(clients))) * (1 + sweeps):
        rows, weight = clients[j], weights[j]
        if len(assignments) == len(clients):  # a later pass: take the client out
            left = assignments.pop(j)
            total[left] -= weight * rows
            mass[left] -= weight
            support[left] -= 1
            kept = support > 0
            assignments = [(np.cumsum(kept) - 1)[assignment] for assignment in assignments]
            total, mass, support = total[kept], mass[kept], support[kept]
        assigned = _assign(rows, total / mass[:, None], new_neuron_cost * scale, max_width)
        opened = max(0, int(assigned.max()) + 1 - len(total))
        total = np.pad(total, ((0, opened), (0, 0)))
        mass, support = np.pad(mass, (0, opened)), np.pad(support, (0, opened))
        total[assigned] += weight * rows
        mass[assigned] += weight
        support[assigned] += 1
        assignments.insert(j, assigned)
    return Matched(total / mass[:, None], assignments, support)


def _assign(rows: np.ndarray, theta: np.ndarray, epsilon: float, max_width: int) -> np.ndarray:
    """The Hungarian assignment of neurons (L_j, d) to global ones (L, d) or to new ones."""
    fresh = min(len(rows), max_width - len(theta))
    costs = np.tile(epsilon * (1 + np.log(np.arange(1, fresh + 1))), (len(rows), 1))
    if len(theta):
        costs = np.hstack([scipy.spatial.distance.cdist(rows, theta, "sqeuclidean"), costs])
    _, columns = scipy.optimize.linear_sum_assignment(costs)
    opened = np.sort(columns[columns >= len(theta)])  # new neurons get consecutive indices
    return np.where(columns < len(theta), columns, len(theta) + np.searchsorted(opened, columns))
