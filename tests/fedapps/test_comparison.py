"""Tables of a folder: means, published values, paired tests and the unlucky clients, by hand."""

import csv
import io
import json
import math

import pytest
from run_folders import leave
from small_runs import invoke

from fedapps.results.comparison import as_table, compare
from fedapps.results.published import Published
from fedapps.results.runs import read_runs
from fedapps.settings.experiments import read_experiment

BASE = (0.10, 0.30, 0.50, 0.60, 0.60, 0.60, 0.60, 0.60, 0.60, 0.60, 0.50)  # 11 clients


def lines(folder, **options):
    """The comparison's lines by score and settings, and the comparison."""
    compared = compare(read_runs(folder)[0], **options)
    place = ["score", *compared.by]
    rows = zip(compared.lines[place].to_numpy(), compared.lines.itertuples(), strict=True)
    return {tuple(key): line for key, line in rows}, compared


def table(folder, *options, code=0):
    return invoke("table", folder, *options, code=code)


def test_mean_and_deviation_over_seeds_and_over_clients(tmp_path):
    """Seed 0: mean 5.6/11, worst 0.1, lowest two of eleven 0.2. Seed 1: all 0.1 higher: the mean
    of the two seeds is 55.909, their deviation 10/√2 = 7.071, the deviation over clients the same
    for both."""
    leave(tmp_path, "fedavg", 0, BASE)
    leave(tmp_path, "fedavg", 1, [a + 0.1 for a in BASE])
    found = lines(tmp_path)[0]["novel-accuracy", "fedavg"]
    assert found.mean == pytest.approx(100 * (5.6 / 11 + 0.05))
    assert found.deviation_over_seeds == pytest.approx(10 / 2**0.5)
    assert (found.worst_client, found.lowest_tenth) == pytest.approx((15, 25))
    mean = 56 / 11
    squares = (1 - mean) ** 2 + (3 - mean) ** 2 + 2 * (5 - mean) ** 2 + 7 * (6 - mean) ** 2
    assert found.deviation_over_clients == pytest.approx(10 * (squares / 10) ** 0.5)


def test_fewer_than_five_seeds_are_not_tested(tmp_path):
    """However many clients agree: those of one training run share its model."""
    base = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    for seed in range(4):
        leave(tmp_path, "fedavg", seed, base)
        leave(tmp_path, "tent", seed, [a + 0.01 * i for i, a in enumerate(base, 1)])
    got, found = lines(tmp_path)
    assert got["novel-accuracy", "tent"].difference_to_reference == pytest.approx(3.5)
    assert math.isnan(got["novel-accuracy", "tent"].p)
    texts = as_table(found)
    place = texts.columns.index("less fedavg")
    cells = {(row[0], row[1]): row[place] for row in texts.rows}
    assert cells["novel clients", "tent"] == "+3.50"


def test_the_sign_over_five_seeds(tmp_path):
    """Differences 1 … 5: t = 3/(√2.5/√5) = √18, and with four degrees of freedom
    P(T < t) = 1/2 + 3/8·t/√(1 + t²/4)·(1 − t²/(12·(1 + t²/4))) = 0.99338."""
    for seed in range(5):
        leave(tmp_path, "fedavg", seed, [0.2 + seed / 10, 0.4])
        leave(tmp_path, "tent", seed, [0.2 + seed / 10 + 0.02 * (seed + 1), 0.4])
    got, found = lines(tmp_path)
    assert got["novel-accuracy", "tent"].difference_to_reference == pytest.approx(3)
    assert got["novel-accuracy", "tent"].p == pytest.approx(0.013236, abs=1e-5)
    assert "Student's paired t test over 5 seeds or more" in as_table(found).caption
    assert got["train-accuracy", "tent"].p == 1  # no difference at all
    texts = as_table(found)
    place = texts.columns.index("less fedavg")
    cells = {(row[0], row[1]): row[place] for row in texts.rows}
    assert cells["novel clients", "tent"] == "+3.00 (p 0.01)"
    assert cells["training clients", "tent"].endswith("n.s.")


def test_a_row_is_tested_on_the_seeds_that_it_has(tmp_path):
    """TENT has five, 1 … 5 points more than FedAvg as above; FedTTA has four of them."""
    for seed in range(5):
        leave(tmp_path, "fedavg", seed, [0.2 + seed / 10])
        leave(tmp_path, "tent", seed, [0.2 + seed / 10 + 0.01 * (seed + 1)])
        if seed < 4:
            leave(tmp_path, "fedtta", seed, [0.2 + seed / 10 + 0.01 * (seed + 1)])
    got, _ = lines(tmp_path)
    assert got["novel-accuracy", "tent"].p == pytest.approx(0.013236, abs=1e-5)
    assert got["novel-accuracy", "fedtta"].difference_to_reference == pytest.approx(2.5)
    assert math.isnan(got["novel-accuracy", "fedtta"].p)


