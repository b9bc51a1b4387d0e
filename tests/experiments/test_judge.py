"""The verdict on auto, by hand."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pandas import DataFrame
from PIL import Image
from run_folders import leave
from small_runs import SMALL

from experiments.auto import figure, judge
from experiments.auto.judge import Verdict, bars, choices_text, mean_of, read, verdict
from experiments.auto.runs import (
    METHODS,
    PROTOCOLS,
    Scenario,
    base_run,
    changes,
    corrections,
    methods_for,
    scenarios,
)
from experiments.figures_site import TABLE
from fedapps.planning import configured, read_request
from fedapps.serverapp import run_in_process
from fedapps.settings.experiments import experiments_root


def clients(**accuracies):
    """Two novel clients of one seed with these accuracies in %."""
    rows = []
    for method, values in accuracies.items():
        for client, value in enumerate(values):
            rows.append({"method": method, "seed": 100, "client": client, "value": value})
    return DataFrame(rows)


def test_gain_harm_best_and_oracle():
    """bbse: +10 and −4, mean 3, half are harmed. tent: −20 and +2. The oracle takes 10 and 2."""
    rows = clients(fedavg=(60, 80), bbse=(70, 76), tent=(40, 82), auto=(70, 80))
    one = verdict(rows, 100, {})
    assert (one.seeds, one.accuracy, one.best_gain, one.oracle) == ([100], 70, 3, 6)
    assert one.gain == {"bbse": 3, "tent": -9, "auto": 5}
    assert one.harmed == {"bbse": 50, "tent": 50, "auto": 0}


@pytest.mark.parametrize(("auto", "met"), [((68, 80), [True, True, True]), ((60, 78), [False] * 3)])
def test_bars(auto, met):
    """The best fixed gain is 3: +4 reaches 80 % of it; −1 is 0.3 below FedAvg, and half of the
    clients are harmed."""
    one = verdict(clients(fedavg=(60, 80), bbse=(70, 76), auto=auto), 100, {})
    lines = bars({"step": one}, 200)
    assert [line.startswith("met") for line in lines] == met
    mix = bars({"mix": one}, 200)[-1]
    assert mix == "missed: 3 times the best fixed gain in mix: mix"


def test_four_of_five_scenarios_are_enough():
    """Each gains 3 points at best; auto takes 3 of them in some, and 1 in the others."""
    most = verdict(clients(fedavg=(60, 80), bbse=(70, 76), auto=(70, 76)), 100, {})
    little = verdict(clients(fedavg=(60, 80), bbse=(70, 76), auto=(61, 81)), 100, {})
    four = {str(number): most for number in range(4)}
    line = bars(four | {"4": little}, 200)[2]
    assert line == "met: 80 % of the best gain in 4 of 5 scenarios"
    assert bars(four | {"4": little, "5": little}, 200)[2].startswith("missed: 80 %")


def test_the_mean_counts_each_seed_once():
    """A verdict on two seeds and one on a third: 2/3 · 3 + 1/3 · 9 = 5."""
    two = Verdict([100, 101], 60.0, {"bbse": 3.0}, {"bbse": 6.0}, 6.0, {"misfit": 0.3})
    third = Verdict([102], 90.0, {"bbse": 9.0}, {"bbse": 0.0}, 3.0, {"misfit": 0.9})
    one = mean_of([two, third])
    assert one.seeds == [100, 101, 102] and one.accuracy == pytest.approx(70)
    assert one.gain == pytest.approx({"bbse": 5}) and one.harmed == pytest.approx({"bbse": 4})
    assert one.oracle == pytest.approx(5) and one.choices == pytest.approx({"misfit": 0.5})


def test_choices_in_words():
    chosen = {"chosen-none": 0.75, "chosen-bbse": 0.25, "misfit": 1.5, "misfit-limit": 3.0}
    assert choices_text(chosen) == "none 75, bbse 25; T 1.5, t 3.0"
    assert choices_text({}) == "none 100; no rule"


ALL = [(data, scenario) for data in PROTOCOLS for scenario in scenarios(data)]


@pytest.mark.parametrize(
    ("data", "scenario"), ALL, ids=[f"{data}-{scenario.name}" for data, scenario in ALL]
)
def test_the_command_takes_the_settings_of_each_scenario(data, scenario):
    """Both of the run that trains, and of the runs that start from it."""
    trains = settings_of(base_run(data, scenario, "convnet-atp", 100, Path("judged")))
    config, _ = configured(trains, None, trains.settings)
    assert config["model"] == "convnet-atp" and config["dataset"] == data
    assert config["evaluate-every"] == config["rounds"] == 60
    corrects = settings_of(corrections(scenario, METHODS, 100, 50, Path("judged")))
    _, labels = configured(corrects, config, corrects.settings)
    assert len(labels) == 7


def settings_of(words):
    """The experiment that the command reads from the words before its options."""
    first = 3 if words[1] == "--from" else 1
    options = words.index("--methods")
    return read_request(words[first:options], words[options + 1], words[options + 3], None)


def test_the_runs_are_those_of_the_protocol():
    """Each scenario has one value of each setting, and no newcomer has its changes."""
    names = [scenario.name for scenario in scenarios("mnist")]
    assert len(names) == len(set(names)) == 13  # of twelve experiments, one with two values
    assert Scenario("dirichlet", ("partition.alpha=0.1",)).name == "dirichlet-0.1" == names[2]
    beyond = Scenario("rotation-beyond")
    words = base_run("mnist", beyond, "mlp", 100, Path("judged"))
    assert words[:2] == ["run", "unseen/rotation-beyond"]
    assert {"model=mlp", "num-clients=150", "evaluate-every=60"} <= set(words)
    (left_out,) = [word for word in words if word.startswith("auto.changes=")]
    assert "rotation" not in left_out and "shear" not in left_out and "shift" in left_out
    assert "partition.samples=60000" in words  # which iid does not read
    words = corrections(beyond, methods_for("mlp"), 100, 50, Path("judged"))
    assert words[1:3] == ["--from", "judged/base/rotation-beyond/auto-seed100"]
    assert {"novel-batch=50", left_out, "judged/50/rotation-beyond"} <= set(words)
    assert not any(word.startswith("bn-adapt") for word in words)


def test_each_data_has_its_scenarios_and_what_newcomers_may_not_have():
    """Small images have other corruptions: contrast and brightness are among those of `mix`."""
    of_digits = {scenario.name for scenario in scenarios("digits")}
    assert {"domain-inverted", "mix-small", "dirichlet-0.1"} < of_digits and len(of_digits) == 12
    assert len(list(scenarios("fashion-mnist"))) == 12
    assert [*changes(Scenario("mix-small"))] == ["auto.changes=gamma,shift,scale"]
    assert [*changes(Scenario("mix"))] == ["auto.changes=contrast,brightness,gamma,shift,scale"]
    assert [*changes(Scenario("corruptions-small"))] == [*changes(Scenario("corruptions"))]


def test_a_scenario_without_a_run_of_auto_is_left_out(tmp_path, capsys):
    """FedAvg's run has ended, and the others have not."""
    run_in_process(SMALL | {"num-clients": 4, "output-dir": str(tmp_path / "iid" / "fedavg-seed0")})
    assert read(tmp_path / "iid") == []
    said = capsys.readouterr().out
    assert "iid, seed 0, is left out: no run of auto, bbse, prior-em, t3a has ended" in said


