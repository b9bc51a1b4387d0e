"""Mini-batches of a single sample, on which a network that normalises features over the mini-batch
cannot train, and single inputs, which it cannot predict."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from clients.core.client import Client
from clients.core.normalisation import untracked_norms

OF_TORCH = "Expected more than 1 value per channel when training"  # how torch refuses one sample


@contextmanager
def naming_single_samples(client: Client) -> Iterator[None]:
    """Inside, torch's error about a mini-batch of one sample becomes a ValueError that names the
    batch size that fits."""
    try:
        yield
    except ValueError as error:
        if OF_TORCH not in str(error) or not leaves_one(client, client.batch_size):
            raise
        raise ValueError(advice(client, "its network")) from error


@contextmanager
def naming_single_inputs(client: Client) -> Iterator[None]:
    """Inside, torch's error about the prediction of a single input becomes a ValueError that says
    what helps, if the client's network is the cause."""
    try:
        yield
    except ValueError as error:
        layers = untracked_norms(client.model)
        if OF_TORCH not in str(error) or not layers:
            raise
        raise ValueError(
            f"batch normalisation in {', '.join(layers):.200} keeps no running statistics, so the "
            "network cannot predict a single input: give the client two inputs or more, or train a "
            "network without track_running_stats=False"
        ) from error


def leaves_one(client: Client, batch_size: int) -> bool:
    """Whether a mini-batch of that size, or the last one of a pass over the client's training
    samples, has a single sample."""
    n = len(client.share.train)
    # Whether training ever takes the last, shorter mini-batch of a pass.
    takes_last = client.local_epochs > 0
    if client.batch_draws == "passes" and client.short_batches:
        takes_last = takes_last or client.local_steps >= math.ceil(n / client.batch_size)
    return batch_size == 1 or n == 1 or (takes_last and n % batch_size == 1)


def advice(client: Client, network: str, key: str = "batch-size") -> str:
    """What to write where a mini-batch of the client leaves one sample to the `network`; `key` is
    the setting's name."""
    n = len(client.share.train)
    if n == 1:
        return (
            f"a client has one sample to train on, and {network} trains on two or more at a time; "
            "use fewer clients, or take another model"
        )
    size = client.batch_size
    fitting = next(other for other in range(size + 1, n + 2) if not leaves_one(client, other))
    return (
        f"{key} is {size}; of a client's {n} samples a mini-batch has one, and {network} trains "
        f"on two or more: set {key} to {fitting}, or take another model"
    )
