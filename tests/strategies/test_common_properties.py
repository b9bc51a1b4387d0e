import pytest

from clients.core.protocol import AXES, MAGNITUDE, PUBLIC
from strategies.core.common_properties import COMMON


def test_values_that_differ_by_rounding_outvote_another_one():
    """No two are equal. The first node has other samples, and the three others the same."""
    texts = ["0.5 0.5 0.5 0.5", "1.000 2 3 4", "1.001 2 3 4", "1.002 2 3 4"]
    assert COMMON[PUBLIC].of_most(texts) in texts[1:]
    assert COMMON[MAGNITUDE].of_most([20, 0, 1, 2]) in (0, 1, 2)


def test_of_values_with_equally_many_like_them_the_most_frequent_counts():
    assert COMMON[AXES].of_most(["8 8 3", "3 8 8", "3 8 8"]) == "3 8 8"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("3 32 32", "32 32 3", False),
        ("3 32 32", "3 32 32", True),
        ("3 32 64", "3 64 32", True),  # the channels stay first
        ("3 3 9", "9 3 3", True),  # which axis has the channels is not known
        ("3 32 32", "32 32 4", True),  # another shape, which other checks name
    ],
)
def test_axes_in_another_order(one, other, is_same):
    assert COMMON[AXES].is_same(one, other) is is_same
