"""Which round a run's summary reports."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import ALL_SAMPLES, federate, update

from fedapps.results.recorder import Recorder
from fedapps.results.runs import read_runs
from fedapps.saved import MODEL
from fedapps.settings.config import defaults
from strategies.core.evaluation import means
from strategies.core.replies import Node, Update


class Reports:
    """What the recorder reads of a strategy."""

    selection_phase, report_last_round, saved_rounds = 0, False, 0

    def __init__(self):
        self.arrays, self.evaluation = {}, []


def summary_of(*accuracies, report_last_round=False, phases=()):
    """The summary of a run with these accuracies of training clients."""
    recorder, strategy = Recorder(defaults(), "", None), Reports()
    strategy.report_last_round = report_last_round
    for number, accuracy in enumerate(accuracies, 1):
        strategy.selection_phase = int(number in phases)
        got = {} if accuracy is None else {"train-accuracy": accuracy, "train-clients": 2}
        recorder.record({"round": number, "evaluation": got}, strategy)
    return recorder.summary


@pytest.mark.parametrize(
    ("accuracies", "options", "expected"),
    [
        ((0.5, 0.7, 0.7, 0.6), {}, 2),  # the first of the best
        ((None, None, None), {}, 3),  # nothing to choose by
        ((0.9, 0.7, 0.8), {"phases": (2, 3)}, 3),
        ((0.9, 0.7, 0.7), {"report_last_round": True}, 3),
    ],
)
def test_the_round_is_chosen_by_training_clients_validation(accuracies, options, expected):
    summary = summary_of(*accuracies, **options)
    assert summary["best_round"] == expected
    assert summary.get("reports_last_round", False) == options.get("report_last_round", False)


def test_one_client_does_not_choose_the_round():
    """Nine clients rise from 0.80 over 0.81 to 0.84. The tenth claims 0, then 1, then 0: means
    0.72, 0.829 and 0.756, while the reported accuracy stays a mean."""
    recorder, strategy = Recorder(defaults(), "", None), Reports()
    for number, (honest, claimed) in enumerate([(0.8, 0), (0.81, 1), (0.84, 0)], 1):
        strategy.evaluation = [update(i, {}, accuracy=honest) for i in range(9)]
        strategy.evaluation.append(update(9, {}, accuracy=claimed))
        recorder.record({"round": number, "evaluation": means(strategy.evaluation)}, strategy)
    assert recorder.summary["best_round"] == 3
    assert recorder.summary["evaluation"]["train-accuracy"] == pytest.approx(0.756)


@pytest.mark.parametrize(("selected", "name"), [("auto", "rmse"), ("bias", "-bias")])
def test_the_least_trimmed_error_chooses_the_round(selected, name):
    """Three clients' errors: medians 5, 3 and 4, and means 5, 11/3 and 3: the trimmed mean, which
    is the median, chooses round 2."""
    strategy = Reports()
    strategy.selection_metric = selected
    recorder = Recorder(defaults() | {"selection-metric": selected}, "", None)
    for number, errors in enumerate([(4, 5, 6), (2, 3, 6), (1, 4, 4)], 1):
        strategy.evaluation = [update(i, {}, **{name: e}) for i, e in enumerate(errors)]
        evaluation = means(strategy.evaluation, "clients", name)
        recorder.record({"round": number, "evaluation": evaluation}, strategy)
    assert recorder.summary["best_round"] == 2
    if selected == "auto":
        assert recorder.summary["per_client"]["1"] == {"role": "train", "examples": 1, "rmse": 3}


@pytest.mark.parametrize(("second", "chosen"), [(0.5, 1), (0.6, 2)])
def test_of_equal_trimmed_means_the_mean_decides(second, chosen):
    recorder = Recorder(defaults(), "", None)
    for number, accuracy in enumerate((0.5, second), 1):
        scores = {"train-accuracy": accuracy, "train-trimmed-accuracy": 0.7}
        recorder.record({"round": number, "evaluation": scores}, Reports())
    assert recorder.summary["best_round"] == chosen


def test_a_checkpoint_of_an_earlier_release_keeps_its_best_round():
    """It wrote trimmed_accuracy: 0.7 of round 1 stands against a mean of 0.1, and beats the 0.6 of
    round 2, which the mean alone would not."""
    train = {"accuracy": 0.1, "trimmed_accuracy": 0.7, "clients": 2}
    former = {"round": 1, "train": train, "novel": None, "per_client": {}}
    saved = {"rounds": [], "summary": {}, "phase": 0, "best": {"train": former, "novel": former}}
    saved |= {"model": {}, "memories": {}, "seconds": 0.0}
    recorder = Recorder(defaults(), "", None, {"recorder": saved})
    scores = {"train-accuracy": 0.5, "train-trimmed-accuracy": 0.6}
    recorder.record({"round": 2, "evaluation": scores}, Reports())
    assert recorder.summary["best_round"] == 1
    assert recorder.summary["evaluation"] == {
        "train-accuracy": 0.1, "train-trimmed-accuracy": 0.7, "train-clients": 2
    }  # fmt: skip
    assert recorder.summary["last"]["evaluation"]["train-trimmed-accuracy"] == 0.6


@pytest.mark.parametrize(("kind", "best"), [("trimmed", 1), ("plain", 2)])
def test_a_setting_says_by_which_mean_the_round_is_chosen(kind, best):
    """Accuracies 0, 0.8, 0.8 and then 0.6, 0.5, 1: the middle ones are 0.8 and 0.6, the means 0.53
    and 0.7."""
    recorder = Recorder(defaults(), "", None)
    for number, accuracies in enumerate(((0.0, 0.8, 0.8), (0.6, 0.5, 1.0)), 1):
        replies = [update(i, {}, accuracy=value) for i, value in enumerate(accuracies)]
        scores = means(replies, selection_mean=kind)
        recorder.record({"round": number, "evaluation": scores}, Reports())
    assert recorder.summary["best_round"] == best


@pytest.mark.parametrize(
    ("select", "rounds"),
    [("accuracy", (3, 1)), ("loss", (2, 3)), ("macro-f1", (1, 2))],
)
def test_a_setting_names_the_score_that_chooses_both_rounds(select, rounds):
    """Of each score the personal and the global model's are best in different rounds. Scores of
    novel clients and of test samples are best in round 4."""
    recorder, strategy = Recorder(defaults() | {"selection-metric": select}, "", None), Reports()
    table = [  # personal, then global: accuracy, loss, macro-f1
        (0.5, 2.0, 0.7, 0.9, 0.6, 0.3),
        (0.6, 1.0, 0.6, 0.4, 0.5, 0.8),
        (0.8, 3.0, 0.1, 0.5, 0.2, 0.7),
        (0.2, 4.0, 0.2, 0.3, 0.9, 0.2),
    ]
    for number, row in enumerate(table, 1):
        names = [f"{which}{name}" for which in ("", "global-")
                 for name in ("accuracy", "loss", "macro-f1")]  # fmt: skip
        scores = {f"train-{name}": value for name, value in zip(names, row, strict=True)}
        scores |= {"novel-accuracy": number / 4, "novel-macro-f1": number / 4, "novel-clients": 1}
        scores |= {"novel-loss": 4 - number, "train-test-accuracy": number / 4}
        recorder.record({"round": number, "evaluation": scores}, strategy)
    assert (recorder.summary["best_round"], recorder.summary["novel_round"]) == rounds


def test_a_run_reports_the_rounds_of_least_validation_loss(tmp_path):
    """At this learning rate losses fall and rise, and Ditto's two models are best at different
    rounds; its global model is FedAvg's, whose last and whose most accurate rounds are others."""
    rounds = {}
    for method in ("fedavg", "ditto"):
        folder = tmp_path / method
        changes = {"selection-metric": "loss", "lr": 1.5, "output-dir": str(folder)}
        result, _ = federate(method=method, rounds=6, **changes)
        scores = result.evaluate_metrics_clientapp
        names = ["train-trimmed-loss", "train-trimmed-global-loss"][: 1 + (method == "ditto")]
        best = [min(scores, key=lambda n, name=name: scores[n][name]) for name in names]
        found = json.loads((folder / "summary.json").read_text())
        rounds[method] = found["best_round"], found["novel_round"]
        assert rounds[method] == (best[0], best[-1])
        accurate = max(scores, key=lambda n: scores[n]["train-accuracy"])
    assert rounds["fedavg"][1] == rounds["ditto"][1] not in (rounds["ditto"][0], accurate, 6)


