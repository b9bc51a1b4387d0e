"""Cohorts: clients of one process that train together, as one stack of networks.

A small network leaves a GPU idle: launching kernels takes most of a step. In a cohort, each client
runs in its own thread until local SGD, where it waits for the others. Work of one kind is then done
together, by `torch.func.vmap` over the clients' parameters. A method only declares
`Client.vmapped_tensors`. A loss that reads any other attribute which differs by client is refused.

Up to rounding, the result is that of clients which train one by one. Dropout is an exception: its
masks are drawn for all clients at once."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from clients.core.criterion import Criterion
from clients.core.functional import functional_call
from clients.core.sgd import SGD, sgd
from partitions.shares import Samples

Settings = dict[str, Any]  # arguments of `sgd`
# The member of a cohort that runs in this thread.
_member: ContextVar[Member | None] = ContextVar("member", default=None)


class Client(Protocol):
    """The attributes of `clients.core.client.Client` that a cohort uses."""

    vmapped_tensors: tuple[str, ...]
    model: nn.Module
    device: str
    criterion: Criterion

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss () of a mini-batch."""


def in_cohort() -> bool:
    """Whether this thread's client belongs to a cohort and needs its own copy of the network."""
    return _member.get() is not None


def run_in_cohort(client: Client, settings: Settings) -> float:
    """`sgd` with the settings, together with the cohort's other clients where possible.

    Called in a member's thread, where `in_cohort`."""
    member = _member.get()
    assert member is not None
    member.alone = why_alone(client, settings)
    if not member.alone:
        loss = member.wait(Work(client, settings))
        if loss is not None:
            return loss
    return sgd(**settings)


def why_alone(client: Client, settings: Settings) -> str:
    """Why the client cannot train together with others; "" if it can."""
    loss_class = next(cls for cls in type(client).__mro__ if "loss" in vars(cls))
    if "vmapped_tensors" not in vars(loss_class):
        return f"{loss_class.__name__} has a loss, but does not set `vmapped_tensors`"
    if settings["loss"] != client.loss:
        return f"{type(client).__name__} trains on another function than its `loss`"
    if settings.get("make_optimizer") is not None:
        return f"{type(client).__name__} has an optimizer of its own"
    if settings.get("adjust") is not None:
        return f"{type(client).__name__} changes gradients"
    if any(True for _ in client.model.buffers()):
        return "the network has buffers, such as running statistics"
    of_model = set(client.model.parameters())
    known = all(isinstance(p, Tensor) and p in of_model for p in settings["parameters"])
    if not known or type(settings["samples"]) is not Samples or not len(settings["rows"]):
        return f"{type(client).__name__} trains on other samples, or on none"
    return ""


