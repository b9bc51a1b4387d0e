"""Which of a mapping's columns are inputs, and which is the label."""

import pytest

from partitions.reading import Form, read


def test_columns_may_be_named_by_numbers():
    """As those of a table without a header: 0 and 2 are inputs, and 1 is the label."""
    one = read({0: 1.0, 1: 2.0}, Form())
    assert one.tensors[0].tolist() == [1, 2] and one.label is None
    one = read({0: [1.0, 4.0], 1: [0, 1], 2: [3.0, 6.0]}, Form(label="1"), batched=True)
    assert one.tensors[0].tolist() == [[1, 3], [4, 6]] and one.label == [0, 1]
    with pytest.raises(ValueError, match="two columns called 0; rename one"):
        read({0: 1.0, "0": 2.0}, Form())


def test_columns_that_the_forward_pass_takes_are_inputs_of_their_own():
    one = read({0: [1.0], 1: [2.0], "label": 3}, Form(takes=lambda: ("1", "0")))
    assert one.names == ("0", "1") and one.label == 3
    assert [float(tensor) for tensor in one.tensors] == [1, 2]
