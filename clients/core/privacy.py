"""Differential privacy on the client: replies are reduced to what the run's `dp` allows.

A train reply holds only the change of the model. The change is clipped as one vector; with local
privacy the client adds noise. Integers and booleans, such as a normalisation layer's count of
steps, return as they were sent. A client sends only its public properties.

Flower's own mods are not used. `fixedclipping_mod` fails on a change of zeros and passes a change
that is not finite. `LocalDpMod` fixes ε and δ of one message, and draws from numpy's global
generator."""

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import scipy  # its modules load where they are used
from flwr.app import ConfigRecord, Context, Message, MetricRecord

from clients.core.arrays import Arrays, as_type, from_record, is_counter, to_record
from clients.core.protocol import (
    CAPABILITIES,
    CLIENT,
    INPUT_SIZE,
    LOCAL_NOISE,
    MODEL,
    NOVEL,
    NUM_EXAMPLES,
    START_ERROR,
    UNLABELED,
    round_of,
)
from fedapps.common.errors import Refusal
from fedapps.common.seeds import seed_of
from fedapps.common.settings import setting

MODES = ("none", "local", "central")
GENERATORS = ("system", "seeded")
DP_GENERATOR = setting(
    "system",
    "random generator of noise and sampling; seeded: repeatable, for tests",
    GENERATORS,
    beside="dp!=none",
)
EVERYTHING = "everything"
COVERS = (EVERYTHING, "model-updates")
# Tolerance for rounding, where the server's noise is exactly the least that suffices.
ROUNDING = 1 - 1e-6
# Properties that reveal nothing about the samples, except that a training client has no labels.
PUBLIC = {CAPABILITIES, CLIENT, NOVEL, UNLABELED, MODEL, INPUT_SIZE, START_ERROR}
# Reveals the sub-population of a user who volunteers; see `FedEmbedClient`.
VOLUNTEERED = {"prototype"}


class SystemGenerator:
    """Random numbers from the operating system's secure source."""

    def random(self, size: int) -> np.ndarray:
        """Uniform numbers in [0, 1): multiples of 2⁻⁵²."""
        integers = np.frombuffer(os.urandom(8 * size), np.uint64) >> np.uint64(12)
        return integers.astype(float) / 2.0**52

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Φ⁻¹ of uniform numbers."""
        # Shifted by half a step, since Φ⁻¹(0) is infinite.
        uniform = self.random(int(np.prod(size))) + 2.0**-53
        return scipy.special.ndtri(uniform).reshape(size)


Source = SystemGenerator | np.random.Generator


def generator(name: str, seed: int, purpose: str, *counters: int) -> Source:
    """The operating system's generator for "system", a seeded one for "seeded".

    Raises ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"unknown dp-generator {name!r}; known: {', '.join(GENERATORS)}")
    if name == "system":
        return SystemGenerator()
    return np.random.default_rng(seed_of(seed, purpose, *counters))


def clipped(change: Arrays, norm: float) -> Arrays:
    """min(1, C / ‖Δ‖₂) Δ, all arrays as one vector; zeros for a Δ that is not finite."""
    squared_lengths = [float(np.square(a, dtype=float).sum()) for a in change.values()]
    length = sum(squared_lengths) ** 0.5
    if not np.isfinite(length):
        return {name: np.zeros_like(array) for name, array in change.items()}
    scale = 1.0
    if length > norm:
        scale = norm / length
    return {name: scale * array for name, array in change.items()}


def noised(arrays: Arrays, deviation: float, source: Source) -> Arrays:
    """The arrays with N(0, deviation²) added to every entry, in their dtypes."""
    result: Arrays = {}
    for name, array in arrays.items():
        noise = deviation * source.standard_normal(array.shape)
        result[name] = (array + noise).astype(array.dtype)
    return result


