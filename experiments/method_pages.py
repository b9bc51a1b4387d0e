"""Writes docs/methods/: ``python -m experiments.method_pages``.

A page of a method is made of what already stands somewhere once: the table of methods, the
docstrings of its two halves, its settings with their meaning, what a tiny run of it
reports, and its rows in docs/results.md."""

import inspect
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedapps.engines.jobs import run_in_process
from fedapps.methods import METHODS
from fedapps.settings.config import defaults
from fedapps.settings.schema import declared

FOLDER = Path(__file__).parents[1] / "docs" / "methods"
RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
TINY = {"num-clients": 6, "rounds": 1, "local-steps": 1, "evaluate-every": 1}
PREFERENCE = {"partition": "preference", "num-clients": 20, "train-fraction": 1.0}
NEEDS: dict[str, dict[str, Any]] = {
    "fedbn": {"model": "convnet-bn"},
    "fedembed": {"fedembed.embedding-dim": 8},
    "global+": {"global+.embedding-dim": 8},
}
NOVEL = {
    "": "An unlabeled novel client gets nothing: the method cannot serve it.",
    "global": "An unlabeled novel client gets the model that everybody gets.",
    "adapted": "An unlabeled novel client gets a model of its own, from its inputs alone.",
}


def page(method: str, logged: list[str]) -> str:
    """The page of a method that logs these keys beyond those of every run."""
    entry = METHODS[method]
    halves = {"Client": entry.client, "Server": entry.strategy}
    parts = [f"# {method}\n\n{entry.line[0].upper()}{entry.line[1:]}. Paper: {entry.paper}.\n"]
    parts.append("## What it computes\n")
    for name, half in halves.items():
        module = inspect.getmodule(half)
        source = f"{half.__module__.replace('.', '/')}.py"
        parts.append(f"**{name}**: `{half.__name__}` in [`{source}`](../../{source}).\n")
        texts = [inspect.cleandoc(t) for t in (module.__doc__ if module else "", half.__doc__) if t]
        parts += [f"{text.replace('``', '`')}\n" for text in texts]
    private = ", ".join(entry.dp) or "none"
    parts.append("## For a novel client, and for privacy\n")
    parts.append(f"{NOVEL[entry.novel]}\n")
    parts.append(f"Kinds of differential privacy that it can keep: {private}.\n")
    parts.append("## Settings\n")
    rows = [f"| `{key}` | `{value}` | {says} |" for key, value, says in settings(method)]
    table = ["| key | default | |", "|---|---|---|", *rows]
    nothing = "None of its own beside the common ones of `[tool.flwr.app.config]`."
    parts.append("\n".join(table) + "\n" if rows else nothing + "\n")
    parts.append("## What it logs\n")
    told = ", ".join(f"`{key}`" for key in logged) or "nothing of its own"
    parts.append(f"Beyond [what every run tells](../run-folder.md): {told}.\n")
    if found := list(measured(method)):
        parts.append("## Measured, beside published\n")
        parts.append("Commands, machine and what to make of it: [results](../results.md).\n")
        parts += found
    return "\n".join(parts)


def settings(method: str) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of what the method's section may set."""
    for key, setting in declared().items():
        section, _, name = key.rpartition(".")
        if section == method:
            yield name, json.dumps(setting.default, ensure_ascii=False), setting.meaning


def measured(method: str) -> Iterator[str]:
    """The rows of docs/results.md whose first cell names the method, under their headings."""
    for section in RESULTS.read_text("utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        for block in text.split("\n\n"):
            lines = [line for line in block.splitlines() if line.startswith("|")]
            rows = [r for r in lines[2:] if _first(r) == method]
            if len(lines) > 2 and rows:
                yield f"**{title}**\n\n" + "\n".join([*lines[:2], *rows]) + "\n"


def _first(row: str) -> str:
    """The method that a row is of: "fedembed" of ``| fedembed, type | …``."""
    return re.split(r"[,(]", row.strip("| ").partition("|")[0])[0].strip(" `*")


def logs(method: str) -> list[str]:
    """The keys of a round's report, and of its evaluation, of a tiny run."""
    tiny: dict[str, Any] = (
        TINY | (PREFERENCE if needs_preference(method) else {}) | NEEDS.get(method, {})
    )
    with tempfile.TemporaryDirectory() as folder:
        run_in_process(defaults() | tiny | {"method": method, "output-dir": folder})
        report = json.loads((Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    return [*report, *(f"evaluation/{key}" for key in report["evaluation"])]


def needs_preference(method: str) -> bool:
    """Whether it runs on users with tastes alone."""
    return "needs the preference partition" in METHODS[method].line


def main() -> None:
    """Run every method for a round, and write its page."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    plain = {needs: set(logs(name)) for needs, name in ((False, "fedavg"), (True, "global"))}
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = ["# Methods\n", "| method | what it does | paper |", "|---|---|---|"]
    for method, entry in METHODS.items():
        own = [key for key in logs(method) if key not in plain[needs_preference(method)]]
        (FOLDER / f"{method}.md").write_text(page(method, own), "utf-8")
        lines.append(f"| [`{method}`]({method}.md) | {entry.line} | {entry.paper} |")
    (FOLDER / "README.md").write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
