"""``fedapps settings``: what can be set, and what was written from the declarations."""

import json
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from fedapps.common import external_code
from fedapps.common.external_code import is_reference
from fedapps.common.settings import Setting
from fedapps.console import make_console, refusals, say
from fedapps.methods import METHODS
from fedapps.settings.config import SCHEMA, declared, own_settings
from fedapps.settings.variants import ancestors


def settings(
    method: Annotated[
        str, typer.Argument(help="A method; without one: the settings that all methods share.")
    ] = "",
    as_schema: Annotated[
        bool, typer.Option("--schema", help="Print a JSON Schema of experiments, for editors.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write pyproject.toml and schema.json of a checkout.")
    ] = False,
) -> None:
    """List settings: key, default, range or choices, meaning."""
    console = make_console()
    with refusals():
        if write:
            from fedapps.settings.written_files import write as write_files

            for file in write_files():
                say(console, file)
        elif as_schema:
            typer.echo(SCHEMA.read_text("utf-8"), nl=False)
        else:
            known = declared().items()
            shared = {k: (s, "") for k, s in known if k.rpartition(".")[0] in ("", "partition")}
            rows = of_method(method) if method else shared
            if not rows:
                say(console, f"{method} has no settings of its own; those of all: fedapps settings")
                return
            for key, (setting, parent) in rows.items():
                meaning = setting.meaning + (f" (as {parent})" if parent else "")
                default = json.dumps(setting.default, ensure_ascii=False)
                head = Text.assemble((key, "bold"), f" = {default}", (f"  {setting.range}", "dim"))
                head.rstrip()
                indented = Padding(meaning, (0, 0, 0, 4), expand=False)
                console.print(head, indented, highlight=False)


def of_method(name: str) -> dict[str, tuple[Setting, str]]:
    """The settings of a method's section by their full key, each with the method that sets it
    where it is inherited. Raises ValueError for an unknown method."""
    if is_reference(name):
        external_code.allow(name)  # the user named it
    METHODS.check(name)
    if is_reference(name):
        return {f"{name}.{k}": (Setting(v, ""), "") for k, v in own_settings(name).items()}
    return {
        full: (setting, _origin(name, full.rpartition(".")[2]))
        for full, setting in declared().items()
        if full.rpartition(".")[0] == name
    }


def _origin(name: str, key: str) -> str:
    """The method that the default of a method's key comes from; "" if it is the method's own."""
    known = declared()
    default = known[f"{name}.{key}"].default
    origin = ""
    for ancestor in ancestors(name):
        inherited = known.get(f"{ancestor}.{key}")
        # From here on the chain has another default, so it was set below.
        if inherited is None or inherited.default != default:
            break
        origin = ancestor
    return origin
