"""The names in messages, compared with the table of docs/reference/wire.md."""

import re
from pathlib import Path

import partitions
from fedapps.building import method_model, with_public

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
UP, DOWN = "from client", "from server"
Place = tuple[str, str]  # message type, direction


def table() -> list[tuple[str, list[str], dict[str, list[str]]]]:
    """Rows of the page: message, methods, names by direction."""
    lines = PAGE.read_text("utf-8").partition("| message | methods |")[2].splitlines()[2:]
    rows = []
    for line in lines[: lines.index("")]:
        message, methods, up, down, _ = (cell.strip() for cell in line.strip("|").split("|"))
        names = {UP: re.findall("`(.+?)`", up), DOWN: re.findall("`(.+?)`", down)}
        rows.append((message.strip("`"), methods.split(), names))
    return rows


def held(method, config, messages) -> dict[Place, set[str]]:
    """Names in those messages, arrays of the network as ``model``, clients as ``<client>``."""
    config = with_public(config | {"method": method}, method)
    model = set(method_model(method, config, partitions.task(config))[1])
    places: dict[Place, set[str]] = {}
    for message in messages:
        if message.has_error():
            continue
        way = UP if message.metadata.reply_to_message_id else DOWN
        names = places.setdefault((message.metadata.message_type, way), set())
        for record in message.content.array_records.values():
            for name in record:
                start, slash, rest = ("", "", name) if name in model else name.rpartition("/")
                start = "<client>" if start.isdigit() else start
                names.add(f"{start}{slash}{'model' if rest in model else rest}")
        content = message.content
        for record in (*content.config_records.values(), *content.metric_records.values()):
            names |= set(record)
    return places


def unnamed(method, places) -> list[tuple[str, str, str]]:
    """The names that the page lacks for the method."""
    rows = [(kind, names) for kind, methods, names in table() if {method, "all"} & {*methods}]
    kinds = {kind for kind, _ in rows}
    missing = []
    for (message, way), names in places.items():
        allowed = (message, "any") if message in kinds else ()
        known = {name for kind, named in rows if kind in allowed for name in named[way]}
        missing += [(message, way, name) for name in names - known]
    return sorted(missing)
