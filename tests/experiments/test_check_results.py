"""The commands of the results pages, as they are cut short."""

import re

import pytest

from experiments.check_results import (
    PAGES,
    ROOT,
    blocks,
    copy_experiments,
    outcome,
    run_page,
    shortened,
)


@pytest.mark.parametrize(
    ("command", "short"),
    [
        (
            'fedapps run experiments/a.toml --methods "b rounds=50" --seeds 0,1 lr=0.1,0.2,0.3',
            'fedapps run experiments/a.toml --methods "b rounds=2" --seeds 0 lr=0.1,0.2 '
            "evaluate-every=2",
        ),
        (
            "fedapps run unseen/S num-clients=N evaluate-every=10 --seeds N --output out/S",
            "fedapps run unseen/step num-clients=10 evaluate-every=2 --seeds 0 --output out/step "
            "rounds=2",
        ),
        (
            "fedapps run --from out/a-seedN novel-rounds=20 rounds=0",
            "fedapps run --from out/a-seed0 novel-rounds=2 rounds=0 --seeds 0",
        ),
        (
            'fedapps run --from out/B novel-batch=B --methods "bbse mixing=0.1,t3a,tent lr=0.1"',
            'fedapps run --from out/5 novel-batch=5 --methods "bbse mixing=0.1,t3a,tent lr=0.1" '
            "--seeds 0",
        ),
        (
            "fedapps tune a.toml --trials 6 --seeds 0,1 --output b",
            "fedapps tune a.toml --trials 1 --seeds 0 --output b rounds=2 evaluate-every=2",
        ),
        ("fedapps table out --across seed", "fedapps table out --across seed"),
    ],
)
def test_a_command_is_cut_short(command, short):
    assert shortened(command) == short


def test_the_pages_commands_are_found():
    text = "Text\n\n    D=a\n    fedapps run x \\\n        y=1\n\n`fedapps run z`\n"
    assert blocks(text) == ["D=a", "fedapps run x y=1"]
    found = [shortened(line) for page in PAGES.glob("*.md") for line in blocks(page.read_text())]
    assert len(found) >= 30
    names = re.compile(r"\b(METHOD|SEED|ALPHA|SPLIT|B|N|S)\b")
    assert [command for command in found if names.search(command.replace("$D", ""))] == []


def test_an_experiments_file_is_cut(tmp_path):
    """Figure 2's file has 100 clients, for pFedHN 5000 rounds and 100 novel rounds."""
    copy_experiments(tmp_path)
    file = "experiments/pfedhn/figure2-novel.toml"
    text, short = ((root / file).read_text("utf-8") for root in (ROOT, tmp_path))
    assert (
        '"pfedhn novel-rounds=100 fraction-train=0.0112 rounds=5000 batch-draws=independent"'
        in text
    )
    assert '"pfedhn novel-rounds=2 fraction-train=0.0112 rounds=2 batch-draws=independent"' in short
    assert "\nnum-clients = 100\n" in text
    assert "\nnum-clients = 20\n" in short
    users = tmp_path / "experiments/fedembed/mnist-balanced.toml"
    assert "\nnum-clients = 90\n" in users.read_text("utf-8")


def test_a_command_that_fails_is_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("    fedapps list methods\n    fedapps list nothing\n")
    good, bad = run_page(page)
    assert good == ("fedapps list methods", "ok", "")
    assert bad[:2] == ("fedapps list nothing", "FAILED")
    assert "nothing" in bad[2]


def test_a_command_without_its_data_is_skipped():
    missing = "error: dataset 'fashion-mnist' was not found. Give it in one of three ways"
    assert outcome(2, missing) == "skipped, without the data of fashion-mnist"
    assert outcome(2, "error: unknown method 'fedpr'") == "FAILED"
    assert outcome(0, "") == "ok"
