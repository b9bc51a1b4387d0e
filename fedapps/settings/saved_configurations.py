"""The configurations of saved runs: reading them, their order in a folder, how two differ."""

import os
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedapps.common.external_code import Value
from fedapps.common.settings import present_keys
from fedapps.common.tasks import AUTO
from fedapps.settings.config import Config, defaults, override, relevant
from fedapps.settings.variants import Variant

ORDER = "runs.txt"  # names of runs' folders in the order in which the runs were asked for
COMMANDS = "commands.txt"  # beside it: a line for each command, with its time
SEARCHED = 1000  # folders that a search for runs opens at most
SHOWN = 5  # folders that a sentence names


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


def runs_below(folder: Path) -> list[Path]:
    """The folders of runs at any depth below `folder`, the nearest first. Of a large tree only the
    first `SEARCHED` folders are opened; links are not followed."""
    runs: list[Path] = []
    waiting = deque([folder])
    for _ in range(SEARCHED):
        if not waiting:
            break
        opened = waiting.popleft()
        try:
            inside = sorted(Path(entry) for entry in os.scandir(opened) if _is_real_folder(entry))
        except OSError:  # it is missing, or may not be read
            continue
        for path in inside:
            if "-seed" in path.name and (path / "config.toml").is_file():
                runs.append(path)
            else:
                waiting.append(path)
    return runs


def _is_real_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)


def where_runs_are(folder: Path) -> str:
    """The end of a sentence that refuses `folder` as one of runs: which folders below it hold runs;
    "" if none does."""
    parents = dict.fromkeys(run.parent for run in runs_below(folder))
    names = [str(parent) for parent in parents if parent != folder]
    if not names:
        return ""
    return f"; name a folder below it that holds runs: {_first(names)}"


def where_a_run_is(folder: Path) -> str:
    """The same for one run: its folder to name, or an example where there is none."""
    runs = [str(run) for run in runs_below(folder)]
    if not runs:
        return "name a folder such as results/fedtta++-seed0"
    return f"name one of the runs below it: {_first(runs)}"


def _first(names: Sequence[str]) -> str:
    """The first names in one text, and how many more there are."""
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text


def configuration_file(run: Path) -> dict[str, Any]:
    """The content of a run's config.toml. Raises OSError if it cannot be read, ValueError or
    RecursionError if it is no TOML."""
    return dict(_parsed((run / "config.toml").read_text("utf-8")))


@lru_cache(maxsize=32)
def _parsed(text: str) -> dict[str, Any]:
    """The tables in a text. A command reads each run's file several times."""
    return tomllib.loads(text)


def run_configuration(run: Path) -> Config:
    """What a run was configured with. Raises ValueError, naming the file, if it is not whole."""
    config = _intact_file(run)
    try:
        return override(defaults(), present_keys(config, silent=True), all_methods=False)
    except ValueError as error:
        raise ValueError(f"{run / 'config.toml'}: {error}") from error


def unchecked_configuration(run: Path) -> Config:
    """The same without a check of its settings, which imports the code that they name."""
    config = _intact_file(run)
    try:
        return defaults() | present_keys(config, silent=True)
    except ValueError as error:
        raise ValueError(f"{run / 'config.toml'}: {error}") from error


def _intact_file(run: Path) -> dict[str, Any]:
    """The settings in a run's config.toml. Raises ValueError, with what to do, if it is no TOML."""
    try:
        config = configuration_file(run)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{run / 'config.toml'} is damaged: {error}; if the run is a copy, copy it again, else "
            f"repeat the command that began it, which {COMMANDS} beside the run names"
        ) from error
    config.pop("versions", None)
    return config


def saved_configuration(run: Path) -> Config:
    """What a finished run was configured with, its folders apart."""
    return run_configuration(run) | {"output-dir": "", "from-dir": "", "training-dir": ""}


# Where and how a run is carried out; these settings do not change what it computes.
CIRCUMSTANCES = (
    "output-dir", "training-dir", "resume", "checkpoint-every", "round-timeout", "start-timeout",
)  # fmt: skip


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


def saved_runs(folder: Path) -> tuple[str, str]:
    """Methods and seeds of the run, or of the runs, that `folder` holds; ValueError if none."""
    runs = run_folders(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished run{where_runs_are(folder)}")
    methods: dict[str, None] = {}  # in order, each once
    seeds: dict[str, None] = {}
    for run in runs:
        config = saved_configuration(run)
        methods[str(Variant.of_folder(run, str(config["method"])))] = None
        seeds[str(config["seed"])] = None
    return ",".join(methods), ",".join(seeds)
