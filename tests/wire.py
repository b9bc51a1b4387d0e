"""What messages hold, against the table of docs/privacy.md."""

import re
from pathlib import Path

import partitions
from fedapps.node.building import method_model, with_public

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
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
    own = with_public(config | {"method": method}, method)
    model = set(method_model(method, own, partitions.task(own))[1])
    found: dict[Place, set[str]] = {}
    for message in messages:
        if message.has_error():
            continue
        way = UP if message.metadata.reply_to_message_id else DOWN
        names = found.setdefault((message.metadata.message_type, way), set())
        for record in message.content.array_records.values():
            for name in record:
                start, slash, rest = ("", "", name) if name in model else name.rpartition("/")
                start = "<client>" if start.isdigit() else start
                names.add(f"{start}{slash}{'model' if rest in model else rest}")
        for record in (
            *message.content.config_records.values(),
            *message.content.metric_records.values(),
        ):
            names |= set(record)
    return found


def unnamed(method, found) -> list[tuple[str, str, str]]:
    """What was held and stands in no row of the page for the method."""
    rows = [(kind, told) for kind, who, told in table() if method in who or who == ["all"]]
    wrong = []
    for (message, way), names in found.items():
        named = message in (kind for kind, _ in rows)
        kinds = (message, "any") if named else ()
        known = {name for kind, told in rows if kind in kinds for name in told[way]}
        wrong += [(message, way, name) for name in names - known]
    return sorted(wrong)
