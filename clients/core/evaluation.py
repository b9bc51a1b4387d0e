"""Loss and accuracy of a client's predictions for its samples."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.criterion import Criterion
from clients.core.protocol import Config, Metrics
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import SUB_POPULATION, Samples, Share


class Client(Protocol):
    """What scoring needs of `clients.core.client.Client`."""

    share: Share
    device: str
    adaptation_metrics: Metrics
    intermediate_logits: dict[str, Tensor]
    novel_batch: int
    novel_stream: bool
    batchwise: bool
    supports_streaming: bool
    criterion: Criterion
    stream: dict[str, Tensor]

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, classes)."""

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, classes) of the next inputs of a stream."""


def score_parts(client: Client, bound: bool, select: str = "") -> tuple[float, int, Metrics]:
    """Loss, labeled count and metrics of a novel client's data, or of validation and test data.

    With `bound` also the error on the training data, a term of the generalization bound."""
    share = client.share
    if share.novel:
        return score_samples(client, share.everything, "accuracy", select)
    loss, labeled, metrics = score_samples(client, share.validation, "accuracy", select)
    if share.test is not None:
        _, tested, accuracy = score_samples(client, share.test, "test-accuracy")
        metrics |= accuracy | {"test-accuracy-examples": tested}
    if bound:
        _, trained, fitted = score_samples(client, share.train, "accuracy")
        metrics |= {
            "training-error": 1 - fitted["accuracy"],
            "training-error-examples": trained,
        }
    return loss, labeled, metrics


def score_samples(
    client: Client, samples: Samples, key: str, select: str = ""
) -> tuple[float, int, Metrics]:
    """Mean loss, labeled count and accuracy (under `key`); unlabeled samples do not count.

    `select` "macro-f1" adds that score. "accuracy" comes with the adaptation's metrics and with the
    accuracies of its stages."""
    if not len(samples):
        return 0.0, 0, {}
    x, y = samples.to(client.device)[:]
    logits = predict_novel(client, x) if client.share.novel else client.predict(x)
    labeled = y != UNLABELED
    count = int(labeled.sum())
    metrics = dict(client.adaptation_metrics) if key == "accuracy" else {}
    if not count:
        return 0.0, 0, metrics
    for name, z in client.intermediate_logits.items() if key == "accuracy" else ():
        metrics[f"{name}-accuracy"] = float((z.argmax(1) == y)[labeled].float().mean())
    logits, y = logits[labeled], y[labeled]
    predicted = logits.argmax(1)
    metrics[key] = float((predicted == y).float().mean())
    if select == "macro-f1":
        metrics[key.replace("accuracy", select)] = macro_f1(y, predicted)
    if SUB_POPULATION in client.share.attributes:  # TN, FP, FN, TP of a user with a preference
        metrics["counts"] = (2 * y + predicted).bincount(minlength=4).tolist()
        metrics[SUB_POPULATION] = int(client.share.attributes[SUB_POPULATION])
    return float(client.criterion(logits, y)), count, metrics


def macro_f1(y: Tensor, predicted: Tensor) -> float:
    """Mean of 2 TP / (2 TP + FP + FN) over the classes among the labels y (n,) or predictions."""
    total = y.bincount(minlength=(n := int(max(y.max(), predicted.max())) + 1))
    total = total + predicted.bincount(minlength=n)
    right = y[y == predicted].bincount(minlength=n)
    return float((2 * right / total)[total > 0].mean())


def predict_novel(client: Client, x: Tensor) -> Tensor:
    """Logits (n, C) of batches of `novel_batch` inputs, each predicted after adaptation to itself
    alone or, with `novel_stream`, by updates if the method goes on; `stages` are theirs, `adapted`
    the means over the batches."""
    if client.batchwise or not client.novel_batch or len(x) <= client.novel_batch:
        return client.predict(x)
    logits, stages, adapted = [], [], []
    client.stream = {}
    predict = client.update if client.novel_stream and client.supports_streaming else client.predict
    for batch in x.split(client.novel_batch):
        logits.append(predict(batch))
        stages.append(dict(client.intermediate_logits))
        adapted.append(dict(client.adaptation_metrics))
    client.intermediate_logits = {
        name: torch.cat([stage[name] for stage in stages]) for name in stages[0]
    }
    client.adaptation_metrics = {n: sum(a[n] for a in adapted) / len(adapted) for n in adapted[0]}
    return torch.cat(logits)


def by_parts(forward: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Tensor:
    """`forward` of all rows of the parts, without gradients."""
    with torch.no_grad():
        return torch.cat([forward(part) for part in parts])


class Streaming:
    """What serves a client's inputs, one update after another."""

    # Whether an update starts from the former ones. A method that decides it by a setting
    # overrides it by a property.
    supports_streaming = False

    stream: dict[str, Tensor]  # what the updates so far leave to the next one; at first {}
    model: nn.Module
    share: Share
    device: str
    predict: Callable[[Tensor], Tensor]
    receive: Callable[[Arrays, Config], None]
    begin: Callable[[str, Config], None]

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of further inputs x (n, *shape) after adaptation to them; if the method
        `supports_streaming`, also to all inputs before them. The size of `stream` stays the
        same."""
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
