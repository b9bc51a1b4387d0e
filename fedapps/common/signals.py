"""SIGTERM and Ctrl-C end every command in order: the command says so, and ends what it started.

Both raise KeyboardInterrupt in the main thread. A command exits with 130 after Ctrl-C and with 143
after SIGTERM, as shells report them. A library that sets handlers, such as Ray, is called inside
`handlers_kept`."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def exit_code(error: KeyboardInterrupt) -> int:
    """With what a command exits after the interrupt: 128 + the signal's number."""
    number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    return 128 + number


def terminate(number: int, frame: FrameType | None) -> None:
    """A command's handler of SIGTERM."""
    raise Terminated


@contextmanager
def sigterm_raises(handler: Handler = signal.default_int_handler) -> Iterator[None]:
    """Inside, `handler` is called at SIGTERM if that would have ended the process at once."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Afterwards the handlers are those of before, whatever was set inside."""
    if not _in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def delayed() -> Iterator[None]:
    """Inside, neither signal interrupts the main thread; the first that came is handled at the end,
    also if an error is raised."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _in_main_thread() -> bool:
    """Only the main thread may set handlers."""
    return threading.current_thread() is threading.main_thread()