def test_all_that_is_reported_is_of_that_round():
    """Round 2 of 3 is the best on validation, while novel clients do best in the last one. Mean
    megabytes are (1 + 2 + 6)/3; dropped are 2, none and 1 + 1 replies."""
    recorder, strategy = Recorder(defaults(), "", None), Reports()
    for number, train, novel, down, dropped in (
        (1, 0.5, 0.9, 1.0, {"error": 2}),
        (2, 0.7, 0.2, 2.0, {}),
        (3, 0.6, 0.95, 6.0, {"error": 1, "shape": 1}),
    ):
        got = {"train-accuracy": train, "train-clients": 2, "novel-accuracy": novel}
        strategy.evaluation = [update(4, {}, 7, accuracy=train / 2)]
        report = {"round": number, "evaluation": got | {"novel-clients": 1}, "dropped": dropped}
        recorder.record(report | {"megabytes": {"down": down, "up": 2 * down}}, strategy)
    found = recorder.summary
    assert found["best_round"] == 2 and found["rounds"] == 3
    names = ("train-accuracy", "novel-accuracy")
    assert [found["evaluation"][name] for name in names] == [0.7, 0.2]
    assert [found["last"]["evaluation"][name] for name in names] == [0.6, 0.95]
    client = {"role": "train", "accuracy": 0.35, "examples": 7}
    assert found["per_client"] == {"4": client}
    assert found["last"]["per_client"] == {"4": client | {"accuracy": 0.3}}
    assert found["megabytes_per_client_round"] == {"down": 3.0, "up": 6.0}
    assert found["dropped_replies"] == 4


