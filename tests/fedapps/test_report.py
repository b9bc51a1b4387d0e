"""The HTML report shows the numbers in the runs' files, and names are text."""

import json
import re
from html.parser import HTMLParser

import pytest
import tomli_w
from run_folders import leave
from small_runs import invoke

from fedapps.results import plot
from fedapps.results.report import NAME, client_rows, content, costs, f1_by_type, write_report
from fedapps.results.runs import read_runs
from fedapps.results.table import results
from fedapps.settings.config import defaults


def changed(run, **changes):
    """Change keys of a run's summary."""
    file = run / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_page_of_its_own(tmp_path):
    leave(tmp_path, "fedavg", 0, [0.5], train=[0.5], curve=(0.25, 0.5), lr=0.125)
    leave(tmp_path, "fedavg", 1, [0.5], train=[0.75], curve=(0.5, 0.75), lr=0.125)
    changed(leave(tmp_path, "tent", 0, [0.5], lr=0.125), error="ValueError: no client")
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    assert "<td>fedavg</td><td>62.50 ± 17.68</td>" in page  # 50 and 75: deviation 25/√2
    assert "tent-seed0 failed: ValueError: no client" in page
    assert "<td>lr</td><td>0.125</td>" in page
    assert "<td>rounds</td>" not in page  # as by default
    assert "<td>1</td><td>37.50 (25.00 – 50.00)</td>" in page  # round 1
    assert "flwr 9.9" in page
    bare = re.sub(r' xmlns(:xlink)?="[^"]*"', "", page)  # names, nothing that is fetched
    assert not any(word in bare for word in ("<link", "<img", " src=", "http:", "https:", "{{"))


def test_a_page_stays_small(tmp_path, monkeypatch):
    """The rounds go first, then clients of the later seed, then all clients."""
    for seed in (0, 1):
        leave(tmp_path, "fedavg", seed, [0.5], curve=[0.25, 0.75] * 55)
    runs = read_runs(tmp_path)[0]
    monkeypatch.setattr(plot, "as_svg", lambda figure, name: name)
    whole = len(write_report(runs, tmp_path).read_bytes())
    left_out = []
    for limit in (whole, whole - 100, 1):
        monkeypatch.setattr("fedapps.results.report.LIMIT", limit)
        page = write_report(runs, tmp_path).read_text("utf-8")
        assert ("so that the page stays small" in page) == (limit < whole)
        left_out.append((len(page), "<tr data-client" in page))
    assert left_out == sorted(left_out, reverse=True)
    assert [clients for _, clients in left_out] == [True, True, False]
    assert {row[2] for row in client_rows(runs[runs.seed == 1])} == {"1"}


def test_columns_without_numbers_are_not_shown(tmp_path):
    """Users without validation samples, none of them novel: F1 alone, 0.5 and 0.7 over seeds, and
    over users 0.25 more."""
    for seed, f1 in enumerate((0.5, 0.7)):
        run = leave(tmp_path, "global", seed, [], train=[0.0], **{"train-fraction": 1.0})
        scores = {"train-accuracy": None, "train-f1": f1, "train-f1-users": f1 + 0.25}
        scores |= {"train-f1-0": f1 - 0.25, "train-f1-1": f1 + 0.25}
        changed(run, evaluation=scores)
    runs = read_runs(tmp_path)[0]
    shown = results(runs)
    assert shown.columns == ["method", "F1", "F1, users", "rounds", "seconds", "MB down", "MB up"]
    f1, users = "0.600 ± 0.141", "0.850 ± 0.141"
    assert shown.rows == [["global", f1, users, "0", "3", "1.000", "2.000"]]
    assert shown.title.endswith("clients: last round")
    assert "novel" not in shown.caption
    names, ((method, values),) = f1_by_type(runs)
    assert (names, method) == (["0", "1"], "global")
    assert values == pytest.approx([0.35, 0.85])


def test_costs_and_clients_of_a_run(tmp_path):
    """Replies dropped in sum, seconds of a phase as the mean over all rounds, also over those that
    had none: 3/7 and 6/7 of seven. Of 7 evaluations at most 3 are drawn: every third one."""
    run = leave(tmp_path, "fedavg", 0, [0.25, 0.5], train=[0.75], curve=[n / 8 for n in range(7)])
    file = run / "metrics.jsonl"
    more = [
        {
            "dropped": {"error": 2, "names": 1},
            "phases": {"send": 2.0, "clients": 6.0, "novel-client": 4.0},
        },
        {"dropped": {"error": 3}, "phases": {"send": 1.0}},
        *[{}] * 5,
    ]
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(one | other) for one, other in zip(rounds, more, strict=True)]
    file.write_text("\n".join(lines))
    last = {"per_client": {"1": {"role": "novel", "accuracy": 0.75, "examples": 3}}}
    changed(run, last=last)
    runs = read_runs(tmp_path)[0]
    (row,) = costs(runs)
    assert (row["dropped"], row["down"], row["seconds"]) == ("error 5, names 1", "1.000", 3 / 7)
    assert row["phases"] == pytest.approx({"send": 3 / 7, "clients": 6 / 7})
    assert client_rows(runs) == [
        ["0", "fedavg", "0", "train", "10", "75.00", "–", "1 of 1"],
        ["1", "fedavg", "0", "novel", "11", "25.00", "75.00", "2 of 2"],
        ["2", "fedavg", "0", "novel", "12", "50.00", "–", "1 of 2"],
    ]
    assert [cells[0] for cells in content(runs, runs, 3)["rounds"][0].rows] == list("1234567")


