"""Names, errors and settings come from files and clients: wherever they are shown they are text."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner

from fedapps.commands.main import cli
from fedapps.engines.jobs import Job
from fedapps.results.comparison import Comparison, Line, as_csv
from fedapps.results.formats import as_latex, as_markdown
from fedapps.results.report import write_report
from fedapps.results.runs import read_runs
from fedapps.results.table import Display, Results, rich_table
from fedapps.settings.config import defaults

MARKUP = {
    "script": "<script>hit()</script>",
    "end": "</script><b>",
    "image": '"><img src=x onerror=hit()>',
    "quote": "' onclick='hit()",
    "hole": "{{data}}",
    "rich": "[/red][link=x]",
    "entity": "&lt;b&gt;",
    "terminal": "\x1b[31mred\a",
}
RUN = {
    "novel": None,
    "rounds": 1,
    "seconds": 1.0,
    "megabytes_per_client_round": {"down": 1.0, "up": 2.0},
}


def leave(folder, mark):
    """A run, and a failed one, whose files hold `mark` wherever a text may stand."""
    config = defaults() | {"dataset": f"dataset {mark}", "partition": f"partition {mark}"}
    config |= {"method": f"fedavg {mark}", "model": f"model {mark}", f"key {mark}": "value"}
    config["versions"] = {f"library {mark}": f"version {mark}"}
    one = {"role": "train", "accuracy": 0.5, "examples": 3}
    summary = RUN | {"train": {"accuracy": 0.5, f"f1_{mark}": 0.5}, "per_client": {mark: one}}
    summary["privacy"] = {"epsilon": 1.0, "delta": 0.1, "generator": mark, "terms": f"terms {mark}"}
    rounds = {"round": 1, "evaluation": {"train-accuracy": 0.5}}
    rounds |= {"dropped": {f"cause {mark}": 2}, "phases": {f"phase {mark}": 1.0}}
    for name, told in (("good", summary), ("bad", {"error": f"ValueError: {mark}"})):
        (folder / name).mkdir()
        (folder / name / "config.toml").write_text(tomli_w.dumps(config))
        (folder / name / "summary.json").write_text(json.dumps(told))
        (folder / name / "metrics.jsonl").write_text(json.dumps(rounds) + "\n")
    return write_report(*reversed_problems(folder, mark))


def reversed_problems(folder, mark):
    jobs, problems = read_runs(folder)
    return jobs, folder, [*problems, f"problem {mark}"]


class Page(HTMLParser):
    """A page's elements with their attributes' names, its text, and what it gives its script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.data, self._inside = [], "", "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *sorted(name for name, _ in attrs)))
        self._inside = "data" if dict(attrs).get("id") == "data" else tag

    def handle_endtag(self, tag):
        self.tags.append(("/" + tag,))
        self._inside = ""

    def handle_data(self, text):
        if self._inside == "data":
            self.data += text
        elif self._inside not in ("script", "style"):
            self.text += text


@pytest.mark.parametrize("name", MARKUP)
def test_markup_is_text_in_the_report(tmp_path, name):
    """The page has the same elements as with harmless names, and shows all of the others."""
    mark = MARKUP[name]
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    plain.mkdir()
    odd.mkdir()
    harmless = Page(leave(plain, "x").read_text("utf-8"))
    found = Page(leave(odd, mark).read_text("utf-8"))
    assert found.tags == harmless.tags
    for place in ("dataset", "partition", "fedavg", "model", "key", "problem", "terms"):
        assert f"{place} {mark}" in found.text, place
    assert f"library {mark} version {mark}" in found.text
    assert f"failed: ValueError: {mark}" in found.text
    (run,) = [run for run in json.loads(found.data)["runs"] if run["clients"]]
    assert run["clients"][0][0] == mark
    assert run["dropped"] == {f"cause {mark}": 2}
    assert run["phases"] == {f"phase {mark}": 1.0}


def shown(mark):
    return Results(f"title {mark}", ["method", mark], [[mark, "1"], [mark, "2"]], f"caption {mark}")


