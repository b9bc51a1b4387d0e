"""Loss and scores of a client's predictions for its samples."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.criterion import Criterion
from clients.core.outputs import (
    further_scores,
    macro_f1,
    main_of,
    predicted,
    value_sums,
)
from clients.core.own_scores import OwnScore
from clients.core.protocol import COUNTS, TRAINING_ERROR, VALUE_SUMS, Config, Metrics
from fedapps.common.tasks import BINARY, CLASSES, TASKS, VALUES, Targets
from partitions.shares import SUB_POPULATION, Samples, Share, labeled_rows


class Choice(NamedTuple):
    """The correction that a client chose for its inputs, and why in one sentence."""

    name: str
    reason: str


class Client(Protocol):
    """The attributes of `clients.core.client.Client` that scoring uses."""

    share: Share
    device: str
    adaptation_metrics: Metrics
    intermediate_logits: dict[str, Tensor]
    novel_batch: int
    novel_stream: bool
    batchwise: bool
    supports_streaming: bool
    criterion: Criterion
    targets: Targets
    own_scores: Mapping[str, OwnScore]
    stream: dict[str, Tensor]

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, classes)."""

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, classes) of the next inputs of a stream."""


def score_parts(client: Client, bound: bool, select: str = "") -> tuple[float, int, Metrics]:
    """Loss, number of labeled samples and metrics.

    A novel client is scored on all its data, a training client on validation and test data. The
    counts for the F1 of sub-populations are those of its test samples, or of its validation samples
    if it has no others. With `bound`, the metrics include the error on the training data, a term of
    the generalization bound."""
    share = client.share
    if share.novel:
        return score_samples(client, share.everything, select=select, counts=True)
    has_test = share.test is not None and len(share.test) > 0
    loss, labeled, metrics = score_samples(
        client, share.validation, select=select, counts=not has_test
    )
    main = TASKS[client.targets.task].main.name
    if share.test is not None:
        _, tested, scores = score_samples(client, share.test, "test-", counts=has_test)
        metrics |= scores | {f"test-{main}-examples": tested}
    if bound:
        _, trained, fitted = score_samples(client, share.train)
        metrics |= {
            TRAINING_ERROR: 1 - fitted["accuracy"],
            f"{TRAINING_ERROR}-examples": trained,
        }
    return loss, labeled, metrics


def score_samples(
    client: Client,
    samples: Samples,
    prefix: str = "",
    select: str = "",
    *,
    counts: bool = False,
) -> tuple[float, int, Metrics]:
    """Mean loss, number of labeled samples, and the task's scores over the labeled samples, each
    under its name after `prefix`.

    For `select` = "macro-f1" the metrics of classes include this score. Without a `prefix` they
    include the adaptation's metrics, the scores of its intermediate logits, further scores of the
    task, and the user's own. With `counts` they include those for the F1 of sub-populations, under
    names without the prefix: one model's, on one set of samples."""
    in_full = not prefix
    if not len(samples):
        return 0.0, 0, {}
    x, y = samples.to(client.device)[:]
    logits = predict_novel(client, x) if client.share.novel else client.predict(x)
    labeled = labeled_rows(y)
    count = int(labeled.sum())
    metrics = dict(client.adaptation_metrics) if in_full else {}
    if not count:
        return 0.0, 0, metrics
    targets = client.targets
    main = TASKS[targets.task].main.name
    y = y[labeled]
    if in_full:
        for name, z in client.intermediate_logits.items():
            metrics[f"{name}-{main}"] = main_of(z[labeled], y, targets)
    logits = logits[labeled]
    metrics[prefix + main] = main_of(logits, y, targets)
    if select == "macro-f1" and targets.task in (CLASSES, BINARY):
        metrics[prefix + select] = macro_f1(y, predicted(logits, targets))
    if in_full:
        metrics |= further_scores(logits, y, targets)
        metrics |= _own_scores(client, logits, y)
    if targets.task == VALUES:
        metrics[prefix + VALUE_SUMS] = value_sums(logits, y)
    if counts and SUB_POPULATION in client.share.attributes:  # a user with a preference
        # True negatives, false positives, false negatives, true positives.
        metrics[COUNTS] = (2 * y + logits.argmax(1)).bincount(minlength=4).tolist()
        metrics[SUB_POPULATION] = int(client.share.attributes[SUB_POPULATION])
    return float(client.criterion(logits, y)), count, metrics


