"""Seeds: every random draw comes from a generator of its own (seed, purpose, counters)."""

import hashlib


def seed_of(seed: int, purpose: str, *counters: int) -> int:
    """A seed of its own for every (seed, purpose, round, client); the same on every machine."""
    text = "/".join(map(str, (seed, purpose, *counters)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
