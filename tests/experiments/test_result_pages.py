"""The result pages: their numbers come from records, and the prose below a table is short."""

import re

import pytest

from experiments.coverage import ROOT, read_records
from experiments.fill_page import OF_RECORD, with_records

PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
MAX_SENTENCES = 3
# How blocks begin that are no prose: commands, pictures, captions, what a command prints.
NO_PROSE = ("    ", "<!--", "![", "*accuracy", "*data", "`fedapps", "- met", "- missed")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_have_the_values_of_their_records(page):
    """`python -m experiments.fill_page` changes nothing."""
    text = page.read_text("utf-8")
    assert with_records(text) == text


def test_each_record_stands_on_the_page_that_it_names():
    shown = set()
    for page in PAGES:
        for words in OF_RECORD.findall(page.read_text("utf-8")):
            shown.add((page.name, words.split()[0]))
    by_command = {"methods-digits", "normalisation-digits", "methods-mnist"}
    for name, record in read_records().items():
        if record["page"] and name not in by_command:
            assert (record["page"], name) in shown


def prose_below_tables(text: str) -> list[str]:
    """What stands between each table and the next heading or table, without commands, pictures and
    captions, and without a paragraph that introduces what follows by a colon."""
    found = []
    paragraphs: list[str] | None = None
    for block in re.split(r"\n\s*\n|\n(?=#)", text + "\n\n#"):
        if block.startswith(("#", "|", "<!-- record", "<!-- fedapps")):
            if paragraphs:
                found.append(" ".join(paragraphs))
            paragraphs = [] if not block.startswith("#") else None
        elif paragraphs is not None and not block.startswith(NO_PROSE) and block[-1] != ":":
            paragraphs.append(" ".join(block.split()))
    return found


def sentences(prose: str) -> list[str]:
    return re.split(r"(?<=[.!?])\**\s+(?=\S)", prose)


def test_prose_below_a_table_is_found():
    text = (
        "# A\nabove\n\n| a |\n\nOne. Two `x.y`\nis 1.5.\n\n    command. one. two.\n\n"
        "**Three** ends.\n\nHere is the next one. It is:\n\n| b |\n\n- four\n## B\nx"
    )
    assert prose_below_tables(text) == ["One. Two `x.y` is 1.5. **Three** ends.", "- four"]
    assert len(sentences("One. Two `x.y` is 1.5. **Three** ends.")) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_below_a_table_are_at_most_three_sentences(page):
    for prose in prose_below_tables(page.read_text("utf-8")):
        assert len(sentences(prose)) <= MAX_SENTENCES, prose
