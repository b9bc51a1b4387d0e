"""A round without effect is said in the progress, the table and the command's last lines; a run
whose every round was undone fails."""

import json

import numpy as np
import pytest
from small_runs import SMALL, cut_before, fedapps

from clients.core.arrays import Arrays
from clients.core.client import Client
from fedapps import api
from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import Method
from fedapps.serverapp import run
from strategies.core.replies import Update
from strategies.methods.fedavg import FedAvg

PAPER = ("no paper", "the mean, or NaN", "global")


class SometimesNaN(FedAvg):
    """Its aggregate of the rounds `poisoned` is NaN."""

    poisoned = (2,)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        mean = super().aggregate(arrays, updates)
        if self.round in self.poisoned:
            return {name: np.full_like(array, np.nan) for name, array in mean.items()}
        return mean


class AlwaysNaN(SometimesNaN):
    poisoned = (1, 2, 3)


SECOND = Method(SometimesNaN, Client, *PAPER)
EVERY = Method(AlwaysNaN, Client, *PAPER)
TINY = ("run", "num-clients=4", "rounds=3", "local-steps=1", "--engine", "in-process")
SAID = "rounds were undone: NaN or infinity would have come into the model"


def method(name):
    reference = f"{__name__}:{name}"
    external_code.allow(reference)
    return reference


def test_an_undone_round_is_said_in_progress_table_and_exit(tmp_path):
    name = method("SECOND")
    printed = fedapps(*TINY, "evaluate-every=3", "--methods", name, "--output", tmp_path)
    assert f"{name}-seed0 round 2/3 is undone: NaN or infinity would have come" in printed
    assert "1 round undone" in printed.partition("round 3/3")[2]
    assert f"rounds undone, as NaN or infinity would have come into the model: {name} 1" in printed
    assert f"{name}-seed0: 1 of 3 {SAID}" in printed
    summary = json.loads((tmp_path / f"{name}-seed0" / "summary.json").read_text())
    assert summary["undone_rounds"] == 1
    assert summary["finished"] is True
    assert api.read(tmp_path).problems == [f"{name}-seed0: 1 of 3 {SAID}"]


def test_a_run_whose_every_round_was_undone_fails(tmp_path):
    name = method("EVERY")
    printed = fedapps(*TINY, "--methods", name, "--output", tmp_path, code=1)
    assert "every round was undone (3 of 3)" in printed
    assert "mend aggregate of AlwaysNaN" in printed
    summary = json.loads((tmp_path / f"{name}-seed0" / "summary.json").read_text())
    assert summary["finished"] is False


def test_undone_rounds_before_a_checkpoint_count(tmp_path):
    """Rounds 1 and 2 are undone, then the run is cut; the resumed one undoes round 3."""
    config = SMALL | {"method": method("EVERY"), "rounds": 3, "num-clients": 4}
    config |= {"checkpoint-every": 1, "output-dir": str(tmp_path)}
    with cut_before(3):
        run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    config |= {"resume": True}
    with pytest.raises(RuntimeError, match=r"every round was undone \(3 of 3\)"):
        run(InProcessGrid.simulation(app, config, 4), config, "in-process")


def test_central_privacy_says_it_as_well(tmp_path):
    """The model, which is released, shows it anyway."""
    config = SMALL | {"method": "fedavg", "rounds": 1, "num-clients": 4, "evaluate-every": 1}
    config |= {"dp": "central", "dp-noise-multiplier": 1.0, "dp-covers": "model-updates"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "aggregate", poisoned)
        config |= {"output-dir": str(tmp_path)}
        with pytest.raises(RuntimeError, match="every round was undone"):
            run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    seen = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert seen[0]["undone"] is True


def poisoned(self, arrays, updates):
    return {name: np.full_like(array, np.nan) for name, array in arrays.items()}
