"""The choice of a correction: the expected gain of each candidate, and a guard.

A client whose T = max_l (T_l − μ_l) / σ_l is at most t is in the regime of label shift, others are
outside, where no correction of label shift is a candidate. Of candidate j's changed samples w̃_j is
the mean of P(candidate) − P(FedAvg). Its win rate is w_j = α + β w̃_j, with α and β of the regime,
and its expected gain d_j w_j, with d_j the share of changed predictions. The choice is

    argmax d_j w_j  among  w_j √(n d_j) ≥ k,  n d_j w_j ≥ ½,

else FedAvg: half an input must be expected to be won, so that w_j > 0, and k bounds the share of
harmed clients; without running statistics also their share of those that get a correction."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clients.core.decision.evidence import BASE, CANDIDATE
from clients.core.decision.logistic import probabilities

LABEL_SHIFT, OUTSIDE = 0, 1  # regimes
KEEP = -1  # the choice of FedAvg
LEAST_INPUTS_WON = 0.5
HARM_LIMIT = 0.05  # share of later clients that a choice may harm
HARM_LIMIT_OUTSIDE = 0.1  # the same, of clients whose inputs label shift does not explain
CUT = 5.0  # deviations of a feature from its mean over plays
NEVER = 1e6  # a k that no client reaches: nothing is chosen
UNBOUNDED = 1e6  # an end of a descriptor's range that cuts nothing

# What the network's normalisation allows: corrected networks, and those among them that may be
# chosen beside methods such as tent.
BBSE = "bbse"
MEAN_MATCHING = "mean-matching"
FOR_LABEL_SHIFT = (BBSE, MEAN_MATCHING)  # these correct proportions alone
BN_WEIGHTS = {"bn0": 0.0, "bn16": 16.0, "bn64": 64.0}  # weight of the training statistics
EM_VIEWS = {"bn0-em": "bn0", "bn16-em": "bn16"}  # corrected by EM, on top of these
VIEWS = (*FOR_LABEL_SHIFT, *BN_WEIGHTS, *EM_VIEWS)
VIEWS_WITHOUT_STATISTICS = (*FOR_LABEL_SHIFT, "em")
CANDIDATES = (*FOR_LABEL_SHIFT, *BN_WEIGHTS)
DESCRIPTORS = 4


def smallest_alpha(clients: float) -> float:
    """1 / (N + 1): no smaller α can be certified by N clients, even if none is harmed."""
    return 1 / (clients + 1)


def allowed_share(alpha: float, clients: float, regime: int = LABEL_SHIFT) -> float:
    """The α that N clients keep in a regime: the one that was written, or by default (0) half of
    the regime's limit, so that few samples of later clients exceed it. Where label shift explains
    the inputs, and N clients certify no less, it is the least that they certify, up to the
    limit."""
    if alpha > 0:
        return alpha
    if regime == OUTSIDE:
        return HARM_LIMIT_OUTSIDE / 2
    return min(max(HARM_LIMIT / 2, smallest_alpha(clients)), HARM_LIMIT)


def rounded_up(alpha: float) -> float:
    """To four digits behind the point, for a sentence that says what to write."""
    return math.ceil(alpha * 1e4) / 1e4


def names_in(text: str) -> tuple[str, ...]:
    """The names in a list with commas, none twice."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def word_of(name: str) -> str:
    """What results call a candidate: "NAME" of "module:NAME"."""
    return name.rpartition(":")[2]


def methods_among(names: Iterable[str]) -> tuple[str, ...]:
    """The candidates that are methods of their own, such as tent, and none of `CANDIDATES`."""
    return tuple(name for name in names if name not in CANDIDATES)


def views_of(has_statistics: bool, candidates: Sequence[str]) -> tuple[str, ...]:
    """The corrected networks that are compared, those of methods among the candidates last."""
    fixed = VIEWS if has_statistics else VIEWS_WITHOUT_STATISTICS
    return fixed + methods_among(candidates)


def num_features(has_statistics: bool, candidates: Sequence[str]) -> int:
    """F of a changed sample's features, the constant included."""
    return 4 + len(views_of(has_statistics, candidates)) - 1 + DESCRIPTORS + 1


