"""Jobs: (method, seed) pairs of one configuration, run on an engine, each to a folder."""

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapps.engines import check_engine_name
from fedapps.engines.cluster import ray_cluster
from fedapps.engines.household import GO_ON
from fedapps.engines.superlink import SuperLink
from fedapps.files import locked
from fedapps.methods import METHODS
from fedapps.results.checkpoint import FOLDER as CHECKPOINTS
from fedapps.results.recorder import write_configuration
from fedapps.settings.config import Config, Value, folder_name, variant
from partitions.datasets import own_path

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

MOST_UNASKED = 8  # runs side by side: each has torch and its data in memory
POLL_SECONDS = 0.25
LAST_SECONDS = 2.0
STATUS_SECONDS = 10.0  # between questions to the SuperLink; each starts a process
QUESTIONS = 4  # in a row that it may leave without an answer


@dataclass
class Job:
    """One run: its whole configuration, and what became of it."""

    method: str  # with settings of its own if it has some: "fedembed assignment=som"
    seed: int
    config: Config
    folder: Path
    error: str = ""
    done: bool = False
    rounds: int = 0  # reported so far, and the seconds that they took
    seconds: float = 0.0
    _lines: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        """``<method>-seed<seed>``, also the folder's name."""
        return folder_name(self.method, self.seed)

    @property
    def total(self) -> int:
        """Rounds that it will have, those in which labeled novel clients learn with them."""
        novel = METHODS[str(self.config["method"])].client.few_shot == "rounds"
        return int(self.config["rounds"]) + novel * int(self.config["novel-rounds"])

    def news(self) -> list[dict[str, Any]]:
        """The rounds that were reported since the last call."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            return []
        whole = file.read_text("utf-8").rpartition("\n")[0]
        lines = whole.split("\n") if whole else []
        fresh, self._lines = lines[self._lines :], len(lines)
        reports = [json.loads(line) for line in fresh]
        self.rounds += len(reports)
        self.seconds += sum(report.get("seconds", 0.0) for report in reports)  # private: untold
        return reports

    def summary(self) -> dict[str, Any]:
        """The run's summary, {} while there is none."""
        file = self.folder / "summary.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def make_jobs(
    config: Mapping[str, Value], methods: Sequence[str], seeds: Sequence[int], output: Path
) -> list[Job]:
    """One job per method, which may have settings of its own, and seed."""
    jobs = []
    for method in methods:
        for seed in seeds:
            folder = output.resolve() / folder_name(method, seed)
            own: dict[str, Value] = {"seed": seed, "output-dir": str(folder), **_located(config)}
            jobs.append(Job(method, seed, variant(config, method) | own, folder))
    return jobs


def _located(config: Mapping[str, Value]) -> Config:
    """Folders of data as absolute paths: engines run elsewhere."""
    found = {"data-dir": str(Path(str(config["data-dir"])).resolve())} if config["data-dir"] else {}
    path = own_path(str(config["dataset"]), str(config["data-dir"]))
    return {**found, **({"dataset": str(path.resolve())} if path else {})}


