"""RayGrid: the bits of the other engines, and actors that die or hang."""

import os
import sys
import time
from functools import partial

import lab
import numpy as np
import pytest
import ray
from tiny import SMALL

from clients.arrays import from_record
from fedapps.clientapp import app
from fedapps.engines.grid import InProcessGrid, simulated
from fedapps.engines.jobs import _client_app, _ray
from fedapps.engines.ray_grid import Actors, RayGrid
from fedapps.serverapp import run


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """Ray, started where somebody's own package lies in a folder of PYTHONPATH."""
    with lab.written(tmp_path_factory.mktemp("lab")) as folder, pytest.MonkeyPatch.context() as env:
        env.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with _ray():
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            yield


def configuration(method, **changes):
    return SMALL | {"method": method, "fraction-train": 0.7, "rounds": 3} | changes


def in_process(config):
    return run(InProcessGrid.simulation(app, config, 6), config, "in-process")


def on_actors(actors, config):
    return run(RayGrid(actors, config, simulated(6)), config, "ray")


def numbers(result):
    arrays = {name: array.tobytes() for name, array in from_record(result.arrays).items()}
    return arrays, {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()}


def test_the_bits_are_those_of_one_process():
    """Methods with and without states, of one exchange and several, one after the other on the
    same actors."""
    with Actors(_client_app, 2) as actors:
        for method in ("scaffold", "fedtta++", "odpfl-hn", "lg-fedavg", "pfl-nearest"):
            config = configuration(method)
            assert numbers(on_actors(actors, config)) == numbers(in_process(config))


def test_actors_find_what_comes_from_outside_the_package():
    """Method, data and partition, and their settings."""
    config = configuration(lab.DITTO, dataset=lab.RINGS, partition=lab.SIZES)
    own = {f"{lab.DITTO}.penalty": 0.5, f"{lab.RINGS}.noise": 0.1, f"{lab.SIZES}.power": 0.5}
    with Actors(_client_app, 2) as actors:
        result = on_actors(actors, config | own)
    assert numbers(result) == numbers(in_process(config | own))
    assert numbers(result) != numbers(in_process(config | own | {f"{lab.DITTO}.penalty": 0.1}))


def spoilt(spoil):
    """The ClientApp, but client 1's process meets `spoil` when it trains in round 2."""
    answer = app

    def load():
        def client_app(message, context):
            config = message.content.config_records.get("config", {})
            training = message.metadata.message_type == "train"
            if training and config["server-round"] == 2 and context.node_id == NODE:
                spoil()
            return answer(message, context)

        return client_app

    return load


NODE = 2  # of a training client that takes part in rounds 1 and 2, which the tests check


def once(marker, what):
    if not marker.exists():
        marker.touch()
        what()


def test_an_actor_that_dies_is_replaced_and_its_clients_keep_their_states(tmp_path):
    """It dies once; asked again, the client goes on from the state that lay in the store."""
    config = configuration("scaffold", **{"fraction-train": 1.0, "train-fraction": 0.9})
    load = spoilt(partial(once, tmp_path / "died", partial(os._exit, 1)))
    with Actors(load, 2) as actors:
        result = on_actors(actors, config)
    assert (tmp_path / "died").exists()
    assert numbers(result) == numbers(in_process(config))


def test_a_client_that_kills_every_process_costs_its_own_reply():
    config = configuration("fedavg", **{"fraction-train": 1.0, "train-fraction": 0.9})
    with Actors(spoilt(partial(os._exit, 1)), 2) as actors:
        result = on_actors(actors, config)
    told = result.train_metrics_clientapp
    assert [told[n].get("dropped-error", 0) for n in (1, 2, 3)] == [0, 1, 0]
    assert [told[n]["valid-replies"] for n in (1, 2, 3)] == [5, 4, 5]


def test_one_that_never_answers_costs_the_timeout_and_its_batch():
    """Time enough for everybody else; the others of its batch are asked no more this round."""
    config = configuration("fedavg", **{"fraction-train": 1.0, "train-fraction": 0.9})
    with Actors(spoilt(partial(time.sleep, 600)), 2) as actors:
        grid = RayGrid(actors, config, simulated(6))
        grid.answer = partial(impatient, grid.answer)
        told = run(grid, config, "ray").train_metrics_clientapp
    assert told[2]["dropped-missing"] >= 1
    assert told[3]["valid-replies"] == 5
    assert np.isfinite(told[3]["loss"])


def impatient(answer, messages, timeout):
    training = any(message.metadata.message_type == "train" for message in messages)
    return answer(messages, 15.0 if training else timeout)
