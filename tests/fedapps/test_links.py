"""What is written is new: where a link stands, its target keeps its content."""

import ast
import os
from pathlib import Path

import pytest
from small_runs import SMALL, fedapps, federate

from fedapps.common.new_files import append_to, create, make_folder, remove_folder, replaced
from fedapps.files import append_text, locked, write_text
from fedapps.results.plot import save
from fedapps.service.deploy import plan
from partitions import federation
from partitions.inspect import export

ROOT = Path(__file__).parents[2]
WRITES = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}
# Files whose folder this process has just made, and those of a checkout.
NEW_FOLDERS = {"fedapps/engines/staging.py", "fedapps/service/model_card.py", "partitions/cache.py"}
CHECKOUT = {"fedapps/settings/written_files.py"}


@pytest.fixture
def theirs(tmp_path):
    """A folder of somebody else, and a function that asserts that it is as it was."""
    folder = tmp_path / "theirs"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("file", "checkpoints/round-00000001.safetensors", "checkpoints/keep"):
        (folder / name).write_text("theirs\n")
    before = sorted(folder.rglob("*"))

    def unchanged():
        assert sorted(folder.rglob("*")) == before
        return all(file.read_text() == "theirs\n" for file in before if file.is_file())

    return folder, unchanged


def test_a_file_in_place_of_a_link(theirs, tmp_path):
    """New, replaced or appended to, by both kinds of link; also of a target that is missing."""
    folder, unchanged = theirs
    for number, link in enumerate((os.symlink, os.link)):
        for name in ("created", "replaced", "appended", "text"):
            link(folder / "file", tmp_path / f"{name}{number}")
        with create(tmp_path / f"created{number}") as file:
            file.write(b"ours")
        with replaced(tmp_path / f"replaced{number}") as new:
            new.write_text("ours")
        with append_to(tmp_path / f"appended{number}") as file:
            file.write(b"ours")
        append_text(tmp_path / f"text{number}", "ours")
        for name in ("created", "replaced"):
            assert (tmp_path / f"{name}{number}").read_text() == "ours"
        for name in ("appended", "text"):
            assert (tmp_path / f"{name}{number}").read_text() == "theirs\nours"
        assert unchanged()
    (tmp_path / "nowhere").symlink_to(folder / "missing")
    append_text(tmp_path / "nowhere", "ours")
    assert (tmp_path / "nowhere").read_text() == "ours" and unchanged()


def test_a_file_that_is_not_finished_replaces_nothing(tmp_path):
    (tmp_path / "file").write_text("former")
    with pytest.raises(OSError, match="full"), replaced(tmp_path / "file") as new:
        new.write_text("half")
        raise OSError("full")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "former"


def test_a_temporary_name_that_somebody_took_is_no_way_out(theirs, tmp_path):
    """Its number is this process's, which others can guess."""
    folder, unchanged = theirs
    (tmp_path / f".table.{os.getpid()}").symlink_to(folder / "file")
    write_text(tmp_path / "table", "ours")
    assert (tmp_path / "table").read_text() == "ours" and unchanged()


def test_a_folder_in_place_of_a_link(theirs, tmp_path):
    folder, unchanged = theirs
    for change in (make_folder, remove_folder):
        (tmp_path / "link").symlink_to(folder / "checkpoints")
        change(tmp_path / "link")
        assert unchanged() and (tmp_path / "link").is_dir() == (change is make_folder)
        remove_folder(tmp_path / "link")


