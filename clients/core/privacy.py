"""Differential privacy on the client: what a reply may contain under the run's `dp`.

A train reply holds only the change, clipped as one vector and, if the privacy is local, noised.
Integers and booleans, such as a normalisation layer's count of steps, return as they were sent. Of
its properties a client sends the public ones. Flower's `fixedclipping_mod` fails on a change of
zeros and passes one that is not finite; its `LocalDpMod` fixes ε and δ of one message and draws
from numpy's global generator. So neither is used."""

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import scipy  # its modules load where they are used
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable

from clients.core.arrays import Arrays, as_type, from_record, is_counter, to_record
from clients.core.protocol import CAPABILITIES, UNLABELED
from fedapps.common.errors import Refusal
from fedapps.common.seeds import seed_of
from fedapps.common.settings import setting

NOISE = "dp-local-noise"  # key of a train message's config: deviation of the client's noise
MODES = ("none", "local", "central")
GENERATORS = ("system", "seeded")
DP_GENERATOR = setting(
    "system",
    "where noise and sampling come from; seeded: repeatable, for tests",
    GENERATORS,
    beside="dp!=none",
)
EVERYTHING = "everything"
ROUNDING = 1 - 1e-6  # tolerance for a server's noise that is just enough
COVERS = (EVERYTHING, "model-updates")
# Properties that reveal nothing of the samples, but that a training client has no labels.
PUBLIC = {
    CAPABILITIES,
    "client",
    "novel",
    UNLABELED,
    "model",
    "input-size",
    "error",
}  # without a text
VOLUNTEERED = {"prototype"}  # reveals a sub-population; see `FedEmbedClient`


class SystemGenerator:
    """Random numbers from the operating system's secure source."""

    def random(self, size: int) -> np.ndarray:
        """Uniform multiples of 2⁻⁵²."""
        whole = np.frombuffer(os.urandom(8 * size), np.uint64) >> np.uint64(12)
        return whole.astype(float) / 2.0**52

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Φ⁻¹ of uniform multiples of 2⁻⁵², shifted by half a step off 0 and 1."""
        uniform = self.random(int(np.prod(size))) + 2.0**-53
        return scipy.special.ndtri(uniform).reshape(size)


Source = SystemGenerator | np.random.Generator


def generator(name: str, seed: int, purpose: str, *counters: int) -> Source:
    """The system's generator, or for tests one with a seed.

    Raises ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"unknown dp-generator {name!r}; known: {', '.join(GENERATORS)}")
    if name == "system":
        return SystemGenerator()
    return np.random.default_rng(seed_of(seed, purpose, *counters))


def clipped(change: Arrays, norm: float) -> Arrays:
    """min(1, C / ‖Δ‖₂) Δ, all arrays as one vector; zeros for a Δ that is not finite."""
    length = sum(float(np.square(a, dtype=float).sum()) for a in change.values()) ** 0.5
    if not np.isfinite(length):
        return {name: np.zeros_like(a) for name, a in change.items()}
    scale = min(1.0, norm / length) if length else 1.0
    return {name: scale * a for name, a in change.items()}


def noised(arrays: Arrays, deviation: float, source: Source) -> Arrays:
    """The arrays + N(0, deviation²) in every entry, dtypes kept."""
    return {
        name: (a + deviation * source.standard_normal(a.shape)).astype(a.dtype)
        for name, a in arrays.items()
    }


def private(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    options: Mapping[str, Any] | None = None,
) -> Message:
    """Flower mod for every message: reduces the reply to what `options` allow, by default the run's
    configuration.

    Raises ValueError, which reaches the server as an error reply, for a message whose answer the
    privacy does not cover, and for local privacy if the server names too little noise."""
    options = context.run_config if options is None else options
    if options.get("dp", "none") == "none":
        return call_next(message, context)
    action = message.metadata.message_type
    everything = options.get("dp-covers", EVERYTHING) == EVERYTHING
    if everything and action not in ("query", "train"):
        raise Refusal(f"dp-covers is 'everything', and the answer to {action!r} is not covered")
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    if action == "query":
        names = PUBLIC if everything else PUBLIC | VOLUNTEERED
        for key, record in reply.content.config_records.items():
            reply.content[key] = ConfigRecord({n: v for n, v in record.items() if n in names})
    elif action != "evaluate":
        for key in reply.content.metric_records:
            reply.content[key] = MetricRecord({"num-examples": 1})
    if action == "train":
        _protect(message, reply, context, options)
    return reply


@lru_cache
def least_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """z for (ε, δ) if a user's update is replaced in every round: Gaussian mechanisms of
    sensitivity 2C and noise zC, whose μ² = (2 / z)² add up."""
    from dp_accounting import get_sigma_gaussian  # slow, and few clients need it

    return 2 * rounds**0.5 * float(get_sigma_gaussian(epsilon, delta)) * ROUNDING


def promised_multiplier(options: Mapping[str, Any]) -> float:
    """The least z that a run with local privacy promises its clients."""
    if epsilon := float(options.get("dp-epsilon", 0)):  # z follows from it
        return least_multiplier(epsilon, float(options["dp-delta"]), int(options["rounds"]))
    return float(options["dp-noise-multiplier"])


def local_noise(message: Message, options: Mapping[str, Any]) -> float:
    """Deviation of the noise that the server asks a client to add to its change.

    Raises ValueError if that is less than what the run promises."""
    config = settings_of(message)
    deviation, least = float(str(config.get(NOISE, 0))), promised_multiplier(options)
    if not 0 < deviation < math.inf or not deviation >= least * float(options["dp-clip"]):
        raise Refusal(f"dp is 'local', but the server asked for noise of {deviation:g}")
    return deviation


def settings_of(message: Message) -> dict[str, Any]:
    """All that the message's config records hold."""
    return {k: v for r in message.content.config_records.values() for k, v in r.items()}


def _protect(
    message: Message, reply: Message, context: Context, options: Mapping[str, Any]
) -> None:
    """Clip the reply's change, by the client's setting, and add noise if it is local."""
    deviation = local_noise(message, options) if options["dp"] == "local" else 0.0
    client = int(context.node_config.get("partition-id", context.node_id))
    source = generator(
        str(options["dp-generator"]),
        int(options["seed"]),
        "dp-local",
        int(str(settings_of(message).get("server-round", 0))),
        client,
    )
    sent: Arrays = {}
    for record in message.content.array_records.values():
        sent |= from_record(record)
    ((key, record),) = reply.content.array_records.items()  # two would be clipped separately
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
