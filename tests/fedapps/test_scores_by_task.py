"""Tables, gains, figures and choices follow the main score of the task, by hand."""

import json

import pytest
from run_folders import leave
from small_runs import invoke

from fedapps.callbacks import EarlyStopping, Stop
from fedapps.common.tasks import reported_name
from fedapps.results.comparison import as_table, compare
from fedapps.results.gains import novel_scores
from fedapps.results.plot import clients, curves, gain, swept
from fedapps.results.progress import shown
from fedapps.results.report import client_columns, client_rows, write_report
from fedapps.results.runs import read_runs
from fedapps.results.table import results


def leave_values(folder, label, seed, novel, *, train=(2.0, 4.0), curve=(), **settings):
    """A run whose clients have these RMSE: `leave` with other scores in its files."""
    run = leave(folder, label, seed, novel, train=train, curve=curve, **settings)
    summary = json.loads((run / "summary.json").read_text())
    for evaluation in (summary, summary["last"]):
        for scores in evaluation["per_client"].values():
            scores["rmse"] = scores.pop("accuracy")
        scores = evaluation["evaluation"]
        for role in ("train", "novel"):
            if f"{role}-accuracy" in scores:
                scores[f"{role}-rmse"] = scores.pop(f"{role}-accuracy")
                scores[f"{role}-r2"] = 0.5
    (run / "summary.json").write_text(json.dumps(summary))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace("train-accuracy", "train-rmse"))
    return run


def two_methods(folder):
    """RMSE of novel clients: FedAvg 10, 20, 30; TENT 10.05, 20.3, 18: mean 16.117."""
    leave_values(folder, "fedavg", 0, [10.0, 20.0, 30.0], curve=(9.0, 5.0))
    leave_values(folder, "tent", 0, [10.05, 20.3, 18.0], train=(3.0, 5.0), curve=(9.0, 6.0))
    return read_runs(folder)[0]


def test_the_least_error_is_the_best_and_the_largest_is_the_worst(tmp_path):
    """Means 20 and 16.117; the worst tenth of three clients is the largest error, 30 and 20.3."""
    compared = compare(two_methods(tmp_path))
    lines = {(line.score, line.method): line for line in compared.lines.itertuples()}
    tent, fedavg = lines["novel-rmse", "tent"], lines["novel-rmse", "fedavg"]
    assert not tent.best and not fedavg.best  # one seed confirms nothing
    assert tent.mean == pytest.approx(48.35 / 3)
    assert (tent.worst_client, tent.lowest_tenth) == pytest.approx((20.3, 20.3))
    assert (fedavg.worst_client, fedavg.lowest_tenth) == pytest.approx((30, 30))
    assert fedavg.deviation_over_clients == pytest.approx(10)
    table = as_table(compared)
    assert "worst tenth" in table.columns and "lowest tenth" not in table.columns
    cells = {(row[0], row[1]): row[2] for row in table.rows}
    assert cells["novel clients, RMSE", "tent"] == "16.12"
    assert cells["novel, R²", "tent"] == "0.500"
    assert "accuracy" not in table.caption and "less is better" in table.caption


def test_the_least_error_that_five_seeds_confirm_is_the_best(tmp_path):
    """TENT's novel clients have less error in each seed; training clients have the same."""
    for seed in range(5):
        leave_values(tmp_path, "fedavg", seed, [10.0 + seed, 20.0, 30.0])
        leave_values(tmp_path, "tent", seed, [5.0, 16.0, 24.0 + 0.1 * seed])
    lines = compare(read_runs(tmp_path)[0]).lines
    best = set(lines[lines.best & lines.score.str.endswith("-rmse")].itertuples(index=False))
    assert {(line.score, line.method) for line in best} == {("novel-rmse", "tent")}


def test_the_table_has_errors_in_the_unit_of_the_labels(tmp_path):
    table = results(two_methods(tmp_path))
    assert "RMSE in the labels' unit, at the round" in table.title
    assert "accuracy" not in table.title + table.caption
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert row["training clients, RMSE"] == "4.000"
    assert row["novel clients, RMSE"] == "16.12"
    assert row["training, R²"] == "0.500"
    assert "training clients" not in row


