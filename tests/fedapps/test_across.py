"""Values of a setting side by side: novel clients by the labels that they show."""

import re

from run_folders import leave
from small_runs import invoke

from fedapps.results.comparison import SHOTS, compare, several, side_by_side
from fedapps.results.published import Published
from fedapps.results.runs import read_runs

BASE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # of mean 0.35
PAPER = {"at": {"novel-shots": 5}, "novel-accuracy": {"tent": 42.0}}


def few(folder):
    """TENT is 0.01 … 0.06 above FedAvg without labels, 0.1 below with 20, and not run with 5 of
    seed 1."""
    gains = {"0": [0.01 * i for i in range(1, 7)], "5": [0.0] * 6, "20": [-0.1] * 6}
    for shots, gain in gains.items():
        for seed in (0, 1):
            up = 0.2 * seed
            leave(folder, f"fedavg novel-shots={shots}", seed, [b + up for b in BASE])
            if (shots, seed) != ("5", 1):
                accuracies = [b + up + g for b, g in zip(BASE, gain, strict=True)]
                leave(folder, f"tent novel-shots={shots}", seed, accuracies)
    return folder


def test_columns_are_the_values_in_order_and_cells_the_means(tmp_path):
    """FedAvg: 35 and 55, mean 45, deviation 20/√2 = 14.14. TENT: 48.5 and 35 against it on both
    seeds, all clients on one side; with 5 labels 35 on seed 0, the same as FedAvg there."""
    runs = read_runs(few(tmp_path))[0]
    compared = compare(runs, by=["method", SHOTS], published=Published({}, [PAPER]))
    shown = side_by_side(compared, SHOTS, ["novel-accuracy"])
    assert shown.columns == ["score", "method", "novel-shots 0", "novel-shots 5", "novel-shots 20"]
    assert shown.rows == [
        ["novel clients", "fedavg", *["45.00 ± 14.14"] * 3],
        ["novel clients", "tent", "48.50 ± 14.14", "35.00 (42.00)", "35.00 ± 14.14"],
    ]
    assert "↑" not in shown.caption  # of two seeds
    page = invoke("table", tmp_path, "--format", "latex")
    assert r"novel clients & TENT & 48.50 $\pm$ 14.14 & 35.00 & 35.00" in page.stdout
    assert r"\textbf" not in page.stdout  # no test confirms what two seeds say
    rows = invoke("table", tmp_path, "--by", "method,novel-shots")
    assert "novel-shots 20" not in rows.stdout


def test_arrows_mark_what_differs_over_five_seeds(tmp_path):
    """By 1 … 5 points (p 0.013) with 0 labels, by −1 and 1 … 4 (p 0.15) with 5."""
    for seed in range(5):
        for shots, gain in ((0, seed + 1), (5, seed or -1)):
            leave(tmp_path, f"fedavg novel-shots={shots}", seed, [0.5])
            leave(tmp_path, f"tent novel-shots={shots}", seed, [0.5 + gain / 100])
    compared = compare(read_runs(tmp_path)[0], by=["method", SHOTS])
    shown = side_by_side(compared, SHOTS, ["novel-accuracy"])
    assert [cell.endswith("↑") for cell in shown.rows[1][2:]] == [True, False]
    assert "↑, ↓: more, less than fedavg of the same column; Student's" in shown.caption
    page = invoke("table", tmp_path, "--by", "method,novel-shots", "--format", "latex").stdout
    bold = re.findall(r"(\w+) & (\d+) & \\textbf{(.*?) ", page)
    assert bold == [("TENT", "0", "53.00")]  # with 5 labels TENT leads too, unconfirmed
    assert "Bold: better than each other value that it is compared with; Student" in page


def test_any_setting_can_stand_side_by_side(tmp_path):
    for alpha in (10.0, 0.5):
        leave(tmp_path, f"fedavg partition.alpha={alpha}", 0, [alpha / 20], partition="dirichlet")
    runs = read_runs(tmp_path)[0]
    assert several(runs, "partition.alpha") and not several(runs, SHOTS)
    assert not several(runs.assign(error=["lost", ""]), "partition.alpha")
    options = ["--across", "partition.alpha", "--format", "markdown"]
    lines = invoke("table", tmp_path, *options).stdout.splitlines()
    assert "| score | method | partition.alpha 0.5 | partition.alpha 10.0 |" in lines
    assert "| novel clients | fedavg | 2.50 | 50.00 |" in lines


def test_the_other_keys_stay_in_their_order(tmp_path):
    """Three keys, the middle one side by side. One seed with four clients decides nothing."""
    for lr, shots in ((0.1, 0), (0.2, 0), (0.1, 5)):
        label = f"tent lr={lr} novel-shots={shots}"
        leave(tmp_path, label, 0, [lr, 0.5, 0.5, shots / 10], dataset="digits")
    published = Published({}, [{"at": {SHOTS: 5}, "novel-accuracy": {"tent lr=0.1": 40.0}}])
    compared = compare(read_runs(tmp_path)[0], by=["method", SHOTS, "lr"], published=published)
    shown = side_by_side(compared, SHOTS, ["novel-accuracy"])
    assert shown.columns == ["score", "method", "lr", "novel-shots 0", "novel-shots 5"]
    assert shown.rows == [
        ["novel clients", "tent", "0.1", "27.50", "40.00 (40.00)"],
        ["novel clients", "tent", "0.2", "30.00", "–"],
    ]
    assert shown.title == "digits, pathological, 20 clients, best round, by novel-shots"
    assert "in brackets: published. clients that show labels" in shown.caption
    by_rate = side_by_side(compared, "lr")
    assert "show labels" not in by_rate.caption and "↑" not in by_rate.caption


def test_unknown_settings_are_refused_with_the_nearest(tmp_path):
    leave(tmp_path, "fedavg partition.alpha=0.5", 0, [0.5], partition="dirichlet")
    for option in ("--across", "--by"):
        said = invoke("table", tmp_path, option, "partition.alfa", code=2).stderr
        said = " ".join(said.split())
        assert f"'partition.alfa'; {option} takes" in said and "partition.alpha" in said
    assert "--across takes" in invoke("table", tmp_path, "--across", "foo", code=2).stderr
