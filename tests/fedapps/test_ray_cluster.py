"""RayGrid on two machines (two Ray nodes of this one); one of them is lost during a run."""

import os
import signal
import sys
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from small_runs import SMALL, bits

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid, Simulated
from fedapps.engines.ray_actors import Actors, machine_id
from fedapps.engines.ray_engine import ray_cluster
from fedapps.engines.ray_grid import RayGrid
from fedapps.serverapp import run


@pytest.fixture
def cluster():
    """The address of two Ray nodes with a core each, which stand for two machines."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


def losing(marker, driver):
    """Loads the ClientApp; the first client that trains in round 2 on another node than the
    driver's ends that node."""

    def load():
        def client_app(message, context):
            config = message.content.config_records.get("config", {})
            late = message.metadata.message_type == "train" and config["server-round"] == 2
            if late and machine_id() != driver and not marker.exists():
                marker.touch()
                os.kill(os.getppid(), signal.SIGKILL)  # the raylet, whose end is its workers' end
                time.sleep(600)
            return app(message, context)

        return client_app

    return load


@pytest.mark.slow
def test_a_machine_that_is_lost_costs_nothing(cluster, tmp_path):
    """Its clients' states were on the driver's machine, too: SCAFFOLD ends with the same bits."""
    config = SMALL | {"method": "scaffold", "rounds": 3, "fraction-train": 1.0}
    config |= {"train-fraction": 0.9}
    with ray_cluster(cluster):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with Actors(losing(tmp_path / "lost", machine_id()), 2) as actors:
            result = run(RayGrid(actors, config, Simulated(6)), config, "ray")
    assert (tmp_path / "lost").exists()
    alone = run(InProcessGrid.simulation(app, config, 6), config, "in-process")
    assert bits(result) == bits(alone)
