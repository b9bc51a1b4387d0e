"""Cohorts: clients of one process that train side by side, as one stack of networks.

A small network leaves a GPU idle: a step costs what the launching of its kernels costs. In a
cohort each client runs in a thread of its own until it comes to local SGD, where it waits for the
others; the steps of all that do the same are then taken at once, by `torch.func.vmap` over their
parameters. All that a method says for it is `Client.stacked`.

What comes out is what clients one after the other give, up to rounding; but masks of dropout are
drawn for all at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from clients.optimizers import SGD
from clients.sgd import sgd
from partitions.shares import Samples

Settings = dict[str, Any]  # what `sgd` is called with
_member: ContextVar[Member | None] = ContextVar("member", default=None)  # whose thread this is


class Client(Protocol):
    """What a cohort asks of `clients.base.Client`."""

    stacked: tuple[str, ...]
    model: nn.Module
    device: str
    criterion: Callable[[Tensor, Tensor], Tensor]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss () of a mini-batch."""


def in_cohort() -> bool:
    """Whether the client at hand is one of a cohort's, which needs a network of its own."""
    return _member.get() is not None


def run_sgd(client: Client, settings: Settings) -> float:
    """`sgd` with the settings: together with the cohort's other clients, if there is one and the
    method allows it."""
    member = _member.get()
    if member is not None and stackable(client, settings):
        loss = member.wait(Work(client, settings))
        if loss is not None:
            return loss
    return sgd(**settings)


def stackable(client: Client, settings: Settings) -> bool:
    """Whether the client's steps may be taken with others': the class that defines its loss names
    what the loss reads, nothing but `drift` changes gradients, and no statistics run along."""
    definer = next(cls for cls in type(client).__mro__ if "loss" in vars(cls))
    own = set(client.model.parameters())
    return (
        "stacked" in vars(definer)
        and settings["loss"] == client.loss
        and settings.get("adjust") is None
        and all(isinstance(p, Tensor) and p in own for p in settings["parameters"])
        and type(settings["samples"]) is Samples
        and len(settings["rows"]) > 0
        and not any(True for _ in client.model.buffers())
    )


class Work:
    """The SGD that a client waits for."""

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
        """Works of one kind can be done at once."""
        x, scale, mean, std = (getattr(self.samples, key) for key in ("x", "scale", "mean", "std"))
        parameters = self.trained | self.fixed
        shapes = [(name, parameters[name].shape, name in self.trained) for name in parameters]
        options = type(self.client), self.client.criterion, self.client.device, *self.rates
        return (*options, *shapes, id(x), scale, mean, std)


class Member:
    """One client's thread, which takes turns with the cohort's own: one of them runs at a time."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self.work: Work | None = None  # what it waits for
        self.loss: float | None = None  # of the work, once it is done
        self.result: Any = None
        self._task = task
        self._error: BaseException | None = None
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=[torch.get_num_threads()])
        self._thread.daemon = True  # where another member's error ends the process
        self._thread.start()

    def go(self) -> bool:
        """Let it go on until it waits for work, or has ended; returns whether it waits."""
        self.work = None
        self._turn.release()
        self._pause.acquire()
        if self._error is not None:
            raise self._error
        return self.work is not None

    def wait(self, work: Work) -> float | None:
        """In its thread: the work's mean loss, when the cohort has done it; None if it could not.

        What others draw meanwhile changes nothing for it."""
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
    """Lets clients train side by side, up to `size` of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the tasks return, each of which lets one client train. Raises what one raises."""
        results = []
        for start in range(0, len(tasks), self.size):
            members = [Member(task) for task in tasks[start : start + self.size]]
            waiting = [member for member in members if member.go()]
            while waiting:
                self._work(waiting)
                waiting = [member for member in waiting if member.go()]
            results += [member.result for member in members]
        return results

    def _work(self, waiting: Sequence[Member]) -> None:
        """Do what the members wait for, those of one kind at once."""
        kinds: dict[tuple[object, ...], list[Member]] = {}
        for member in waiting:
            assert member.work is not None
            kinds.setdefault(member.work.kind(), []).append(member)
        for alike in kinds.values():
            works = [member.work for member in alike if member.work is not None]
            try:
                losses = train_together(works)
            except RuntimeError as error:  # vmap knows not every operation; memory may not suffice
                warnings.warn(f"clients train one by one: {error}", stacklevel=2)
                continue
            for member, loss in zip(alike, losses, strict=True):
                member.loss = loss


class Loss(nn.Module):
    """A client's loss as a function of its network's parameters, of its `stacked` tensors and of a
    mini-batch."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.model, self.client = client.model, copy(client)

    def forward(self, tensors: dict[str, list[Tensor]], x: Tensor, y: Tensor) -> Tensor:
        """The loss ()."""
        vars(self.client).update(tensors)
        return self.client.loss(x, y)


