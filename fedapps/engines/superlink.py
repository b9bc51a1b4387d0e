"""A SuperLink of our own: started from a neutral folder on a free port, followed, and stopped.

Flower's local daemon keeps the folder and environment of whoever started it first; this one
lives for one command and takes everything it started with it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import tomli_w

from fedapps.config import Value, project_dir
from partitions.references import OURS

NAME = "fedapps"
PACKAGES = OURS
START_SECONDS = 60.0
COMMANDS = Path(sys.executable).parent  # of the running environment, activated or not


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Whether somebody accepts connections on the port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class SuperLink:
    """A SuperLink process; with `simulation` it runs virtual clients on Ray.

    Use as a context: leaving it ends every process that it started. `log` is its output."""

    def __init__(self, log: Path, *, simulation: bool = True) -> None:
        self.simulation, self.log = simulation, log
        self.home = Path(tempfile.mkdtemp(prefix="fedapps-"))
        self.port = free_port()
        self.env = os.environ | {
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use this environment, not a new one
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SuperLink":
        _stage(self.home / "app")
        config = {
            "superlink": {
                "default": NAME,
                NAME: {"address": f"127.0.0.1:{self.port}", "insecure": True},
            }
        }
        (self.home / "config.toml").write_text(tomli_w.dumps(config), "utf-8")
        (self.home / "neutral").mkdir()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--disable-runtime-dependency-installation"]
        if self.simulation:
            arguments.append("--simulation")
        try:
            process = self.start("flower-superlink", *arguments)
            deadline = time.monotonic() + START_SECONDS
            while not listening(self.port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the SuperLink did not start; its log is {self.log}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a command of Flower's beside the SuperLink, output to the log."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [str(COMMANDS / command), *arguments],
                cwd=self.home / "neutral",
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only us; we stop it in order
            )
        self._processes.append(process)
        return process

    def submit(self, config: Mapping[str, Value], federation: str = "") -> int:
        """Hand a run of this package to the SuperLink by ``flwr run``; returns the run's id."""
        _declare(self.home / "app", config)
        arguments = ["run", str(self.home / "app"), NAME]
        if federation:
            arguments += ["--federation-config", federation]
        return int(self._flwr(*arguments)["run-id"])

    def status(self, run_id: int) -> tuple[str, str]:
        """The run's true status, e.g. "running" or "finished:completed", and its details."""
        run = self._flwr("ls", NAME, "--run-id", str(run_id))["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")

    def error(self, run_id: int) -> str:
        """The last exception in the run's log, in one line; "" if there is none."""
        done = self._call("log", str(run_id), NAME, "--show")
        lines = [line.strip() for line in done.stdout.splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        return errors[-1] if errors else ""

    def stop(self) -> None:
        """End every process that carries this SuperLink's FLWR_HOME, and remove its folder."""
        mine = [process for process in psutil.process_iter() if self._owns(process)]
        for process in mine:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(mine, timeout=10)
        for process in alive:
            _signal(process, signal.SIGKILL)
        for started in self._processes:
            started.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            home = process.environ().get("FLWR_HOME")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return home == str(self.home) and process.pid != os.getpid()

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """The JSON answer of a ``flwr`` command; RuntimeError with its message if it failed."""
        done = self._call(*arguments, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {"error-message": (done.stderr or done.stdout).strip()}
        if done.returncode or not answer.get("success", False):
            raise RuntimeError(f"flwr {arguments[0]} failed: {answer.get('error-message')}")
        return answer

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(COMMANDS / "flwr"), *arguments],
            env=self.env,
            cwd=self.home / "neutral",
            capture_output=True,
            text=True,
            check=False,
        )


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _stage(folder: Path) -> None:
    """Copy the Flower app to `folder`, so that a checkout and an installed package run alike."""
    folder.mkdir(parents=True)
    source = project_dir()
    shutil.copy(source / "pyproject.toml", folder)
    for name in ("LICENSE", "README.md"):
        text = (source / name).read_text("utf-8") if (source / name).is_file() else f"{name}\n"
        (folder / name).write_text(text, "utf-8")
    packages = Path(__file__).parents[2]
    for name in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", "*.png", "*.json", "*.jsonl")
        shutil.copytree(packages / name, folder / name, ignore=ignore)


def _declare(app: Path, config: Mapping[str, Value]) -> None:
    """Let the app declare the run's whole configuration: Flower lets a run set no other keys, and
    what comes from outside the package has settings of its own."""
    file = app / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))
    project["tool"]["flwr"]["app"]["config"] = dict(config)
    file.write_text(tomli_w.dumps(project), "utf-8")
