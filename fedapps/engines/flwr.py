"""Flower's `flwr` command over one SuperLink: runs are submitted, asked after, and stopped."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedapps.settings.config import Value, project_dir
from partitions.references import OURS

COMMANDS = Path(sys.executable).parent  # of the running environment, activated or not
ANSWER_SECONDS = 300.0  # that a `flwr` command may take


def environment(home: Path) -> dict[str, str]:
    """That of processes whose FLWR_HOME is `home`."""
    return os.environ | {
        "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


class Flwr:
    """The command under FLWR_HOME = `home`, whose configuration knows the SuperLink `name`."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.env = environment(home)

    def submit(self, config: Mapping[str, Value], federation: str = "") -> int:
        """Hand a run of this package to the SuperLink by ``flwr run``; returns the run's id."""
        shutil.rmtree(self.home / "app", ignore_errors=True)
        stage(self.home / "app")
        declare(self.home / "app", config)
        arguments = ["run", str(self.home / "app"), self.name]
        if federation:
            arguments += ["--federation-config", federation]
        return int(self.call(*arguments)["run-id"])

    def status(self, run_id: int) -> tuple[str, str]:
        """The run's true status, e.g. "running" or "finished:completed", and its details."""
        run = self.call("ls", self.name, "--run-id", str(run_id))["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")

    def log(self, run_id: int) -> list[str]:
        """The run's log so far."""
        done = self._run("log", str(run_id), self.name, "--show")
        return [line.strip() for line in done.stdout.splitlines()]

    def follow(self, run_id: int) -> Iterator[str]:
        """The run's log from its beginning, line by line as it is written, until the run ends or
        the SuperLink does."""
        with subprocess.Popen(
            [str(COMMANDS / "flwr"), "log", str(run_id), self.name, "--stream"],
            env=self.env | {"PYTHONUNBUFFERED": "1"},
            cwd=self._neutral(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                yield from map(str.strip, process.stdout or [])
            finally:
                process.terminate()

    def error(self, run_id: int) -> str:
        """The last exception in the run's log, in one line; "" if there is none."""
        errors = [x for x in self.log(run_id) if re.match(r"[\w.]*(Error|Exception): ", x)]
        return errors[-1] if errors else ""

    def cancel(self, run_id: int) -> None:
        """Stop the run."""
        self.call("stop", str(run_id), self.name)

    def call(self, *arguments: str) -> dict[str, Any]:
        """The JSON answer of a ``flwr`` command; RuntimeError with its message if it failed."""
        done = self._run(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {"error-message": (done.stderr or done.stdout).strip()}
        if done.returncode or not answer.get("success", False):
            raise RuntimeError(f"flwr {arguments[0]} failed: {answer.get('error-message')}")
        return answer

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        try:
            return subprocess.run(
                [str(COMMANDS / "flwr"), *arguments],
                env=self.env,
                cwd=self._neutral(),
                capture_output=True,
                text=True,
                check=False,
                timeout=ANSWER_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            name, seconds = arguments[0], round(ANSWER_SECONDS)
            raise RuntimeError(f"flwr {name} had no answer in {seconds} seconds") from error

    def _neutral(self) -> Path:
        """A folder without an app, for the command to run in."""
        folder = self.home / "neutral"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def stage(folder: Path) -> None:
    """Copy the Flower app to `folder`, so that a checkout and an installed package run alike."""
    folder.mkdir(parents=True)
    source = project_dir()
    shutil.copy(source / "pyproject.toml", folder)
    for name in ("LICENSE", "README.md"):
        text = (source / name).read_text("utf-8") if (source / name).is_file() else f"{name}\n"
        (folder / name).write_text(text, "utf-8")
    packages = Path(__file__).parents[2]
    for name in OURS:
        results = ("*.png", "*.json", "*.jsonl") if name == "experiments" else ()
        ignore = shutil.ignore_patterns("__pycache__", *results)
        shutil.copytree(packages / name, folder / name, ignore=ignore)


def declare(app: Path, config: Mapping[str, Value]) -> None:
    """Let the app declare the run's whole configuration: Flower lets a run set no other keys, and
    what comes from outside the package has settings of its own."""
    file = app / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))
    project["tool"]["flwr"]["app"]["config"] = dict(config)
    file.write_text(tomli_w.dumps(project), "utf-8")
