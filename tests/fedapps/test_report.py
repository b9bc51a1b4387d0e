"""The HTML report: its table and figures show what the runs' files say."""

import json

import pytest
import tomli_w
from typer.testing import CliRunner

from fedapps.commands.main import cli
from fedapps.results.report import NAME, run_data, write_report
from fedapps.results.runs import read_runs
from fedapps.results.table import results
from fedapps.settings.config import defaults

COUNTS = {"megabytes_per_client_round": {"down": 1.0, "up": 2.0}, "seconds": 3.0, "rounds": 2}


def leave(folder, method, seed, *accuracies, error="", **settings):
    """Write what a run leaves; accuracies of training clients, evaluated every round."""
    config = defaults() | {"method": method, "seed": seed, "lr": 0.125, "versions": {"flwr": "9.9"}}
    config |= settings
    run = folder / f"{'run' if '<' in method else method}-seed{seed}"
    run.mkdir()
    (run / "config.toml").write_text(tomli_w.dumps(config))
    summary = {"error": error} if error else COUNTS | {
        "train": {"accuracy": max(accuracies), "clients": 2},
        "novel": None,
        "per_client": {
            "0": {"role": "train", "accuracy": 0.5, "examples": 3},
            "1": {"role": "novel", "accuracy": None, "examples": 3},
        },
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    rounds = [
        {"round": n, "evaluation": {"train-accuracy": a}} for n, a in enumerate(accuracies, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    return rounds


def numbers(page):
    """What the page's script draws."""
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_a_page_of_its_own(tmp_path):
    leave(tmp_path, "fedavg", 0, 0.25, 0.5)
    leave(tmp_path, "fedavg", 1, 0.5, 0.75)
    leave(tmp_path, "tent", 0, error="ValueError: 1 < 2 </script>")
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    assert "<td>fedavg</td><td>62.50 ± 17.68</td>" in page  # 50 and 75: deviation 25/√2
    assert "tent-seed0 failed: ValueError: 1 &lt; 2 &lt;/script&gt;" in page
    assert "<td>lr</td><td>0.125</td>" in page
    assert "<td>rounds</td>" not in page  # as by default
    assert "flwr 9.9" in page
    bare = page.replace("http://www.w3.org/2000/svg", "")  # a name, nothing that is fetched
    assert not any(word in bare for word in ("<link", "<img", " src=", "http:", "https:", "{{"))


def test_the_page_draws_what_the_runs_left(tmp_path):
    leave(tmp_path, "fedavg", 0, 0.25, 0.5)
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    (run,) = numbers(page)["runs"]
    assert run["evaluations"] == [[1, 0.25, None], [2, 0.5, None]]
    assert run["clients"] == [["0", "train", 0.5, 3, None], ["1", "novel", None, 3, None]]
    assert run["megabytes"] == {"down": 1.0, "up": 2.0}


def test_names_cannot_break_out_of_the_page(tmp_path):
    """A label is free text: {{data}} and the end of a script are no more than that."""
    leave(tmp_path, "tent model=</script><b>{{data}}", 0, 0.5)
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    assert "<b>" not in page
    assert page.count('"evaluations"') == 1
    assert numbers(page)["runs"][0]["evaluations"] == [[1, 0.5, None]]


def test_a_page_stays_small(tmp_path, monkeypatch):
    """300 rounds and two clients a run: the rounds go first, then clients of the later seed."""
    for seed in (0, 1):
        leave(tmp_path, "fedavg", seed, *([0.25] * 300))
    jobs = read_runs(tmp_path)[0]
    page = write_report(jobs, tmp_path).read_text("utf-8")
    whole = len(page.encode())
    drawn = []
    for limit in (whole, whole - 100, whole - 2 * 200 * 12, 1):
        monkeypatch.setattr("fedapps.results.report.LIMIT", limit)
        page = write_report(jobs, tmp_path).read_text("utf-8")
        runs = numbers(page)["runs"]
        drawn.append([(len(run["evaluations"]), len(run["clients"])) for run in runs])
        assert ("so that the page stays small" in page) == (limit < whole)
    assert drawn[0] == [(300, 2), (300, 2)]
    assert drawn[1] == [(100, 2), (100, 2)]
    assert drawn[-1] == [(100, 0), (100, 0)]


def test_columns_that_tell_nothing_are_not_shown(tmp_path):
    """Users without validation samples, none of them novel: F1 alone, 0.5 and 0.7 over seeds, and
    over users 0.25 more."""
    for seed, f1 in enumerate((0.5, 0.7)):
        leave(tmp_path, "global", seed, 0.0, **{"train-fraction": 1.0})
        file = tmp_path / f"global-seed{seed}" / "summary.json"
        train = {"accuracy": None, "clients": 0, "f1": f1, "f1_users": f1 + 0.25}
        train |= {"f1_0": f1 - 0.25, "f1_1": f1 + 0.25}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"train": train}))
    shown = results(read_runs(tmp_path)[0])
    assert shown.columns == ["method", "F1", "F1, users", "rounds", "seconds", "MB down", "MB up"]
    f1, users = "0.600 ± 0.141", "0.850 ± 0.141"
    assert shown.rows == [["global", f1, users, "2", "3", "1.000", "2.000"]]
    assert shown.title.endswith("clients: last round")
    assert "novel" not in shown.caption
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    told = [run["f1"] for run in numbers(page)["runs"]]
    assert told == [{"0": 0.25, "1": 0.75}, {"0": pytest.approx(0.45), "1": pytest.approx(0.95)}]


