"""AFL client (Mohri et al., ICML 2019): reports its risk before local training."""

import torch

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics

RISK = "risk"  # key of a train reply's metrics


class AFLClient(Client):
    """FedAvg's client; ``risk`` is its training loss at the server's weights."""

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """L_i(w) on all the training data, then local training from w."""
        self.load(arrays)
        self.model.eval()
        with torch.no_grad():
            risk = float(self.loss(*self.share.train.to(self.device)[:]))
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss, RISK: risk}
