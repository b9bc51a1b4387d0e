"""What is documented is what is there: methods' pages, keys of a run's files."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from tiny import federate

from experiments.method_pages import FOLDER, logs, measured, page, settings
from fedapps.methods import METHODS
from fedapps.settings.config import defaults

ROOT = Path(__file__).parents[2]
KEYS = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "run-folder.md").read_text("utf-8")))


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_page_has_its_settings(method):
    """`python -m experiments.method_pages` writes the pages anew."""
    there = (FOLDER / f"{method}.md").read_text("utf-8")
    assert section(there, "Settings") == section(page(method, []), "Settings")
    own = {key.partition(".")[2] for key in defaults() if key.rpartition(".")[0] == method}
    assert {key for key, _, _ in settings(method)} == own


def section(text, title):
    """A page's text under a heading."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_pages_tell_defaults_comments_and_measurements():
    assert ("mu", "0.001", "μ, weight of the proximal term") in list(settings("fedprox"))
    tables = [text for text in measured("tent") if text.startswith("**FedTTA's protocol, MNIST")]
    assert tables
    assert all("| tent |" in table for table in tables)


@pytest.mark.parametrize("method", ["afl", "fedtta++", "fedembed"])
def test_a_page_tells_what_a_run_logs(method):
    there = section((FOLDER / f"{method}.md").read_text("utf-8"), "What it logs")
    told = set(re.findall(r"`([^`]+)`", there))
    assert told <= set(logs(method))
    assert {"afl": "mixture-max", "fedtta++": "evaluation/novel-adapt-steps"}.get(method) in {
        *told, None
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "tent", "bound": True},
        {"method": "fedavg", "max-update-norm": 1.0},
        {"method": "pfedhn"},
        {
            "method": "fedavg", "dp": "central", "dp-noise-multiplier": 1.0,
            "dp-generator": "seeded", "fraction-train": 0.5,
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
    keys = {*summary, *(key for line in lines for key in line)}
    keys |= {key for line in lines for key in line.get("evaluation", {})}
    roles = [summary[role] or {} for role in ("train", "novel")]
    keys |= {key.replace("_", "-") for told in roles for key in told}
    keys |= {key for client in summary["per_client"].values() for key in client}
    plain = {re.sub(r"(?<=-)\d+$", "…", re.sub(r"^(train|novel)[-_]", "", key)) for key in keys}
    assert plain - KEYS == set()
    written = tomllib.loads((tmp_path / "config.toml").read_text())
    assert written.keys() - {"versions"} <= defaults().keys()
