"""Networks of the form ``head(features(x))``, and how others get that form."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.copies import copy_of
from clients.core.layer_inputs import before_calls
from clients.models.foreign import COMPILED, SCALES, layers_of, trial_inputs, varied
from fedapps.common.seeds import drawing

END_AUTOCAST = "end the autocast before it and give it features.float(), or leave the autocast out"


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
    """A network from outside the package: `body` is all of it except its last linear layer, which
    was at `place`."""

    def __init__(self, body: nn.Module, head: nn.Linear, place: str = "") -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.place = place

    def features(self, x: Tensor) -> Tensor:
        """What `body` gives."""
        return self.body(x)


class NamedHead(nn.Module):
    """A network with the layer at `place` as its `head`, whatever stands behind it; `body` is the
    rest and calls that layer."""

    def __init__(self, network: nn.Module, place: str) -> None:
        super().__init__()
        head = network.get_submodule(place)
        network.set_submodule(place, _Reference(head))
        self.body = network
        self.head = head
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        logits: Tensor = self.body(x)
        return logits


class _Reference(nn.Module):
    """Stands where a layer was and calls it; the layer's parameters belong to another module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # a list: a module in an attribute would be a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's result."""
        return self._layer[0](*args, **kwargs)


def structure(network: nn.Module, shape: tuple[int, ...]) -> Hashable:
    """What tells networks of one function apart: the shape of an input, the type of each module,
    the shape of each array."""
    modules = tuple((name, type(module)) for name, module in network.named_modules())
    arrays = tuple((name, tuple(array.shape)) for name, array in network.state_dict().items())
    return shape, modules, arrays


def headed(
    network: nn.Module,
    method: str,
    shape: tuple[int, ...],
    num_classes: int,
    place: str = "",
    by_name: bool = False,
    known_heads: dict[Hashable, str] | None = None,
) -> nn.Module:
    """The network in the form ``head(features(x))``: itself if it has it, else split at the linear
    layer whose outputs are the network's.

    The declared `place`, the dotted name of a layer, is the head instead. With `by_name` the
    method only needs to know which arrays are the head's, so further steps may follow the layer.
    A caller that gets its networks from one function may pass the same `known_heads` each time:
    a network of a structure that was split before is split at the same layer, without a trial.
    Raises ValueError if no such layer has `num_classes` outputs, and for a place that cannot be the
    head."""
    if place:
        return _at_place(network, method, shape, place.removeprefix(f"{COMPILED}."), by_name)
    if isinstance(network, HeadedNetwork) and type(network).forward is HeadedNetwork.forward:
        return network
    if has_form(network, shape):
        return network
    if known_heads is None:
        known_heads = {}
    key = structure(network, shape)
    if key in known_heads:
        return split(network, known_heads[key])
    places = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module.out_features == num_classes:
            places.append(name)
    # The layer that gives the outputs is mostly the last one defined; each trial runs the network.
    for name in reversed(places):
        if can_split(network, name, shape):
            known_heads[key] = name
            return split(network, name)
    declare = ""
    if by_name:
        example = places[-1] if places else "NAME"
        declare = f"; or name the layer that is the head, as head={example}"
    autocast = in_autocast(network, places, shape)
    if autocast:
        raise ValueError(
            f"{autocast}, and {method} computes with the features before this layer in its own "
            f"type: {END_AUTOCAST}{declare}; or choose a method without a head, such as fedavg"
        )
    raise ValueError(
        f"{type(network).__name__} does not end in a linear layer of {num_classes} outputs, which "
        f"{method} treats as the head; it has {layers_of(network)}: let its forward pass return "
        f"what such a layer gives, without a softmax, scale or other step behind it{declare}; or "
        "choose a method without a head, such as fedavg"
    )


def _at_place(
    network: nn.Module, method: str, shape: tuple[int, ...], place: str, by_name: bool
) -> nn.Module:
    """The network with its layer at `place` as head. Raises ValueError for a place that cannot be
    it."""
    name = type(network).__name__
    if place == "head" and has_form(network, shape):
        return network
    layer = dict(network.named_modules()).get(place)
    if layer is None or not place:
        raise ValueError(
            f"head is {place!r}, but {name} has no layer of that name; its linear layers are "
            f"{layers_of(network)}"
        )
    if not list(layer.parameters()):
        raise ValueError(
            f"head is {place!r}, a {type(layer).__name__} without parameters; the linear layers of "
            f"{name} are {layers_of(network)}"
        )
    if isinstance(layer, nn.Linear) and can_split(network, place, shape):
        return split(network, place)
    if not by_name:
        autocast = in_autocast(network, [place], shape)
        if autocast:
            raise ValueError(
                f"head is {place!r}, but {autocast}, and {method} computes with the features "
                f"before it in its own type: {END_AUTOCAST}"
            )
        raise ValueError(
            f"head is {place!r}, but its outputs are not those of {name}; {method} computes with "
            "the features before the head, so the forward pass must return what this layer gives; "
            f"the linear layers are {layers_of(network)}"
        )
    return NamedHead(network, place)


def in_autocast(network: nn.Module, places: Sequence[str], shape: tuple[int, ...]) -> str:
    """That the network calls one of its layers at `places` within torch.autocast, in words; "" if
    it does not, or fails."""
    trial = varied(network)
    if trial is None:
        return ""
    called: list[str] = []

    def note(place: str, x: Tensor) -> None:
        if torch.is_autocast_enabled(x.device.type):
            called.append(place)

    for place in places:
        before_calls(trial.get_submodule(place), partial(note, place))
    with torch.no_grad(), suppress(Exception):  # whatever code from outside raises
        trial(trial_inputs(trial, shape))
    if not called:
        return ""
    return f"{type(network).__name__} calls its layer {called[-1]!r} within torch.autocast"


def split(network: nn.Module, place: str) -> ForeignNetwork:
    """The network whose linear layer at `place` becomes the head."""
    if not place:
        assert isinstance(network, nn.Linear)
        return ForeignNetwork(nn.Identity(), network)
    head = network.get_submodule(place)
    assert isinstance(head, nn.Linear)
    network.set_submodule(place, nn.Identity())
    return ForeignNetwork(network, head, place)


@contextmanager
def with_head(model: nn.Module) -> Iterator[None]:
    """Within the context the networks in `model` that lack their head have it in its place."""
    parted = [m for m in model.modules() if isinstance(m, ForeignNetwork | NamedHead) and m.place]
    stand_ins = [network.body.get_submodule(network.place) for network in parted]
    for network in parted:
        network.body.set_submodule(network.place, network.head)
    try:
        yield
    finally:
        for network, stand_in in zip(parted, stand_ins, strict=True):
            network.body.set_submodule(network.place, stand_in)


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
    parted = split(copy_of(trial), place)
    return agree(trial, parted, shape)


def agree(network: nn.Module, other: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> bool:
    """Whether both have the same outputs for random inputs (4, *shape), in training and in
    evaluation mode; not if one of them fails."""
    for training, scale in product((False, True), SCALES):
        for each in (network, other):
            if isinstance(each, nn.Module):
                each.train(training)
        outputs = []
        x = trial_inputs(network, shape, scale)
        for each in (network, other):
            with drawing(1), torch.no_grad():
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