def test_each_group_reports_the_round_that_is_best_for_the_model_that_it_gets():
    """Personal models are best in round 1, the global one in round 3. Client 4 trains, 5 is novel;
    their accuracies are round / 10 and round / 5."""
    recorder, strategy = Recorder(defaults(), "", None), Reports()
    for number, own, shared in ((1, 0.9, 0.2), (2, 0.8, 0.3), (3, 0.7, 0.6), (4, 0.6, 0.5)):
        scores = {"train-accuracy": own, "train-global-accuracy": shared, "train-clients": 1}
        novel = {"novel-accuracy": number / 5, "novel-clients": 1}
        strategy.evaluation = [
            update(4, {}, 7, accuracy=number / 10),
            Update(Node(5, 55, novel=True), {}, 8, {"accuracy": number / 5}),
        ]
        recorder.record({"round": number, "evaluation": scores | novel}, strategy)
    found = recorder.summary
    assert (found["best_round"], found["novel_round"]) == (1, 3)
    assert found["evaluation"]["train-accuracy"] == 0.9
    assert found["evaluation"]["novel-accuracy"] == 0.6
    assert found["saved_model_train"] == {
        "train-accuracy": 0.7, "train-global-accuracy": 0.6, "train-clients": 1
    }  # fmt: skip
    assert {c: got["accuracy"] for c, got in found["per_client"].items()} == {"4": 0.1, "5": 0.6}


