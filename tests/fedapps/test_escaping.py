"""Names, errors and settings come from files and clients: wherever they are shown they are text."""

import csv
import io
import json
import re
import sys

import pytest
from rich.console import Console
from run_folders import leave
from small_runs import fedapps, invoke

from fedapps.commands.main import cli
from fedapps.console import make_console, say, spreadsheet_cell
from fedapps.engines.jobs import Job
from fedapps.methods import METHODS
from fedapps.results.comparison import as_csv, compare
from fedapps.results.formats import TextTable, as_rich, displayed
from fedapps.results.progress import Display
from fedapps.results.report import write_report
from fedapps.results.runs import read_runs
from fedapps.settings.config import defaults


@pytest.mark.parametrize("mark", ["[/red][link=x]", "<b>&lt;", "\x1b[31mred\a", "' \"{{x}}"])
def test_markup_is_text_in_a_terminal(tmp_path, mark):
    """Also where the console would take markup; control characters are shown by their codes."""
    shown = mark.replace("\x1b", "\\x1b").replace("\a", "\\x07")
    table = TextTable(f"title {mark}", ["method", mark], [[mark, "1"], [mark, "2"]], f"end {mark}")
    for markup in (True, False):
        console = Console(file=io.StringIO(), width=200, markup=markup)
        console.print(as_rich(table))
        (tmp_path / "metrics.jsonl").write_text('{"round": 1, "dropped": {"[/red]": 1}}\n')
        job = Job("fedavg", 0, defaults(), tmp_path)
        with Display([job], console) as display:
            display.follow([job])
        text = console.file.getvalue()
        assert text.count(shown) == 5
        assert "[/red] 1" in text
    leave(tmp_path, "fedavg", 0, [0.5])
    bad = leave(tmp_path, "tent", 0, [0.5]) / "summary.json"
    bad.write_text(json.dumps({"error": f"ValueError: {mark}"}))
    done = invoke("table", tmp_path)
    assert f"ValueError: {shown}" in done.stderr
    assert "\x1b" not in done.output


def test_names_are_text_in_csv(tmp_path):
    """Quoted where CSV needs it, and no formula to a spreadsheet; numbers stay numbers."""
    names = ["=1+2", "@x", " -x", "＋x", "-0.5", "+1e-3", 'a,"b"\n', "[/red]"]
    for seed, name in enumerate(names):
        leave(tmp_path, "fedavg", seed, [0.5], **{"data-dir": name})
    text = as_csv(compare(read_runs(tmp_path)[0], by=["data-dir"]))
    rows = [row[1] for row in csv.reader(io.StringIO(text)) if row[0] == "novel-accuracy"]
    assert rows == ["'=1+2", "'@x", "' -x", "'＋x", "-0.5", "+1e-3", 'a,"b"\n', "[/red]"]


def test_escape_codes_are_text_in_files(tmp_path):
    """A terminal that shows the report or a table obeys none; line breaks stay."""
    leave(tmp_path, "fedavg", 0, [0.5], **{"data-dir": "\x1b[31mred\x9b2J\a"})
    bad = leave(tmp_path, "tent", 0, [0.5]) / "summary.json"
    bad.write_text(json.dumps({"error": "ValueError: \x1b[2J"}))
    page = write_report(*report_arguments(tmp_path)).read_text("utf-8")
    assert r"ValueError: \x1b[2J" in page
    table = as_csv(compare(read_runs(tmp_path)[0], by=["data-dir"]))
    assert r"\x1b[31mred\x9b2J\x07" in table
    for text in (page, table):
        assert not set(text) & {"\x1b", "\x9b", "\a"} and "\n" in text
    assert spreadsheet_cell("\x1b]0;title\x07=1+2") == r"\x1b]0;title\x07=1+2"
    assert spreadsheet_cell("\t=1+2") == "'\t=1+2"


@pytest.mark.parametrize("name", ["+", "-", "-1", "+0.5e-3"])
def test_a_sign_or_a_number_is_a_label_and_no_formula(name):
    """Two classes are often called + and -; in predictions.csv they were '+ and '-."""
    assert spreadsheet_cell(name) == name
    assert spreadsheet_cell(f"{name}A1") == f"'{name}A1"


