"""The optimizer of local training that a user chooses: by name, or a function of parameters."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clients.core.sgd import SGD, Adam, AdamW, Optimizer, TorchOptimizer

NAMES = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
# What torch.optim has where the settings lr and weight-decay are not given.
TORCH_DEFAULTS = {"adam": {"lr": 1e-3}, "adamw": {"lr": 1e-3, "weight-decay": 1e-2}}
NEEDED = ("param_groups", "zero_grad", "step")  # of an optimizer of torch


@dataclass(frozen=True)
class OwnOptimizer:
    """`given` is a name of `NAMES`, or a function of parameters that returns an optimizer of torch.
    `scheduler` is a function of that optimizer, whose result takes a step after each mini-batch.

    The state of both begins anew in each round. Raises ValueError for other values."""

    given: str | Callable[[list[Tensor]], Any]
    scheduler: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        known = ", ".join(NAMES)
        if isinstance(self.given, str):
            if self.given not in NAMES:
                raise ValueError(f"optimizer is {self.given!r:.200}; known: {known}, or a function")
            if self.scheduler is not None:
                raise ValueError(
                    "scheduler= needs an optimizer of torch: give optimizer= as a function, such "
                    "as lambda parameters: torch.optim.AdamW(parameters, lr=0.001)"
                )
        elif isinstance(self.given, type) or not callable(self.given):
            raise ValueError(
                f"optimizer is {self.given!r:.200}; it must be one of {known}, or a function of "
                "parameters, such as lambda parameters: torch.optim.AdamW(parameters, lr=0.001)"
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise ValueError(f"scheduler is {self.scheduler!r:.200}; it must be a function")

    def make(
        self, parameters: Sequence[Tensor], lr: float, factor: float, **settings: float
    ) -> Optimizer | TorchOptimizer:
        """The optimizer of one round. One that is named has the learning rate `lr` and the
        `settings` momentum and weight_decay; the rates of another are multiplied by `factor`."""
        if isinstance(self.given, str):
            if self.given == "sgd":
                return SGD(parameters, lr, settings["momentum"], settings["weight_decay"])
            return NAMES[self.given](parameters, lr, weight_decay=settings["weight_decay"])
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        optimizer = self.given(trained)
        if not all(hasattr(optimizer, name) for name in NEEDED):
            raise ValueError(
                f"optimizer= returned {type(optimizer).__name__}, which is no optimizer of torch"
            )
        _check_parameters(optimizer, trained)
        _check_step(optimizer, "optimizer=")
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        if scheduler is not None:
            _check_step(scheduler, "scheduler=")
        return TorchOptimizer(optimizer, scheduler, factor)


def _check_parameters(optimizer: Any, given: Sequence[Tensor]) -> None:
    """Raise ValueError for an optimizer that trains none of the parameters that it was given."""
    known = set(map(id, given))
    for group in optimizer.param_groups:
        if any(id(parameter) in known for parameter in group["params"]):
            return
    raise ValueError(
        f"optimizer= returned {type(optimizer).__name__} with other parameters than it was given, "
        "so it would not train the network; pass them on, as lambda parameters: "
        "torch.optim.AdamW(parameters, lr=0.001)"
    )


def _check_step(made: Any, keyword: str) -> None:
    """Raise ValueError if a step needs what a mini-batch does not give, as those of LBFGS and of
    ReduceLROnPlateau do."""
    step = getattr(made, "step", None)
    if not callable(step):
        return
    for name, parameter in inspect.signature(step).parameters.items():
        by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if by_position and parameter.default is parameter.empty:
            raise ValueError(
                f"{keyword} returned {type(made).__name__}, whose step needs {name}; clients call "
                "step() after each mini-batch: choose one that needs nothing"
            )
