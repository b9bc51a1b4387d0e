"""`fedapps deploy`: what a small federation of real nodes needs, and its processes on loopback."""

import json
import shlex
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil
import tomli_w

from fedapps.engines.flower import (
    COMMANDS,
    START_SECONDS,
    Flwr,
    environment,
    free_port,
    listening,
)
from fedapps.files import write_text
from fedapps.service.certificates import make_certificates, make_node_key

FILE = "deployment.json"
SUPERLINK = "superlink"
KNOWN = "already in use"  # what Flower says of a key that is registered
NAME = "deployment"  # of its SuperLink in Flower's configuration


@dataclass(frozen=True)
class Deployment:
    """A SuperLink at `host`:`port` and its nodes, whose own ports are `ports`; each has its data
    in `data` ("": its partition of the run's dataset).

    `write` leaves scripts, keys and Flower's configuration in `folder`."""

    folder: Path
    host: str
    port: int
    tls: bool
    ports: tuple[int, ...]
    data: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The deployment that `write` left in `folder`. Raises ValueError if there is none."""
        if not (folder / FILE).is_file():
            raise ValueError(f"{folder} holds no {FILE}; write it: fedapps deploy {folder} --nodes")
        told = json.loads((folder / FILE).read_text("utf-8"))
        lists = {key: tuple(told[key]) for key in ("ports", "data")}
        return cls(**(told | lists | {"folder": folder.resolve()}))

    @property
    def nodes(self) -> list[str]:
        """``node-0``, ``node-1``, …"""
        return [f"node-{i}" for i in range(len(self.ports))]

    @property
    def home(self) -> Path:
        """FLWR_HOME of all its processes, with the configuration that finds the SuperLink."""
        return self.folder / "home"

    @property
    def database(self) -> Path:
        """What the SuperLink knows of its nodes, so that they stay when it starts again."""
        return self.folder / "superlink.db"

    def write(self) -> None:
        """Everything that the processes need; a script for each."""
        tls = self.folder / "tls"
        self.database.unlink(missing_ok=True)
        connection: dict[str, str | bool] = {"address": f"{self.host}:{self.port}"}
        if self.tls:
            make_certificates(tls, self.host)
            connection["root-certificates"] = str(tls / "ca.crt")
        else:
            connection["insecure"] = True
        (self.home / "neutral").mkdir(parents=True, exist_ok=True)
        config = {"superlink": {"default": NAME, NAME: connection}}
        write_text(self.home / "config.toml", tomli_w.dumps(config))
        self._script(SUPERLINK, ["flower-superlink", *self._superlink(tls)])
        for i, node in enumerate(self.nodes):
            if self.tls:
                make_node_key(self.folder / "keys" / node)
            (self.folder / "state" / node).mkdir(parents=True, exist_ok=True)
            self._script(node, ["flower-supernode", *self._node(i, tls)])
        write_text(self.folder / "README.md", self._readme())
        told = asdict(self) | {"folder": ""}
        write_text(self.folder / FILE, json.dumps(told, indent=1))

    def start(self, names: list[str]) -> None:
        """Start processes; nodes' keys are registered once the SuperLink answers.

        Raises RuntimeError if the SuperLink does not start."""
        if SUPERLINK in names and not self.alive(SUPERLINK):
            self._spawn(SUPERLINK)
            deadline = time.monotonic() + START_SECONDS
            while not self._answers():
                if not self.alive(SUPERLINK) or time.monotonic() > deadline:
                    log = self.folder / "log" / f"{SUPERLINK}.log"
                    raise RuntimeError(f"the SuperLink did not start; its log is {log}")
                time.sleep(0.1)
            if self.tls:
                for node in self.nodes:
                    self.register(node)
        for node in names:
            if node != SUPERLINK and not self.alive(node):
                self._spawn(node)

    def _answers(self) -> bool:
        """Whether the SuperLink does; it listens some time before."""
        if not listening(self.port):
            return False
        try:
            self.flwr().call("supernode", "list", NAME)
        except RuntimeError:
            return False
        return True

    def register(self, node: str) -> None:
        """Let the SuperLink accept the node's key, if it does not yet."""
        public = (self.folder / "keys" / node).with_suffix(".pub")
        try:
            self.flwr().call("supernode", "register", str(public), NAME)
        except RuntimeError as error:
            if KNOWN not in str(error).lower():
                raise

    def stop(self, names: list[str]) -> None:
        """End those processes and what they started, and nothing else."""
        mine: list[psutil.Process] = []
        for name in names:
            if (process := self._process(name)) is not None:
                mine += [process, *process.children(recursive=True)]
            self._pid(name).unlink(missing_ok=True)
        for process in mine:
            _end(process, kill=False)
        _, alive = psutil.wait_procs(mine, timeout=10)
        for process in alive:
            _end(process, kill=True)

    def alive(self, name: str) -> bool:
        """Whether the process that `start` started runs."""
        return self._process(name) is not None

    def flwr(self) -> Flwr:
        """Flower's command, over this deployment's SuperLink."""
        return Flwr(self.home, NAME)

    def _superlink(self, tls: Path) -> list[str]:
        arguments = ["--host", self.host, "--port", str(self.port)]
        arguments += ["--disable-runtime-dependency-installation"]
        arguments += ["--database", str(self.database)]
        if not self.tls:
            return [*arguments, "--insecure"]
        arguments += ["--ssl-ca-certfile", str(tls / "ca.crt")]
        arguments += ["--ssl-certfile", str(tls / "server.pem")]
        arguments += ["--ssl-keyfile", str(tls / "server.key"), "--enable-supernode-auth"]
        return arguments

    def _node(self, i: int, tls: Path) -> list[str]:
        node = self.nodes[i]
        config = f"partition-id={i} num-partitions={len(self.ports)}"
        config += f' state-dir="{self.folder / "state" / node}"'
        config += f' data-path="{self.data[i]}"' if self.data else ""
        arguments = ["--superlink", f"{self.host}:{self.port}", "--host", "127.0.0.1"]
        arguments += ["--port", str(self.ports[i]), "--node-config", config]
        if not self.tls:
            return [*arguments, "--insecure"]
        arguments += ["--root-certificates", str(tls / "ca.crt")]
        return [*arguments, "--auth-supernode-private-key", str(self.folder / "keys" / node)]

    def _script(self, name: str, command: list[str]) -> None:
        file = self.folder / f"start-{name}.sh"
        lines = [
            "#!/bin/sh",
            f"export FLWR_HOME={shlex.quote(str(self.home))} FLWR_TELEMETRY_ENABLED=0",
            f"export PATH={shlex.quote(str(COMMANDS))}:$PATH",
            f"cd {shlex.quote(str(self.home / 'neutral'))} || exit 1",
            f"exec {shlex.join(command)}",
        ]
        write_text(file, "\n".join(lines) + "\n")
        file.chmod(0o700)

    def _readme(self) -> str:
        keys = "keys/* (a node's key, its own) and tls/ca.crt" if self.tls else "nothing secret"
        return (
            f"# A federation at {self.host}:{self.port}, {len(self.ports)} nodes\n\n"
            f"fedapps deploy {self.folder} --start, --status, --stop: all of it on this machine.\n"
            f"Elsewhere: copy a node's start script and {keys} there, and mend the paths.\n"
            f"FLWR_HOME={self.home} flwr run APP {NAME} --stream: a run; "
            f"fedapps serve RUN --deployment {self.folder}: serve one.\n"
        )

    def _spawn(self, name: str) -> None:
        log = self.folder / "log" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(self.folder / f"start-{name}.sh")],
                env=environment(self.home),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        born = psutil.Process(process.pid).create_time()
        write_text(self._pid(name), json.dumps({"pid": process.pid, "born": born}))

    def _pid(self, name: str) -> Path:
        return self.folder / "run" / f"{name}.json"

    def _process(self, name: str) -> psutil.Process | None:
        """The process that `start` started, if it is alive; a pid may be another's by now."""
        if not self._pid(name).is_file():
            return None
        told = json.loads(self._pid(name).read_text("utf-8"))
        try:
            process = psutil.Process(told["pid"])
            same = abs(process.create_time() - told["born"]) < 1
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def plan(folder: Path, nodes: int, *, tls: bool, host: str, data: Path | None) -> Deployment:
    """A deployment of `nodes` nodes on free ports. `data` holds a folder for each node, as
    ``fedapps data --export`` writes them.

    Raises ValueError for a number of nodes below 1 or other than that of folders, and for a folder
    whose name no node configuration can hold."""
    folders = sorted(str(f.resolve()) for f in data.iterdir() if f.is_dir()) if data else []
    if nodes < 1 or (data and len(folders) != nodes):
        raise ValueError(f"--nodes is {nodes}; {data or folder} has folders for {len(folders)}")
    for place in (str(folder.resolve()), *folders):
        if not place.isprintable() or set(place) & set('"\\'):
            raise ValueError(
                f"{place!r} has a quote, a backslash or a line's end; rename the folder"
            )
    ports: list[int] = []
    while len(ports) <= nodes:
        if (port := free_port()) not in ports:
            ports.append(port)
    return Deployment(folder.resolve(), host, ports[0], tls, tuple(ports[1:]), tuple(folders))


def _end(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
