"""Where the noise of a strategy around this package's ones, as of Flower's privacy wrappers, is too
small: it is made for the plain mean over all clients that were asked."""

from collections.abc import Sequence

from strategies.core.replies import Update


def too_small_noise(
    updates: Sequence[Update], num_asked: int, weighted_by: str, robust: str
) -> dict[str, str]:
    """Why the mean of these updates reveals more of a client than that noise hides, a sentence for
    each kind of reason. `weighted_by` is the key of the weights, `robust` the rule in place of the
    mean, or "none"."""
    reasons: dict[str, str] = {}
    weights = [update.num_examples for update in updates]
    if weights and min(weights) < max(weights):
        reasons["weights"] = (
            f"the mean weighs clients by {weighted_by}, here {min(weights):g} to {max(weights):g}; "
            "let every client send 1 under another name, and give this name as weighted_by_key="
        )
    if len(updates) < num_asked:
        reasons["dropped"] = (
            f"{len(updates)} of {num_asked} replies are valid, so that each counts more"
        )
    if robust != "none":
        reasons["robust"] = f"robust is {robust!r}, which is no mean; leave it out"
    return reasons
