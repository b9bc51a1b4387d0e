"""The files of a small federation of real nodes, and its processes on this machine."""

import json
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil
import tomli_w

from fedapps.common.addresses import connection_error, read_host, with_port
from fedapps.common.errors import printable
from fedapps.common.new_files import append_to, create, make_folder
from fedapps.common.proxies import LOOPBACK
from fedapps.common.resources import memory_left
from fedapps.engines.flower import COMMANDS, Flwr, environment, free_port, wait_for_superlink
from fedapps.files import write_text
from fedapps.saved import read_json
from fedapps.service import DEPLOYMENT, DEPLOYMENT_VARIABLE
from fedapps.service.certificates import (
    check_valid,
    make_certificates,
    make_node_key,
    read_request,
)

SUPERLINK = "superlink"
# Bytes of memory of a node that answers, measured by proportional set size: 165 MB for its two
# processes, and 341 MB for the one that Flower starts for each message.
NODE_MEMORY = 500_000_000
# In Flower's error for a key that is registered; its command gives no code that would say so.
REGISTERED = "already in use"
NAME = "deployment"  # of the SuperLink in Flower's configuration

SCRIPT = """#!/bin/sh
export FLWR_HOME={home} FLWR_TELEMETRY_ENABLED=0
export {variable}={folder}
export PATH={commands}:$PATH
no_proxy="{hosts},${{no_proxy-$NO_PROXY}}"
export no_proxy NO_PROXY="$no_proxy"
cd {home}/neutral || exit 1
exec {command}
"""
# Of a node that made its own key: beside the folder `keys`, wherever its owner puts it.
NODE_SCRIPT = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd) || exit 1
export FLWR_HOME="$here/home" FLWR_TELEMETRY_ENABLED=0
no_proxy="{hosts},${{no_proxy-$NO_PROXY}}"
export no_proxy NO_PROXY="$no_proxy"
umask 077
mkdir -p "$here/home/neutral" "$here/state"
cd "$here/home/neutral" || exit 1
config="partition-id={number} num-partitions={nodes} state-dir=\\"$here/state\\""
if [ -n "$1" ]; then  # the folder with the node's data
    config="$config data-path=\\"$1\\""
fi
exec flower-supernode --superlink {address} --host 127.0.0.1 --port {port} \\
    --node-config "$config" --root-certificates "$here/ca.crt" \\
    --auth-supernode-private-key "$here/keys/{node}"
"""
HOME_LINE = "export FLWR_HOME="  # in the scripts of this machine
RUN_SETTINGS = "run.toml"  # what a run on clients of others should set
README = """# A federation at {address}, {nodes} nodes

