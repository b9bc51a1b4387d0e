"""FedAvg, FedPer, SCAFFOLD, pFedHN and FedTTA as plain loops: the baselines of the benchmarks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from clients.models.adaptable import Adaptable
from strategies.maths.hypernetwork import Hypernetwork

Shares = Sequence[tuple[Tensor, Tensor]]  # x (n, *shape), y (n,) of clients
Batches = Callable[[int], Sequence[Tensor]]  # the rows of the mini-batches of n samples
Settings = Mapping[str, Any]  # of a method, by name


def fedavg(
    model: nn.Module,
    sample: Callable[[], Shares],
    batches: Batches,
    lr: float,
    rounds: int,
    personal: tuple[str, ...] = (),
) -> Iterator[list[Tensor]]:
    """Yields the server's parameters after every round. `sample` returns the clients of a round.

    With `personal` prefixes of names (FedPer), the same clients must take part in every round. Each
    client keeps its parameters with these names, and the server has the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parameters = dict(model.named_parameters())
    shared = [p for name, p in parameters.items() if not name.startswith(personal)]
    kept = [p for name, p in parameters.items() if name.startswith(personal)]
    server = [p.detach().clone() for p in shared]
    initial = [p.detach().clone() for p in kept]
    heads: dict[int, list[Tensor]] = {}
    for _ in range(rounds):
        mean = [torch.zeros_like(p) for p in server]
        clients = sample()
        for client, (x, y) in enumerate(clients):
            assign([*shared, *kept], [*server, *heads.get(client, initial)])
            for rows in batches(len(y)):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for total, p in zip(mean, shared, strict=True):
                    total.add_(p, alpha=1 / len(clients))
            if kept:
                heads[client] = [p.detach().clone() for p in kept]
        server = mean
        yield server


def assign(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copy values into parameters."""
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


def scaffold(
    model: nn.Module, clients: Shares, batches: Batches, settings: Settings, rounds: int
) -> Iterator[list[Tensor]]:
    """Yields x and c after every round, in which all clients train."""
    parameters = list(model.parameters())
    lr = settings["lr"]
    optimizer = torch.optim.SGD(parameters, lr)
    x = [p.detach().clone() for p in parameters]
    c = [torch.zeros_like(p) for p in x]
    controls = [list(c) for _ in clients]
    for _ in range(rounds):
        delta_y = [torch.zeros_like(p) for p in x]
        delta_c = [torch.zeros_like(p) for p in x]
        for (inputs, y), c_i in zip(clients, controls, strict=True):
            assign(parameters, x)
            corrections = [c_k - c_ik for c_k, c_ik in zip(c, c_i, strict=True)]
            mini_batches = batches(len(y))
            for rows in mini_batches:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[rows]), y[rows]).backward()
                for p, correction in zip(parameters, corrections, strict=True):
                    assert p.grad is not None
                    p.grad += correction
                optimizer.step()
            for k, p in enumerate(parameters):
                delta = p.detach() - x[k]
                c_plus = c_i[k] - c[k] - delta / (len(mini_batches) * lr)  # Eq. (4), option II
                delta_y[k].add_(delta, alpha=1 / len(clients))
                delta_c[k].add_(c_plus - c_i[k], alpha=1 / len(clients))
                c_i[k] = c_plus
        x = [x_k + settings["server_lr"] * d for x_k, d in zip(x, delta_y, strict=True)]
        c = [c_k + d for c_k, d in zip(c, delta_c, strict=True)]
        yield [*x, *c]


def pfedhn(
    model: nn.Module,
    hypernetwork: Hypernetwork,
    embeddings: Sequence[nn.Parameter],
    sample: Callable[[], Sequence[int]],
    clients: Shares,
    batches: Batches,
    settings: Settings,
    rounds: int,
) -> Iterator[list[Tensor]]:
    """Yields φ and the embeddings after every round. `sample` returns the clients of a round."""
    parameters = list(model.parameters())
    phi = list(hypernetwork.parameters())
    server = torch.optim.SGD(
        [*phi, *embeddings],
        settings["server_lr"],
        momentum=settings["server_momentum"],
        weight_decay=settings["server_weight_decay"],
    )
    for _ in range(rounds):
        chosen = sample()
        theta = list(hypernetwork(torch.stack([embeddings[i] for i in chosen])).values())
        difference = [torch.zeros_like(t) for t in theta]
        for place, client in enumerate(chosen):
            x, y = clients[client]
            assign(parameters, [t[place] for t in theta])
            local = torch.optim.SGD(
                parameters,
                settings["lr"],
                momentum=settings["momentum"],
                weight_decay=settings["weight_decay"],
            )
            for rows in batches(len(y)):
                local.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                local.step()
            for d, t, p in zip(difference, theta, parameters, strict=True):
                d[place] = t[place].detach() - p.detach()
        server.zero_grad()
        torch.autograd.backward(theta, difference)
        for p in phi:
            assert p.grad is not None
            p.grad /= len(chosen)
        clip_grad_norm_([*phi, *embeddings], settings["clip_norm"])
        server.step()
        yield [*phi, *embeddings]


def fedtta(
    model: Adaptable, clients: Shares, batches: Batches, settings: Settings, rounds: int
) -> Iterator[list[Tensor]]:
    """Yields ψ and φ after every round, in which all clients train."""
    psi = dict(model.base.named_parameters())
    phi = list(model.adaptation.parameters())
    parameters = [*psi.values(), *phi]
    inner_lr = settings["inner_lr"]
    groups = [{"params": list(psi.values())}, {"params": phi, "lr": settings["adapt_lr"]}]
    optimizer = torch.optim.SGD(groups, settings["lr"])
    server = [p.detach().clone() for p in parameters]
    for _ in range(rounds):
        mean = [torch.zeros_like(p) for p in server]
        for inputs, y in clients:
            assign(parameters, server)
            for rows in batches(len(y)):
                x = inputs[rows]
                norm = torch.linalg.vector_norm(model.adaptation(model.base(x)))
                inner = norm * (settings["batch_size"] / len(x)) ** 0.5
                gradients = torch.autograd.grad(inner, list(psi.values()), create_graph=True)
                adapted = {}
                for (name, p), gradient in zip(psi.items(), gradients, strict=True):
                    adapted[name] = p - inner_lr * gradient
                optimizer.zero_grad()
                F.cross_entropy(functional_call(model.base, adapted, (x,)), y[rows]).backward()
                for network in (model.base, model.adaptation):
                    clip_grad_norm_(network.parameters(), settings["clip_norm"])
                optimizer.step()
            with torch.no_grad():
                for total, p in zip(mean, parameters, strict=True):
                    total.add_(p, alpha=1 / len(clients))
        server = mean
        yield server
