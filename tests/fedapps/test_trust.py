"""Run folders, servers and messages that name code, files or formulas of their choice."""

import csv
import io
import os
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from small_runs import ALL_SAMPLES, COMMAND, SMALL, exit_code, forked
from torch import nn

import fedapps
from clients.core.protocol import START_ERROR
from clients.models import build_model
from fedapps.callbacks import make_callbacks
from fedapps.clientapp import app, make_client
from fedapps.common import external_code
from fedapps.engines.in_process_grid import respond
from fedapps.own_app import client_app
from fedapps.results.card import Card
from fedapps.serverapp import run_in_process
from fedapps.service.delivery import PersonalizationResult
from fedapps.settings.config import defaults, override
from partitions import federation
from partitions.datasets.loading import load
from partitions.rules.registry import PARTITIONS
from strategies.core.reply_checks import checked_values

SCRIPT = Path(sys.executable).parent / "fedapps"
HELPER = """
from torch import nn

open({mark!r}, "w").close()

class Net(nn.Sequential):
    def __init__(self, num_classes: int):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "tent-seed0"
    run_in_process(SMALL | {"num-clients": 4, "method": "tent", "output-dir": str(folder)})
    return folder


@pytest.fixture
def sent(finished, tmp_path):
    """Sends a run whose saved configuration has changes; returns its folder."""

    def send(changes):
        folder = tmp_path / "sent" / "tent-seed0"
        folder.mkdir(parents=True)
        for file in finished.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = tomllib.loads((finished / "config.toml").read_text()) | changes
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        np.savez(tmp_path / "data.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
        return folder

    return send


def called(*arguments):
    done = CliRunner().invoke(COMMAND, [str(one) for one in arguments], env={"COLUMNS": "300"})
    assert isinstance(done.exception, SystemExit | None), done.exception
    return done.exit_code, " ".join(done.output.split())


READING = {
    "show": ["show", "RUN"],
    "personalize": ["personalize", "RUN", "DATA", "--output", "OUT"],
    "confusion": ["plot", "RUN", "confusion", "--output", "OUT/a.png"],
    "embeddings": ["plot", "RUN", "embeddings", "--output", "OUT/a.png"],
    "traces": ["plot", "RUN", "traces", "--output", "OUT/a.png"],
    "from": ["run", "--from", "RUN", "--engine", "in-process", "--output", "OUT"],
    "resume": ["run", "--resume", "RUN", "--engine", "in-process"],
    "serve": ["serve", "RUN", "--superlink", "nobody"],
    "table": ["table", "RUN"],
    "report": ["report", "RUN"],
    "curves": ["plot", "RUN", "curves", "--output", "OUT/a.png"],
}
IMPORTING_NOTHING = ("table", "report", "curves")


def command(words, run, tmp_path):
    places = {"RUN": run, "DATA": tmp_path / "data.npz", "OUT": tmp_path / "out"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    return called(*words)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "model") for name in READING),
        *(("show", key) for key in ("client-models", "dataset", "partition", "method")),
    ],
)
def test_a_saved_run_runs_no_statement(name, key, sent, tmp_path):
    mark = tmp_path / "mark"
    statement = f"open({str(mark)!r}, 'w').close()"
    run = sent({key: "timeit:timeit", "timeit:timeit.stmt": statement})
    code, said = command(READING[name], run, tmp_path)
    assert (code, mark.exists()) == (0 if name in IMPORTING_NOTHING else 2, False)
    if name not in IMPORTING_NOTHING:
        assert "--allow timeit:timeit" in said
        assert not (tmp_path / "out").exists()


def test_what_only_a_setting_or_a_callback_names_is_refused_too(sent, tmp_path):
    run = sent({"no_such_module:net.stmt": "pass"})
    assert "--allow no_such_module:net" in command(READING["show"], run, tmp_path)[1]
    with pytest.raises(ValueError, match="--allow os:abort"):
        make_callbacks(defaults() | {"callbacks": "os:abort"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_module_where_one_stands_is_imported_for_the_users_word_alone(
    sent, tmp_path, monkeypatch
):
    """By the real command, whose own start once opened the folder to all imports."""
    mark = tmp_path / "mark"
    (tmp_path / "helper.py").write_text(HELPER.format(mark=str(mark)))
    run = sent({"model": "helper:Net"})
    monkeypatch.delenv(external_code.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])

    def started(*options):
        """In a process of its own, which is forked: to import what it needs takes seconds."""

        def call():
            sys.argv = [str(SCRIPT), "show", str(run), *options]
            try:
                runpy.run_path(str(SCRIPT), run_name="__main__")
            except SystemExit as error:
                return error.code

        return exit_code(forked(call)), mark.exists()

    assert started() == (2, False)
    assert started("--allow", "helper:Other") == (2, False)
    assert started("--allow", "helper:Net") == (0, True)


def test_the_users_word(tmp_path, monkeypatch):
    """The environment, a list of the user's own, and Python; each for that very reference."""
    changes = {"model": "torch.nn:Identity"}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"--allow torch\.nn:Identity"):
        override(defaults(), changes)
    monkeypatch.setenv(external_code.VARIABLE, "torch.nn:Flatten, torch.nn:Identity")
    override(defaults(), changes)
    monkeypatch.setenv(external_code.VARIABLE, "torch.nn:Identity2")
    with pytest.raises(ValueError, match="have not allowed it"):
        override(defaults(), changes)
    fedapps.allow("torch.nn:Identity")
    override(defaults(), changes)
    assert os.environ[external_code.VARIABLE] == "torch.nn:Identity2,torch.nn:Identity"
    with pytest.raises(ValueError, match=r"'torch\.nn' cannot be allowed"):
        fedapps.allow("torch.nn")
    assert "--allow" in called("show", tmp_path, "--allow", "*")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('allow = ["torch.nn:Identity"]', ""),
        ("allow = [1]", "must be a list"),
        ("=", "no valid TOML"),
    ],
)
def test_the_users_own_list(text, words, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "fedapps").mkdir()
    (tmp_path / "fedapps" / "config.toml").write_text(text)
    if not words:
        override(defaults(), {"model": "torch.nn:Identity"})
        return
    with pytest.raises(ValueError, match=words):
        override(defaults(), {"model": "torch.nn:Identity"})


