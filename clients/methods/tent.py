"""TENT (Wang et al., ICLR 2021) on a federated model: adapt by minimising prediction entropy.

Affine parameters of normalisation layers are adapted where the network has them, all parameters
where it has none, and always all with `parameters` = "all". Normalisation layers use the
statistics of the present inputs, as in the paper; dropout is off.
Departs from the paper: all of a client's inputs are one batch, whose predictions are those after
the last step. Very many are split into parts of `pass-megabytes`: a step follows the mean gradient,
and normalisation layers use a part's statistics."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.client import Client
from clients.core.normalisation import (
    batch_statistics,
    entropy,
    normalisation,
    with_statistics,
)
from clients.core.optimizers import SGD
from fedapps.common.settings import COUNT, NONNEGATIVE, setting


class TENTClient(Client):
    """FedAvg's client that, when scored, takes `adapt_steps` SGD steps on the mean entropy.

    The weight decay is the local SGD's. A stream goes on without a reset."""

    supports_streaming = True

    adapt_steps = setting(10, "SGD steps on the entropy when scored, at the local lr", COUNT)
    parameters = setting(
        "auto", "auto: affine parameters of normalisation layers, if any; or all", ("auto", "all")
    )
    bits = setting(False, "entropy in bits: a step longer by 1 / ln 2")
    adapt_clip_norm = setting(0.0, "norm at which a scoring step is clipped; 0: never", NONNEGATIVE)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.unit = math.log(2) if self.bits else 1.0  # of the entropy, in nats
        self._adapted_weights: dict[str, Tensor] = {}  # the weights of the last prediction

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the model adapted to the inputs x, from the weights last loaded."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the model adapted to x, from the parameters of the last update."""
        sent = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.model.load_state_dict(self.stream, strict=False)
        batch_statistics(self.model, len(x) > 1)  # one sample has no variance
        adapted = self.trainable()
        optimizer = SGD(adapted, self.lr, weight_decay=self.weight_decay)
        self.intermediate_logits = {}
        for _ in range(self.adapt_steps):
            optimizer.zero_grad()
            stages = []
            for part in self.parts(x):
                z = self.model(part)
                (self.objective(z) * (len(part) / len(x)) / self.unit).backward()
                stages.append(z.detach())
            self.intermediate_logits.setdefault("base", torch.cat(stages))
            if self.adapt_clip_norm:
                nn.utils.clip_grad_norm_(adapted, self.adapt_clip_norm)
            optimizer.step()
        logits = Client.predict(self, x)
        self._adapted_weights = {name: t.clone() for name, t in self.model.state_dict().items()}
        moved = {id(parameter) for parameter in adapted}
        names = [name for name, p in self.model.named_parameters() if id(p) in moved]
        self.stream = {name: self._adapted_weights[name] for name in names}
        self.adaptation_metrics = {
            "adapt-steps": self.adapt_steps,
            "entropy": float(entropy(logits)),
        }
        self.model.load_state_dict(sent)
        return logits

    def objective(self, logits: Tensor) -> Tensor:
        """The objective of adaptation: the mean entropy of logits (n, C)."""
        return entropy(logits)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The adapted network, normalised by the statistics of x."""
        model = super().personal_model(x)
        model.load_state_dict(self._adapted_weights)
        return with_statistics(model, *self.parts(x))

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are adapted."""
        layers = normalisation(self.model)
        parameters = [p for layer in layers for p in layer.parameters(recurse=False)]
        affine = [p for p in parameters if p.requires_grad]
        return affine if affine and self.parameters == "auto" else list(self.model.parameters())
