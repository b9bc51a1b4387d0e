"""Many registered clients: ``python -m experiments.benchmark clients clients-ray``. Needs MNIST.

100, 1 000 and 10 000 clients are registered, 100 of them take part in a round: a round must cost
what takes part. In process, which writes docs/figures/registered-clients.png, and on Ray actors."""

import json
import logging
import multiprocessing
import resource
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from fedapps.settings.config import Config, defaults

METHODS = ("fedavg", "scaffold", "fedper", "pfedhn", "fedtta", "fedembed")
REGISTERED = (100, 1000, 10_000)
SAMPLED, ROUNDS = 100, 6
SERVER, ACTOR = 1500, 1000  # MB of a process at most
MOST = SERVER + ACTOR  # of one that is both
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "registered-clients.png"
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds
T = TypeVar("T")


def protocol(method: str, registered: int) -> Config:
    """`method` on MNIST, 100 of the registered clients in a round, 5 local steps on 4 samples each,
    as many as the smallest share has.

    pFedHN's embeddings have 26 entries, as its rule gives for 100 clients: by that rule they grow
    with the number registered, and the hypernetwork with them."""
    own: Config = {"partition": "preference", "fedembed.local-epochs": 0}
    return (
        defaults()
        | {
            "method": method,
            "dataset": "mnist",
            "num-clients": registered,
            "train-fraction": 1.0,
            "fraction-train": SAMPLED / registered,
            "fraction-evaluate": SAMPLED / registered,
            "rounds": ROUNDS,
            "local-steps": 5,
            "batch-size": 4,
            "evaluate-every": 10**6,
            "checkpoint-every": 0,
            "pfedhn.embedding-dim": 26,
        }
        | (own if method == "fedembed" else {})
    )


def later_rounds(config: Config) -> list[dict[str, float]]:
    """Seconds of every later round of a run in process by phase, evaluation apart."""
    from fedapps.serverapp import run_in_process

    with tempfile.TemporaryDirectory() as folder:
        run_in_process(config | {"output-dir": folder})
        lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    told = [json.loads(line)["phases"] for line in lines[1:]]
    return [{phase: s for phase, s in one.items() if phase != "evaluate"} for one in told]


def apart(work: Callable[[Config], T], config: Config) -> T:
    """What `work` gives in a new process, whose peak memory is its own; its error, if it fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, config).result()


def _measure(config: Config) -> tuple[float, float]:
    """The median of the later rounds' seconds, and the process's peak memory in MB."""
    import torch

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seconds = [sum(phases.values()) for phases in later_rounds(config)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return float(np.median(seconds)), peak


def _measure_on_actors(config: Config) -> tuple[float, float, float]:
    """On Ray: the median of the later rounds' seconds, and in MB the most memory, as seen ten times
    a second, of the server's process and of an actor."""
    from fedapps.engines.jobs import make_jobs
    from fedapps.engines.run import run_jobs
    from fedapps.serverapp import APPS

    logging.getLogger("flwr").setLevel(logging.ERROR)
    own = psutil.Process()
    most: Counter[psutil.Process] = Counter()

    def follow(_: object) -> None:
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.Error, OSError, KeyError):  # it has ended
                if process == own or process.name().startswith("ray::Actor"):
                    most[process] = max(most[process], _resident(process.pid))

    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(config, [str(config["method"])], [0], Path(folder))
        run_jobs(jobs, "ray", APPS, follow=follow)
        if jobs[0].error:
            raise RuntimeError(jobs[0].error)
        reports = jobs[0].news()
    seconds = [sum(s for p, s in r["phases"].items() if p != "evaluate") for r in reports[1:]]
    server = most.pop(own)
    return float(np.median(seconds)), server, max(most.values())


def _resident(process: int) -> int:
    """Its resident set in MB without what it maps of Ray's store, which is another process's."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    told = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return (told["VmRSS:"] - told["RssShmem:"]) // 1024


def on_actors(methods: tuple[str, ...] = METHODS) -> Rows:
    """The time of a round on Ray actors with most clients registered over that with fewest, and
    the memory with most."""
    few, many = REGISTERED[0], REGISTERED[-1]
    table: Rows = []
    for method in methods:
        fewest = measured_on_actors(method, few)
        seconds, server, actor = measured_on_actors(method, many)
        took = f"{seconds:.2f} / {fewest[0]:.2f} a round"
        table += [
            (f"{method} on ray, {many} registered / {few}", seconds / fewest[0], "1.20", took),
            (f"{method}, server's memory", server / SERVER, "1.00", f"{server:.0f} of {SERVER} MB"),
            (f"{method}, an actor's memory", actor / ACTOR, "1.00", f"{actor:.0f} of {ACTOR} MB"),
        ]
    return table


def measured_on_actors(method: str, registered: int) -> tuple[float, float, float]:
    """Seconds of a round, and MB of the server and of an actor, in processes of their own."""
    return apart(_measure_on_actors, protocol(method, registered))


def measured(method: str, registered: int) -> tuple[float, float]:
    """Seconds of a round, and MB, in a process of its own."""
    return apart(_measure, protocol(method, registered))


def rows(methods: tuple[str, ...] = METHODS, figure: Path = FIGURE) -> Rows:
    """The time of a round with most clients registered over that with fewest, and the memory."""
    found = {m: np.array([measured(m, registered) for registered in REGISTERED]) for m in methods}
    table: Rows = []
    few, many = REGISTERED[0], REGISTERED[-1]
    for method, values in found.items():
        seconds, memory = values.T
        exponent = float(np.polyfit(np.log(REGISTERED), np.log(seconds), 1)[0])
        took = f"{seconds[-1]:.2f} / {seconds[0]:.2f} a round, exponent {exponent:.2f}"
        what = f"{method} round, {many} registered / {few}"
        table.append((what, seconds[-1] / seconds[0], "1.20", took))
        mb = f"{memory[-1]:.0f} of {MOST} MB, {memory[0]:.0f} with {few}"
        table.append((f"{method} memory, {many} registered", memory[-1] / MOST, "1.00", mb))
    draw(found, figure)
    return table


def draw(found: dict[str, np.ndarray], file: Path) -> None:
    """Seconds of a round, and memory, against the number of registered clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for at, label in enumerate(("seconds of a round", "peak memory in MB")):
        axis = figure.add_subplot(1, 2, at + 1)
        for method, values in found.items():
            axis.plot(REGISTERED, values[:, at], marker="o", label=method)
        axis.set(xscale="log", ylim=(0, None), xlabel="registered clients", ylabel=label)
    axis.legend(frameon=False, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
