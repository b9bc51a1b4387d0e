import math

import pytest
import torch

from clients.core.projections import (
    are_alike,
    projections,
    projections_of_parameters,
    read_projections,
)


def test_the_numbers_by_hand():
    """x = ((3, 0), (0, 4)), ‖x‖ = 5: 2 (3 cos 0 cos 0 + 4 cos a cos b) / 5 for each (a, b)."""
    expected = []
    for a, b in ((2, 3), (5, 7), (11, 13), (17, 19)):
        expected.append(2 * (3 + 4 * math.cos(math.sqrt(a)) * math.cos(math.sqrt(b))) / 5)
    text = projections(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert read_projections(text) == pytest.approx(expected, abs=6e-4)


def test_parts_are_summed(monkeypatch):
    x = torch.rand(40, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    whole = projections(x)
    monkeypatch.setattr("clients.core.projections.AT_ONCE", 7)
    assert projections(x) == whole


def test_rounding_is_no_difference_and_order_and_other_samples_are():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, 3, 8, 8, generator=generator)
    noise = 1e-4 * torch.randn(x.shape, generator=generator)
    assert are_alike(projections(x), projections(x + noise))
    assert are_alike(projections(x), projections(x.half()))
    assert not are_alike(projections(x), projections(x.flip(0)))
    assert not are_alike(projections(x), projections(x.flip(3)))
    assert not are_alike(projections(x), projections(1 - x))
    replaced = x.clone()
    replaced[77] = torch.rand(3, 8, 8, generator=generator)
    assert not are_alike(projections(x), projections(replaced))


def test_tokens_and_zeros_have_numbers_too():
    tokens = torch.arange(12).view(3, 4)
    assert not are_alike(projections(tokens), projections(tokens.flip(0)))
    assert projections(torch.zeros(2, 3)) == "0.000 0.000 0.000 0.000"


def test_no_parameter_hides_another():
    """Frozen parameters may be of any type, and hold infinity, as masks do."""
    generator = torch.Generator().manual_seed(0)
    small, large = torch.randn(2, 30, 40, generator=generator)
    text = projections_of_parameters([0.01 * small, 100 * large])
    assert are_alike(text, projections_of_parameters([(0.01 * small).half(), 100 * large]))
    assert not are_alike(text, projections_of_parameters([0.01 * small.flip(0), 100 * large]))
    assert not are_alike(text, projections_of_parameters([100 * large, 0.01 * small]))
    others = [
        torch.zeros(3),
        torch.empty(0),
        torch.arange(4, dtype=torch.uint8),
        torch.tensor([0.0, -math.inf]),
        torch.complex(small, large),
    ]
    turned = [*others[:-1], torch.complex(small, -large)]
    assert not are_alike(projections_of_parameters(others), projections_of_parameters(turned))


@pytest.mark.parametrize("text", ["", "1 2 3", "1 2 3 4 5", "a b c d", "1 2 3 nan"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError):
        read_projections(text)
