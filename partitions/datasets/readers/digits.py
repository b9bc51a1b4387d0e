"""The digits that scikit-learn contains."""

import numpy as np

from partitions.datasets.readers.raw import Raw


def read_digits() -> Raw:
    """Images (n, 1, 8, 8) of values 0 … 16. The last fifth is the test split (ours)."""
    from sklearn.datasets import load_digits

    images = load_digits()
    return Raw(images.images.astype(np.uint8)[:, None], images.target, 1437)
