"""The loss that compares outputs with labels: the cross entropy, or a user's own."""

from collections.abc import Callable

from torch import Tensor, nn

from fedapps.common.tasks import BINARY, CLASSES

Criterion = Callable[[Tensor, Tensor], Tensor]  # of logits (n, C) and labels (n,)


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
