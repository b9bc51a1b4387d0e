"""RayGrid on two machines (here two Ray nodes of one), one of which is lost in mid-run."""

import os
import signal
import sys
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from tiny import SMALL

from clients.arrays import from_record
from fedapps.clientapp import app
from fedapps.engines.cluster import ray_cluster
from fedapps.engines.grid import InProcessGrid, simulated
from fedapps.engines.ray_grid import Actors, RayGrid, _machine
from fedapps.serverapp import run


@pytest.fixture
def address():
    """Of a cluster of two nodes with a core each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def losing(marker, driver):
    """The ClientApp; the first to train in round 2 elsewhere than on the driver's node takes the
    node with it."""

    def load():
        def client_app(message, context):
            config = message.content.config_records.get("config", {})
            late = message.metadata.message_type == "train" and config["server-round"] == 2
            if late and _machine() != driver and not marker.exists():
                marker.touch()
                os.kill(os.getppid(), signal.SIGKILL)  # the raylet, whose end is its workers' end
                time.sleep(600)
            return app(message, context)

        return client_app

    return load


@pytest.mark.slow
def test_a_machine_that_is_lost_costs_nothing(address, tmp_path):
    """Its clients' states lay on the driver's as well: SCAFFOLD ends with the same bits."""
    config = SMALL | {"method": "scaffold", "rounds": 3, "fraction-train": 1.0}
    config |= {"train-fraction": 0.9}
    with ray_cluster(address):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with Actors(losing(tmp_path / "lost", _machine()), 2) as actors:
            grid = RayGrid(actors, config, simulated(6))
            result = run(grid, config, "ray")
    assert (tmp_path / "lost").exists()
    alone = run(InProcessGrid.simulation(app, config, 6), config, "in-process")
    for name, array in from_record(alone.arrays).items():
        assert from_record(result.arrays)[name].tobytes() == array.tobytes()