def test_rows_by_settings_compare_on_the_same_split_alone(tmp_path):
    for alpha, gain in ((0.1, 0.04), (1.0, 0.02)):
        for method, plus in (("fedavg", 0), ("tent", gain)):
            label = f"{method} partition.alpha={alpha}"
            leave(tmp_path, label, 0, [alpha / 2 + plus, 0.3 + plus], partition="dirichlet")
    got, found = lines(tmp_path)
    assert found.by == ["method", "partition.alpha"]
    assert got["novel-accuracy", "tent", "0.1"].difference_to_reference == pytest.approx(4)
    assert got["novel-accuracy", "tent", "1.0"].difference_to_reference == pytest.approx(2)
    whole = lines(tmp_path, by=["method"])[0]
    assert ("novel-accuracy", "tent partition.alpha=0.1") in whole  # not averaged over α
    assert math.isnan(
        whole["novel-accuracy", "tent partition.alpha=1.0"].difference_to_reference
    )  # another split
    with pytest.raises(ValueError, match="more than one run of a seed"):
        compare(read_runs(tmp_path)[0], by=["partition.alpha"])
    with pytest.raises(ValueError, match="no run has a setting 'alpha'"):
        compare(read_runs(tmp_path)[0], by=["alpha"])


def test_the_last_round_and_test_samples_are_other_scores(tmp_path):
    file = leave(tmp_path, "tent", 0, [0.9, 0.7], last=[0.5, 0.1]) / "summary.json"
    summary = json.loads(file.read_text())
    summary["evaluation"] |= {"train-accuracy": 0.8, "train-test-accuracy": 0.6}
    file.write_text(json.dumps(summary))
    best = lines(tmp_path)[0]
    assert best["train-accuracy", "tent"].mean == pytest.approx(80)
    assert best["train-test-accuracy", "tent"].mean == pytest.approx(60)
    assert lines(tmp_path)[0]["novel-accuracy", "tent"].mean == pytest.approx(80)
    last = lines(tmp_path, round_="last")[0]["novel-accuracy", "tent"]
    assert last.mean == pytest.approx(30)
    assert last.worst_client == pytest.approx(10)


PAPER = """
dataset = "mnist"
partition = "dirichlet"
rounds = 200
num-clients = 100

[[published]]
at = { "partition.alpha" = 0.1 }
novel-accuracy = { tent = 60.0, "tent adapt-steps=1" = 50.0 }

[[published]]
at = { "partition.alpha" = 1.0 }
novel = { tent = 70.5 }
"""


def test_published_values_stand_beside_the_runs_that_they_fit(tmp_path):
    (tmp_path / "experiment.toml").write_text(PAPER)
    of = {"dataset": "mnist", "partition": "dirichlet", "num-clients": 100, "rounds": 20}
    for label in ("tent", "tent partition.alpha=1.0", "tent adapt-steps=1", "tent adapt-steps=2"):
        leave(tmp_path, label, 0, [0.55, 0.75], **of)
    leave(tmp_path, "fedavg", 0, [0.5], **of)
    leave(tmp_path, "tent lr=0.5", 0, [0.5], **of | {"dataset": "digits"})
    done = table(tmp_path, "--format", "csv", "--by", "method,partition.alpha,dataset")
    rows = {
        (row["method"], row["partition.alpha"], row["dataset"]): row
        for row in csv.DictReader(io.StringIO(done.stdout))
        if row["score"] == "novel-accuracy"
    }
    printed = {key: row["published"] for key, row in rows.items()}
    assert printed == {
        ("tent", "0.1", "mnist"): "60.0",
        ("tent", "1.0", "mnist"): "70.5",
        ("tent adapt-steps=1", "0.1", "mnist"): "50.0",
        ("tent adapt-steps=2", "0.1", "mnist"): "",
        ("fedavg", "0.1", "mnist"): "",
        ("tent lr=0.5", "0.1", "digits"): "",
    }
    said = " ".join(table(tmp_path).stdout.split())
    assert "published under other settings: rounds 20 (there 200)" in said
    assert "+5.00" in said  # 65 measured, 60 published
    assert "−5.50" in said


