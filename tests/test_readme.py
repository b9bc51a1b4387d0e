"""README and pages are true: their commands, their code, the main job, links and layout."""

import inspect
import re
import shlex
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import typer
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from PIL import Image
from small_runs import invoke

import strategies
from experiments.figures_site import FIGURES, OF_THE_RUN, README_TABLE, TABLE
from fedapps.commands.main import cli
from fedapps.methods import METHODS
from fedapps.settings.config import defaults
from fedapps.settings.experiments import main_job
from fedapps.tuning import read_search
from partitions import federation
from partitions.datasets import loading

MAIN_JOB, MAIN_METHODS = main_job().settings, main_job().methods
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
RUN_CONFIG = r"--run-config '(.*?)'"


def test_the_main_job_is_what_the_readme_says():
    """50 clients of scikit-learn's 1797 digits, at most two classes each, half of them training."""
    table = README.partition("| method | training clients |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in cells] == MAIN_METHODS.split(",")
    assert {row[3] for row in cells} == {str(MAIN_JOB["rounds"])}
    names = "FedAvg, FedPer, TENT, FedTTA++, Auto, ODPFL-HN and pFedHN"
    assert f"{names} run side" in " ".join(README.split())
    assert names.lower().replace(" and", ",").split(", ") == MAIN_METHODS.split(",")
    assert "1 797 real images" in README and loading.source("digits") == "embedded"
    assert "over 50 clients with at most two classes each. Half of them train" in README
    clients = federation(defaults() | MAIN_JOB)
    assert (clients.info.name, len(clients.dataset.y)) == ("digits", 1797)
    classes = [len(clients.share(i).everything[:][1].unique()) for i in range(clients.num_clients)]
    assert len(classes) == 50 and max(classes) == 2
    assert (~clients.novel).sum() == 25


def blocks(text, kind):
    """The fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def commands(text):
    """The words of every `fedapps …` in a page's blocks, without comments."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
    found = re.findall(r"^(?:.*&& )?(?:uv run )?fedapps (.*)", lines, re.M)
    return [shlex.split(line, comments=True) for line in found]


PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.parent.name != "methods"  # generated
}
COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]
OTHERS = re.compile(  # what a checkout alone lacks, and placeholders
    r"--from|--resume|--fresh|--gpus|cuda|my-|my_lab|torchvision|data/|[A-Z]{2}"
)
RUNS = sorted({" ".join(w[1:]): w[1:] for _, w in COMMANDS if w[0] == "run"}.items())
RUNS = [words for text, words in RUNS if not OTHERS.search(text)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda x: str(x)[:60])
def test_every_command_of_the_pages_parses(page, words, tmp_path, monkeypatch):
    """Its name, its options and their kinds, the number of its arguments; nothing is run. The
    folders that it names exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "fedtta++-seed0").mkdir(parents=True)
    for folder in ("photos", "mine", "results/tent-seed0", "deciding/auto-seed0"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    at, group = "fedapps", typer.main.get_command(cli)
    context = group.make_context(at, list(words))
    while hasattr(group, "commands"):
        at, group, words = group.resolve_command(context, words)
        context = group.make_context(at, list(words), parent=context)


@pytest.fixture
def blank_mnist(monkeypatch):
    """7 000 black images in place of MNIST, which is not everywhere."""
    x, y = torch.zeros(7000, 1, 28, 28, dtype=torch.uint8), torch.arange(7000) % 10
    blank = loading.Dataset(loading.info("mnist"), x, y, 6000, {})
    real = loading._load

    @lru_cache
    def fake(name, root):
        return blank if name == "mnist" else real(name, root)

    monkeypatch.setattr(loading, "_load", fake)


@pytest.mark.usefixtures("blank_mnist")
@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_every_run_of_the_pages_would_start(words, monkeypatch, tmp_path):
    """Its settings, methods, seeds and files pass the checks before a run."""
    started = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("fedapps.engines.run.run_jobs", lambda work, *_, **__: started.extend(work))
    monkeypatch.setattr("fedapps.commands.run.report_results", lambda *_: False)
    folders = [f"data-dir={tmp_path}", "--output", str(tmp_path / "out")]
    invoke("run", *words, *folders)
    assert len(RUNS) >= 12
    assert bool(started) == ("--dry-run" not in words)


def test_flowers_command_takes_what_the_page_gives_it():
    """Keys of pyproject, with a dot in quotes, as `flwr run` reads them."""
    page = PAGES["docs/concepts/engines.md"]
    words = [text for block in blocks(page, "sh") for text in re.findall(RUN_CONFIG, block)]
    words += re.findall(r"`'(\"[\w.]+\"=[\d.]+)'`", page)
    parsed = [parse_config_args([text]) for text in words]
    assert parsed == [{"method": "pfedhn", "num-clients": 100}, {"partition.alpha": 0.3}]
    assert {key for config in parsed for key in config} <= defaults().keys()


def test_the_readmes_own_strategy_and_app_can_be_made(monkeypatch):
    """The code runs: a strategy that starts in another app, and a client around a network."""
    codes = blocks(README, "python")
    strategy, client = (code for code in codes if re.search("PFedHN|client_app", code))
    calls, start = [], inspect.signature(strategies.PFedHN.start)
    monkeypatch.setattr(
        strategies.PFedHN, "start", lambda *a, **k: calls.append(start.bind(*a, **k).arguments)
    )
    exec(strategy, {"grid": "grid", "initial": "arrays"})
    expected = {"grid": "grid", "initial_arrays": "arrays", "num_rounds": 100}
    assert expected.items() <= calls[0].items()
    made: dict = {"Net": lambda: torch.nn.Linear(2, 3), "load_data": lambda context: None}
    exec(client, made)
    assert isinstance(made["app"], ClientApp)


def test_the_searches_of_the_tuning_page_are_read():
    """But for that of a method of one's own, which is not there."""
    (text,) = blocks(PAGES["docs/how-to/tuning.md"], "toml")
    experiment = tomllib.loads(text)
    search, (*methods, own) = experiment["search"], experiment["methods"]
    assert search.pop(own)
    assert read_search(search, defaults(), methods).keys() > {"lr", "tent.adapt-steps"}


def test_links_lead_somewhere():
    """Links of the root pages; `mkdocs build --strict` follows those of the site."""
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    for page, text in PAGES.items():
        for test in re.findall(r"\btests/[\w/]+\.py", text):
            assert (ROOT / test).exists(), f"{page}: {test}"


def test_files_of_the_code_that_pages_name_exist():
    """A path with `<method>` stands for many."""
    folders = "clients|strategies|partitions|fedapps|experiments|tests"
    pages = PAGES | {page.name: page.read_text("utf-8") for page in ROOT.glob("*.md")}
    del pages["CHANGELOG.md"]  # files of former releases
    named = 0
    for page, text in pages.items():
        for file in re.findall(rf"`((?:{folders})/[\w/]*(?:\.\w+)?)`", text):
            assert (ROOT / file).exists(), f"{page}: {file}"
            named += 1
    assert named > 50


def test_table_and_figures_are_of_one_run():
    """Each figure holds the table of its run as a text; pages count the methods that there are."""
    (table,) = README_TABLE.findall(README)
    for name in OF_THE_RUN:
        with Image.open(FIGURES / name) as image:
            assert image.text[TABLE] == table, f"{name}: python -m experiments.figures_site RESULTS"
    pages = README + PAGES["docs/index.md"]
    counts = re.findall(r"(?:beside (?=\d+\s+others)|(?=\d+ methods))(\d+)", pages)
    assert len(counts) == 3 and {*counts} == {str(len(METHODS))}
