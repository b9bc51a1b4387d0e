"""Threads of torch's linear algebra: a run computes on one, in every process that takes part.

Clients share a machine, so each process has one core. Sums on several threads round differently, so
one thread also gives the same bits in all engines. Importing the package changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager


def use_one_thread() -> None:
    """Let this process compute on one thread from now on: for processes that the package starts."""
    import torch  # some commands do without it

    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context torch computes on one thread; then on as many as before.

    A thread that computes for a run enters it itself. Torch passes the number on to a new thread
    only with its first query, and a matrix product before that uses all cores."""
    import torch

    before = torch.get_num_threads()  # a query
    if before == 1:  # also inside of another context, which may end earlier in another thread
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
