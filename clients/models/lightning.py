"""Networks that say how they are trained, as a LightningModule does: `training_step` gives the loss
of a batch, `configure_optimizers` the optimizer of a round.

Nothing of Lightning is imported: the two methods decide. Its Trainer does not run, so a module that
needs more of it is refused."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.sgd import TorchOptimizer
from clients.models.foreign import OPTIMIZERS, STEP, as_given, defines
from clients.models.head import with_head
from fedapps.common.once import say_once
from partitions.shares import Rows, Samples

# What the Trainer calls in training; without it these would be left out.
NEEDS_TRAINER = (
    "backward", "manual_backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    "configure_gradient_clipping", "configure_model", "setup", "on_fit_start", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
# What does not change the training.
UNUSED = (
    "validation_step", "test_step", "predict_step", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "on_validation_epoch_end", "on_test_epoch_end", "prepare_data",
    "train_dataloader", "val_dataloader", "test_dataloader", "configure_callbacks",
)  # fmt: skip
UNUSED_SENTENCE = (
    "is not called: clients are scored by the task's scores of the network's outputs, on what "
    "`data=` returns"
)
Batches = Callable[[list[int]], Any]


def trains_itself(network: object) -> bool:
    """Whether it says both its loss and its optimizer."""
    return defines(network, STEP) and defines(network, OPTIMIZERS)


def check_without_trainer(network: nn.Module) -> None:
    """Raise ValueError for a module that needs Lightning's Trainer; say once what is not called."""
    name = type(network).__name__
    needed = [hook for hook in NEEDS_TRAINER if defines(network, hook)]
    if needed:
        raise ValueError(
            f"{name} has {', '.join(needed)}, which Lightning's Trainer would call; clients train "
            f"by {STEP} and {OPTIMIZERS} alone: leave it out, or do this work in __init__ or "
            f"{STEP}"
        )
    if getattr(network, "automatic_optimization", True) is False:
        raise ValueError(
            f"{name} has automatic_optimization=False, so {STEP} takes the steps itself; let it "
            "return the loss"
        )
    unused = [hook for hook in UNUSED if defines(network, hook)]
    if unused:
        say_once(f"of {name} {', '.join(unused)} {UNUSED_SENTENCE}")


@dataclass(frozen=True)
class OwnSteps:
    """Local training by the methods of `module`, which is part of the client's network.

    `batches` gives the batch of rows of the training samples, as the user's loader would; without
    it a batch is (x, y)."""

    module: nn.Module
    batches: Batches | None = None

    @contextmanager
    def within(
        self, model: nn.Module, settings: dict[str, Any], factor: float, batches_per_epoch: int
    ) -> Iterator[dict[str, Any]]:
        """The arguments of `clients.core.sgd.sgd` in the place of `settings`; within the context
        the module is as its user wrote it. The learning rates are multiplied by `factor`.

        An epoch has `batches_per_epoch`; 0: unknown."""

        def make(parameters: Sequence[Tensor]) -> TorchOptimizer:
            optimizer, schedules = configured(self.module, batches_per_epoch)
            return TorchOptimizer(optimizer, schedules, factor)

        samples = settings["samples"]
        changed = {"loss": _Step(self.module), "make_optimizer": make}
        with ExitStack() as stack:
            stack.enter_context(with_head(model))
            stack.enter_context(as_given(self.module))
            yield settings | changed | {"samples": _Batched.of(samples, self.batches)}


@dataclass(frozen=True)
class _Batched(Samples):
    """Samples whose inputs are whole batches, in the user's form."""

    batches: Batches = field(default=lambda rows: rows, compare=False)
    device: str = "cpu"
    fixed = False

    @classmethod
    def of(cls, samples: Samples, batches: Batches | None) -> "_Batched":
        """The samples, in `batches` or as (x, y)."""

        def pairs(rows: list[int]) -> tuple[Tensor, Tensor]:
            x, y = samples[torch.tensor(rows)]
            # One label for each sample, as a table's column has them.
            return x, y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y

        device = getattr(samples, "device", str(samples.x.device))
        chosen = pairs if batches is None else batches
        return cls(samples.x, samples.y, samples.index, batches=chosen, device=device)

    def __getitem__(self, rows: Rows) -> tuple[Any, Any]:
        chosen = torch.arange(len(self.index))[rows].tolist()
        return moved(self.batches(chosen), self.device), None

    def to(self, device: str | torch.device) -> "_Batched":
        """The samples, whose batches are moved to the device."""
        return replace(self, device=str(device))


