"""TENT (Wang et al., ICLR 2021) on a federated model: adapt by minimising prediction entropy.

Adapts the affine parameters of normalisation layers. A network without such layers, or the setting
`parameters` = "all", adapts all parameters. Normalisation layers use the statistics of the present
inputs, as in the paper; dropout is off.

Departs from the paper: all of a client's inputs are one batch, and the model predicts them after
the last step. Many inputs are split into parts of `pass-megabytes`. A step then follows the mean
gradient, and normalisation layers use the statistics of each part. The delivered network has the
means of its layers' statistics, over parts and over the calls of a layer, and gives the
predictions."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.client import Client
from clients.core.evaluation import by_parts
from clients.core.layout import set_training
from clients.core.normalisation import (
    NORMALISATION,
    NormCalls,
    batch_statistics,
    entropy,
    with_statistics,
)
from clients.core.sgd import SGD
from clients.models.foreign import with_gradient
from fedapps.common.settings import COUNT, NONNEGATIVE, RATE, setting
from fedapps.common.tasks import CLASS_PROBABILITIES


class TENTClient(Client):
    """FedAvg's client that, when scored, takes `adapt_steps` SGD steps on the mean entropy.

    The weight decay is that of local SGD. A stream of inputs adapts without a reset."""

    tasks = CLASS_PROBABILITIES
    adapts_by_gradients = True
    supports_streaming = True
    rates = ("lr", "adapt_lr")

    adapt_steps = setting(10, "SGD steps on the entropy when scored", COUNT, evaluation=True)
    adapt_lr = setting(0.0, "learning rate of these steps; 0: the local lr", RATE, evaluation=True)
    parameters = setting(
        "auto",
        "auto: affine parameters of normalisation layers, if any; or all",
        ("auto", "all"),
        evaluation=True,
    )
    bits = setting(
        False, "measure entropy in bits, which makes steps longer by 1 / ln 2", evaluation=True
    )
    adapt_clip_norm = setting(
        0.0,
        "clip the gradient of an adaptation step to this norm; 0: off",
        NONNEGATIVE,
        evaluation=True,
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # The `state_dict` of the model that made the last prediction.
        self._adapted_weights: dict[str, Tensor] = {}

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the model adapted to the inputs x, from the received weights."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the model adapted to x, from the parameters after the last update."""
        received = self._copied_weights()
        if self.stream:
            self.model.load_state_dict(self.stream, strict=False)
        batch_statistics(self.model, len(x) > 1)  # one sample has no variance
        self.prepare_steps(x)
        adapted = [parameter for parameter in self.trainable() if parameter.requires_grad]
        self._take_steps(x, adapted)
        logits = self._delivered_logits(x)
        self.stream = self._adapted_values(adapted)
        self.adaptation_metrics = {
            "adapt-steps": self.adapt_steps,
            "entropy": float(entropy(logits)),
        }
        self.model.load_state_dict(received)
        set_training(self.model, False)
        return logits

    def _take_steps(self, x: Tensor, adapted: list[nn.Parameter]) -> None:
        """Take the steps on the parameters `adapted`; keep the logits of the first one, which are
        by the received weights."""
        optimizer = SGD(adapted, self.adapt_lr or self.lr, weight_decay=self.weight_decay)
        parts = self.parts(x)
        self.intermediate_logits = {}
        for step in range(self.adapt_steps):
            optimizer.zero_grad()
            logits_of_parts = []
            for number, part in enumerate(parts):
                z = self.model(part)
                objective = self.objective(z, number)
                # To multiply and divide by 1 would take a tenth of a small network's step.
                if len(parts) > 1:
                    objective = objective * (len(part) / len(x))
                if self.bits:
                    objective = objective / math.log(2)
                objective.backward(inputs=adapted)
                logits_of_parts.append(z.detach())
            if step == 0:
                self.intermediate_logits["base"] = torch.cat(logits_of_parts)
            if self.adapt_clip_norm:
                nn.utils.clip_grad_norm_(adapted, self.adapt_clip_norm)
            optimizer.step()
        optimizer.zero_grad()

    def _delivered_logits(self, x: Tensor) -> Tensor:
        """Logits (n, C) by the network that `personal_model` delivers after the steps."""
        norm_calls = NormCalls(self.model)
        with norm_calls.counted():
            logits = Client.predict(self, x)
        self._adapted_weights = self._copied_weights()
        parts = self.parts(x)
        if len(x) > 1 and not norm_calls.kept_by_statistics(len(parts)):
            logits = by_parts(self.personal_model(x), parts)
        return logits

    def _adapted_values(self, adapted: list[nn.Parameter]) -> dict[str, Tensor]:
        """The values after the steps of the parameters `adapted`, by name."""
        ids = {id(parameter) for parameter in adapted}
        values = {}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in ids:
                values[name] = self._adapted_weights[name]
        return values

    def _copied_weights(self) -> dict[str, Tensor]:
        """A copy of the model's `state_dict`."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def prepare_steps(self, x: Tensor) -> None:
        """Prepare the steps on the inputs x, with the network as it is before the first one."""

    def objective(self, logits: Tensor, part: int = 0) -> Tensor:
        """The objective that adaptation minimises: the mean entropy of logits (n, C), those of the
        inputs' part number `part`."""
        return entropy(logits)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The adapted network, whose normalisation uses the statistics of x."""
        model = super().personal_model(x)
        model.load_state_dict(self._adapted_weights)
        return with_statistics(model, *self.parts(x))

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are adapted."""
        return list(self.adapted_parameters(self.model, self.parameters).values())

    @classmethod
    def adapted_parameters(cls, network: nn.Module, parameters: str) -> dict[str, nn.Parameter]:
        """Those of `network` that are adapted, by name."""
        affine: dict[str, nn.Parameter] = {}
        for layer_name, layer in network.named_modules():
            if isinstance(layer, NORMALISATION):
                for name, p in layer.named_parameters(layer_name, recurse=False):
                    if p.requires_grad:
                        affine[name] = p
        if affine and parameters == "auto":
            return affine
        return dict(network.named_parameters())

    @classmethod
    def caveats(
        cls, network: nn.Module, /, *, parameters: str, shape: tuple[int, ...]
    ) -> list[str]:
        """That no gradient reaches what is adapted."""
        adapted = cls.adapted_parameters(network, parameters)
        reached = with_gradient(network, shape, training=False)
        names = [name for name, p in adapted.items() if p.requires_grad]
        if reached is None or not names or not reached.isdisjoint(names):
            return []
        return [
            f"no gradient reaches what would adapt ({', '.join(names):.200}): at most statistics "
            "of batch normalisation do; leave torch.no_grad and detach out of the forward pass, or "
            "freeze what is not trained by requires_grad_(False)"
        ]
