"""FedMA client (Wang et al., ICLR 2020): trains networks that the server widens."""

from itertools import pairwise

import torch
from torch import nn

from clients.core.arrays import Arrays, group, model_arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.layer_chain import chain
from clients.core.sgd import train_only
from clients.models.foreign import blank_inputs
from clients.models.roles import roles_of
from fedapps.common.seeds import drawing
from partitions.datasets.loading import Info


class FedMAClient(Client):
    """FedAvg's client for networks of any width; it also retrains the layers above fixed ones."""

    exchanges = ("train.retrain",)

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The model. Raises ValueError if a parameter is frozen or tied: FedMA permutes neurons."""
        roles = roles_of(model)
        for kind, names in (("tied", roles.tied), ("frozen", roles.frozen)):
            if names:
                raise ValueError(
                    f"fedma permutes the neurons of every layer, but {min(names)!r} is "
                    f"{kind}; let every parameter be trained, and none be tied"
                )
        check_chain(model, tuple(info.shape))
        return model

    def load(self, arrays: Arrays) -> None:
        """Resize the model's layers to the arrays, then set the model."""
        resize(self.model, arrays)
        super().load(arrays)

    def retrain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Local training of all arrays except ``frozen/…``; returns the trained arrays."""
        frozen = group(arrays, "frozen")
        upper = {name: a for name, a in arrays.items() if not name.startswith("frozen/")}
        self.load(frozen | upper)
        self.begin(f"dropout above {len(frozen)} arrays", config)
        rows = self.rows(config, f"retrain above {len(frozen)} arrays")
        with train_only(self.model, upper.__contains__) as trained:
            loss = self.fit_locally(config, rows=rows, parameters=trained)
        reply = self.arrays()
        return {name: reply[name] for name in upper}, {"loss": loss}


def check_chain(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError as `chain`, and if the layers do not feed one another in the order of their
    declaration.

    Permutes the outputs of each layer and the inputs of the next one: the network's outputs must
    stay the same."""
    chain(model_arrays(model))
    trial = copy_of(model).eval()
    layers = {n: m for n, m in trial.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    with drawing(0), torch.no_grad():
        x = torch.randn(4, *shape).to(blank_inputs(model, shape).device)
        expected = trial(x)
        for (name, layer), (next_name, next_layer) in pairwise(layers.items()):
            assert layer.bias is not None
            width = len(layer.weight)
            order = torch.randperm(width).to(x.device)
            layer.weight.copy_(layer.weight[order])
            layer.bias.copy_(layer.bias[order])
            # A linear layer behind convolutions has several inputs for each channel.
            inputs = next_layer.weight.unflatten(1, (width, -1))
            next_layer.weight.copy_(inputs[:, order].flatten(1, 2))
            if not torch.allclose(trial(x), expected, rtol=1e-3, atol=1e-5):
                raise ValueError(
                    f"fedma permutes neurons of layers that feed one another in the order of their "
                    f"declaration, but {type(model).__name__} computes something else when the "
                    f"outputs of {name!r} and the inputs of {next_name!r} are permuted; declare "
                    "the layers in the order of the forward pass, or choose fedavg"
                )


def resize(model: nn.Module, arrays: Arrays) -> None:
    """Give the parameters of linear and convolutional layers the shapes of the arrays.

    The entries of resized parameters are undefined. Raises ValueError if the number of dimensions
    or a convolution's kernel differs."""
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
