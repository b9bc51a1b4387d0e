"""Novel clients' errors, by which training client has the two classes."""

import numpy as np
import pytest

from experiments.novel_errors import covered, errors

OWNED = [{0, 1}, {1, 2}]


def test_an_error_counts_by_whether_a_client_has_both_classes():
    """0 for 1 and 2 for 1 are held together by the first and second client, 0 for 2 by none."""
    y = np.array([0, 2, 0, 1, 2])
    predicted = np.array([1, 1, 2, 1, 2])
    assert errors(y, predicted, OWNED) == (2, 1)


def test_a_client_covers_the_samples_of_its_classes():
    """Of the labels 0, 0, 1, 2 the first client has three, the second two."""
    shares = covered(np.array([0, 0, 1, 2]), OWNED)
    assert shares == pytest.approx([0.75, 0.5])
