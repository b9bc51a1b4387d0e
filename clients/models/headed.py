"""Any network as ``head(features(x))``, for methods that treat its last linear layer apart."""

from torch import Tensor, nn


class Headed(nn.Module):
    """`model` with its linear layer `name` taken out of it, as `head`; "" is the last one.

    Raises ValueError if there is no such layer. The layer must give the network's output."""

    def __init__(self, model: nn.Module, name: str = "") -> None:
        super().__init__()
        linear = [n for n, m in model.named_modules() if n and isinstance(m, nn.Linear)]
        if not linear or (name and name not in linear):
            raise ValueError(
                f"{type(model).__name__} has no linear layer {name!r}; it has: {', '.join(linear)}"
            )
        name = name or linear[-1]
        head = model.get_submodule(name)
        assert isinstance(head, nn.Linear)
        model.set_submodule(name, nn.Identity())
        self.body, self.head = model, head

    def features(self, x: Tensor) -> Tensor:
        """What enters the head."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        return self.head(self.features(x))
