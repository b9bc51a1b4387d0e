"""Serving a client: its first inputs give it a personal network, further ones may move it on."""

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from clients.arrays import Arrays
from clients.messages import Config
from partitions.shares import Share


class Streaming:
    """What serves a client's inputs, one update after another."""

    # Whether an update starts from the former ones. A method that decides it by a setting
    # overrides it by a property.
    goes_on = False

    stream: dict[str, Tensor]  # what the updates so far leave to the next one; at first {}
    model: nn.Module
    share: Share
    device: str
    predict: Callable[[Tensor], Tensor]
    receive: Callable[[Arrays, Config], None]
    begin: Callable[[str, Config], None]

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of further inputs x (n, *shape) after adaptation to them; if the method
        `goes_on`, also to all inputs before them. The size of `stream` stays the same."""
        return self.predict(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """A copy of the target network that made the last prediction, which was of x, in evaluation
        mode."""
        return deepcopy(self.model).eval()

    def serve(self, arrays: Arrays, config: Config) -> tuple[nn.Module, Tensor]:
        """The personal network, and its logits (n, C) for all the client's inputs."""
        self.begin("evaluate", config)
        self.receive(arrays, config)
        x, _ = self.share.everything.to(self.device)[:]
        logits = self.update(x)
        return self.personal_model(x), logits

    def mean_so_far(self, new: Mapping[str, Tensor], count: int = 1) -> dict[str, Tensor]:
        """The means over the stream, which now has `count` more terms of means `new`."""
        before = int(self.stream.get("count", 0))
        n = before + count
        mean = dict(new)
        if before:
            old = {name: self.stream[name] for name in new}
            mean = {name: old[name] + (t - old[name]) * count / n for name, t in new.items()}
        self.stream = mean | {"count": torch.tensor(n)}
        return mean