class Work:
    """The local SGD of one client."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client = client
        self.samples: Samples = settings["samples"]
        self.rows: Sequence[Tensor] = settings["rows"]
        self.rates = [settings[key] for key in ("lr", "momentum", "weight_decay")]
        self.clip_norm: float = settings["clip_norm"]
        # Trained parameters come in the order of the settings, as `drift` does.
        names = {parameter: name for name, parameter in client.model.named_parameters()}
        self.trained: dict[str, Tensor] = {}
        for parameter in settings["parameters"]:
            if parameter.requires_grad:
                self.trained[names.pop(parameter)] = parameter
        self.fixed = {name: parameter for parameter, name in names.items()}
        self.drift: list[Tensor] = []  # SCAFFOLD's corrections; empty for other methods
        if settings.get("drift"):
            for parameter, change in zip(settings["parameters"], settings["drift"], strict=True):
                if parameter.requires_grad:
                    self.drift.append(change)

    def kind(self) -> tuple[object, ...]:
        """A key: work with equal keys can be done together."""
        client = self.client
        samples = self.samples
        shapes: list[object] = []
        for name, parameter in self.trained.items():
            shapes.append((name, parameter.shape, True))
        for name, parameter in self.fixed.items():
            shapes.append((name, parameter.shape, False))
        of_client = (type(client), client.criterion, client.device)
        # One tensor holds the inputs of all clients; only their rows in it differ.
        of_samples = (id(samples.x), samples.scale, samples.mean, samples.std)
        return (*of_client, *self.rates, self.clip_norm, *shapes, *of_samples)

    def rows_in_dataset(self) -> Sequence[Tensor]:
        """The rows of each mini-batch in the tensors that all clients share."""
        index = self.samples.index
        sizes = [len(row) for row in self.rows]
        order = torch.cat(list(self.rows)).to(index.device)
        return index[order].split(sizes)


class Dropped(BaseException):
    """Ends the thread of a client whose cohort has failed."""


class Member:
    """A client's thread, which takes turns with the cohort's thread: only one of both runs."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self.work: Work | None = None  # the work that the member waits for
        self.alone = "the method has a training loop that does not call `fit_locally`"
        self.loss: float | None = None  # mean loss of the finished work
        self.result: Any = None
        self.seconds = 0.0  # duration of the client's work, with its part of common steps
        self._task = task
        self._is_dropped = False
        self._error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._pause = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[torch.get_num_threads()])
        self._thread.daemon = True  # another member's error may end the process
        self._thread.start()

    def go(self) -> bool:
        """Let the member run until it waits or ends; returns whether it waits."""
        self.work = None
        started = time.monotonic()
        self._turn.release()
        self._pause.acquire()
        self.seconds += time.monotonic() - started
        if self._error is not None:
            raise self._error
        return self.work is not None

    def drop(self) -> None:
        """End the member's thread, if it waits."""
        self._is_dropped = True
        self._turn.release()

    def wait(self, work: Work) -> float | None:
        """Called in the member's thread: wait until the cohort has done the work.

        Returns the mean loss, or None if the cohort cannot do the work. Random draws of other
        members do not affect this one. Raises Dropped if another member has failed."""
        device = torch.device(work.client.device)
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            self.work = work
            self.loss = None
            self._pause.release()
            self._turn.acquire()
        if self._is_dropped:
            raise Dropped
        return self.loss

    def _run(self, threads: int) -> None:
        self._turn.acquire()
        if self._is_dropped:
            return
        torch.set_num_threads(threads)
        _member.set(self)
        try:
            self.result = self._task()
        except BaseException as error:  # `go` raises it in the cohort's thread
            self._error = error
        self._pause.release()


class Cohort:
    """Lets up to `size` clients train together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used = False  # whether clients trained together
        self._alone = ""  # why clients trained one by one
        self._warned = False

    def warn_if_unused(self, method: str) -> None:
        """Warn that clients of the `method` have trained one by one."""
        if self._alone and not self._used and not self._warned:
            warnings.warn(
                f"{method}: stacked-clients={self.size} has no effect, clients train one by one: "
                f"{self._alone}",
                stacklevel=2,
            )
            self._warned = True

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[tuple[Any, float]]:
        """The result and the duration in seconds of each client's task.

        The duration of common steps is divided equally among the members. Raises the error of a
        task."""
        results: list[tuple[Any, float]] = []
        for start in range(0, len(tasks), self.size):
            members = [Member(task) for task in tasks[start : start + self.size]]
            try:
                waiting = _still_waiting(members)
                while waiting:
                    self._work(waiting)
                    waiting = _still_waiting(waiting)
            except BaseException:
                for member in members:
                    member.drop()
                raise
            results += [(member.result, member.seconds) for member in members]
            self._alone = members[-1].alone
        return results

    def _work(self, waiting: Sequence[Member]) -> None:
        """Do the members' work, kind by kind. Members keep `loss` None where this fails."""
        kinds: dict[tuple[object, ...], list[Member]] = {}
        for member in waiting:
            assert member.work is not None
            kinds.setdefault(member.work.kind(), []).append(member)
        for members in kinds.values():
            works = [member.work for member in members if member.work is not None]
            started = time.monotonic()
            try:
                losses = train_together(works)
            except RuntimeError as error:  # an operation that vmap lacks, or too little memory
                warnings.warn(f"clients train one by one: {error}", stacklevel=2)
                continue
            self._used = True
            seconds_each = (time.monotonic() - started) / len(members)
            for member, loss in zip(members, losses, strict=True):
                member.seconds += seconds_each
                member.loss = loss