def candidates_of(names: str, has_statistics: bool) -> tuple[str, ...]:
    """The candidates among `names`, separated by commas, that the network allows. Raises ValueError
    if none is left, and for two that results could not tell apart."""
    given = names_in(names)
    for word, count in Counter(map(word_of, given)).items():
        if count > 1:
            raise ValueError(f"auto.candidates has {count} called {word!r}; rename the own one")
    able = tuple(name for name in given if has_statistics or name not in BN_WEIGHTS)
    if not able:
        raise ValueError(
            f"auto.candidates is {names!r}, which needs batch normalisation with running "
            "statistics; add mean-matching, or take a model that has it: convnet-bn, "
            "torchvision.models:resnet18"
        )
    return able


@dataclass(frozen=True)
class Case:
    """A client's inputs, real or played: n, T_l (L,), descriptors (J, 4), and by candidate the
    evidence (m_j, E) of its changed samples and, where labels are known, who is right (m_j,)."""

    n: int
    misfits: np.ndarray
    descriptors: np.ndarray
    evidence: Sequence[np.ndarray]
    outcomes: Sequence[np.ndarray] = ()
    unchanged: bool = False

    @property
    def changed(self) -> np.ndarray:
        """d (J,), the share of the predictions that each candidate changes."""
        return np.array([len(rows) for rows in self.evidence]) / self.n

    def inputs_lost(self, candidate: int) -> int:
        """The inputs that the candidate gets wrong and FedAvg right, less the reverse."""
        if candidate == KEEP:
            return 0
        outcomes = self.outcomes[candidate]
        return int((outcomes == BASE).sum() - (outcomes == CANDIDATE).sum())

    def harmed(self, candidate: int) -> bool:
        """Whether it loses more than a point."""
        return 100 * self.inputs_lost(candidate) > self.n


