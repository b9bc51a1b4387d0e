"""The table at a run's end by hand: means over seeds, what ± is of, the worst ε, the bound."""

import io
import json
import re

import pytest
from pydantic import ValidationError
from rich.console import Console
from run_folders import leave

from fedapps.engines.jobs import Job
from fedapps.results.formats import TextTable, as_rich
from fedapps.results.progress import Display
from fedapps.results.report import content
from fedapps.results.runs import read_runs, runs_of
from fedapps.results.schema import Summary
from fedapps.results.table import results
from fedapps.settings.config import defaults


def job(folder, seed, method="fedavg", *, train, novel, scale=1, **summary):
    """A finished run of these groups, that took 3 s and 1 and 2 MB, each times `scale`."""
    one = Job(
        method, seed, defaults() | {"method": method}, folder / f"{method}-seed{seed}", done=True
    )
    one.folder.mkdir()
    megabytes = {"down": 1.0 * scale, "up": 2.0 * scale}
    got = {"train": train, "novel": novel, "rounds": 2, "seconds": 3.0 * scale}
    got |= {"megabytes_per_client_round": megabytes, **summary}
    (one.folder / "summary.json").write_text(json.dumps(got))
    return one


def private(epsilon, generator):
    terms = {"delta": 1e-5, "terms": "of a user"}
    return {"privacy": {"epsilon": epsilon, "generator": generator, **terms}}


def test_two_seeds_by_hand(tmp_path):
    """50 and 70, 20 and 50: deviations 20/√2 and 30/√2. êrr (0.125 + 0.375)/2, ½ d̂ (0.5 + 0.25)/2
    and their sum; the larger ε; one of them holds for nobody who knows the seed; 3 and 9 s."""
    first = {"accuracy": 0.2, "sem": 0.05, "half_distance": 0.5}
    second = {"accuracy": 0.5, "sem": 0.05, "half_distance": 0.25}
    jobs = [
        job(tmp_path, 0, train={"accuracy": 0.5, "training_error": 0.125}, novel=first,
            **private(2.5, "seeded")),
        job(tmp_path, 1, train={"accuracy": 0.7, "training_error": 0.375}, novel=second, scale=3,
            **private(1.5, "system")),
    ]  # fmt: skip
    shown = results(runs_of(jobs))
    assert dict(zip(shown.columns, shown.rows[0], strict=True)) == {
        "method": "fedavg",
        "training clients": "60.00 ± 14.14",
        "novel clients": "35.00 ± 21.21",
        "ε": "2.50 (1e-05) TEST",
        "êrr": "0.250",
        "½ d̂": "0.375",
        "êrr + ½ d̂": "0.625",
        "rounds": "2",
        "seconds": "6",
        "MB down": "2.000",
        "MB up": "4.000",
    }
    assert "± standard deviation over seeds" in shown.caption
    assert "± standard error" not in shown.caption


def test_one_seed_has_the_standard_error_over_its_novel_clients(tmp_path):
    """A method that cannot serve novel clients without labels says so."""
    novel = {"accuracy": 0.25, "sem": 0.0625}
    jobs = [
        job(tmp_path, 0, train={"accuracy": 0.5}, novel=novel),
        job(tmp_path, 0, "lg-fedavg", train={"accuracy": 0.75}, novel=None),
    ]
    shown = results(runs_of(jobs))
    assert [row[:3] for row in shown.rows] == [
        ["fedavg", "50.00", "25.00 ± 6.25"],
        ["lg-fedavg", "75.00", "cannot without labels"],
    ]
    assert "± standard error over clients" in shown.caption
    assert "± standard deviation" not in shown.caption


