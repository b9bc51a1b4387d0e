"""Which of a network's arrays are trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Roles:
    """Names in the network's ``state_dict``: `buffers`, `frozen` parameters, which require no
    gradient, and `tied` ones, each with the first name of the same parameter."""

    buffers: frozenset[str]
    frozen: frozenset[str]
    tied: Mapping[str, str]


def frozen_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that require no gradient, as they stand."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if not p.requires_grad)


def roles_of(model: nn.Module) -> Roles:
    """The roles of the model's arrays, as its parameters stand."""
    first: dict[int, str] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    tied = {n: first[id(p)] for n, p in named.items() if first.setdefault(id(p), n) != n}
    buffers = frozenset(model.state_dict().keys() - named.keys())
    return Roles(buffers, frozen_names(model), tied)


def check_tied(model: nn.Module, stays: Callable[[str], bool], method: str) -> nn.Module:
    """The model. Raises ValueError if one parameter has a name in the part that `stays` on the
    client and another name in the rest."""
    for name, same in roles_of(model).tied.items():
        if stays(name) != stays(same):
            raise ValueError(
                f"{method} treats {name!r} and {same!r} differently, but they are one parameter of "
                f"{type(model).__name__}; untie them, or choose a method with one global model"
            )
    return model
