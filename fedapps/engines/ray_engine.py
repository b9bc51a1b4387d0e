"""The ray engine: starts, watches and ends Ray for one command."""

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from fedapps.common.resources import num_cpus
from fedapps.common.signals import guarded_in_c, handlers_kept, raise_swallowed
from fedapps.engines.in_process_grid import Pause, Simulated
from fedapps.engines.jobs import Apps
from fedapps.engines.process_group import GROUP, RESUME_HINT, process_group
from fedapps.engines.staging import stage
from fedapps.settings.config import Config

MAX_STARTS = 3  # Ray itself waits half a minute in each
OPEN_FILES = 100  # that the start of Ray and its actors take at most in this process, and more
VITAL = ("raylet", "gcs_server")  # processes without which Ray cannot work

CarryOut = Callable[[Config, Pause], None]
Check = Callable[[], None]


@contextmanager
def on_ray(apps: Apps, gpus: float, address: str) -> Iterator[tuple[CarryOut, Check]]:
    """Ray with actors for the clients of runs, `gpus` of a GPU each.

    Yields a function that carries out a run, its clients in parallel, and the function of
    `ray_cluster`."""
    with ray_cluster(address) as check:
        from fedapps.engines.ray_actors import Actors
        from fedapps.engines.ray_grid import RayGrid

        with Actors(apps.client_app, gpus=gpus) as actors:

            def carry_out(config: Config, pause: Pause) -> None:
                nodes = Simulated(int(config["num-clients"]))
                apps.run(RayGrid(actors, config, nodes, check, pause), config, "ray")

            yield carry_out, check


@contextmanager
def ray_cluster(address: str = "") -> Iterator[Check]:
    """Ray on this machine alone, with the cores that this process may use; or the cluster at
    `address`, to whose machines the package is copied.

    Yields a function that raises RuntimeError once Ray's processes on this machine have died.
    Raises RuntimeError if Ray does not start."""
    # Read when ray is imported. Under `uv run` workers would build an environment of their own.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late call after the end starts no other Ray
    import ray

    with ExitStack() as stack:
        if address:
            app = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "app"
            stage(app)
            variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            _init(address=address, runtime_env={"working_dir": str(app), "env_vars": variables})
            stack.callback(ray.shutdown)
            yield lambda: None  # the cluster's processes are not ours to watch
        else:
            yield _start(stack)


def _start(stack: ExitStack) -> Check:
    """Start Ray; the `stack` ends it."""
    import ray

    _check_open_files()
    errors: list[str] = []
    while len(errors) < MAX_STARTS:
        with ExitStack() as attempt:
            folder = attempt.enter_context(process_group())
            os.environ[GROUP] = str(folder)
            try:
                _init(
                    address="local",
                    num_cpus=num_cpus(),
                    include_dashboard=False,
                    _temp_dir=str(folder),
                )
            except Exception as error:  # Ray raises a plain one if the machine is too busy
                raise_swallowed()
                errors.append(f"{type(error).__name__}: {error}".replace("\n", " "))
                ray.shutdown()
                continue
            finally:
                del os.environ[GROUP]
            stack.push(attempt.pop_all())
            stack.callback(ray.shutdown)  # before the group's processes are ended
            return _watch()
    raise RuntimeError(
        f"Ray did not start, in {MAX_STARTS} tries ({errors[-1]}); try again when this machine has "
        "less to do, or take --engine in-process"
    )


def _check_open_files() -> None:
    """Raise RuntimeError if this process may not open the files that Ray needs.

    Ray leaves a log and two sockets open in it after each run. Nobody else can close them safely:
    its library may still write there."""
    if not hasattr(psutil, "RLIMIT_NOFILE"):  # not on Linux
        return
    process = psutil.Process()
    opened = process.num_fds()
    allowed, _ = process.rlimit(psutil.RLIMIT_NOFILE)
    if allowed != psutil.RLIM_INFINITY and opened + OPEN_FILES > allowed:
        raise RuntimeError(
            f"this process has {opened} open files of the {allowed} that it may have; Ray takes "
            f"{OPEN_FILES} more, and each run on Ray leaves three open until the process ends: "
            "begin a new process, raise the limit (ulimit -n), or take --engine in-process"
        )


def _init(**options: Any) -> None:
    import ray

    try:
        # Ray's handlers would end the process in the middle of a message, or abort it.
        with handlers_kept(), guarded_in_c():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit as error:  # the signal came after Ray had set its handler
        if error.code == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
        raise


def _watch() -> Check:
    """Raises RuntimeError if one of Ray's vital processes on this machine has died."""
    vital = {p: p.name() for p in psutil.Process().children() if p.name() in VITAL}

    def check() -> None:
        for process, name in vital.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"Ray's {name} has died, or was killed; {RESUME_HINT}")

    return check