def test_a_private_run_hides_its_costs(tmp_path):
    run = leave(tmp_path, "fedavg", 0, [0.5], curve=(0.25, 0.5))
    hidden = {"dropped_replies": None, "per_client": {}, "seconds": None}
    changed(run, **hidden, megabytes_per_client_round={"down": None, "up": None})
    page = write_report(read_runs(tmp_path)[0], tmp_path).read_text("utf-8")
    costs_ = page[page.index('id="costs"') :]
    assert re.findall("<td>(.*?)</td>", costs_[: costs_.index("</tbody>")]) == [
        "fedavg", "–", "–", "–", "–",
    ]  # fmt: skip
    assert 'id="rounds"' in page and 'id="clients"' not in page


def test_the_command_writes_it(tmp_path):
    assert "holds no runs" in invoke("report", tmp_path, code=2).output
    small = ["num-clients=6", "rounds=1", "local-steps=1", "--engine", "in-process"]
    invoke("run", *small, "--methods", "local", "--output", tmp_path)
    first = (tmp_path / NAME).read_text("utf-8")
    (tmp_path / NAME).unlink()
    invoke("report", tmp_path)
    assert (tmp_path / NAME).read_text("utf-8").startswith(first[: first.index("</table>")])


MARK = "</script><b>\"'onclick='{{7*7}}$x$&lt;\x1b"


class Page(HTMLParser):
    """A page's elements with their attributes' names, those of its figures apart, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.drawn, self.text = [], set(), ""
        self._raw = self._svg = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._svg |= tag == "svg"
        add = self.drawn.add if self._svg else self.tags.append
        add((tag, *sorted(name for name, _ in attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._svg &= tag != "svg"
        self._raw = False

    def handle_data(self, text):
        self.text += text * (not self._raw)


def test_hostile_names_are_text(tmp_path):
    """A page has the same elements as with harmless names, and shows all of the others."""
    pages = []
    for mark in ("x", MARK):
        folder = tmp_path / str(len(pages))
        for label, more in (("good", {}), ("bad", {"error": f"ValueError: {mark}"})):
            run = leave(folder, "fedavg", 0, [0.5], curve=(0.25, 0.5))
            config = defaults() | {f"key {mark}": "value", "versions": {f"library {mark}": mark}}
            config |= {"dataset": f"dataset {mark}", "method": f"fedavg {mark}"}
            (run / "config.toml").write_text(tomli_w.dumps(config))
            client = {f"client {mark}": {"role": "train", "accuracy": 0.5, "examples": 3}}
            terms = {"epsilon": 1.0, "delta": 0.1, "generator": mark, "terms": f"terms {mark}"}
            changed(run, per_client=client, privacy=terms, **more)
            lines = {"round": 1, "evaluation": {"train-accuracy": 0.5}}
            lines |= {"dropped": {f"cause {mark}": 2}, "phases": {f"phase {mark}": 1.0}}
            (run / "metrics.jsonl").write_text(json.dumps(lines))
            run.rename(folder / label)
        runs, problems = read_runs(folder)
        page = write_report(runs, folder, [*problems, f"problem {mark}"]).read_text("utf-8")
        pages.append(Page(page))
    assert pages[1].tags == pages[0].tags and pages[1].drawn == pages[0].drawn
    shown = MARK.replace("\x1b", "\\x1b")  # no terminal reads its code
    for place in ("dataset", "fedavg", "key", "library", "client", "terms", "cause", "phase",
                  "problem", "ValueError:"):  # fmt: skip
        assert f"{place} {shown}" in pages[1].text, place


def test_settings_are_those_of_the_runs(tmp_path):
    """Data, rule and seeds whatever they are; a section only if its method ran."""
    for seed in (3, 5):
        more = {"pfedhn.lr": 0.25, "tent.adapt-steps": 7, "dataset": "digits"}
        leave(tmp_path, "tent", seed, [0.5], partition="pathological", **more)
        leave(tmp_path, "fedavg", seed, [0.5], partition="pathological", **more)
    runs = read_runs(tmp_path)[0]
    shown = dict(content(runs, runs, 3)["settings"].rows)
    assert (shown["dataset"], shown["partition"], shown["seeds"]) == (
        "digits",
        "pathological",
        "3, 5",
    )
    assert shown["partition.classes-per-client"] == str(defaults()["partition.classes-per-client"])
    assert shown["tent.adapt-steps"] == "7" and "pfedhn.lr" not in shown


def test_a_single_seed_says_so(tmp_path):
    leave(tmp_path, "fedavg", 3, [], curve=(0.5,), **{"train-fraction": 1.0})
    runs = read_runs(tmp_path)[0]
    assert "one seed (3): no deviation over seeds" in results(runs).caption
    assert content(runs, runs, 3)["bands"] == "one seed (3)"
