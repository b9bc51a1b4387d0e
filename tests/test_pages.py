"""The site's pages are plain and true: short sentences, short pages, tutorials that run, errors
that exist. tests/test_readme.py parses their commands; `mkdocs build --strict` follows links."""

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.tutorials import FOLDER, cells, execute, notebook

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if page.parent.name != "methods"
}
REAL = FOLDER / "real-nodes.md"
TUTORIALS = [
    page for page in sorted(FOLDER.glob("*.md")) if page not in (REAL, FOLDER / "index.md")
]
LONGEST = 30  # words of a sentence
PHRASES = re.compile(r"\b(be they|be it|of which|what remains of it|whoever)\b", re.I)
LINES = 250
LONG = ("docs/reference/", "docs/results/")


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


def test_the_menu_has_every_page():
    """`mkdocs build --strict` stops at a page without an entry, but only the checks run it."""
    menu = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.M)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    of_methods = {page for page in pages if page.startswith("methods/")}  # one entry for all
    assert sorted(pages - of_methods - set(menu)) == []


def test_sentences_are_counted():
    prose = "One two three. Four\nfive, `a b` six [seven](eight.md) 9!"
    text = f"{prose}\n\n| a b | c |\n\n```sh\nx y z\n```\n"
    found = [len(words(sentence)) for sentence in sentences(text)]
    assert [count for count in found if count] == [3, 5, 2, 1]


@pytest.mark.parametrize(
    "page", ["fedembed", "fedtta", "fedtta-figures", "hypernetworks", "mnist", "variants-digits"]
)
def test_a_papers_page_says_which_mean_chose_the_reported_round(page):
    """Before its first table or section, where it holds for all rows."""
    beginning = re.split(r"^(?:\||## )", PAGES[f"docs/results/{page}.md"], flags=re.M)[0]
    assert "`selection-mean`" in beginning and re.search(r"(plain|trimmed)\s+mean", beginning)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_plain(page):
    found = list(sentences(PAGES[page]))
    assert [s for s in found if len(words(s)) > LONGEST] == []
    assert [s for s in found if PHRASES.search(s)] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page):
    if not page.startswith(LONG):
        assert len(PAGES[page].splitlines()) <= LINES


def masked(text):
    """What a cell prints, without its numbers and the widths of its columns."""
    return re.sub(r"[\s─━-]+", " ", re.sub(r"−?\d+(\.\d+)?", "0", text)).strip()


