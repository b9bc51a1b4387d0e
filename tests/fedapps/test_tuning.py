"""Tuning: by validation alone, equal budgets, resumable, without a look at novel clients."""

import csv
import json
import tomllib

import matplotlib
import numpy as np
import pytest
import tomli_w
from small_runs import fedapps

from clients.core.client import Client
from fedapps.common.tasks import score_named
from fedapps.engines import run as engines
from fedapps.files import FORMAT, locked
from fedapps.settings.config import defaults, override
from fedapps.settings.experiments import read_experiment
from fedapps.settings.variants import Variant
from fedapps.tuning import Outcome, Tuning, best, history, read_search, write_results

EXPERIMENT = """
methods = ["fedavg", "tent"]
seeds = [7]
num-clients = 4
rounds = 1
local-steps = 4
evaluate-every = 1

[search]
lr = [0.0, 0.5]

[search.tent]
adapt-steps = { low = 0, high = 3 }
"""


@pytest.fixture(autouse=True)
def figures(request, monkeypatch):
    """trials.pdf is drawn for tests that ask for it, since that takes longer than small runs."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("fedapps.tuning.save", lambda figure, file: None)


@pytest.fixture
def drawn():
    """trials.pdf has a viewer's own fonts: embedding others takes most of a figure's time."""
    with matplotlib.rc_context({"pdf.use14corefonts": True}):
        yield


@pytest.fixture(autouse=True, scope="module")
def migrations():
    """Optuna's storage imports its migrations for each study, which takes longer than a study."""
    from alembic.script import ScriptDirectory

    read = ScriptDirectory.from_config
    directories = {}

    def from_config(config):
        place = config.get_main_option("script_location")
        if place not in directories:
            directories[place] = read(config)
        return directories[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield


@pytest.fixture
def experiment(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(EXPERIMENT)
    return file


def trials(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("drawn")
def test_equal_budgets_without_a_look_at_novel_clients(experiment, tmp_path, monkeypatch):
    """No novel client is asked for a score in any trial, no point is tried twice; without training
    (lr 0) nothing is as good as with it, and best.toml is an experiment that evaluates them."""
    scored = []
    score = Client.score

    def watched(self, arrays, config):
        scored.append(self.share.novel)
        return score(self, arrays, config)

    monkeypatch.setattr(Client, "score", watched)
    output = tmp_path / "tuning"
    fedapps("tune", experiment, "--trials", 4, "--output", output)
    assert scored and not any(scored)
    got = trials(output)
    assert [row["method"] for row in got] == ["fedavg"] * 2 + ["tent"] * 4  # of 2 and 8 points
    assert len({(row["method"], row["settings"]) for row in got}) == 6
    assert {word.split("=")[0] for word in got[-1]["settings"].split()} == {"lr", "adapt-steps"}
    values = {row["settings"]: float(row["validation"]) for row in got[:2]}
    assert values["lr=0.5"] > values["lr=0.0"]
    asked = read_experiment(str(output / "best.toml"))
    labels = asked.methods.split(",")
    assert labels[0] == "fedavg lr=0.5"
    assert labels[1].startswith("tent lr=0.5 adapt-steps=")
    assert asked.seeds == "0"
    assert asked.settings["num-clients"] == 4
    assert Variant.parse(labels[1]).apply(defaults() | asked.settings)["evaluate-novel"]
    assert (output / "trials.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("select", ["accuracy", "loss", "macro-f1"])
def test_settings_are_chosen_for_the_group_that_is_asked_for(select, experiment, tmp_path):
    """Ditto's training clients have models of their own, novel ones the global model. A trial is
    worth what each group's model has in its best round, by the score that `selection-metric`
    names."""
    best_of = min if select == "loss" else max
    text = experiment.read_text().replace("rounds = 1", "rounds = 3").partition("[search.tent]")[0]
    experiment.write_text(text)
    found = {}
    for group, key in (("training", ""), ("novel", "global-")):
        output = tmp_path / group
        words = [
            "--methods",
            "ditto",
            "--for",
            group,
            "--output",
            output,
            f"selection-metric={select}",
        ]
        fedapps("tune", experiment, *words)
        for row in trials(output):
            lines = output / "trials" / f"ditto,{row['settings']}-seed0" / "metrics.jsonl"
            rounds = [json.loads(line)["evaluation"] for line in lines.read_text().splitlines()]
            scores = [[e[f"train-{x}{key}{select}"] for x in ("trimmed-", "")] for e in rounds]
            found[group, row["settings"]] = float(row["validation"])
            assert found[group, row["settings"]] == best_of(scores)[1]
            assert row["measure"] == select
    assert found["training", "lr=0.5"] != found["novel", "lr=0.5"]
    command = ["tune", experiment, "--methods", "ditto", "--output", tmp_path / "novel"]
    assert "under other settings" in fedapps(*command, code=2)
    assert "choose training or novel" in fedapps(*command, "--for", "all", code=2)


def test_a_methods_own_search_of_a_key_replaces_the_common_one(experiment, tmp_path):
    text = experiment.read_text().replace('"tent"]', '"fedprox"]', 1)
    text = text[: text.index("[search.tent]")]
    experiment.write_text(text + "[search.fedprox]\nlr = [0.3]\n")
    fedapps("tune", experiment, "--output", tmp_path / "tuning")
    got = [(row["method"], row["settings"]) for row in trials(tmp_path / "tuning")]
    assert sorted(got) == [("fedavg", "lr=0.0"), ("fedavg", "lr=0.5"), ("fedprox", "lr=0.3")]


def test_a_study_goes_on_and_nothing_runs_twice(experiment, tmp_path, monkeypatch):
    """Killed in its first trial, which does not count; then two trials, then six in all: the four
    points that are left."""
    ran = []
    run = engines.run_in_process
    monkeypatch.setattr(
        engines,
        "run_in_process",
        lambda apps, config, *_: (ran.append(config), run(apps, config)),
    )

    def killed(*_, **__):
        raise KeyboardInterrupt

    output = tmp_path / "tuning"
    text = experiment.read_text().replace("lr = [0.0, 0.5]", "lr = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]")
    experiment.write_text(text)
    arguments = ["tune", experiment, "--methods", "fedavg", "--output", output, "--trials"]
    with monkeypatch.context() as patch:
        patch.setattr("fedapps.engines.run.run_jobs", killed)
        assert "the same command resumes" in fedapps(*arguments, 2, code=130)
    fedapps(*arguments, 2)
    before = trials(output)
    fedapps(*arguments, 6)
    after = trials(output)
    assert after[:2] == before and all(row["validation"] for row in after)
    assert [row["trial"] for row in after] == list("123456")
    rates = [config["lr"] for config in ran]
    assert sorted(rates) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert all(not config["evaluate-novel"] for config in ran)
    assert "under other settings" in fedapps(*arguments, 6, "rounds=2", code=2)


def test_a_trial_that_was_interrupted_continues(tmp_path):
    """Its run takes up the newest checkpoint in its folder, as `resume` says."""

    def run(jobs):
        assert all(job.config["resume"] for job in jobs)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tuning(defaults(), [0], {"lr": [0.1]}, tmp_path, 1, run).tune(["fedavg"], 1)


def test_two_searches_in_one_folder_are_refused(experiment, tmp_path):
    """The second one would take the first one's trials, which run, for interrupted ones."""
    output = tmp_path / "tuning"
    output.mkdir()
    with locked(output):
        said = fedapps("tune", experiment, "--trials", 1, "--output", output, code=2)
    assert f"another process uses the run in {output}" in said
    assert not list(output.iterdir())


LAB_MEASURES = {"accuracy": "lr=0.1", "loss": "lr=0.3", "macro-f1": "lr=0.03"}


@pytest.mark.parametrize("select", LAB_MEASURES)
def test_the_score_that_select_names_compares_the_trials(select, lab, rates, tmp_path):
    """In these runs the accuracy is best at 0.1, the loss at 0.3, F1 at 0.03. A study of one score
    takes no trials of another; accuracies alone are in %."""
    rates.write_text(rates.read_text().replace("[0.1, 0.3]", "[0.03, 0.1, 0.3]"))
    command = ["tune", rates, "--output", tmp_path / "tuning"]
    printed = fedapps(*command, f"selection-metric={select}")
    heading = {"accuracy": "validation accuracy, %", "loss": "validation loss"}
    assert heading.get(select, "validation macro F1") in printed
    found = {row["settings"]: float(row["validation"]) for row in trials(tmp_path / "tuning")}
    chosen = (min if select == "loss" else max)(found, key=found.get)
    assert chosen == LAB_MEASURES[select]
    text = (tmp_path / "tuning" / "best.toml").read_text()
    assert f"fedavg {chosen}" in text and score_named(select).text in text.partition("\n")[0]
    for other in LAB_MEASURES.keys() - {select}:
        assert "under other settings" in fedapps(*command, f"selection-metric={other}", code=2)


def test_a_study_of_accuracies_takes_no_losses(lab, rates, tmp_path):
    """Earlier releases took accuracies into a study whose runs chose their round by the loss."""
    tuning = Tuning(
        defaults() | {"selection-metric": "loss"}, [0], {"lr": [0.1, 0.3]}, tmp_path, 1, lab.run
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuning, "_measure", lambda *_: "accuracy")
        tuning.tune(["fedavg"], 1)
    with pytest.raises(ValueError, match="under other settings"):
        tuning.tune(["fedavg"], 1)


@pytest.mark.usefixtures("drawn")
def test_methods_that_are_compared_by_different_scores_are_told_apart(lab, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'methods = ["fedavg", "fedavg selection-metric=loss"]\n[search]\nlr = [0.1, 0.3]\n'
    )
    printed = fedapps("tune", tmp_path / "mine.toml", "--output", tmp_path / "tuning")
    assert "validation loss: 0.0000" in printed and "validation accuracy, %: 100.00" in printed
    asked = read_experiment(str(tmp_path / "tuning" / "best.toml"))
    assert asked.methods.split(",") == ["fedavg lr=0.1", "fedavg selection-metric=loss lr=0.3"]
    assert (tmp_path / "tuning" / "trials.pdf").is_file()


SEARCH = {"lr": {"low": 0.001, "high": 1.0, "log": True}}


class Lab:
    """Simulates runs: their accuracy is highest at lr 0.1, and from `limit` on they fail. It is
    stopped after `last` of them."""

    def __init__(self, last=None, limit=0.5):
        self.ran, self.last, self.limit = [], last, limit

    def run(self, work):
        for job in work:
            if job.done:
                continue
            if len(self.ran) == self.last:
                raise KeyboardInterrupt
            rate = job.config["lr"]
            self.ran += [job.name] * (rate < self.limit)
            accuracy = 1 / (1 + abs(np.log(rate / 0.1))) + 0.01 * job.seed
            scores = {"loss": abs(np.log(rate / 0.3)), "macro-f1": -abs(np.log(rate / 0.03))}
            scores |= {"accuracy": accuracy, "clients": 2}
            summary = {"finished": rate < self.limit, "train": scores}
            summary |= {"novel": None, "seconds": None, "rounds": 1}
            summary["megabytes_per_client_round"] = {"down": None, "up": None}
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "summary.json").write_text(json.dumps(summary))
            got = tomli_w.dumps(job.config | {"versions": {"results": FORMAT}})
            (job.folder / "config.toml").write_text(got)


@pytest.fixture
def lab(monkeypatch):
    """It simulates the command's runs."""
    lab = Lab()
    monkeypatch.setattr("fedapps.engines.run.run_jobs", lambda work, *_, **__: lab.run(work))
    return lab


@pytest.fixture
def rates(tmp_path):
    """An experiment that searches learning rates that do not fail."""
    file = tmp_path / "mine.toml"
    file.write_text('methods = ["fedavg"]\n[search]\nlr = [0.1, 0.3]\n')
    return file


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_study_that_was_stopped_is_what_an_unbroken_one_is(parallel, tmp_path, monkeypatch):
    """Of 12 trials of two seeds, stopped before the first one has its settings, after 3 runs, and
    after 14 more, where the sampler models the ten or more that it has seen; in between, one trial
    is asked for. The same trials in the same order, no finished run twice."""

    def tuned(name, last=None, trials=12):
        lab = Lab(last)
        tuning = Tuning(defaults(), [0, 1], SEARCH, tmp_path / name, parallel, lab.run)
        if last is None:
            return tuning.tune(["fedavg"], trials), lab.ran
        with pytest.raises(KeyboardInterrupt):
            tuning.tune(["fedavg"], trials)
        return [], lab.ran

    def stopped(*_):
        raise KeyboardInterrupt

    whole, ran = tuned("whole")
    assert len({one.label for one in whole}) == 12
    assert any(one.validation is None for one in whole)
    with monkeypatch.context() as patch:
        patch.setattr("fedapps.tuning.trial_label", stopped)
        tuned("cut", 0)
    _, first = tuned("cut", 3)
    one, none = tuned("cut", trials=1)
    _, more = tuned("cut", 14)
    again, rest = tuned("cut")
    assert (one, again) == (whole[:1], whole)
    assert first + none + more + rest == ran


def test_equal_failures_end_a_search_with_their_reason(experiment, tmp_path):
    """Three of four trials; the same command tries the fourth. What failed first is printed."""
    output, text = tmp_path / "tuning", experiment.read_text().replace("[0.0, 0.5]", "[1, 2, 3, 4]")
    experiment.write_text(text)
    command = ["tune", experiment, "--methods", "custom_methods:LOSS", "--trials", 9]
    command += ["--output", output]
    printed = fedapps(*command, code=1)
    assert printed.count("raise ArithmeticError") == 1
    assert "no trial of custom_methods:LOSS succeeded" in printed
    assert "; the first failed: RuntimeError: round 1" in printed
    assert [row["trial"] for row in trials(output)] == list("123")
    assert all("ArithmeticError: in loss" in row["error"] for row in trials(output))
    assert not (output / "best.toml").exists() and "best.toml" not in printed
    fedapps(*command, code=1)
    assert len({row["settings"] for row in trials(output)}) == 4 == len(trials(output))


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_later_call_tries_failed_points_again(parallel, tmp_path):
    """All three points fail; then two succeed and keep their numbers. The third is tried in each
    call, the others never again."""
    lab = Lab(limit=0)
    search = {"lr": [0.1, 0.3, 0.7]}
    tuning = Tuning(defaults(), [0], search, tmp_path, parallel, lab.run)
    failed = tuning.tune(["fedavg"], 9)
    assert [one.validation for one in failed] == [None] * 3
    lab.limit = 0.5
    again = tuning.tune(["fedavg"], 9)
    assert [(o.number, o.label) for o in again] == [(o.number, o.label) for o in failed]
    validation = {one.settings: one.validation for one in again}
    assert validation["lr=0.1"] > validation["lr=0.3"] > 0 and validation["lr=0.7"] is None
    assert tuning.tune(["fedavg"], 9) == again
    assert sorted(lab.ran) == ["fedavg,lr=0.1-seed0", "fedavg,lr=0.3-seed0"]
    lab.limit = 1
    assert best(tuning.tune(["fedavg"], 9))["fedavg"].settings == "lr=0.1"
    assert lab.ran[2:] == ["fedavg,lr=0.7-seed0"]


def test_best_settings_keep_the_experiments_others(lab, tmp_path):
    changed = {"rounds": 9, "novel-rounds": 33, "report-generalization-bound": True}
    experiment = {"methods": ["fedavg"], **changed, "search": {"lr": [0.1, 0.3]}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(experiment))
    fedapps("tune", tmp_path / "mine.toml", "--output", tmp_path / "tuning")
    asked = read_experiment(str(tmp_path / "tuning" / "best.toml"))
    assert (asked.methods, asked.settings) == ("fedavg lr=0.1", changed)


@pytest.mark.parametrize("searched", ["lr", "my_nets:net.hidden"])
def test_keywords_of_a_model_of_ones_own(searched, lab, tmp_path, monkeypatch):
    """They are searched as other settings are, and kept as others are."""
    code = "from torch import nn\n\n\ndef net(shape, num_classes, *, hidden=16) -> nn.Module:\n"
    code += "    raise NotImplementedError\n"
    (tmp_path / "my_nets.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = {"methods": ["fedavg"], "lr": 0.1, "model": "my_nets:net"}
    values = {"lr": [0.1, 0.3], "my_nets:net.hidden": [4, 8]}[searched]
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(experiment | {"search": {searched: values}}))
    fedapps("tune", tmp_path / "mine.toml", "--output", tmp_path / "tuning")
    assert len({row["settings"] for row in trials(tmp_path / "tuning")}) == 2
    asked = read_experiment(str(tmp_path / "tuning" / "best.toml"))
    tuned = Variant.parse(asked.methods).apply(defaults() | asked.settings)
    assert (tuned["model"], tuned["lr"]) == ("my_nets:net", 0.1)
    assert tuned["my_nets:net.hidden"] in ([16] if searched == "lr" else values)


def test_seeds_among_the_settings(lab, rates, tmp_path):
    command = ["tune", rates, "--output", tmp_path / "tuning"]
    fedapps(*command, "seeds=3,4")
    assert read_experiment(str(tmp_path / "tuning" / "best.toml")).seeds == "3,4"
    assert {name.rpartition("-")[2] for name in lab.ran} == {"seed3", "seed4"}
    printed = fedapps(*command, "--seeds", "0", "seeds=3", code=2)
    assert "--seeds is '0', but seeds=3 is given as well; remove one" in printed


@pytest.mark.parametrize(
    ("methods", "option", "words"),
    [
        ("fedavg", "", "search of tent.adapt-steps: tent.adapt-steps is swept, but no such method"),
        ("fedavg,tent", "fedavg", "[search] has no key of fedavg: nothing to tune"),
    ],
)
def test_a_search_for_other_methods_is_refused(methods, option, words, lab, tmp_path):
    text = f"methods = {methods.split(',')}\n[search.tent]\nadapt-steps = [1, 5]\n"
    (tmp_path / "mine.toml").write_text(text)
    command = ["tune", tmp_path / "mine.toml", "--output", tmp_path / "tuning"]
    assert words in fedapps(*command, "--methods", option, code=2)
    assert not lab.ran and not (tmp_path / "tuning").exists()


def test_an_output_folder_of_any_name_holds_the_study(lab, rates, tmp_path):
    name = "q?x=1 {50} 50%25"
    output = tmp_path / name / "tuning"
    command = ["tune", rates, "--output", output]
    fedapps(*command)
    assert (output / "study.db").is_file()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["mine.toml", name])
    ran = list(lab.ran)
    fedapps(*command)
    assert lab.ran == ran


def test_an_experiment_of_others_is_refused(tmp_path):
    said = fedapps("tune", "unseen/digits", "--output", tmp_path / "out", code=2)
    assert "unseen/digits includes others; tune one of them: unseen/iid, unseen/step" in said


@pytest.mark.parametrize("kept", [0, 20_000])
def test_a_damaged_study_is_named(kept, lab, rates, tmp_path):
    """Without it the same command repeats no finished run."""
    output, file = tmp_path / "tuning", tmp_path / "tuning" / "study.db"
    command = ["tune", rates, "--output", output]
    fedapps(*command)
    before, ran = trials(output), list(lab.ran)
    file.write_bytes(file.read_bytes()[:kept] + b"lost" * 999)
    printed = fedapps(*command, code=2)
    assert f"{file} is damaged" in printed and "delete it and repeat" in printed
    file.unlink()
    fedapps(*command)
    assert (trials(output), lab.ran) == (before, ran)


def test_the_help_names_the_search_table():
    assert "An experiment with a [search] table." in fedapps("tune", "--help")


def test_a_method_whose_trials_fail_has_no_best():
    got = [
        Outcome("a", 1, "a lr=1", 0.5), Outcome("a", 2, "a lr=2", 0.75),
        Outcome("a", 3, "a lr=3", 0.75), Outcome("b", 1, "b", None),
    ]  # fmt: skip
    assert best(got) == {"a": got[1]}
    dots = [line for line in history(got).axes[0].lines if line.get_linestyle() == "None"]
    assert dots[0].get_ydata().tolist() == [50, 75, 75]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("", ["no [search] table"]),
        ("lr = 0.1", ["lr is 0.1", "a list or {low, high, log}"]),
        ("lr = []", ["lr is []"]),
        ('lr = ["fast"]', ["lr is 'fast'", "a number"]),
        ("rate = [1]", ["unknown key 'rate'"]),
        (
            'selection-metric = ["accuracy", "loss"]',
            ["search of selection-metric", "set it for all trials"],
        ),
        (
            'average-over = ["clients", "samples"]',
            ["search of average-over", "set it for all trials"],
        ),
        ('client-models = ["small,big"]', ["client-models='small,big' cannot name a folder"]),
        ("lr = { low = 0.1 }", ["lr is {'low': 0.1}"]),
        ("lr = { low = 0.3, high = 0.1 }", ["search of lr", "(low=0.3, high=0.1)"]),
        ("lr = { low = 0.0, high = 0.1, log = true }", ["search of lr", "`low > 0` must hold"]),
    ],
)
def test_a_bad_search_is_refused(table, words):
    with pytest.raises(ValueError) as error:
        read_search(tomllib.loads(table), defaults(), ["fedavg"])
    assert all(word in str(error.value) for word in words)


def test_the_best_settings_list_a_common_key_once(tmp_path):
    """A common key changes all methods' sections; best.toml has it alone, and gives them back."""
    config = override(defaults(), {"lr": 0.1, "pfedme.lr": 0.2})
    outcomes = [Outcome("pfedhn", 1, "pfedhn momentum=0.5", 0.5)]
    write_results(outcomes, config, [0], tmp_path)
    best_toml = read_experiment(str(tmp_path / "best.toml"))
    assert best_toml.settings == {"lr": 0.1, "pfedme.lr": 0.2}
    assert override(defaults(), best_toml.settings) == config


def test_what_a_label_sets_is_not_searched(tmp_path):
    search = {"lr": [0.1, 0.2], "momentum": [0.0, 0.5], "fedprox.momentum": [0.9]}
    tuning = Tuning(defaults(), [0], search, tmp_path, 1, lambda jobs: None)
    assert list(tuning._space("fedavg")) == ["lr", "momentum"]
    assert list(tuning._space("fedavg lr=0.3")) == ["momentum"]
    assert list(tuning._space("fedavg lr=0.3 momentum=0.1")) == []
