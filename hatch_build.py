"""Puts the folders of a checkout into one package: in a wheel, `clients.core.client` is
`fedapps.clients.core.client`, so that no generic name lands in a user's site-packages.

An editable install is the checkout itself."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = "clients|strategies|partitions|experiments"
OMITTED = {  # they need a checkout
    "experiments/attacks.py",
    "experiments/benchmarks",
    "experiments/coverage.py",
    "experiments/figures_site.py",
    "experiments/method_pages.py",
    "experiments/tutorials.py",
}
STATEMENT = re.compile(rf"^(\s*from )({FOLDERS})\b|^(\s*)import ({FOLDERS})$", re.M)
REFERENCE = re.compile(rf"""(["'])({FOLDERS})\.(?=[\w{{"'])""")  # "clients.methods.tent:TENTClient"
LEFT = re.compile(rf"^\s*import ({FOLDERS})\b", re.M)


def rewritten(source: str) -> str:
    """A module's source with the folders' names below `fedapps`. Raises ValueError for a form of
    import that it does not know."""
    if rest := LEFT.search(STATEMENT.sub("", source)):
        raise ValueError(f"write {rest[0].strip()!r} as `from … import …`")

    def statement(match: re.Match[str]) -> str:
        start, name, indent, whole = match.groups()
        return f"{start}fedapps.{name}" if start else f"{indent}from fedapps import {whole}"

    return REFERENCE.sub(r"\1fedapps.\2.", STATEMENT.sub(statement, source))


def package(root: Path, target: Path) -> None:
    """Write the package to the new folder `target`."""
    ignore = shutil.ignore_patterns("__pycache__", "*.png", "*.json", "*.jsonl")
    shutil.copytree(root / "fedapps", target, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FOLDERS.split("|"):
        (target / f"{name}.py").unlink(missing_ok=True)  # the public names of the folder
        shutil.copytree(root / name, target / name, ignore=ignore)
    for name in OMITTED:
        path = target / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file in target.rglob("*.py"):
        file.write_text(rewritten(file.read_text("utf-8")), "utf-8")
    shutil.copy(root / "pyproject.toml", target)  # the defaults of every setting


class OnePackage(BuildHookInterface[Any]):
    """Hatch's hook of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the package in a temporary folder, which becomes the wheel's content."""
        if version != "editable":
            self._folder = tempfile.TemporaryDirectory()
            package(Path(self.root), Path(self._folder.name) / "fedapps")
            build_data["force_include"][f"{self._folder.name}/fedapps"] = "fedapps"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if version != "editable":
            self._folder.cleanup()
