"""The metrics of an evaluation: means over clients, F1 of sub-populations, terms of a bound.

F1 is the macro F1 of each sub-population. Its mean over users weighs each sub-population by its
number of users. Users send their sub-population and their counts of (label, prediction) in
experiments alone: a served run evaluates nobody."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from logging import WARNING
from typing import Any, Protocol

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log

from clients.core.evaluation import determination
from clients.core.protocol import (
    COUNTS,
    FEW_SAMPLES,
    HEAD,
    LOSS,
    SECONDS,
    TRAINING_ERROR,
    VALUE_SUMS,
)
from fedapps.common.once import say_once
from fedapps.common.tasks import MAIN_SCORES, SCORES, reported_name
from partitions.shares import SUB_POPULATION
from strategies.core.domain_distances import a_distances
from strategies.core.nodes import Nodes
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.replies import Node, Update
from strategies.core.round_state import Request

# Label and prediction of the four counts: TN, FP, FN, TP.
LABELS = [0, 0, 1, 1]
PREDICTIONS = [0, 1, 0, 1]
# The sample count of a score, where it is not that of the reply.
EXAMPLES = {name: f"{name}-examples" for name in ("test-accuracy", "test-rmse", TRAINING_ERROR)}
# Sums of a reply from which R² over all samples follows, by its name.
R2 = {f"{prefix}r2": f"{prefix}{VALUE_SUMS}" for prefix in ("", "global-", "test-")}
# Numbers of a reply whose mean over clients says nothing.
NO_MEAN = {SUB_POPULATION, HEAD, COUNTS, SECONDS, *EXAMPLES.values(), *R2.values()}
TRIMMED = 0.1  # share of clients at each end that `trimmed` leaves out


class EvaluatingStrategy(Protocol):
    """The part of a strategy that `Evaluation` reads."""

    nodes: MutableSequence[Node]
    weighted_by_key: str
    evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    average_over: str
    selection_metric: str
    selection_mean: str
    report_generalization_bound: bool
    privacy: Privacy | None

    @property
    def round(self) -> int:
        """The number of the present round."""

    def training_nodes(self) -> Nodes:
        """The training nodes that are present."""

    def exchange_together(self, *requests: Request) -> list[list[Update]]:
        """Send several requests together; see `PersonalizedStrategy`."""


class Evaluation:
    """Makes the metrics of a strategy's evaluations."""

    def __init__(self, strategy: EvaluatingStrategy) -> None:
        self._strategy = strategy
        self._half_distance: float | None = None  # computed once: inputs do not change
        self._warned_of_selection = False
        self._warned_of_few_samples = False
        self._warned_of_no_scores = False
        self._logged_not_finite: set[str] = set()  # names of numbers

    def metrics(self, updates: Sequence[Update]) -> MetricRecord:
        """All metrics of these replies."""
        strategy = self._strategy
        self._warn_of_selection(updates)
        self._warn_of_few_samples(updates)
        weighted_by = strategy.weighted_by_key
        aggregate = strategy.evaluate_metrics_aggr_fn or foreign_means
        numbers: dict[str, Any] = dict(aggregated(aggregate, updates, weighted_by))
        of_scores = (strategy.average_over, self._selected_score(updates), strategy.selection_mean)
        numbers |= means(updates, *of_scores)
        numbers |= f1_scores(updates)
        numbers |= r2_scores(updates)
        if updates and not numbers:
            self._warn_of_no_scores(updates)
        for role, group in by_role(updates):
            for name, count in self.count_not_finite(group).items():
                numbers[f"{role}-not-finite-{name}"] = count
        if strategy.report_generalization_bound:
            distance = self._mean_half_distance()
            if distance is not None:
                numbers["novel-half-distance"] = distance
        return MetricRecord(numbers)

    def count_not_finite(self, updates: Sequence[Update]) -> dict[str, int]:
        """For each mean, the number of clients whose value overflowed and was left out.

        Logs each name once in a run, unless the participants are secret."""
        counts: Counter[str] = Counter()
        for update in updates:
            counts.update(update.not_finite)
        if not participants_are_secret(self._strategy.privacy):
            self._log_not_finite(counts, len(updates))
        return dict(sorted(counts.items()))

    def _log_not_finite(self, counts: Mapping[str, int], clients: int) -> None:
        for name in counts.keys() - self._logged_not_finite:
            self._logged_not_finite.add(name)
            reason = "training has diverged there: lower lr"
            if name not in SCORES and LOSS not in name:
                reason = "it is not defined for their samples, or training has diverged there"
            log(
                WARNING,
                "round %s: %s of %s of %s clients is NaN, infinite or beyond 1e12, and is left out "
                "of the mean; %s",
                self._strategy.round,
                name,
                counts[name],
                clients,
                reason,
            )

    def _warn_of_no_scores(self, updates: Sequence[Update]) -> None:
        """Warn once that the evaluated clients scored nothing."""
        if self._warned_of_no_scores:
            return
        self._warned_of_no_scores = True
        if all(update.node.foreign for update in updates):
            log(
                WARNING,
                "%s clients were evaluated, and no number of theirs could be averaged; put some "
                "beside %r into the MetricRecord of the evaluation, or set fraction_evaluate=0",
                len(updates),
                self._strategy.weighted_by_key,
            )
            return
        log(
            WARNING,
            "%s clients were evaluated, and none has samples to be scored on: evaluations are "
            "empty. In client_app, data= returns training and validation samples: (training, "
            "validation)",
            len(updates),
        )

    def _selected_score(self, updates: Sequence[Update]) -> str:
        """The name of the score that chooses the round; "auto" is the task's main one."""
        reported: set[str] = set()
        for update in updates:
            reported |= update.metrics.keys()
        return reported_name(self._strategy.selection_metric, reported)

    def _warn_of_selection(self, updates: Sequence[Update]) -> None:
        """Warn once if no training client reports the score that chooses the round."""
        if self._warned_of_selection:
            return
        selected = self._selected_score(updates)
        has_scores = False
        for update in updates:
            if update.node.novel or not MAIN_SCORES & update.metrics.keys():
                continue
            if selected in update.metrics:
                return
            has_scores = True
        if not has_scores:
            return
        self._warned_of_selection = True
        log(
            WARNING,
            "no client reports %s (selection-metric): the last round counts as the best",
            selected,
        )

    def _warn_of_few_samples(self, updates: Sequence[Update]) -> None:
        """Warn once of a novel client that is scored on less than `FEW_SAMPLES` samples."""
        if self._warned_of_few_samples or participants_are_secret(self._strategy.privacy):
            return
        counts = [update.num_examples for update in updates if update.node.novel]
        if not counts or min(counts) >= FEW_SAMPLES:
            return
        self._warned_of_few_samples = True
        if not min(counts):
            text = "a novel client has no labels, or none beside its novel-shots; it is not scored"
            log(WARNING, text)
            return
        log(
            WARNING,
            "a novel client is scored on %g labeled samples; fewer novel-shots leave more",
            min(counts),
        )

    def _mean_half_distance(self) -> float | None:
        """Mean ½ d̂ between novel and training clients' inputs; None while it is unknown."""
        strategy = self._strategy
        novel = [node for node in strategy.nodes if node.novel]
        if self._half_distance is None and novel:
            distances = a_distances(strategy.exchange_together, novel, strategy.training_nodes())
            if np.isfinite(distances).any():
                # A distance is at least 0, whatever its estimate.
                self._half_distance = float(np.nanmean(np.maximum(distances, 0.0))) / 2
        return self._half_distance


