"""SHOT-IM client (Liang, Hu and Feng, ICML 2020, Section 3.2): information maximisation.

The hypothesis, the network's last linear layer, stays fixed; the rest descends on
H(Y|X) − H(Y) = mean_x H(σ(z)) − H(mean_x σ(z)), Eq. (3): confident predictions, diverse over the
inputs. Departs from the paper: no pseudo-labels, all inputs of a client as one batch, dropout
off. Where a client holds few classes, diversity pulls the wrong way: `diversity` weighs it."""

from torch import Tensor, nn

from clients.core.normalisation import class_logits, entropy
from clients.methods.tent import TENTClient
from fedapps.common.settings import NONNEGATIVE, setting


class SHOTClient(TENTClient):
    """TENT's client with another objective, over the body; `diversity` >= 0 weighs H(Y)."""

    needs_head = True
    head_by_name = True
    separately_trained = ("head.",)

    diversity = setting(
        1.0, "weight of the entropy of the mean prediction", NONNEGATIVE, evaluation=True
    )

    def objective(self, logits: Tensor) -> Tensor:
        """H(Y|X) − `diversity` · H(Y) of logits (n, C)."""
        mean = class_logits(logits).softmax(1).mean(0)
        # A class that is never predicted has probability 0 in float32, and 0 · log 0 is NaN.
        negative_entropy = (mean * mean.clamp(min=1e-12).log()).sum()  # −H(Y)
        return entropy(logits) + self.diversity * negative_entropy

    def trainable(self) -> list[nn.Parameter]:
        """All parameters except the head's."""
        named = self.model.named_parameters()
        return [p for name, p in named if not name.startswith("head.")]
