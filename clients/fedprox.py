"""FedProx client (Li et al., MLSys 2020): local loss + (μ/2)‖w − w_server‖²."""

import torch
from torch import Tensor

from clients.arrays import Arrays
from clients.base import Client, Config, Metrics
from partitions.settings import WEIGHT, setting


class FedProxClient(Client):
    """FedAvg's client with a proximal term of weight `mu` >= 0."""

    stacked = ("server",)

    mu = setting(0.001, "μ, weight of the proximal term", WEIGHT)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training that keeps the server's weights for the loss."""
        self.load(arrays)
        self.server = [p.detach().clone() for p in self.model.parameters()]
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + (μ/2)‖w − w_server‖², Eq. (2)."""
        pairs = zip(self.model.parameters(), self.server, strict=True)
        distance = torch.stack([(w - w_server).square().sum() for w, w_server in pairs]).sum()
        return super().loss(x, y) + self.mu / 2 * distance