@pytest.mark.parametrize("name", MARKUP)
def test_markup_is_text_in_a_terminal(tmp_path, name):
    """Also where the console would take markup; what a terminal obeys is told by its name."""
    mark = MARKUP[name]
    told = mark.replace("\x1b", "\\x1b").replace("\a", "\\x07")
    for markup in (True, False):
        console = Console(file=io.StringIO(), width=200, markup=markup)
        console.print(rich_table(shown(mark)))
        job = Job("fedavg", 0, defaults(), tmp_path)
        line = json.dumps({"round": 1, "dropped": {"[/red]": 1}})
        (tmp_path / "metrics.jsonl").write_text(line + "\n")
        with Display([job], console) as display:
            display.follow([job])
        text = console.file.getvalue()
        assert text.count(told) == 5
        assert "{'[/red]': 1}" in text
    leave(tmp_path, mark)
    done = CliRunner().invoke(cli, ["table", str(tmp_path)], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert f"ValueError: {told}" in done.stderr
    assert "\x1b" not in done.output


def test_every_console_of_the_package_knows_no_markup():
    from test_architecture import ROOT

    for file in (ROOT / "fedapps").rglob("*.py"):
        made = re.findall(r"\bConsole\(", file.read_text("utf-8"))
        assert len(made) == (file.name == "console.py"), file


def test_markup_is_text_in_latex():
    r"""By hand: \ { } & % $ # _ ~ ^ are signs of TeX, and [ is one after \\."""
    results = Results("a_b", ["method"], [["[2em] \\input{x}"], ["50% & $x$ #1 ~^"]], "c")
    text = as_latex(results)
    assert r"{[}2em{]} \textbackslash{}input\{x\} \\" in text
    assert r"50\% \& \$x\$ \#1 \textasciitilde{}\textasciicircum{} \\" in text
    assert r"\caption{a\_b. c.}" in text


def test_markup_is_text_in_markdown():
    results = Results("*a*", ["method"], [["<b>|`x`|[y](z)\n| c"]], "_c_")
    title, _, head, rule, row, _, caption, _ = as_markdown(results).split("\n")
    assert (title, head, rule, caption) == (r"**\*a\***", "| method |", "| --- |", r"*\_c\_*")
    assert row == r"| \<b\>\|\`x\`\|\[y\](z)\\n\| c |"


def test_names_are_text_in_csv():
    """Quoted where CSV needs it, and no formula to a spreadsheet; numbers stay numbers."""
    names = ["=1+2", "@x", "-x", "-0.5", "+1e-3", 'a,"b"\n', "[/red]"]
    lines = [Line("train", (name,), [], {"": 1.0}) for name in names]
    found = as_csv(Comparison(lines, [], ["method"], "", "", None, "best"))
    rows = [row[1] for row in csv.reader(io.StringIO(found))][1:]
    assert rows == ["'=1+2", "'@x", "'-x", "-0.5", "+1e-3", 'a,"b"\n', "[/red]"]


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("summary.json", ("train",), [1]),
        ("summary.json", ("train", "accuracy"), "much"),
        ("summary.json", ("per_client",), {"0": "good"}),
        ("summary.json", ("per_client", "0", "role"), "king"),
        ("summary.json", ("rounds",), None),
        ("summary.json", ("seconds",), True),
        ("config.toml", ("method",), ["fedavg"]),
        ("config.toml", ("seed",), "x"),
        ("config.toml", ("versions",), "1.0"),
        ("metrics.jsonl", ("round",), "one"),
        ("metrics.jsonl", ("dropped",), 3),
        ("metrics.jsonl", ("phases", "send"), "long"),
        ("metrics.jsonl", ("evaluation", "train-accuracy"), {"a": 1}),
    ],
)
def test_values_of_another_kind_are_no_run_of_ours(tmp_path, file, place, value):
    """The rest is shown, and why that one is not; of metrics the lines before."""
    one = {"role": "train", "accuracy": 0.5, "examples": 3}
    rounds = {"round": 1, "dropped": {}, "phases": {"send": 1.0}}
    content = {
        "config.toml": defaults() | {"versions": {}},
        "summary.json": RUN | {"train": {"accuracy": 0.5}, "per_client": {"0": one}},
        "metrics.jsonl": rounds | {"evaluation": {"train-accuracy": 0.5}},
    }
    for run in ("mine", "theirs"):
        (tmp_path / run).mkdir()
        if run == "theirs":
            inner = content[file]
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
        for name, told in content.items():
            text = tomli_w.dumps(told) if name == "config.toml" else json.dumps(told) + "\n"
            (tmp_path / run / name).write_text(text)
    jobs, problems = read_runs(tmp_path)
    assert [job.folder.name for job in jobs] == ["mine"] + ["theirs"] * (file == "metrics.jsonl")
    assert any(told.startswith("theirs: ") for told in problems)
    write_report(jobs, tmp_path, problems)


LONG, LONGER, DEEP = "9" * 400, "9" * 5000, "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("file", "place", "text"),
    [
        ("config.toml", "seed = 1", f"seed = {LONGER}"),
        ("config.toml", "seed = 1", f"seed = {DEEP}"),
        *[("summary.json", "0.625", text) for text in (LONG, LONGER, DEEP)],
        *[("metrics.jsonl", "0.625", text) for text in (LONG, LONGER, DEEP)],
    ],
    ids=lambda value: f"{value[:12]}-{len(value)}",
)
def test_what_no_parser_or_float_holds_is_damage(tmp_path, file, place, text):
    """Numbers of 400 and 5000 digits, and deep nesting, where 0.625 or the seed stood: the rest is
    shown, and of metrics the round before."""
    content = {
        "summary.json": json.dumps(RUN | {"rounds": 2, "train": {"accuracy": 0.625}}),
        "metrics.jsonl": '{"round": 1}\n{"round": 2, "phases": {"send": 0.625}}\n',
    }
    for seed, run in enumerate(("mine", "theirs")):
        content["config.toml"] = tomli_w.dumps(defaults() | {"seed": seed, "versions": {}})
        (tmp_path / run).mkdir()
        for name, told in content.items():
            changed = told.replace(place, text) if (run, name) == ("theirs", file) else told
            (tmp_path / run / name).write_text(changed)
    jobs, (problem,) = read_runs(tmp_path)
    kept = file == "metrics.jsonl"
    assert [job.folder.name for job in jobs] == ["mine"] + ["theirs"] * kept
    assert problem.startswith("theirs: " + ("metrics.jsonl is damaged" if kept else "damaged: "))
    assert not kept or "1 of 2 rounds" in problem
    write_report(jobs, tmp_path, [problem])
