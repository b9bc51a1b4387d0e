"""The README says what is: its methods, its commands, its code, its main job, its links."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

import strategies
from fedapps.commands.main import cli
from fedapps.methods import METHODS
from fedapps.settings.config import defaults, override, settings
from fedapps.settings.experiments import main_job
from partitions import datasets, federation

ROOT = Path(__file__).parents[1]
MAIN_JOB, MAIN_METHODS = main_job().settings, main_job().methods
README = (ROOT / "README.md").read_text("utf-8")
ROW = ["partitions", "clients", "strategies", "fedapps", "experiments"]
RUN_CONFIG = r"--run-config '(.*?)'"


def test_every_method_stands_in_the_readme_with_its_paper():
    for name, method in METHODS.items():
        row = next((line for line in README.splitlines() if line.startswith(f"| `{name}` |")), "")
        assert method.line in row, name
        assert method.paper in row, name
        assert (method.novel or "no") in row, name


def test_the_readme_names_no_other_methods():
    named = [line.split("`")[1] for line in README.splitlines() if line.startswith("| `")]
    assert named == list(METHODS)


def test_the_main_jobs_table_is_of_its_methods_and_rounds():
    table = README.partition("| method | training clients |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in cells] == MAIN_METHODS.split(",")
    assert {row[5] for row in cells} == {str(MAIN_JOB["rounds"])}
    assert f"{MAIN_JOB['num-clients']} clients with at most two classes" in README


def blocks(text, kind):
    """The fenced blocks of a page that are of this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def commands(text):
    """Every `fedapps …` of a page's blocks, as its words; a comment ends a line."""
    whole = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
    found = re.findall(r"^(?:.*&& )?(?:uv run )?fedapps (.*)", whole, re.M)
    return [shlex.split(line, comments=True) for line in found]


PAGES = {page.name: page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES["README.md"] = README
COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda x: str(x)[:60])
def test_every_command_of_the_pages_is_one(page, words):
    """Its name, its options and their kinds, the number of its arguments; nothing is run."""
    at, group = "fedapps", typer.main.get_command(cli)
    context = group.make_context(at, list(words))
    while hasattr(group, "commands"):
        at, group, words = group.resolve_command(context, words)
        context = group.make_context(at, list(words), parent=context)


def runs():
    """The README's `fedapps run …` that need no folder of results and no file of one's own."""
    own = ("--from", "my-experiment.toml")
    asked = [words[1:] for words in commands(README) if words[:1] == ["run"]]
    return [words for words in asked if not set(own) & set(words)]


@pytest.fixture
def blank_mnist(monkeypatch):
    """7 000 black images in place of MNIST, which is not everywhere."""
    x, y = torch.zeros(7000, 1, 28, 28, dtype=torch.uint8), torch.arange(7000) % 10
    blank = datasets.Dataset(datasets.info("mnist"), x, y, 6000, {})
    real = datasets._load

    def fake(name, root):
        return blank if name == "mnist" else real(name, root)

    monkeypatch.setattr(datasets, "_load", fake)


@pytest.mark.usefixtures("blank_mnist")
@pytest.mark.parametrize("words", runs(), ids=" ".join)
def test_every_run_of_the_readme_would_start(words, monkeypatch, tmp_path):
    """Its settings, methods, seeds and files are checked as before a run; then nothing is left to
    refuse."""
    begun = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("fedapps.commands.main.run_jobs", lambda work, *_, **__: begun.extend(work))
    monkeypatch.setattr("fedapps.commands.main.results_table", lambda work: "")
    monkeypatch.setattr("fedapps.commands.main.write_report", lambda work, output: output)
    own = [f"data-dir={tmp_path}", "--output", str(tmp_path / "out")]  # nobody else's federation
    done = CliRunner().invoke(cli, ["run", *words, *own])
    assert done.exit_code == 0 and begun, done.output


def test_there_are_runs_of_many_kinds():
    """So that the tests above look at something."""
    assert len(runs()) >= 7 and len(COMMANDS) > len(runs()) + 15


def test_flowers_command_takes_what_the_readme_gives_it():
    """Keys of pyproject, with a dot in quotes, as `flwr run` reads them."""
    told = [text for block in blocks(README, "sh") for text in re.findall(RUN_CONFIG, block)]
    told += re.findall(r"`'(\"[\w.]+\"=[\d.]+)'`", README)
    found = [parse_config_args([text]) for text in told]
    assert {"method": "pfedhn", "num-clients": 100} in found
    assert all(one.keys() <= defaults().keys() for one in found) and len(found) == 2


def test_the_main_job_is_what_the_readme_says():
    """50 clients of scikit-learn's 1797 digits, at most two classes each, half of them training."""
    clients = federation(defaults() | MAIN_JOB)
    assert (clients.info.name, len(clients.dataset.y)) == ("digits", 1797)
    assert "1 797 real images" in README and datasets.source("digits") == "embedded"
    held = [len(clients.share(i).everything[:][1].unique()) for i in range(clients.num_clients)]
    assert len(held) == 50 and max(held) == 2
    assert (~clients.novel).sum() == 25
    told = README.partition("FedAvg, FedPer, TENT, FedTTA++ and pFedHN run side by")[1]
    assert told.lower().split(" run ")[0].replace(" and", ",").replace(",,", ",") == ", ".join(
        MAIN_METHODS.split(",")
    )


def test_own_settings_win_over_common_ones():
    """`pfedhn.lr=0.01` sets the learning rate of pFedHN alone."""
    config = override(defaults(), {"pfedhn.lr": 0.01, "lr": 0.7})
    assert [settings(config, name)["lr"] for name in ("pfedhn", "fedavg")] == [0.01, 0.7]


def test_every_setting_stands_with_a_comment_in_pyproject():
    """Its own, or that of the setting of its name that it stands in for."""
    text = (ROOT / "pyproject.toml").read_text("utf-8").partition("[tool.flwr.app.config]")[2]
    line = re.compile(r'^"?(?:[\w-]+\.)?([\w-]+)"? = (?:"[^"]*"|[^#\n]*) +#', re.M)
    assert {key.rpartition(".")[2] for key in defaults()} <= set(line.findall(text))


def test_the_readmes_own_strategy_and_app_can_be_made(monkeypatch):
    """Its code, run: a strategy that starts in somebody's app, and a client around a network."""
    strategy, client = (code for code in blocks(README, "python") if "personalize" not in code)
    begun = []
    known = inspect.signature(strategies.PFedHN.start)
    monkeypatch.setattr(
        strategies.PFedHN, "start", lambda *a, **k: begun.append(known.bind(*a, **k))
    )
    exec(strategy, {"grid": "grid", "initial": "arrays"})
    assert [begun[0].arguments[n] for n in ("grid", "initial_arrays", "num_rounds")] == [
        "grid", "arrays", 100,
    ]  # fmt: skip
    made: dict = {"Net": lambda: torch.nn.Linear(2, 3), "load_data": lambda context: None}
    exec(client, made)
    assert isinstance(made["app"], ClientApp)


def test_links_of_the_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_layout_is_that_of_the_repository():
    """The folders in their order; tests/test_architecture.py holds what they import."""
    layout = README.partition("## Layout\n")[2].split("```")[1]
    folders = re.findall(r"^(\w+)/", layout, re.M)
    assert folders == [*ROW, "tests"]
    named = re.findall(r"\w+\.py", layout)
    assert all(list(ROOT.glob(f"*/{name}")) for name in named) and len(named) == 2
    assert (ROOT / "LICENSE").read_text().strip().startswith("Apache License")