def moved(batch: Any, device: str) -> Any:
    """The batch with its tensors on the device."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(moved(value, device) for value in batch)
    return batch


class _Step:
    """`training_step` as a loss of batches."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.count = 0
        parameters = [p.name for p in _positional(getattr(module, STEP))]
        self.takes_index = len(parameters) > 1
        if len(parameters) > 2:
            raise ValueError(
                f"{type(module).__name__}.{STEP} takes {', '.join(parameters)}; it must take batch "
                "and batch_idx, or batch alone"
            )

    def __call__(self, batch: Any, _: Any) -> Tensor:
        """The loss (). Raises ValueError for another result."""
        arguments = (batch, self.count) if self.takes_index else (batch,)
        self.count += 1
        result = _called(self.module, STEP, *arguments)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.ndim:
            shown = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(result)
            raise ValueError(
                f"{type(self.module).__name__}.{STEP} returned {shown:.200}; it must return the "
                "mean loss of the batch, a tensor without dimensions, or a dict with it as 'loss'"
            )
        return loss


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    given = inspect.signature(function).parameters.values()
    return [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _called(module: nn.Module, name: str, *arguments: Any) -> Any:
    """The result of a method of the module. Raises ValueError where it needs the Trainer."""
    try:
        return getattr(module, name)(*arguments)
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise ValueError(
            f"{type(module).__name__}.{name} reads self.trainer, but clients train without "
            "Lightning's Trainer; give the module what it needs in __init__"
        ) from error


class Schedules:
    """Schedulers of learning rates, each with the number of steps after which it moves on."""

    def __init__(self, schedulers: Sequence[tuple[Any, int]]) -> None:
        self._schedulers = schedulers
        self._count = 0

    def step(self) -> None:
        """Called after each step of the optimizer."""
        self._count += 1
        for scheduler, every in self._schedulers:
            if self._count % every == 0:
                scheduler.step()


def configured(module: nn.Module, batches_per_epoch: int) -> tuple[Any, Schedules | None]:
    """The optimizer and the schedule of a round, in any form in which `configure_optimizers` may
    return one. Raises ValueError for several optimizers, for none, and for a schedule that needs
    scores or epochs that are not there."""
    name = type(module).__name__
    given = _called(module, OPTIMIZERS)
    optimizers, schedules = _parts(given)
    if len(optimizers) != 1 or not hasattr(optimizers[0], "param_groups"):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"{name}.{OPTIMIZERS} returned {kinds or 'no optimizer'}; it must return one optimizer "
            "of torch, alone or with schedulers of its learning rate"
        )
    schedulers = [_scheduler(entry, name, batches_per_epoch) for entry in schedules]
    return optimizers[0], Schedules(schedulers) if schedulers else None


def _parts(given: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers, as they were returned."""
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        schedule = given.get("lr_scheduler")
        return [given.get("optimizer")], [] if schedule is None else [schedule]
    if not isinstance(given, tuple | list):
        return [given], []
    if len(given) == 2 and all(isinstance(part, tuple | list) for part in given):
        return list(given[0]), list(given[1])
    if len(given) == 1 and isinstance(given[0], Mapping):
        return _parts(given[0])
    return list(given), []


def _scheduler(entry: Any, name: str, batches_per_epoch: int) -> tuple[Any, int]:
    """A scheduler, and the number of steps after which it moves on."""
    settings = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    scheduler = settings.get("scheduler")
    kind = type(scheduler).__name__
    needs_score = kind == "ReduceLROnPlateau" or settings.get("reduce_on_plateau")
    if needs_score or not hasattr(scheduler, "step"):
        what = "follows a score" if needs_score else "is no scheduler of torch"
        raise ValueError(
            f"{name}.{OPTIMIZERS} returned {kind}, which {what}; give a scheduler that counts steps"
        )
    frequency = int(settings.get("frequency", 1))
    if settings.get("interval", "epoch") == "step":
        return scheduler, frequency
    if not batches_per_epoch:
        raise ValueError(
            f"{name}.{OPTIMIZERS} returned {kind} with interval 'epoch', and local training counts "
            "steps; give client_app local_epochs=…, or return {'scheduler': …, 'interval': 'step'}"
        )
    return scheduler, frequency * batches_per_epoch
