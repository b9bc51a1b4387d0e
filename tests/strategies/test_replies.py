"""Numbers that are finite."""

import numpy as np
import pytest

from strategies.core.replies import finite


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_are_finite_though_their_squares_are_not(dtype):
    most = np.full((2, 3), np.finfo(dtype).max)
    assert finite({"w": [most, np.zeros((0, 2), dtype)], "n": np.array(2**62)})
    for strange in (np.nan, np.inf):
        most[1, 2] = strange
        assert not finite({"w": [most]})
