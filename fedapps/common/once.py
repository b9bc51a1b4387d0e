"""Sentences of the log that a process says once, since `data` and `model` run for every message."""

import threading
from logging import INFO

from flwr.common.logger import log

_said: set[str] = set()
_lock = threading.Lock()


def say_once(text: str, level: int = INFO) -> None:
    """Log the text unless this process has done so."""
    with _lock:
        new = text not in _said
        _said.add(text)
    if new:
        log(level, text)
