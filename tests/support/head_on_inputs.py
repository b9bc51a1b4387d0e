"""A network whose features are its inputs."""

import torch
from torch import nn


class Plain(nn.Module):
    """head(x): the features are the inputs; ω_0 = (2, 0), ω_1 = (0, 1)."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight.data = torch.tensor([[2.0, 0.0], [0.0, 1.0]])

    def forward(self, x):
        return self.head(x)


X = torch.tensor([[3.0, 4.0], [1.0, 5.0]])
