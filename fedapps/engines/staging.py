"""The package as a Flower app in a folder, for processes on other machines or of Flower."""

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fedapps.common.external_code import PACKAGES
from fedapps.settings.config import Value


def stage(folder: Path) -> None:
    """Copy the app to `folder`; a checkout and an installed package give the same files.

    Raises OSError with the first cause if a file cannot be copied."""
    try:
        _copy(folder)
    except shutil.Error as error:  # a list of a source, a target and a reason for each file
        failures = error.args[0]
        _, target, reason = failures[0]
        cause = str(reason).partition(": '")[0]  # the paths follow
        raise OSError(f"{target} cannot be written: {cause}") from error


def _copy(folder: Path) -> None:
    folder.mkdir(parents=True)
    source = _project_dir()
    shutil.copy(source / "pyproject.toml", folder)
    for name in ("LICENSE", "README.md"):
        text = (source / name).read_text("utf-8") if (source / name).is_file() else f"{name}\n"
        (folder / name).write_text(text, "utf-8")
    packages = Path(__file__).parents[2]
    for name in PACKAGES:
        results = ("*.png", "*.json", "*.jsonl") if name == "experiments" else ()
        ignore = shutil.ignore_patterns("__pycache__", *results)
        shutil.copytree(packages / name, folder / name, ignore=ignore)


def _project_dir() -> Path:
    """The folder that holds the Flower app's pyproject.toml: a checkout or the installed copy."""
    for folder in (Path(__file__).parents[2], Path(__file__).parents[1]):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError("the package has lost its pyproject.toml; reinstall fedapps")


def declare(app: Path, config: Mapping[str, Value]) -> None:
    """Declare the run's whole configuration in the app's pyproject. Flower lets a run set no other
    keys, and code from outside the package has settings that the package does not know."""
    file = app / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))
    project["tool"]["flwr"]["app"]["config"] = dict(config)
    file.write_text(tomli_w.dumps(project), "utf-8")
