"""Torch's threads: a run computes on one, and leaves the process that calls it as it was."""

import ast
import os
import threading
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord
from small_runs import SMALL, federate, forked_workers

import fedapps
from clients.core.arrays import to_record
from clients.core.client import Client
from fedapps.building import shared_arrays
from fedapps.clientapp import app
from fedapps.common.threads import one_thread
from fedapps.engines import job_pool
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.job_pool import run_as_processes
from fedapps.engines.jobs import Apps
from fedapps.engines.ray_actors import Actor
from fedapps.own_app import client_app
from fedapps.planning import make_jobs
from fedapps.serverapp import load_client_app
from strategies.methods.fedavg import FedAvg

ROOT = Path(__file__).parents[2]


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def threads_of_a_new_thread():
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return counts


@pytest.fixture
def recorded(monkeypatch, three_threads):
    """The number of threads each time that a client loads its model or the server aggregates."""
    counts = []
    load, aggregate = Client.load, FedAvg.aggregate

    def loading(self, arrays):
        counts.append(torch.get_num_threads())
        load(self, arrays)

    def aggregating(self, arrays, updates):
        counts.append(torch.get_num_threads())
        return aggregate(self, arrays, updates)

    monkeypatch.setattr(Client, "load", loading)
    monkeypatch.setattr(FedAvg, "aggregate", aggregating)
    return counts


def test_no_module_sets_threads_when_imported():
    for folder in ("partitions", "clients", "strategies", "fedapps"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text("utf-8")
            if "set_num_threads" not in text:  # to parse it takes long
                continue
            for statement in ast.parse(text).body:
                definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
                assert definition or "set_num_threads" not in ast.unparse(statement), file


def test_a_run_and_a_later_model_compute_on_one_thread_and_restore_the_callers(recorded, tmp_path):
    settings = {"num_clients": 4, "rounds": 1, "local_steps": 1}
    runs = fedapps.run(
        "fedavg", output=tmp_path, engine="in-process", progress=False, jobs=1, **settings
    )
    assert len(recorded) > 5 and set(recorded) == {1}
    assert torch.get_num_threads() == 3 and threads_of_a_new_thread() == [3]
    recorded.clear()
    runs[0].personalize(torch.rand(5, 1, 8, 8))
    assert set(recorded) == {1} and torch.get_num_threads() == 3


def test_a_run_that_fails_restores_them_too(recorded):
    with pytest.raises(RuntimeError, match="valid replies"):
        federate(**{"min-valid-replies": 9})
    assert recorded and set(recorded) == {1} and torch.get_num_threads() == 3
    with one_thread():
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_a_nodes_turn_computes_on_one_thread(recorded):
    """Also where Flower starts the process, and where only the ClientApp is the package's."""
    grid = InProcessGrid.simulation(app, SMALL | {"rounds": 1}, 6)
    initial = to_record(shared_arrays(SMALL, "fedavg", str(SMALL["model"])))
    FedAvg(evaluate_every=1).start(grid, initial, num_rounds=1)
    clients = [count for count in recorded if count == 1]
    assert len(clients) > 5 and recorded.count(3) == 1  # the aggregation, which is the caller's


def test_components_in_an_app_of_others_keep_its_threads(recorded):
    def data(context):
        return torch.zeros(8, 2), torch.zeros(8).long()

    mine = client_app("fedavg", model=lambda: torch.nn.Linear(2, 2), data=data, local_steps=1)
    grid = InProcessGrid(mine, {}, [{"partition-id": i} for i in range(2)])
    initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
    FedAvg().start(grid, initial, num_rounds=1)
    assert len(recorded) > 2 and set(recorded) == {3}


def raise_threads(grid, config, engine):
    raise RuntimeError(f"{torch.get_num_threads()} threads")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is forked")
def test_worker_processes_and_actors_compute_on_one_thread(three_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(job_pool, "_start_worker", forked_workers())
    (job,) = make_jobs(SMALL, ["fedavg"], [0], tmp_path)
    run_as_processes([job], 1, Apps(raise_threads, load_client_app), lambda _: None)
    assert job.error.startswith("RuntimeError: 1 threads ")
    assert torch.get_num_threads() == 3
    Actor(load_client_app, [])
    assert torch.get_num_threads() == 1
