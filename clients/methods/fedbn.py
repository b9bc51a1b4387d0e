"""FedBN client (Li, Jiang, Zhang, Kamp and Dou, ICLR 2021): batch normalisation stays local.

Weights, biases and running statistics of batch normalisation layers are personal; all other arrays
are FedAvg's. The network must have such layers. The paper says nothing about novel clients, so
novel clients without labels are not served. Ours: a novel client with a few labels first estimates
its running statistics on all its inputs, including the inputs that are scored, without labels. Its
weights and biases start from the initial ones."""

import torch
from torch import Tensor, nn

from clients.core.client import Client, Config
from clients.core.normalisation import check_norms, with_statistics
from clients.core.protocol import StateUse
from partitions.datasets.loading import Info

MARK = "own_norm"  # part of the personal arrays' names


class MarkedNorm(nn.Module):
    """A normalisation layer whose arrays' names contain `MARK`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.own_norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.own_norm(x)


class FedBNClient(Client):
    """FedAvg's client with personal layers named ``own_norm``."""

    needs_state = StateUse.PREDICTIONS

    @classmethod
    def is_personal(cls, name: str) -> bool:
        """Whether the array belongs to a batch-normalisation layer."""
        return MARK in name.split(".")

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network with its batch-normalisation layers marked. ValueError if it has none."""
        norm_class = nn.modules.batchnorm._BatchNorm
        norms = {name: m for name, m in model.named_modules() if isinstance(m, norm_class)}
        check_norms("fedbn", model, norms)
        for name, norm in norms.items():
            model.set_submodule(name, MarkedNorm(norm))
        return model

    def tune(self, config: Config) -> None:
        """Estimate running statistics on all inputs, then train on the few labeled samples."""
        trained, _ = self.share.train.to(self.device)[:]
        scored, _ = self.share.everything.to(self.device)[:]
        x = torch.cat([trained, scored])
        with_statistics(self.model, *self.parts(x))
        super().tune(config)