@dataclass(frozen=True)
class Rule:
    """All numbers of the rule, for J candidates. Those that are not yet known are None.

    μ, σ (L,) and t of the misfit; the `largest_size` of newcomers, in inputs; `ranges` (J, 4, 2) of
    the descriptors; `feature_mean` and `feature_deviation` (J, F − 1); θ (J, 2, F); `calibration`
    (2, J, 4): α, β and the range of w̃ by regime; k (2,) by regime."""

    misfit_mean: np.ndarray | None = None
    misfit_deviation: np.ndarray | None = None
    misfit_limit: np.ndarray | None = None
    largest_size: np.ndarray | None = None
    ranges: np.ndarray | None = None
    feature_mean: np.ndarray | None = None
    feature_deviation: np.ndarray | None = None
    coefficients: np.ndarray | None = None
    calibration: np.ndarray | None = None
    guard: np.ndarray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Rule":
        """The rule of these arrays, by the names of the attributes with hyphens."""
        return cls(**{name.replace("-", "_"): np.asarray(a, float) for name, a in arrays.items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The numbers that are known, by the names that messages have."""
        known = {name: a for name, a in vars(self).items() if a is not None}
        return {name.replace("_", "-"): np.asarray(a, np.float64) for name, a in known.items()}

    def misfit(self, case: Case) -> float:
        """T."""
        assert self.misfit_mean is not None and self.misfit_deviation is not None
        return float(((case.misfits - self.misfit_mean) / self.misfit_deviation).max())

    def regime(self, case: Case) -> int:
        """Whether label shift alone explains the inputs: T ≤ t."""
        assert self.misfit_limit is not None
        return LABEL_SHIFT if self.misfit(case) <= self.misfit_limit else OUTSIDE

    def raw_features(self, case: Case, candidate: int) -> np.ndarray:
        """Evidence and cut descriptors (m, F − 1) of the changed samples."""
        assert self.ranges is not None
        low, high = self.ranges[candidate].T
        descriptor = np.clip(case.descriptors[candidate], low, high)
        evidence = case.evidence[candidate]
        return np.hstack([evidence, np.tile(descriptor, (len(evidence), 1))])

    def features(self, case: Case, candidate: int) -> np.ndarray:
        """Standardised features (m, F), cut to ±5, and the constant 1."""
        assert self.feature_mean is not None and self.feature_deviation is not None
        raw = self.raw_features(case, candidate)
        centred = raw - self.feature_mean[candidate]
        standardised = np.clip(centred / self.feature_deviation[candidate], -CUT, CUT)
        return np.hstack([standardised, np.ones((len(raw), 1))])

    def raw_win_rate(self, case: Case, candidate: int) -> float:
        """w̃: the mean of P(candidate) − P(FedAvg); 0 where no prediction changes."""
        assert self.coefficients is not None
        features = self.features(case, candidate)
        if not len(features):
            return 0.0
        p = probabilities(features, self.coefficients[candidate])
        return float((p[:, 0] - p[:, 1]).mean())

    def win_rates(self, case: Case) -> np.ndarray:
        """w (J,) = α + β w̃, with w̃ cut to the range of plays."""
        assert self.calibration is not None
        regime = self.regime(case)
        rates = []
        for candidate, (alpha, beta, low, high) in enumerate(self.calibration[regime]):
            raw = self.raw_win_rate(case, candidate)
            rates.append(alpha + beta * np.clip(raw, low, high))
        return np.array(rates)


def best(
    n: int, changed: np.ndarray, win_rates: np.ndarray, able: np.ndarray, ks: np.ndarray
) -> np.ndarray:
    """The choice (K,) by each k (K,) among candidates that are `able` (J,), by n, d (J,) and
    w (J,); else KEEP."""
    eligible = win_rates * np.sqrt(n * changed) >= ks[:, None]
    eligible &= able & (n * changed * win_rates >= LEAST_INPUTS_WON)
    first = np.where(eligible, changed * win_rates, -np.inf).argmax(1)
    return np.where(eligible.any(1), first, KEEP)


def able_in(regime: int, candidates: Sequence[str]) -> np.ndarray:
    """Which candidates (J,) the regime has."""
    return np.array([regime == LABEL_SHIFT or name not in FOR_LABEL_SHIFT for name in candidates])


@dataclass(frozen=True)
class Decision:
    """The choice for a client, KEEP or the place of a candidate, and the numbers behind it."""

    choice: int
    misfit: float
    regime: int
    changed: np.ndarray
    win_rates: np.ndarray


def decide(rule: Rule, case: Case, candidates: Sequence[str]) -> Decision:
    """The rule's choice for a client."""
    assert rule.guard is not None
    regime = rule.regime(case)
    rates = rule.win_rates(case)
    k = rule.guard[regime : regime + 1]
    choice = int(best(case.n, case.changed, rates, able_in(regime, candidates), k)[0])
    return Decision(choice, rule.misfit(case), regime, case.changed, rates)


class ByGuard(NamedTuple):
    """What each k of a grid means for a played newcomer of a regime: whether it gets a correction,
    whether that harms it, and what it gains as a share of its inputs; all (K,)."""

    regime: int
    corrected: np.ndarray
    harmed: np.ndarray
    gain: np.ndarray


def choices_by_k(rule: Rule, case: Case, candidates: Sequence[str], grid: np.ndarray) -> ByGuard:
    """What each k of the grid means for a played newcomer."""
    regime = rule.regime(case)
    rates = rule.win_rates(case)
    choices = best(case.n, case.changed, rates, able_in(regime, candidates), grid)
    harmed = np.zeros(len(grid))
    gain = np.zeros(len(grid))
    for choice in np.unique(choices):
        harmed[choices == choice] = case.harmed(int(choice))
        gain[choices == choice] = -case.inputs_lost(int(choice)) / case.n
    return ByGuard(regime, (choices != KEEP).astype(float), harmed, gain)


# Played newcomers as arrays, which a client keeps between messages


def cases_to_arrays(cases: Sequence[Case], num_candidates: int) -> dict[str, np.ndarray]:
    """The cases as arrays; the changed samples of all cases and candidates follow each other."""
    if not cases:
        return {"n": np.zeros(0, int)}
    evidence: list[np.ndarray] = []
    outcomes: list[np.ndarray] = []
    for case in cases:
        evidence += case.evidence
        outcomes += case.outcomes
    arrays = {}
    for name in ("n", "unchanged", "misfits", "descriptors"):
        arrays[name] = np.stack([getattr(case, name) for case in cases])
    counts = np.array([len(rows) for rows in evidence], int)
    arrays["counts"] = counts.reshape(len(cases), num_candidates)
    arrays["evidence"] = np.concatenate(evidence)
    arrays["outcomes"] = np.concatenate(outcomes)
    return arrays


def cases_of(arrays: Mapping[str, np.ndarray]) -> list[Case]:
    """The cases of these arrays."""
    if not len(arrays["n"]):
        return []
    ends = np.cumsum(arrays["counts"].ravel())[:-1]
    evidence = np.split(arrays["evidence"], ends)
    outcomes = np.split(arrays["outcomes"], ends)
    size = arrays["counts"].shape[1]
    cases = []
    for place, n in enumerate(arrays["n"]):
        own = slice(place * size, (place + 1) * size)
        case = Case(
            int(n),
            arrays["misfits"][place],
            arrays["descriptors"][place],
            evidence[own],
            outcomes[own],
            bool(arrays["unchanged"][place]),
        )
        cases.append(case)
    return cases