def by_role(updates: Sequence[Update]) -> Iterator[tuple[str, list[Update]]]:
    """The replies of training and of novel clients, each with its prefix of metrics."""
    for role, novel in (("train", False), ("novel", True)):
        yield role, [update for update in updates if update.node.novel == novel]


def means(
    updates: Sequence[Update],
    over: str = "clients",
    select: str = "accuracy",
    selection_mean: str = "trimmed",
) -> dict[str, float]:
    """``train-…`` and ``novel-…``: the mean of every number over the clients that sent it.

    With a task's main score also the number of clients, and the standard error over novel ones. The
    `trimmed` mean of the score `select` over training clients decides which round is reported, or
    with `selection_mean` "plain" the mean, which then stands alone.
    `over` "samples" weighs clients by the labeled samples of each score, except in the error."""
    result: dict[str, float] = {}
    for role, group in by_role(updates):
        for key in _metric_names(group):
            senders = [update for update in group if key in update.metrics]
            values = [update.metrics[key] for update in senders]
            weights: list[float] | None = None
            if over == "samples":
                weights = _labeled_samples(senders, key)
            result[f"{role}-{key}"] = float(np.average(values, weights=weights))
            selects = role == "train" and key in (select, f"global-{select}")
            if selects and selection_mean == "trimmed":
                result[f"train-trimmed-{key}"] = trimmed(values, weights)
            if key in MAIN_SCORES:
                result[f"{role}-clients"] = len(values)
                if role == "novel" and len(values) > 1:
                    result["novel-sem"] = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return result


def _metric_names(updates: Sequence[Update]) -> list[str]:
    """The sorted names of the numbers that have a mean."""
    names: set[str] = set()
    for update in updates:
        names.update(update.metrics)
    return sorted(names - NO_MEAN)


def _labeled_samples(updates: Sequence[Update], metric: str) -> list[float] | None:
    """Each client's number of samples behind this metric; None if all are 0."""
    counts = []
    for update in updates:
        counts.append(update.metrics.get(EXAMPLES.get(metric, ""), update.num_examples))
    return counts if any(counts) else None


