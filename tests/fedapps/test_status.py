"""What `fedapps status` says of runs and of a deployment."""

import json

import pytest
from small_runs import SMALL, invoke

from fedapps.files import locked, write_configuration
from fedapps.planning import make_jobs
from fedapps.results.status import status_lines
from fedapps.serverapp import run_in_process
from fedapps.service import NOTED_RUNS
from fedapps.service.deploy import SUPERLINK, plan


def output(*words, code=0):
    return invoke(*words, code=code).output


def begun(folder, **changes):
    """A job whose folder holds its configuration alone."""
    settings = {key.replace("_", "-"): value for key, value in changes.items()}
    job = make_jobs(SMALL | settings, ["fedavg"], [0], folder)[0]
    job.folder.mkdir(parents=True)
    write_configuration(job.folder, job.config)
    return job


def report(job, **values):
    """Append a round to the job's metrics."""
    line = {key.replace("_", "-"): value for key, value in values.items()}
    with (job.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_run_that_goes_on(tmp_path):
    """Rounds of 2 and 4 s: 3 s on average, and 58 rounds are left. Late replies are those that are
    missing; others count by cause."""
    job = begun(tmp_path, rounds=60)
    scores = {"train-accuracy": 0.5, "novel-accuracy": 0.25}
    report(job, round=1, present=6, sampled=4, valid=2, seconds=2.0, evaluation=scores,
           dropped={"missing": 1, "error": 1}, evaluation_dropped={"shape": 1})  # fmt: skip
    report(job, round=2, present=5, sampled=4, valid=3, seconds=4.0, dropped={"missing": 1})
    with locked(job.folder):
        lines, goes_on = status_lines(tmp_path)
    assert goes_on
    head, *rest = lines
    assert head.startswith(
        "fedavg-seed0: running, round 2 of 60, 3 s a round, about 0:02:54 left, last round 0:00:"
    )
    assert rest == [
        "  clients: 3 of 4 answered, 5 present, late 2, dropped: error 1, shape 1",
        "  round 1: training 50.0 %, novel 25.0 %",
    ]
    lines, goes_on = status_lines(job.folder)
    assert (lines[0], goes_on) == ("fedavg-seed0: stopped, round 2 of 60, 3 s a round", False)


def test_late_replies_that_a_later_round_used(tmp_path):
    """Two and one are late, two of them are used later."""
    job = begun(tmp_path)
    report(job, round=1, sampled=4, valid=2, late=2, late_used=0)
    report(job, round=2, sampled=4, valid=3, late=1, late_used=2)
    assert status_lines(tmp_path)[0][1] == (
        "  clients: 3 of 4 answered, late 3 (2 used), dropped: none"
    )


def test_private_rounds_show_epsilon_alone(tmp_path):
    job = begun(tmp_path)
    report(job, round=1, evaluation={"train-accuracy": 0.5}, dp_epsilon=1.25)
    assert status_lines(tmp_path)[0] == [
        "fedavg-seed0: stopped, round 1 of 2",
        "  round 1: training 50.0 %",
        "  privacy: ε 1.25 spent",
    ]


def test_runs_that_wait_failed_and_have_finished(tmp_path):
    config = SMALL | {"num-clients": 4}
    active, waiting, failed = (begun(tmp_path / name) for name in ("a", "b", "c"))
    for job in (active, waiting, failed):
        job.folder.rename(tmp_path / f"{job.folder.parent.name}-seed0")
    (tmp_path / "c-seed0" / "summary.json").write_text('{"error": "OSError: full\\u001b[31m"}')
    done = make_jobs(config, ["fedper"], [0], tmp_path)[0]
    run_in_process(done.config)
    with locked(tmp_path / "a-seed0"):
        lines = status_lines(tmp_path)[0]
    assert "a-seed0: running, round 0 of 2" in lines
    assert "b-seed0: waits, round 0 of 2" in lines
    assert r"c-seed0: failed, round 0 of 2, OSError: full\x1b[31m" in lines
    assert any(line.startswith("fedper-seed0: finished, round 2 of 2, ") for line in lines)
    assert "  clients: 2 of 2 answered, 4 present, late 0, dropped: none" in lines


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path):
    for name, file, text in (
        ("b", "summary.json", '{"method": "fed'),
        ("c", "config.toml", "method ="),
        ("d", "metrics.jsonl", ""),
    ):
        job = begun(tmp_path / name)
        (job.folder / file).write_text(text)
        job.folder.rename(tmp_path / f"{name}-seed0")
    lines, goes_on = status_lines(tmp_path)
    damaged = tmp_path / "b-seed0" / "summary.json"
    assert lines[0].startswith(f"b-seed0: damaged, round 0 of 2, {damaged} is damaged: ")
    assert lines[1] == "d-seed0: stopped, round 0 of 2"
    file = tmp_path / "c-seed0" / "config.toml"
    assert lines[2].startswith(f"c-seed0: {file} is damaged: ")
    assert len(lines) == 3 and not goes_on


