"""An exception as text: the last frames of its traceback, and the same in one line.

A server gets this text from clients. It is bounded and printable, and nobody evaluates it."""

import re
from itertools import islice
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_tb
from types import TracebackType

from fedapps.common.external_code import PACKAGES

MAX_FRAMES, MAX_LINES, MAX_LINE = 5, 30, 500
LIBRARIES = ("torch", "flwr", "ray")  # their frames hide the caller's
MACHINERY = (
    "fedapps.engines",
    "fedapps.node",
    "fedapps.clientapp",
    "clients.core.privacy",
    "clients.core.cohort",
)
SENTENCES = (ValueError, RuntimeError, OSError)  # how the package refuses something
PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Refusal(ValueError):
    """Privacy does not allow the answer. The sentence reveals nothing of the samples, so the server
    gets it in full."""


def described(error: BaseException, *, private: bool = False) -> str:
    """The last frames of the traceback, without those of torch, Flower and Ray, then the error.

    A `private` client's text has no message and no code: type, file and line. A `Refusal` is its
    sentence."""
    message = _line(error)
    if isinstance(error, Refusal):
        return message
    frames = _frames(error.__traceback__)[-MAX_FRAMES:]
    if private:
        frames = [
            FrameSummary("/".join(Path(f.filename).parts[-2:]), f.lineno, f.name, line="")
            for f in frames[-1:]
        ]
        message = type(error).__name__
    return "".join(StackSummary.from_list(frames).format()) + message


def is_sentence(error: BaseException) -> bool:
    """Whether the package itself raised the error to say something: no other code is involved."""
    roots = [
        _root(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)
    ]
    known = {*roots[:-1]} <= {*PACKAGES, *LIBRARIES} and {*roots[-1:]} <= {*PACKAGES}
    return isinstance(error, SENTENCES) and known


def error_line(error: BaseException, *, private: bool = False) -> str:
    """The error in one line, with its place unless the package itself raised it."""
    return _line(error) if is_sentence(error) else brief(described(error, private=private))


def brief(text: str) -> str:
    """A described error in one line: the error, and the last place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = list(PLACE.finditer(text))
    where = f" ({places[-1]['file']}:{places[-1]['line']})" if places else ""
    return f"{lines[-1]}{where}" if lines else ""


def cause_of(text: str) -> str:
    """What equal failures have in common: the last place and the type, else the whole text."""
    places = PLACE.findall(text)
    return f"{places[-1]} {text.splitlines()[-1].partition(':')[0]}" if places else text


def printable(text: object) -> str:
    """`text` in one line, with control and other unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def bounded(text: str) -> str:
    """The last lines of a text that somebody sent: bounded, and each line printable."""
    lines = [line for line in text.splitlines() if line.strip()][-MAX_LINES:]
    return "\n".join(printable(line[:MAX_LINE]) for line in lines)


def _line(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())
    except Exception:  # of a foreign class
        message = ""
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _frames(trace: TracebackType | None) -> list[FrameSummary]:
    """The frames that say something, else the last one."""
    everything = list(walk_tb(trace))
    telling = [
        (frame, line)
        for frame, line in everything
        if _root(name := str(frame.f_globals.get("__name__", ""))) not in LIBRARIES
        and not name.startswith(MACHINERY)
    ]
    return [
        FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in telling or islice(reversed(everything), 1)
    ]


def _root(module: str) -> str:
    return module.partition(".")[0]
