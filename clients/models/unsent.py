"""What a network keeps outside its parameters and buffers, so that no message carries it."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn

from clients.models.foreign import is_adopted, trial_inputs, varied
from fedapps.common.once import say_once
from fedapps.common.seeds import drawing

# What torch itself keeps in each module.
OF_TORCH = frozenset(vars(nn.Module()))


def warn_of_unsent(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Warn once of an adopted network with layers in lists and dicts of Python, and of what its
    passes in training change but its state_dict does not hold."""
    if not is_adopted(network):
        return
    name = type(network).__name__
    hidden = list(_hidden(network))
    if hidden:
        say_once(
            f"{name} keeps layers or parameters in {', '.join(hidden):.200}, where torch does not "
            "see them: they are neither trained nor sent; keep them in torch.nn.ModuleList, "
            "ModuleDict or ParameterList, unless that is meant",
            WARNING,
        )
    changed = _changed_in_training(network, shape)
    if changed:
        say_once(
            f"forward passes of {name} in training change {', '.join(changed):.200}, outside its "
            "state_dict, which is neither sent nor kept by clients; where it matters, use "
            "self.register_buffer(name, tensor)",
            WARNING,
        )


def _hidden(network: nn.Module) -> Iterator[str]:
    """The names of attributes whose lists, tuples or dicts hold layers or parameters that the
    network does not have otherwise."""
    known: set[Any] = {*network.modules(), *network.parameters()}
    for place, module in network.named_modules():
        for attribute, value in _own(module):
            entries: list[Any] = []
            if isinstance(value, Mapping):
                entries = list(value.values())
            elif isinstance(value, list | tuple):
                entries = list(value)
            parts = [entry for entry in entries if isinstance(entry, nn.Module | nn.Parameter)]
            if any(part not in known for part in parts):
                yield _named(place, attribute)


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that are not torch's."""
    return [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]


def _named(place: str, attribute: str) -> str:
    return f"{place}.{attribute}" if place else attribute


def _changed_in_training(network: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """The names of tensors and numbers outside the state_dict that each pass in training changes.

    The same pass twice leaves what was kept of the last pass alone as it is."""
    trial = varied(network)
    if trial is None:
        return []
    x = trial_inputs(trial, shape)
    states = []
    for _ in range(2):
        with suppress(Exception), torch.no_grad(), drawing(1):  # whatever code from outside raises
            trial.train()(x.clone())
        states.append(_unsent_values(trial))
    first, second = states
    return [name for name, value in first.items() if not _equal(value, second.get(name))]


def _unsent_values(network: nn.Module) -> dict[str, Any]:
    """Copies of the tensors and numbers outside the state_dict, by name."""
    values: dict[str, Any] = {}
    for place, module in network.named_modules():
        for name in module._non_persistent_buffers_set:
            values[_named(place, name)] = module._buffers[name]
        for name, value in _own(module):
            if isinstance(value, Tensor | int | float):
                values[_named(place, name)] = value
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.detach().clone()
    return values


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.allclose(first, second, equal_nan=True)
    return bool(first == second)
