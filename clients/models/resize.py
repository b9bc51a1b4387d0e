"""Layers resized to given arrays."""

from collections.abc import Mapping

import numpy as np
from torch import nn


def resize(model: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Give the parameters of linear and convolutional layers the shapes of the arrays with their
    names; the entries of changed parameters are undefined.

    Raises ValueError where the number of dimensions or a convolution's kernel differs."""
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        for part, parameter in list(module.named_parameters(recurse=False)):
            array = arrays.get(f"{prefix}.{part}")
            if array is None or array.shape == tuple(parameter.shape):
                continue
            if array.ndim != parameter.ndim or array.shape[2:] != tuple(parameter.shape[2:]):
                raise ValueError(
                    f"array '{prefix}.{part}' has shape {array.shape}, the model "
                    f"{tuple(parameter.shape)}"
                )
            setattr(module, part, nn.Parameter(parameter.data.new_empty(array.shape)))
        outputs, inputs = module.weight.shape[:2]
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = outputs, inputs
        else:
            module.out_channels, module.in_channels = outputs, inputs