def test_dittos_novel_clients_report_as_fedavgs_do(tmp_path):
    """Its global model is FedAvg's, in every round; so are the scores of it on validation samples,
    the round that they choose, and the saved model."""
    found = {}
    for method in ("fedavg", "ditto"):
        folder = tmp_path / method
        result, _ = federate(method=method, rounds=4, **{"output-dir": str(folder)})
        name = "train-accuracy" if method == "fedavg" else "train-global-accuracy"
        metrics = result.evaluate_metrics_clientapp.values()
        got = json.loads((folder / "summary.json").read_text())
        columns = [(m[name], m["novel-accuracy"], m["novel-clients"]) for m in metrics]
        novel = of_novel(got["evaluation"])
        found[method] = columns, got["novel_round"], novel, load_file(folder / MODEL)
    (*one, model), (*two, other) = found.values()
    assert one == two
    assert all((model[name] == array).all() for name, array in other.items())


def of_novel(evaluation):
    """The metrics of novel clients; fails if there are none."""
    metrics = {name: value for name, value in evaluation.items() if name.startswith("novel-")}
    assert metrics
    return metrics


def summary(folder, **changes):
    """The summary of a small run, every round of it evaluated."""
    federate(**{"output-dir": str(folder)} | changes)
    return json.loads((folder / "summary.json").read_text())


def test_novel_labeled_clients_are_reported_at_the_end_of_their_rounds(tmp_path):
    """φ is frozen in rounds 3 to 5, so training clients' accuracy is the same in all of them."""
    got = summary(tmp_path, method="pfedhn", **{"novel-rounds": 3})
    assert got["best_round"] == 5
    assert of_novel(got["evaluation"]) == of_novel(got["last"]["evaluation"])


def test_a_private_novel_client_is_in_the_summary(tmp_path):
    """It answers in round 4 alone; without any local step the first round would be the best."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    got = summary(tmp_path, method="odpfl-hn", rounds=4, **private | {"local-steps": 0})
    assert got["best_round"] == 4
    assert got["evaluation"]["novel-clients"] == 3


def test_clients_of_each_groups_round_are_reported():
    """Round 1 is the training clients', who hear 4 and 5; round 2 the novel ones', with 3 and 6."""
    recorder, strategy = Recorder(defaults(), "", None), Reports()
    for number, own, shared, client in ((1, 0.9, 0.2, 5), (2, 0.8, 0.3, 6)):
        scores = {"train-accuracy": own, "train-global-accuracy": shared, "train-clients": 1}
        novel = {"novel-accuracy": 0.5, "novel-clients": 1}
        train = Node(4 if number == 1 else 3, 54)
        strategy.evaluation = [
            Update(train, {}, 7, {"accuracy": 0.1}),
            Update(Node(client, 50 + client, novel=True), {}, 8, {"accuracy": 0.2}),
        ]
        recorder.record({"round": number, "evaluation": scores | novel}, strategy)
    assert [*recorder.summary["per_client"]] == ["4", "6"]


@pytest.mark.parametrize("over", ["clients", "samples"])
def test_a_client_with_many_samples_is_reported(over, tmp_path):
    """One of eight has 400 samples, the others 20: an evaluation counts them all."""
    rng = np.random.default_rng(0)
    device = np.repeat(np.arange(8), [400, *[20] * 7])
    x, y = rng.random((len(device), 4), np.float32), rng.integers(0, 2, len(device))
    np.savez(tmp_path / "data.npz", x=x, y=y, device=device)
    natural = {"partition": "natural", "partition.column": "device", "average-over": over}
    data = {"dataset": str(tmp_path / "data.npz"), "num-clients": 8, "model": "mlp-small"}
    federate(**natural, **data, **ALL_SAMPLES, **{"output-dir": str(tmp_path / "run"), "seed": 1})
    clients = json.loads((tmp_path / "run" / "summary.json").read_text())["per_client"].values()
    assert all(isinstance(client["examples"], int) for client in clients)
    assert not read_runs(tmp_path)[1]
    novel = {client["examples"] for client in clients if client["role"] == "novel"}
    assert 400 in novel