def test_the_command_writes_it(tmp_path):
    small = ["num-clients=6", "rounds=1", "local-steps=1", "--engine", "in-process"]
    said = CliRunner().invoke(cli, ["run", *small, "--methods", "local", "--output", str(tmp_path)])
    assert said.exit_code == 0, said.output
    first = (tmp_path / NAME).read_text("utf-8")
    (tmp_path / NAME).unlink()
    assert CliRunner().invoke(cli, ["report", str(tmp_path)]).exit_code == 0
    table = first[: first.index("</table>")]
    assert (tmp_path / NAME).read_text("utf-8").startswith(table)


def test_a_folder_without_runs_is_refused(tmp_path):
    said = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert said.exit_code == 2
    assert "holds no runs" in " ".join(said.output.split())


def test_what_a_page_tells_of_a_runs_rounds_and_clients(tmp_path):
    """Replies dropped in sum, seconds of a phase as the mean over all rounds, also over those that
    had none: 3/7 and 6/7 of seven. Of 7 evaluations at most 3 are drawn: every third one."""
    leave(tmp_path, "fedavg", 0, *[n / 8 for n in range(7)])
    file = tmp_path / "fedavg-seed0" / "metrics.jsonl"
    told = [
        {"dropped": {"error": 2, "names": 1}, "phases": {"send": 2.0, "clients": 6.0}},
        {"dropped": {"error": 3}, "phases": {"send": 1.0}},
        {"evaluation": {"train-f1": 0.5, "novel-accuracy": 0.1234567}},
    ]
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    rounds = [one | more for one, more in zip(rounds, told + 4 * [{}], strict=True)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rounds))
    summary = json.loads((file.parent / "summary.json").read_text())
    last = {"per_client": {"0": {"role": "train", "accuracy": 0.75, "examples": 3}}}
    (file.parent / "summary.json").write_text(json.dumps(summary | {"last": last}))
    (job,) = read_runs(tmp_path)[0]
    found = run_data(job, 3, True)
    assert found["dropped"] == {"error": 5, "names": 1}
    assert found["phases"] == pytest.approx({"send": 3 / 7, "clients": 6 / 7})
    assert [one[0] for one in found["evaluations"]] == [1, 4, 7]
    assert run_data(job, 7, False)["evaluations"][2] == [3, 0.5, 0.12346]
    assert [one[4] for one in found["clients"]] == [0.75, None]
    assert run_data(job, 3, False)["clients"] == []