def trimmed(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The mean without the smallest and the largest tenth, at least one value at each end.

    Fewer than three values are not trimmed. A client that claims full accuracy in one round cannot
    make this round the reported one."""
    cut = 0
    if len(values) >= 3:
        cut = max(1, int(TRIMMED * len(values)))
    kept = np.argsort(values, kind="stable")[cut : len(values) - cut]
    kept_weights = None
    if weights is not None and np.any(np.asarray(weights)[kept]):
        kept_weights = np.asarray(weights)[kept]
    return float(np.average(np.asarray(values)[kept], weights=kept_weights))


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
        counts: dict[int, list[np.ndarray]] = defaultdict(list)  # of users, by sub-population
        for update in group:
            if {COUNTS, SUB_POPULATION} <= update.metrics.keys():
                user_counts = np.asarray(update.metrics[COUNTS])
                counts[update.metrics[SUB_POPULATION]].append(user_counts)
        if not counts:
            continue
        f1: dict[int, float] = {}
        users: list[int] = []
        for kind in sorted(counts):
            f1[kind] = macro_f1(np.sum(counts[kind], axis=0))
            users.append(len(counts[kind]))
        result[f"{role}-f1"] = float(np.mean(list(f1.values())))
        result[f"{role}-f1-users"] = float(np.average(list(f1.values()), weights=users))
        for kind, value in f1.items():
            result[f"{role}-f1-{kind}"] = value
    return result


def r2_scores(updates: Sequence[Update]) -> dict[str, float]:
    """``<role>-r2`` and others of `R2`: the share of the labels' variance over all samples of these
    clients that their predictions explain, in [−∞, 1]; {} if nobody sent the sums."""
    result: dict[str, float] = {}
    for role, group in by_role(updates):
        for name, sums_name in R2.items():
            sums = [update.metrics[sums_name] for update in group if sums_name in update.metrics]
            if not sums or len({len(numbers) for numbers in sums}) > 1:
                continue
            score = determination(np.sum(sums, axis=0).tolist())
            if score is not None:
                result[f"{role}-{name}"] = score
    return result


def train_means(updates: Sequence[Update]) -> dict[str, float]:
    """The mean of each number but the loss over the clients whose train reply has it."""
    result: dict[str, float] = {}
    for name in _metric_names(updates):
        if name == LOSS:
            continue
        values = [update.metrics[name] for update in updates if name in update.metrics]
        result[name] = float(np.mean(values))
    return result


def losses(updates: Sequence[Update]) -> list[float]:
    """The training losses in the replies."""
    values = []
    for update in updates:
        loss = update.metrics.get(LOSS, update.foreign_metrics.get(LOSS))
        if isinstance(loss, float | int):  # a foreign client may send a list
            values.append(loss)
    return values


def records(updates: Sequence[Update], weighted_by: str) -> list[RecordDict]:
    """The foreign clients' metrics, each with its weight as `weighted_by`, for an `Aggregate`."""
    result = []
    for update in updates:
        if update.node.foreign:
            metrics = MetricRecord({**update.foreign_metrics, weighted_by: update.num_examples})
            result.append(RecordDict({"metrics": metrics}))
    return result


def aggregated(
    aggregate: Callable[[list[RecordDict], str], MetricRecord],
    updates: Sequence[Update],
    weighted_by: str,
) -> MetricRecord:
    """What `aggregate`, which may be the user's, makes of the foreign clients' metrics. Raises
    ValueError if it returns no record."""
    metrics = aggregate(records(updates, weighted_by), weighted_by)
    if not isinstance(metrics, Mapping):
        name = getattr(aggregate, "__name__", repr(aggregate))
        raise ValueError(
            f"{name:.200}, which aggregates metrics, returned a {type(metrics).__name__}; it must "
            "return a MetricRecord, which may be empty"
        )
    return metrics


def foreign_means(records: list[RecordDict], weighted_by: str) -> MetricRecord:
    """The weighted mean of each metric over the clients that sent it, entry by entry in lists.

    A metric whose lists differ in length is left out, which is logged once."""
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    weights: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        metrics = record.metric_records["metrics"]
        for name, value in metrics.items():
            if name != weighted_by:
                values[name].append(np.asarray(value))
                weights[name].append(metrics[weighted_by])
    result = MetricRecord()
    for name in sorted(values):
        shapes = {value.shape for value in values[name]}
        if len(shapes) > 1:
            lengths = ", ".join(_sent(shape) for shape in sorted(shapes))
            say_once(
                f"the metric {name!r} is left out: clients sent {lengths}; send lists of one "
                "length",
                WARNING,
            )
            continue
        # Without any weight the mean is the plain one.
        name_weights = weights[name] if any(weights[name]) else None
        result[name] = np.average(values[name], 0, name_weights).tolist()
    return result


def _sent(shape: tuple[int, ...]) -> str:
    """What clients sent whose metric has this shape."""
    return f"lists of {shape[0]}" if shape else "single numbers"
