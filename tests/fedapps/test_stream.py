"""What a person reads of `flwr run`: a line for each evaluation, the table, where results are."""

import json
import logging
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedapps.engines.flower import COMMANDS, superlink
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import APPS, run
from fedapps.settings.config import defaults

ROOT = Path(__file__).parents[2]
SMALL = {"method": "tent", "num-clients": 4, "rounds": 2, "local-steps": 1, "evaluate-every": 2}
EVALUATION = r"round 2: loss \d\.\d{3}  training \d+\.\d %  novel \d+\.\d %"


@pytest.mark.parametrize("written", [True, False])
def test_a_submitted_run_logs_its_scores_and_where_they_are(written, tmp_path, caplog):
    config = defaults() | SMALL | ({"output-dir": str(tmp_path)} if written else {})
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "flwr"):
            run(InProcessGrid.simulation(APPS.client_app(), config, 4, 1), config, report=True)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if re.fullmatch(EVALUATION, line)]
    assert "novel clients" in lines[-1] and "│ tent" in lines[-1]
    where = f"written to {tmp_path}" if written else 'add to --run-config output-dir="'
    assert where in lines[-1]


def test_a_submitted_run_warns_of_clients_with_many_weights(tmp_path, caplog):
    """An encoder for images of 80×80 pixels beside softmax regression. The warning precedes the
    first message, so there is no grid."""
    np.savez(tmp_path / "d.npz", x=np.zeros((24, 80, 80), np.uint8), y=np.arange(24) % 2)
    config = defaults() | SMALL | {"dataset": str(tmp_path / "d.npz"), "partition": "iid"}
    config |= {"method": "odpfl-hn", "model": "softmax"}
    with pytest.raises(AttributeError):
        run(None, config, report=True)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert sum("odpfl-hn: a client has" in warning.getMessage() for warning in warnings) == 1


@pytest.mark.slow
def test_flwr_run_ends_with_both_accuracies_and_where_to_look(tmp_path):
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in SMALL.items())
    with superlink(tmp_path / "log") as link:
        command = [COMMANDS / "flwr", "run", ".", link.name, "--stream", "--run-config", words]
        done = subprocess.run(
            command, cwd=ROOT, env=link.env, capture_output=True, text=True, check=True
        )
    assert re.search(EVALUATION, done.stdout)
    last = "\n".join(done.stdout.splitlines()[-20:])
    assert "training clients" in last and "novel clients" in last and "output-dir=" in last
