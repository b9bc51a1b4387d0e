"""A room imports only from those to its left, methods borrow nothing from each other, and no
modules import each other in a circle."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ["partitions", "clients", "strategies", "fedapps", "experiments"]

# Every module belongs to the room with the longest prefix of its name. A folder's own name stands
# for its `__init__`, which offers the public names lazily.
ROOMS = [
    ["fedapps.common"],
    ["partitions"],
    ["clients.core"],
    ["clients.models"],
    ["clients.methods", "clients"],
    ["strategies.maths"],
    ["strategies.core"],
    ["strategies.methods", "strategies"],
    ["fedapps", "fedapps.partitions", "fedapps.clients", "fedapps.strategies", "fedapps.methods",
     "fedapps.files", "fedapps.saved", "fedapps.console", "fedapps.settings", "fedapps.building",
     "fedapps.trainings"],
    ["fedapps.node"],
    ["fedapps.engines"],
    ["fedapps.results"],
    ["fedapps.service"],
    ["fedapps.clientapp", "fedapps.serverapp", "fedapps.own_app", "fedapps.own_clients",
     "fedapps.own_network", "fedapps.own_client_fn", "fedapps.callbacks",
     "fedapps.component_settings", "fedapps.run_settings", "fedapps.former_state",
     "fedapps.estimate", "fedapps.engine_choice"],
    ["fedapps.planning", "fedapps.tuning", "fedapps.reproduction"],
    ["fedapps.commands", "fedapps.api", "fedapps.__main__"],
    ["experiments"],
]  # fmt: skip
# fedapps/__init__ gathers public names; it stands right of what it offers only for a type checker.
PFL_TRAINS_BY = {"strategies.methods.fedavg", "strategies.methods.pfedhn"}
GATHERERS = {"fedapps", "partitions", "clients", "strategies"}


def imports(file: Path) -> set[str]:
    targets: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            targets.add(node.module)
            targets |= {f"{node.module}.{alias.name}" for alias in node.names}
    return targets


@cache
def modules() -> dict[str, set[str]]:
    """Each module of the package with the modules and names that it imports."""
    result = {}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            result[name.removesuffix(".__init__")] = imports(file)
    return result


def room(module: str) -> int:
    """The place of a module's room in the row."""
    best, place = "", -1
    for i, names in enumerate(ROOMS):
        for name in names:
            inside = module == name or module.startswith(f"{name}.")
            if inside and len(name) > len(best):
                best, place = name, i
    return place


def test_rooms_import_only_to_their_left():
    known = modules()
    wrong = []
    for name, targets in known.items():
        for target in sorted(targets & known.keys() - GATHERERS):
            if name not in GATHERERS and room(target) > room(name):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_every_module_of_fedapps_is_named_in_a_room():
    named = {name for names in ROOMS for name in names}
    parts = {".".join(name.split(".")[:2]) for name in modules() if name.startswith("fedapps.")}
    assert not parts - named


def bases(module: str) -> set[str]:
    """The modules from which a module's classes inherit, by the names that it imports."""
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8"))
    origin = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origin[alias.asname or alias.name] = node.module
    inherited = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                plain = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(plain, ast.Name) and plain.id in origin:
                    inherited.add(origin[plain.id])
    return inherited


def test_a_method_borrows_nothing_from_another_method():
    """It imports core, models, maths, its family's base, or the method that it extends. PFL runs
    FedPer's or pFedHN's training before its own part."""
    known = modules()
    wrong = []
    for name, targets in known.items():
        folder = name.rpartition(".")[0]
        if folder not in ("clients.methods", "strategies.methods"):
            continue
        for target in sorted(targets & known.keys()):
            if not target.startswith(f"{folder}.") or target == name:
                continue
            if name == "strategies.methods.pfl" and target in PFL_TRAINS_BY:
                continue
            shared_base = target.rpartition(".")[2].startswith("_")
            if not shared_base and target not in bases(name):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_halves_of_a_method_have_the_same_file_name():
    """A strategy without a client of the same name serves the clients of other methods."""
    clients = {p.name for p in (ROOT / "clients" / "methods").glob("[!_]*.py")}
    strategies = {p.name for p in (ROOT / "strategies" / "methods").glob("[!_]*.py")}
    assert strategies - clients == {"fedavg.py", "fedgma.py"}


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
    # The benchmark measures Flower itself.
    assert users == {"clients.core.flower_fast", "experiments.benchmarks.simulators"}


def literal_keys(file: Path, known: set[str]) -> list[str]:
    """String literals that are `known` keys, or that are read from a `config`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        read_from: ast.expr | None = None
        key: ast.AST = node
        if isinstance(node, ast.Subscript):
            read_from = node.value
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            read_from = node.func.value if node.func.attr == "get" else None
            key = node.args[0]
        if not isinstance(key, ast.Constant):
            continue
        of_config = isinstance(read_from, ast.Name) and read_from.id == "config"
        if of_config or key.value in known:
            found.append(f"{file.relative_to(ROOT)}:{key.lineno} {key.value}")
    return sorted(set(found))


def test_a_key_of_a_message_is_written_by_its_constant():
    """The constants are in the protocol, or in the file of the method that alone knows the key. A
    key with a hyphen or a dot is no other word by chance."""
    protocol = ROOT / "clients" / "core" / "protocol.py"
    known = set()
    for node in ast.parse(protocol.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            known.add(node.value.value)
    distinct = {key for key in known if isinstance(key, str) and ("-" in key or "." in key)}
    assert {"server-round", "query.domain"} <= distinct
    found = []
    for folder in ("clients", "strategies", "fedapps/node"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != protocol:
                found += literal_keys(file, distinct)
    assert not found


def test_no_circles():
    known = modules()
    graph = {}
    for name, targets in known.items():
        package = name.rpartition(".")[0]  # a package's __init__ gathers its modules
        graph[name] = {t for t in targets if t in known and t not in (name, package)}
    for gatherer in GATHERERS:
        graph[gatherer] = set()
    list(TopologicalSorter(graph).static_order())  # raises CycleError on a circle