def _still_waiting(members: Sequence[Member]) -> list[Member]:
    """Let the members run, one after the other; returns those that wait for work to be done."""
    waiting = []
    for member in members:
        if member.go():
            waiting.append(member)
    return waiting


class Loss(nn.Module):
    """A client's loss as a function of parameters, its `vmapped_tensors` and a mini-batch.

    The first call notes in `read` which attributes of the client the loss reads."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.model = client.model
        self.client = copy(client)
        self.read: set[str] = set()
        self._client_class = type(client)
        self._watch()

    def forward(self, tensors: dict[str, list[Tensor]], x: Tensor, y: Tensor) -> Tensor:
        """The loss ()."""
        vars(self.client).update(tensors)
        return self.client.loss(x, y)

    def _watch(self) -> None:
        """Replace the client's class by one that notes reading and refuses setting attributes."""
        read = self.read
        client_class = self._client_class

        def note_and_get(client: Any, name: str) -> Any:
            read.add(name)
            return client_class.__getattribute__(client, name)

        def refuse_to_set(client: Any, name: str, value: Any) -> None:
            raise ValueError(
                f"{client_class.__name__}.loss sets self.{name}, which a cohort would lose; set it "
                "in `train`, or set stacked-clients=1"
            )

        watching = {"__getattribute__": note_and_get, "__setattr__": refuse_to_set}
        self.client.__class__ = type(client_class.__name__, (client_class,), watching)

    def check(self, clients: Sequence[Client]) -> None:
        """Stop noting; raise ValueError if the loss has read a value that differs by client."""
        object.__setattr__(self.client, "__class__", self._client_class)
        different = self._different_attribute(clients) or _different_model_tensor(clients)
        if different:
            raise ValueError(
                f"{self._client_class.__name__}.loss reads {different}, which differs by client; "
                "make it a list of tensors and name it in `vmapped_tensors`, or set "
                "stacked-clients=1"
            )

    def _different_attribute(self, clients: Sequence[Client]) -> str:
        """An attribute that the loss has read and that differs by client, or ""."""
        first, *others = map(vars, clients)
        names = self.read - {"model", *self._client_class.vmapped_tensors}
        for name in sorted(names & first.keys()):
            if not all(_same(first[name], other.get(name)) for other in others):
                return f"self.{name}"
        return ""


def _different_model_tensor(clients: Sequence[Client]) -> str:
    """A plain tensor attribute of the model's modules that differs by client, or ""."""
    for modules in zip(*(client.model.modules() for client in clients), strict=True):
        first, *others = map(vars, modules)
        for name, value in first.items():
            if not isinstance(value, Tensor):
                continue
            if not all(_same(value, other.get(name)) for other in others):
                return f"self.model's {name}"
    return ""


def train_together(works: Sequence[Work]) -> list[float]:
    """Take the steps of all `works`, which are of one kind; returns the mean loss of each.

    Mini-batches of equal size are computed as one. Work with fewer steps ends earlier."""
    # By decreasing number of steps: the clients that still train are then the first ones.
    order = sorted(range(len(works)), key=lambda i: -len(works[i].rows))
    stack = _Stack([works[i] for i in order])
    buffers: list[dict[str, Tensor]] = [{} for _ in stack.trained]
    # Between two of these numbers of steps, the same clients train.
    for start, end in pairwise([0, *sorted(set(stack.num_steps))]):
        live = sum(count > start for count in stack.num_steps)
        leaves = {name: p[:live].requires_grad_() for name, p in stack.trained.items()}
        optimizer = SGD(leaves.values(), *stack.first.rates)
        for leaf, state in zip(leaves.values(), buffers, strict=True):
            optimizer.kept[leaf] = {name: b[:live] for name, b in state.items()}
        for step in range(start, end):
            optimizer.zero_grad()
            stack.backward(leaves, step, live)
            clip_each(list(leaves.values()), stack.first.clip_norm)
            for leaf, correction in zip(leaves.values(), stack.drift, strict=False):
                if leaf.grad is not None:
                    leaf.grad += correction[:live]
            optimizer.step()
        buffers = [optimizer.kept.get(leaf, {}) for leaf in leaves.values()]
    stack.copy_to_models()
    losses = [0.0] * len(works)
    for i, loss in zip(order, stack.mean_losses(), strict=True):
        losses[i] = loss
    return losses


