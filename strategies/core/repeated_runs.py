"""Each run of a strategy begins with the state that its constructor made.

Before a second run the object's attributes are removed, and the constructor is called again with
the same arguments. So a method's author needs no list of attributes to reset. Attributes that were
assigned from outside, before the first run or between runs, keep their values."""

from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

_MISSING = object()


def _reassigned(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of `now` that are other objects than `before`."""
    return {name: value for name, value in now.items() if value is not before.get(name, _MISSING)}


class Construction:
    """How a strategy was constructed, and what was assigned to it from outside since."""

    def __init__(self, strategy: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._args = args
        self._options = options
        self._constructed = dict(vars(strategy))
        self._assigned: dict[str, Any] = {}  # attributes that were assigned from outside
        self._has_run = False
        self._left: dict[str, Any] | None = None  # the attributes after the last run

    def begin(self, strategy: Any) -> None:
        """Call this when a run begins, before the run changes the strategy."""
        now = dict(vars(strategy))
        if not self._has_run:
            self._has_run = True
            self._assigned = _reassigned(self._constructed, now)
            return
        if self._left is not None:
            self._assigned |= _reassigned(self._left, now)
        self._left = None
        vars(strategy).clear()
        strategy.__init__(*self._args, **self._options)
        vars(strategy).update(self._assigned)
        strategy.construction = self

    def end(self, strategy: Any) -> None:
        """Call this when a run has ended: later assignments come from outside."""
        self._left = dict(vars(strategy))


class Rebuilding(ABCMeta):
    """The metaclass of strategies: it stores each object's `construction`."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Construct the object, as any class does."""
        strategy = super().__call__(*args, **options)
        strategy.construction = Construction(strategy, args, options)
        return strategy
