import os
import threading

import pytest
import torch

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def config():
    """The defaults of pyproject, made small: 6 clients of the embedded digits, two rounds."""
    from fedapps.config import defaults

    return defaults() | {"num-clients": 6, "rounds": 2, "local-steps": 3, "evaluate-every": 1}


@pytest.fixture
def run_in_process(tmp_path):
    """Run a configuration in process; returns (strategy arrays, summary, metrics lines)."""
    import json

    from fedapps.client_app import app
    from fedapps.grid import InProcessGrid
    from fedapps.server_app import run

    counter = iter(range(10**6))

    def go(config, client_app=app):
        folder = tmp_path / f"run-{next(counter)}"
        config = config | {"output-dir": str(folder)}
        grid = InProcessGrid.simulation(client_app, config, int(config["num-clients"]))
        result = run(grid, config, "in-process")
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        return result, json.loads((folder / "summary.json").read_text()), lines

    return go


@pytest.fixture
def no_leftover_threads():
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
