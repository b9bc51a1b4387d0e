"""Metrics of replies: typed and bounded, or refused, or left out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.core.protocol import (
    AXES,
    CAPABILITIES,
    CLASS_NAMES,
    COLUMNS,
    FROZEN,
    PUBLIC,
    SCALING,
)
from strategies.core.reply_checks import LARGEST, READERS, checked_values

ANYTHING = st.one_of(
    st.floats(), st.integers(), st.text(), st.binary(), st.booleans(), st.none(),
    st.lists(st.floats()), st.lists(st.integers()), st.lists(st.text()),
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"num-examples": 7, "loss": 0.5}, {"num-examples": 7, "loss": 0.5}),
        ({"num-examples": 7.0}, {"num-examples": 7}),
        ({"loss": math.nan, "risk": math.inf, "accuracy": 0.25}, {"accuracy": 0.25}),
        ({"own": 3, "text": "hello", "list": [1.0], "flag": True}, {"own": 3}),
        ({"own": 1e300, "[/red]": 1.0, "f1": 1.0, "f1-3": 1.0, "clients": 9}, {}),
        ({"test_accuracy": 7.0, "training_error": -1, "num_examples": 3, "dp_sigma": 1}, {}),
        ({"half_distance": 3.0, "half-distance": 3.0, "f1_users": 2.0, "my_own": 4}, {"my_own": 4}),
        ({"counts": [1, 2, 3, 0], "novel": True}, {"counts": [1, 2, 3, 0], "novel": True}),
    ],
)
def test_what_is_kept(values, kept):
    read = checked_values(values)
    assert read == kept
    assert [type(value) for value in read.values()] == [type(value) for value in kept.values()]


@pytest.mark.parametrize(
    "values",
    [
        {"num-examples": 2.5},
        {"num-examples": -1},
        {"num-examples": math.nan},
        {"num-examples": 10**12},
        {"num-examples": True},
        {"num-examples": "7"},
        {"loss": "low"},
        {"loss": [1.0]},
        {"accuracy": 1.01},
        {"dp-sigma": -0.5},
        {"client": 2**64},
        {"novel": 1},
        {"model": "two\nlines"},
        {"counts": [1, 2, 3]},
        {"counts": [1, 2, 3, -4]},
        {"counts": 4},
        {f"own{i}": 1 for i in range(101)},
    ],
)
def test_what_no_honest_client_tells(values):
    with pytest.raises(ValueError, match=r"must be|most is"):
        checked_values(values)


KINDS = {
    "novel": bool,
    "model": str,
    "error": str,
    CAPABILITIES: str,
    COLUMNS: str,
    CLASS_NAMES: str,
    SCALING: str,
    PUBLIC: str,
    FROZEN: str,
    AXES: str,
    "counts": list,
}  # others: numbers


@settings(max_examples=50)
@given(st.dictionaries(st.one_of(st.sampled_from(sorted(READERS)), st.text()), ANYTHING))
def test_nothing_else_comes_through(values):
    """A ValueError, or finite numbers, booleans, short lines and counts."""
    try:
        read = checked_values(values)
    except ValueError:
        return
    for name, value in read.items():
        kind = KINDS.get(name, (int, float))
        assert isinstance(value, kind)
        if kind == (int, float) and name != "client":
            assert abs(value) <= LARGEST


def test_bounds_belong_to_what_is_allowed():
    """A hundred values, a word of 200 characters, 0 and 1, and the largest number; no more."""
    assert len(checked_values({f"own{i}": i for i in range(100)})) == 100
    kept = {"model": "m" * 200, "accuracy": 0, "test-accuracy": 1, "client": 0, "own": LARGEST}
    assert checked_values(kept) == kept
    assert checked_values({"own": 1.001 * LARGEST, "loss": -1.001 * LARGEST}) == {}
    for bad in ({"model": "m" * 201}, {"accuracy": -0.01}, {"classes": 0}):
        with pytest.raises(ValueError, match="must be"):
            checked_values(bad)
