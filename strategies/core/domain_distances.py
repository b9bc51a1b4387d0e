"""A-distances between clients (Ben-David et al., NeurIPS 2006) without moving their inputs.

For each pair of clients a linear classifier learns to distinguish their inputs, by Adam on the
mean of the two clients' gradients; d = 2(1 − 2 err) with its held-out error. All pairs learn
together: a client gets the weights of all its pairs in one message."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.core.arrays import Arrays
from clients.core.protocol import DOMAIN, INPUT_SIZE, SIDE
from clients.core.sgd import Adam
from strategies.core.replies import most_common
from strategies.core.round_state import Request

Exchanges = Callable[..., list[list[Any]]]  # `PersonalizedStrategy.exchange_together`
Nodes = Sequence[Any]

STEPS = 40
LR = 0.05


def a_distances(exchanges: Exchanges, novel: Nodes, training: Nodes) -> np.ndarray:
    """d (novel, training), each in [−2, 2]; NaN for a pair if one of its clients did not answer.

    The distance itself is at least 0; an estimate for inputs that cannot be distinguished is below
    0 as often as above, because err is of few held-out inputs. Inputs have the size that is most
    common among the clients' properties ``input-size``."""
    sizes = most_common([*novel, *training], INPUT_SIZE)
    if sizes is None:
        return np.full((len(novel), len(training)), np.nan)
    input_size = sizes[0]
    # One linear classifier for each pair; its last weight is the bias.
    w = nn.Parameter(torch.zeros(len(novel), len(training), input_size + 1))
    optimizer = Adam([w], LR)
    for _ in range(STEPS):
        gradient = _mean_of_sides(exchanges, w, novel, training, "gradient")
        w.grad = torch.from_numpy(np.nan_to_num(gradient))
        optimizer.step()
    error = _mean_of_sides(exchanges, w, novel, training, "error")
    error = np.clip(error, 0.0, 1.0)  # clients are not trusted
    return np.asarray(2 * (1 - 2 * error))


def _mean_of_sides(
    exchanges: Exchanges, w: torch.Tensor, novel: Nodes, training: Nodes, entry: str
) -> np.ndarray:
    """The mean of the two clients' array `entry`, "gradient" or "error", for all pairs.

    The novel client's inputs have the label 1, the training client's 0. The shape is that of `w`,
    for errors without the last dimension; NaN where one of the clients did not answer."""
    weights = np.asarray(w.detach().numpy())
    by_training = np.ascontiguousarray(weights.swapaxes(0, 1))
    of_novel, of_training = exchanges(
        _request(novel, weights, label=1), _request(training, by_training, label=0)
    )
    shape = w.shape if entry == "gradient" else w.shape[:2]
    novel_side = np.full(shape, np.nan, np.float32)
    training_side = np.full(shape, np.nan, np.float32)
    _fill(novel_side, novel, of_novel, entry)
    _fill(training_side.swapaxes(0, 1), training, of_training, entry)
    return np.asarray((novel_side + training_side) / 2)


def _request(nodes: Nodes, weights: np.ndarray, label: int) -> Request:
    """Send each node the weights (pairs, d) of its pairs."""
    payloads: dict[Any, Arrays] = {}
    like: dict[Any, Arrays] = {}
    for node, rows in zip(nodes, weights, strict=True):
        payloads[node] = {"weights": rows}
        like[node] = {"gradient": rows, "error": rows[:, 0]}
    return Request(DOMAIN, payloads, {SIDE: label}, like)


def _fill(by_node: np.ndarray, nodes: Nodes, updates: list[Any], entry: str) -> None:
    """Write each node's array `entry` into its row."""
    index = {node: i for i, node in enumerate(nodes)}
    for update in updates:
        by_node[index[update.node]] = update.arrays[entry]
