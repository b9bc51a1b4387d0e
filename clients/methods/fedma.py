"""FedMA client (Wang et al., ICLR 2020): trains networks that the server widens."""

from torch import nn

from clients.core.arrays import Arrays, group
from clients.core.client import Client, Config, Metrics
from clients.core.sgd import train_only
from clients.models.roles import roles_of
from partitions.datasets.loading import Info


class FedMAClient(Client):
    """FedAvg's client for networks of any width; it also retrains the layers above frozen ones."""

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
        return model

    def load(self, arrays: Arrays) -> None:
        """Set the model, its layers resized to the arrays."""
        resize(self.model, arrays)
        super().load(arrays)

    def retrain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Local training of all arrays except ``frozen/…``; returns the trained ones."""
        frozen = group(arrays, "frozen")
        upper = {name: a for name, a in arrays.items() if not name.startswith("frozen/")}
        self.load(frozen | upper)
        self.begin(f"dropout above {len(frozen)} arrays", config)
        rows = self.rows(config, f"retrain above {len(frozen)} arrays")
        with train_only(self.model, upper.__contains__) as trained:
            loss = self.fit_locally(config, rows=rows, parameters=trained)
        reply = self.arrays()
        return {name: reply[name] for name in upper}, {"loss": loss}


def resize(model: nn.Module, arrays: Arrays) -> None:
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
