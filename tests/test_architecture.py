"""A folder imports only from those to its left, and no modules import each other in a circle."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = ["partitions", "clients", "strategies", "fedapps", "experiments"]
TOP = "clientapp, serverapp, plugin, legacy, callbacks, tuning, estimate"  # modules of fedapps
PUBLIC = "partitions, clients, strategies"  # public names of the folders beside fedapps
ROOMS = [f"{PUBLIC}, methods, files, console, settings", "node", "engines", "results", "service",
         TOP, "commands, api, __main__"]  # fmt: skip


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def modules() -> dict[str, set[str]]:
    result = {}
    for folder in ROW:
        for file in (ROOT / folder).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            result[name.removesuffix(".__init__")] = imports(file)
    return result


def test_folders_import_only_to_their_left():
    wrong = [
        f"{name} imports {target}"
        for name, targets in modules().items()
        for target in targets
        if (top := target.split(".")[0]) in ROW and ROW.index(top) > ROW.index(name.split(".")[0])
    ]
    assert not wrong


def room(module: str) -> int | None:
    """The place of a module of fedapps in the row of its rooms."""
    names = module.split(".")
    found = [i for i, room in enumerate(ROOMS) if names[1:] and names[1] in room.split(", ")]
    return found[0] if names[0] == "fedapps" and found else None


def test_rooms_of_fedapps_import_only_to_their_left():
    known = modules()
    wrong = {
        (name, target)
        for name, targets in known.items()
        for target in targets & known.keys()
        if (here := room(name)) is not None and (there := room(target)) is not None
        if there > here
    }
    assert not wrong


def test_every_module_of_fedapps_has_a_room():
    named = {name for name in modules() if name.startswith("fedapps.")}
    assert not {name for name in named if room(name) is None}


def test_files_classes_and_functions_stay_short():
    """A file has 400 lines at most, but for the table of methods; a class 25 methods, a function
    60 lines."""
    long = []
    for file in (f for folder in ROW for f in (ROOT / folder).rglob("*.py")):
        text = file.read_text("utf-8")
        if text.count("\n") > 400 and file.name != "methods.py":
            long.append(file.name)
        for node in ast.walk(ast.parse(text)):
            body = node.body if isinstance(node, ast.ClassDef) else []
            lines = node.end_lineno - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0
            if lines > 60 or sum(isinstance(part, ast.FunctionDef) for part in body) > 25:
                long.append(f"{file.name}: {node.name}")
    assert not long


def test_flowers_older_api_is_imported_in_one_module():
    """Of `flwr.common` only the submodules of its log and its constants are used elsewhere."""
    older = ("flwr.client", "flwr.compat", "flwr.server", "flwr.simulation", "flwr.common")
    kept = ("flwr.common.logger", "flwr.common.constant")
    users = {
        name
        for name, targets in modules().items()
        for target in targets - {"flwr.common"}
        if f"{target}.".startswith(tuple(f"{o}." for o in older)) and not target.startswith(kept)
    }
    assert users == {"clients.compat", "experiments.benchmarks.simulators"}  # it measures Flower


def test_no_circles():
    known = modules()
    graph = {
        name: {t for t in targets if t in known and t != name} for name, targets in known.items()
    }
    for name, targets in graph.items():  # a package's __init__ gathers its modules
        targets -= {name.rpartition(".")[0]}
    list(TopologicalSorter(graph).static_order())  # raises CycleError on a circle
