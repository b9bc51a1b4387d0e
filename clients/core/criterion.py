"""The loss that compares outputs with labels: the cross entropy, or a user's own."""

from collections.abc import Callable
from logging import WARNING

import torch
from torch import Tensor, nn

from fedapps.common.once import say_once
from fedapps.common.seeds import drawing
from fedapps.common.tasks import BINARY, CLASSES, VALUES

Criterion = Callable[[Tensor, Tensor], Tensor]  # of logits (n, C) and labels (n,)
TRIAL = 4  # samples for which a user's loss is tried


class OwnLoss(nn.Module):
    """A user's loss. If it is a module, its tensors, such as class weights, move with it.

    It gets the outputs of the user's network, which `from_logits` makes of logits, and labels; for
    `binary` these are decimals (n, 1), as losses of torch take them. Raises ValueError for a class,
    and for an object that is not callable."""

    def __init__(
        self,
        loss: Criterion,
        task: str = CLASSES,
        from_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(loss, type) or not callable(loss):
            raise ValueError(
                f"loss= is {loss!r:.200}; it must be a function of logits and labels, or a module "
                "such as torch.nn.CrossEntropyLoss()"
            )
        self.loss = loss
        self._task = task
        self._from_logits = from_logits

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss (). Raises ValueError for a result that is not one number."""
        if self._from_logits is not None:
            logits = self._from_logits(logits)
        if self._task == BINARY:
            labels = labels.to(logits.dtype).view(logits.shape)
        value = self.loss(logits, labels)
        if isinstance(value, Tensor) and not value.ndim:
            return value
        result = repr(value)
        if isinstance(value, Tensor):
            result = f"a tensor {tuple(value.shape)}"
        raise ValueError(
            f"loss= gave {result:.200} for logits {tuple(logits.shape)} and labels "
            f"{tuple(labels.shape)}; it must give their mean loss, a tensor without dimensions, "
            "as torch.nn.CrossEntropyLoss() does"
        )


def check_own_loss(
    criterion: OwnLoss, task: str, num_outputs: int, device: str | torch.device
) -> None:
    """Raise ValueError for a loss without a gradient; warn once of one that is a sum over samples.

    It is tried with random logits and labels. Where it cannot take these, nothing is known."""
    with drawing(1):
        logits = torch.randn(TRIAL, num_outputs, device=device, requires_grad=True)
        labels = torch.randint(0, 2, (TRIAL, num_outputs), device=device).float()
        if task == VALUES:
            labels = torch.randn(TRIAL, num_outputs, device=device)
        elif task in (BINARY, CLASSES):
            labels = torch.arange(TRIAL, device=device) % max(num_outputs, 2)
    try:
        once = criterion(logits, labels)
        twice = criterion(torch.cat([logits, logits]), torch.cat([labels, labels]))
    except Exception:  # whatever a user's code raises, which it does with the data as well
        return
    if not once.requires_grad:
        raise ValueError(
            "loss= gives a number without a gradient, so nothing can be trained by it; compute it "
            "from the outputs without detach, argmax, numpy and torch.no_grad"
        )
    if once != 0 and torch.isclose(twice, 2 * once, rtol=1e-4):
        say_once(
            "loss= seems to be the sum over the samples of a mini-batch, not their mean: it "
            "doubles where each sample occurs twice; steps and reported losses then grow with "
            "batch-size; torch's losses have reduction='mean'",
            WARNING,
        )
