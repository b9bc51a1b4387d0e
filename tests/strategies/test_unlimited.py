"""By default no reply is limited: FedAvg is Flower's weighted mean."""

import pytest

from strategies.methods.fedavg import FedAvg
from strategies.methods.fedtta import FedTTA


@pytest.mark.parametrize(("cls", "ratio"), [(FedAvg, 3.5), (FedTTA, 2.0)])
def test_protect_turns_both_ratios_on_and_a_given_ratio_wins(cls, ratio):
    plain, protected = cls(), cls(protect=True)
    assert (plain.max_update_ratio, plain.max_examples_ratio) == (0.0, 0.0)
    assert (protected.max_update_ratio, protected.max_examples_ratio) == (ratio, 3.0)
    assert cls(protect=True, max_update_ratio=7.0).max_update_ratio == 7.0
