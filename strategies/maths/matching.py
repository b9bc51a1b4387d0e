"""Matching of neurons, the maths of FedMA (Wang et al., ICLR 2020, Sections 2.1 and 2.2).

A network is a chain of layers: arrays ``<layer>.weight`` (out, in, …) and ``<layer>.bias``
(out,), in the order of the forward pass. A neuron is a row of the weight with its bias. An
assignment is an index array: entry l is the global neuron of the client's neuron l."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its modules on first use

from clients.core.arrays import Arrays, wide


@dataclass(frozen=True)
class Matched:
    """The result of matching one layer."""

    neurons: np.ndarray  # global neurons (L, d)
    assignments: list[np.ndarray]  # of each client
    support: np.ndarray  # number of clients of each global neuron (L,)


def neurons(arrays: Arrays, layer: str) -> np.ndarray:
    """The layer's neurons (out, d): incoming weights and bias, in float32 at least."""
    weight = wide(arrays[f"{layer}.weight"])
    bias = wide(arrays[f"{layer}.bias"])
    return np.hstack([weight.reshape(len(bias), -1), bias[:, None]])


def layer_arrays(rows: np.ndarray, layer: str, like: Arrays) -> Arrays:
    """The layer's arrays, made of these neurons (out, d); other shapes and dtypes as in `like`."""
    weight = like[f"{layer}.weight"]
    bias = like[f"{layer}.bias"]
    return {
        f"{layer}.weight": rows[:, :-1].reshape(-1, *weight.shape[1:]).astype(weight.dtype),
        f"{layer}.bias": rows[:, -1].astype(bias.dtype),
    }


def scatter_columns(weight: np.ndarray, assignment: np.ndarray, inputs: int) -> np.ndarray:
    """The next layer's weight (out, in, …) for `inputs` global neurons.

    Input l moves to assignment[l]; other inputs get 0. After a flattening each neuron has a block
    of inputs."""
    blocks = weight.reshape(len(weight), len(assignment), -1)
    scattered = np.zeros((len(weight), inputs, blocks.shape[2]), weight.dtype)
    scattered[:, assignment] = blocks
    return scattered.reshape(len(weight), -1, *weight.shape[2:])


def take(weight: np.ndarray, assignment: np.ndarray, inputs: int) -> np.ndarray:
    """The inverse of `scatter_columns`: keep the inputs from a client's neurons alone."""
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

    Matching l with i costs ‖w_l − θ_i‖². Opening the k-th new global neuron costs
    `new_neuron_cost`·(1 + log k) mean squared norms, ε + f(i) of the paper, and is impossible
    beyond `max_width`. After the first pass each client is matched again `sweeps` times.
    θ_i is the mean of the neurons matched to it, with the clients' `weights`."""
    squared_norms = [np.square(neurons_j).sum(1).mean() for neurons_j in clients]
    epsilon = new_neuron_cost * float(np.mean(squared_norms))
    total = np.zeros((0, clients[0].shape[1]))  # Σ weight·neuron of each global neuron
    mass = np.zeros(0)  # Σ weight
    support = np.zeros(0, int)  # number of clients
    assignments: list[np.ndarray] = []
    for j in list(range(len(clients))) * (1 + sweeps):
        rows = clients[j]
        weight = weights[j]
        if len(assignments) == len(clients):  # a later pass: take the client out
            removed = assignments.pop(j)
            total[removed] -= weight * rows
            mass[removed] -= weight
            support[removed] -= 1
            # Global neurons without clients are closed, and the others move up.
            kept = support > 0
            new_index = np.cumsum(kept) - 1
            assignments = [new_index[assignment] for assignment in assignments]
            total = total[kept]
            mass = mass[kept]
            support = support[kept]
        assigned = _assign(rows, total / mass[:, None], epsilon, max_width)
        opened = max(0, int(assigned.max()) + 1 - len(total))
        total = np.pad(total, ((0, opened), (0, 0)))
        mass = np.pad(mass, (0, opened))
        support = np.pad(support, (0, opened))
        total[assigned] += weight * rows
        mass[assigned] += weight
        support[assigned] += 1
        assignments.insert(j, assigned)
    return Matched(total / mass[:, None], assignments, support)


def _assign(rows: np.ndarray, theta: np.ndarray, epsilon: float, max_width: int) -> np.ndarray:
    """The Hungarian assignment of neurons (L_j, d) to global neurons (L, d) or to new ones."""
    most_new = min(len(rows), max_width - len(theta))
    new_costs = epsilon * (1 + np.log(np.arange(1, most_new + 1)))
    costs = np.tile(new_costs, (len(rows), 1))
    if len(theta):
        costs = np.hstack([scipy.spatial.distance.cdist(rows, theta, "sqeuclidean"), costs])
    _, columns = scipy.optimize.linear_sum_assignment(costs)
    # New neurons get consecutive indices, in the order of their columns.
    opened = np.sort(columns[columns >= len(theta)])
    new_index = len(theta) + np.searchsorted(opened, columns)
    return np.where(columns < len(theta), columns, new_index)
