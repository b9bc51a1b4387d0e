"""Label distributions of inputs without labels, from a network's predictions.

BBSE (Lipton, Wang and Smola, ICML 2018) and prior-EM (Saerens, Latinne and Decaestecker, Neural
Computation 2002), for the methods of these names and for those that choose between corrections."""

import math
from functools import lru_cache

import numpy as np
from torch import Tensor

from clients.core.simplex import project

CUTOFF = 1e-6  # smaller singular values, relative to the largest one, count as 0


def bbse(k: np.ndarray, m: np.ndarray, mixing: float) -> np.ndarray:
    """q = (1 − ε) Π(K⁺ m) + ε / C (C,), from the confusion matrix K (C, C) = P(predicted | label)
    and the distribution m (C,) of predictions; `mixing` is ε."""
    k = np.asarray(k, float)
    q = project(_pseudo_inverse(k.tobytes(), len(k)) @ m)
    return np.asarray(mixing / len(q) + (1 - mixing) * q)


@lru_cache(maxsize=4)
def _pseudo_inverse(entries: bytes, size: int) -> np.ndarray:
    """K⁺ of K (size, size), given by its entries: all clients of an evaluation have the same."""
    k = np.frombuffer(entries).reshape(size, size)
    return np.asarray(np.linalg.pinv(k, rcond=CUTOFF))


def log_q_by_em(log_p: Tensor, log_prior: Tensor, steps: int) -> Tensor:
    """log q (…, C) after EM steps from q = π; `log_p` (…, n, C), of several networks if there are
    more dimensions. In logarithms no q_c becomes 0."""
    n = log_p.shape[-2]
    log_q = log_prior
    for _ in range(steps):
        log_r = (log_p + log_q.unsqueeze(-2) - log_prior).log_softmax(-1)
        log_q = log_r.logsumexp(-2) - math.log(n)  # q = mean_i r_i
    return log_q
