"""SIGTERM and Ctrl-C end every command in order: the command says so, and ends what it started.

Both raise KeyboardInterrupt in the main thread. A command exits with 130 after Ctrl-C and with 143
after SIGTERM, as shells report them, whatever is raised while it ends. A library that sets
handlers, such as Ray, is called inside `handlers_kept`."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

HANDLED = (signal.SIGINT, signal.SIGTERM)
ACTION_BYTES = 256  # more than a sigaction structure of any system has
GUARD_SECONDS = 0.001
Handler = Callable[[int, FrameType | None], Any]
Result = TypeVar("Result")

_interrupts: list[int] = []  # the numbers of the signals that have interrupted the command


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def exit_code(error: KeyboardInterrupt) -> int:
    """With what a command exits after the interrupt: 128 + the signal's number."""
    number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
    return 128 + number


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A command's handler of both signals."""
    _interrupts.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def interrupts() -> int:
    """How many signals have interrupted the command."""
    return len(_interrupts)


def raise_swallowed(before: int = 0) -> None:
    """Raise the interrupt again if more than `before` signals came. Python drops what is raised in
    a destructor, and libraries raise other errors instead, such as numpy while it is imported."""
    if len(_interrupts) > before:
        raise Terminated if _interrupts[-1] == signal.SIGTERM else KeyboardInterrupt


def call_command(command: Callable[[], Result]) -> Result:
    """What the command returns. If a signal comes meanwhile, raises SystemExit with 128 + its
    number, whatever the command makes of it; prints "stopped" unless the command exits so itself.
    A signal that the process ignores, or that has another handler, is left to it."""
    if not _in_main_thread():
        return command()
    former = _handlers()
    is_part = interrupt in former.values()  # of a command, as after its import
    if not is_part:
        _interrupts.clear()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    try:
        _set({number: interrupt for number, handler in former.items() if handler in usual})
        result = command()
        raise_swallowed()
        return result
    except BaseException as error:
        if not _interrupts:
            raise
        _set(dict.fromkeys(HANDLED, signal.SIG_DFL))  # the next one ends the process at once
        status = 128 + _interrupts[-1]
        if not isinstance(error, SystemExit) or error.code != status:
            with suppress(OSError, ValueError):  # nobody reads, or the stream is closed
                print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(status) from None
    finally:
        _set(former)
        if not is_part:  # a later run in this process is another command
            _interrupts.clear()


@contextmanager
def sigterm_raises(handler: Handler = signal.default_int_handler) -> Iterator[None]:
    """Inside, `handler` is called at SIGTERM if that would have ended the process at once."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Afterwards the handlers are those of before, whatever was set inside."""
    if not _in_main_thread():
        yield
        return
    handlers = _handlers()
    try:
        yield
    finally:
        _set(handlers)


@contextmanager
def guarded_in_c(number: int = signal.SIGTERM) -> Iterator[None]:
    """Inside, a handler that a C library sets is replaced by the former one within milliseconds.

    Python's `signal` does not see such a handler. It would be called until the library returns to
    the main thread: Ray's prints a dump and aborts."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sigaction"):  # Windows
        yield
        return
    over = threading.Event()
    former = _action(libc, number)

    def guard() -> None:
        while not over.wait(GUARD_SECONDS):
            if _action(libc, number).raw != former.raw:
                libc.sigaction(number, former, None)

    thread = threading.Thread(target=guard, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _action(libc: ctypes.CDLL, number: int) -> "ctypes.Array[ctypes.c_char]":
    """The system's structure with what the process does at the signal."""
    action = ctypes.create_string_buffer(ACTION_BYTES)
    libc.sigaction(number, None, action)
    return action


@contextmanager
def delayed() -> Iterator[None]:
    """Inside, neither signal interrupts the main thread; the first that came is handled at the end,
    also if an error is raised."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = _handlers()
    try:
        _set({number: later for number, handler in handlers.items() if callable(handler)})
        yield
    finally:
        _set(handlers)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def blocked(numbers: Iterable[int] = HANDLED) -> Iterator[None]:
    """Inside, the signals wait, also in a process that is started there, and in it for ever."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in HANDLED}


def _set(handlers: Mapping[int, Any]) -> None:
    """Set all handlers before one of them is called."""
    with blocked():
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    """Only the main thread may set handlers."""
    return threading.current_thread() is threading.main_thread()
