"""A run begins with a strategy as its constructor made it, however often it ran before.

Before a further run the constructor is called again with the same arguments, on the emptied
object. So no list of attributes has to be kept, which a method's author could forget to extend.
What was assigned to the strategy between its runs, or before the first one, is not the run's, and
stays."""

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
        self._args, self._options = args, options
        self._constructed = dict(vars(strategy))
        self._assigned: dict[str, Any] = {}
        self._has_run = False
        self._left: dict[str, Any] | None = None  # the attributes after the last run

    def begin(self, strategy: Any) -> None:
        """Call it when a run begins, before anything of the strategy changes."""
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
        """Call it when a run has ended: what is assigned from here on comes from outside."""
        self._left = dict(vars(strategy))


class Rebuilding(ABCMeta):
    """The class of strategy classes: each object knows its `construction`."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Construct the object, as any class does."""
        strategy = super().__call__(*args, **options)
        strategy.construction = Construction(strategy, args, options)
        return strategy
