"""The documentation covers what exists: the methods' pages, the keys of a run's files."""

import json
import logging
import re
import tomllib
from pathlib import Path

import pytest
from small_runs import federate

from experiments import method_pages
from fedapps.common.tasks import ALL_TASKS, TASKS
from fedapps.methods import METHODS
from fedapps.settings.config import defaults
from partitions.datasets.description import KINDS, SCALED

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "run-folder.md").read_text("utf-8")
LOGGED = {"afl": "mixture-max", "fedtta++": "evaluation/novel-adapt-steps", "fedembed": "nothing"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every method's page as `python -m experiments.method_pages` writes it, with the logged keys
    of a few methods."""
    folder, logs = tmp_path_factory.mktemp("docs") / "methods", method_pages.logs
    log = logging.getLogger("flwr")
    level = log.level
    with pytest.MonkeyPatch.context() as patch:
        some = {"fedavg", "global", *LOGGED}
        patch.setattr(method_pages, "logs", lambda name: logs(name) if name in some else [])
        method_pages.main(folder)
    log.setLevel(level)
    return {file.stem: file.read_text("utf-8") for file in folder.iterdir()}


def section(page, title):
    """The text of a page under a heading."""
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_first_pages_count_the_methods():
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/index.md"):
        assert re.findall(r"(\d+) methods", (root / page).read_text("utf-8")) == [str(len(METHODS))]


def test_the_page_of_tasks_has_each_task_and_each_kind_of_input():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text("utf-8")
    rows = re.findall(r"^\| `.*", section(page, "Tasks"), re.M)
    expected = []
    for task in TASKS.values():
        scores = ", ".join(f"`{name}`" for name in task.scores)
        expected.append(f"| `{task.name}` | {task.summary} | {task.loss} | {scores} |")
    assert rows[1:] == expected  # below the head
    kinds = re.findall(r"^\| `(\w+)` \| (.*) \| (\w+).*\|$", section(page, "Kinds of inputs"), re.M)
    assert {name: text for name, text, _ in kinds[1:]} == KINDS
    assert {name for name, _, scaled in kinds if scaled == "by"} == {*SCALED}
    named = re.findall(r"\| `([\w-]+)=\w", section(page, "Where each is declared"))
    assert {"task", "label", "scores", "inputs", "columns", "ignore", "missing", "head"} <= {*named}
    assert {*named} <= {*defaults()}


def test_every_method_has_a_page_with_its_paper_and_settings(pages):
    assert pages.keys() == {"index", *METHODS}
    for name, method in METHODS.items():
        tasks = "all" if method.tasks == ALL_TASKS else ", ".join(method.tasks)
        row = f"| {method.summary} | {method.paper} | {tasks} | {method.novel or 'no'} |"
        assert f"| [`{name}`]({name}.md) {row}\n" in pages["index"]
        assert method.family
        families = ", ".join(method.family)
        assert f"Paper: {method.paper}. Family: {families}.\n" in pages[name]
        keys = re.findall(r"^\| `([\w-]+)` \|", section(pages[name], "Settings"), re.M)
        assert keys == [k.rpartition(".")[2] for k in defaults() if k.rpartition(".")[0] == name]
        for half in (method.strategy, method.client):
            assert f"`{half.__name__}` in `{half.__module__.replace('.', '/')}.py`" in pages[name]


def test_pages_have_ranges_choices_measurements_and_logged_keys(pages):
    rows = section(pages["fedprox"], "Settings"), section(pages["fedembed"], "Settings")
    assert "| `mu` | `0.001` | [0, 1000000] | μ, weight of the proximal term |" in rows[0]
    assert '| `heads` | `"client"` | "client", "server" |' in rows[1]
    tables = section(pages["tent"], "Measured, beside published").split("\n\n**")
    protocol = next(text for text in tables if text.startswith("FedTTA's protocol, MNIST**"))
    assert "\n| tent |" in protocol and "fedavg" not in protocol
    for method, key in LOGGED.items():
        assert key in section(pages[method], "What it logs")
        assert "`loss`" not in section(pages[method], "What it logs")


def test_links_of_measured_rows_fit_the_methods_folder(tmp_path, monkeypatch):
    cells = "[a](mnist.md) | [b](#rates) | [c](../figures/x.png) | [d](https://e.org/f)"
    page = f"# R\n\n## T\n\n| m | | | |\n|---|---|---|---|\n| tent | {cells} |\n"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "digits.md").write_text(page)
    monkeypatch.setattr(method_pages, "DOCS", tmp_path)
    targets = re.findall(r"\]\(([^)]*)\)", "".join(method_pages.measured("tent")))
    here = ["../results/mnist.md", "../results/digits.md#rates"]
    assert targets == [*here, "../figures/x.png", "https://e.org/f"]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "tent", "report-generalization-bound": True},
        {"method": "fedavg", "max-update-norm": 1.0},
        {"method": "pfedhn"},
        {
            "method": "fedavg", "dp": "central", "dp-noise-multiplier": 1.0,
            "dp-generator": "seeded",
        },
        {
            "method": "fedembed", "partition": "preference", "num-clients": 20,
            "train-fraction": 1.0, "fedembed.embedding-dim": 8,
        },
    ],
    ids=["tent", "clipped", "pfedhn", "private", "fedembed"],
)  # fmt: skip
def test_every_key_of_a_runs_files_is_documented(changes, tmp_path):
    federate(**changes, **{"output-dir": str(tmp_path)})
    summary = json.loads((tmp_path / "summary.json").read_text())
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tables = [summary, *lines, *(line.get("evaluation", {}) for line in lines)]
    tables += [summary["evaluation"], summary["saved_model_train"], summary["last"]]
    tables += summary["per_client"].values()
    keys = {re.sub(r"^(train|novel)[-_]", "", key) for table in tables for key in table}
    documented = set(re.findall(r"`([^`]+)`", PAGE))
    assert {re.sub(r"(?<=-)\d+$", "…", key) for key in keys} <= documented
    written = tomllib.loads((tmp_path / "config.toml").read_text())
    assert written.keys() - {"versions"} <= defaults().keys()