def test_a_client_is_harmed_by_an_error_more_than_one_percent_higher(tmp_path):
    """0.5 % more is no harm, 1.5 % more is, 40 % less is a gain of 12: gains −0.05, −0.3, 12."""
    runs = two_methods(tmp_path)
    found = novel_scores(runs).set_index(runs.name).loc["tent-seed0"]
    assert found.gain == pytest.approx(11.65 / 3)
    assert found.harmed == pytest.approx(100 / 3)
    assert (found.rmse, found["worst-decile"]) == pytest.approx((48.35 / 3, 20.3))
    asked = ("table", tmp_path, "--format", "markdown", "--scores")
    assert "| tent | 3.883 | 33.33 | 16.12 | 1 |" in invoke(*asked, "gain,harmed,rmse").output
    assert "the runs have no accuracy" in invoke(*asked, "accuracy", code=2).output


def test_exactly_one_percent_is_no_harm(tmp_path):
    leave_values(tmp_path, "fedavg", 0, [10.0, 20.0])
    leave_values(tmp_path, "tent", 0, [10.1, 20.21])
    runs = read_runs(tmp_path)[0]
    assert novel_scores(runs).harmed.tolist() == [0, 50]


def test_tasks_stand_in_columns_of_their_own_and_gains_refuse_to_mix(tmp_path):
    leave(tmp_path, "fedavg", 0, [0.5, 0.7])
    leave_values(tmp_path, "tent", 0, [1.0, 2.0], dataset="wine")
    runs = read_runs(tmp_path)[0]
    table = results(runs)
    cells = {row[0].split()[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert cells["fedavg"]["novel clients"] == "60.00"
    assert cells["fedavg"]["novel clients, RMSE"] == ""
    assert cells["tent"]["novel clients, RMSE"] == "1.500"
    assert cells["tent"]["novel clients"] == ""
    assert "accuracy in %, RMSE in the labels' unit" in table.title
    assert not compare(runs, by=["method", "dataset"]).lines.best.any()
    with pytest.raises(ValueError, match="have no common unit"):
        novel_scores(runs)
    page = write_report(runs, tmp_path).read_text("utf-8")
    assert "main score" in page and "1.000 RMSE" in page and "50.00 accuracy" in page


def test_figures_and_pages_name_the_score(tmp_path):
    for alpha in ("0.1", "1.0"):
        leave_values(
            tmp_path / "x", f"fedavg partition.alpha={alpha}", 0, [10.0, 20.0],
            curve=(9.0, 5.0), partition="dirichlet",
        )  # fmt: skip
    runs = read_runs(tmp_path / "x")[0]
    (axis,) = curves(runs).axes
    assert axis.get_ylabel() == "RMSE in the labels' unit"
    assert axis.lines[0].get_ydata().tolist() == [9, 5]
    assert [a.get_title() for a in clients(runs).axes] == [
        "training clients, RMSE", "novel clients, RMSE",
    ]  # fmt: skip
    axes = swept(runs, "partition.alpha").axes
    assert [a.get_ylabel() for a in axes] == ["RMSE in the labels' unit", "", "R²", ""]
    assert gain(tmp_path).axes[0].get_ylabel() == "gain on fedavg in the labels' unit"
    assert client_columns(runs)[4:] == ["RMSE", "last round", "rank"]
    ranks = {row[0]: row[5:] for row in client_rows(runs.iloc[:1]) if row[3] == "novel"}
    assert ranks == {"2": ["10.00", "10.00", "1 of 2"], "3": ["20.00", "20.00", "2 of 2"]}
    assert shown({"evaluation": {"train-rmse": 53.4444}}) == {"train": "training RMSE 53.44"}


def test_several_labels_have_f1_beside_the_accuracy(tmp_path):
    run = leave(tmp_path, "fedavg", 0, [0.5], train=(0.25,))
    summary = json.loads((run / "summary.json").read_text())
    summary["evaluation"] |= {"train-micro-f1": 0.75, "train-macro-f1": 0.5}
    (run / "summary.json").write_text(json.dumps(summary))
    table = results(read_runs(tmp_path)[0])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["training clients"] == "25.00"
    assert (row["training, micro F1"], row["training, macro F1"]) == ("0.750", "0.500")
    assert "whose labels are all right" in table.caption


def test_tables_say_which_score_chose_the_round_and_how_clients_are_weighed(tmp_path):
    leave(tmp_path, "fedavg", 0, [0.5], **{"selection-metric": "macro-f1"})
    runs = read_runs(tmp_path)[0]
    assert results(runs).title.endswith("at the round that is best on validation by macro F1")
    assert "average-over" not in results(runs).caption
    leave(tmp_path, "tent", 0, [0.5], **{"average-over": "samples"})
    runs = read_runs(tmp_path)[0]
    assert results(runs).title.endswith("best on validation by macro F1 or the main score")
    said = "average-over=samples: means weigh each client by its samples, standard errors do not"
    assert said in results(runs).caption and said in as_table(compare(runs)).caption


def test_a_table_says_which_methods_report_their_last_round(tmp_path):
    """The best round is none of auto's."""
    leave(tmp_path, "fedavg", 0, [0.5])
    run = leave(tmp_path, "auto", 0, [0.5])
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"reports_last_round": True}))
    runs = read_runs(tmp_path)[0]
    assert "the last round in place of the best one: auto." in as_table(compare(runs)).caption
    assert "in place of" not in as_table(compare(runs, round_="last")).caption


