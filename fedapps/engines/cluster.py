"""Ray for one command: started, watched, and gone with it however it ends."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from fedapps.engines.flwr import stage
from fedapps.engines.household import GO_ON, MEMBER, household

TRIES = 3  # each waits half a minute for Ray, which is all that it lets itself be waited for
CONNECT_SECONDS = 5.0
VITAL = ("raylet", "gcs_server")  # without which nothing of Ray goes on

Check = Callable[[], None]


def check_address(address: str) -> None:
    """Raise ValueError if nobody listens there: Ray would wait for minutes. "auto" is Ray's to
    find."""
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"--ray-address is {address!r}: {error}; it is host:port of a Ray cluster's head "
            '(ray start --head), or "auto"'
        ) from error


@contextmanager
def ray_cluster(address: str = "") -> Iterator[Check]:
    """Ray on this machine alone, with its cores; or the cluster at `address`, to whose machines
    the package travels.

    Yields what raises RuntimeError once Ray's own processes here have died. Raises RuntimeError
    if Ray does not start."""
    # Read when ray is imported. Under `uv run` workers would build an environment of their own.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call after the end starts no other Ray
    import ray

    with ExitStack() as stack:
        if address:
            app = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "app"
            stage(app)
            found = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            _init(address=address, runtime_env={"working_dir": str(app), "env_vars": found})
            stack.callback(ray.shutdown)
            yield lambda: None  # its processes are others'
        else:
            yield _start(stack)


def _start(stack: ExitStack) -> Check:
    """Start Ray, what it needs being left with the `stack`."""
    import ray

    errors: list[str] = []
    while len(errors) < TRIES:
        with ExitStack() as own:
            folder = own.enter_context(household())
            try:
                with _member(folder):
                    _init(address="local", include_dashboard=False, _temp_dir=str(folder))
            except Exception as error:  # plain ones, where the machine is too busy
                errors.append(f"{type(error).__name__}: {error}".replace("\n", " "))
                ray.shutdown()
                continue
            stack.push(own.pop_all())
            stack.callback(ray.shutdown)  # before its processes are ended
            return _watched()
    raise RuntimeError(
        f"Ray did not start, in {TRIES} tries ({errors[-1]}); try again when this machine has "
        "less to do, or take --engine in-process"
    )


@contextmanager
def _member(folder: Path) -> Iterator[None]:
    """Processes that are started here belong to the household."""
    os.environ[MEMBER] = str(folder)
    try:
        yield
    finally:
        del os.environ[MEMBER]


def _init(**options: Any) -> None:
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _watched() -> Check:
    """Raises RuntimeError if one of the vital processes that were started here has died."""
    vital = {p: p.name() for p in psutil.Process().children() if p.name() in VITAL}

    def check() -> None:
        for process, name in vital.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"Ray's {name} has died, or was killed; {GO_ON}")

    return check
