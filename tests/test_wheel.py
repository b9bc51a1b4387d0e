"""The installed package has one top-level name and works beside folders of the same names. Pages
name what they import by the path that a checkout and an installed package share."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from pkgutil import resolve_name

import pytest
from small_runs import run_anew

from hatch_build import FOLDERS, package, rewritten

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
CODE = re.compile(r"^( *)```python.*?\n(.*?)^ *```$", re.M | re.S)
DOTTED = re.compile(r"`((?:fedapps|clients|strategies|partitions)(?:\.\w+)+)`")
PACKAGES = ("fedapps", "clients", "strategies", "partitions")
SUFFIXES = (".py", ".md", ".toml", ".safetensors")
SMALL = "num-clients=4 rounds=1 local-steps=1 --engine in-process --jobs 1"


def obstacles(folder: Path) -> Path:
    """A folder whose modules `clients`, `strategies`, … cannot be imported."""
    for name in FOLDERS.split("|"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as a wheel holds it, and a user's folder."""
    folder = tmp_path_factory.mktemp("installed")
    package(ROOT, folder / "site" / "fedapps")
    return folder / "site", obstacles(folder / "user")


def test_imports_of_every_form_are_rewritten():
    source = """import partitions
from clients.base import Client
    from strategies import PFedHN
NAMES = ["clients.methods.tent:TENTClient", f"strategies.{NAME}", 'partitions.datasets.readers.']
clients.sort(), "the clients.", "partition.alpha", partitions.federation
"""
    assert (
        rewritten(source)
        == """from fedapps import partitions
from fedapps.clients.base import Client
    from fedapps.strategies import PFedHN
NAMES = ["fedapps.clients.methods.tent:TENTClient", f"fedapps.strategies.{NAME}", 'fedapps.partitions.datasets.readers.']
clients.sort(), "the clients.", "partition.alpha", partitions.federation
"""  # noqa: E501
    )
    for unknown in ("import clients.core.client\n", "import strategies as s\n"):
        with pytest.raises(ValueError, match="write 'import"):
            rewritten(unknown)


def imported_names(source):
    """The dotted names that Python code imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_on(page):
    """The names of the package that a page imports or writes out."""
    names = DOTTED.findall(page)
    for _, code in CODE.findall(page):
        names += imported_names(textwrap.dedent(code))
    names = [name for name in names if not name.endswith(SUFFIXES)]
    return {name for name in names if name.partition(".")[0] in PACKAGES}


def test_names_on_a_page_are_those_of_its_imports_and_of_its_text():
    page = "`strategies.core.strategy` of\n```python\nimport os\nfrom fedapps import run\n```\n"
    assert names_on(page) == {"strategies.core.strategy", "fedapps.run"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_from_fedapps_alone(page):
    """The folders beside `fedapps` have no modules of their own in an installed package."""
    assert {name for name in names_on(PAGES[page]) if not name.startswith("fedapps")} == set()


def test_an_installed_package_has_every_name_on_the_pages_and_runs_beside_a_users_own_clients(
    installed, tmp_path, monkeypatch
):
    """The checkout has the names as well."""
    site, user = installed
    names = sorted(set().union(*map(names_on, PAGES.values())))
    assert {"fedapps.clients.Client", "fedapps.strategies.FedAvg"} <= {*names}
    for name in names:
        resolve_name(name)
    monkeypatch.chdir(user)
    program = f"""
from pkgutil import resolve_name
for name in {names}:
    resolve_name(name)
from fedapps.commands.main import cli
from fedapps.settings.experiments import experiments
from fedapps import clients, partitions
from fedapps.strategies import PFedHN
assert PFedHN.__module__ == "fedapps.strategies.methods.pfedhn"
assert "fedtta/table1-mnist" in experiments()
import fedapps
assert fedapps.__file__.startswith({str(site)!r})
try:
    cli("run --methods fedtta {SMALL} --output {tmp_path}/results".split())
except SystemExit as end:
    assert not end.code
"""
    run_anew(program, path=[user, site])
    assert (tmp_path / "results" / "fedtta-seed0" / "model.safetensors").is_file()


@pytest.mark.slow
def test_every_method_keeps_its_contract_in_an_installed_package(installed, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file in (tmp_path / "tests").rglob("*.py"):
        file.write_text(rewritten(file.read_text("utf-8")), "utf-8")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # which messages the page names
    contract = tmp_path / "tests" / "test_contract.py"
    site, user = installed
    path = os.pathsep.join(map(str, (user, site)))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Tests of draws patch the checkout.
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "not draws", contract]
    done = subprocess.run(command, cwd=user, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_is_installed_into_an_empty_environment(tmp_path):
    subprocess.run(["uv", "build", "-q", "--wheel", "-o", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedapps"}
    subprocess.run(["uv", "venv", "-q", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "-q", "--python", python, wheel], check=True)
    user, env = (
        obstacles(tmp_path / "user"),
        {k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    command = [python.with_name("fedapps"), "run", "--output", "results"]
    subprocess.run(command, cwd=user, env=env, check=True)
    assert (user / "results" / "report.html").is_file()
