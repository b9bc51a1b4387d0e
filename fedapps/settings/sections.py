"""Which settings exist, by section: the common ones, those of partition rules, of each method.

They are collected from the classes that declare them. Only this module imports these classes: a run
reads schema.json."""

from dataclasses import replace
from functools import cache
from typing import Any

from fedapps.common.settings import Configured, Setting, key_of
from fedapps.methods import METHODS, Method
from fedapps.settings.run import RunSettings
from partitions.rules.registry import RULES, Options

Settings = dict[str, Setting]


def of_class(cls: type[Configured]) -> Settings:
    """The settings of a class by key."""
    return {key_of(name): setting for name, setting in cls.declared.items()}


@cache
def common() -> Settings:
    """The settings of every run, and of every method that does not set them itself."""
    from clients.core.client import Client
    from clients.methods.pfedhn import NOVEL_ROUNDS
    from strategies.core.latency import Latency
    from strategies.core.privacy import Privacy
    from strategies.methods.fedavg import FedAvg

    novel: Any = {"novel-rounds": NOVEL_ROUNDS}
    known = of_class(RunSettings) | novel | of_class(Client) | of_class(FedAvg)
    return known | of_class(Privacy) | of_class(Latency)


def of_partitions() -> Settings:
    """The options of the partition rules, with the rules that read each."""
    result = {}
    for key, setting in of_class(Options).items():
        rules = ", ".join(name for name, rule in RULES.items() if key in rule.options)
        meaning = f"{rules}: {setting.meaning}" if rules else setting.meaning
        result[f"partition.{key}"] = replace(setting, meaning=meaning)
    return result


def of_method(name: str, method: Method) -> Settings:
    """What the section of a method may set, with the defaults that hold for it: what its classes
    declare beyond the common settings, and the common ones for which it has another default.

    Raises ValueError for a default of a setting that nobody reads, or out of its range, and for a
    hidden setting that there is not."""
    read = of_class(method.client) | of_class(method.strategy)
    if unknown := sorted(set(method.hidden_settings) - read.keys()):
        raise ValueError(
            f"{name} hides {unknown[0]!r}, which its classes do not declare: {[*read]}"
        )
    known: Settings = {}
    if method.extends:
        # The parent's other defaults of common keys are inherited.
        parent = of_method(method.extends, METHODS[method.extends])
        known |= {key: setting for key, setting in parent.items() if key in common()}
    for key, setting in read.items():
        if key not in common() and key not in method.hidden_settings:
            known[key] = setting
    for key, setting in read.items():
        if key in common() and setting.default != common()[key].default:
            known[key] = replace(common()[key], default=setting.default)
    for key, default in method.settings.items():
        if key not in known and key not in common():
            raise ValueError(f"{name} sets {key!r}, which its classes do not declare: {[*read]}")
        declared = known.get(key) or common()[key]
        known[key] = replace(declared, default=declared.checked(f"{key} of {name}", default))
    return known


def sections() -> dict[str, Settings]:
    """The settings of each method of the package that has some."""
    known = {name: of_method(name, method) for name, method in METHODS.items()}
    return {name: settings for name, settings in known.items() if settings}