def test_a_deployment_names_its_processes_its_runs_and_its_logs(tmp_path, monkeypatch):
    """The runs that its SuperLink's processes carry note their folders; logs are printed with
    escape codes escaped."""
    deployment = plan(tmp_path / "fed", 2, tls=False, host="127.0.0.1", data=None)
    deployment.write()
    script = (tmp_path / "fed" / f"start-{SUPERLINK}.sh").read_text()
    assert f"export FEDAPPS_DEPLOYMENT={deployment.folder}\n" in script
    monkeypatch.setenv("FEDAPPS_DEPLOYMENT", str(deployment.folder))
    for folder in ("first", "second", "first"):
        job = make_jobs(SMALL | {"num-clients": 4}, ["local"], [0], tmp_path / folder)[0]
        run_in_process(job.config)
    assert (deployment.folder / NOTED_RUNS).read_text().count("\n") == 3
    said = output("status", tmp_path / "fed")
    assert "superlink: down" in said and "node-1: down" in said
    assert said.count("local-seed0: finished, round 2 of 2") == 2  # each folder once

    said = output("deploy", tmp_path / "fed", "--logs", "node-1", code=2)
    assert "node-1 was not started by --start on this machine" in " ".join(said.split())
    log = tmp_path / "fed" / "log" / "node-1.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {i}\n" for i in range(200)) + "\x1b[31mred\n")
    said = output("deploy", tmp_path / "fed", "--logs", "node-1")
    assert said.splitlines() == [*(f"line {i}" for i in range(101, 200)), r"\x1b[31mred"]
    assert "unknown node-9" in output("deploy", tmp_path / "fed", "--logs", "node-9", code=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--watch", "--every", "0"], "--every is 0"), ([], "holds no run")],
)
def test_what_is_not_understood_is_refused(tmp_path, words, reason):
    assert reason in output("status", tmp_path, *words, code=2)


def test_rounds_count_up_to_the_first_damaged_line(tmp_path):
    job = begun(tmp_path)
    report(job, round=1, sampled=2, valid=2)
    report(job, round=2, sampled=2, dropped=["missing"], seconds="long")
    assert "2 of 2 answered" in output("status", tmp_path)


def test_watching_ends_with_the_last_run(tmp_path):
    """A stopped run goes on nowhere: --watch looks once."""
    begun(tmp_path)
    assert output("status", tmp_path, "--watch").count("stopped, round 0 of 2") == 1


def test_code_that_a_run_names_is_not_needed(tmp_path):
    """A run of a method from outside hides no other run, and nothing of it is imported."""
    first = begun(tmp_path, rounds=2)
    folder = tmp_path / "not_there:METHOD-seed0"
    folder.mkdir()
    write_configuration(folder, first.config | {"method": "not_there:METHOD"})
    assert status_lines(tmp_path)[0] == [
        "fedavg-seed0: stopped, round 0 of 2",
        "not_there:METHOD-seed0: stopped, round 0 of 2",
    ]