fedapps deploy {folder} --start, --status, --stop: all processes on this machine.
On other machines: copy a node's start script and {secrets} there, and adapt the paths.
FLWR_HOME={folder}/home flwr run APP {name} --stream --run-config {folder}/run.toml: a run
fedapps serve RUN --deployment {folder}: a service
"""


@dataclass(frozen=True)
class Deployment:
    """A SuperLink at `host` (an address, or a name in ASCII) and `port`, and its nodes, each with a
    port of `ports` and its data in `data` (empty: each node has its partition of the run's
    dataset). With `own_keys` each node makes its key on its own machine, and `sign` admits it.

    `write` writes scripts, keys and Flower's configuration to `folder`."""

    folder: Path
    host: str
    port: int
    tls: bool
    ports: tuple[int, ...]
    data: tuple[str, ...]
    own_keys: bool = False

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The deployment that `write` wrote to `folder`. Raises ValueError if there is none, or if
        its file is damaged."""
        file = folder / DEPLOYMENT
        if not file.is_file():
            raise ValueError(
                f"{folder} holds no {DEPLOYMENT}; write it: fedapps deploy {folder} --nodes 3"
            )
        values = read_json(file)
        try:
            lists = {key: tuple(values[key]) for key in ("ports", "data")}
            return cls(**(values | lists | {"folder": folder.resolve()}))
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged: it describes no deployment; copy it again if it is a copy, "
                "else write a new deployment"
            ) from error

    @property
    def nodes(self) -> list[str]:
        """``node-0``, ``node-1``, …"""
        return [f"node-{i}" for i in range(len(self.ports))]

    @property
    def home(self) -> Path:
        """FLWR_HOME of all processes, with the configuration that names the SuperLink."""
        return self.folder / "home"

    @property
    def address(self) -> str:
        """Where the SuperLink listens: ``host:port``, an address of IPv6 in brackets."""
        return with_port(self.host, self.port)

    @property
    def name(self) -> str:
        """The SuperLink's name in Flower's configuration."""
        return NAME

    def flwr(self) -> Flwr:
        """Flower's command, over this deployment's SuperLink."""
        return Flwr(self.home, NAME, self.host)

    def write(self) -> None:
        """Write all files that the processes need, with a start script for each."""
        # The SuperLink keeps its registered nodes there when it restarts.
        database = self.folder / "superlink.db"
        tls = self.folder / "tls"
        self.folder.mkdir(parents=True, exist_ok=True)
        # It holds models and messages. SQLite's further files get its mode.
        create(database, 0o600).close()
        connection: dict[str, str | bool] = {"address": self.address}
        if self.tls:
            make_certificates(tls, self.host)
            connection["root-certificates"] = str(tls / "ca.crt")
        else:
            connection["insecure"] = True
        make_folder(self.home)
        make_folder(self.home / "neutral")
        make_folder(self.folder / "run")
        config = {"superlink": {"default": NAME, NAME: connection}}
        write_text(self.home / "config.toml", tomli_w.dumps(config))
        security = ["--ssl-ca-certfile", tls / "ca.crt", "--ssl-certfile", tls / "server.pem",
                    "--ssl-keyfile", tls / "server.key", "--enable-supernode-auth"]  # fmt: skip
        self._write_script(
            SUPERLINK, "flower-superlink", "--host", self.host, "--port", self.port,
            "--disable-runtime-dependency-installation", "--database", database,
            *(security if self.tls else ["--insecure"]),
        )  # fmt: skip
        for i, node in enumerate(self.nodes):
            if not self.own_keys:
                self._write_node(i, node)
        secrets = "keys/NODE and tls/ca.crt" if self.tls else "nothing secret"
        if self.own_keys:
            secrets = "what --sign wrote to signed/NODE"
        values = {"address": self.address, "folder": self.folder, "name": NAME}
        readme = README.format(**values, nodes=len(self.ports), secrets=secrets)
        write_text(self.folder / "README.md", readme)
        write_text(self.folder / RUN_SETTINGS, tomli_w.dumps({"protect": True}))
        write_text(self.folder / DEPLOYMENT, json.dumps(asdict(self) | {"folder": ""}, indent=1))

    def _write_node(self, i: int, node: str) -> None:
        key = self.folder / "keys" / node
        state = self.folder / "state" / node
        for place in (state.parent, state):  # clients' models and predictions
            make_folder(place)
            place.chmod(0o700)
        config = f'partition-id={i} num-partitions={len(self.ports)} state-dir="{state}"'
        config += f' data-path="{self.data[i]}"' if self.data else ""
        security: list[object] = ["--insecure"]
        if self.tls:
            make_node_key(key)
            authority = self.folder / "tls" / "ca.crt"
            security = ["--root-certificates", authority, "--auth-supernode-private-key", key]
        self._write_script(
            node, "flower-supernode", "--superlink", self.address,
            "--host", "127.0.0.1", "--port", self.ports[i], "--node-config", config, *security,
        )  # fmt: skip

    def sign(self, request: Path) -> Path:
        """Admit the node that made the request: its public key is registered when the SuperLink
        runs. Returns a folder with what the node needs: start script and certificate.

        Raises ValueError for a request that is none, of an unknown node, or of a node that has
        another key."""
        if not self.own_keys:
            raise ValueError(
                f"{self.folder} has keys for its nodes; for keys that nodes make themselves: "
                "fedapps deploy FOLDER --nodes N --tls --own-keys"
            )
        node, public = read_request(request)
        if node not in self.nodes:
            raise ValueError(f"{request} is of {node!r}; known: {', '.join(self.nodes)}")
        file = self._public_key(node)
        if file.is_file() and file.read_bytes() != public:
            raise ValueError(
                f"{node} has another key, {file}; if its owner lost that one, unregister it (flwr "
                f"supernode unregister), remove {file}, and sign again"
            )
        make_folder(file.parent)
        with create(file) as target:
            target.write(public)
        bundle = self.folder / "signed" / node
        make_folder(bundle.parent)
        make_folder(bundle)
        with create(bundle / "ca.crt") as target:
            target.write((self.folder / "tls" / "ca.crt").read_bytes())
        number = self.nodes.index(node)
        script = bundle / f"start-{node}.sh"
        values = {"node": node, "number": number, "nodes": len(self.nodes)}
        write_text(
            script, NODE_SCRIPT.format(**values, address=shlex.quote(self.address),
                                       port=self.ports[number], hosts=",".join(LOOPBACK))
        )  # fmt: skip
        script.chmod(0o700)
        if self.alive(SUPERLINK):
            self.register(node)
        return bundle

    def _public_key(self, node: str) -> Path:
        return self.folder / "keys" / f"{node}.pub"

    def startable(self) -> list[str]:
        """The SuperLink, and the nodes that start on this machine."""
        return [SUPERLINK] if self.own_keys else [SUPERLINK, *self.nodes]

    def _script(self, name: str) -> Path:
        return self.folder / f"start-{name}.sh"

    def _write_script(self, name: str, *command: object) -> None:
        file = self._script(name)
        # A node may run on another machine, which may reach the SuperLink through a proxy.
        hosts_without_proxy = [*LOOPBACK]
        if name == SUPERLINK:
            hosts_without_proxy.append(self.host)
        script = SCRIPT.format(
            home=shlex.quote(str(self.home)),
            commands=shlex.quote(str(COMMANDS)),
            hosts=",".join(hosts_without_proxy),
            command=shlex.join(map(str, command)),
            variable=DEPLOYMENT_VARIABLE,
            folder=shlex.quote(str(self.folder)),
        )
        write_text(file, script)
        file.chmod(0o700)

    def memory_warning(self, names: Collection[str]) -> str:
        """A sentence if these processes may need more memory than is left, else ""."""
        nodes = len(set(names) - {SUPERLINK})
        needed = nodes * NODE_MEMORY
        left = memory_left()
        if needed <= left:
            return ""
        return (
            f"{nodes} nodes that answer at once take about {needed / 1e9:.1f} GB, and "
            f"{left / 1e9:.1f} GB are left on this machine: start fewer by --only, or elsewhere"
        )

    def start(self, names: list[str]) -> None:
        """Start processes. Nodes' keys are registered when the SuperLink answers.

        Raises ValueError for a node whose key is on another machine, and if the folder was moved or
        copied; RuntimeError if a certificate is not valid, or if the SuperLink does not start; then
        it is ended."""
        for name in names:
            if name not in self.startable():
                raise ValueError(f"{name} starts on the machine that has its key: start-{name}.sh")
            self._check_place(name)
        self.check_certificates()
        if SUPERLINK in names and not self.alive(SUPERLINK):
            try:
                self._start_superlink()
            except BaseException:  # also Ctrl-C
                self.stop([SUPERLINK])
                raise
        for node in names:
            if node != SUPERLINK and not self.alive(node):
                self._spawn(node)

    def _check_place(self, name: str) -> None:
        """Raise ValueError if a start script uses the files of another folder, as in a copy."""
        script = self._script(name)
        for line in script.read_text("utf-8").splitlines():
            if not line.startswith(HOME_LINE):
                continue
            home = Path(shlex.split(line.removeprefix(HOME_LINE))[0])
            if home != self.home:
                raise ValueError(
                    f"{script} starts the deployment in {home.parent}, from which this folder was "
                    f"moved or copied; move it back, or replace {home.parent} by {self.folder} in "
                    f"start-*.sh and {self.home / 'config.toml'}"
                )

    def check_certificates(self) -> None:
        """Raise RuntimeError if the nodes would refuse a certificate: it has expired, or is not
        valid yet."""
        if self.tls:
            for name in ("ca.crt", "server.pem"):
                check_valid(self.folder / "tls" / name)

    def _start_superlink(self) -> None:
        log = self._log_file(SUPERLINK)
        written = log.stat().st_size if log.is_file() else 0
        self._spawn(SUPERLINK)
        wait_for_superlink(self._ask, lambda: self.alive(SUPERLINK), log, written)
        if self.tls:
            for node in self.nodes:
                if self._public_key(node).is_file():  # else nobody has signed its request yet
                    self.register(node)

    def _ask(self) -> None:
        """Raise RuntimeError unless the SuperLink answers; its port is open some time before."""
        if error := connection_error(self.host, self.port):
            raise RuntimeError(error)
        self.flwr().call("supernode", "list", NAME)

    def register(self, node: str) -> None:
        """Register the node's key with the SuperLink, unless it is registered."""
        try:
            self.flwr().call("supernode", "register", str(self._public_key(node)), NAME)
        except RuntimeError as error:
            if REGISTERED not in str(error).lower():
                raise

    def stop(self, names: list[str]) -> None:
        """Stop those processes and their children, and nothing else."""
        processes: list[psutil.Process] = []
        for name in names:
            started = self._process(name)
            if started is not None:
                processes += [started, *started.children(recursive=True)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.Error):  # it has ended, or belongs to another user
                    end(process)
            _, processes = psutil.wait_procs(processes, timeout=10)
        for name in names:
            if not self.alive(name):
                self._pid_file(name).unlink(missing_ok=True)

    def alive(self, name: str) -> bool:
        """Whether the process that `start` started runs."""
        return self._process(name) is not None

    def _spawn(self, name: str) -> None:
        log = self._log_file(name)
        make_folder(log.parent)
        with append_to(log) as output:
            process = subprocess.Popen(
                [str(self._script(name))],
                env=environment(self.home, self.host),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        identity = {"pid": process.pid, "birth": birth(process.pid)}
        write_text(self._pid_file(name), json.dumps(identity))

    def log(self, name: str, lines: int) -> list[str]:
        """The last lines of a process's log, printable. Raises ValueError if it was not started
        on this machine."""
        file = self._log_file(name)
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist: {name} was not started by --start on this machine; its "
                "log is on the machine that runs its start script"
            )
        with file.open(encoding="utf-8", errors="replace") as text:
            last = deque(text, maxlen=lines)
        return [printable(line.rstrip("\n")) for line in last]

    def _log_file(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def _pid_file(self, name: str) -> Path:
        return self.folder / "run" / f"{name}.json"

    def _process(self, name: str) -> psutil.Process | None:
        """The process that `start` started, if it runs; its pid may be another process's by now."""
        if self._pid_file(name).is_file():
            values = json.loads(self._pid_file(name).read_text("utf-8"))
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                process = psutil.Process(values["pid"])
                same = birth(process.pid) == values.get("birth")
                return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        return None


def birth(pid: int) -> str:
    """What tells a process from later ones of its pid, and stays if the clock is set.

    Linux: the boot, and clock ticks since then. Other kernels store the time of the start."""
    if not sys.platform.startswith("linux"):
        return repr(psutil.Process(pid).create_time())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # after the name
    return f"{boot} {fields[19]}"


def plan(
    folder: Path, nodes: int, *, tls: bool, host: str, data: Path | None, own_keys: bool = False
) -> Deployment:
    """A deployment of `nodes` nodes on free ports. `data` holds a folder for each node, as
    ``fedapps data --export`` writes them.

    With `own_keys` nodes make their keys and name their data themselves.
    Raises ValueError for a `host` that is no address or name, if there are fewer than 1 nodes or
    not as many as folders, and for a path that a node configuration cannot hold."""
    if own_keys and (data is not None or not tls):
        raise ValueError(
            "--own-keys needs --tls and takes no --data: a node's owner names its data when "
            "starting it"
        )
    host = read_host(host)
    folders = sorted(str(f.resolve()) for f in data.iterdir() if f.is_dir()) if data else []
    if nodes < 1 or (data and len(folders) != nodes):
        raise ValueError(f"--nodes is {nodes}; {data or folder} has folders for {len(folders)}")
    for path in (str(folder.resolve()), *folders):
        if not path.isprintable() or set(path) & set('"\\'):
            raise ValueError(
                f"{path!r} has a quote, a backslash or a line break; rename the folder"
            )
    ports = set[int]()
    while len(ports) <= nodes:
        ports.add(free_port())
    return Deployment(
        folder.resolve(), host, ports.pop(), tls, tuple(ports), tuple(folders), own_keys
    )
