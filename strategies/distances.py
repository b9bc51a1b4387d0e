"""A-distances between clients (Ben-David et al., NeurIPS 2006) without moving their inputs.

For a pair of clients a linear classifier learns to tell their inputs apart, by Adam on the mean
of the two clients' gradients; d = 2(1 − 2 err) with its held-out error. All pairs learn side by
side: a client gets the weights of all of its pairs in one message."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.arrays import Arrays, to_numpy
from clients.optimizers import Adam
from strategies.replies import most_common
from strategies.round import Request

Exchanges = Callable[..., list[Callable[[], list[Any]]]]  # a strategy's `exchanges`
Nodes = Sequence[Any]

STEPS = 40
LR = 0.05


def a_distances(exchanges: Exchanges, novel: Nodes, training: Nodes) -> np.ndarray:
    """d (novel, training), each in [0, 2]; NaN for a pair of which a client did not answer.

    The number of values of an input is what most clients tell as their property ``input-size``."""
    agreement = most_common([*novel, *training], "input-size")
    if agreement is None:
        return np.full((len(novel), len(training)), np.nan)
    width = agreement[0]
    w = nn.Parameter(torch.zeros(len(novel), len(training), width + 1))
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
    shape = w.shape if what == "gradient" else w.shape[:2]
    sides = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    weights = [to_numpy({"weights": t.contiguous()})["weights"] for t in w.detach().unbind(0)]
    other = [to_numpy({"weights": t.contiguous()})["weights"] for t in w.detach().unbind(1)]
    requests = []
    for nodes, sent, label in ((novel, weights, 1), (training, other, 0)):
        payloads: dict[Any, Arrays] = {
            node: {"weights": array} for node, array in zip(nodes, sent, strict=True)
        }
        like = {
            node: {"gradient": array, "error": array[:, 0]}
            for node, array in zip(nodes, sent, strict=True)
        }
        requests.append(Request("query.domain", payloads, {"side": label}, like))
    for side, (nodes, read) in enumerate(zip((novel, training), exchanges(*requests), strict=True)):
        rows = {node: i for i, node in enumerate(nodes)}
        for update in read():
            at = rows[update.node]
            index = (at, slice(None)) if side == 0 else (slice(None), at)
            sides[side][index] = update.arrays[what]
    return sides
