"""Cohorts: clients of one process that train together, as one stack of networks.

A small network leaves a GPU idle: the launching of kernels takes most of a step. In a cohort each
client runs in its own thread until local SGD, where it waits for the others; equal work is then
done at once, by `torch.func.vmap` over the clients' parameters. A method only declares
`Client.vmapped_tensors`. A loss that reads something else that differs by client is refused.

Up to rounding the result is that of clients one after the other; but masks of dropout are drawn
for all at once."""

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
from torch.func import functional_call, vmap

from clients.core.criterion import Criterion
from clients.core.optimizers import SGD
from clients.core.sgd import sgd
from partitions.shares import Samples

Settings = dict[str, Any]  # arguments of `sgd`
_member: ContextVar[Member | None] = ContextVar("member", default=None)  # the thread's


class Client(Protocol):
    """What a cohort needs of `clients.core.client.Client`."""

    vmapped_tensors: tuple[str, ...]
    model: nn.Module
    device: str
    criterion: Criterion

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss () of a mini-batch."""


def in_cohort() -> bool:
    """Whether this thread's client belongs to a cohort and needs its own copy of the network."""
    return _member.get() is not None


def run_sgd(client: Client, settings: Settings) -> float:
    """`sgd` with the settings, together with the cohort's other clients where possible."""
    member = _member.get()
    if member is not None:
        member.alone = why_alone(client, settings)
        if not member.alone and (loss := member.wait(Work(client, settings))) is not None:
            return loss
    return sgd(**settings)


def why_alone(client: Client, settings: Settings) -> str:
    """Why the client's steps cannot be taken together with others', "" if they can."""
    definer = next(cls for cls in type(client).__mro__ if "loss" in vars(cls))
    parameters = set(client.model.parameters())
    if "vmapped_tensors" not in vars(definer):
        return f"{definer.__name__} has a loss, but does not set `vmapped_tensors`"
    if settings["loss"] != client.loss:
        return f"{type(client).__name__} trains on another function than its `loss`"
    if settings.get("adjust") is not None:
        return f"{type(client).__name__} changes gradients"
    if any(True for _ in client.model.buffers()):
        return "the network has buffers, such as running statistics"
    known = all(isinstance(p, Tensor) and p in parameters for p in settings["parameters"])
    if not known or type(settings["samples"]) is not Samples or not len(settings["rows"]):
        return f"{type(client).__name__} trains on other samples, or on none"
    return ""


class Work:
    """The local SGD of one client."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client, self.samples, self.rows = client, settings["samples"], settings["rows"]
        names = {p: name for name, p in client.model.named_parameters()}
        trained = [p for p in settings["parameters"] if p.requires_grad]
        self.trained = {names.pop(p): p for p in trained}
        self.fixed = {name: p for p, name in names.items()}
        pairs = zip(settings["parameters"], settings.get("drift", ()), strict=False)
        self.drift: Sequence[Tensor] = [change for p, change in pairs if p.requires_grad]
        self.rates = [settings[key] for key in ("lr", "momentum", "weight_decay")]

    def kind(self) -> tuple[object, ...]:
        """Work of equal kind can be done at once."""
        x, scale, mean, std = (getattr(self.samples, key) for key in ("x", "scale", "mean", "std"))
        parameters = self.trained | self.fixed
        shapes = [(name, parameters[name].shape, name in self.trained) for name in parameters]
        options = type(self.client), self.client.criterion, self.client.device, *self.rates
        return (*options, *shapes, id(x), scale, mean, std)


class Member:
    """One client's thread; at any time either it runs or the cohort's thread does."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self.work: Work | None = None  # that it waits for
        self.alone = "the method has a training loop that does not call `fit_locally`"
        self.loss: float | None = None  # of the finished work
        self.result: Any = None
        self.seconds = 0.0  # of its own work, and its part of common steps
        self._task = task
        self._error: BaseException | None = None
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[torch.get_num_threads()])
        self._thread.daemon = True  # another member's error may end the process
        self._thread.start()

    def go(self) -> bool:
        """Let it run until it waits or ends; returns whether it waits."""
        self.work = None
        started = time.monotonic()
        self._turn.release()
        self._pause.acquire()
        self.seconds += time.monotonic() - started
        if self._error is not None:
            raise self._error
        return self.work is not None

    def wait(self, work: Work) -> float | None:
        """Called in its thread: the mean loss once the cohort has done the work, or None if it
        cannot. The random draws of others do not affect it."""
        device = torch.device(work.client.device)
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            self.work, self.loss = work, None
            self._pause.release()
            self._turn.acquire()
        return self.loss

    def _run(self, threads: int) -> None:
        self._turn.acquire()
        torch.set_num_threads(threads)
        _member.set(self)
        try:
            self.result = self._task()
        except BaseException as error:  # `go` raises it
            self._error = error
        self._pause.release()


