"""Completion of what a user types: experiments, settings with their choices, methods, lists.

Nothing of torch or Flower is loaded."""

from collections.abc import Callable, Iterable


def arguments(incomplete: str) -> list[str]:
    """An experiment, ``key=``, or ``key=value`` for keys that have names or choices."""
    from fedapps.settings.experiments import experiments
    from fedapps.settings.schema import declared

    key, typed, value = incomplete.partition("=")
    known = declared()
    if not typed:
        return _starting(incomplete, [*experiments(), *(f"{key}=" for key in known)])
    values = known[key].values if key in known else ()
    choices = _names().get(key, values if isinstance(values, tuple) else ())
    return [f"{key}={choice}" for choice in _starting(value, choices)]


def methods(incomplete: str) -> list[str]:
    """The last of several methods that are separated by commas."""
    from fedapps.methods import METHODS

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _starting(last, METHODS)]


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one of the names."""
    return lambda incomplete: _starting(incomplete, names)


def _names() -> dict[str, Iterable[str]]:
    from clients.models import MODELS
    from partitions.datasets.loading import DATASETS
    from partitions.rules.registry import PARTITIONS

    return {"dataset": DATASETS, "partition": PARTITIONS, "model": MODELS}


def _starting(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed)]
