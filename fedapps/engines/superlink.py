"""A SuperLink of our own: started from a neutral folder on a free port, followed, and stopped.

Flower's local daemon keeps the folder and environment of whoever started it first; this one
lives for one command and takes everything it started with it."""

import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import tomli_w

from fedapps.engines.flwr import COMMANDS, Flwr
from fedapps.engines.household import GO_ON, MEMBER, household

NAME = "fedapps"
START_SECONDS = 60.0


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


class SuperLink(Flwr):
    """A SuperLink process; with `simulation` it runs virtual clients on Ray.

    Use as a context: leaving it ends every process that it started. `log` is its output."""

    def __init__(self, log: Path, *, simulation: bool = True) -> None:
        self.simulation = simulation
        self._household = ExitStack()
        super().__init__(self._household.enter_context(household()), NAME)
        self.log_file, self.port = log, free_port()
        self.env |= {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use this environment, not a new one
            "RAY_TMPDIR": str(self.home),
            MEMBER: str(self.home),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SuperLink":
        config = {
            "superlink": {
                "default": NAME,
                NAME: {"address": f"127.0.0.1:{self.port}", "insecure": True},
            }
        }
        (self.home / "config.toml").write_text(tomli_w.dumps(config), "utf-8")
        (self.home / "neutral").mkdir()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--disable-runtime-dependency-installation"]
        if self.simulation:
            arguments.append("--simulation")
        try:
            process = self.start("flower-superlink", *arguments)
            deadline = time.monotonic() + START_SECONDS
            while not listening(self.port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the SuperLink did not start; its log is {self.log_file}")
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
        with self.log_file.open("ab") as output:
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

    def check(self) -> None:
        """Raises RuntimeError once the SuperLink has died."""
        if (code := self._processes[0].poll()) is not None:
            raise RuntimeError(f"the SuperLink has died, or was killed (code {code}); {GO_ON}")

    def stop(self) -> None:
        """End every process that was started here, and theirs, and remove the folder."""
        self._household.close()
        for started in self._processes:
            started.wait()
