"""FedMA client (Wang et al., ICLR 2020): trains networks whose layers the server widens."""

from torch import nn

from clients.arrays import Arrays, group
from clients.base import Client, Config, Metrics
from clients.models.resize import resize
from clients.models.roles import roles_of
from clients.sgd import train_only
from partitions.datasets import Info


class FedMAClient(Client):
    """FedAvg's client for networks of any width that retrains the layers above frozen ones."""

    exchanges = ("train.retrain",)

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The model. Raises ValueError if a parameter is frozen or tied: neurons change places."""
        roles = roles_of(model)
        for kind, names in (("tied", roles.tied), ("frozen", roles.frozen)):
            if names:
                raise ValueError(
                    f"fedma moves the neurons of each layer by itself, but {min(names)!r} is "
                    f"{kind}; make every parameter one of its own that is trained"
                )
        return model

    def load(self, arrays: Arrays) -> None:
        """Set the model, its layers as wide as the arrays."""
        resize(self.model, arrays)
        super().load(arrays)

    def retrain(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Local training of all but ``frozen/…``; returns what was trained."""
        frozen = group(arrays, "frozen")
        upper = {name: a for name, a in arrays.items() if not name.startswith("frozen/")}
        self.load(frozen | upper)
        self.begin(f"dropout above {len(frozen)} arrays", config)
        rows = self.rows(config, f"retrain above {len(frozen)} arrays")
        with train_only(self.model, upper.__contains__) as trained:
            loss = self.fit_locally(config, rows=rows, parameters=trained)
        reply = self.arrays()
        return {name: reply[name] for name in upper}, {"loss": loss}