def test_tables_say_how_many_clients_a_mean_lacks(tmp_path):
    """In seed 0 one training client had no number, in seed 1 two, at the last round one more."""
    for seed, count in enumerate((1, 2)):
        run = leave(tmp_path, "fedavg", seed, [0.5], scores="my_lab:auroc")
        summary = json.loads((run / "summary.json").read_text())
        summary["last"] = {"evaluation": {"train--bias": 1.0, "train-not-finite--bias": count + 1}}
        summary["evaluation"] |= {"train-auroc": 0.5, "train-not-finite-auroc": count}
        (run / "summary.json").write_text(json.dumps(summary))
    runs = read_runs(tmp_path)[0]
    said = "clients without a number, left out of the mean: training, {}"
    assert said.format("auroc (fedavg 3)") in results(runs).caption
    assert said.format("auroc (fedavg 3)") in as_table(compare(runs)).caption
    assert said.format("bias (fedavg 5)") in as_table(compare(runs, round_="last")).caption


def test_macro_f1_that_chooses_rounds_of_classes_has_no_column(tmp_path):
    run = leave(tmp_path, "fedavg", 0, [0.5])
    summary = json.loads((run / "summary.json").read_text())
    summary["evaluation"]["train-macro-f1"] = 0.5
    (run / "summary.json").write_text(json.dumps(summary))
    assert not any("F1" in title for title in results(read_runs(tmp_path)[0]).columns)


def test_own_scores_have_columns_and_directions(tmp_path):
    """A run's configuration names them; less of the one with a minus sign is better."""
    for seed in range(5):  # fewer do not confirm a difference
        for label, good, bias in (("fedavg", 0.5, 2.0), ("tent", 0.75, 3.0)):
            names = "my_lab.metrics:good,my_lab.metrics:bias"
            run = leave(tmp_path, label, seed, [0.5], scores=names)
            summary = json.loads((run / "summary.json").read_text())
            further = 0.01 * seed * bias  # the differences differ by seed
            own = {"train-good": good + further, "train--bias": bias + further}
            summary["evaluation"] |= own
            (run / "summary.json").write_text(json.dumps(summary))
    runs = read_runs(tmp_path)[0]
    table = results(runs)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    means = (row["training, good"].split()[0], row["training, bias"].split()[0])
    assert tuple(map(float, means)) == (0.81, 3.06)  # 0.75 and 3 + 0.03 · (0 + 1 + 2 + 3 + 4) / 5
    lines = compare(runs).lines
    best = set(lines[lines.best & lines.score.str.startswith("train-")].itertuples(index=False))
    assert {(line.score, line.method) for line in best} == {
        ("train-good", "tent"), ("train--bias", "fedavg"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("selected", "reported", "name"),
    [
        ("auto", ["loss", "rmse"], "rmse"),
        ("auto", ["loss", "accuracy"], "accuracy"),
        ("bias", ["-bias", "rmse"], "-bias"),
        ("bias", ["bias", "-bias"], "bias"),
        ("mae", ["rmse"], "mae"),
    ],
)
def test_the_name_under_which_a_score_is_reported(selected, reported, name):
    assert reported_name(selected, reported) == name


@pytest.mark.parametrize("name", ["rmse", "-bias"])
def test_early_stopping_counts_evaluations_without_a_smaller_error(name):
    """Errors 5, 3, 4, 3: the third and the fourth are no new best."""

    class Strategy:
        may_stop = True

    stopping = EarlyStopping(2, "auto" if name == "rmse" else "bias")
    for value in (5.0, 3.0, 4.0):
        scores = {f"train-{name}": value, f"train-trimmed-{name}": value}
        stopping.evaluation_ends({"evaluation": scores}, Strategy())
    assert stopping.since == 1
    with pytest.raises(Stop):
        stopping.evaluation_ends(
            {"evaluation": scores | {f"train-trimmed-{name}": 3.0}}, Strategy()
        )
