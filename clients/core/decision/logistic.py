"""Who is right on a changed sample: a logistic model of three classes, by sums over clients.

With features x (F,) and coefficients θ (2, F), P(candidate) ∝ exp(θ₀ᵀx), P(FedAvg) ∝ exp(θ₁ᵀx) and
P(neither) ∝ 1. The gradient and the Hessian of Σ_i log P(outcome_i) are sums over samples, hence
over clients, so that Newton's steps on the server are those of the pooled samples."""

import numpy as np

from clients.core.decision.evidence import BASE, CANDIDATE


def probabilities(features: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """P(candidate) and P(FedAvg) (m, 2) of features (m, F)."""
    logits = features @ theta.T
    highest = np.maximum(logits.max(1, initial=0), 0)[:, None]
    weights = np.exp(logits - highest)
    return np.asarray(weights / (weights.sum(1, keepdims=True) + np.exp(-highest)))


def gradient_and_hessian(
    features: np.ndarray, outcomes: np.ndarray, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient (2F,) of Σ_i log P(outcome_i), and minus its Hessian (2F, 2F).

    ∂/∂θ_k = Σ_i (1[outcome_i = k] − p_ik) x_i, and −H has the blocks
    Σ_i p_ik (δ_kl − p_il) x_i x_iᵀ."""
    p = probabilities(features, theta)
    happened = np.stack([outcomes == CANDIDATE, outcomes == BASE], axis=1)
    gradient = (happened - p).T @ features
    size = features.shape[1]
    hessian = np.empty((2, size, 2, size))
    for k in range(2):
        for other in range(2):
            weight = p[:, k] * ((k == other) - p[:, other])
            hessian[k, :, other] = (features * weight[:, None]).T @ features
    return gradient.ravel(), hessian.reshape(2 * size, 2 * size)
