"""SHOT client (Liang, Hu and Feng, ICML 2020): information maximisation and pseudo-labels.

The hypothesis, the network's last linear layer, stays fixed; the rest descends on
H(Y|X) − H(Y) + β CE(ŷ), Eq. (3) and (6). H(Y|X) − H(Y) = mean_x H(σ(z)) − H(mean_x σ(z)): confident
predictions, diverse over the inputs. ŷ are pseudo-labels, Eq. (4) and (5): the class whose centroid
of features is nearest by cosine. A centroid is first the mean of the features, weighted by the
class's predicted probability, then that of the inputs with the pseudo-label.

Departs from the paper: ŷ is computed once, before the first step, since a client's inputs are one
batch; dropout is off. Where a client holds few classes, diversity and pseudo-labels pull the wrong
way. So by default diversity weighs less than the paper's 1, and pseudo-labels are off."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.layer_inputs import before_calls
from clients.core.normalisation import class_logits, entropy
from clients.methods.tent import TENTClient
from clients.models.head import head_of
from fedapps.common.settings import NONNEGATIVE, setting
from partitions.datasets.loading import Info


def pseudo_labels(z: Tensor, p: Tensor) -> Tensor:
    """The pseudo-labels (n,) of features z (n, d) with the predicted probabilities p (n, C)."""
    z = F.normalize(z)
    centroids = F.normalize(p.T @ z)  # their length does not change a cosine
    labels = (z @ centroids.T).argmax(1)
    members = F.one_hot(labels, p.shape[1]).to(z.dtype)
    centroids = F.normalize(members.T @ z)
    similarity = z @ centroids.T
    # A class without a member has no centroid.
    similarity[:, members.sum(0) == 0] = -torch.inf
    return similarity.argmax(1)


class SHOTClient(TENTClient):
    """TENT's client with another objective, over the body; `diversity` >= 0 weighs H(Y)."""

    needs_head = True
    head_by_name = True
    separately_trained = ("head.",)

    adapt_lr = 0.003
    diversity = setting(
        0.3, "weight of the entropy of the mean prediction", NONNEGATIVE, evaluation=True
    )
    pseudo_weight = setting(
        0.0, "β, weight of the pseudo-labels; 0: off", NONNEGATIVE, evaluation=True
    )

    @classmethod
    def build(cls, model: nn.Module, info: Info, /, *, parameters: str) -> nn.Module:
        """The network. Raises ValueError if nothing before its head is trained."""
        body = cls.adapted_parameters(model, parameters)
        if not any(p.requires_grad for p in body.values()):
            frozen = f": {', '.join(body):.200} are frozen" if body else ""
            raise ValueError(
                "shot adapts what comes before the head, and the network trains nothing there"
                f"{frozen}; take a network that does, or choose tent, which adapts the head, too"
            )
        return model

    def prepare_steps(self, x: Tensor) -> None:
        """Compute the pseudo-labels of each part of x by the network before its first step."""
        if not self.pseudo_weight:
            return
        features: list[Tensor] = []
        head = head_of(self.model)
        handle = before_calls(head, features.append)
        parts = self.parts(x)
        try:
            with torch.no_grad():
                logits = torch.cat([self.model(part) for part in parts])
        finally:
            handle.remove()
        labels = pseudo_labels(torch.cat(features), class_logits(logits).softmax(1))
        self._labels_of_parts = labels.split([len(part) for part in parts])

    def objective(self, logits: Tensor, part: int = 0) -> Tensor:
        """H(Y|X) − `diversity` · H(Y) + `pseudo_weight` · CE(ŷ) of logits (n, C)."""
        logits = class_logits(logits)
        mean = logits.softmax(1).mean(0)
        # A class that is never predicted has probability 0 in float32, and 0 · log 0 is NaN.
        negative_entropy = (mean * mean.clamp(min=1e-12).log()).sum()  # −H(Y)
        loss = entropy(logits) + self.diversity * negative_entropy
        if self.pseudo_weight:
            loss = loss + self.pseudo_weight * F.cross_entropy(logits, self._labels_of_parts[part])
        return loss

    @classmethod
    def adapted_parameters(cls, network: nn.Module, parameters: str) -> dict[str, nn.Parameter]:
        """All parameters except the head's, by name."""
        named = network.named_parameters()
        return {name: p for name, p in named if not name.startswith("head.")}
