"""An exception as text: the last frames of its traceback, and the same in one line.

A server gets this text from clients. It is bounded and printable, and nobody evaluates it."""

import re
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_tb
from types import TracebackType

from fedapps.common.external_code import PACKAGES

MAX_FRAMES = 5
MAX_LINES = 30
MAX_LINE = 500  # characters
LIBRARIES = ("torch", "flwr", "ray")  # their frames hide the caller's
DECORATORS = ("contextlib", "functools")  # of the standard library: they call the package's code
MACHINERY = (
    "fedapps.engines",
    "fedapps.node",
    "fedapps.clientapp",
    "clients.core.privacy",
    "clients.core.cohort",
)
SENTENCES = (ValueError, RuntimeError, OSError)  # how the package refuses something
WITHHELD = "its text is withheld under differential privacy"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Refusal(ValueError):
    """Privacy does not allow the answer. The sentence reveals nothing of the samples, so the server
    gets it in full."""


def described(error: BaseException, *, private: bool = False, where: str = "") -> str:
    """The last frames of the traceback, without those of torch, Flower and Ray, then the error.

    A `private` client's text has no message and no code: type, file and line. It says that the
    message is withheld, and `where` to read it. A `Refusal` is its sentence."""
    message = _line(error)
    if isinstance(error, Refusal):
        return message
    frames = _frames(error.__traceback__)[-MAX_FRAMES:]
    if private:
        frames = [_without_code(frame) for frame in frames[-1:]]
        message = f"{type(error).__name__}: {WITHHELD}"
        if where:
            message += f", {where}"
    return "".join(StackSummary.from_list(frames).format()) + message


def _without_code(frame: FrameSummary) -> FrameSummary:
    """A frame's place alone: no line of code, and no path of the client's machine."""
    file = "/".join(Path(frame.filename).parts[-2:])
    return FrameSummary(file, frame.lineno, frame.name, line="")


def is_sentence(error: BaseException) -> bool:
    """Whether the package itself raised the error to say something: no other code is involved."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [_root(module) for module in modules]
    # The package raised it: the last frame is its own. Frames of libraries may be between.
    raised_here = {*packages[-1:]} <= {*PACKAGES}
    called_by_known = {*packages[:-1]} <= {*PACKAGES, *LIBRARIES, *DECORATORS}
    return isinstance(error, SENTENCES) and raised_here and called_by_known


def error_line(error: BaseException, *, private: bool = False) -> str:
    """The error in one line, with its place unless the package itself raised it."""
    return _line(error) if is_sentence(error) else brief(described(error, private=private))


def brief(text: str) -> str:
    """A described error in one line: the error, and the last place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    places = list(PLACE.finditer(text))
    if not places:
        return lines[-1]
    return f"{lines[-1]} ({places[-1]['file']}:{places[-1]['line']})"


def cause_of(text: str) -> str:
    """A text that is the same for equal failures: the last place and the error's type, else the
    whole text."""
    places = PLACE.findall(text)
    if not places:
        return text
    error_type = text.splitlines()[-1].partition(":")[0]
    return f"{places[-1]} {error_type}"


def printable(text: object) -> str:
    """`text` in one line, with control and other unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def without_escape_codes(text: str) -> str:
    """`text` with control characters escaped, other than line breaks and tabs: a terminal that
    shows the file would obey them."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def bounded(text: str) -> str:
    """The last lines of a received text: bounded, and each line printable."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(printable(line[:MAX_LINE]) for line in lines[-MAX_LINES:])


def _line(error: BaseException) -> str:
    try:
        message = " ".join(str(error).split())
    except Exception:  # of a foreign class
        message = ""
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _frames(trace: TracebackType | None) -> list[FrameSummary]:
    """The frames outside of libraries and of the machinery around clients, else the last frame."""
    all_frames: list[FrameSummary] = []
    useful_frames: list[FrameSummary] = []
    for frame, line in walk_tb(trace):
        summary = FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
        all_frames.append(summary)
        module = str(frame.f_globals.get("__name__", ""))
        if _root(module) not in LIBRARIES and not module.startswith(MACHINERY):
            useful_frames.append(summary)
    return useful_frames or all_frames[-1:]


def _root(module: str) -> str:
    return module.partition(".")[0]
