"""Centred and scaled descriptors: the statistics by hand, and what they do to generated models."""

import json

import pytest
import torch
from small_runs import federate

from clients.core.arrays import from_record, group
from strategies.maths.moments import Moments
from strategies.methods._generated_networks import relative_weight_spread
from strategies.methods.odpfl_hn import ODPFLHN


def test_statistics_by_hand():
    """First (0, 4): μ 2, σ² 4. Then (6, 10), x̄ 8, s² 4, at rate ¼: μ 2 + ¼·6 = 3.5, σ²
    ¾(4 + ¼·36) + ¼·4 = 10.75. Descriptor 10 becomes 6.5/√10.75."""
    moments = Moments(0.25)
    assert moments.scaled(torch.tensor([10.0])).item() == 10
    moments.update(torch.tensor([[0.0], [4.0]]))
    assert moments.scaled(torch.tensor([10.0])).item() == pytest.approx(4)
    moments.update(torch.tensor([[6.0], [10.0]]))
    assert (moments.mean.item(), moments.variance.item()) == (3.5, 10.75)
    assert moments.scaled(torch.tensor([10.0])).item() == pytest.approx(6.5 / 10.75**0.5)


def test_small_differences_on_a_large_common_part_come_out_whole():
    """Entries 1000 ± 0.001 and 7 ± 0.002: all four become ±1, in float32 to its rounding."""
    values = torch.tensor([[1000 - 1e-3, 7 - 2e-3], [1000 + 1e-3, 7 + 2e-3]], dtype=torch.float64)
    moments = Moments(1.0)
    moments.update(values)
    torch.testing.assert_close(moments.scaled(values[1]), torch.ones(2, dtype=torch.float64))


def test_an_entry_that_never_differs_does_not_blow_up():
    """Deviations 2 and 0: their root mean square is √2, so the second is taken as 0.001·√2."""
    moments = Moments(1.0)
    moments.update(torch.tensor([[1.0, 5.0], [5.0, 5.0]]))
    assert moments.scaled(torch.tensor([3.0, 5.001])).tolist() == pytest.approx(
        [0, 2**-0.5], rel=1e-3
    )
    moments.update(torch.zeros(2, 2))
    assert moments.scaled(torch.tensor([0.5, 0.25])).tolist() == [0.5, 0.25]


def test_the_gradient_is_that_of_a_constant_scale():
    moments = Moments(1.0)
    moments.update(torch.tensor([[0.0], [4.0]]))
    e = torch.tensor([3.0], requires_grad=True)
    (5 * moments.scaled(e)).sum().backward()
    assert e.grad.item() == 2.5


def test_spread_by_hand():
    """Networks (1, 0) and (3, 0) about (2, 0): √(2 / 10); a third of another size is alone."""
    pair = {"w": torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])}
    assert relative_weight_spread([pair]) == pytest.approx(0.2**0.5)
    alone = {"w": torch.full((1, 3), 2.0)}
    assert relative_weight_spread([pair, alone]) == pytest.approx((2 / 22) ** 0.5)
    assert relative_weight_spread([alone]) is None


GROUPS = {"partition": "rotated", "partition.samples": 240, "partition.angles": "0,90,180,270"}
GROUPS |= {"num-clients": 12, "train-fraction": 0.67, "fraction-train": 0.5, "rounds": 1}
GROUPS |= {"method": "odpfl-hn", "model": "convnet-small", "odpfl-hn.hidden-dim": 100}


def first_spread(folder, **settings):
    """How far the first round's generated models are apart."""
    own = {f"odpfl-hn.{key}": value for key, value in settings.items()}
    result, _ = federate(**GROUPS | own, **{"output-dir": str(folder)})
    line = json.loads((folder / "metrics.jsonl").read_text())
    return line["weights-spread"], from_record(result.arrays)


@pytest.mark.parametrize("encoder", ["ds", "dss", "st", "ds-sphere"])
def test_every_encoder_tells_clients_apart_from_the_start(encoder, tmp_path):
    """Generated models of the first round are more than 5 % of their norm apart, though half of
    the training clients took part alone."""
    apart, arrays = first_spread(tmp_path, encoder=encoder, **{"descriptor-rate": 0.5})
    assert apart > 0.05
    assert group(arrays, "moments").keys() == {"mean", "variance"}


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="end-to-end"):
        ODPFLHN(descriptor_rate=0.5, training="two-phase")
