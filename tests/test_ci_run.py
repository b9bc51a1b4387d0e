"""`.ci/run` fails if any of its steps does, and only then. Here `uv` does nothing."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
UV = """#!/bin/sh
case "$*" in $FAILS) echo "$* has failed"; exit 3;; esac
"""


def status(folder, fails):
    """The exit status where a `uv` with these words fails, what is said, and the files left."""
    for name, content in ((".ci/run", SCRIPT.read_text()), ("bin/uv", UV)):
        file = folder / name
        file.parent.mkdir()
        file.write_text(content)
        file.chmod(0o755)
    (folder / "tmp").mkdir()
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "FAILS": fails, "TMPDIR": str(folder / "tmp")}
    command = [folder / ".ci" / "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, list((folder / "tmp").iterdir())


def test_without_a_failure_it_succeeds_and_leaves_no_file(tmp_path):
    assert status(tmp_path, "none") == (0, "", [])


@pytest.mark.parametrize(
    "step",
    ["sync*", "run ruff check*", "run ruff format*", "run mypy", "*optuna*", "*mkdocs*",
     "*coverage*", "run pytest"],
)  # fmt: skip
def test_a_step_that_fails_ends_it(step, tmp_path):
    code, said, files = status(tmp_path, step)
    assert code == 3 and "has failed" in said and files == []


def test_tests_that_cannot_be_collected_fail_later(tmp_path):
    assert status(tmp_path, "*--collect-only*")[0] == 0
