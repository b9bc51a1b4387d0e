"""Auto's server (ours): FedAvg, then a rule by which each client chooses a correction, or none.

At the end of training, or from a saved run, the server asks the training clients for sums, by five
kinds of messages. Each needs the answers to the ones before:

| ``query.moments`` | confusion counts, moments of inner values by class | K, π, M, S |
| ``query.spread`` | deviations of clients from their classes' means | B |
| ``query.misfit``, twice | misfits of played newcomers with unchanged inputs | μ, σ, t, ranges |
| ``query.play``, ten times | features, gradients and Hessians, calibration | θ, α, β |
| ``query.guard`` | corrections, losses and gains by a grid of k | k in two regimes |

A client's own newcomers are judged by statistics and coefficients θ from the other four of five
folds of clients. As with a novel client, their samples are not among those that M and S describe.
Clients get only sums over clients: ``source/…``, ``rule/…``. The equations are in
`clients.core.decision` and `strategies.maths.decision`. Before the last round all clients are
evaluated with FedAvg's model, and the last round is the reported one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.common.logger import log
from torch import nn

from clients.core.arrays import Arrays, prefixed
from clients.core.decision.choice import (
    DESCRIPTORS,
    FOR_LABEL_SHIFT,
    NEVER,
    Rule,
    able_in,
    allowed_share,
    candidates_of,
    num_features,
    rounded_up,
    smallest_alpha,
)
from clients.core.decision.inner_values import blocks_of
from clients.core.decision.moments import (
    between_clients,
    class_means,
    semidefinite,
    within_classes,
)
from clients.core.decision.played import SIZES
from clients.core.decision.tallies import DESCRIPTOR_VALUES, GUARDS, MISFITS, REGIMES, WIN_RATES
from clients.core.normalisation import sizes_with_statistics
from clients.methods._batchwise import batch_norms
from clients.methods.auto import (
    CANDIDATES,
    COEFFICIENTS,
    PLAYS,
    PRESENT,
    RULE,
    SOURCE,
    AutoClient,
)
from fedapps.common.settings import setting
from strategies.core.count_limits import (
    bounded_confusions,
    bounded_deviations,
    bounded_totals,
    without_highest,
)
from strategies.core.replies import Node, Requirement
from strategies.maths.decision import (
    FOLDS,
    STEPS,
    calibrated,
    deviation,
    largest_size,
    least_guard,
    misfit_limit,
    newton_step,
    ranges,
)
from strategies.maths.label_shift import conditional, prior
from strategies.methods.fedavg import FedAvg

HEAD_WEIGHT = "head.weight"
# Moments, spread, misfits twice, features, Newton's steps, calibration, guard.
NUM_EXCHANGES = 7 + STEPS
COUNTED = ("confusion", "misfits", "descriptors", "sizes")  # arrays of counts alone
# Arrays without negative numbers: these, and numbers of samples by class and of newcomers.
NOT_NEGATIVE = (*COUNTED, "counts", "count")
SHARES = ("loss", "corrected", "clients")  # arrays of shares, from 0 to 1
GAIN = "gain"  # an array of shares of inputs, from -1 to 1
NOT_MOVED = (*COUNTED, *SHARES, GAIN)  # arrays with limits of their own
# Arrays of answers, each with its own limit of norms.
SUMMED = ("confusion", "counts", "sums", "squares", "inverse", "count", "sum", "square", "sizes",
          "misfits", "descriptors", "gradient", "hessian", "calibration",
          *SHARES, GAIN)  # fmt: skip
# Of the two regimes, in texts and in the run's files.
REGIME_WORDS = ("label shift explains", "label shift does not explain")
REGIME_NAMES = ("label-shift", "other-inputs")
RULE_PHASE = "rule"  # of the last round: the exchanges
PLAYED = "played"  # entry of the last round's report: what the rule means for played newcomers
SMALLEST_MISFIT_DEVIATION = 1e-3  # clients get μ in float32, whose error is up to 1e-6
NOT_CUT = (1, 2)  # entries of the BN descriptors: H(q) after, fall of the entropy


class Unanswered(Exception):
    """No training client answered an exchange, or none had what it asks for."""


class Auto(FedAvg):
    """Makes the rule from what the training clients answer. `alpha` is the share of harmed clients
    that the guard allows among clients like the played ones (`allowed_share`). `network` is the
    clients' one, by which the server knows batch normalisation from other layers with running
    statistics; without it all such layers count as batch normalisation."""

    requires = Requirement(
        "auto",
        "answer `query.moments` and the exchanges that follow, sums over held-out samples",
        offers=AutoClient.exchanges,
    )
    report_last_round = True
    persistent_attributes = ("source", "rule")
    limit_groups = SUMMED

    candidates = CANDIDATES
    plays = PLAYS
    alpha = setting(
        0.0,
        "share of clients that a choice may harm by over a point; at least 1/(N + 1) with N "
        "training clients; 0 stands for 0.025, or for 1/(N + 1) of 19 to 38 clients, and for 0.05 "
        "of clients whose inputs other proportions of classes do not explain",
        "[0, 1)",
        evaluation=True,
    )

    def __init__(
        self,
        *,
        network: nn.Module | Mapping[str, nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if isinstance(network, Mapping):  # all clients have the same one
            network = next(iter(network.values()), None)
        self.network = network
        self.source: Arrays = {}
        self.rule: Arrays = {}
        candidates_of(self.candidates, True)  # raises ValueError for an unknown name

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model. Raises ValueError if it has no head to count the classes by."""
        if HEAD_WEIGHT not in arrays:
            raise ValueError(
                f"auto counts the classes by {HEAD_WEIGHT!r}, which the clients do not send; leave "
                "the head's weights unfrozen and without a parametrization such as weight_norm, "
                "and use `fedapps.client_app('auto')`"
            )
        return arrays

    def check_training_clients(self, count: int) -> None:
        """Raise ValueError if α is smaller than so many clients can certify."""
        smallest = smallest_alpha(count)
        alpha = allowed_share(self.alpha, count)
        if alpha < smallest:
            enough = math.ceil(1 / alpha) - 1
            raise ValueError(
                f"auto.alpha is {alpha:g}; {count} training clients certify no share of "
                f"harmed clients below 1/({count} + 1): write "
                f"auto.alpha={rounded_up(smallest):g}, or take {enough} training clients"
            )

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model. A rule that was made before is dropped: it belongs to the model before.

        Raises ValueError in the first round as `check_training_clients`."""
        if self.round == 1:
            self.check_training_clients(len(self.training_nodes()))
        self.drop_rule()
        return dict.fromkeys(nodes, arrays)

    def drop_rule(self) -> None:
        """Leave all clients FedAvg's model."""
        self.source = {}
        self.rule = {}

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model; in the last round, and where a run is served, also statistics and rule.

        A finished run is served with the rule of its training clients, whichever nodes are
        connected."""
        if self.round < self.num_rounds:  # the model is going to change
            return dict.fromkeys(nodes, arrays)
        training = self.training_nodes()
        if training and not self.serves_finished_run:
            with self.preparing(RULE_PHASE, len(training)):
                self.make_rule(arrays, training)
        if self.rule:
            arrays = arrays | prefixed(SOURCE, self.source) | prefixed(RULE, self.rule)
        return dict.fromkeys(nodes, arrays)

    def make_rule(self, arrays: Arrays, training: Sequence[Node]) -> None:
        """Set `source` and `rule` from the training clients' answers. There is no rule, and the run
        says so, if nobody answers, or if all had too few samples to play newcomers.

        Raises ValueError as `check_training_clients`."""
        if not self.num_rounds:
            self.check_training_clients(len(training))
        self.drop_rule()
        if not self.plays:
            self.say("no rule", "nobody plays newcomers (plays=0), so clients keep FedAvg's model")
            return
        try:
            exchanges = _Exchanges(self, arrays, training)
            source, sources_by_fold = exchanges.statistics()
            rule = exchanges.calibrated_rule(sources_by_fold)
        except Unanswered as error:
            self.say("no rule", f"{error}; clients keep FedAvg's model")
            return
        self.source = source
        self.rule = {name: array.astype(np.float32) for name, array in rule.arrays().items()}

    def training_stopped(self, num_rounds: int) -> None:
        """Say that there is no rule, if the round that ended training was evaluated before."""
        if self.plays and not self.rule and self.round < self.num_rounds:
            self.say(
                "no rule",
                f"training ended after round {self.round} of {num_rounds}, and the last round "
                "makes the rule; clients keep FedAvg's model; "
                "`fedapps run --from RUN --methods auto` makes it",
            )

    def say(self, what: str, text: str) -> None:
        """Log why clients keep FedAvg's model; the run's `errors.log` and the end of `fedapps run`
        say it, too."""
        log(WARNING, "auto: %s", text)
        if self.on_failure is not None:
            self.on_failure(f"auto: {what}\n{text}")


def _summed(answers: Sequence[Arrays]) -> Arrays:
    """The sums over the answers by name; there is one answer at least."""
    total = {name: np.zeros(array.shape) for name, array in answers[0].items()}
    for answer in answers:
        for name in total:
            total[name] += answer[name]
    return total


class _Exchanges:
    """The exchanges of one calibration, in their order."""

    def __init__(self, strategy: Auto, arrays: Arrays, training: Sequence[Node]) -> None:
        self.strategy = strategy
        self.arrays = arrays
        self.training = list(training)
        self.classes = len(arrays[HEAD_WEIGHT])
        self.has_statistics = bool(sizes_with_statistics(arrays))
        if strategy.network is not None:
            self.has_statistics = bool(batch_norms(strategy.network))
        self.blocks = blocks_of(arrays, arrays[HEAD_WEIGHT].shape)
        self.candidates = candidates_of(strategy.candidates, self.has_statistics)
        self.features = num_features(self.has_statistics, self.candidates)
        self.num_folds = min(FOLDS, len(self.training))
        self.folds = {node: i % self.num_folds for i, node in enumerate(self.training)}
        self.number = 0  # of the present exchange
        log(INFO, "auto: candidates none, %s", ", ".join(self.candidates))

    def statistics(self) -> tuple[Arrays, list[Arrays]]:
        """K, π, M, S, B and which classes have samples, as ``confusion``, ``prior``, ``means``,
        ``within``, ``between`` and ``present``: of all clients, and by fold of the clients outside
        it.

        A client's residual is from the class means of the other folds. A novel client's samples are
        not among those of M either."""
        classes = self.classes
        shapes: dict[str, tuple[int, ...]] = {
            "confusion": (classes, classes),
            "counts": (classes,),
            "sums": (classes, self.blocks.width),
            "squares": (self.blocks.entries,),
        }
        answers = self.answers("moments", self.to_all(self.arrays), shapes)
        moments = self.sums_by_set(answers, "counts")
        del answers  # those of the next exchange are as large
        if not moments[0]["counts"].any():
            raise Unanswered("no training client has a held-out sample with a label")
        means = [class_means(sums["counts"], sums["sums"]) for sums in moments]
        sent = {}
        for node in self.training:
            sent[node] = self.arrays | {f"{SOURCE}/means": means[1 + self.folds[node]]}
        shapes = {"squares": (self.blocks.entries,), "inverse": (1,), "clients": (1,)}
        spreads = self.sums_by_set(self.answers("spread", sent, shapes), "clients")
        sources = []
        for sums, m, spread in zip(moments, means, spreads, strict=True):
            within = within_classes(sums["counts"], m, sums["squares"], self.blocks)
            clients = max(float(spread["clients"][0]), 1.0)
            squares = spread["squares"] / clients
            inverse = float(spread["inverse"][0]) / clients
            source = {
                "confusion": conditional(sums["confusion"]),
                "prior": prior(sums["confusion"].sum(0)),
                "means": m,
                "within": within,
                "between": between_clients(squares, inverse, within, self.blocks),
                PRESENT: sums["counts"] > 0,
            }
            sources.append({name: array.astype(np.float32) for name, array in source.items()})
        return sources[0], sources[1:]

    def sums_by_set(self, answers: Sequence[tuple[Node, Arrays]], counted: str) -> list[Arrays]:
        """The sums over all clients, then over those outside each fold. Where all that hold out
        samples, by the array `counted`, are of one fold, its sums are those of all."""
        sets = []
        for fold in (None, *range(self.num_folds)):
            members = [answer for node, answer in answers if self.folds[node] != fold]
            if not any(answer[counted].any() for answer in members):
                members = [answer for _, answer in answers]
            sets.append(_summed(members))
        return sets

    def calibrated_rule(self, sources: Sequence[Arrays]) -> Rule:
        """The rule, one exchange after another; the newcomers of each fold are judged by the
        statistics of the others."""
        rule = self.with_misfits(sources)
        rule = self.with_features(rule)
        coefficients = self.fitted(rule)
        rule = self.with_calibration(rule, coefficients)
        return self.with_guard(rule, coefficients)

    def with_misfits(self, sources: Sequence[Arrays]) -> Rule:
        """μ_l, σ_l, t, the largest size and the ranges of the descriptors, from the statistics by
        fold."""
        layers = (len(self.blocks.sizes),)
        sent = {}
        for node in self.training:
            sent[node] = self.arrays | prefixed(SOURCE, sources[self.folds[node]])
        shapes: dict[str, tuple[int, ...]] = {
            "count": (1,),
            "sum": layers,
            "square": layers,
            "sizes": (len(SIZES),),
        }
        answers = self.answers("misfit", sent, shapes)
        # A client that has not answered has no newcomers, and is asked nothing more about them.
        self.training = [node for node, _ in answers]
        sums = _summed([answer for _, answer in answers])
        if not sums["count"][0]:
            raise Unanswered(
                f"no training client has played a newcomer with unchanged inputs; each needs "
                f"{SIZES[0]} held-out samples: raise held-out, or take fewer clients"
            )
        mean = sums["sum"] / max(sums["count"][0], 1)
        spread = deviation(sums["count"], sums["sum"], sums["square"])
        # A layer that sees no batch of the inputs has the same T_l for all, up to rounding of μ.
        spread = np.maximum(spread, SMALLEST_MISFIT_DEVIATION)
        size = np.array(largest_size(sums["sizes"]))
        rule = Rule(misfit_mean=mean, misfit_deviation=spread, largest_size=size)
        cut = np.ones((len(self.candidates), DESCRIPTORS), bool)
        for place, name in enumerate(self.candidates):
            if name not in FOR_LABEL_SHIFT:
                cut[place, NOT_CUT] = False
        shapes = {"misfits": (MISFITS.bins,), "descriptors": (*cut.shape, DESCRIPTOR_VALUES.bins)}
        counts, clients = self.sum("misfit", self.to_all(self.sent(rule)), shapes)
        if not counts["misfits"].any():
            raise Unanswered("no client that has played newcomers has answered query.misfit again")
        limit = misfit_limit(counts["misfits"], clients)
        return replace(
            rule, misfit_limit=np.array(limit), ranges=ranges(counts["descriptors"], cut)
        )

    def with_features(self, rule: Rule) -> Rule:
        """The mean and the deviation of each feature of a changed sample."""
        shape = (len(self.candidates), self.features - 1)
        shapes: dict[str, tuple[int, ...]] = {"count": shape[:1], "sum": shape, "square": shape}
        sums, _ = self.sum("play", self.to_all(self.sent(rule)), shapes)
        count = sums["count"][:, None]
        mean = sums["sum"] / np.maximum(count, 1)
        spread = deviation(count, sums["sum"], sums["square"])
        return replace(rule, feature_mean=mean, feature_deviation=spread)

    def fitted(self, rule: Rule) -> np.ndarray:
        """θ (J, 1 + folds, 2, F): of all clients, then without each fold, by Newton's steps.

        A client's sums enter the sets whose fold is not its own, and are asked at these alone."""
        num_sets = 1 + self.num_folds
        theta = np.zeros((len(self.candidates), num_sets, 2, self.features))
        size = 2 * self.features
        shape = (len(self.candidates), self.num_folds, size)
        shapes: dict[str, tuple[int, ...]] = {"gradient": shape, "hessian": (*shape, size)}
        for _ in range(STEPS):
            sent = {}
            for node in self.training:
                sent[node] = self.sent(rule) | {COEFFICIENTS: theta[:, self.sets_of(node)]}
            gradient = np.zeros((len(self.candidates), num_sets, size))
            hessian = np.zeros((*gradient.shape, size))
            for node, answer in self.answers("play", sent, shapes):
                sets = self.sets_of(node)
                gradient[:, sets] += answer["gradient"]
                hessian[:, sets] += answer["hessian"]
            for place in np.ndindex(gradient.shape[:2]):
                # A false Hessian could point the step anywhere.
                curvature = semidefinite(hessian[place])
                theta[place] = newton_step(theta[place], gradient[place], curvature)
        return theta

    def sets_of(self, node: Node) -> list[int]:
        """The sets of coefficients that the node's newcomers enter: 0 of all clients, 1 + f without
        the fold f."""
        return [0, *(1 + f for f in range(self.num_folds) if f != self.folds[node])]

    def out_of_fold(self, rule: Rule, coefficients: np.ndarray) -> dict[Node, Arrays]:
        """By node the rule with the coefficients to which it has not contributed."""
        sent = {}
        for node in self.training:
            without = coefficients[:, 1 + self.folds[node]]
            sent[node] = self.sent(replace(rule, coefficients=without))
        return sent

    def with_calibration(self, rule: Rule, coefficients: np.ndarray) -> Rule:
        """α and β by regime and candidate, of win rates out of fold; θ of all clients."""
        shape = (REGIMES, len(self.candidates))
        shapes = {"calibration": (*shape, WIN_RATES.bins, 6)}
        sums, _ = self.sum("play", self.out_of_fold(rule, coefficients), shapes)
        calibration = np.zeros((*shape, 4))
        for place in np.ndindex(shape):
            calibration[place] = calibrated(sums["calibration"][place])
        return replace(rule, calibration=calibration, coefficients=coefficients[:, 0])

    def with_guard(self, rule: Rule, coefficients: np.ndarray) -> Rule:
        """k by regime, of choices out of fold."""
        by_k = (REGIMES, len(GUARDS))
        shapes = {"loss": by_k, "corrected": by_k, GAIN: by_k, "clients": (REGIMES,)}
        sums, _ = self.sum("guard", self.out_of_fold(rule, coefficients), shapes)
        guard = []
        played = []
        for regime in range(REGIMES):
            k = self.guard_of(regime, sums)
            guard.append(k)
            if sums["clients"][regime]:
                played.append(self.played_by(regime, k, sums))
        self.strategy.now.report[PLAYED] = played
        return replace(rule, guard=np.array(guard))

    def guard_of(self, regime: int, sums: Arrays) -> float:
        """k of the regime; where there is none the run says why."""
        clients = float(sums["clients"][regime])
        alpha = allowed_share(self.strategy.alpha, clients, regime)
        corrected = sums["corrected"][regime]
        words = REGIME_WORDS[regime]
        if clients and not able_in(regime, self.candidates).any():
            return 0.0  # there is nothing to choose from
        # Without running statistics proportions are corrected, of few small newcomers, and of most
        # clients with more inputs: harm among all newcomers says little of these.
        k = least_guard(
            sums["loss"][regime], corrected, clients, alpha, of_corrected=not self.has_statistics
        )
        if k != NEVER:
            return k
        if clients and smallest_alpha(clients) <= alpha and not corrected.any():
            log(
                INFO,
                "auto: none of the newcomers that %s gets a correction, so nothing is known of the "
                "harm of one; clients like them keep FedAvg's model",
                words,
            )
            return NEVER
        if clients:
            noun = "training client" if clients == 1 else "training clients"
            text = (
                f"{clients:g} {noun} played newcomers that {words}, and no choice "
                f"for them keeps alpha={alpha:g}; clients like them keep FedAvg's model; raise "
                "auto.alpha, or take more training clients"
            )
        else:
            text = (
                f"no training client played newcomers that {words}; clients like them keep "
                "FedAvg's model; for such newcomers raise auto.plays, or name changes of "
                "the inputs in auto.changes (of tokens your own ones)"
            )
        self.strategy.say("no choice", text)
        return NEVER

    def played_by(self, regime: int, k: float, sums: Arrays) -> dict[str, Any]:
        """What k means for the played newcomers of a regime, as means over their clients; it is
        logged, too. So candidates and other settings can be compared without any novel client."""
        clients = float(sums["clients"][regime])

        def mean(name: str) -> float:
            if k == NEVER:
                return 0.0
            place = int(np.searchsorted(GUARDS, k))
            return float(sums[name][regime, place]) / clients

        log(
            INFO,
            "auto: of the newcomers that %s (%g clients), %.0f %% get a correction; all of them "
            "gain %.2f points in the mean, %.1f %% are harmed",
            REGIME_WORDS[regime],
            clients,
            100 * mean("corrected"),
            100 * mean(GAIN),
            100 * mean("loss"),
        )
        return {
            "regime": REGIME_NAMES[regime],
            "clients": clients,
            "guard": None if k == NEVER else k,
            "corrected": mean("corrected"),
            "gain": mean(GAIN),
            "harmed": mean("loss"),
        }

    def sent(self, rule: Rule) -> Arrays:
        """What is known of the rule, as arrays of a message."""
        return prefixed(RULE, rule.arrays())

    def to_all(self, arrays: Arrays) -> dict[Node, Arrays]:
        """The same arrays for each training node."""
        return dict.fromkeys(self.training, arrays)

    def sum(
        self,
        query: str,
        sent: Mapping[Node, Arrays],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[Arrays, int]:
        """The sums of the clients' arrays of these shapes, and the number of clients. Raises
        `Unanswered` without a reply."""
        answers = self.answers(query, sent, shapes)
        return _summed([answer for _, answer in answers]), len(answers)

    def answers(
        self,
        query: str,
        sent: Mapping[Node, Arrays],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> list[tuple[Node, Arrays]]:
        """The clients' arrays of these shapes, bounded. Raises `Unanswered` without a reply."""
        replies = self.replies(query, sent, shapes)
        answers = [dict(reply.arrays) for reply in replies]
        self.bound(answers)
        return list(zip([reply.node for reply in replies], answers, strict=True))

    def bound(self, answers: list[Arrays]) -> None:
        """Bound what one client's answer can count. No count is negative, so that a liar can take
        none from others. A loss is a share, so that a liar can hide only its own, and a newcomer
        without a correction has none; `protect` turns on the limits of
        `strategies.core.count_limits` for all others."""
        for answer in answers:
            for name in NOT_NEGATIVE:
                if name in answer:
                    answer[name] = np.maximum(answer[name], 0)
            for share in SHARES:
                if share in answer:
                    answer[share] = np.clip(answer[share], 0, 1)
            if "loss" in answer:
                corrected = answer["corrected"]
                answer["loss"] = np.minimum(answer["loss"], corrected)
                answer[GAIN] = np.clip(answer[GAIN], -corrected, corrected)
        if self.strategy.max_update_ratio:
            self._bound_by_others(answers)
        if self.strategy.max_examples_ratio:
            for name in COUNTED:
                if name in answers[0]:
                    counts = [answer[name] for answer in answers]
                    counts = bounded_totals(counts, self.strategy.max_examples_ratio)
                    for answer, bounded in zip(answers, counts, strict=True):
                        answer[name] = bounded

    def _bound_by_others(self, answers: list[Arrays]) -> None:
        """Limit each answer by its distance from the others."""
        ratio = self.strategy.max_update_ratio
        if "confusion" in answers[0]:
            confusions = bounded_confusions([answer["confusion"] for answer in answers], ratio)
            for answer, confusion in zip(answers, confusions, strict=True):
                answer["confusion"] = confusion
        if "misfits" in answers[0]:
            misfits = without_highest([answer["misfits"] for answer in answers])
            for answer, histogram in zip(answers, misfits, strict=True):
                answer["misfits"] = histogram
        sums = []
        for answer in answers:
            sums.append({name: a for name, a in answer.items() if name not in NOT_MOVED})
        for answer, moved in zip(answers, bounded_deviations(sums, ratio), strict=True):
            answer.update(moved)

    def replies(
        self,
        query: str,
        sent: Mapping[Node, Arrays],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> list[Any]:
        """The clients' valid replies. Raises `Unanswered` if there is none."""
        self.number += 1
        log(INFO, "auto: query.%s, exchange %s of %s", query, self.number, NUM_EXCHANGES)
        like = {name: np.zeros(shape) for name, shape in shapes.items()}
        replies = self.strategy.exchange(
            f"query.{query}", sent, like=dict.fromkeys(self.training, like)
        )
        if not replies:
            raise Unanswered(f"no training client has answered query.{query}")
        return replies
