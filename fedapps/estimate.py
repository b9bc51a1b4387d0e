"""A rough estimate of the time and memory of runs, from one client's work on this machine."""

import math
import time
from collections.abc import Sequence
from datetime import timedelta

import psutil
from flwr.app import Context, RecordDict

import partitions
from clients.core.arrays import num_bytes
from fedapps.clientapp import make_client
from fedapps.common.resources import num_cpus
from fedapps.common.threads import one_thread
from fedapps.engines.in_process_grid import simulated_node
from fedapps.engines.job_pool import Job
from fedapps.methods import METHODS
from fedapps.node.building import with_public
from fedapps.results.checkpoint import newest_checkpoint
from fedapps.results.formats import TextTable
from fedapps.settings.config import Config, effective

Cost = tuple[float, float]  # seconds, bytes
HOW = (
    "time: local training and evaluation of one FedAvg client, measured now on this machine, × "
    "clients × rounds × the method's usual time relative to FedAvg; memory: this process and "
    "a round's models, for each process; both can be wrong by a factor of 2 or more"
)


def estimate(jobs: Sequence[Job], engine: str, parallel: int) -> TextTable:
    """A row for each run with its state, time on one core and memory; one for all runs on the
    engine, `parallel` at a time."""
    processes = parallel if engine == "in-process" else max(parallel, num_cpus())
    measured: dict[str, tuple[float, float, int]] = {}
    rows, waiting = [], [job for job in jobs if not job.done]
    costs = [cost(job, measured) for job in waiting]
    for job in jobs:
        seconds, memory = costs[waiting.index(job)] if job in waiting else (0.0, 0.0)
        saved = job.config["resume"] and newest_checkpoint(job.folder, job.config)[0]
        state = "finished" if job.done else "resumes" if saved else "new"
        rows.append([job.name, state, str(job.total), _time(seconds), _memory(memory)])
    longest = max((seconds for seconds, _ in costs), default=0.0)
    total = sum(seconds for seconds, _ in costs) / processes
    total = max(total, longest) if engine == "in-process" else total
    memory = processes * max((memory for _, memory in costs), default=0.0)
    rows.append([f"all: {engine}, {processes} processes", "", "", _time(total), _memory(memory)])
    return TextTable("runs", ["run", "state", "rounds", "time", "memory"], rows, HOW)


def cost(job: Job, measured: dict[str, tuple[float, float, int]]) -> Cost:
    """Seconds of a run on one core, and bytes of its process. What was `measured` for equal
    settings is reused."""
    config = job.config
    common = ((key, effective(config, key)) for key in config if "." not in key)
    plain = {key: value for key, value in common if value is not None}
    plain |= {"client-models": "", "restrict-to-model": "", "method": "fedavg", "dp": "none"}
    ignored = ("seed", "output-dir", "from-dir", "resume", "rounds", "method")
    key = repr([item for item in plain.items() if item[0] not in ignored])
    if key not in measured:
        measured[key] = _measure(config | plain)
    training, scoring, size = measured[key]
    entry, count = METHODS[str(config["method"])], int(config["num-clients"])
    share = float(config["train-fraction"]) * float(config["fraction-train"])
    sampled = max(1, round(count * share))
    evaluations = math.ceil(job.total / int(config["evaluate-every"])) or 1
    seconds = job.total * sampled * training + evaluations * count * scoring
    kept = count if entry.client.needs_state else 0
    memory = psutil.Process().memory_info().rss + size * (2 * sampled + kept)
    return entry.relative_cost * seconds, memory


@one_thread()
def _measure(config: Config) -> tuple[float, float, int]:
    """Seconds of a FedAvg client's local training and of its evaluation, and bytes of its model."""
    novel = partitions.federation(with_public(config, "fedavg")).novel
    number = next((i for i, joined in enumerate(novel) if not joined), 0)
    node = dict(simulated_node(number, len(novel)))
    client = make_client(Context(0, 0, node, RecordDict(), config), "fedavg")
    seconds = []
    for work in (client.train, client.score):
        tries = []
        for _ in range(3):  # the first time, torch loads what it needs
            begun = time.perf_counter()
            work(dict(client.initial), {})
            tries.append(time.perf_counter() - begun)
        seconds.append(min(tries))
    return seconds[0], seconds[1], num_bytes(client.initial.values())


def _time(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(seconds))) if seconds else "–"


def _memory(memory: float) -> str:
    return f"{memory / 2**30:.1f} GiB" if memory else "–"
