"""The flower engine: runs on a SuperLink that is started for one command, by ``flwr`` commands.

Flower's local daemon keeps the folder and environment of the command that started it first. This
SuperLink runs in a neutral folder, on a free port, and ends with the command."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from fedapps.common.addresses import connection_error
from fedapps.common.errors import error_line, printable
from fedapps.common.new_files import append_to
from fedapps.common.proxies import without_proxy
from fedapps.common.resources import num_cpus
from fedapps.common.signals import raise_swallowed
from fedapps.engines.jobs import POLL_SECONDS, Follow, Job, finished_elsewhere, may_start
from fedapps.engines.process_group import GROUP, RESUME_HINT, process_group
from fedapps.engines.staging import declare, stage
from fedapps.files import write_text
from fedapps.settings.config import Value

COMMANDS = Path(sys.executable).parent  # of the running environment, activated or not
COMMAND_SECONDS = 300.0  # that a `flwr` command may take
START_SECONDS = 60.0
STATUS_SECONDS = 10.0  # between two polls of the SuperLink; each starts a process
MAX_FAILED_POLLS = 4  # in a row
NAME = "fedapps"  # of the SuperLink in Flower's configuration
EXCEPTION = re.compile(r"[\w.]*(Error|Exception): ")  # the last line of a traceback
CHAINED = (  # what Python prints between a cause's traceback and that of its effect
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
NO_CAUSE = "An error was encountered"  # in Flower's exceptions
LOGGED_ERROR = re.compile(
    r"^(?:\x1b\[\d+m)*ERROR(?:\x1b\[\d+m| )*:\s+(.+)$"  # Flower's
    r"|^\S+ ERROR \[uvicorn\.error\] (.+)$"
    r"|^[\w.-]+: error: (.+)$"  # of the options
    r"|^([\w.]*(?:Error|Exception): .+)$",
    re.MULTILINE,
)


def environment(home: Path, *hosts: str) -> dict[str, str]:
    """The environment of processes whose FLWR_HOME is `home`. They reach this machine and `hosts`
    without a proxy."""
    return without_proxy(os.environ, *hosts) | {
        "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


class Flwr:
    """Flower's command under FLWR_HOME = `home`, whose configuration has the SuperLink `name`. It
    reaches this machine and `hosts` without a proxy."""

    def __init__(self, home: Path, name: str, *hosts: str) -> None:
        self.home = home
        self.name = name
        self.env = environment(home, *hosts)

    def submit(self, config: Mapping[str, Value], federation: str = "") -> int:
        """Submit a run of this package by ``flwr run``; returns the run's id."""
        app = self.home / "app"
        shutil.rmtree(app, ignore_errors=True)
        stage(app)
        declare(app, config)
        options = ["--federation-config", federation] if federation else []
        return int(self.call("run", str(app), self.name, *options)["run-id"])

    def status(self, run_id: int) -> tuple[str, str]:
        """The run's status, e.g. "running" or "finished:completed", and its details."""
        run = self.call("ls", self.name, "--run-id", str(run_id))["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")

    def log(self, run_id: int) -> list[str]:
        """The run's log so far."""
        done = self._run("log", str(run_id), self.name, "--show")
        return [line.strip() for line in done.stdout.splitlines()]

    def follow(self, run_id: int) -> Iterator[str]:
        """The lines of the run's log, as they are written, until the run or the SuperLink ends."""
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
        """Why the run failed, by its log, in one line; "" if the log has no exception."""
        return cause_in_log(self.log(run_id))

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
            message = str(answer.get("error-message")).replace("\\n", " ")
            raise RuntimeError(f"flwr {arguments[0]} failed: {' '.join(message.split())}")
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
                timeout=COMMAND_SECONDS,
                start_new_session=True,  # Ctrl-C reaches this process alone, which may delay it
            )
        except subprocess.TimeoutExpired as error:
            name = arguments[0]
            seconds = round(COMMAND_SECONDS)
            raise RuntimeError(f"flwr {name} had no answer in {seconds} seconds") from error

    def _neutral(self) -> Path:
        """A folder without an app, as the working directory of commands."""
        folder = self.home / "neutral"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class SuperLink(Flwr):
    """The processes of a SuperLink in the process group `home`; their output goes to `log`."""

    def __init__(self, home: Path, log: Path) -> None:
        super().__init__(home, NAME)
        self.log_file = log
        self.port = free_port()
        self.env |= {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use this environment, not a new one
            "RAY_TMPDIR": str(home),
            GROUP: str(home),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        config = {"superlink": {"default": NAME, NAME: connection}}
        write_text(home / "config.toml", tomli_w.dumps(config))
        log.parent.mkdir(parents=True, exist_ok=True)

    def start(self, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start one of Flower's commands as a process of the group, output to the log."""
        with append_to(self.log_file) as output:
            process = subprocess.Popen(
                [str(COMMANDS / command), *arguments],
                cwd=self._neutral(),
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it; `stop` ends it
            )
        self.processes.append(process)
        return process

    def check(self) -> None:
        """Raises RuntimeError once the SuperLink has died."""
        if (code := self.processes[0].poll()) is not None:
            raise RuntimeError(
                f"the SuperLink has died, or was killed (code {code}); {RESUME_HINT}"
            )


@contextmanager
def superlink(log: Path, *, simulation: bool = True) -> Iterator[SuperLink]:
    """A running SuperLink; with `simulation` it runs virtual clients on Ray. On exit every process
    that it started is ended."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with process_group() as home:
            link = SuperLink(home, log)
            processes = link.processes
            arguments = ["--insecure", "--host", "127.0.0.1", "--port", str(link.port)]
            arguments += ["--disable-runtime-dependency-installation"]
            arguments += ["--simulation"] if simulation else []
            written = log.stat().st_size if log.is_file() else 0
            process = link.start("flower-superlink", *arguments)

            def ask() -> None:
                if error := connection_error("127.0.0.1", link.port):
                    raise RuntimeError(error)

            wait_for_superlink(ask, lambda: process.poll() is None, log, written)
            yield link
    finally:
        for process in processes:
            process.wait()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_superlink(
    ask: Callable[[], None], alive: Callable[[], bool], log: Path, written: int = 0
) -> None:
    """Wait until `ask` raises no RuntimeError while the SuperLink is `alive`.

    Raises RuntimeError with the last error otherwise, or with the one in its `log`, from the byte
    `written` on, if it has one."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return ask()
        except RuntimeError as error:
            reason = str(error)
        if not alive() or time.monotonic() > deadline:
            reason = logged_error(log, written) or reason
            raise RuntimeError(f"the SuperLink did not start: {reason}; its log is {log}")
        time.sleep(0.1)


def cause_in_log(lines: Sequence[str]) -> str:
    """The last exception of a log, and the first of those that led to it; "" if there is none.

    If Flower only says that an error occurred, that is the first one of the whole log."""
    first = start_of_chain = last = ""
    continues = False
    for line in lines:
        if line in CHAINED:
            continues = True
        elif EXCEPTION.match(line):
            first = first or line
            last = line
            start_of_chain = start_of_chain if continues else line
            continues = False
    if start_of_chain == last and NO_CAUSE in last:
        start_of_chain = first
    return last if start_of_chain == last else f"{last} Its cause: {start_of_chain}"


def logged_error(log: Path, written: int = 0) -> str:
    """The last error that Flower or its web server wrote to a log from that byte on, in one line;
    "" if there is none."""
    try:
        text = log.read_bytes()[written:].decode("utf-8", "replace")
    except OSError:
        return ""
    errors = ["".join(groups).strip() for groups in LOGGED_ERROR.findall(text)]
    return printable(errors[-1]) if errors else ""


def run_on_flower(jobs: list[Job], parallel: int, gpus: float, follow: Follow) -> None:
    """Submit the jobs as Flower runs, at most `parallel` at a time, and wait for them."""
    with superlink(jobs[0].folder.parent / "superlink.log") as link:
        waiting = flower_runs(jobs)
        running: dict[int, list[Job]] = {}
        polled = time.monotonic()
        failed_polls = 0
        while waiting or running:
            # The jobs of a group have one `training-dir`.
            ready = [group for group in waiting if may_start(group[0], jobs)]
            if ready and len(running) < parallel:
                waiting.remove(ready[0])
                group = [job for job in ready[0] if not finished_elsewhere(job)]
                if not group:
                    continue
                try:
                    running[_submit(link, group, gpus)] = group
                except RuntimeError as error:
                    _close(group, error_line(error))
            time.sleep(POLL_SECONDS)
            raise_swallowed()
            follow(jobs)
            link.check()
            overdue = time.monotonic() - polled > STATUS_SECONDS
            for run_id, group in list(running.items()):
                for job in group:
                    summary = job.summary()
                    job.done = "finished" in summary
                    job.error = summary.get("error", "")
                if not overdue and not all(job.done for job in group):
                    continue
                try:
                    reason = _end_of_run(link, run_id)
                except RuntimeError:  # a command may fail on a busy machine
                    failed_polls += 1
                    if failed_polls == MAX_FAILED_POLLS:
                        raise
                    continue
                failed_polls = 0
                if reason:
                    _close(group, reason)
                    del running[run_id]
            if overdue:
                polled = time.monotonic()
        follow(jobs)


def flower_runs(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs, by seed, in groups that one Flower run can serve: the same configuration but for
    the method, and no settings in a method's name."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        common = job.config | {"method": "", "output-dir": ""}
        variant = job.name if " " in job.method else ""  # its folder's name has the settings
        groups.setdefault((variant, *common.items()), []).append(job)
    return list(groups.values())


def _submit(link: SuperLink, group: list[Job], gpus: float) -> int:
    first = group[0]
    methods = ",".join(str(job.config["method"]) for job in group)
    folder = first.folder if len(group) == 1 else first.folder.parent
    cpus = num_cpus()
    nodes = min(int(first.config["num-clients"]), cpus)
    federation = (
        f"num-supernodes={nodes} init-args-num-cpus={cpus} "
        f"client-resources-num-cpus=1 client-resources-num-gpus={gpus}"
    )
    config = first.config | {"method": methods, "output-dir": str(folder)}
    return link.submit(config, federation)


def _close(group: list[Job], error: str) -> None:
    """Mark the jobs of a Flower run as done; those that have not finished failed with `error`."""
    for job in group:
        job.close(error)


def _end_of_run(link: SuperLink, run_id: int) -> str:
    """Why the Flower run ended, "" while it runs. Raises RuntimeError if the poll fails."""
    try:
        status, details = link.status(run_id)
    except RuntimeError:
        link.check()  # its error says more
        raise
    if not status.startswith("finished"):
        return ""
    if "heartbeat" in details:
        return f"the run's process has died, or was killed ({details}); {RESUME_HINT}"
    reason = ""
    if status != "finished:completed":  # else the log has no error
        reason = link.error(run_id)
    return reason or f"the run {status} {details}".strip()
