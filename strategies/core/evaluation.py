"""The metrics of an evaluation: means over clients, F1 of users with tastes, bound terms.

F1 is macro F1 of each sub-population. Its mean over users weighs each sub-population by its users.
A user sends its sub-population and its counts of (label, prediction) in experiments alone: serving
evaluates nobody."""

from collections import Counter
from collections.abc import Iterator, Sequence
from logging import WARNING

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log

from clients.core.protocol import FEW_SAMPLES
from strategies.core.domain_distances import a_distances
from strategies.core.replies import Update
from strategies.core.strategy import StrategyBase

LABELS, PREDICTIONS = [0, 0, 1, 1], [0, 1, 0, 1]  # the four counts: TN, FP, FN, TP
# The sample count of a score, where it is not that of the reply.
EXAMPLES = {name: f"{name}-examples" for name in ("test-accuracy", "training-error")}
NO_MEAN = {"sub-population", "head", "counts", "seconds", *EXAMPLES.values()}
TRIMMED = 0.1  # share of the clients at each end whose score does not choose the reported round


class Evaluation:
    """Makes the metrics of a strategy's evaluations."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self._half_distance: float | None = None  # inputs do not change
        self._warned_of_selection = False
        self._warned_of_few = False
        self._said: set[str] = set()  # names of numbers whose loss was logged

    def metrics(self, updates: Sequence[Update]) -> MetricRecord:
        """All metrics of these replies."""
        strategy = self._strategy
        self._warn(updates)
        key = strategy.weighted_by_key
        mean = strategy.evaluate_metrics_aggr_fn or foreign_means
        foreign = mean(records(updates, key), key)
        own = means(updates, strategy.average_over, strategy.selection_metric)
        numbers = {**foreign, **own, **f1_scores(updates)}
        if updates and not numbers:
            self._warn_unscored(len(updates))
        for role, group in by_role(updates):
            lost = self.count_not_finite(group)
            numbers |= {f"{role}-not-finite-{name}": count for name, count in lost.items()}
        if strategy.report_generalization_bound:
            distance = self._mean_half_distance()
            if distance is not None:
                numbers["novel-half-distance"] = distance
        return MetricRecord(numbers)

    def count_not_finite(self, updates: Sequence[Update]) -> dict[str, int]:
        """How many clients' numbers were left out of each mean, since they have overflowed; the
        first time that a name is among them it is logged."""
        counts = Counter(name for update in updates for name in update.not_finite)
        for name in counts.keys() - self._said:
            if self._strategy.messenger.hides_participants:
                continue
            self._said.add(name)
            log(
                WARNING,
                "round %s: %s of %s of %s clients is NaN, infinite or beyond 1e12, and is left out "
                "of the mean; training has diverged there: lower lr",
                self._strategy.round,
                name,
                counts[name],
                len(updates),
            )
        return dict(sorted(counts.items()))

    def _warn_unscored(self, clients: int) -> None:
        """Warn once that the evaluated clients scored nothing."""
        if "" in self._said:
            return
        self._said.add("")
        words = (
            "%s clients were evaluated, and none has samples to be scored on: evaluations are "
            "empty. In client_app, data= returns training and validation samples: (training, "
            "validation)"
        )
        log(WARNING, words, clients)

    def _warn(self, updates: Sequence[Update]) -> None:
        """Warn once if no client reports the score that chooses the round, and once of a novel
        client that is scored on less than `FEW_SAMPLES` samples."""
        selected, key = self._strategy.selection_metric, "accuracy"
        scored = [u.metrics.keys() for u in updates if not u.node.novel and key in u.metrics]
        reported = any(selected in names for names in scored)
        if scored and not reported and not self._warned_of_selection:
            log(
                WARNING,
                "no client reports %s (selection-metric): the last round counts as the best",
                selected,
            )
            self._warned_of_selection = True
        least = min((u.num_examples for u in updates if u.node.novel), default=FEW_SAMPLES)
        secret = self._strategy.messenger.hides_participants
        if least < FEW_SAMPLES and not self._warned_of_few and not secret:
            words = "a novel client is scored on %g labeled samples; fewer novel-shots leave more"
            log(WARNING, words, least)
            self._warned_of_few = True

    def _mean_half_distance(self) -> float | None:
        """Mean ½ d̂ between novel and training clients' inputs; None while it is unknown."""
        strategy = self._strategy
        novel = [node for node in strategy.nodes if node.novel]
        if self._half_distance is None and novel:
            distances = a_distances(strategy.exchanges, novel, strategy.training_nodes())
            if np.isfinite(distances).any():
                self._half_distance = float(np.nanmean(distances)) / 2
        return self._half_distance


def goodness(select: str, score: float) -> float:
    """A score of the kind `select` as a number that is larger for better models."""
    return -score if select == "loss" else score


