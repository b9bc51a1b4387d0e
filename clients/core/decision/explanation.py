"""What a client says of its decision: numbers for reports, and a sentence."""

from collections.abc import Sequence

import numpy as np

from clients.core.decision.choice import (
    KEEP,
    LABEL_SHIFT,
    LEAST_INPUTS_WON,
    NEVER,
    Decision,
    Rule,
    able_in,
    word_of,
)
from clients.core.evaluation import Choice

NONE = "none"
KEPT = "Kept the global model"


def name_of(choice: int, candidates: Sequence[str]) -> str:
    """The name of a choice, KEEP or the place of a candidate."""
    return NONE if choice == KEEP else word_of(candidates[choice])


def choice_metrics(choice: int, candidates: Sequence[str]) -> dict[str, float]:
    """1 for the choice, KEEP or the place of a candidate, and 0 for the others."""
    metrics = {"chosen-none": float(choice == KEEP)}
    for place, name in enumerate(candidates):
        metrics[f"chosen-{word_of(name)}"] = float(choice == place)
    return metrics


def decision_metrics(rule: Rule, decision: Decision, candidates: Sequence[str]) -> dict[str, float]:
    """T, t, k, the choice and its expected gain; d and w of the candidate that is expected to gain
    most."""
    assert rule.misfit_limit is not None and rule.guard is not None
    metrics = {
        "misfit": decision.misfit,
        "misfit-limit": float(rule.misfit_limit),
        "guard": float(rule.guard[decision.regime]),
        "changed": 0.0,
        "win-rate": 0.0,
        "expected-gain": 0.0,
    }
    if able_in(decision.regime, candidates).any():
        first = _most_promising(decision, candidates)
        metrics["changed"] = float(decision.changed[first])
        metrics["win-rate"] = float(decision.win_rates[first])
    if decision.choice != KEEP:
        metrics["expected-gain"] = float(_expected_gains(decision)[decision.choice])
    return metrics | choice_metrics(decision.choice, candidates)


def explained(rule: Rule, decision: Decision, candidates: Sequence[str], n: int) -> Choice:
    """The choice for n inputs, and why, in one sentence."""
    assert rule.misfit_limit is not None and rule.guard is not None
    inputs = _words_on_inputs(decision, float(rule.misfit_limit))
    gains = _expected_gains(decision)
    if decision.choice != KEEP:
        name = name_of(decision.choice, candidates)
        changed, gain = decision.changed[decision.choice], gains[decision.choice]
        return Choice(
            name,
            f"Chose {name}: {inputs}, and of the {100 * changed:.0f} % of predictions that it "
            f"changes, {100 * gain:.1f} points are expected to be won",
        )
    if rule.guard[decision.regime] == NEVER:
        why = "the newcomers that clients have played allow no correction"
        return Choice(NONE, f"{KEPT}: {inputs} and {why}")
    first = _most_promising(decision, candidates)
    is_able = able_in(decision.regime, candidates)[first]
    if not is_able or gains[first] * n < LEAST_INPUTS_WON:
        return Choice(NONE, f"{KEPT}: {inputs} and no correction is expected to help")
    return Choice(
        NONE,
        f"{KEPT}: {inputs} and the {100 * gains[first]:.1f} points that "
        f"{name_of(first, candidates)} is expected to win are too uncertain",
    )


def _expected_gains(decision: Decision) -> np.ndarray:
    """d w (J,) of each candidate, as a share of the inputs."""
    return decision.changed * decision.win_rates


def _most_promising(decision: Decision, candidates: Sequence[str]) -> int:
    """The place of the candidate of the regime that is expected to gain most; 0 without any."""
    able = able_in(decision.regime, candidates)
    return int(np.where(able, _expected_gains(decision), -np.inf).argmax())


def _words_on_inputs(decision: Decision, limit: float) -> str:
    """What T and its limit say of the inputs."""
    # One decimal, or as many as tell T and its limit apart.
    decimals = 1 if f"{decision.misfit:.1f}" != f"{limit:.1f}" else 3
    misfit = f"{decision.misfit:.{decimals}f}"
    if decision.regime == LABEL_SHIFT:
        return (
            "inputs look like training, up to the proportions of the classes "
            f"(T {misfit}, at most {limit:.{decimals}f})"
        )
    return f"inputs look unlike training (T {misfit} over {limit:.{decimals}f})"
