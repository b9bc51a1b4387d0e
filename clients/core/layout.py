"""Where a network keeps its arrays. To walk its modules takes longer than to copy a small network,
and every message asks for it, so it is done once for a network that stays the same."""

from contextlib import suppress
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn


class Layout:
    """What a network's `state_dict` lists, by name, and its parameters and modules.

    `views` are its arrays as numpy arrays in the same memory; None on a GPU, and with a type that
    numpy lacks. It keeps no reference to the network itself."""

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
        self._tables = [
            table
            for m in (model, *self.children)
            for table in (m._parameters, m._buffers, m._modules, m._state_dict_hooks)
        ]
        self._entries = self._present()
        self._listed = list(listed.values())
        self._places = list(map(Tensor.data_ptr, self._listed))
        first: dict[int, str] = {}
        for place, name in zip(self._places, self.tensors, strict=True):
            first.setdefault(place, name)
        self.first = list(first.values())  # of the names of tied tensors
        self._computed = not {*map(id, self._listed)} <= {*map(id, self._entries)}

    def is_current(self) -> bool:
        """Whether the network still has the same modules and tensors, in the same memory. Never
        if it computes what its `state_dict` lists."""
        return (
            not self._computed
            and list(map(id, self._present())) == list(map(id, self._entries))
            and list(map(Tensor.data_ptr, self._listed)) == self._places
        )

    def _present(self) -> list[object]:
        return [value for table in self._tables for value in table.values()]


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """The network's layout."""
    layout = _layouts.get(model)
    if layout is None or not layout.is_current():
        layout = _layouts[model] = Layout(model)
    return layout