def check_covered(message: Message, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a message whose answer the privacy of `options` does not cover."""
    action = message.metadata.message_type
    if options.get("dp", "none") == "none" or action in ("query", "train"):
        return
    if options.get("dp-covers", EVERYTHING) == EVERYTHING:
        raise Refusal(f"dp-covers is 'everything', and the answer to {action!r} is not covered")


def private(
    reply: Message, message: Message, context: Context, options: Mapping[str, Any]
) -> Message:
    """The reply, reduced to what `options` allow, a run's configuration or stricter ones.

    Raises ValueError for local privacy if the server asks for too little noise."""
    if options.get("dp", "none") == "none" or reply.has_error():
        return reply
    action = message.metadata.message_type
    if action == "query":
        everything = options.get("dp-covers", EVERYTHING) == EVERYTHING
        allowed = PUBLIC if everything else PUBLIC | VOLUNTEERED
        for key, record in reply.content.config_records.items():
            properties = {name: value for name, value in record.items() if name in allowed}
            reply.content[key] = ConfigRecord(properties)
    elif action != "evaluate":
        for key in reply.content.metric_records:
            reply.content[key] = MetricRecord({NUM_EXAMPLES: 1})
    if action == "train":
        _protect(message, reply, context, options)
    return reply


@lru_cache
def least_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """The noise multiplier z that gives (ε, δ) if a user's update is replaced in every round.

    A round is a Gaussian mechanism of sensitivity 2C with noise zC. Over rounds, the
    μ² = (2 / z)² of Gaussian DP add up."""
    from dp_accounting import get_sigma_gaussian  # slow to import, and few clients need it

    return 2 * rounds**0.5 * float(get_sigma_gaussian(epsilon, delta)) * ROUNDING


def promised_multiplier(options: Mapping[str, Any]) -> float:
    """The least noise multiplier z that a run with local privacy promises to its clients."""
    epsilon = float(options.get("dp-epsilon", 0))
    if epsilon:
        return least_multiplier(epsilon, float(options["dp-delta"]), int(options["rounds"]))
    return float(options["dp-noise-multiplier"])


def local_noise(message: Message, options: Mapping[str, Any]) -> float:
    """Standard deviation of the noise that the server asks a client to add to its change.

    Raises ValueError if it is below what the run promises."""
    config = settings_of(message)
    deviation = float(str(config.get(LOCAL_NOISE, 0)))
    least = promised_multiplier(options) * float(options["dp-clip"])
    if not 0 < deviation < math.inf or not deviation >= least:
        raise Refusal(
            f"dp is 'local', but the server asked for noise of {deviation:g}, and this client has "
            f"promised at least {least:g}; give the server the same dp settings and rounds"
        )
    return deviation


def settings_of(message: Message) -> dict[str, Any]:
    """The entries of all config records of the message."""
    settings: dict[str, Any] = {}
    # Flower's `config_records` would check each record anew, which is slow.
    for record in message.content.values():
        if isinstance(record, ConfigRecord):
            settings.update(record)
    return settings


def _protect(
    message: Message, reply: Message, context: Context, options: Mapping[str, Any]
) -> None:
    """Clip the reply's change to `dp-clip`; with local privacy add noise."""
    deviation = local_noise(message, options) if options["dp"] == "local" else 0.0
    client = int(context.node_config.get("partition-id", context.node_id))
    source = generator(
        str(options["dp-generator"]),
        int(options["seed"]),
        "dp-local",
        round_of(settings_of(message)),
        client,
    )
    sent: Arrays = {}
    for record in message.content.array_records.values():
        sent |= from_record(record)
    # Exactly one record: several would be clipped separately.
    ((key, record),) = reply.content.array_records.items()
    trained = from_record(record)
    if trained.keys() != sent.keys():
        raise Refusal(f"a private reply must have the names {sorted(sent)}")
    change: Arrays = {}
    for name, array in trained.items():
        if not (is_counter(array) or is_counter(sent[name])):
            change[name] = array.astype(float) - sent[name]
    change = clipped(change, float(options["dp-clip"]))
    if deviation:
        change = noised(change, deviation, source)
    private_reply: Arrays = {}
    for name, array in trained.items():
        moved = sent[name] + change[name] if name in change else sent[name]
        private_reply[name] = as_type(moved, array.dtype)
    reply.content[key] = to_record(private_reply)
