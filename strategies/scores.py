"""What an evaluation says: means over clients, and F1 of users with tastes.

F1 is macro F1 per sub-population; of these there are two means, over sub-populations and over
users (each sub-population weighted by its users), which differ where some are larger. A user tells
its sub-population and its counts of (label, prediction): the experimenter may look, a server in
service does not evaluate so."""

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import MetricRecord, RecordDict

from strategies.replies import Update

Aggregate = Callable[[list[RecordDict], str], MetricRecord]  # as Flower's FedAvg takes it

LABELS, PREDICTIONS = [0, 0, 1, 1], [0, 1, 0, 1]  # the four counts: TN, FP, FN, TP
# How many samples a score is of, where they are not those that the reply counts.
EXAMPLES = {name: f"{name}-examples" for name in ("test-accuracy", "training-error")}
NO_MEAN = {"sub-population", "head", "counts", *EXAMPLES.values()}


def means(updates: Sequence[Update], over: str = "clients") -> dict[str, float]:
    """``train-…`` and ``novel-…``: the mean over clients of every number that they told.

    With accuracy, the clients that told one, and novel ones' standard error. `over` "samples"
    weighs the clients by the labeled samples that the score is of, but for the standard error."""
    found: dict[str, float] = {}
    for role, novel in (("train", False), ("novel", True)):
        group = [u for u in updates if u.node.novel == novel]
        for key in sorted({key for u in group for key in u.metrics} - NO_MEAN):
            told = [u for u in group if key in u.metrics]
            values = [u.metrics[key] for u in told]
            counts = [u.metrics.get(EXAMPLES.get(key, ""), u.num_examples) for u in told]
            weights = counts if over == "samples" and any(counts) else None
            found[f"{role}-{key}"] = float(np.average(values, weights=weights))
            if key == "accuracy":
                found[f"{role}-clients"] = len(values)
                if novel and len(values) > 1:
                    sem = float(np.std(values, ddof=1)) / len(values) ** 0.5
                    found["novel-sem"] = sem
    return found


def macro_f1(counts: np.ndarray) -> float:
    """Mean F1 of both classes from counts [TN, FP, FN, TP]; F1 of an absent class is 0."""
    from sklearn.metrics import f1_score  # here: pandas comes with it, 80 MB that no client needs

    return float(
        f1_score(LABELS, PREDICTIONS, sample_weight=counts, average="macro", zero_division=0.0)
    )


def f1_scores(updates: Sequence[Update]) -> dict[str, float]:
    """``<role>-f1``, the mean over sub-populations, ``<role>-f1-users``, the mean over users, and
    ``<role>-f1-<sub-population>``, for training (``train``) and ``novel`` users apart.

    {} if nobody told counts."""
    found: dict[str, float] = {}
    for role, novel in (("train", False), ("novel", True)):
        counts: dict[int, list[np.ndarray]] = {}  # of each user, by sub-population
        for update in updates:
            told = update.metrics
            if {"counts", "sub-population"} <= told.keys() and update.node.novel == novel:
                kind = told["sub-population"]
                counts.setdefault(kind, []).append(np.asarray(told["counts"]))
        if counts:
            each = {kind: macro_f1(np.sum(counts[kind], axis=0)) for kind in sorted(counts)}
            users = [len(counts[kind]) for kind in each]
            found[f"{role}-f1"] = float(np.mean(list(each.values())))
            found[f"{role}-f1-users"] = float(np.average(list(each.values()), weights=users))
            found |= {f"{role}-f1-{kind}": f1 for kind, f1 in each.items()}
    return found


def losses(updates: Sequence[Update]) -> list[float]:
    """The training losses of those who told one."""
    told = [update.metrics.get("loss", update.own.get("loss")) for update in updates]
    return [loss for loss in told if isinstance(loss, float | int)]


def records(updates: Sequence[Update], weighted_by: str) -> list[RecordDict]:
    """What foreign clients told under names of their own, and under `weighted_by` what each of
    them weighs, for an `Aggregate`."""
    return [
        RecordDict({"metrics": MetricRecord({**update.own, weighted_by: update.num_examples})})
        for update in updates
        if update.node.foreign
    ]


def own_means(records: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Of each name the mean over those who told it, by their weights, entry by entry in lists;
    lists of several lengths are left out."""
    told = [record.metric_records["metrics"] for record in records]
    found = MetricRecord()
    for name in sorted({name for one in told for name in one} - {weighted_by}):
        values = [np.asarray(one[name]) for one in told if name in one]
        weights = [one[weighted_by] for one in told if name in one]
        if len({value.shape for value in values}) == 1:
            found[name] = np.average(values, 0, weights if any(weights) else None).tolist()
    return found
