"""Networks from outside the package: what they take and return is found by trial, before a run."""

import threading
from collections.abc import Mapping
from copy import deepcopy
from logging import INFO
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor, nn

COMPILED = "_orig_mod"  # where torch.compile keeps the network that it was given
TRAINING = ("training_step", "configure_optimizers", "manual_backward", "optimizer_step")
LIBRARIES = ("lightning", "pytorch_lightning")  # whose base classes define these
_said: set[str] = set()  # what was logged, once a process
_lock = threading.Lock()


def say_once(text: str) -> None:
    """Log the text unless this process has done so."""
    with _lock:
        new = text not in _said
        _said.add(text)
    if new:
        log(INFO, text)


def layers_of(network: nn.Module) -> str:
    """The network's linear layers for a message: names and sizes."""
    layers = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            place = name or "itself"  # the network is a linear layer
            layers.append(f"{place!r} ({module.in_features} → {module.out_features})")
    return ", ".join(layers) or "no linear layer"


def blank_inputs(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Two inputs (2, *shape) of zeros, on the device of the network's parameters."""
    device = next(network.parameters(), torch.empty(0)).device
    return torch.zeros(2, *shape, device=device)


def logits_of(output: Any) -> Tensor:
    """The logits in a network's output: the output itself, ``output["logits"]`` of a mapping, as
    the outputs of Hugging Face are, or the first entry of a tuple or list.

    Raises ValueError for another output."""
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        return logits
    described = type(output).__name__
    if isinstance(output, Mapping):
        keys = ", ".join(map(repr, output)) or "no key"
        described += f" with {keys}"

    raise ValueError(
        f"the network returns {described}; it must return logits (n, C), a mapping that has them "
        "under 'logits', or a tuple whose first entry they are"
    )


def _only_logits(network: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: of several outputs the logits remain."""
    if isinstance(output, Tensor):
        return None
    logits = logits_of(output)
    kind = type(output).__name__
    which = "'logits'" if isinstance(output, Mapping) else "its first entry"
    say_once(
        f"{type(network).__name__} returns a {kind} of {len(output)}: {which} is what is trained "
        "and scored, the rest is dropped"
    )
    return logits


class _Repeated:
    """A forward pre-hook: images of one channel become images of `channels` equal ones."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        return (x.expand(-1, self.channels, -1, -1), *others)


def uncompiled(network: nn.Module) -> nn.Module:
    """The network without torch.compile, which puts `_orig_mod.` in front of names."""
    places = [name for name, m in network.named_modules() if COMPILED in m._modules]
    if places:
        say_once("the network is compiled by torch.compile; it runs as it was before that")
    for place in reversed(places):  # inner ones first
        inner = network.get_submodule(place)._modules[COMPILED]
        assert inner is not None
        if place:
            network.set_submodule(place, inner)
        else:
            network = inner  # the whole network was compiled; it is no one's submodule
    for module in network.modules():
        module._compiled_call_impl = None  # of `Module.compile`, which changes no name
    return network


def adopted(
    network: Any, name: str, shape: tuple[int, ...], num_classes: int | None = None
) -> tuple[nn.Module, int]:
    """The network, which gives logits (n, C) of inputs (n, *shape), and C. Its names stay.

    Images of one channel are repeated where it takes more, and of several outputs the logits
    remain. Raises ValueError for inputs that it cannot take, and for outputs that are no logits of
    at least two classes, or of `num_classes`."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} gives {type(network).__name__}, not a torch.nn.Module")
    network = uncompiled(network)
    check_trains_nothing(network)
    network.register_forward_hook(_only_logits)
    training = network.training
    logits = _tried(network.eval(), name, shape)
    network.train(training)
    classes = logits.shape[1] if logits.ndim == 2 else 0
    if logits.shape == (2, 1):
        raise ValueError(
            f"{name!r} gives one output; it must give one for each class: it has "
            f"{layers_of(network)}; let its last layer have {num_classes or 2} outputs, also for "
            "two classes"
        )
    if logits.shape != (2, num_classes or classes) or not classes:
        wanted = num_classes or "C"
        raise ValueError(
            f"{name!r} gives {tuple(logits.shape)} for 2 inputs, not logits (2, {wanted})"
        )
    return network, classes


def _tried(network: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor:
    """The output for two blank inputs, whose channel is repeated if the network takes more.

    Raises ValueError if it cannot take them."""
    x = blank_inputs(network, shape)
    with torch.no_grad():
        try:
            return network(x)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            failure = error
        channel_counts: list[int] = []
        if len(shape) == 3 and shape[0] == 1:
            channel_counts = _channel_counts(network)
        # The first convolution of the list need not be the one that gets the images.
        for channels in channel_counts:
            handle = network.register_forward_pre_hook(_Repeated(channels))
            try:
                return network(x)
            except (RuntimeError, ValueError, TypeError, IndexError):
                handle.remove()
    raise ValueError(f"{name!r} cannot take inputs of shape {shape}: {failure}") from failure


def _channel_counts(network: nn.Module) -> list[int]:
    """The different numbers of input channels, from 2 on, of the network's convolutions."""
    counts = []
    for module in network.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        channels = module.in_channels
        if channels > 1 and channels not in counts:
            counts.append(channels)
    return counts


def layers_by_call(network: nn.Module, x: Tensor) -> list[str]:
    """The names of the modules that have parameters of their own, in the order in which their
    forward passes of x end; those that are not called come first."""
    network = deepcopy(network).eval()
    owners = []
    for name, module in network.named_modules():
        if list(module.parameters(recurse=False)):
            owners.append(name)

    ended: list[str] = []
    for name in owners:

        def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            ended.append(name)

        network.get_submodule(name).register_forward_hook(note)
    with torch.no_grad():
        network(x)
    called = list(dict.fromkeys(ended))  # once each: a layer may be used twice
    not_called = [name for name in owners if name not in called]
    return not_called + called


def check_trains_nothing(network: nn.Module) -> None:
    """Raise ValueError for a network that says how it is trained, as a LightningModule does: local
    training takes its outputs alone."""
    defined = [name for name in TRAINING if _is_defined(network, name)]
    if defined:
        name = type(network).__name__
        methods = " and ".join(defined)
        raise ValueError(
            f"{name} has {methods}, which would not be called: clients train the outputs "
            "of the network by SGD with the settings lr, momentum and weight-decay, on loss=; "
            f"return the network inside, or torch.nn.Sequential({name}(…)) to leave them unused"
        )


def _is_defined(network: nn.Module, name: str) -> bool:
    """Whether a class of the network, but not Lightning's own base class, defines the method."""
    for kind in type(network).__mro__:
        if name in vars(kind):
            return kind.__module__.partition(".")[0] not in LIBRARIES
    return False
