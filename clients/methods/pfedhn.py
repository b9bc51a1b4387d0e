"""pFedHN's clients (Shamsian et al., ICML 2021, sections 3.2, 3.3 and 5.3).

pFedHN works with any client. This one can also describe itself by its class proportions. If novel
clients train on labels, it scores them on held-out samples. pFedHN-PC keeps the classifier ω_i, the
last linear layer, on the client.

As in the authors' code, local gradients are clipped at 50. Their code draws the batch of each local
step anew, as with `batch_draws` = "independent". Departs from it in pFedHN-PC: the classifier's
momentum is cleared in each round, its gradient is clipped together with the network's, and all
classifiers start from the same weights. There the momentum persists, and the classifier is not
clipped."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.protocol import FewShot, StateUse
from clients.models.head import head_of
from fedapps.common.settings import ROUNDS, setting
from fedapps.common.tasks import ALL_TASKS, CLASSES, ForTasks
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import Share

NOVEL_ROUNDS = setting(
    0, "extra rounds after `rounds`, in which only novel clients train their embeddings", ROUNDS
)


class PFedHNClient(Client):
    """FedAvg's client. With `novel_rounds` > 0 labeled novel clients train as well; they are scored
    on their other samples."""

    exchanges = ("query.describe",)
    few_shot = FewShot.ROUNDS  # extra rounds train a novel client's embedding v_i

    # As in the authors' code.
    lr = 0.005
    momentum = 0.9
    weight_decay = 0.00005
    local_clip_norm = 50.0
    novel_rounds = NOVEL_ROUNDS

    def describe(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """The fixed descriptor: the class proportions of the training samples, (C,) float32.

        Raises ValueError for a client without training samples."""
        if not len(self.share.train):
            raise ValueError(
                "this client has no labels to train on, and class proportions would describe it"
            )
        y = self.share.train.labels().cpu()
        counts = torch.bincount(y, minlength=self.num_classes())
        return {"descriptor": (counts / counts.sum()).float().numpy()}, {}

    def num_classes(self) -> int:
        """C, the network's outputs."""
        x, _ = self.share.everything.to(self.device)[:2]  # one has no batch statistics
        with torch.no_grad():
            return int(self.model.eval()(x).shape[1])

    @property
    def scored_as_novel(self) -> bool:
        """Not a novel client that trains: it is scored on validation and test samples."""
        trains = self.novel_rounds > 0 and not self.share.shots
        return self.share.novel and not trains


class PFedHNPCClient(PFedHNClient):
    """pFedHN-PC: the classifier is personal, trained with the rest, and kept between rounds.

    With `local_classes` it has one output for each class of the client's training labels. A sample
    of another class, which only validation or test samples have, is never right, and its loss is
    infinite. In the authors' code each classifier has an output for each class of the dataset, and
    one without training samples is no target of any step, either. A client without training labels
    keeps all outputs."""

    needs_head = True
    personal = ("head.",)
    needs_state = StateUse.PREDICTIONS

    tasks = ALL_TASKS
    settings_for_tasks: ClassVar = {"local_classes": ForTasks((CLASSES,), False)}

    local_classes = setting(False, "one output for each class of the client's training labels")

    def __init__(self, model: nn.Module, share: Share, *args: Any, **options: Any) -> None:
        self.classes: Tensor | None = None  # the client's classes, ascending
        head = head_of(model)
        self._num_classes = head.out_features
        own = trained_classes(share) if options.get("local_classes", self.local_classes) else None
        if own is not None and len(own):
            self.classes = own
            model = copy_of(model)  # clients of a process share one network
            model.head = nn.Linear(head.in_features, len(self.classes), bias=head.bias is not None)
            initial = dict(options.get("initial") or {})
            for name, array in initial.items():
                if name.startswith("head."):
                    initial[name] = np.ascontiguousarray(array[self.classes.numpy()])
            options["initial"] = initial or None
        super().__init__(model, share, *args, **options)
        if self.classes is not None:
            self.classes = self.classes.to(self.device)

    def num_classes(self) -> int:
        """C, the dataset's classes; the client's classifier may have fewer outputs."""
        return self._num_classes

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean `criterion`, over the client's classes with `local_classes`."""
        if self.classes is not None:
            y = torch.searchsorted(self.classes, y)
        return self.criterion(self.model(x), y)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), −∞ for classes that the client lacks."""
        logits = super().predict(x)
        if self.classes is None:
            return logits
        every = logits.new_full((len(x), self.num_classes()), -torch.inf)
        every[:, self.classes] = logits
        return every

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network with an output for every class, −∞ for those that the client lacks."""
        model = super().personal_model(x)
        if self.classes is not None:
            head = head_of(model)
            every = nn.Linear(head.in_features, self.num_classes()).to(head.weight)
            with torch.no_grad():
                every.weight.zero_()
                every.bias.fill_(-torch.inf)
                every.weight[self.classes] = head.weight
                every.bias[self.classes] = head.bias if head.bias is not None else 0.0
            model.head = every
        return model


def trained_classes(share: Share) -> Tensor:
    """The classes of the training labels, ascending; no other label of the client is read."""
    y = share.train.labels().cpu()
    return y[y != UNLABELED].unique()