def report_arguments(folder):
    """What `write_report` takes, for the runs in the folder."""
    runs, problems = read_runs(folder)
    return runs, folder, problems


def test_a_report_that_cannot_be_written_names_its_file(tmp_path):
    """Not a temporary file. Here a folder stands in its place."""
    leave(tmp_path, "fedavg", 0, [0.5])
    (tmp_path / "report.html").mkdir()
    said = fedapps("report", tmp_path, code=2)
    assert re.search(r"error: no report: \[Errno \d+\] .*: '[^']*/report.html'; copy .* to a", said)
    assert [file.name for file in tmp_path.glob(".*")] == []


LONG, DEEP = "9" * 5000, "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("file", "place", "text"),
    [
        ("summary.json", '"evaluation": {', '"train": [1], "x": {'),  # of an earlier release
        ("summary.json", '"evaluation": {', '"evaluation": [1], "x": {'),
        ("summary.json", '"train-accuracy": 0.625', '"train-accuracy": "much"'),
        ("summary.json", '"accuracy": 0.625', '"accuracy": "much"'),
        ("summary.json", '"per_client": {', '"per_client": {"0": "good"}, "x": {'),
        ("summary.json", '"role": "train"', '"role": "king"'),
        ("summary.json", '"seconds": 3.0', '"seconds": true'),
        ("config.toml", 'method = "fedavg"', 'method = ["fedavg"]'),
        ("config.toml", "seed = 1", 'seed = "x"'),
        ("config.toml", "seed = 1", f"seed = {LONG}"),
        ("config.toml", "seed = 1", f"seed = {DEEP}"),
        ("metrics.jsonl", '"round": 2', '"round": "two"'),
        ("metrics.jsonl", '"round": 2', '"dropped": 3, "round": 2'),
        ("metrics.jsonl", "0.375", '{"a": 1}'),
        *[("summary.json", "0.625", text) for text in (LONG, DEEP)],
        *[("metrics.jsonl", "0.375", text) for text in (LONG, DEEP)],
    ],
    ids=lambda value: f"{value[:16]}-{len(value)}",
)
def test_a_damaged_run_is_left_out_and_the_rest_is_shown(tmp_path, file, place, text):
    """Values of other types, numbers of 5000 digits, deep nesting; of metrics the round
    before is shown."""
    for seed in (0, 1):
        run = leave(tmp_path, "fedavg", seed, [], train=[0.625], curve=(0.25, 0.375))
    content = (run / file).read_text()
    assert place in content
    (run / file).write_text(content.replace(place, text))
    runs, problems = read_runs(tmp_path)
    kept = file == "metrics.jsonl"
    assert list(runs.seed) == [0, 1] if kept else [0]
    (problem,) = problems
    why = "metrics.jsonl is damaged or cut short: 1 of 2 rounds" if kept else "(damaged|no run of)"
    assert re.match(f"fedavg-seed1: {why}", problem)
    if kept:
        write_report(runs, tmp_path, problems)


def test_every_method_has_a_name_for_texts():
    """As ``PeFLL`` and ``FedTTA++``; none is the lower-case name of the table."""
    assert not [name for name in METHODS if displayed(name) == name]
    assert displayed("pefll lr=0.1") == "PeFLL lr=0.1"


def test_what_an_encoding_lacks_is_escaped(monkeypatch):
    """Python's stream raises UnicodeEncodeError for ε in latin-1, as a pipe may have. A handler of
    errors that the user has set stays."""
    for errors, shown in (("strict", b"\\u03b5 8 \xb1 1\n"), ("replace", b"? 8 \xb1 1\n")):
        written = io.BytesIO()
        monkeypatch.setattr(
            "sys.stdout", io.TextIOWrapper(written, "latin-1", errors, newline="\n")
        )
        say(make_console(), "ε 8 ± 1")
        sys.stdout.flush()
        assert written.getvalue() == shown


def test_the_help_is_shown_in_every_encoding(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "latin-1"))
    cli(["--help"], standalone_mode=False)
    sys.stdout.flush()
    assert b"\\u03b5 spent" in written.getvalue()
