"""A round that would bring NaN or infinity into the model is undone.

The strategy returns to its state before the round."""

from logging import WARNING
from typing import Any

from flwr.common.logger import log

from strategies.core.replies import finite
from strategies.core.run_state import StatefulStrategy, own_copy

# Keys of `PersonalizedStrategy.state` whose values are not part of the model.
NOT_OF_MODEL = ("round", "undone-rounds", "sizes", "privacy", "token", "column-encoder", "late")


def snapshot(strategy: StatefulStrategy) -> dict[str, Any]:
    """The state before `aggregate`, with copies of all that it may change."""
    return own_copy(strategy.state(), in_place=strategy.in_place)


def model_is_finite(strategy: StatefulStrategy) -> bool:
    """Whether the model's part of the state holds no NaN or infinity."""
    model = {key: value for key, value in strategy.state().items() if key not in NOT_OF_MODEL}
    return finite(model)


def undo_round(strategy: StatefulStrategy, before: dict[str, Any]) -> None:
    """Return to the state `before` the round; the privacy budget of the round stays spent."""
    log(WARNING, "round %s is undone: NaN or infinity would come into the model", strategy.round)
    strategy.forget()
    state = before | {"handout": strategy.published_models}
    if strategy.privacy:
        state["privacy"] = strategy.privacy.state()
    strategy.load_state(state)
    strategy.undone_rounds += 1
    strategy.now.report["undone"] = True
