"""FedProx client (Li et al., MLSys 2020): local loss + (μ/2)‖w − w_server‖², Eq. (2)."""

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from fedapps.common.settings import NONNEGATIVE, setting


class FedProxClient(Client):
    """FedAvg's client with a proximal term of weight `mu`; ``loss`` excludes this term."""

    mu = setting(0.001, "μ, weight of the proximal term", NONNEGATIVE)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local SGD on the loss and the proximal term.

        The term's gradient is μ w − μ w_server. Weight decay adds μ w, the drift −μ w_server."""
        self.load(arrays)
        decay = self.weight_decay + self.mu
        drift = [-self.mu * w_server.detach() for w_server in self.model.parameters()]
        loss = self.fit_locally(config, weight_decay=decay, drift=drift)
        return self.arrays(), len(self.share.train), {"loss": loss}
