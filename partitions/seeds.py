"""Seeds: every random draw comes from a generator of its own (seed, purpose, counters)."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from partitions.settings import WHOLE, setting

SEED = setting(0, "seed of the split, the model, the sampling and every batch", WHOLE)


def seed_of(seed: int, purpose: str, *counters: int) -> int:
    """A seed of its own for every (seed, purpose, round, client); the same on every machine."""
    text = "/".join(map(str, (seed, purpose, *counters)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """Let `seed` decide what is drawn next from torch's own generators, of the CPU and of GPUs in
    use.

    (`torch.manual_seed` takes down its caller's stack for each kind of device that has not begun:
    a millisecond a call.)"""
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Within it `seed` decides what is drawn; after it the CPU's generator goes on as if nothing
    had been."""
    import torch

    before = torch.get_rng_state()
    seed_torch(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
