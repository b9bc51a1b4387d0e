"""Writes a page for each method: ``python -m experiments.method_pages [FOLDER]``.

A page is made of the table of methods, the docstrings of the method's client and strategy, its
declared settings, the keys that a tiny run of it logs, and its rows in docs/results/. The links of
a page fit the default folder, docs/methods/, which git ignores. docs/hooks.py adds the pages that
this folder lacks to the site, without what a run logs."""

import inspect
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedapps.common.tasks import ALL_TASKS
from fedapps.methods import METHODS, Method
from fedapps.serverapp import run_in_process
from fedapps.settings.config import Config, declared, defaults

DOCS = Path(__file__).parents[1] / "docs"
TINY: Config = {"num-clients": 6, "rounds": 1, "local-steps": 1, "evaluate-every": 1}
PREFERENCE: Config = {
    "partition": "preference",
    "num-clients": 20,
    "train-fraction": 1.0,
    "fedembed.embedding-dim": 8,
    "global+.embedding-dim": 8,
}
NOVEL = {
    "": "An unlabeled novel client gets nothing: the method cannot serve it.",
    "global": "An unlabeled novel client gets the model that everybody gets.",
    "adapted": "An unlabeled novel client gets a model of its own, from its inputs alone.",
}
Row = tuple[str, str, str, str]  # key, default, values, meaning


def page(method: str, logged: list[str] | None = None) -> str:
    """The page of a method; `logged` are the keys that only its runs write, if they are known."""
    entry = METHODS[method]
    client = source("Client", entry.client)
    server = source("Server", entry.strategy)
    kinds = ", ".join(entry.dp) or "none"
    served = f"all tasks: {', '.join(ALL_TASKS)}"
    if entry.served_tasks != ALL_TASKS:
        served = f"{', '.join(entry.served_tasks)}; a run with another task is refused"
    late = "dropped"
    if entry.strategy.uses_late_replies:
        late = "aggregated as changes, by their age"
    sections = {
        "What it computes": f"{client}\n\n{server}",
        "Novel clients and privacy": f"{NOVEL[entry.novel]}\n\n"
        f"Kinds of differential privacy: {kinds}.",
        "Tasks": f"It serves {served}.",
        "Late replies": f"Replies to an [earlier round](../how-to/slow-clients.md) are {late}.",
        "Settings": table(settings(method)) or "Only the common ones of `[tool.flwr.app.config]`.",
    }
    if logged is not None:
        keys = ", ".join(f"`{key}`" for key in logged) or "nothing"
        sections["What it logs"] = (
            f"Beyond [what every run logs](../reference/run-folder.md): {keys}."
        )
    rows = list(measured(method))
    if rows:
        where = "The commands, the machine and the interpretation: [results](../results/index.md)."
        sections["Measured, beside published"] = "\n\n".join([where, *rows])
    summary = f"{entry.summary[0].upper()}{entry.summary[1:]}. Paper: {entry.paper}."
    title = f"# {method}\n\n{summary} Family: {', '.join(entry.family)}."
    parts = [title]
    for name, text in sections.items():
        parts.append(f"## {name}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def source(role: str, half: type) -> str:
    """Where a class stands, and the docstrings of its module and of itself."""
    file = f"{half.__module__.replace('.', '/')}.py"
    paragraphs = [f"**{role}**: `{half.__name__}` in `{file}`."]
    for part in (inspect.getmodule(half), half):
        if part is not None and part.__doc__:
            # Two backticks are code in reStructuredText, one in Markdown.
            paragraphs.append(inspect.cleandoc(part.__doc__).replace("``", "`"))
    return "\n\n".join(paragraphs)


def settings(method: str) -> Iterator[Row]:
    """The settings of the method's section of the configuration."""
    for key, setting in declared().items():
        section, _, name = key.rpartition(".")
        if section == method:
            values = setting.values
            choices = values if isinstance(values, str) else ", ".join(map(json.dumps, values))
            yield name, f"`{json.dumps(setting.default)}`", choices, setting.meaning


def table(rows: Iterator[Row]) -> str:
    """The settings in Markdown, "" if there are none."""
    lines = [f"| `{key}` | {' | '.join(cells)} |" for key, *cells in rows]
    if not lines:
        return ""
    return "\n".join(["| key | default | values | |", "|---|---|---|---|", *lines])


def measured(method: str) -> Iterator[str]:
    """The rows of docs/results/ whose first cell names the method, under their headings."""
    folder = DOCS / "results"
    for file in sorted(folder.glob("*.md")):
        page_text = _moved(file.read_text("utf-8"), file.name)
        for section in page_text.split("\n## ")[1:]:
            title, _, text = section.partition("\n")
            for block in text.strip().split("\n\n"):
                lines = block.splitlines()
                head = lines[:2]  # of a table: its header and the line below
                rows = [row for row in lines[2:] if row.startswith("|") and _first(row) == method]
                if rows and head[0].startswith("|"):
                    yield f"**{title}**\n\n" + "\n".join([*head, *rows])


def _moved(text: str, name: str) -> str:
    """A page of docs/results/ with links that fit docs/methods/: to its own headings, to pages
    beside it. Those that begin with ../ fit already."""
    text = text.replace("](#", f"]({name}#")
    return re.sub(r"\]\((?!\w+:|\.\./)", "](../results/", text)


def _first(row: str) -> str:
    """The method of a row: "fedembed" of ``| fedembed, type | …``."""
    return re.split(r"[,(]", row.strip("| ").partition("|")[0])[0].strip(" `*")


def logs(method: str) -> list[str]:
    """The keys of a round's report, and of its evaluation, of a tiny run."""
    config = dict(TINY)
    if needs_preference(method):
        config |= PREFERENCE
    if method in ("fedbn", "bn-adapt"):
        # They refuse a network without batch normalisation.
        config["model"] = "convnet-bn"
    with tempfile.TemporaryDirectory() as folder:
        run_in_process(defaults() | config | {"method": method, "output-dir": folder})
        report = json.loads((Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    return [*report, *(f"evaluation/{key}" for key in report["evaluation"])]


def needs_preference(method: str) -> bool:
    """Whether the method runs only on the preference partition."""
    return "needs the preference partition" in METHODS[method].summary


def tasks(entry: Method) -> str:
    """The tasks that the method serves, for people."""
    return "all" if entry.served_tasks == ALL_TASKS else ", ".join(entry.served_tasks)


def index() -> str:
    """The table of all methods."""
    rows = [
        "| method | what it does | paper | tasks | unlabeled novel clients get |",
        "|---|---|---|---|---|",
    ]
    for name, entry in METHODS.items():
        novel = entry.novel or "no"
        row = f"[`{name}`]({name}.md)", entry.summary, entry.paper, tasks(entry), novel
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(["# Methods", "", *rows, ""])


def main(folder: Path = DOCS / "methods") -> None:
    """Run every method for a round, and write its page."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # What every run logs: on the preference partition that includes scores of sub-populations.
    common = {False: set(logs("fedavg")), True: set(logs("global"))}
    folder.mkdir(parents=True, exist_ok=True)
    for method in METHODS:
        common_keys = common[needs_preference(method)]
        logged = [key for key in logs(method) if key not in common_keys]
        (folder / f"{method}.md").write_text(page(method, logged), "utf-8")
    (folder / "index.md").write_text(index(), "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