def chosen(runs: int, parallel: int | None, *, ray: bool) -> tuple[str, int]:
    """Engine and runs side by side where no engine is asked for: whole runs in process where each
    core gets one of the `runs` or `parallel` are to, else one after the other on Ray, clients side
    by side. What only Ray has (`ray`) decides alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if ray or parallel == 1 or (parallel is None and runs < max(2, cores or 1)):
        return "ray", parallel or 1
    return "in-process", parallel or min(runs, cores or 1, MOST_UNASKED)


def check_engine(engine: str, jobs: Sequence[Job] = (), parallel: int = 1) -> None:
    """Raise ValueError for an unknown engine, and for one that cannot run what is not done of the
    `jobs`, `parallel` at once."""
    check_engine_name(engine)
    waiting = [job for job in jobs if not job.done]
    if engine != "in-process" and any(int(job.config["cohort"]) > 1 for job in waiting):
        raise ValueError(f"a cohort trains in one process: engine in-process, not {engine}")
    if engine == "ray" and min(parallel, len(waiting)) > 1:
        raise ValueError("ray gives all cores to one run; --jobs is for flower and in-process")


def run_jobs(
    jobs: list[Job],
    engine: str,
    *,
    parallel: int = 1,
    gpus_per_client: float = 0.0,
    ray_address: str = "",
    follow: Callable[[list[Job]], None],
) -> None:
    """Run every job that is not done; `follow` is called with them a few times a second.

    `ray_address` is that of a Ray cluster ("": Ray is started on this machine).

    A job that fails keeps its error in one line; the others go on. Raises ValueError as
    `check_engine`, RuntimeError if the engine itself does not start, OSError if another process
    is at one of the runs."""
    check_engine(engine, jobs, parallel)
    follow([job for job in jobs if job.done])
    for job in jobs:
        if job.done:  # it may have been killed before it could remove them
            shutil.rmtree(job.folder / CHECKPOINTS, ignore_errors=True)
    jobs = [job for job in jobs if not job.done]
    if not jobs:
        return
    parallel = min(parallel, len(jobs))
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        with locked(job.folder):
            (job.folder / "summary.json").unlink(missing_ok=True)
            (job.folder / "metrics.jsonl").unlink(missing_ok=True)
            if not (job.folder / CHECKPOINTS).is_dir():  # so that it is known, begun or not
                with suppress(OSError):  # a full disk is the run's own to tell
                    write_configuration(job.folder, job.config)
    if engine == "flower":
        _run_on_superlink(jobs, parallel, gpus_per_client, follow)
    elif engine == "ray":
        _run_on_actors(jobs, gpus_per_client, ray_address, follow)
    elif parallel == 1:
        with parking() as pause:
            _run_here(jobs, lambda config: run_in_process(config, pause), follow)
    else:
        _run_as_processes(jobs, parallel, follow)


def run_in_process(config: Config, pause: Callable[[], None] = lambda: None) -> None:
    """One run on the in-process grid, in this process; `pause` is called before every message."""
    from fedapps.clientapp import app
    from fedapps.engines.grid import InProcessGrid
    from fedapps.serverapp import run

    nodes, cohort = int(config["num-clients"]), int(config["cohort"])
    run(InProcessGrid.simulation(app, config, nodes, cohort, pause), config, "in-process")


@contextmanager
def parking() -> Iterator[Callable[[], None]]:
    """Yields what the thread that works calls between messages. After Ctrl-C it stands still there
    until the process ends: Ray, and torch, abort a process that ends while they work."""
    interrupted, parked = threading.Event(), threading.Event()

    def pause() -> None:
        if interrupted.is_set():
            parked.set()
            threading.Event().wait()

    try:
        yield pause
    except KeyboardInterrupt:
        interrupted.set()
        parked.wait(LAST_SECONDS)
        raise


def _client_app() -> "ClientApp":
    from fedapps.clientapp import app

    return app


def _run_here(
    jobs: list[Job],
    carry_out: Callable[[Config], None],
    follow: Callable[[list[Job]], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """One job after the other by `carry_out`, in this process, until `check` raises RuntimeError:
    what they need is gone."""

    def work() -> None:
        for job in jobs:
            try:
                check()
                carry_out(job.config)
            except (Exception, SystemExit) as error:  # the others go on; it is told at the end
                job.error = _line(error)
            job.done = True

    worker = threading.Thread(target=work, daemon=True)  # Ctrl-C must not wait for it
    worker.start()
    while worker.is_alive():
        worker.join(POLL_SECONDS)
        follow(jobs)
        try:
            check()
        except RuntimeError as error:
            # At once: Ray ends a process whose raylet has died, and asks nobody.
            print(error, file=sys.stderr, flush=True)
            worker.join(LAST_SECONDS)  # it finds out itself, and writes it down, unless it hangs
            _close([job for job in jobs if not job.done], _line(error))
            follow(jobs)
            return


def _run_on_actors(
    jobs: list[Job], gpus: float, address: str, follow: Callable[[list[Job]], None]
) -> None:
    """One job after the other, its clients side by side on Ray actors."""
    with ray_cluster(address) as check:
        from fedapps.engines.grid import simulated
        from fedapps.engines.ray_grid import Actors, RayGrid
        from fedapps.serverapp import run

        with Actors(_client_app, gpus=gpus) as actors, parking() as pause:

            def carry_out(config: Config) -> None:
                nodes = simulated(int(config["num-clients"]))
                run(RayGrid(actors, config, nodes, check, pause), config, "ray")

            _run_here(jobs, carry_out, follow, check)


def _run_as_processes(jobs: list[Job], parallel: int, follow: Callable[[list[Job]], None]) -> None:
    """The jobs in `parallel` processes, each of which takes one after the other, the longest first;
    a process that dies costs its job alone."""
    waiting, idle = longest_first(jobs), [_worker() for _ in range(parallel)]
    running: dict[Any, tuple[Job, Any]] = {}  # job and process by the pipe that tells its error
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job, (pipe, process) = waiting.pop(0), idle.pop() if idle else _worker()
                with suppress(BrokenPipeError):  # it has died: the pipe's end tells
                    pipe.send(job.config)
                running[pipe] = (job, process)
            told: list[Any] = multiprocessing.connection.wait(list(running), POLL_SECONDS)
            for pipe in told:
                job, process = running.pop(pipe)
                try:
                    job.error = str(pipe.recv())
                    idle.append((pipe, process))
                except (EOFError, ConnectionResetError):
                    process.join()
                    job.error = f"its process ended with code {process.exitcode}"
                job.done = True
            follow(jobs)
    finally:
        for process in [process for _, process in (*running.values(), *idle)]:
            process.terminate()


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """By the effort of their methods and their rounds, so that no core waits long for the last."""

    def time_of(job: Job) -> float:
        return METHODS[str(job.config["method"])].effort * job.total

    return sorted(jobs, key=time_of, reverse=True)


def _worker() -> tuple[Connection, Any]:
    """A process that waits for jobs, and the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    level = logging.getLogger("flwr").level
    process = spawn.Process(target=_work, args=(theirs, level), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _work(pipe: Connection, level: int) -> None:
    """One job after the other in a process that ends with its parent; tells each one's error, "" if
    there is none. Flower logs from `level` on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    logging.getLogger("flwr").setLevel(level)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        config = pipe.recv()
        try:
            run_in_process(config)
            pipe.send("")
        except (Exception, SystemExit) as error:  # told in one line; the other jobs go on
            pipe.send(_line(error))


def _run_on_superlink(
    jobs: list[Job], parallel: int, gpus: float, follow: Callable[[list[Job]], None]
) -> None:
    """One Flower run for jobs that differ in method alone, in turn; at most `parallel` at once."""
    with SuperLink(jobs[0].folder.parent / "superlink.log") as superlink:
        waiting = flower_runs(jobs)
        running: dict[int, list[Job]] = {}
        asked, in_vain = time.monotonic(), 0
        while waiting or running:
            if waiting and len(running) < parallel:
                group = waiting.pop(0)
                try:
                    running[_submit(superlink, group, gpus)] = group
                except RuntimeError as error:
                    _close(group, _line(error))
            time.sleep(POLL_SECONDS)
            follow(jobs)
            superlink.check()
            overdue = time.monotonic() - asked > STATUS_SECONDS
            for run_id, group in list(running.items()):
                for job in group:
                    summary = job.summary()
                    job.done, job.error = "finished" in summary, summary.get("error", "")
                if not overdue and not all(job.done for job in group):
                    continue
                try:
                    reason, in_vain = _ended(superlink, run_id), 0
                except RuntimeError:  # on a busy machine a command may fail; the run goes on
                    in_vain += 1
                    if in_vain == QUESTIONS:
                        raise
                    continue
                if reason:
                    _close(group, reason)
                    del running[run_id]
            if overdue:
                asked = time.monotonic()
        follow(jobs)


def flower_runs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that one Flower run can serve: plain methods under one configuration, by seed."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        common = job.config | {"method": "", "output-dir": ""}
        own = job.name if " " in job.method else ""  # else the run's folders would not be the jobs'
        groups.setdefault((own, *common.items()), []).append(job)
    return list(groups.values())


def _submit(superlink: SuperLink, group: list[Job], gpus: float) -> int:
    """Hand a group of jobs to the SuperLink as one run."""
    first = group[0]
    methods = ",".join(str(job.config["method"]) for job in group)
    folder = first.folder if len(group) == 1 else first.folder.parent
    nodes = min(int(first.config["num-clients"]), os.cpu_count() or 1)
    federation = (
        f"num-supernodes={nodes} client-resources-num-cpus=1 client-resources-num-gpus={gpus}"
    )
    return superlink.submit(
        first.config | {"method": methods, "output-dir": str(folder)}, federation
    )


def _ended(superlink: SuperLink, run_id: int) -> str:
    """Why the Flower run ended, "" while it goes on. Raises RuntimeError if it cannot be asked."""
    try:
        status, details = superlink.status(run_id)
    except RuntimeError:
        superlink.check()  # its death says more
        raise
    if not status.startswith("finished"):
        return ""
    if "heartbeat" in details:
        return f"the run's process has died, or was killed ({details}); {GO_ON}"
    failed = status != "finished:completed"  # else there is nothing to ask for, by a process
    return (superlink.error(run_id) if failed else "") or f"the run {status} {details}".strip()


def _close(group: list[Job], error: str) -> None:
    """The run is over: whoever has not finished has failed with `error`."""
    for job in group:
        summary = job.summary()
        if not summary.get("finished"):
            job.error = str(summary.get("error", error))
        job.done = True


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")
