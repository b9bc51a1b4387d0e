"""The site's pages are plain and true: short sentences, short pages, tutorials that run, errors
that exist. tests/test_readme.py parses their commands; `mkdocs build --strict` follows links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if page.parent.name != "methods"
}
LONGEST = 30  # words of a sentence
PHRASES = re.compile(r"\b(be they|be it|of which|what remains of it|whoever)\b", re.I)
LINES = 250
LONG = ("docs/reference/", "docs/results")


def sentences(text):
    """The sentences of a page's paragraphs, list entries and table cells, without code."""
    text = re.sub(r"^( *)```.*?^\1```\n", "\n\n", text, flags=re.M | re.S)
    text = re.sub(r"^(    |:::).*$", "", text, flags=re.M) if "???" not in text else text
    text = re.sub(r"<[^>]+>|!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    for block in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. |\n#|\|", text):
        yield from re.split(r"(?<=[.!?])[)*]*\s", " ".join(block.split()))


def words(sentence):
    """Its words; numbers and signs are none."""
    return re.findall(r"[A-Za-zÀ-ž][\w'’-]*", sentence)


def test_sentences_are_counted():
    prose = "One two three. Four\nfive, `a b` six [seven](eight.md) 9!"
    text = f"{prose}\n\n| a b | c |\n\n```sh\nx y z\n```\n"
    found = [len(words(sentence)) for sentence in sentences(text)]
    assert [count for count in found if count] == [3, 5, 2, 1]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_plain(page):
    found = list(sentences(PAGES[page]))
    assert [s for s in found if len(words(s)) > LONGEST] == []
    assert [s for s in found if PHRASES.search(s)] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page):
    if not page.startswith(LONG):
        assert len(PAGES[page].splitlines()) <= LINES
