"""What mkdocs adds to docs/: notebooks of the tutorials, generated reference pages, root pages.

The built site loads nothing from another host, so that it can be read offline."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AT_ROOT = ("SECURITY", "CONTRIBUTING", "CHANGELOG")
HOST = r"((?:https?:)?//[^\s\"'<>)]+)"
LOADS = re.compile(
    r"<(?!a\b|link\b[^>]*\brel=[\"']?(?:canonical|prev|next|alternate)\b)\w+\b[^>]*?"
    rf"\s(?:src|srcset|href|data|poster)=[\"']?{HOST}"
    rf"|(?:@import\s+|url\(\s*)[\"']?{HOST}",
    re.I,
)
MERMAID = re.compile(r"class=[\"'][^\"']*\bmermaid\b")  # the theme fetches a script for it
SETTINGS = """\
`fedapps settings` prints this list; `fedapps settings METHOD` prints that of one method. Set a
value by `key=value` on the command line or in a file. `lr=0.1` changes the learning rate of every
method, `pfedhn.lr=0.01` that of `pfedhn` only. [Which value
wins](../how-to/sweeps.md#which-value-wins) has the order."""


def command_page() -> str:
    """The help of every subcommand."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from fedapps.commands.main import cli

    group = get_command(cli)
    context = group.make_context("fedapps", ["list", "methods"])
    text = get_docs_for_click(obj=group, ctx=context, name="fedapps")
    return text.replace("# CLI", "# Command", 1)


def settings_page() -> str:
    """Every setting, the common ones first, then each method's."""
    from experiments.method_pages import settings, table
    from fedapps.settings.config import declared

    sections = dict.fromkeys(key.rpartition(".")[0] for key in declared())
    titles = {"": "Common settings", "partition": "Options of partitions"}
    parts = [f"## {titles.get(s, s)}\n\n{table(settings(s))}" for s in sections]
    return "\n\n".join(["# Settings", SETTINGS, *parts]) + "\n"


def generated() -> Iterator[tuple[str, str]]:
    """The path and the text of each generated page."""
    from experiments.method_pages import index, page
    from fedapps.methods import METHODS

    yield "reference/command.md", command_page()
    yield "reference/settings.md", settings_page()
    yield "methods/index.md", index()
    yield from ((f"methods/{name}.md", page(name)) for name in METHODS)
    for name in AT_ROOT:
        yield f"{name}.md", (ROOT / f"{name}.md").read_text("utf-8").replace("](docs/", "](")


def on_config(config: Any) -> None:
    """Put a page for each method into the navigation."""
    from fedapps.methods import METHODS

    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    methods = next(entry for entry in reference if "Methods" in entry)
    methods["Methods"] = ["methods/index.md", *({n: f"methods/{n}.md"} for n in METHODS)]


def on_files(files: Any, config: Any) -> None:
    """Add the generated pages that the folder lacks, and the notebooks."""
    from mkdocs.structure.files import File

    from experiments.tutorials import FOLDER, notebook

    for path, text in generated():
        if not files.get_file_from_path(path):
            files.append(File.generated(config, path, content=text))
    for page in FOLDER.glob("*.md"):
        if page.stem != "index":
            content = notebook(page.read_text("utf-8"))
            files.append(File.generated(config, f"tutorials/{page.stem}.ipynb", content=content))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link a tutorial's notebook; root pages are part of the site."""
    path = Path(page.file.src_uri)
    if path.parent.name == "tutorials" and path.stem != "index":
        title, _, rest = markdown.partition("\n")
        link = f"[Download as a notebook]({path.stem}.ipynb){{ .md-button }}"
        markdown = f"{title}\n\n{link}\n{rest}"
    return re.sub(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(AT_ROOT)})\.md)", r"](\1", markdown)


def elsewhere(text: str) -> list[str]:
    """What a page, a style sheet or an SVG loads from other hosts. Links are not loaded."""
    found = [first or second for first, second in LOADS.findall(text)]
    return found + ["mermaid's script"] * bool(MERMAID.search(text))


def on_post_build(config: Any) -> None:
    """Warn, so that a strict build fails, if the site loads something from another host."""
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css", ".svg"):
            for address in elsewhere(file.read_text("utf-8")):
                name = file.relative_to(config.site_dir)
                logging.getLogger("mkdocs.hooks").warning("%s loads %s", name, address)
