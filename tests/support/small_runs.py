"""Small runs, shares and replies that many tests use."""

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager

import pytest
import torch
import typer
from click.testing import CliRunner
from flwr.app import Message
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from clients.core.arrays import Arrays, from_record
from fedapps.clientapp import app
from fedapps.commands.main import cli
from fedapps.engines import worker_process
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.results import plot
from fedapps.results.recorder import Recorder
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from partitions.shares import Samples, Share
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.core.strategy import PersonalizedStrategy
from strategies.methods.fedavg import FedAvg

# Hypernetworks, passes over the public set and adaptation take most of the time of a small run.
WEE = {
    **{f"{method}.hidden-dim": 8 for method in ("pfedhn", "pfedhn-pc", "odpfl-hn", "pefll")},
    **{f"pfl-{which}.hidden-dim": 8 for which in ("sampled", "nearest", "ensemble")},
    **{f"{method}.novel-digest-epochs": 2 for method in ("fedmd", "heterotent", "heterofedtta")},
    **{f"{method}.max-steps": 3 for method in ("fedtta++", "fedtta++-guarded")},  # of up to 50
    **{f"{method}.adapt-steps": 3 for method in ("tent", "heterotent", "shot")},
    **{f"{method}.mixing-steps": 3 for method in ("fedthe", "fedthe+")},
    "fedrep.head-epochs": 2,
    "fedbabu.tune-epochs": 2,
    "fedthe+.views": 2,
    "fedthe+.adapt-steps": 1,
    "memo.views": 2,
    "pefll.local-steps": 3,  # local-steps does not change what a method sets itself
    "flowdup.dimension": 200,
    "auto.plays": 2,
    "auto.alpha": 0.5,  # a few training clients certify no less
}

# A hundred samples for each of six clients; the other digits are a public set, which few methods
# read.
FEW = {"partition.public-samples": 1200}
FEWER = {"partition.public-samples": 1500}  # half as many
ALL_SAMPLES = {"partition.public-samples": 0}  # of other data, or of digits that are to be many

# Six clients of the embedded digits, two rounds, each evaluated.
SMALL = defaults() | WEE | FEW
SMALL |= {"num-clients": 6, "rounds": 2, "local-steps": 3, "evaluate-every": 1}

# What some methods need: their own kind of data, less work, certain layers.
TASTES = {
    "partition": "preference",
    "fedembed.embedding-dim": 8,
    "global+.embedding-dim": 8,
    **{f"{method}.local-epochs": 1 for method in ("fedembed", "global", "global+", "pfedkm")},
}
NEEDS = dict.fromkeys(("fedembed", "global", "global+", "pfedkm"), TASTES)
NEEDS |= {method: {"model": "convnet-bn"} for method in ("fedbn", "bn-adapt")}
PUBLIC = {"partition.public-samples": 60}
NEEDS |= dict.fromkeys(("fedmd", "heterotent", "heterofedtta"), PUBLIC)

# Runs of six clients whose labels, streams or test sets differ from the usual, for every engine.
HALF = {"train-fraction": 0.67, "partition.labeled-clients": 0.5}  # two of four have labels
SHIFTED = {"partition.test-fraction": 0.2, "partition.test-shift": "mixture"}
STREAM = {"novel-batch": 7, "novel-stream": True}
# One of three training clients replies to a message of round 1 by the end of round 3.
LATE = {"latency": "lognormal", "latency-sigma": 0.0, "latency-slow-share": 0.34}
LATE |= {"latency-slow-factor": 3.0, "round-quorum": 0.6, "fraction-train": 1.0}
UNUSUAL = {
    "flowdup, labels of two": HALF | STREAM | {"method": "flowdup", "fraction-train": 1.0},
    "hyperfedzero, labels of two": HALF | {"method": "hyperfedzero", "fraction-train": 1.0},
    "fedthe, shifted tests": SHIFTED | {"method": "fedthe"},
    "tent, a stream": STREAM | {"method": "tent"},
    "tent, batches": {"novel-batch": 7, "method": "tent"},
    "scaffold, late": LATE | {"method": "scaffold"},
}


# A user's proxy at a port where nothing listens: whatever goes through it fails.
DEAD_PROXY = {
    **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "grpc_proxy"), "http://127.0.0.1:9"),
    "all_proxy": "socks5://127.0.0.1:9",  # which Flower cannot read
    "no_proxy": "10.0.0.0/8,fd00::/8",
}


class Watched(InProcessGrid):
    """Records every message and reply."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: list[Message] = []

    def _deliver(self, message):
        reply = super()._deliver(message)
        self.seen += [message, reply]
        return reply


def share(x, y, *, validation=None):
    """A training client's share of inputs x and labels y; validated on `validation` rows."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    rows = torch.arange(len(y))
    everything = Samples(x, y, rows, scale=1.0)
    held = rows[:0] if validation is None else torch.as_tensor(validation)
    return Share(everything, Samples(x, y, held, scale=1.0), None, everything, False)


class Wide(Samples):
    """Samples in float64, for comparisons with other programs."""

    def __getitem__(self, rows):
        index = self.index[rows]
        return self.x[index], self.y[index]


def train_rounds(strategy, arrays, clients, nodes, rounds, config):
    """The server's arrays after rounds in which all clients train, without a grid."""
    for number in range(1, rounds + 1):
        strategy.now = Round(number, payloads=dict.fromkeys(nodes, arrays))
        sent = strategy.broadcast(arrays, nodes)
        updates = []
        for node, client in zip(nodes, clients, strict=True):
            reply, n, metrics = client.train(sent[node], config)
            updates.append(Update(node, reply, n, metrics))
        arrays = strategy.aggregate(arrays, updates)
    return arrays


