"""A network called with other parameters than its own."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clients.core.functional import functional_call


class Repeated(nn.Module):
    """x → 2 w² x by one layer under two names. `tied` is another layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.again = self.first
        self.tied = nn.Linear(1, 1, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.again(self.first(x)) + 0 * self.tied(x)


class Tied(nn.Module):
    """x → w² x with two layers that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("name", ["first.weight", "again.weight", "tied.weight"])
def test_a_layer_under_two_names_gets_its_own_tensor_back(name):
    """With w = 3 the output for 1 is 2·9 = 18, and with the factor 5, too, 45."""
    network = Repeated()
    own = network.first.weight
    factor = network.factor
    w = torch.tensor([[3.0]], requires_grad=True)
    x = torch.ones(1, 1)
    assert float(functional_call(network, {name: w}, (x,))) == 18
    other = {name: w, "factor": torch.tensor(5.0)}
    assert float(functional_call(network, other, (x,))) == 45
    assert network.first.weight is own and network.again.weight is own
    assert network.tied.weight is own
    assert network.factor is factor


def test_tied_layers_get_the_tensor_of_one_name():
    """With w = 3 the output for 1 is 9, and its slope in w is 6."""
    network = Tied()
    own = network.first.weight
    w = torch.tensor([[3.0]], requires_grad=True)
    output = functional_call(network, {"first.weight": w}, (torch.ones(1, 1),))
    (slope,) = torch.autograd.grad(output, w)
    assert (float(output.detach()), float(slope)) == (9, 6)
    assert network.first.weight is own and network.second.weight is own


class Checkpointed(nn.Module):
    """x → (w x)², whose pass is repeated for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.layer(x).square(), x, use_reentrant=False)


def test_a_checkpointed_pass_is_not_repeated_with_other_weights():
    """With w = 3 the gradient for 1 is 2·3 = 6. Torch gave that of the layer's own weight, 2."""
    network = Checkpointed()
    nn.init.ones_(network.layer.weight)
    x = torch.ones(1, 1)
    w = torch.full((1, 1), 3.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="turn checkpointing off"):
        functional_call(network, {"layer.weight": w}, (x,))
    with torch.no_grad():
        assert functional_call(network, {"layer.weight": w}, (x,)).item() == 9
    network(x).backward()
    assert network.layer.weight.grad.item() == 2
