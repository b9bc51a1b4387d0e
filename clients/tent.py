"""TENT (Wang et al., ICLR 2021) on a federated model: adapt by minimising prediction entropy.

Affine parameters of normalisation layers are adapted where the network has them, all parameters
where it has none, and always all with `parameters` = "all"."""

import torch
from torch import Tensor, nn

from clients.base import Client

PARAMETERS = ("auto", "all")
NORMALISATION = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def entropy(logits: Tensor) -> Tensor:
    """Mean Shannon entropy H(σ(z)) in nats of logits (n, C)."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


class TENTClient(Client):
    """FedAvg's client that, when scored, takes `adapt_steps` SGD steps on the mean entropy."""

    def __init__(self, *args, adapt_steps: int = 10, parameters: str = "auto", **options) -> None:
        super().__init__(*args, **options)
        if parameters not in PARAMETERS:
            raise ValueError(f"unknown tent.parameters {parameters!r}; known: {PARAMETERS}")
        self.adapt_steps, self.parameters = adapt_steps, parameters

    def predict(self, x: Tensor) -> Tensor:
        """Logits of the model adapted to the inputs x, from the weights last loaded."""
        sent = {name: t.clone() for name, t in self.model.state_dict().items()}
        adapted = self._adapted()
        self.model.train()  # normalisation by the statistics of x itself
        optimizer = torch.optim.SGD(adapted, lr=self.lr)
        for _ in range(self.adapt_steps):
            optimizer.zero_grad()
            entropy(self.model(x)).backward()
            optimizer.step()
        logits = super().predict(x)
        self.model.load_state_dict(sent)
        return logits

    def _adapted(self) -> list[nn.Parameter]:
        affine = [
            parameter
            for module in self.model.modules()
            if isinstance(module, NORMALISATION)
            for parameter in module.parameters(recurse=False)
        ]
        return affine if affine and self.parameters == "auto" else list(self.model.parameters())