class Cohort:
    """Lets up to `size` clients train together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used = False  # whether clients trained together
        self._alone = ""  # why they did not
        self._warned = False

    def warn_if_unused(self, method: str) -> None:
        """Warn that clients of the `method` have trained one by one."""
        if self._alone and not self._used and not self._warned:
            text = (
                f"{method}: stacked-clients={self.size} has no effect, clients train one by one: "
            )
            warnings.warn(text + self._alone, stacklevel=2)
            self._warned = True

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[tuple[Any, float]]:
        """The result of each client's task, and the seconds that it took. The members share the
        seconds of common steps equally. Raises the error of a task."""
        results: list[tuple[Any, float]] = []
        for start in range(0, len(tasks), self.size):
            members = [Member(task) for task in tasks[start : start + self.size]]
            waiting = [member for member in members if member.go()]
            while waiting:
                self._work(waiting)
                waiting = [member for member in waiting if member.go()]
            results += [(member.result, member.seconds) for member in members]
            self._alone = members[-1].alone
        return results

    def _work(self, waiting: Sequence[Member]) -> None:
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
            share = (time.monotonic() - started) / len(members)
            for member in members:
                member.seconds += share
            self._used = True
            for member, loss in zip(members, losses, strict=True):
                member.loss = loss


class Loss(nn.Module):
    """A client's loss as a function of parameters, `vmapped_tensors` tensors and a mini-batch."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.model, self.client = client.model, copy(client)
        self.read, self._kind = set[str](), type(client)
        self._watch()

    def forward(self, tensors: dict[str, list[Tensor]], x: Tensor, y: Tensor) -> Tensor:
        """The loss ()."""
        vars(self.client).update(tensors)
        return self.client.loss(x, y)

    def _watch(self) -> None:
        """Note in `read` what the loss reads of the client, or sets."""
        read, kind = self.read, self._kind

        def get(client: Any, name: str) -> Any:
            read.add(name)
            return kind.__getattribute__(client, name)

        def put(client: Any, name: str, value: Any) -> None:
            raise ValueError(
                f"{kind.__name__}.loss sets self.{name}, which a cohort would lose; set it in "
                "`train`, or set stacked-clients=1"
            )

        watched = {"__getattribute__": get, "__setattr__": put}
        self.client.__class__ = type(kind.__name__, (kind,), watched)

    def check(self, clients: Sequence[Client]) -> None:
        """Raise ValueError if the loss has read something that differs by client; watch no more."""
        object.__setattr__(self.client, "__class__", self._kind)
        first, names = vars(clients[0]), self.read - {"model", *self._kind.vmapped_tensors}
        different = [
            f"self.{name}"
            for name in sorted(names & first.keys())
            if not all(_same(first[name], vars(client).get(name)) for client in clients[1:])
        ] + [
            f"self.model's {name}"
            for modules in zip(*(client.model.modules() for client in clients), strict=True)
            for name, value in vars(modules[0]).items()
            if isinstance(value, Tensor)
            and not all(_same(value, vars(module).get(name)) for module in modules[1:])
        ]
        if different:
            raise ValueError(
                f"{self._kind.__name__}.loss reads {different[0]}, which differs by client; make "
                "it a list of tensors and name it in `vmapped_tensors`, or set stacked-clients=1"
            )


