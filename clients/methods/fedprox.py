"""FedProx client (Li et al., MLSys 2020): local loss + (μ/2)‖w − w_server‖², Eq. (2)."""

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from fedapps.common.settings import NONNEGATIVE, setting


class FedProxClient(Client):
    """FedAvg's client with a proximal term of weight `mu` >= 0. The loss that it reports is without
    this term."""

    mu = setting(0.001, "μ, weight of the proximal term", NONNEGATIVE)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local SGD. The proximal term's gradient is μw − μw_server: weight decay and a drift."""
        self.load(arrays)
        drift = [-self.mu * w_server.detach() for w_server in self.model.parameters()]
        decay = self.weight_decay + self.mu
        loss = self.fit_locally(config, weight_decay=decay, drift=drift)
        return self.arrays(), len(self.share.train), {"loss": loss}
