"""Mini-batches of local SGD: their order, sizes and samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.core.sgd import batches, mini_batches, sgd
from partitions.items import from_items
from partitions.shares import Samples


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 9), st.integers(0, 3))
def test_batches_pass_over_all_samples(n, batch_size, steps, epochs):
    generator = torch.Generator().manual_seed(0)
    rows = batches(n, batch_size, steps=steps, epochs=epochs, generator=generator)
    drawn = torch.cat(list(rows)) if len(rows) else torch.empty(0)
    counts = np.bincount(drawn.int().numpy(), minlength=n)
    if epochs:
        assert (counts == epochs).all()
        assert all(len(r) <= batch_size for r in rows)
    else:
        assert [len(r) for r in rows] == [min(batch_size, n)] * steps
        assert counts.max() - counts.min() <= 1


def drawn(n, batch_size, **options):
    generator = torch.Generator().manual_seed(0)
    return batches(n, batch_size, generator=generator, **{"steps": 0, "epochs": 0} | options)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 2}, {"steps": 2, "short": True}])
def test_every_pass_is_shuffled_anew(options):
    one, two = drawn(20, 20, **options)
    assert sorted(one.tolist()) == sorted(two.tolist()) == list(range(20))
    assert one.tolist() != two.tolist() != list(range(20))


@pytest.mark.parametrize("passes", [0, 0.7, 1, 3])
def test_mini_batches_are_their_rows_be_they_gathered_at_once_or_not(passes):
    """A stored 10·i over 4, less ½, over ¼: 10·i − 2. Batches of 3, 3 and 1 of seven samples."""
    x = torch.arange(0, 100, 10, dtype=torch.uint8).reshape(10, 1)
    samples = Samples(x, torch.arange(10), torch.arange(9, 2, -1), 4.0, 0.5, 0.25)  # 9 … 3
    rows = [r for one in ([6, 0, 2, 4, 1, 5, 3], [0, 1, 2, 3, 4, 5, 6]) * 2 for r in
            torch.tensor(one).split(3)][: round(3 * passes)]  # fmt: skip
    found = list(mini_batches(samples, rows))
    assert [y.tolist() for _, y in found] == [[9 - int(i) for i in r] for r in rows]
    assert [x.flatten().tolist() for x, _ in found] == [
        [10 * (9 - int(i)) - 2 for i in r] for r in rows
    ]


@pytest.mark.parametrize("passes", [1, 2])
def test_mini_batches_of_gray_images_have_the_strides_of_a_new_tensor(passes):
    """So a network that flattens by `view` takes them."""
    samples = Samples(torch.rand(4, 1, 3, 5), torch.arange(4), torch.arange(4), scale=1.0)
    found = list(mini_batches(samples, [torch.tensor([1, 0]), torch.tensor([2, 3])] * passes))
    assert [x.stride() for x, _ in found] == [(15, 15, 5, 1)] * 2 * passes


def test_samples_that_are_drawn_at_each_access_are_asked_for_at_each():
    """Each access of an item gives the number of accesses before."""

    class Counting:
        seen = 0

        def __len__(self):
            return 2

        def __getitem__(self, row):
            self.seen += 1
            return torch.full((1,), float(self.seen)), row

    items = Counting()
    samples = from_items(items)
    before = items.seen
    found = list(mini_batches(samples, [torch.tensor([1, 0])] * 3))
    assert [(x - before).flatten().tolist() for x, _ in found] == [[1, 2], [3, 4], [5, 6]]
    assert [y.tolist() for _, y in found] == [[1, 0]] * 3


def test_batches_of_seven_samples_in_threes():
    """Passes of 3, 3 and what remains; unless they are short, or epochs, the next pass fills."""
    for options, expected in (
        ({"epochs": 2}, [3, 3, 1, 3, 3, 1]),
        ({"steps": 5}, [3, 3, 3, 3, 3]),
        ({"steps": 5, "short": True}, [3, 3, 1, 3, 3]),
        ({"steps": 2, "short": True}, [3, 3]),
    ):
        assert [len(rows) for rows in drawn(7, 3, **options)] == expected
    assert [len(rows) for rows in drawn(2, 3, steps=2)] == [2, 2]


@pytest.mark.parametrize("count", [{"steps": 2}, {"epochs": 1}])
def test_no_sample_is_a_sentence(count):
    with pytest.raises(ValueError, match="the client has no samples to train on"):
        batches(0, 4, generator=torch.Generator(), **count)


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, -3.0), (4.0, 0.0), (20.0, -3.0)])
def test_a_step_clips_the_gradient_of_the_loss_before_what_a_method_adds(clip_norm, expected):
    """L(w) = 10 w at w = 2: gradient 10, or 4 if it is clipped to 4. The drift −1 and the weight
    decay 0.5 · 2 = 1 cancel each other, since neither is clipped. With the rate 0.5 the step ends
    at 2 − 0.5 · 10 = −3, or at 2 − 0.5 · 4 = 0."""
    w = nn.Parameter(torch.tensor([2.0]))
    samples = from_items([(torch.tensor([0.0]), 0)])
    loss = sgd(
        [w], samples, [torch.tensor([0])], lambda x, y: 10 * w.sum(),
        lr=0.5, weight_decay=0.5, clip_norm=clip_norm, drift=[torch.tensor([-1.0])],
    )  # fmt: skip
    assert loss == 20.0
    assert w.item() == pytest.approx(expected, abs=1e-6)
