"""The verdict on auto, by hand."""

from pathlib import Path

import pytest
from pandas import DataFrame
from small_runs import SMALL

from experiments.auto.judge import bars, choices, read, verdict
from experiments.auto.runs import Scenario, base_run, corrections, scenarios
from fedapps.planning import configured, read_request
from fedapps.serverapp import run_in_process


def clients(**accuracies):
    """Two novel clients of one seed with these accuracies in %."""
    rows = []
    for method, values in accuracies.items():
        for client, value in enumerate(values):
            rows.append({"method": method, "seed": 100, "client": client, "value": value})
    return DataFrame(rows)


def test_gain_harm_best_and_oracle():
    """bbse: +10 and −4, mean 3, half are harmed. tent: −20 and +2. The oracle takes 10 and 2."""
    one = verdict(clients(fedavg=(60, 80), bbse=(70, 76), tent=(40, 82), auto=(70, 80)))
    assert (one.accuracy, one.best, one.best_gain, one.oracle) == (70, "bbse", 3, 6)
    assert one.gain == {"bbse": 3, "tent": -9, "auto": 5}
    assert one.harmed == {"bbse": 50, "tent": 50, "auto": 0}


@pytest.mark.parametrize(("auto", "met"), [((68, 80), [True, True, True]), ((60, 78), [False] * 3)])
def test_bars(auto, met):
    """The best fixed gain is 3: +4 reaches 80 % of it; −1 is 0.3 below FedAvg, and half of the
    clients are harmed."""
    one = verdict(clients(fedavg=(60, 80), bbse=(70, 76), auto=auto))
    lines = bars({"step": one}, 200)
    assert [line.startswith("met") for line in lines] == met
    mix = bars({"mix": one}, 200)[-1]
    assert mix == "missed: 3 times the best fixed gain in mix: mix"


def test_choices_are_means():
    runs = [
        {"chosen-none": 1.0, "chosen-bbse": 0.0, "misfit": 1.0, "misfit-limit": 3.0},
        {"chosen-none": 0.5, "chosen-bbse": 0.5, "misfit": 2.0, "misfit-limit": 3.0},
    ]
    runs = [{f"novel-{name}": value for name, value in run.items()} for run in runs]
    assert choices(runs) == "none 75, bbse 25; T 1.5, t 3.0"
    assert choices([{"novel-accuracy": 1.0}]) == "none 100; no rule"


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_the_command_takes_the_settings_of_each_scenario(scenario):
    """Both of the run that trains, and of the runs that start from it."""
    trains = settings_of(base_run(scenario, "convnet-atp", 100, Path("judged")))
    config, _ = configured(trains, None, trains.settings)
    assert config["model"] == "convnet-atp"
    corrects = settings_of(corrections(scenario, "convnet-atp", 100, 50, Path("judged")))
    _, labels = configured(corrects, config, corrects.settings)
    assert len(labels) == 7


def settings_of(words):
    """The experiment that the command reads from the words before its options."""
    first = 3 if words[1] == "--from" else 1
    options = words.index("--methods")
    return read_request(words[first:options], words[options + 1], words[options + 3], None)


def test_the_runs_are_those_of_the_protocol():
    """Each scenario has one value of each setting, and no newcomer has its changes."""
    names = [scenario.name for scenario in scenarios()]
    assert len(names) == len(set(names)) == 13  # of twelve experiments, one with two values
    assert Scenario("dirichlet", ("partition.alpha=0.1",)).name == "dirichlet-0.1" == names[2]
    beyond = Scenario("rotation-beyond")
    words = base_run(beyond, "mlp", 100, Path("judged"))
    assert words[:2] == ["run", "unseen/rotation-beyond"]
    assert {"model=mlp", "num-clients=150", "evaluate-every=60"} <= set(words)
    (left_out,) = [word for word in words if word.startswith("auto.changes=")]
    assert "rotation" not in left_out and "shear" not in left_out and "shift" in left_out
    assert "partition.samples=60000" in words  # which iid does not read
    words = corrections(beyond, "mlp", 100, 50, Path("judged"))
    assert words[1:3] == ["--from", "judged/base/rotation-beyond/auto-seed100"]
    assert {"novel-batch=50", left_out, "judged/50/rotation-beyond"} <= set(words)
    assert not any(word.startswith("bn-adapt") for word in words)


def test_a_scenario_without_a_run_of_auto_is_left_out(tmp_path, capsys):
    """FedAvg's run has ended, and the others have not."""
    run_in_process(SMALL | {"num-clients": 4, "output-dir": str(tmp_path / "iid" / "fedavg-seed0")})
    assert read(tmp_path / "iid") is None
    said = capsys.readouterr().out
    assert "iid is left out: no run of auto, bbse, prior-em, t3a has ended there" in said
