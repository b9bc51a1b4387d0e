"""Differential privacy on the client: the update clipped as one, then noised if it is local.

Clipping is Flower's own `fixedclipping_mod`: it takes the change of all arrays of a train reply
together, and train messages here have the shape that it wants (one record each way, the same
names). Flower's `LocalDpMod` is not used: it fixes ε and δ of one message and draws from numpy's
global generator."""

import os
from typing import Protocol

import numpy as np
import scipy  # its modules load where they are used
from flwr.app import Context, Message
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from clients.arrays import Arrays, from_record, to_record
from partitions.seeds import seed_of

NOISE = "dp-local-noise"  # key of a train message's config: deviation of the client's noise
GENERATORS = ("system", "seeded")


class Normal(Protocol):
    """What draws standard normal numbers."""

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Independent draws of the given shape."""
        ...


class SystemGenerator:
    """Standard normal numbers from the operating system's secure source."""

    def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
        """Φ⁻¹ of uniform multiples of 2⁻⁵², shifted by half a step off 0 and 1."""
        count = int(np.prod(size))
        whole = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(12)
        return scipy.special.ndtri((whole.astype(float) + 0.5) / 2.0**52).reshape(size)


def generator(name: str, seed: int, purpose: str, *counters: int) -> Normal:
    """The system's generator, or for tests one that the seed decides.

    Raises ValueError for an unknown name."""
    if name not in GENERATORS:
        raise ValueError(f"unknown dp-generator {name!r}; known: {', '.join(GENERATORS)}")
    if name == "system":
        return SystemGenerator()
    return np.random.default_rng(seed_of(seed, purpose, *counters))


def noised(arrays: Arrays, deviation: float, source: Normal) -> Arrays:
    """The arrays + N(0, deviation²) in every entry, dtypes kept."""
    return {
        name: (a + deviation * source.standard_normal(a.shape)).astype(a.dtype)
        for name, a in arrays.items()
    }


def private(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod for train messages: clip and noise the reply if the server asks for it."""
    config = dict(message.content.config_records.get("config") or {})
    if KEY_CLIPPING_NORM not in config:
        return call_next(message, context)
    reply = fixedclipping_mod(message, context, call_next)
    if reply.has_error() or not config.get(NOISE):
        return reply
    options = context.run_config
    client = int(context.node_config.get("partition-id", context.node_id))
    source = generator(
        str(options["dp-generator"]),
        int(options["seed"]),
        "dp-local",
        int(str(config["server-round"])),
        client,
    )
    for name, record in reply.content.array_records.items():
        deviation = float(str(config[NOISE]))
        reply.content[name] = to_record(noised(from_record(record), deviation, source))
    return reply
