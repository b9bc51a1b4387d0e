"""A rough estimate of the time and memory of runs, from one client's work on this machine."""

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import psutil
from flwr.app import Context, RecordDict

import partitions
from clients.core.arrays import num_bytes
from fedapps.building import bytes_after_rounds, with_public
from fedapps.clientapp import make_client
from fedapps.common.resources import num_cpus
from fedapps.common.threads import one_thread
from fedapps.engines.in_process_grid import simulated_node
from fedapps.engines.jobs import Job
from fedapps.methods import METHODS
from fedapps.results.checkpoint import newest_checkpoint, saved_round
from fedapps.results.formats import TextTable
from fedapps.settings.config import Config, effective

# Settings that do not change what a client's work costs.
WITHOUT_COST = (
    "seed", "output-dir", "training-dir", "from-dir", "resume", "rounds", "method", "lr",
)  # fmt: skip
MEASURE_SECONDS = 1.0  # a turn that takes this long is not repeated
MAX_TRIES = 3  # the first time, torch loads what it needs
# Seconds of a FedAvg client's training and of its evaluation, bytes of its model; by the settings
# that change them.
Measured = dict[str, tuple[float, float, int]]
HOW = (
    "time: local training and evaluation of one FedAvg client, measured now on this machine, × "
    "clients × rounds × the method's usual time relative to FedAvg, without auto's exchanges after "
    "the last round; memory: this process, a round's models, and what auto's rule is made from, "
    "for each process; both can be wrong by a factor of 2 or more"
)


class Cost(NamedTuple):
    """What a run costs on one core."""

    seconds: float
    memory: float  # bytes of its process
    turns: int  # of clients that train or are evaluated
    clients: int  # that train in a round


def estimate(jobs: Sequence[Job], engine: str, parallel: int, measured: Measured) -> TextTable:
    """A row for each run with its state, time on one core and memory; one for all runs on the
    engine, `parallel` at a time. `measured` as in `cost`."""
    processes = parallel if engine == "in-process" else max(parallel, num_cpus())
    trainers = trained_by(jobs)
    rows: list[list[str]] = []
    all_seconds = [0.0]
    all_memory = [0.0]
    for job in jobs:
        seconds, memory = 0.0, 0.0  # a finished run costs nothing
        state = _state(job)
        if not job.done:
            seconds, memory, *_ = cost(job, measured)
        if job.name in trainers:
            seconds -= training_seconds(job, measured)
            state = f"{state}, trained by {trainers[job.name]}"
        all_seconds.append(seconds)
        all_memory.append(memory)
        rows.append([job.name, state, str(job.total), _time(seconds), _memory(memory)])
    total = sum(all_seconds) / processes
    if engine == "in-process":  # a process has whole runs
        total = max(total, *all_seconds)
    memory = processes * max(all_memory)
    rows.append([f"all: {engine}, {processes} processes", "", "", _time(total), _memory(memory)])
    return TextTable("runs", ["run", "state", "rounds", "time", "memory"], rows, HOW)


def trained_by(jobs: Sequence[Job]) -> dict[str, str]:
    """For each unfinished run that takes the rounds of another one, the name of that one."""
    first_of: dict[str, str] = {}  # by folder of a training the run that trains for others
    trainers: dict[str, str] = {}
    for job in jobs:
        training = str(job.config["training-dir"])
        if training and not job.done:
            first = first_of.setdefault(training, job.name)
            if first != job.name:
                trainers[job.name] = first
    return trainers


def _state(job: Job) -> str:
    if job.done:
        return "finished"
    if job.config["resume"] and newest_checkpoint(job.folder, job.config)[0]:
        return "resumes"
    return "new"


def cost(job: Job, measured: Measured) -> Cost:
    """The cost of the rounds that a run has left. What was `measured` for equal settings is
    reused."""
    config = job.config
    _, scoring, model_bytes = _of_client(config, measured)
    num_clients = int(config["num-clients"])
    rounds = _rounds_left(job)
    evaluations = math.ceil(rounds / int(config["evaluate-every"])) or 1
    scored = max(1, round(num_clients * float(config["fraction-evaluate"])))
    seconds = training_seconds(job, measured) + evaluations * scored * scoring
    turns = rounds * _sampled(config) + evaluations * scored
    entry = METHODS[str(config["method"])]
    # A round's models, sent and received, and the states that clients keep between rounds.
    num_models = 2 * _sampled(config)
    if entry.client.needs_state:
        num_models += num_clients
    memory = psutil.Process().memory_info().rss + model_bytes * num_models
    memory += bytes_after_rounds(config)
    return Cost(entry.relative_cost * seconds, memory, turns, _sampled(config))


def _rounds_left(job: Job) -> int:
    """The rounds after the newest checkpoint of a run that resumes, else all."""
    if not job.config["resume"]:
        return job.total
    return job.total - min(job.total, saved_round(job.folder))


def training_seconds(job: Job, measured: Measured) -> float:
    """The seconds of that in which a method that trains as FedAvg trains."""
    training, _, _ = _of_client(job.config, measured)
    return _rounds_left(job) * _sampled(job.config) * training


def _sampled(config: Config) -> int:
    """The number of clients that train in a round."""
    share = float(config["train-fraction"]) * float(config["fraction-train"])
    return max(1, round(int(config["num-clients"]) * share))


def _of_client(config: Config, measured: Measured) -> tuple[float, float, int]:
    """What `_measure` gives for a FedAvg client with the run's settings."""
    # FedAvg with the values that hold for the job's method.
    plain: Config = {}
    for key in config:
        value = effective(config, key) if "." not in key else None
        if value is not None:
            plain[key] = value
    plain |= {"client-models": "", "restrict-to-model": "", "method": "fedavg", "dp": "none"}
    same_cost = repr([item for item in plain.items() if item[0] not in WITHOUT_COST])
    if same_cost not in measured:
        measured[same_cost] = _measure(config | plain)
    return measured[same_cost]


@one_thread()
def _measure(config: Config) -> tuple[float, float, int]:
    """Seconds of a FedAvg client's local training and of its evaluation, and bytes of its model."""
    federation = partitions.federation(with_public(config, "fedavg"))
    left_out = federation.novel | federation.unlabeled  # FedAvg trains on labels
    number = next((i for i, is_left_out in enumerate(left_out) if not is_left_out), 0)
    node = dict(simulated_node(number, len(left_out)))
    client = make_client(Context(0, 0, node, RecordDict(), config), "fedavg")
    seconds = []
    for work in (client.train, client.score):
        tries: list[float] = []
        while len(tries) < MAX_TRIES and sum(tries) < MEASURE_SECONDS:
            begun = time.perf_counter()
            work(dict(client.initial), {})
            tries.append(time.perf_counter() - begun)
        seconds.append(min(tries))
    return seconds[0], seconds[1], num_bytes(client.initial.values())


def _time(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(seconds))) if seconds else "–"


def _memory(memory: float) -> str:
    return f"{memory / 2**30:.1f} GiB" if memory else "–"