def clip_each(leaves: Sequence[Tensor], clip_norm: float) -> None:
    """Clip the gradients (clients, …) of each client to `clip_norm`, as torch's `clip_grad_norm_`
    does for one client; 0: leave them."""
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if clip_norm <= 0 or not gradients:
        return
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients])
    norms = squares.sum(0).sqrt()
    factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        # One factor for each client: (clients, 1, …), with as many axes as the gradient.
        other_axes = [1] * (gradient.ndim - 1)
        gradient.mul_(factors.view(-1, *other_axes))


class _Stack:
    """The parameters, tensors and mini-batches of several works; clients are the first axis."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.first = works[0]
        self.num_steps = [len(work.rows) for work in works]
        self.rows = [work.rows_in_dataset() for work in works]
        self.trained: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        self.vmapped_tensors: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            # Of each name a client has one tensor. Of `drift`, and of an attribute named in
            # `vmapped_tensors`, it has a list: the lists are stacked position by position.
            for name in self.first.trained:
                self.trained[name] = torch.stack([work.trained[name] for work in works])
            for name in self.first.fixed:
                self.fixed[name] = torch.stack([work.fixed[name] for work in works])
            self.drift = _stacked([work.drift for work in works])
            for name in self.first.client.vmapped_tensors:
                values = [getattr(work.client, name) for work in works]
                self.vmapped_tensors[name] = _stacked(values)
        self.loss = Loss(self.first.client)
        self.total = torch.zeros(len(works), device=self.first.client.device)  # sums of losses

    def backward(self, leaves: dict[str, Tensor], step: int, live: int) -> None:
        """Add the gradients of one step of the first `live` clients to the trained `leaves`."""
        by_size: dict[int, list[int]] = {}
        for i in range(live):
            by_size.setdefault(len(self.rows[i][step]), []).append(i)
        for size, members in by_size.items():
            rows = torch.cat([self.rows[i][step] for i in members])
            x, y = replace(self.first.samples, index=rows)[:]
            x = x.view(len(members), size, *x.shape[1:])
            y = y.view(len(members), size, *y.shape[1:])
            which: slice | Tensor = slice(live)  # a slice needs no copy
            if len(members) < live:
                which = torch.tensor(members).to(x.device)
            parameters = {name: p[which] for name, p in (leaves | self.fixed).items()}
            tensors: dict[str, list[Tensor]] = {}
            for name, values in self.vmapped_tensors.items():
                tensors[name] = [value[which] for value in values]
            losses = vmap(self._loss_of, randomness="different")(parameters, tensors, x, y)
            if self.loss.read:  # after the first call alone
                self.loss.check([work.client for work in self.works])
                self.loss.read.clear()
            losses.sum().backward()
            self.total[which] += losses.detach()

    def _loss_of(
        self, parameters: dict[str, Tensor], tensors: dict[str, list[Tensor]], x: Tensor, y: Tensor
    ) -> Any:
        """The loss () of one client with these parameters and `vmapped_tensors`."""
        named = {f"model.{name}": p for name, p in parameters.items()}
        return functional_call(self.loss, named, (tensors, x, y))

    def copy_to_models(self) -> None:
        """Set the trained parameters of the clients' models."""
        with torch.no_grad():
            for i, work in enumerate(self.works):
                for name, parameter in work.trained.items():
                    parameter.copy_(self.trained[name][i])

    def mean_losses(self) -> list[float]:
        """The mean loss of each client's steps."""
        num_steps = torch.tensor(self.num_steps).to(self.total)
        losses: list[float] = (self.total / num_steps).tolist()
        return losses


def _same(value: Any, other: Any) -> bool:
    """Whether two clients' values are equal; False for values that cannot be compared."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor | np.ndarray):
        return value.shape == other.shape and bool((value == other).all())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[k], other[k]) for k in value)
    return isinstance(value, str | int | float | bool) and value == other


def _stacked(tensors_of_each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Stacks of all first tensors, of all second tensors, and so on."""
    return [torch.stack(tensors) for tensors in zip(*tensors_of_each, strict=True)]