def test_what_a_configuration_names():
    got = {
        "model": "a:b",
        "methods": ["c:d x=1", "fedavg"],
        "e:f.key": "2",
        "n": 3,
        "path": "C:/x",
    }
    assert sorted(external_code.named(got)) == ["a:b", "c:d", "e:f"]
    assert sorted(external_code.named({"client-models": "a:b, mlp,c.d:e", "g:h": {}})) == [
        "a:b",
        "c.d:e",
        "g:h",
    ]


STATEMENTS = []


def unannotated(num_classes=3):
    STATEMENTS.append(num_classes)


def wrongly_annotated(num_classes=3) -> int:
    STATEMENTS.append(num_classes)
    return num_classes


def unknown_annotation(num_classes=3) -> "Nowhere":  # noqa: F821
    STATEMENTS.append(num_classes)


def lying() -> tuple[np.ndarray, np.ndarray]:
    return 3


def network(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))


def test_a_function_that_declares_no_type_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(**globals()))
    external_code.allow("theirs:unannotated")
    words = r"is a function without a return annotation; .*annotated to return one \(-> torch.nn"
    with pytest.raises(ValueError, match=words):
        build_model("theirs:unannotated", (4,), 3, 0)


@pytest.mark.parametrize("name", ["unannotated", "wrongly_annotated", "unknown_annotation", "nn"])
@pytest.mark.parametrize(
    "use",
    [
        lambda name: build_model(name, (4,), 3, 0),
        load,
        lambda name: PARTITIONS[name].make(defaults() | {"partition": name}, np.zeros(3, bool)),
        lambda name: make_callbacks(defaults() | {"callbacks": name}),
    ],
    ids=["model", "dataset", "partition", "callback"],
)
def test_only_what_is_declared_for_the_purpose_is_called(name, use, monkeypatch):
    """Even of what the user allowed."""
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(**globals()))
    for reference in (f"theirs:{name}", "timeit:timeit"):
        external_code.allow(reference)
        with pytest.raises(ValueError, match=f"'{reference}' is "):
            use(reference)
    assert not STATEMENTS


def test_what_is_declared_is_called(monkeypatch):
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(**globals()))
    external_code.allow("theirs:network", "theirs:lying")
    assert build_model("theirs:network", (4,), 3, 0)(torch.ones(2, 4)).shape == (2, 3)
    with pytest.raises(ValueError, match="'theirs:lying' must return inputs and labels"):
        load("theirs:lying")


def context(run=None, **node):
    """A context of a real node, the last of four."""
    config = {"partition-id": 3, "num-partitions": 4} | {
        k.replace("_", "-"): v for k, v in node.items()
    }
    run = SMALL | ALL_SAMPLES | {"num-clients": 4, "method": "fedavg"} | (run or {})
    return Context(1, 9, config, RecordDict(), run)


def answered(of, client_app=app, **got):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    message = Message(RecordDict({"config": ConfigRecord(got)}), 9, "query")
    return respond(client_app, message, of)


def why(reply):
    """Why the client cannot start, as the server learns it."""
    return reply.content["properties"].get("error", "")


