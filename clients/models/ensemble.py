"""Several networks of one kind as one."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """The mean logits of its `members`."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Mean logits (n, C)."""
        return torch.stack([member(x) for member in self.members]).mean(0)