def _own_scores(client: Client, outputs: Tensor, y: Tensor) -> Metrics:
    """The user's own scores of outputs and labels, without those that fail for them."""
    scores: Metrics = {}
    for name, score in client.own_scores.items():
        value = score.of(outputs, y, client.targets)
        if value is not None:
            scores[name] = value
    return scores


def predict_novel(client: Client, x: Tensor) -> Tensor:
    """Logits (n, C) of inputs x (n, *shape), predicted in batches of `novel_batch`.

    The model adapts to each batch anew. With `novel_stream` it continues from the previous batch,
    if the method supports that. Sets `intermediate_logits` of all batches, and `adaptation_metrics`
    to their means over the batches."""
    if client.batchwise or not client.novel_batch or len(x) <= client.novel_batch:
        return client.predict(x)
    client.stream = {}
    online = client.novel_stream and client.supports_streaming
    logits: list[Tensor] = []
    intermediate: dict[str, list[Tensor]] = defaultdict(list)
    metrics: dict[str, list[Any]] = defaultdict(list)
    for batch in x.split(client.novel_batch):
        logits.append(client.update(batch) if online else client.predict(batch))
        for name, z in client.intermediate_logits.items():
            intermediate[name].append(z)
        for name, value in client.adaptation_metrics.items():
            metrics[name].append(value)
    client.intermediate_logits = {name: torch.cat(z) for name, z in intermediate.items()}
    client.adaptation_metrics = {name: sum(v) / len(v) for name, v in metrics.items()}
    return torch.cat(logits)


def by_parts(forward: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Tensor:
    """`forward` of each part, without gradients; the results are concatenated."""
    with torch.no_grad():
        return torch.cat([forward(part) for part in parts])


class Streaming:
    """The part of a client that serves a stream of inputs, by one update after another."""

    # Whether an update continues from the previous one. A method in which a setting decides this
    # overrides it by a property.
    supports_streaming = False

    # The tensors that the previous updates hand to the next one; {} before the first update.
    stream: dict[str, Tensor]
    model: nn.Module
    share: Share
    device: str
    predict: Callable[[Tensor], Tensor]
    receive: Callable[[Arrays, Config], None]
    begin: Callable[[str, Config], None]

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the next inputs x (n, *shape) after adaptation to x.

        If the method `supports_streaming`, the model is adapted to all previous inputs too. The
        size of `stream` does not grow."""
        return self.predict(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """A copy, in evaluation mode, of the network that made the last prediction, that of x."""
        return deepcopy(self.model).eval()

    def serve(self, arrays: Arrays, config: Config) -> tuple[nn.Module, Tensor]:
        """The personal network, and its logits (n, C) for all the client's inputs."""
        self.begin("evaluate", config)
        self.receive(arrays, config)
        x, _ = self.share.everything.to(self.device)[:]
        logits = self.update(x)
        return self.personal_model(x), logits

    def mean_so_far(self, new: Mapping[str, Tensor], count: int = 1) -> dict[str, Tensor]:
        """Update the running means in `stream` by `count` further terms, whose means are `new`.

        Returns the running means."""
        count_before = int(self.stream.get("count", 0))
        n = count_before + count
        mean = dict(new)
        if count_before:
            for name, value in new.items():
                previous = self.stream[name]
                mean[name] = previous + (value - previous) * count / n
        self.stream = mean | {"count": torch.tensor(n)}
        return mean