@pytest.mark.parametrize(("words", "kept"), [(60, True), (200, False)])
def test_a_client_that_cannot_start_says_why_to_the_end(words, kept, monkeypatch):
    """300 characters are whole, of 1000 the first ones are left. A zero-width space of a column's
    name is escaped, since the server takes printable texts alone."""

    def fail(*arguments):
        raise ValueError("\u200bage " + "text " * words + "write this")

    monkeypatch.setattr("fedapps.clientapp.make_client", fail)
    said = checked_values({START_ERROR: why(answered(context()))})[START_ERROR]
    assert said.startswith("ValueError: \\u200bage text")
    assert ("write this" in said) == kept
    assert said.endswith(" …") != kept


def test_a_server_runs_no_code_on_a_node(monkeypatch):
    """By its run's configuration, or by a message; but what the node's own configuration allows."""
    loaded = []
    module = SimpleNamespace(
        __getattr__=None, Net=type("Net", (nn.Sequential,), {"__init__": init})
    )
    monkeypatch.setitem(sys.modules, "theirs", module)
    monkeypatch.setattr(
        "fedapps.common.external_code._imported", lambda name: loaded.append(name) or module.Net
    )
    reply = answered(context({"model": "theirs:Net"}))
    assert "--allow theirs:Net" in why(reply) and not loaded
    reply = answered(context(), method="theirs:Net")
    assert "--allow theirs:Net" in why(reply) and not loaded
    reply = answered(context({"model": "theirs:Net"}, allow="other:Net,theirs:Net"))
    assert not why(reply)
    assert loaded


def init(self, num_classes):
    nn.Sequential.__init__(self, nn.Flatten(), nn.Linear(64, num_classes))


@pytest.mark.parametrize("own", ["", "FOLDER/mine"])
def test_a_server_has_a_node_read_no_data_of_its_choice(own, tmp_path, monkeypatch):
    """Neither by an absolute path, nor by one that leaves the node's folder of data; the server is
    not informed whether there is such a file."""
    monkeypatch.delenv("FEDAPPS_DATA_DIR", raising=False)
    (tmp_path / "mine").mkdir()
    own = own.replace("FOLDER", str(tmp_path))
    np.savez(tmp_path / "secret.npz", x=np.eye(40), y=np.arange(40) % 2)
    monkeypatch.chdir(tmp_path)  # the folder in which the node was started
    node = {"data_dir": own} if own else {}
    said = []
    for name in ("secret.npz", "none.npz"):
        for got in (
            {"dataset": str(tmp_path / name)},
            {"dataset": name, "data-dir": str(tmp_path)},
            {"dataset": f"../{name}"},
            {"dataset": name},
        ):
            with pytest.raises(ValueError) as error:
                make_client(context({"partition": "iid"} | got, **node), "fedavg")
            said.append(str(error.value).replace(name, "NAME"))
    assert said[:4] == said[4:]
    if own:
        (tmp_path / "secret.npz").rename(tmp_path / "mine" / "own.npz")
        got = {"partition": "iid", "dataset": "own.npz", "data-dir": "/elsewhere"}
        assert len(make_client(context(got, **node), "fedavg").share.everything)


def test_a_message_names_no_file_of_a_node(tmp_path):
    """An app of one's own takes the method of a message for the name of what its client keeps."""

    def data(_):
        return federation(SMALL).share(0).everything[:]

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10))

    there = context(state_dir=str(tmp_path / "state"))
    mine: ClientApp = client_app("fedper", model=net, data=data)
    reply = answered(there, mine, method="../outside")
    assert "'../outside' is no method" in why(reply)
    assert not why(answered(there, mine, method="fedper"))


def test_predictions_are_no_formulas():
    card = Card("tent", "mine", "mlp", (4,), ("=cmd()", "bee"), 1.0)
    inputs = SimpleNamespace(names=["-1+2", "a"])
    served = PersonalizationResult(
        card, nn.Identity(), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), inputs, {}
    )
    rows = [row[:2] for row in csv.reader(io.StringIO(served.predictions()))]
    assert rows == [["sample", "class"], ["'-1+2", "'=cmd()"], ["a", "bee"]]


@pytest.mark.parametrize("name", ['a" allow="os:abort', "a\nb", "a\\"])
def test_a_folders_name_sets_nothing_of_a_node(name, tmp_path):
    """Neither that of the deployment nor that of a node's data."""
    (tmp_path / "data" / name).mkdir(parents=True)
    for folder, data in ((tmp_path / name, None), (tmp_path / "fed", tmp_path / "data")):
        words = ["deploy", folder, "--nodes", 1, *(["--data", data] if data else [])]
        code, said = called(*words)
        assert code == 2 and "rename the folder" in said
        assert not folder.exists()
