"""FedAvg, FedPer and pFedHN by hand: tensors in memory and a loop, which others are compared to."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from strategies.hypernetwork import Hypernetwork

Shares = Sequence[tuple[Tensor, Tensor]]  # x (n, *shape), y (n,) of clients


def fedavg(
    model: nn.Module,
    sample: Callable[[], Shares],
    batches: Callable[[int], Sequence[Tensor]],
    lr: float,
    rounds: int,
    personal: tuple[str, ...] = (),
) -> Iterator[list[Tensor]]:
    """Yields the server's parameters after every round, which trains the clients that `sample`
    returns; `batches` gives the rows of the mini-batches of n samples.

    With `personal` prefixes of names (FedPer) the same clients take part in every round, and each
    keeps its parameters of these names; the server's are the others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parameters = dict(model.named_parameters())
    shared = [p for name, p in parameters.items() if not name.startswith(personal)]
    kept = [p for name, p in parameters.items() if name.startswith(personal)]
    server = [p.detach().clone() for p in shared]
    initial, heads = [p.detach().clone() for p in kept], dict[int, list[Tensor]]()
    for _ in range(rounds):
        mean = [torch.zeros_like(p) for p in server]
        clients = sample()
        for client, (x, y) in enumerate(clients):
            with torch.no_grad():
                start = [*server, *heads.get(client, initial)]
                for p, w in zip((*shared, *kept), start, strict=True):
                    p.copy_(w)
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


def pfedhn(model: nn.Module, clients: Shares, rounds: int, steps: int, batch: int) -> None:
    """Each round trains one client: φ and v generate θ, SGD moves it, Δθ goes back."""
    parameters = list(model.parameters())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    dim = 1 + len(clients) // 4
    hypernetwork, embeddings = Hypernetwork(shapes, dim), nn.Embedding(len(clients), dim)
    learnt = [*hypernetwork.parameters(), *embeddings.parameters()]
    server = torch.optim.SGD(learnt, 0.01, momentum=0.9, weight_decay=1e-3)
    for number in range(rounds):
        client = number % len(clients)
        x, y = clients[client]
        generated = [a[0] for a in hypernetwork(embeddings(torch.tensor([client]))).values()]
        with torch.no_grad():
            for parameter, value in zip(parameters, generated, strict=True):
                parameter.copy_(value)
        local = torch.optim.SGD(parameters, 0.005, momentum=0.9, weight_decay=5e-5)
        for _ in range(steps):
            rows = torch.randint(len(y), (batch,))
            local.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            local.step()
        difference = [g.detach() - p.detach() for g, p in zip(generated, parameters, strict=True)]
        server.zero_grad()
        torch.autograd.backward(generated, difference)
        clip_grad_norm_(learnt, 50)
        server.step()