def test_a_run_in_a_folder_of_links(theirs, tmp_path):
    """Its own checkpoints are written and removed, those of the other folder are not."""
    folder, unchanged = theirs
    run = tmp_path / "out" / "fedper-seed0"
    run.mkdir(parents=True)
    for name in ("runs.txt", "report.html", ".gitignore"):
        (run.parent / name).symlink_to(folder / "file")
    for name in ("config.toml", "metrics.jsonl", "summary.json", "model.safetensors", "errors.log",
                 "serving.json", "token.json", ".lock"):  # fmt: skip
        (run / name).symlink_to(folder / "file")
    for name in ("checkpoints", "clients", ".clients"):
        (run / name).symlink_to(folder / "checkpoints")
    fedapps("run", "num-clients=4", "rounds=3", "local-steps=1", "checkpoint-every=1", "--engine",
            "in-process", "--methods", "fedper", "--output", run.parent)  # fmt: skip
    assert unchanged()
    links = [file.name for file in run.parent.rglob("*") if file.is_symlink()]
    assert links == [".gitignore"]  # nothing is written there if the folder exists
    assert "fedper-seed0" in (run.parent / "runs.txt").read_text()


def test_a_checkpoint_in_a_linked_folder_removes_none_there(theirs, tmp_path):
    """A run that goes on from a copy of links; its fourth checkpoint would remove the first."""
    folder, unchanged = theirs
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(folder / "checkpoints")
    changes = {"checkpoint-every": 1, "rounds": 4, "resume": True}
    federate(method="fedavg", **changes, **{"output-dir": str(tmp_path / "run")})
    assert unchanged()


def test_a_lock_in_place_of_a_link(theirs, tmp_path):
    folder, unchanged = theirs
    (tmp_path / ".lock").symlink_to(folder / "file")
    with locked(tmp_path):
        assert (tmp_path / ".lock").is_file() and not (tmp_path / ".lock").is_symlink()
    assert unchanged()


def test_a_deployment_in_a_folder_of_links(theirs, tmp_path):
    folder, unchanged = theirs
    place = tmp_path / "d"
    for name in ("tls", "keys"):
        (place / name).mkdir(parents=True)
    for name in ("tls/ca.crt", "tls/ca.key", "tls/server.pem", "keys/node-0", "keys/node-0.pub",
                 "superlink.db", "start-node-0.sh", "deployment.json", "README.md"):  # fmt: skip
        (place / name).symlink_to(folder / "file")
    for name in ("state", "log", "run", "home"):
        (place / name).symlink_to(folder / "checkpoints")
    deployment = plan(place, 1, tls=True, host="127.0.0.1", data=None)
    deployment.write()
    (place / "start-node-0.sh").write_text("#!/bin/sh\necho started\n")
    deployment.start(["node-0"])
    deployment.stop(["node-0"])
    assert unchanged() and not [file for file in place.rglob("*") if file.is_symlink()]
    assert (place / "log" / "node-0.log").is_file()


def test_figures_tables_and_exported_data_replace_links(theirs, tmp_path):
    folder, unchanged = theirs
    from matplotlib.figure import Figure

    (tmp_path / "figure.svg").symlink_to(folder / "file")
    save(Figure(), tmp_path / "figure.svg")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "client-0").symlink_to(folder / "checkpoints")
    export(federation(SMALL | {"num-clients": 2, "train-fraction": 0.5}), tmp_path / "data")
    assert unchanged() and not (tmp_path / "figure.svg").is_symlink()


def test_no_other_place_opens_a_file_to_write():
    """By their names: methods of a path that write, and `open` with a mode that does."""
    found = set()
    for package in ("clients", "fedapps", "partitions", "strategies"):
        for file in (ROOT / package).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            text = file.read_text("utf-8")
            if not any(word in text for word in ("open(", *WRITES)):  # to parse it takes long
                continue
            tree = ast.parse(text)
            if any(_writes(node) for node in ast.walk(tree) if isinstance(node, ast.Call)):
                found.add(name)
    assert found - NEW_FOLDERS - CHECKOUT == {"fedapps/common/new_files.py", "fedapps/tuning.py"}


def _writes(call):
    """Whether a call opens a file to write. `fedapps.files.write_text` is no method."""
    if not isinstance(call.func, ast.Attribute):
        return isinstance(call.func, ast.Name) and call.func.id == "open"
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    to_write = any(set(text) & set("wax+") and len(text) < 4 for text in texts[:1])
    return call.func.attr in WRITES or (call.func.attr in ("open", "fdopen") and to_write)
