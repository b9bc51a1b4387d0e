"""Seeds: every random draw comes from a generator of (seed, purpose, counters)."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fedapps.common.settings import WHOLE, setting

SEED = setting(0, "seed of the split, the model, the sampling and every batch", WHOLE)


def seed_of(seed: int, purpose: str, *counters: int) -> int:
    """A different seed for every (seed, purpose, counters); the same on every machine."""
    text = "/".join(map(str, (seed, purpose, *counters)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's global generators, of the CPU and of GPUs in use.

    (`torch.manual_seed` takes a millisecond: it records its caller's stack for unused devices.)"""
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Within the context `seed` determines torch's draws; then the CPU generator's state is
    restored."""
    import torch

    before = torch.get_rng_state()
    seed_torch(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def drawing_beside_torch(seed: int) -> Iterator[None]:
    """Within the context `seed` determines the draws of Python's and numpy's global generators,
    from which a user's code may draw; then their states are restored.

    They never stay seeded: what draws noise from them afterwards, as Flower's mods do, must not
    draw what the server knows."""
    before = random.getstate()
    before_of_numpy = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_of_numpy)


@contextmanager
def drawing_anywhere(seed: int) -> Iterator[None]:
    """`drawing` and `drawing_beside_torch` together, for a user's function that splits data."""
    with drawing(seed), drawing_beside_torch(seed):
        yield
