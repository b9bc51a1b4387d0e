"""The commands of the results pages, as they are cut short."""

import re

import pytest

from experiments.check_results import PAGES, ROOT, blocks, run_page, shortened


@pytest.mark.parametrize(
    ("command", "short"),
    [
        (
            'fedapps run experiments/a.toml --methods "b rounds=50" --seeds 0,1 lr=0.1,0.2,0.3',
            f'fedapps run {ROOT}/experiments/a.toml --methods "b rounds=2" --seeds 0 lr=0.1,0.2 '
            "evaluate-every=2",
        ),
        (
            "fedapps run unseen/S num-clients=N evaluate-every=10 --seeds N --output out/S",
            "fedapps run unseen/step num-clients=10 evaluate-every=2 --seeds 0 --output out/step "
            "rounds=2",
        ),
        (
            "fedapps run --from out/a-seedN novel-rounds=20 rounds=0",
            "fedapps run --from out/a-seed0 novel-rounds=20 rounds=0 --seeds 0",
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
    names = re.compile(r"\b(METHOD|SEED|ALPHA|N|S)\b")
    assert [command for command in found if names.search(command.replace("$D", ""))] == []


def test_a_command_that_fails_is_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("    fedapps list methods\n    fedapps table nothing\n")
    (first, good), (second, bad) = run_page(page)
    assert (first, second) == ("fedapps list methods", "fedapps table nothing")
    assert not good
    assert "nothing" in bad
