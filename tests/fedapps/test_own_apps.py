"""A user's own Flower app whose nodes share one encoding of tables: the same numbers in process,
under Ray, and on SuperNodes. Minutes: pytest -n0 -m slow tests/fedapps/test_own_apps.py"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

import fedapps
from fedapps.engines.flower import free_port, superlink

ROOT = Path(__file__).parents[2]
APP = '''"""Two hospitals' tables with gaps and categories, and a later one without labels."""

import json
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import fedapps
from clients.core.arrays import from_record

torch.set_num_threads(1)
TABLES = [
    {"age": [20.0, 30, None, 70], "ward": ["a", "b", "a", "b"], "label": [0, 0, 1, 1]},
    {"age": [10.0, 90, 55], "ward": ["b", "a", "a"], "label": [0, 1, 1]},
    {"ward": ["a", "b"], "age": [40.0, 50]},
]
BOTH = {"standardize": "training-clients", "missing": "mean"}


def data(context):
    table = pd.DataFrame(TABLES[context.node_config["partition-id"]])
    return (table, table) if "label" in table else table


def net():
    return nn.Linear(4, 2)


def write(result, strategy):
    arrays = {name: a.tolist() for name, a in from_record(result.arrays).items()}
    encoding = json.loads(strategy.column_encoder.encoding.text())
    scores = dict(result.evaluate_metrics_clientapp[2])
    content = {"arrays": arrays, "encoding": encoding, "scores": scores}
    Path("RESULT").write_text(json.dumps(content))


client = fedapps.client_app("fedavg", model=net, data=data, local_steps=2, batch_size=2,
                            least_category_rows=1, **BOTH)
server = fedapps.server_app("fedavg", model=net, shape=(4,), rounds=2, min_available_nodes=3,
                            then=write, **BOTH)
'''
PROJECT = """[project]
name = "tables-app"
version = "0.1.0"
license = { file = "LICENSE" }
dependencies = ["flwr[simulation]>=1.41,<1.43"]

[tool.flwr.app]
publisher = "test"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "tables_app:server"
clientapp = "tables_app:client"

[tool.flwr.app.config]
"""


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The folder of the app, and what it writes when it runs in this process."""
    folder = tmp_path / "app"
    folder.mkdir()
    result = tmp_path / "result.json"
    (folder / "tables_app.py").write_text(APP.replace("RESULT", str(result)), "utf-8")
    (folder / "LICENSE").write_text("Apache-2.0", "utf-8")
    (folder / "pyproject.toml").write_text(PROJECT, "utf-8")
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("tables_app")
    nodes = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
    module.server(
        fedapps.InProcessGrid(module.client, {}, nodes), Context(1, 0, {}, RecordDict(), {})
    )
    del sys.modules["tables_app"]
    expected = json.loads(result.read_text())
    assert expected["encoding"]["mean"][0] == pytest.approx((20 + 30 + 70 + 10 + 90 + 55) / 6)
    result.unlink()
    return folder, result, expected


def environment(folder):
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}


@pytest.mark.slow
def test_the_same_numbers_under_ray(app):
    folder, result, expected = app
    script = (
        "import tables_app\nfrom flwr.simulation import run_simulation\n"
        "run_simulation(tables_app.server, tables_app.client, 3, backend_config="
        "{'client_resources': {'num_cpus': 1, 'num_gpus': 0}, 'init_args': {'num_cpus': 2}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(folder), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.is_file(), done.stderr[-3000:]
    assert json.loads(result.read_text()) == expected


@pytest.mark.slow
def test_the_same_numbers_on_supernodes(app, tmp_path, monkeypatch):
    folder, result, expected = app
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    with superlink(tmp_path / "superlink.log", simulation=False) as link:
        for number in range(3):
            link.start(
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link.port}",
                "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f"partition-id={number} num-partitions=3",
            )  # fmt: skip
        run_id = int(link.call("run", str(folder), link.name)["run-id"])
        until = time.monotonic() + 900
        while not result.is_file() and time.monotonic() < until:
            assert "failed" not in link.status(run_id)[0], link.log(run_id)
            time.sleep(1)
    logs = "".join(file.read_text()[-1500:] for file in tmp_path.glob("*.log"))
    assert result.is_file(), logs
    assert json.loads(result.read_text()) == expected
