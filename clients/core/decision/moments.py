"""Moments of inner values φ of a network: by class, within classes and between clients.

φ(x) (D,) is the concatenation of blocks φ_l (d_l,). Matrices are kept for each block alone, as one
vector (Σ d_l²,). All are functions of sums over samples or clients, in float64:

- class means M_l = Σ_{i: y_i = c} φ_l(x_i) / n_c,
- covariance within classes S_l = (Σ_i φ_l φ_lᵀ − Σ_c n_c M_lc M_lcᵀ) / (N − C),
- covariance between clients B_l, the positive part of mean(r_l r_lᵀ) − S_l mean(1/n) with the
  residual r_l = mean_i φ_l(x_i) − mean_i M_l[y_i] of a client with n samples."""

from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-6  # of eigenvalues, relative to the largest one


@dataclass(frozen=True)
class Blocks:
    """The sizes d_l of the blocks of φ."""

    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """D = Σ d_l."""
        return sum(self.sizes)

    @property
    def entries(self) -> int:
        """Σ d_l², the entries of one matrix for each block."""
        return sum(size * size for size in self.sizes)

    def split(self, phi: np.ndarray) -> list[np.ndarray]:
        """φ_l (…, d_l) of φ (…, D)."""
        ends = np.cumsum(self.sizes)[:-1]
        return np.split(phi, ends, axis=-1)

    def matrices(self, flat: np.ndarray) -> list[np.ndarray]:
        """The matrices (d_l, d_l) of a vector (Σ d_l²,)."""
        ends = np.cumsum(np.square(self.sizes))[:-1]
        parts = np.split(flat, ends)
        return [part.reshape(d, d) for part, d in zip(parts, self.sizes, strict=True)]

    def flat(self, matrices: list[np.ndarray]) -> np.ndarray:
        """The vector (Σ d_l²,) of the matrices."""
        return np.concatenate([matrix.ravel() for matrix in matrices])

    def second_moments(self, phi: np.ndarray) -> np.ndarray:
        """Σ_i φ_l φ_lᵀ (Σ d_l²,) of φ (n, D)."""
        return self.flat([block.T @ block for block in self.split(phi)])


def class_sums(phi: np.ndarray, y: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """n_c (C,) and Σ_{i: y_i = c} φ(x_i) (C, D)."""
    members = np.eye(num_classes)[y]
    return members.sum(0), members.T @ phi


def class_means(counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """M (C, D); a class without a sample has the mean of all samples."""
    overall = sums.sum(0) / max(counts.sum(), 1)
    means = sums / np.maximum(counts, 1)[:, None]
    return np.asarray(np.where(counts[:, None] > 0, means, overall))


def within_classes(
    counts: np.ndarray, means: np.ndarray, squares: np.ndarray, blocks: Blocks
) -> np.ndarray:
    """S (Σ d_l²,) from the sums over all samples."""
    freedom = max(counts.sum() - np.count_nonzero(counts), 1)
    explained = [(m * counts[:, None]).T @ m for m in blocks.split(means)]
    within = blocks.matrices((squares - blocks.flat(explained)) / freedom)
    # False sums can give negative variances, which no client could invert.
    return blocks.flat([semidefinite(matrix) for matrix in within])


def residual(phi: np.ndarray, y: np.ndarray, means: np.ndarray) -> np.ndarray:
    """r (D,) = mean_i φ(x_i) − mean_i M[y_i] of one client."""
    return np.asarray(phi.mean(0) - means[y].mean(0))


def between_clients(
    squares: np.ndarray, inverse: float, within: np.ndarray, blocks: Blocks
) -> np.ndarray:
    """B (Σ d_l²,) from mean(r rᵀ) and mean(1/n) over clients."""
    excess = blocks.matrices(squares - within * inverse)
    return blocks.flat([positive_part(matrix) for matrix in excess])


def positive_part(matrix: np.ndarray) -> np.ndarray:
    """Σ_k max(λ_k, 0) v_k v_kᵀ of a symmetric matrix."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray((vectors * np.maximum(values, 0)) @ vectors.T)


def semidefinite(matrix: np.ndarray) -> np.ndarray:
    """The matrix itself if it has no negative eigenvalue up to rounding, else its positive part."""
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    if values[0] >= -ROUNDING * np.abs(values).max():
        return matrix
    return positive_part(matrix)
