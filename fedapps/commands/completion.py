"""Completion of what a user types: experiments, settings with their choices, methods, lists.

Nothing of torch or Flower is loaded."""

from collections.abc import Callable, Iterable


def arguments(incomplete: str) -> list[str]:
    """An experiment, ``key=``, or ``key=value`` for keys that have names or choices."""
    from fedapps.settings.config import declared
    from fedapps.settings.experiments import experiments

    key, equals, value = incomplete.partition("=")
    known = declared()
    if not equals:
        words = list(experiments())
        for name in known:
            words.append(f"{name}=")
        return _starting(incomplete, words)
    choices: Iterable[str] = ()
    # A setting with a range has a text in place of a tuple of choices.
    if key in known and isinstance(known[key].values, tuple):
        choices = known[key].values
    # These settings also take a path or a reference, so they declare no choices.
    choices = _names().get(key, choices)
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
