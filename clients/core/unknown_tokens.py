"""Tokens that a network's embedding does not have."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from clients.core.client import Client
from partitions.shares import Samples

OF_TORCH = "index out of range in self"  # how torch refuses a token on the CPU


@contextmanager
def naming_tokens(client: Client) -> Iterator[None]:
    """Inside, torch's error about a token that an embedding lacks becomes a ValueError that names
    the embedding and the tokens."""
    try:
        yield
    except IndexError as error:
        text = advice(error, client.model, client.share.everything)
        if not text:
            raise
        raise ValueError(text) from error


def advice(error: Exception, network: nn.Module, samples: Samples) -> str:
    """What does not fit and what to write; "" if the error is another one, the samples fit the
    network's first embedding, or they are read anew for each mini-batch."""
    embeddings = [m for m in network.modules() if isinstance(m, nn.Embedding)]
    if OF_TORCH not in str(error) or not embeddings or not samples.fixed:
        return ""
    count = embeddings[0].num_embeddings
    x = samples.x[samples.index]
    low = int(x.min())
    high = int(x.max())
    if low >= 0 and high < count:
        return ""
    return (
        f"inputs are tokens from {low} to {high}, and the network's first embedding has tokens "
        f"from 0 to {count - 1}; number the tokens from 0, that of padding too, or give "
        f"torch.nn.Embedding {max(high + 1, count)} entries"
    )