def shown(text):
    """What the page says that each Python cell prints, "" where it shows nothing."""
    printed = []
    for kind, file, content in cells(text):
        if kind == "python" and not file:
            printed.append("")
        elif kind == "text":
            printed[-1] = content
    return printed


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_its_page_shows(page, tmp_path, monkeypatch):
    """Its runs have two rounds and few clients, since numbers are not compared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = page.read_text("utf-8")
    for name in [n for n in sys.modules if n.partition(".")[0] == "my_app"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    before = {*sys.modules}
    short = re.sub(r"^    rounds=\d+", "    rounds=2", text, flags=re.M)
    short = re.sub(r"\bnum_clients=[3-6]0\b", "num_clients=8", short)
    done = list(execute(short))
    for name in {*sys.modules} - before:  # the page's own app has the name of other tests' apps
        if any(tmp_path.glob(f"{name.partition('.')[0]}*")):
            del sys.modules[name]
    assert [masked(printed) for printed, _ in done] == [masked(part) for part in shown(text)]
    figures = re.findall(r"\(\.\./figures/(\S+\.png)\)", text)
    assert len(figures) == len([value for _, value in done if isinstance(value, Figure)])


@pytest.mark.slow
def test_the_tutorials_real_nodes_train_and_are_served(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"APP": str(ROOT), "PATH": path}
    steps = [code for kind, _, code in cells(REAL.read_text("utf-8")) if kind == "sh"]
    try:
        for step in steps[:-1]:
            subprocess.run(["bash", "-ec", step], cwd=tmp_path, env=environment, check=True)
    finally:
        subprocess.run(["bash", "-ec", steps[-1]], cwd=tmp_path, env=environment, check=True)
    assert len(list(tmp_path.glob("fed/state/node-*/predictions.csv"))) == 4


def test_a_notebook_has_the_cells_files_and_outputs_of_its_page():
    page = 'Text.\n\n```python title="a.py"\nx = 1\n```\n\n```python\nprint(2)\n```\n\n'
    page += "```text\n2\n```\n\n![figure](b.png)\nEnd.\n\n```sh\nls\n```\n"
    made = json.loads(notebook(page))["cells"]
    assert [(cell["cell_type"], cell["source"]) for cell in made] == [
        ("markdown", "Text."),
        ("code", "%%writefile a.py\nx = 1"),
        ("code", "print(2)"),
        ("markdown", "End."),
        ("code", "%%bash\nls"),
    ]
    assert [out["text"] for cell in made for out in cell.get("outputs", ())] == ["2\n"]


def hooks():
    """docs/hooks.py, which mkdocs loads by its path."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ('<script src="https://a.org/x.js"></script>', "https://a.org/x.js"),
        ("<script async src=//a.org/x.js></script>", "//a.org/x.js"),
        ('<link rel="stylesheet" href="https://a.org/x.css">', "https://a.org/x.css"),
        ('<link href="https://a.org" rel="preconnect" crossorigin>', "https://a.org"),
        ('<img alt="a" src="http://a.org/x.png">', "http://a.org/x.png"),
        ("<image href='https://a.org/x.png'/>", "https://a.org/x.png"),
        ("@font-face { src: url(https://a.org/x.woff) }", "https://a.org/x.woff"),
        ('@import "//a.org/x.css";', "//a.org/x.css"),
        ('<pre class="mermaid"><code>', "mermaid's script"),
        ('<script src="../x.js"></script><img src="x.png"><use href="#head"/>', None),
        ('<a href="https://a.org/x.js">a</a><svg xmlns="http://www.w3.org/2000/svg">', None),
        ('<link rel="canonical" href="https://a.org/x/">&lt;img src="https://a.org/x"', None),
        ("a { background: url(x.svg) }", None),
    ],
)
def test_what_a_page_loads_from_another_host_is_noticed(text, loaded):
    assert hooks().elsewhere(text) == ([loaded] if loaded else [])


@pytest.mark.parametrize("name", ["index.html", "x/site.css", "x/figure.svg"])
def test_a_site_that_loads_from_another_host_is_warned_about(name, tmp_path, caplog):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('<img src="https://a.org/x.png">', "utf-8")
    (tmp_path / "about.html").write_text('<img src="x.png">', "utf-8")
    hooks().on_post_build(config=argparse.Namespace(site_dir=str(tmp_path)))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", f"{name} loads https://a.org/x.png")
    ]


@pytest.mark.slow
def test_no_page_of_the_site_asks_another_host(tmp_path):
    """A browser opens every page, with what scripts fetch; needs the group docs, and Chromium."""
    pytest.importorskip("material")
    chromium = shutil.which("chromium") or pytest.skip("no browser is installed")
    from playwright.sync_api import sync_playwright

    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here, asked = f"http://127.0.0.1:{server.server_port}/", set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.add(request.url))
        for file in sorted(tmp_path.rglob("*.html")):
            page.goto(here + str(file.relative_to(tmp_path)), wait_until="networkidle")
        browser.close()
    server.shutdown()
    assert len(asked) > 100
    assert [url for url in asked if not url.startswith(here) and not url.startswith("data:")] == []


def test_the_errors_of_the_troubleshooting_page_exist():
    """A quotation is part of a text in the code."""
    known = set()
    for package in ("partitions", "clients", "strategies", "fedapps"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text("utf-8"))
            known |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    texts = [text for text in known if isinstance(text, str)]
    quoted = []
    for table in re.split(r"\n\n", PAGES["docs/troubleshooting.md"]):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        if rows and "message contains" in rows[0]:
            quoted += [q for row in rows[2:] for q in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(quoted) > 20
    assert [quote for quote in quoted if not any(quote in text for text in texts)] == []
