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
from clients.core.optimizers import Adam
from strategies.core.replies import most_common
from strategies.core.round import Request

Exchanges = Callable[..., list[Callable[[], list[Any]]]]  # a strategy's `exchanges`
Nodes = Sequence[Any]

STEPS = 40
LR = 0.05


def a_distances(exchanges: Exchanges, novel: Nodes, training: Nodes) -> np.ndarray:
    """d (novel, training), each in [0, 2]; NaN for a pair if one of its clients did not answer.

    Inputs have the size that is most common among the clients' properties ``input-size``."""
    sizes = most_common([*novel, *training], "input-size")
    if sizes is None:
        return np.full((len(novel), len(training)), np.nan)
    w = nn.Parameter(torch.zeros(len(novel), len(training), sizes[0] + 1))
    optimizer = Adam([w], LR)
    for _ in range(STEPS):
        sides = _ask(exchanges, w, novel, training, "gradient")
        w.grad = torch.from_numpy(np.nan_to_num(sum(sides) / 2))
        optimizer.step()
    errors = np.clip(sum(_ask(exchanges, w, novel, training, "error")) / 2, 0.0, 1.0)
    return np.maximum(2 * (1 - 2 * errors), 0.0)


def _ask(
    exchanges: Exchanges, w: torch.Tensor, novel: Nodes, training: Nodes, what: str
) -> list[np.ndarray]:
    """`what` of the novel clients (label 1) and of the training clients (label 0), for all pairs;
    NaN where a client did not answer."""
    weights = np.asarray(w.detach().numpy())
    by_training = np.ascontiguousarray(weights.swapaxes(0, 1))
    requests = []
    for nodes, rows, label in ((novel, weights, 1), (training, by_training, 0)):
        payloads: dict[Any, Arrays] = {n: {"weights": r} for n, r in zip(nodes, rows, strict=True)}
        like = {n: {"gradient": r, "error": r[:, 0]} for n, r in zip(nodes, rows, strict=True)}
        requests.append(Request("query.domain", payloads, {"side": label}, like))
    shape = w.shape if what == "gradient" else w.shape[:2]
    sides = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    for side, nodes, read in zip(sides, (novel, training), exchanges(*requests), strict=True):
        index = {node: i for i, node in enumerate(nodes)}
        by_node = side if nodes is novel else side.swapaxes(0, 1)
        for update in read():
            by_node[index[update.node]] = update.arrays[what]
    return sides
