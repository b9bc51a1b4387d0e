"""What a run of auto says before it begins: what its network, its inputs and its clients do not
allow."""

from collections.abc import Sequence

from torch import nn

from clients.core.decision.changes import left_out_changes, named_changes
from clients.core.decision.choice import (
    allowed_share,
    candidates_of,
    names_in,
    rounded_up,
    smallest_alpha,
)
from clients.core.decision.explanation import NONE
from clients.core.decision.inner_values import buffers_of, is_readable, layers_with_statistics
from clients.core.decision.played import SIZES
from clients.core.normalisation import missing_statistics, sizes_with_statistics
from clients.methods._batchwise import batch_norms
from clients.models.foreign import BLANKS, shapes_by_layer

NOBODY_PLAYS = (
    f"no training client plays a newcomer, which takes {SIZES[0]} held-out samples and "
    "auto.plays above 0, so none holds out any, and all keep FedAvg's model; raise "
    "auto.held-out, or take fewer clients or more samples"
)


def on_players(
    players: Sequence[bool], held: Sequence[int], held_out: float, alpha: float
) -> list[str]:
    """That too few training clients play newcomers, or some with samples of the training. By client
    whether it plays, and how many samples it holds out."""
    notes = []
    count = sum(players)
    smallest = smallest_alpha(count)
    alpha = allowed_share(alpha, count)
    if count and alpha < smallest:
        verb = "plays" if count == 1 else "play"
        notes.append(
            f"{count} of {len(players)} training clients {verb} newcomers, which takes "
            f"{SIZES[0]} held-out samples; no choice of so few keeps auto.alpha={alpha:g}, so "
            "all clients keep FedAvg's model; raise auto.held-out, write "
            f"auto.alpha={rounded_up(smallest):g}, or take more samples"
        )
    with_trained = 0
    for plays, num_held in zip(players, held, strict=True):
        with_trained += plays and not num_held
    if with_trained:
        notes.append(
            f"with auto.held-out={held_out:g}, {with_trained} of {len(players)} training "
            "clients play newcomers with samples that the network was trained on, so "
            "auto.alpha promises nothing for later clients; raise auto.held-out"
        )
    return notes


def on_candidates(network: nn.Module, model: str, candidates: str) -> list[str]:
    """Which of the candidates the network, called `model`, does not have."""
    able = candidates_of(candidates, bool(batch_norms(network)))
    left_out = [name for name in names_in(candidates) if name not in able]
    if not left_out:
        return []
    verb = "needs" if len(left_out) == 1 else "need"
    return [
        f"candidates {', '.join([NONE, *able])}; {', '.join(left_out)} {verb} "
        f"{missing_statistics(model, network)}"
    ]


def on_layers(network: nn.Module, model: str, shape: tuple[int, ...]) -> list[str]:
    """Which layers with running statistics the network never calls for inputs (n, *shape), and
    which get inputs that are not read."""
    notes = []
    shapes = shapes_by_layer(network, layers_with_statistics(network), shape)
    never_called = [name for name, calls in shapes.items() if not calls]
    if never_called:
        notes.append(
            f"the forward pass of {model} never calls {', '.join(never_called):.200}, so what "
            "enters there is not read, and its statistics are not corrected; call such a "
            "layer, or leave it out"
        )
    sizes = sizes_with_statistics(buffers_of(network))
    for name, calls in shapes.items():
        readable = [is_readable(given, BLANKS, sizes[name]) for given in calls]
        if calls and not any(readable):
            notes.append(
                f"what enters {name} of {model} has the shape {calls[0]} for {BLANKS} "
                f"inputs and {sizes[name]} channels, so it is not read, and changes of the "
                f"inputs are noticed less; give it the shape ({BLANKS}, {sizes[name]}, …)"
            )
    return notes


def on_changes(changes: str, shape: tuple[int, ...], whole: bool) -> list[str]:
    """Which of the named changes inputs of this shape, or `whole` numbers, cannot have."""
    if not named_changes(changes, 1 + len(shape), whole):
        return [
            "inputs are whole numbers, and auto.changes has no change for them, so newcomers have "
            "other classes alone, and clients whose inputs these do not explain keep FedAvg's "
            "model; write auto.changes=module:NAME of a change of your own"
        ]
    left_out = left_out_changes(changes, 1 + len(shape), whole)
    if not left_out:
        return []
    return [
        f"auto.changes: {', '.join(left_out)} left out, since the inputs have the "
        f"shape {tuple(shape)}"
    ]