def train_together(works: Sequence[Work]) -> list[float]:
    """Take the steps of all `works`, which are of one kind; returns the mean loss of each.

    Mini-batches of one size are one batch of the stack. A work of fewer steps ends earlier."""
    order = sorted(range(len(works)), key=lambda i: -len(works[i].rows))
    ranked = [works[i] for i in order]
    first, counts = ranked[0], [len(work.rows) for work in ranked]
    with torch.no_grad():
        trained = {n: torch.stack([work.trained[n] for work in ranked]) for n in first.trained}
        fixed = {n: torch.stack([work.fixed[n] for work in ranked]) for n in first.fixed}
        drift = _stacked([work.drift for work in ranked])
        tensors = {
            name: _stacked([getattr(work.client, name) for work in ranked])
            for name in first.client.stacked
        }
    drawn, network = [_drawn(work) for work in ranked], Loss(first.client)
    total = torch.zeros(len(ranked), device=first.client.device)

    def loss(own: dict[str, Tensor], others: dict[str, list[Tensor]], x: Tensor, y: Tensor) -> Any:
        parameters = {f"model.{name}": p for name, p in own.items()}
        return functional_call(network, parameters, (others, x, y))

    buffers: list[dict[str, Tensor]] = [{} for _ in trained]
    for start, end in pairwise([0, *sorted(set(counts))]):
        live = sum(count > start for count in counts)  # the first ones
        leaves = {name: stack[:live].requires_grad_() for name, stack in trained.items()}
        optimizer = SGD(leaves.values(), *first.rates)
        for leaf, own in zip(leaves.values(), buffers, strict=True):
            optimizer.remember(leaf, {name: b[:live] for name, b in own.items()})
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
                own = {name: stack[which] for name, stack in (leaves | fixed).items()}
                others = {n: [stack[which] for stack in each] for n, each in tensors.items()}
                values = vmap(loss, randomness="different")(own, others, x, y)
                values.sum().backward()
                total[which] += values.detach()
            for leaf, correction in zip(leaves.values(), drift, strict=False):
                if leaf.grad is not None:
                    leaf.grad += correction[:live]
            optimizer.step()
        buffers = [optimizer.remembered(leaf) for leaf in leaves.values()]
    with torch.no_grad():
        for i, work in enumerate(ranked):
            for name, parameter in work.trained.items():
                parameter.copy_(trained[name][i])
    losses = dict(zip(order, (total / torch.tensor(counts).to(total)).tolist(), strict=True))
    return [losses[i] for i in range(len(works))]


def _stacked(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The works' first tensors as one, their second ones, …"""
    return [torch.stack(alike) for alike in zip(*each, strict=True)]


def _drawn(work: Work) -> Sequence[Tensor]:
    """The rows of each mini-batch in the tensors that all clients share."""
    index = work.samples.index
    return index[torch.cat(list(work.rows)).to(index.device)].split([len(r) for r in work.rows])
