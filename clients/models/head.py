"""Networks of the form ``head(features(x))``, and how others get that form."""

from copy import deepcopy

import torch
from torch import Tensor, nn


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


class SplitNetwork(HeadedNetwork):
    """A network from outside the package: `body` is all of it except the last linear layer."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """What `body` gives."""
        return self.body(x)


class RepeatedChannel:
    """A forward pre-hook of networks for images of several channels: the one given is repeated."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images (n, channels, height, width) of inputs (n, 1, height, width)."""
        x, *others = inputs
        return x.expand(-1, self.channels, -1, -1), *others


def blank_inputs(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Two inputs (2, *shape) of zeros, on the device of the network's parameters."""
    here = next(network.parameters(), torch.empty(0)).device
    return torch.zeros(2, *shape, device=here)


def fitted(network: nn.Module, name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`network`, which takes inputs (n, *shape) and gives logits (n, C), as it is.

    Where images have one channel and its first convolution takes several, the one is repeated.
    Raises ValueError if it is no network, or cannot take such inputs, or gives other outputs."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} gives {type(network).__name__}, not a torch.nn.Module")
    if standard_strides not in network._forward_pre_hooks.values():
        network.register_forward_pre_hook(standard_strides)
        convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
        if convolutions and shape[:1] == (1,) and convolutions[0].in_channels != 1:
            network.register_forward_pre_hook(RepeatedChannel(convolutions[0].in_channels))
    training = network.training
    try:
        with torch.no_grad():
            logits = network.eval()(blank_inputs(network, shape))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot take inputs of shape {shape}: {error}") from error
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"{name!r} gives a {type(logits).__name__}; a network must give one tensor of logits "
            "(n, C), in training and in evaluation mode"
        )
    if logits.shape != (2, num_classes):
        raise ValueError(f"{name!r} gives {tuple(logits.shape)} for 2 inputs, not logits (2, C)")
    return network.train(training)


def standard_strides(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook: images of one channel get the strides that torch gives a new tensor.

    Samples have those of channels last, which are faster for the package's own networks. After a
    convolution of such images a network could not flatten by `view`."""
    x, *others = inputs
    if x.dim() == 4 and x.shape[1] == 1:
        x = x.flatten(1).unflatten(1, x.shape[1:])
    return x, *others


def headed(network: nn.Module, name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`network` in the form ``head(features(x))``, which gives the same outputs.

    A linear layer is the head if applying it to what the rest of the network gives changes no
    output, in training and in evaluation mode. `network` itself is returned if that layer is its
    attribute `head`. Raises ValueError, naming the linear layers, unless one layer is the head."""
    linear = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear)}
    if isinstance(network, HeadedNetwork):
        return network
    heads = [n for n, layer in linear.items()
             if layer.out_features == num_classes and _is_head(network, n, shape)]  # fmt: skip
    if len(heads) != 1:
        listed = ", ".join(
            f"{n!r} ({m.in_features} to {m.out_features})" for n, m in linear.items()
        )
        raise ValueError(
            f"{name!r} has no linear layer whose {num_classes} outputs are the network's; its "
            f"linear layers: {listed or 'none'}. End it in one, without log_softmax, softmax, "
            "sigmoid or a scale behind it, or take a method that needs no head, such as fedavg"
        )
    if heads[0] == "head":
        return network
    body, head = _split(network, heads[0])
    return SplitNetwork(body, head)


def _split(network: nn.Module, place: str) -> tuple[nn.Module, nn.Linear]:
    """The network without its linear layer at `place`, and that layer."""
    layer = network.get_submodule(place)
    assert isinstance(layer, nn.Linear)
    network.set_submodule(place, nn.Identity())
    return network, layer


def _is_head(network: nn.Module, place: str, shape: tuple[int, ...]) -> bool:
    """Whether the network gives the same outputs if its linear layer at `place` comes last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, *shape, generator=generator).to(blank_inputs(network, shape).device)
    for training in (False, True):
        expected = _outputs(network, x, training=training)
        body, layer = _split(deepcopy(network), place)
        features = _outputs(body, x, training=training)
        if not isinstance(expected, Tensor) or not isinstance(features, Tensor):
            return False
        if features.shape != (len(x), layer.in_features):
            return False
        with torch.no_grad():
            if not torch.allclose(layer(features), expected, rtol=1e-4, atol=1e-6):
                return False
    return True


def _outputs(network: nn.Module, x: Tensor, *, training: bool) -> object:
    """What a copy of the network gives, with the same random draws each time; None if it fails."""
    copy = deepcopy(network).train(training)
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(0)
        try:
            return copy(x)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return None