def test_a_published_value_is_of_its_dataset_its_column_and_its_method(tmp_path):
    """Of MNIST's table with two columns by clients; settings that identify a column stand in no
    method's name, others do."""
    columns = [
        {"at": {"num-clients": 10}, "novel-accuracy": {"tent": 70.0, "tent adapt-steps=5": 71.0}},
        {"at": {"num-clients": 40}, "novel-accuracy": {"tent": 60.0}, "train-f1": {"tent": 0.5}},
        {"at": {"num-clients": 70}, "train-f1": {"tent": 0.4}},
    ]
    settings = {"dataset": "mnist", "partition": "iid", "rounds": 9, "num-clients": 99}
    paper = Published.read(settings | {"tent.adapt-steps": 7}, columns)

    def value(label, dataset="mnist", score="novel-accuracy"):
        folder = tmp_path / dataset / label
        leave(folder, label, 0, [0.5], dataset=dataset, partition="iid")
        runs = read_runs(folder)[0]
        return paper.of(runs, score), paper.deviations(runs)

    got = {
        "rounds": 30,
        "tent.adapt-steps": 10,
    }  # what stands in a label, or tells columns, is not
    assert value("tent num-clients=10") == (70.0, got)
    assert value("tent num-clients=10 adapt-steps=5") == (71.0, {"rounds": 30})
    assert value("tent num-clients=40", score="train-f1") == (0.5, got)
    assert value("tent num-clients=70", score="train-f1") == (0.4, got)
    assert value("tent num-clients=40 adapt-steps=5") == (None, {})
    assert value("tent num-clients=20") == (None, {})
    assert value("tent num-clients=10", dataset="digits") == (None, {})
    assert value("tent num-clients=40 rounds=8") == (None, {})  # in no column's name


def test_bad_published_tables_are_refused():
    with pytest.raises(ValueError, match=r"'nowel'; known: at, train-accuracy, novel-accuracy"):
        Published.read({}, {"nowel": {"tent": 3.0}})
    with pytest.raises(ValueError, match="tent is 'much'"):
        Published.read({}, [{"novel-accuracy": {"tent": "much"}}])


def test_a_shipped_table_has_its_published_values():
    asked = read_experiment("pfedhn/table1-cifar10")
    published = Published.read(asked.settings, asked.published)
    labels = [f"fedavg fraction-train={share}" for share in (0.5, 0.1, 0.05)]
    first = [
        column["train-test-accuracy"][label]
        for column, label in zip(published.columns, labels, strict=False)
    ]
    assert first == [51.42, 47.79, 44.12]
    assert asked.published[2]["at"] == {"dataset": "cifar10", "num-clients": 100}


def test_damaged_runs_are_told_and_the_rest_is_as_table(tmp_path):
    for method in ("fedavg", "tent", "local", "afl"):
        leave(tmp_path, method, 0, [0.5, 0.75], curve=(0.1, 0.2, 0.3))
    leave(tmp_path, "tent", 1, [0.5, 0.75], curve=(0.1, 0.2, 0.3))
    (tmp_path / "local-seed0" / "summary.json").unlink()
    summary = tmp_path / "afl-seed0" / "summary.json"
    summary.write_text(summary.read_text()[:40])
    lines = (tmp_path / "tent-seed1" / "metrics.jsonl").read_text()
    (tmp_path / "tent-seed1" / "metrics.jsonl").write_text(lines[:-7])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "summary.json").write_text(json.dumps({"accuracy": 1}))
    (tmp_path / "theirs" / "config.toml").write_text('model = "gpt"')
    drawn = tmp_path / "curves.svg"
    for command, *options in (["table"], ["report"], ["plot", "curves", "--output", str(drawn)]):
        said = invoke(command, tmp_path, *options).output
        assert "local-seed0: no summary.json" in said
        assert "afl-seed0: damaged" in said
        assert "tent-seed1: metrics.jsonl is damaged or cut short: 2 of 3 rounds" in said
        assert "theirs: no run of fedapps" in said
        assert "fedavg: no run of seed 1" in said
    shown_ = table(tmp_path).stdout
    assert "fedavg" in shown_ and "tent" in shown_ and "62.50" in shown_
    assert drawn.stat().st_size
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "theirs: no run of fedapps" in page


@pytest.mark.parametrize(("finished", "rounds", "told"), [
    (None, 5, "3 of 5"), (False, 3, "3 of 3"), (None, 3, ""), (True, 5, ""),
])  # fmt: skip
def test_a_run_that_has_not_finished_is_told(finished, rounds, told, tmp_path):
    """It runs, was killed or failed. Old summaries lack `finished`; a run may end early."""
    run = leave(tmp_path, "tent", 0, [0.5], curve=(0.1, 0.2, 0.3), rounds=rounds)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"finished": finished}))
    said = invoke("table", tmp_path).output
    assert (f"tent-seed0: has not finished: {told} rounds" in said) == bool(told)
    assert ("has not finished" in said) == bool(told)


def test_bad_options_are_refused(tmp_path):
    assert "no folder" in table(tmp_path / "none", code=2).stderr
    assert "holds no runs" in table(tmp_path, code=2).stderr
    leave(tmp_path, "tent", 0, [0.5])
    assert "'html'; known: rich" in table(tmp_path, "--format", "html", code=2).stderr
    assert "'first'; known: best" in table(tmp_path, "--round", "first", code=2).stderr
    assert "no method 'fedavg'" in table(tmp_path, "--against", "fedavg", code=2).stderr