def test_runs_of_methods_that_are_not_compared_do_not_count(tmp_path):
    """`t3a` has a run of this scenario alone: its column would lack the others' cells."""
    for method in ("fedavg", "auto", "bbse", "t3a"):
        leave(tmp_path / "iid", method, 0, [0.5, 0.25])
    (one,) = read(tmp_path / "iid", ("fedavg", "auto", "bbse"))
    assert one.gain == {"auto": 0, "bbse": 0}


def test_a_record_keeps_other_seeds_and_scenarios(tmp_path, monkeypatch, capsys):
    """Seed 102 of a scenario is measured anew: its verdict replaces the old one, alone."""
    methods = {name: 1.0 for name in ("auto", "bbse")}
    old = Verdict([100, 101], 60.0, methods, methods, 1.0, {})
    wrong = Verdict([102], 0.0, methods, methods, 1.0, {})
    new = Verdict([102], 90.0, methods, methods, 1.0, {})
    record = tmp_path / "record.json"
    judge.write_record(record, {"iid": [old, wrong], "step": [old]})
    monkeypatch.setattr(judge, "read", lambda folder, compared: [new])
    (tmp_path / "200" / "iid").mkdir(parents=True)
    judge.main(record, tmp_path / "200")
    assert judge.read_record(record) == {"iid": [old, new], "step": [old]}
    assert "| iid | 70.0 | 1.00/1 | 1.00 | 1.00/1 | none 100; no rule |" in capsys.readouterr().out


def test_without_a_scenario_nothing_is_met(tmp_path):
    """All bars were met where each run was left out."""
    (tmp_path / "200").mkdir()
    with pytest.raises(SystemExit, match="holds no scenario, so there is nothing to judge"):
        judge.main(tmp_path / "record.json", tmp_path / "200")


RECORDS = sorted((experiments_root() / "auto" / "judged").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_page_has_the_records_table(record):
    results = experiments_root().parent / "docs" / "results"
    pages = [(results / name).read_text("utf-8") for name in ("auto.md", "auto-before.md")]
    found = judge.read_record(record)
    lines = judge.table({scenario: mean_of(verdicts) for scenario, verdicts in found.items()})
    assert sum("\n".join(lines) in page for page in pages) == 1


def test_the_figure_shows_the_records():
    with Image.open(figure.IMAGE) as image:
        assert image.text[TABLE] == figure.tables(), "python -m experiments.auto.figure"


def test_the_figures_points():
    """Rows are sorted by the gain of auto; bn-adapt is in no verdict, so it has no points."""
    fixed = {"bbse": 3.0, "prior-em": 1.0, "t3a": -0.5, "tent": 0.0}
    verdicts = {}
    for name, gain in (("step", 2.0), ("iid", -0.2)):
        gains = fixed | {"auto": gain}
        harmed = dict.fromkeys(gains, 40.0) | {"auto": gain + 3}
        verdicts[name] = Verdict([0], 80.0, gains, harmed, 3.5, {})
    gains, harms = Figure().subplots(1, 2)
    figure.draw(verdicts, gains, harms)
    assert [label.get_text() for label in gains.get_yticklabels()] == ["iid", "step"]
    points = {each.get_label(): each.get_offsets().tolist() for each in gains.collections}
    assert points["auto"] == [[-0.2, 0.0], [2.0, 1.0]]
    assert points["T3A"] == [[-0.5, 0.0], [-0.5, 1.0]]
    assert "BN-adapt" not in points
    assert harms.collections[-1].get_offsets().tolist() == [[2.8, 0.0], [5.0, 1.0]]
