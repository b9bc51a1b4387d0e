"""LG-FedAvg client (Liang et al., 2020): personal lower layers under a shared head.

In the first phase it is FedAvg's client and sends the whole model. In the second phase, which the
server starts, the body stays on the client. The first message of this phase contains the body once
more, and the state keeps it.

The paper has local representations under a global classifier, and so has Shamsian et al.'s
comparison: "local feature extractor and global output layers". The authors' code shares other
layers (`shared_layers`): the last three of five on MNIST, and on CIFAR-10 both convolutions under
personal fully connected layers, the reverse of the text."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from clients.core.arrays import Arrays, group, prefixed
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from clients.models.roles import check_tied, frozen_names
from fedapps.common.settings import setting
from partitions.datasets.loading import Info

HEAD = "head."
OWN_BODIES = "own-bodies"  # key of a train message's config: true in the second phase
SHARED_LAYERS = setting(
    "head",
    "layers that stay shared in the second phase, by their names in the network, such as "
    "conv1,conv2 or layers.1,head",
    listed=True,
)


def prefixes(layers: str) -> tuple[str, ...]:
    """The prefixes of the arrays of comma-separated `layers`."""
    names = [layer.strip() for layer in layers.split(",")]
    return tuple(f"{name}." for name in names if name)


class LGFedAvgClient(Client):
    """Replies with the whole model in the first phase, with only the shared layers in the
    second."""

    any_optimizer = True
    offers = ("personal-body",)
    needs_state = StateUse.PREDICTIONS
    needs_head = True
    head_by_name = True

    shared_layers = SHARED_LAYERS

    @classmethod
    def uses_head(cls, values: Mapping[str, Any], /) -> bool:
        """Whether the head is among the shared layers."""
        return HEAD in prefixes(str(values.get("shared_layers", cls.shared_layers)))

    @classmethod
    def build(
        cls, model: nn.Module, info: Info, *args: Any, shared_layers: str = "head", **settings: Any
    ) -> nn.Module:
        """The network itself. Raises ValueError for a shared layer that it lacks, and if no
        parameter of its body is trained."""
        shared = prefixes(shared_layers)
        names = [name for name, _ in model.named_parameters()]
        for prefix in shared or ("",):
            if not prefix or not any(name.startswith(prefix) for name in names):
                raise ValueError(
                    f"lg-fedavg.shared-layers is {shared_layers!r}; each of its entries must be a "
                    f"layer of {type(model).__name__}, whose arrays are {', '.join(names):.500}"
                )
        check_tied(model, lambda name: name.startswith(shared), "lg-fedavg")
        body = [name for name in names if not name.startswith(shared)]
        if not frozen_names(model).issuperset(body):
            return model
        lacks = f"{', '.join(body):.300} are frozen" if body else "it has only shared layers"
        raise ValueError(
            f"lg-fedavg trains a body of {type(model).__name__} for each client, but {lacks}; "
            "choose a network with a body that is trained, or fedavg"
        )

    def is_shared(self, name: str) -> bool:
        """Whether the array `name` stays shared in the second phase."""
        return name.startswith(prefixes(self.shared_layers))

    def load(self, arrays: Arrays) -> None:
        """Set the received layers on the personal body, or at first the whole received model.

        Raises ValueError if there is no body."""
        shared = {name: a for name, a in arrays.items() if self.is_shared(name)}
        personal = group(self.state, "personal")
        if not personal and len(shared) == len(arrays):
            raise ValueError("the body, which the server sent once, is not in the state")
        super().load(shared if personal else arrays)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training of body and head."""
        reply, n, metrics = super().train(arrays, config)
        if not config.get(OWN_BODIES):
            return reply, n, metrics
        body = {name: a for name, a in reply.items() if not self.is_shared(name)}
        self.state |= prefixed("personal", body)
        shared = {name: a for name, a in reply.items() if self.is_shared(name)}
        return shared, n, metrics