def test_replies_that_were_dropped_are_told_by_method(tmp_path):
    """Of both seeds together. A method that lost none, or whose number is secret, is not named."""
    got = {"train": {"accuracy": 0.5}, "novel": {"accuracy": 0.5, "sem": 0.1}}
    jobs = [
        job(tmp_path, 0, **got, dropped_replies=3),
        job(tmp_path, 1, **got, dropped_replies=4),
        job(tmp_path, 0, "tent", **got, dropped_replies=0),
        job(tmp_path, 0, "ditto", **got, dropped_replies=None),
        job(tmp_path, 0, "local", **got, dropped_replies=5),
    ]
    assert "training replies dropped: fedavg 7, local 5;" in results(runs_of(jobs)).caption
    assert "dropped" not in results(runs_of(jobs[2:4])).caption


def test_late_replies_are_told_by_method(tmp_path):
    """Of both seeds: 3 + 1 late; 2 used at age 1 and 1 at age 4, a mean of 2; none of tent's used.
    The simulated seconds have a column."""
    got = {"train": {"accuracy": 0.5}, "novel": {"accuracy": 0.5, "sem": 0.1}}
    jobs = [
        job(tmp_path, 0, **got, late=3, late_used=2, late_dropped=0, late_age=1.0,
            simulated_seconds=30.0),
        job(tmp_path, 1, **got, late=1, late_used=1, late_dropped=0, late_age=4.0,
            simulated_seconds=50.0),
        job(tmp_path, 0, "tent", **got, late=4, late_used=0, late_dropped=3),
        job(tmp_path, 0, "local", **got),
    ]  # fmt: skip
    shown = results(runs_of(jobs))
    assert (
        "late replies: fedavg 4, 3 used at a mean age of 2.0 rounds; tent 4, 3 dropped;"
        in shown.caption
    )
    column = shown.columns.index("simulated s")
    assert [row[column] for row in shown.rows] == ["40", "–", "–"]
    assert "simulated s" not in results(runs_of(jobs[3:])).columns


