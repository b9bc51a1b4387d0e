"""The inner values φ(x) of a network that the rule reads, and how many there are.

Block by block, φ holds channel means of what enters each layer with running statistics, then the
softmax p, then (H(p), p₁ − p₂, logsumexp z, max z) of the logits z. A network without such layers
has two blocks in place of theirs: what the input looks like, and what enters the head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, to_numpy
from clients.core.decision.fit import NUMBERS_OF_FIT, most_shared
from clients.core.decision.moments import Blocks
from clients.core.layer_inputs import before_calls
from clients.core.normalisation import sizes_with_statistics

NUM_OF_INPUT = 4  # values of an input's look
NUM_LAST = 4  # values of the last block
# Numbers of a training client's answer to `query.moments`, in float64.
MANY_NUMBERS = 2**23
SEVERAL_NUMBERS = 2**20  # are many for a network of fewer numbers by `MANY_TIMES`
MANY_TIMES = 5
MOST_NUMBERS = 2**27
SETS_HELD = 12  # sums of two exchanges, over all clients and without each of five folds


def blocks_of(arrays: Arrays, head_size: tuple[int, ...]) -> Blocks:
    """The blocks of φ of a network with these arrays, and a head with weights of `head_size`
    (C, d)."""
    classes, head_width = head_size
    widths = [*sizes_with_statistics(arrays).values()] or [NUM_OF_INPUT, head_width]
    return Blocks((*widths, classes, NUM_LAST))


def look(x: Tensor) -> Tensor:
    """Of each input of x (n, *shape): the mean, the standard deviation and the largest absolute
    value of its entries, and the mean absolute difference of neighbours in its last dimension,
    (n, 4). Entries that are not finite count as 0.

    What enters a head hardly changes with brightness, contrast or noise."""
    x = torch.nan_to_num(x.double(), nan=0.0, posinf=0.0, neginf=0.0)
    entries = x.flatten(1)
    steps = entries.new_zeros(len(x), 1)  # an input with one column has no neighbours
    if x.shape[-1] > 1:
        steps = x.diff(dim=-1).abs().flatten(1)
    numbers = [
        entries.mean(1),
        entries.std(1, correction=0),
        entries.abs().amax(1),
        steps.mean(1),
    ]
    return torch.stack(numbers, 1)


def of_logits(z: Tensor) -> list[Tensor]:
    """The last two blocks, (n, C) and (n, 4), of logits z (n, C)."""
    p = z.softmax(1)
    top = p.topk(2, 1).values
    log_p = z.log_softmax(1)
    last = [-(p * log_p).sum(1), top[:, 0] - top[:, 1], z.logsumexp(1), z.amax(1)]
    return [p, torch.stack(last, 1)]


@contextmanager
def inputs_of(
    layers: Sequence[nn.Module], sizes: Sequence[int], x: Tensor
) -> Iterator[list[Tensor]]:
    """Within the context a forward pass of inputs x (n, *shape) fills the list: channel means
    (n, d_l) of what enters each layer, with d_l in `sizes`. A layer of other inputs than
    `is_readable` leaves zeros."""
    n = len(x)
    means = [torch.zeros(n, size, device=x.device) for size in sizes]

    def keep(place: int, values: Tensor) -> None:
        values = values.detach()
        if is_readable(values.shape, n, sizes[place]):
            means[place] = values.flatten(2).mean(2) if values.ndim > 2 else values

    handles = []
    for place, layer in enumerate(layers):
        handles.append(before_calls(layer, partial(keep, place)))
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


def is_readable(shape: Sequence[int], n: int, size: int) -> bool:
    """Whether what enters a layer of `size` channels is a batch (n, size, …)."""
    return len(shape) > 1 and shape[0] == n and shape[1] == size


# The sizes of a client's messages


def layers_with_statistics(network: nn.Module) -> list[str]:
    """The names of the layers with running statistics. Raises ValueError for one of torch.jit,
    whose inputs cannot be read."""
    names = [*sizes_with_statistics(buffers_of(network))]
    for name in names:
        if isinstance(network.get_submodule(name), torch.jit.ScriptModule):
            raise ValueError(
                f"auto reads what enters {name!r}, a layer of torch.jit, which takes no hooks; "
                "give the network before torch.jit.script or torch.jit.trace"
            )
    return names


def numbers_sent(blocks: Blocks, classes: int) -> int:
    """The numbers of a client's moments: C² counts, and by class n_c and Σ φ (D,); Σ d_l²."""
    return classes * (classes + 1 + blocks.width) + blocks.entries


def check_width(network: nn.Module, head: nn.Linear) -> None:
    """Raise ValueError if the moments of its inner values are too many for a message."""
    arrays = buffers_of(network)
    blocks = blocks_of(arrays, head.weight.shape)
    numbers = numbers_sent(blocks, head.out_features)
    if numbers <= MOST_NUMBERS:
        return
    advice = "take a network with narrower layers"
    if blocks.entries <= MOST_NUMBERS / 2:
        advice = "take fewer classes, or a network with narrower layers"
    if not sizes_with_statistics(arrays):
        advice += ", or one with batch normalisation, where auto reads means of channels"
    raise ValueError(
        f"auto's clients send the products of the values that enter a layer, and one layer has "
        f"{max(blocks.sizes)} of them, and sums of all {blocks.width} for each of "
        f"{head.out_features} classes: {_megabytes(numbers)} a client, over "
        f"{_megabytes(MOST_NUMBERS)}; {advice}"
    )


def note_on_size(network: nn.Module, head: nn.Linear, num_training: int) -> str:
    """What the messages of so many training clients hold, where that is much; else ""."""
    numbers = numbers_sent(blocks_of(buffers_of(network), head.weight.shape), head.out_features)
    size = sum(tensor.numel() for tensor in network.state_dict().values())
    is_many_times_the_network = numbers > SEVERAL_NUMBERS and numbers > MANY_TIMES * size
    if numbers <= MANY_NUMBERS and not is_many_times_the_network:
        return ""
    return (
        f"after the last round each training client sends {_megabytes(numbers)} twice, the "
        "products of the network's inner values and their sums by class, and the server holds "
        f"those of all clients at once: {_megabytes(numbers * num_training)} of {num_training} "
        f"clients; the network has {size * 4 / 1e6:.2g} MB"
    )


def bytes_held(network: nn.Module, head: nn.Linear, num_training: int) -> int:
    """What a process that serves so many training clients and the server holds of their answers
    and statistics, roughly: the answers, sums of them without each fold, fits."""
    blocks = blocks_of(buffers_of(network), head.weight.shape)
    answers = numbers_sent(blocks, head.out_features) * (num_training + SETS_HELD)
    return 8 * (answers + most_shared(blocks) * NUMBERS_OF_FIT * blocks.entries)


def buffers_of(network: nn.Module) -> Arrays:
    """The network's buffers, by the names of its arrays."""
    return to_numpy(dict(network.named_buffers(remove_duplicate=False)))


def _megabytes(numbers: int) -> str:
    """The size of so many float64."""
    return f"{numbers * 8 / 1e6:.0f} MB"