def update(client: int, arrays: Arrays, n: int = 1, **metrics) -> Update:
    """A reply of training client `client`; the node has another id."""
    return Update(Node(client, 50 + client), arrays, n, metrics)


def at_once(exchange):
    """A strategy's `exchanges` in which `exchange` answers each request."""
    return lambda *requests: [exchange(*vars(request).values()) for request in requests]


def answering(method, handle):
    """A ClientApp in which `handle` answers every message of `method`."""
    client_app = ClientApp()
    for register in (client_app.query, client_app.train, client_app.evaluate):
        register()(handle)
    for exchange in METHODS[method].client.exchanges:
        category, _, action = exchange.partition(".")
        getattr(client_app, category)(action)(handle)
    return client_app


def federate(grid=InProcessGrid, **changes):
    """Run SMALL with `changes` in process; returns the result and the grid with its nodes."""
    config = SMALL | changes
    grid = grid.simulation(app, config, int(config["num-clients"]))
    return run(grid, config, "in-process"), grid


PROJECT = ("fedapps", "clients", "strategies", "partitions", "experiments")
COMMAND = typer.main.get_command(cli)  # typer's own CliRunner makes it anew at each call


def invoke(*words, code=0, columns=300, drawn=False, **options):
    """The result of the command `fedapps` with these words; it ends with this code.

    The report of a run holds the figures' texts alone unless they are to be `drawn`: matplotlib
    would take longer than small runs."""
    if words[:1] == ("run",) and not drawn:
        with pytest.MonkeyPatch.context() as patch:
            for figure in ("curves", "time", "decisions", "clients"):
                patch.setattr(plot, figure, lambda *_: None)
            patch.setattr(plot, "as_svg", lambda figure, name: name)
            return invoke(*words, code=code, columns=columns, drawn=True, **options)
    environment = {"COLUMNS": str(columns)}
    done = CliRunner().invoke(COMMAND, [str(word) for word in words], env=environment, **options)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def fedapps(*words, **options):
    """What the command prints, with one space in place of each line break and indentation."""
    return " ".join(invoke(*words, **options).output.split())


def states(grid, method):
    """The clients' states by node, for clients that have one."""
    key = f"fedapps.{method}"
    return {
        node: {name: array.numpy() for name, array in context.state[key].items()}
        for node, context in grid.contexts.items()
        if key in context.state
    }


def left(folder):
    """The content of a run's folder without timings."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for table in (summary, *lines):
        del table["seconds"]
        table.pop("files", None)  # digests of the arrays below, and of metadata in any order
        table.pop("phases", None)
    arrays = {
        f"{file.relative_to(folder)}:{name}": (array.dtype.str, array.shape, array.tobytes())
        for file in sorted(folder.rglob("*.safetensors"))
        for name, array in load_file(file).items()
    }
    return summary, lines, arrays


def bits(result):
    """A result's arrays and metrics, to compare to the last bit."""
    arrays = {name: array.tobytes() for name, array in from_record(result.arrays).items()}
    rounds = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    return arrays, [{n: dict(m) for n, m in metrics.items()} for metrics in rounds]


class Cut(BaseException):
    """The run is cut, as by SIGKILL: nothing tidies up after it."""


@contextmanager
def cut_before(number):
    """The run inside is cut when round `number` begins."""
    begin = PersonalizedStrategy.configure_train

    def configure_train(self, server_round, *arguments):
        if server_round == number:
            raise Cut
        return begin(self, server_round, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(PersonalizedStrategy, "configure_train", configure_train)
        patch.setattr(Recorder, "__exit__", lambda *_: None)
        yield


@contextmanager
def dying_in(number, error=SystemExit):
    """Inside, FedAvg's server raises `error` when the answers of round `number` arrive."""
    aggregate = FedAvg.aggregate_train

    def aggregate_train(self, server_round, replies):
        if server_round == number:
            list(replies)
            raise error
        return aggregate(self, server_round, replies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "aggregate_train", aggregate_train)
        yield


def forked(function):
    """The id of a process, forked from this one, that calls the function and exits with the code
    that it returns, 1 if it raises."""
    sys.stderr.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        code = function() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def print_to(descriptor):
    """From now on this process prints to the open file alone, errors too."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)


def forked_workers():
    """In place of `job_pool._start_worker`: workers are forked, without seconds of imports. Each
    closes its copies of the others' pipes, which would not end while it lives."""
    fork = multiprocessing.get_context("fork")
    pipes = []

    def start_worker():
        parent_end, worker_end = fork.Pipe()
        pipes.append(parent_end)

        def start():
            for pipe in pipes:
                pipe.close()
            worker_process.start(worker_end, logging.WARNING)

        worker = fork.Process(target=start, daemon=True)
        worker.start()
        worker_end.close()
        return parent_end, worker

    return start_worker


def run_anew(code, *arguments, path=()):
    """What a Python program prints that imports this project's modules anew, from the folders
    `path` first. It runs in a process forked from this one, where torch, Flower and Ray are
    imported already; a new process would take seconds for these. It has to end without an error."""

    def call():
        print_to(output.fileno())
        for name in list(sys.modules):
            if name.partition(".")[0] in PROJECT:
                del sys.modules[name]
        sys.argv = ["-c", *map(str, arguments)]
        sys.path[:0] = map(str, path)
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})

    with tempfile.TemporaryFile("w+") as output:
        status = exit_code(forked(call))
        output.seek(0)
        printed = output.read()
    assert status == 0, printed
    return printed


def exit_code(child):
    """The exit code of a child, once it has ended; −n if signal n has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait(done, seconds, what):
    """Waits until `done()`; fails with `what()` after this many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