def by_role(updates: Sequence[Update]) -> Iterator[tuple[str, list[Update]]]:
    """The replies of training and of novel clients, each with its prefix of metrics."""
    for role, novel in (("train", False), ("novel", True)):
        yield role, [update for update in updates if update.node.novel == novel]


def means(
    updates: Sequence[Update], over: str = "clients", select: str = "accuracy"
) -> dict[str, float]:
    """``train-…`` and ``novel-…``: the mean of every number over the clients that sent it.

    With accuracy also the number of clients, and the standard error over novel clients. The
    `trimmed` mean of the score `select` over training clients decides which round is reported.
    `over` "samples" weighs clients by the labeled samples of each score, except in the error."""
    result: dict[str, float] = {}
    for role, group in by_role(updates):
        for key in sorted({key for u in group for key in u.metrics} - NO_MEAN):
            senders = [u for u in group if key in u.metrics]
            values = [u.metrics[key] for u in senders]
            counts = [u.metrics.get(EXAMPLES.get(key, ""), u.num_examples) for u in senders]
            weights = counts if over == "samples" and any(counts) else None
            result[f"{role}-{key}"] = float(np.average(values, weights=weights))
            if role == "train" and key in (select, f"global-{select}"):
                result[f"train-trimmed-{key}"] = trimmed(values, weights)
            if key == "accuracy":
                result[f"{role}-clients"] = len(values)
                if role == "novel" and len(values) > 1:
                    result["novel-sem"] = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return result


def trimmed(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The mean without the least and the largest tenth of three or more values, one at least: a
    client that claims every answer in one round cannot have it chosen alone."""
    cut = max(1, int(TRIMMED * len(values))) if len(values) >= 3 else 0
    kept = np.argsort(values, kind="stable")[cut : len(values) - cut]
    left = None if weights is None else np.asarray(weights)[kept]
    return float(np.average(np.asarray(values)[kept], weights=left if np.any(left) else None))


def macro_f1(counts: np.ndarray) -> float:
    """Mean F1 of both classes from counts [TN, FP, FN, TP]; F1 of an absent class is 0."""
    from sklearn.metrics import f1_score  # imports pandas, 80 MB that no client needs

    return float(
        f1_score(LABELS, PREDICTIONS, sample_weight=counts, average="macro", zero_division=0.0)
    )


def f1_scores(updates: Sequence[Update]) -> dict[str, float]:
    """For each role ``<role>-f1``, the mean over sub-populations, ``<role>-f1-users``, the mean
    over users, and ``<role>-f1-<sub-population>``; {} if nobody sent counts."""
    result: dict[str, float] = {}
    for role, group in by_role(updates):
        counts: dict[int, list[np.ndarray]] = {}  # of each user, by sub-population
        for update in group:
            if {"counts", "sub-population"} <= update.metrics.keys():
                kind = update.metrics["sub-population"]
                counts.setdefault(kind, []).append(np.asarray(update.metrics["counts"]))
        if counts:
            f1 = {kind: macro_f1(np.sum(counts[kind], axis=0)) for kind in sorted(counts)}
            users = [len(counts[kind]) for kind in f1]
            result[f"{role}-f1"] = float(np.mean(list(f1.values())))
            result[f"{role}-f1-users"] = float(np.average(list(f1.values()), weights=users))
            result |= {f"{role}-f1-{kind}": value for kind, value in f1.items()}
    return result


def own_means(updates: Sequence[Update]) -> dict[str, float]:
    """The mean of each number but the loss over the clients whose train reply has it."""
    names = sorted({name for u in updates for name in u.metrics} - NO_MEAN - {"loss"})
    senders = {name: [u for u in updates if name in u.metrics] for name in names}
    return {n: float(np.mean([u.metrics[n] for u in us])) for n, us in senders.items()}


def losses(updates: Sequence[Update]) -> list[float]:
    """The training losses in the replies."""
    values = [u.metrics.get("loss", u.foreign_metrics.get("loss")) for u in updates]
    return [loss for loss in values if isinstance(loss, float | int)]


def records(updates: Sequence[Update], weighted_by: str) -> list[RecordDict]:
    """The foreign clients' metrics, each with its weight as `weighted_by`, for an `Aggregate`."""
    return [
        RecordDict({"metrics": MetricRecord({**u.foreign_metrics, weighted_by: u.num_examples})})
        for u in updates
        if u.node.foreign
    ]


def foreign_means(records: list[RecordDict], weighted_by: str) -> MetricRecord:
    """The weighted mean of each metric over those who sent it, entry by entry in lists.

    A metric whose lists differ in length is left out."""
    metrics = [record.metric_records["metrics"] for record in records]
    result = MetricRecord()
    for name in sorted({name for record in metrics for name in record} - {weighted_by}):
        values = [np.asarray(record[name]) for record in metrics if name in record]
        weights = [record[weighted_by] for record in metrics if name in record]
        if len({value.shape for value in values}) == 1:
            result[name] = np.average(values, 0, weights if any(weights) else None).tolist()
    return result