def test_rounds_that_are_gone_of_all_jobs(tmp_path):
    """Of 10 each: one that ended after 3 has none left, one has done 4, one reported 12. Damaged
    lines do not count."""
    jobs = []
    for seed, (rounds, done) in enumerate(((3, True), (4, False), (12, False))):
        one = Job("fedavg", seed, defaults() | {"rounds": 10}, tmp_path / str(seed), done=done)
        one.folder.mkdir()
        lines = [json.dumps({"round": n, "seconds": 1.0}) for n in range(1, rounds + 1)]
        lines[1:1] = ['{"round": 2, "sec', "1"]
        (one.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        jobs.append(one)
    console = Console(file=io.StringIO(), width=200)
    with Display(jobs, console) as display:
        display.follow(jobs)
    (line,) = [one for one in console.file.getvalue().splitlines() if one.startswith("all")]
    assert "24/30" in line


def test_a_saved_model_of_another_round_is_told(tmp_path):
    """Of Ditto's two seeds one saves the model of round 3, where training clients have 0.5 instead
    of 0.9; the other one saves that of round 2, which training clients report: (50 + 70)/2. êrr is
    that of the saved models, (0.25 + 0.75)/2. FedAvg's rounds are one."""
    novel = {"accuracy": 0.2, "half_distance": 0.5}
    first = {"accuracy": 0.9, "training_error": 0.125}
    saved = {"accuracy": 0.5, "training_error": 0.25}
    second = {"accuracy": 0.7, "training_error": 0.75}
    apart = {"best_round": 1, "novel_round": 3, "saved_model_train": saved}
    one = {"best_round": 2, "novel_round": 2, "saved_model_train": second}
    jobs = [
        job(tmp_path, 0, "ditto", train=first, novel=novel, **apart),
        job(tmp_path, 1, "ditto", train=second, novel=novel, **one),
        job(tmp_path, 0, "fedavg", train=second, novel=novel, **one),
    ]
    shown = results(runs_of(jobs))
    ditto = dict(zip(shown.columns, shown.rows[0], strict=True))
    assert (ditto["training clients"], ditto["êrr"]) == ("80.00 ± 14.14", "0.500")
    assert "training clients at the round of the saved model: ditto 60.00;" in shown.caption
    assert "saved model" not in results(runs_of(jobs[2:])).caption
    old = job(tmp_path, 2, "ditto", train=first, novel=novel, best_round=1, novel_round=3)
    assert "saved model" not in results(runs_of([old])).caption


def test_a_summary_of_an_earlier_release_has_present_names():
    old = {
        "train": {"accuracy": 0.5, "test_accuracy": 0.25},
        "novel": None,
        "saved_model_train": {"trimmed-accuracy": 0.75},
        "last": {"train": {"accuracy": 0.1}, "novel": {"accuracy": 0.2, "sem": 0.05}},
        "megabytes_per_client_round": {"down": 1.0, "up": 2.0},
        "seconds": 3.0,
        "rounds": 2,
    }
    summary = Summary.model_validate(old)
    assert summary.evaluation == {"train-accuracy": 0.5, "train-test-accuracy": 0.25}
    assert summary.saved_model_train == {"train-trimmed-accuracy": 0.75}
    last = {"train-accuracy": 0.1, "novel-accuracy": 0.2, "novel-sem": 0.05}
    assert summary.last.evaluation == last
    with pytest.raises(ValidationError, match="no train-accuracy or train-rmse"):
        Summary.model_validate(old | {"train": {"loss": 1.0}})


def test_a_long_name_leaves_room_for_the_progress(tmp_path):
    folder = tmp_path / "heterotent,lr=0.3,adapt-steps=10-seed0"
    one = Job("fedavg", 0, defaults(), folder, done=True)
    one.folder.mkdir()
    scores = {"train-accuracy": 0.939, "novel-accuracy": 0.555}
    report = {"round": 20, "loss": 0.034, "evaluation": scores, "seconds": 1.0}
    (one.folder / "metrics.jsonl").write_text(json.dumps(report) + "\n")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display([one], console):
        pass
    last = console.file.getvalue().rpartition("heterotent")[2]
    assert all(words in last for words in ("20/30", "loss 0.034", "93.9 %", "55.5 %", "seed0"))


def test_the_last_news_are_shown_at_the_end(tmp_path):
    """Ctrl-C comes after a failure, and before anybody heard of it."""
    one = Job("fedavg", 0, defaults(), tmp_path / "fedavg-seed0")
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt), Display([one], console) as display:
        display.follow([one])
        one.error, one.done = "no client", True
        raise KeyboardInterrupt
    assert re.search("fedavg-seed0 .* failed", console.file.getvalue())