def train_together(works: Sequence[Work]) -> list[float]:
    """Take the steps of all `works`, which are of one kind; returns the mean loss of each.

    Mini-batches of equal size form one batch of the stack. Work with fewer steps ends earlier."""
    order = sorted(range(len(works)), key=lambda i: -len(works[i].rows))
    ranked = [works[i] for i in order]
    first, counts = ranked[0], [len(work.rows) for work in ranked]
    with torch.no_grad():
        trained = {n: torch.stack([work.trained[n] for work in ranked]) for n in first.trained}
        fixed = {n: torch.stack([work.fixed[n] for work in ranked]) for n in first.fixed}
        drift = _stacked([work.drift for work in ranked])
        tensors = {
            name: _stacked([getattr(work.client, name) for work in ranked])
            for name in first.client.vmapped_tensors
        }
    drawn, network = [_drawn(work) for work in ranked], Loss(first.client)
    total = torch.zeros(len(ranked), device=first.client.device)

    def loss(stack: dict[str, Tensor], rest: dict[str, list[Tensor]], x: Tensor, y: Tensor) -> Any:
        parameters = {f"model.{name}": p for name, p in stack.items()}
        return functional_call(network, parameters, (rest, x, y))

    buffers: list[dict[str, Tensor]] = [{} for _ in trained]
    for start, end in pairwise([0, *sorted(set(counts))]):
        live = sum(count > start for count in counts)  # the first ones
        leaves = {name: stack[:live].requires_grad_() for name, stack in trained.items()}
        optimizer = SGD(leaves.values(), *first.rates)
        for leaf, state in zip(leaves.values(), buffers, strict=True):
            optimizer.kept[leaf] = {name: b[:live] for name, b in state.items()}
        for step in range(start, end):
            sizes: dict[int, list[int]] = {}
            for i in range(live):
                sizes.setdefault(len(drawn[i][step]), []).append(i)
            optimizer.zero_grad()
            for size, members in sizes.items():
                rows = torch.cat([drawn[i][step] for i in members])
                x, y = (
                    t.view(len(members), size, *t.shape[1:])
                    for t in replace(first.samples, index=rows)[:]
                )
                which = slice(live) if len(members) == live else torch.tensor(members).to(x.device)
                parameters = {name: s[which] for name, s in (leaves | fixed).items()}
                others = {name: [s[which] for s in stacks] for name, stacks in tensors.items()}
                values = vmap(loss, randomness="different")(parameters, others, x, y)
                if network.read:
                    network.check([work.client for work in ranked])
                    network.read.clear()
                values.sum().backward()
                total[which] += values.detach()
            for leaf, correction in zip(leaves.values(), drift, strict=False):
                if leaf.grad is not None:
                    leaf.grad += correction[:live]
            optimizer.step()
        buffers = [optimizer.kept.get(leaf, {}) for leaf in leaves.values()]
    with torch.no_grad():
        for i, work in enumerate(ranked):
            for name, parameter in work.trained.items():
                parameter.copy_(trained[name][i])
    losses = dict(zip(order, (total / torch.tensor(counts).to(total)).tolist(), strict=True))
    return [losses[i] for i in range(len(works))]


def _same(one: Any, other: Any) -> bool:
    """Whether two clients' values are equal; False for values that cannot be compared."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, str | int | float | bool) and one == other


def _stacked(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The works' first tensors as one, their second ones as one, …"""
    return [torch.stack(tensors) for tensors in zip(*each, strict=True)]


def _drawn(work: Work) -> Sequence[Tensor]:
    """The rows of each mini-batch in the tensors that all clients share."""
    index = work.samples.index
    return index[torch.cat(list(work.rows)).to(index.device)].split([len(r) for r in work.rows])
