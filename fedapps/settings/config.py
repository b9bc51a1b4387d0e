"""Configurations: defaults, those of saved runs, and the way to constructors."""

import tomllib
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedapps.common import external_code
from fedapps.common.external_code import Value
from fedapps.common.settings import present_keys, taken
from fedapps.common.tasks import AUTO
from fedapps.methods import METHODS
from fedapps.settings.overrides import (
    Config,
    defaults,
    override,
    own_settings,
    parse_override,
    relevant,
    resolve,
    said,
)
from fedapps.settings.variants import Variant

__all__ = [
    "Value",
    "defaults",
    "override",
    "own_settings",
    "parse_override",
    "resolve",
    "said",
]


def project_dir() -> Path:
    """The folder that holds the Flower app's pyproject.toml: a checkout or the installed copy."""
    for folder in (Path(__file__).parents[2], Path(__file__).parents[1]):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError("the package has lost its pyproject.toml; reinstall fedapps")


def completed(run_config: Mapping[str, Value], *, trusted: bool = False) -> Config:
    """A run's configuration, with defaults for the keys that its app does not declare; errors as
    `override`. References in a `trusted` one are allowed. It is called for every message, so the
    last results are cached: equal run configurations give one object, which nobody may change."""
    for known, config in [*_completed]:
        if known == run_config:
            return config
    if trusted:
        external_code.allow(*external_code.named(run_config))
    config = resolve(run_config)
    _completed.appendleft((dict(run_config), config))
    return config


_completed: deque[tuple[Config, Config]] = deque(maxlen=8)  # run configurations, and completed ones


def saved_runs(folder: Path) -> tuple[str, str]:
    """Methods and seeds of the run, or of the runs, that `folder` holds; ValueError if none."""
    runs = run_folders(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished run")
    methods: dict[str, None] = {}  # in order, each once
    seeds: dict[str, None] = {}
    for run in runs:
        config = saved_configuration(run)
        methods[str(Variant.of_folder(run, str(config["method"])))] = None
        seeds[str(config["seed"])] = None
    return ",".join(methods), ",".join(seeds)


ORDER = "runs.txt"  # names of runs' folders in the order in which the runs were asked for


def ordered_names(folder: Path) -> list[str]:
    """The names in the folder's `ORDER`; none if there is no such file."""
    file = folder / ORDER
    return file.read_text("utf-8", "replace").splitlines() if file.is_file() else []


def ordered(folder: Path) -> list[Path]:
    """The folders in `folder`: those that `ORDER` names in its order, then others by name."""
    if not folder.is_dir():
        return []
    place = {name: number for number, name in enumerate(ordered_names(folder))}
    by_name = sorted(path for path in folder.iterdir() if path.is_dir())
    return sorted(by_name, key=lambda path: place.get(path.name, len(place)))


def run_folders(folder: Path) -> list[Path]:
    """Those of `folder` and of the folders in it that hold a run, in the order of `ordered`."""
    inside = [f for f in ordered(folder) if "-seed" in f.name]
    return [f for f in (folder, *inside) if (f / "config.toml").is_file()]


def run_configuration(run: Path) -> Config:
    """What a run was configured with. Raises ValueError, naming the file, if it is not whole."""
    file = run / "config.toml"
    try:
        config = tomllib.loads(file.read_text("utf-8"))
        config.pop("versions", None)
        return override(defaults(), present_keys(config, silent=True), all_methods=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def saved_configuration(run: Path) -> Config:
    """What a finished run was configured with, its folders apart."""
    return run_configuration(run) | {"output-dir": "", "from-dir": ""}


# Where and how a run is carried out; these settings do not change what it computes.
CIRCUMSTANCES = ("output-dir", "resume", "checkpoint-every", "round-timeout", "start-timeout")


def differences(there: Mapping[str, Value], here: Mapping[str, Value]) -> str:
    """The keys in which the settings of two runs differ, with both values; "" if in none.

    Settings that neither run reads, such as those of another method, do not count."""
    there = defaults() | dict(there)
    here = override(defaults(), here, all_methods=False)
    read = relevant(here).keys() | relevant(there).keys()
    compared = read - {*CIRCUMSTANCES}
    different = [
        key for key in here if key in compared and not _same(key, there.get(key), here[key])
    ]
    return ", ".join(f"{key} is {there.get(key)!r} there, {here[key]!r} here" for key in different)


def _same(key: str, there: Value | None, here: Value) -> bool:
    """Whether two values mean the same. "auto" was "accuracy" in runs of earlier releases."""
    if key == "selection-metric":
        return {there, here} <= {AUTO, "accuracy"} or there == here
    return there == here


def settings(config: Mapping[str, Value], method: str) -> dict[str, Any]:
    """Keyword arguments for a method's strategy and client: its own section over the common
    keys, with underscores for hyphens."""
    return external_code.options(config, "") | external_code.options(config, method)


def effective(config: Mapping[str, Value], key: str) -> Value | None:
    """What holds for the configured method: its own section's value, else the common one."""
    return config.get(f"{config['method']}.{key}", config.get(key))


@cache
def accepted(cls: type) -> set[str]:
    """The names of what a class's constructor takes by keyword alone, its settings among them."""
    return set(taken(cls))


def construct(cls: type, *args: Any, config: Mapping[str, Value], method: str, **own: Any) -> Any:
    """``cls(*args, …)`` with those of the method's settings that it accepts, then `own`."""
    names = accepted(cls)
    return cls(*args, **{k: v for k, v in settings(config, method).items() if k in names} | own)


def check_method(name: Any) -> str:
    """`name` if it is a method; ValueError with the choices otherwise."""
    return METHODS.check(str(name))