def test_the_display_ends_also_where_news_cannot_be_read(tmp_path, monkeypatch):
    """Else the terminal's cursor would stay hidden."""

    def unreadable(job):
        raise OSError("stale file handle")

    monkeypatch.setattr(Job, "news", unreadable)
    one = Job("fedavg", 0, defaults(), tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(OSError, match="stale"), Display([one], console) as display:
        display.follow([one])
    assert "\x1b[?25l" in console.file.getvalue()  # hidden, and shown again
    assert console.file.getvalue().rindex("\x1b[?25h") > console.file.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize(("examples", "noted"), [(9, True), (10, False)])
def test_few_samples_to_be_scored_on_are_noted(tmp_path, examples, noted):
    """Of novel clients that are scored; training clients may have fewer."""
    client = {"role": "novel", "accuracy": 0.5, "examples": examples}
    few = {"1": client | {"role": "train", "examples": 1}}
    few["2"] = client | {"accuracy": None, "examples": 1}
    group = {"accuracy": 0.5}
    one = job(tmp_path, 0, train=group, novel=group, per_client={"0": client, **few})
    words = f"a novel client has only {examples} samples to be scored on"
    assert (words in results(runs_of([one])).caption) == noted


def test_of_several_seeds_a_single_finished_one_has_no_error_and_rounds_are_a_range(tmp_path):
    """± is the deviation over seeds there; runs of 2 and 5 rounds show both."""
    novel = {"accuracy": 0.25, "sem": 0.0625}
    jobs = [
        job(tmp_path, 0, train={"accuracy": 0.5}, novel=novel),
        job(tmp_path, 1, train={"accuracy": 0.5}, novel=novel, rounds=5),
        job(tmp_path, 0, "tent", train={"accuracy": 0.5}, novel=novel),
    ]
    shown = results(runs_of(jobs))
    at = shown.columns.index("rounds")
    assert [(row[2], row[at]) for row in shown.rows] == [("25.00 ± 0.00", "2–5"), ("25.00", "2")]


def test_a_run_that_failed_is_no_silent_part_of_a_mean(tmp_path):
    """fedavg's mean is of seed 1 alone. All of tent's runs failed, and its cell of the first score
    says so, also where the number of rounds differs."""
    leave(tmp_path, "fedavg", 1, [0.5], train=[0.25], rounds=3)
    for method, seed, rounds in (("fedavg", 0, 3), ("tent", 0, 4), ("tent", 1, 4)):
        run = leave(tmp_path, method, seed, [1.0], rounds=rounds)
        (run / "summary.json").write_text('{"finished": false, "error": "OSError: full"}')
    shown = results(read_runs(tmp_path)[0])
    fedavg, tent = (dict(zip(shown.columns, row, strict=True)) for row in shown.rows)
    assert fedavg["training clients"] == "25.00"
    assert (tent["training clients"], tent["novel clients"], tent["rounds"]) == ("failed", "", "4")
    assert "runs that failed, left out of the means: fedavg rounds=3 1 of 2;" in shown.caption


def test_a_narrow_terminal_shows_each_column_whole():
    """Twelve numbers of ten columns need 13 each: five of them fit into 80 beside the name. The
    others follow below, with the name again, and the caption has the terminal's width."""
    columns = ["method", *(f"score-{number:02}" for number in range(12))]
    rows = [["fedavg", *(f"{number:02}.5 ± 0.25" for number in range(12))]]
    caption = "the caption is longer than two of these columns are wide"
    shown = TextTable("title", columns, rows, caption)
    console = Console(file=io.StringIO(), width=80)
    console.print(as_rich(shown))
    text = console.file.getvalue()
    for number in range(12):
        assert f"score-{number:02}" in text and f"{number:02}.5 ± 0.25" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("fedavg") == 3
    assert (text.count("title"), text.count(caption)) == (1, 1)
    wide = Console(file=io.StringIO(), width=300)
    wide.print(as_rich(shown))
    assert wide.file.getvalue().count("fedavg") == 1


@pytest.mark.parametrize("engine", ["in-process", "deployment"])
def test_data_of_real_nodes_are_not_called_by_a_partition(engine, tmp_path):
    """A node that has its data in a folder does not deal the run's."""
    one = job(tmp_path, 0, train={"accuracy": 0.5}, novel={}, engine=engine)
    runs = runs_of([one])
    dealt = "pathological" if engine == "in-process" else "deployment"
    assert results(runs).title.startswith(f"digits, {dealt}, 20 clients: ")
    setting = dict(content(runs, runs, 3)["settings"].rows)["partition"]
    own = "" if engine == "in-process" else ", for nodes without data of their own"
    assert setting == f"pathological{own}"


def test_the_title_says_of_which_round_scores_are(tmp_path):
    """Of `auto` the last one: its rule belongs to it."""
    of_best = job(tmp_path, 0, train={"accuracy": 0.5}, novel={})
    of_last = job(tmp_path, 0, "auto", train={"accuracy": 0.5}, novel={}, reports_last_round=True)
    best = "accuracy in %, at the round that is best on validation"
    assert results(runs_of([of_best])).title.endswith(f": {best}")
    assert results(runs_of([of_last])).title.endswith(": accuracy in %, at the last round")
    assert results(runs_of([of_best, of_last])).title.endswith(f": {best}, or the last one (auto)")
