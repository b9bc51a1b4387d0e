"""What the body of a subclass defines: each name that the base would never read is refused.

Python takes any name. A method called ``agregate`` would leave the base's ``aggregate`` in place,
and train another method under the class's own name."""

from collections.abc import Mapping
from difflib import get_close_matches
from inspect import getattr_static
from types import FunctionType
from typing import Any

CLOSE = 0.85  # similarity of two names from which on one is taken for a misspelling of the other
PLAIN = (bool, int, float, str)  # types of a declaration


class Renamed:
    """An attribute under its former name. Reading and writing it raise AttributeError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, former: str) -> None:
        self.former = former

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise self._error(instance)

    def __set__(self, instance: object, value: Any) -> None:
        raise self._error(instance)

    def _error(self, instance: object) -> AttributeError:
        return AttributeError(
            f"{type(instance).__name__}: {self.former!r} is now called {self.name!r}"
        )


def check_members(
    cls: type, declared: Mapping[str, Any], renamed: Mapping[str, str] | None = None
) -> None:
    """Check the public names in the body of `cls` against those of its bases.

    `declared` are settings, which may have any name. `renamed` maps former names to present ones.
    Raises TypeError for a former name, for a new name close to one of a base, and for a value of
    another type than the base's."""
    known = _public_names(cls)
    for name, value in vars(cls).items():
        if name.startswith("_") or name in declared:
            continue
        if name in known and not isinstance(_inherited(cls, name), Renamed):
            _check_type(cls, name, value)
            continue
        _check_name(cls, name, known, renamed or {})


def _public_names(cls: type) -> set[str]:
    """The public names of the bases."""
    names: set[str] = set()
    for base in cls.__mro__[1:]:
        names |= {name for name in vars(base) if not name.startswith("_")}
    return names


def _inherited(cls: type, name: str) -> Any:
    """What the bases hold under `name`, not bound."""
    for base in cls.__mro__[1:]:
        if name in vars(base):
            return getattr_static(base, name)
    raise AttributeError(name)


def _check_name(cls: type, name: str, known: set[str], renamed: Mapping[str, str]) -> None:
    """Raise TypeError for a name that the bases do not have, but seem to be meant by."""
    present = renamed.get(name)
    if name in known:
        former = _inherited(cls, name)
        if isinstance(former, Renamed):
            present = former.name
    if present is not None:
        raise TypeError(f"{cls.__name__} defines {name!r}, which is now called {present!r}")
    # Few people misspell the first letter.
    likely = sorted(other for other in known if other[0] == name[0])
    close = get_close_matches(name, likely, n=1, cutoff=CLOSE)
    if close:
        raise TypeError(
            f"{cls.__name__} defines {name!r}, which is never called; did you mean {close[0]!r}? "
            f"Else give it another name, such as '_{name}'"
        )


def _check_type(cls: type, name: str, value: Any) -> None:
    """Raise TypeError for a value of another kind than the bases' under that name."""
    base = _inherited(cls, name)
    wanted = ""
    if isinstance(base, classmethod):
        if not isinstance(value, classmethod):
            wanted = "a class method (@classmethod)"
    elif isinstance(base, FunctionType):
        if not callable(value) and not hasattr(value, "__get__"):
            wanted = "a method"
    elif isinstance(base, tuple) and not isinstance(value, property):
        texts = _holds_texts(cls, name)
        if not isinstance(value, tuple) or (texts and not all(map(_is_text, value))):
            wanted = "a tuple of texts" if texts else "a tuple"
        if wanted and _is_text(value):
            wanted += f", such as ({value!r},)"
    elif isinstance(base, PLAIN) and not isinstance(value, property) and not _fits(value, base):
        wanted = f"a {type(base).__name__}"
    if wanted:
        raise TypeError(f"{cls.__name__} sets {name!r} to {value!r:.80}; it must be {wanted}")


def _fits(value: Any, base: Any) -> bool:
    """Whether a declaration has the type of the base's."""
    if isinstance(base, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(base)


def _holds_texts(cls: type, name: str) -> bool:
    """Whether a base annotates the name as a tuple of texts."""
    for base in cls.__mro__[1:]:
        if vars(base).get("__annotations__", {}).get(name) == tuple[str, ...]:
            return True
    return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
