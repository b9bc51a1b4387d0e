"""The installed package has one top-level name and works beside folders of the same names."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hatch_build import FOLDERS, package, rewritten

ROOT = Path(__file__).parents[1]
SMALL = "num-clients=4 rounds=1 local-steps=1 --engine in-process --jobs 1"


def obstacles(folder: Path) -> Path:
    """A folder whose modules `clients`, `strategies`, … cannot be imported."""
    for name in FOLDERS.split("|"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')")
    return folder


@pytest.fixture
def installed(tmp_path):
    """Runs Python in a user's folder, with the package as a wheel holds it."""
    package(ROOT, tmp_path / "site" / "fedapps")
    user = obstacles(tmp_path / "user")
    path = os.pathsep.join(map(str, (user, tmp_path / "site")))

    def run(*words):
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=user,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


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


def test_an_installed_package_runs_beside_a_users_own_clients(installed, tmp_path):
    installed(
        "-c",
        f"""
from fedapps.commands.main import cli
from fedapps.settings.experiments import experiments
from fedapps import clients, partitions
from fedapps.strategies import PFedHN
assert PFedHN.__module__ == "fedapps.strategies.methods.pfedhn"
assert "fedtta/table1-mnist" in experiments()
cli("run --methods fedtta {SMALL} --output {tmp_path}/results".split())
""",
    )
    assert (tmp_path / "results" / "fedtta-seed0" / "model.safetensors").is_file()


@pytest.mark.slow
def test_every_method_keeps_its_contract_in_an_installed_package(installed, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file in (tmp_path / "tests").rglob("*.py"):
        file.write_text(rewritten(file.read_text("utf-8")), "utf-8")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # which messages the page names
    contract = tmp_path / "tests" / "test_contract.py"
    installed("-m", "pytest", "-q", "-n0", "-k", "not draws", contract)  # that patches the checkout


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
