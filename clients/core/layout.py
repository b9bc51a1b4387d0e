"""Caches where a network keeps its arrays.

Walking the modules takes longer than copying a small network, and every message needs the result.
So the modules are walked once, until the network changes."""

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn


class Layout:
    """A network's modules, parameters and `state_dict`, without a reference to the network.

    `views` are the arrays of the `state_dict` as numpy arrays in the same memory. They are None on
    a GPU and for a type that numpy lacks."""

    def __init__(self, model: nn.Module) -> None:
        self.children = [module for module in model.modules() if module is not model]
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.devices = {p.device.type for p in self.parameters.values()}
        self.distinct = list(model.parameters())
        listed: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self.tensors = {name: t.detach() for name, t in listed.items()}
        self.views: dict[str, np.ndarray] | None = None
        if all(t.device.type == "cpu" for t in listed.values()):
            with suppress(TypeError, RuntimeError):
                self.views = {name: t.numpy() for name, t in self.tensors.items()}
        # The dictionaries in which torch's modules hold their tensors, submodules and hooks.
        self._tables: list[dict[Any, Any]] = []
        for module in (model, *self.children):
            self._tables += [module._parameters, module._buffers]
            self._tables += [module._modules, module._state_dict_hooks]
        self._entries = self._current_entries()
        self._listed = list(listed.values())
        self._addresses = list(map(Tensor.data_ptr, self._listed))
        # Tied tensors have one address and several names.
        first_names: dict[int, str] = {}
        for address, name in zip(self._addresses, self.tensors, strict=True):
            first_names.setdefault(address, name)
        self.first = list(first_names.values())
        # A hook may compute tensors of the `state_dict`; no module holds these.
        listed_ids = set(map(id, self._listed))
        self._computes_state_dict = not listed_ids <= set(map(id, self._entries))

    def is_current(self) -> bool:
        """Whether the network still has the same modules and tensors, in the same memory.

        False for a network that computes its `state_dict`."""
        return (
            not self._computes_state_dict
            and list(map(id, self._current_entries())) == list(map(id, self._entries))
            and list(map(Tensor.data_ptr, self._listed)) == self._addresses
        )

    def _current_entries(self) -> list[object]:
        """The tensors, submodules and hooks that the network's modules hold now."""
        entries: list[object] = []
        for table in self._tables:
            entries += table.values()
        return entries


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """The network's layout, from the cache if the network has not changed."""
    layout = _layouts.get(model)
    if layout is None or not layout.is_current():
        layout = Layout(model)
        _layouts[model] = layout
    return layout


def set_training(model: nn.Module, training: bool) -> None:
    """Put the network into training mode, or into evaluation mode. `nn.Module.train` is slow even
    where it changes nothing."""
    modules = (model, *layout_of(model).children)
    if any(module.training != training for module in modules):
        model.train(training)
