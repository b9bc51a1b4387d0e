"""Networks of the form ``head(features(x))``, and how others get that form."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from clients.models.foreign import blank_inputs, layers_of
from fedapps.common.seeds import drawing

SPREAD = 0.1  # of the noise on parameters, so that a scale of 1 shows in a trial
SCALES = (1.0, 100.0)  # of the inputs of a trial, so that a bound of the outputs shows


class HeadedNetwork(nn.Module):
    """A network whose last linear layer is named `head`; a subclass says what its features are."""

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, d) before the head; x (n, *shape)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        return self.head(self.features(x))


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer of ``head(features(x))``. ValueError if it has no linear `head`."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear layer named 'head'")
    return head


def take_head(model: nn.Module) -> nn.Linear:
    """Remove the head of ``head(features(x))``: the model then gives features. ValueError as
    `head_of`."""
    head = head_of(model)
    model.head = nn.Identity()
    return head


class ForeignNetwork(HeadedNetwork):
    """A network from outside the package: `body` is all of it except its last linear layer."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """What `body` gives."""
        return self.body(x)


def headed(network: nn.Module, method: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The network in the form ``head(features(x))``: itself if it has it, else split at the linear
    layer whose outputs are the network's.

    Raises ValueError if no such layer has `num_classes` outputs."""
    if isinstance(network, HeadedNetwork) and type(network).forward is HeadedNetwork.forward:
        return network
    if has_form(network, shape):
        return network
    places = []
    for place, module in network.named_modules():
        if isinstance(module, nn.Linear) and module.out_features == num_classes:
            places.append(place)
    # The layer that gives the outputs is mostly the last one defined; each trial runs the network.
    for place in reversed(places):
        if can_split(network, place, shape):
            return split(network, place)
    raise ValueError(
        f"{type(network).__name__} does not end in a linear layer of {num_classes} outputs, which "
        f"{method} treats as the head; it has {layers_of(network)}: let its forward pass return "
        "what such a layer gives, without a softmax, scale or other step behind it, or choose a "
        "method without a head, such as fedavg"
    )


def split(network: nn.Module, place: str) -> ForeignNetwork:
    """The network whose linear layer at `place` becomes the head."""
    if not place:
        assert isinstance(network, nn.Linear)
        return ForeignNetwork(nn.Identity(), network)
    head = network.get_submodule(place)
    assert isinstance(head, nn.Linear)
    network.set_submodule(place, nn.Identity())
    return ForeignNetwork(network, head)


def has_form(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the network has a linear `head` and a method `features`, and is one of the other."""
    features = getattr(type(network), "features", None)
    if not isinstance(getattr(network, "head", None), nn.Linear) or not callable(features):
        return False
    trial: Any = varied(network)
    return trial is not None and agree(trial, lambda x: trial.head(trial.features(x)), shape)


def can_split(network: nn.Module, place: str, shape: tuple[int, ...]) -> bool:
    """Whether the network and its `split` at `place` have the same outputs."""
    trial = varied(network)
    if trial is None:
        return False
    parted = split(deepcopy(trial), place)
    return agree(trial, parted, shape)


def varied(network: nn.Module) -> nn.Module | None:
    """A copy with noise on its parameters; None if it cannot be copied."""
    try:
        copy = deepcopy(network)
    except (RuntimeError, TypeError):
        return None
    with drawing(0), torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(SPREAD * torch.randn_like(parameter))
    return copy


def agree(network: nn.Module, other: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> bool:
    """Whether both have the same outputs for random inputs (4, *shape), in training and in
    evaluation mode; not if one of them fails."""
    device = blank_inputs(network, shape).device
    for training, scale in product((False, True), SCALES):
        for each in (network, other):
            if isinstance(each, nn.Module):
                each.train(training)
        outputs = []
        for each in (network, other):
            with drawing(1), torch.no_grad():
                x = scale * torch.randn(4, *shape).to(device)
                try:
                    outputs.append(each(x))
                except Exception:  # whatever code from outside raises
                    return False
        expected, given = outputs
        if expected.shape != given.shape:
            return False
        if not torch.allclose(expected, given, rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True
