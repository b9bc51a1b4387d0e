"""A network as a chain of linear and convolutional layers, whose neurons FedMA matches."""

from collections.abc import Sequence
from itertools import pairwise

from clients.core.arrays import Arrays


def chain(arrays: Arrays) -> list[str]:
    """The names of the layers, in the order of the forward pass.

    Raises ValueError unless all arrays belong to linear or convolutional layers with biases, there
    are two or more of these, and each layer's outputs are the next layer's inputs. A linear layer
    after a convolution has its channels flattened one after the other."""
    layers: list[str] = []
    for name in arrays:
        layer = name.removesuffix(".weight")
        if layer != name and arrays[name].ndim in (2, 4) and f"{layer}.bias" in arrays:
            layers.append(layer)
    _check_no_others(arrays, layers)
    if len(layers) < 2:
        raise ValueError(
            "fedma matches the neurons of hidden layers, but the network has none: its arrays are "
            f"{', '.join(arrays)}; choose a network with hidden layers, or fedavg"
        )
    for layer, following in pairwise(layers):
        weight = arrays[f"{layer}.weight"]
        next_weight = arrays[f"{following}.weight"]
        outputs = width(arrays, layer)
        inputs = next_weight.shape[1]
        is_flattened = weight.ndim == 4 and next_weight.ndim == 2
        fits = inputs % outputs == 0 if is_flattened else inputs == outputs
        if not fits:
            raise ValueError(
                f"fedma matches chains of layers; {layer!r} has {outputs} outputs, but "
                f"{following!r}, which comes next, {inputs} inputs; with other networks use FedAvg"
            )
    return layers


def _check_no_others(arrays: Arrays, layers: Sequence[str]) -> None:
    """Raise ValueError if an array belongs to none of the layers."""
    for name in arrays:
        layer, _, part = name.rpartition(".")
        if layer not in layers or part not in ("weight", "bias"):
            raise ValueError(
                f"fedma matches linear and convolutional layers with biases; {layer or name!r} is "
                "none; with other networks use FedAvg"
            )


def width(arrays: Arrays, layer: str) -> int:
    """The layer's number of neurons or channels."""
    return len(arrays[f"{layer}.bias"])
