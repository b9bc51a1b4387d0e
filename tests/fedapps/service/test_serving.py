"""Serving to nodes: once, again when their data change, and to those that come late; in process,
and once over TLS with keys."""

import contextlib
import csv
import json
import ssl
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from flwr.common.constant import PUBLIC_KEY_ALREADY_IN_USE_MESSAGE as KNOWN
from run_folders import vouch
from safetensors.numpy import load_file, save_file
from small_runs import invoke, wait

import fedapps
import partitions
from fedapps.clientapp import app
from fedapps.engines.flower import Flwr
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.results.card import LONGEST, Card
from fedapps.serverapp import run_in_process
from fedapps.service import serving
from fedapps.service.certificates import make_certificates
from fedapps.service.deploy import SUPERLINK, Deployment, plan
from fedapps.service.finished_run import hand_out, restore_strategy
from fedapps.service.serving import (
    LINE,
    NO_CLIENT,
    check_serving,
    nodes_wanting_model,
    serve,
    serve_once,
)
from fedapps.settings.config import defaults
from partitions.inspect import export

SMALL = defaults() | {"num-clients": 4, "train-fraction": 0.75, "rounds": 2, "local-steps": 3}
FILES = ("model.json", "model.safetensors", "predictions.csv", "report.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The exported data of SMALL's clients; training ones first, the novel one last."""
    federation = partitions.federation(SMALL)
    paths = export(federation, tmp_path_factory.mktemp("data"))
    return [paths[i] for i in np.argsort(federation.novel, kind="stable")]


def trained(method, output):
    run_in_process(SMALL | {"method": method, "output-dir": str(output)})
    return fedapps.load(output)


class Nodes(InProcessGrid):
    """Nodes with data-path and state-dir, over a finished run; the first `there` are there."""

    def __init__(self, run, places):
        config = run.config | {"serving": run.card.line()}
        super().__init__(app, config, places)
        self.there = len(places)

    def get_node_ids(self):
        return list(self.contexts)[: self.there]


def places(folders, tmp_path):
    return [
        {"partition-id": i, "data-path": str(f), "state-dir": str(tmp_path / f"state-{i}")}
        for i, f in enumerate(folders)
    ]


def test_nodes_are_served_once_and_again_when_data_or_run_change(folders, tmp_path):
    run = trained("tent", tmp_path / "run")
    (tmp_path / "photos").mkdir()
    samples = partitions.federation(SMALL).share(0).everything
    x = samples.x[samples.index].numpy()
    np.save(tmp_path / "x.npy", x[:20])
    own = places([folders[0], tmp_path / "x.npy"], tmp_path)
    grid = Nodes(run, own)
    grid.there = 1
    strategy = restore_strategy(run, grid)
    assert serve_once(strategy, run) == {0: "has its model now (training)"}
    grid.there = 2  # a late one, with unlabeled data
    assert serve_once(strategy, run) == {1: "has its model now (novel)"}
    assert serve_once(strategy, run) == {}
    np.save(tmp_path / "x.npy", x[20:50])
    assert serve_once(strategy, run).keys() == {1}
    again: set[int] = set()
    assert serve_once(strategy, run, again).keys() == {0, 1} == again
    assert serve_once(strategy, run, again) == {}
    for i, more in enumerate((set(), {"stream.safetensors"})):  # only the novel one can go on
        assert {f.name for f in (tmp_path / f"state-{i}").iterdir()} == {*FILES, *more}
    here = run.serve(run.inputs(tmp_path / "x.npy")).predictions()
    assert (tmp_path / "state-1" / "predictions.csv").read_text() == here
    assert len(here.splitlines()) == 31
    model = fedapps.load_personal(tmp_path / "state-1")
    expected = run.personalize(tmp_path / "x.npy").update(x[50:])
    assert torch.equal(model.update(x[50:]), expected)
    model.save(tmp_path / "state-1")
    assert serve_once(strategy, run) == {}  # its data are those that it was served with
    other = trained("fedavg", tmp_path / "other")  # the same data, but another run
    assert serve_once(restore_strategy(other, Nodes(other, own)), other).keys() == {0, 1}


@pytest.mark.parametrize("method", ["auto", "bbse"])
def test_a_novel_node_gets_the_same_whichever_training_nodes_are_there(method, folders, tmp_path):
    """The rule and the confusion matrix are those of all training clients, not of the one that is
    connected: what one training client can certify would refuse the rule's alpha."""
    own = {"method": method, "partition": "dirichlet", "auto.alpha": 0.3, "auto.held-out": 0.6}
    run_in_process(SMALL | own | {"output-dir": str(tmp_path / "run")})
    run = fedapps.load(tmp_path / "run")
    expected = run.serve(run.inputs(folders[3]))
    if method == "auto":
        assert "misfit" in expected.report()
    strategy = restore_strategy(run, Nodes(run, places([folders[0], folders[3]], tmp_path)))
    source = dict(strategy.source)
    assert source
    assert serve_once(strategy, run) == {i: SERVED.format(("training", "novel")[i]) for i in (0, 1)}
    assert strategy.source == source
    served = (tmp_path / "state-1" / "predictions.csv").read_text()
    assert served == expected.predictions()


def test_serve_round_chooses_the_model(folders, tmp_path, monkeypatch):
    """The last round's bias favours class 7 alone; the best round's model is as it was trained."""
    run = trained("fedavg", tmp_path / "run")
    last = load_file(run.folder / "model-final.safetensors")
    last["head.bias"] = np.eye(10, dtype=np.float32)[7] * 1e6
    save_file(last, run.folder / "model-final.safetensors")
    vouch(run.folder)

    def stop(seconds):
        raise InterruptedError(seconds)

    monkeypatch.setattr(time, "sleep", stop)
    labels = {}
    for which in ("last", "best"):
        nodes = places([folders[3]], tmp_path / which)
        changes = {"serve-dir": str(run.folder), "serve-round": which, "serve-every": 9.0}
        with pytest.raises(InterruptedError, match="9"):
            serve(Nodes(run, nodes), run.config | changes)
        with (Path(nodes[0]["state-dir"]) / "predictions.csv").open() as file:
            labels[which] = {row["class"] for row in csv.DictReader(file)}
    assert labels["last"] == {"7"} and "7" not in labels["best"]


def test_two_servers_of_one_run_serve_a_node_as_one_does(folders, tmp_path):
    """Both ask before either serves; then a third has nothing to do."""
    run = trained("odpfl-hn", tmp_path / "run")
    one, both = (places([folders[3]], tmp_path / name) for name in ("one", "both"))
    serve_once(restore_strategy(run, Nodes(run, one)), run)
    grid = Nodes(run, both)
    servers = [restore_strategy(run, grid), restore_strategy(run, grid)]
    wanting = [nodes_wanting_model(server, server.present(), None)[0] for server in servers]
    for server, nodes in zip(servers, wanting, strict=True):
        assert len(nodes) == 1 and not hand_out(server, nodes)
    assert serve_once(restore_strategy(run, grid), run) == {}
    for file in FILES:
        expected = Path(one[0]["state-dir"]) / file
        assert (Path(both[0]["state-dir"]) / file).read_bytes() == expected.read_bytes(), file


def test_a_node_that_fails_is_told_and_the_others_are_served(folders, tmp_path):
    run = trained("fedavg", tmp_path / "run")
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 3), np.uint8))
    own = places([folders[0], tmp_path / "x.npy", folders[1]], tmp_path)
    del own[2]["state-dir"]
    strategy = restore_strategy(run, Nodes(run, own))
    lines = serve_once(strategy, run)
    assert lines.pop(NO_CLIENT).startswith("1 node cannot start: ValueError: ")
    assert lines == {0: "has its model now (training)", 2: FAILED}


def test_a_line_is_printed_each_time_that_it_becomes_true(tmp_path, monkeypatch, caplog):
    """A node that is served once more has had no line in between; one that fails has the same."""
    served, failed = {0: "has its model now"}, {1: FAILED}
    turns = iter([served | failed, failed, served | failed | {NO_CLIENT: "1 node cannot start"}])
    monkeypatch.setattr(serving, "FinishedRun", lambda *_: None)
    monkeypatch.setattr(serving, "restore_strategy", lambda *_: SimpleNamespace())
    monkeypatch.setattr(serving, "serve_once", lambda *_: next(turns))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    config = SMALL | {"serve-dir": str(tmp_path)}
    with caplog.at_level("INFO", "flwr"), pytest.raises(StopIteration):
        serve(None, config)
    assert [line.removeprefix(f"{LINE} ") for line in caplog.messages] == [
        "client 0: has its model now",
        f"client 1: {FAILED}",
        "client 0: has its model now",
        "1 node cannot start",
    ]


@pytest.mark.parametrize("damage", ["{", "[]", "{}"])
def test_a_node_whose_report_is_damaged_gets_its_model_anew(damage, folders, tmp_path):
    run = trained("fedavg", tmp_path / "run")
    own = places([folders[0]], tmp_path)
    strategy = restore_strategy(run, Nodes(run, own))
    assert serve_once(strategy, run) == {0: "has its model now (training)"}
    report = tmp_path / "state-0" / "report.json"
    whole = report.read_text()
    report.write_text(damage)
    assert serve_once(strategy, run) == {0: "has its model now (training)"}
    assert report.read_text() == whole
    assert serve_once(strategy, run) == {}


FAILED, SERVED = "it failed; see the log", "has its model now ({})"


@pytest.mark.parametrize(
    ("settings", "training", "novel"),
    [
        ({"method": "fedper"}, FAILED, "fedper has no model without labels"),
        ({"method": "ditto"}, FAILED, SERVED.format("novel")),
        ({"method": "fedthe"}, FAILED, SERVED.format("novel")),
        ({"method": "pfedme"}, FAILED, "pfedme has no model without labels"),
        ({"method": "pfl-nearest"}, FAILED, SERVED.format("novel")),
        (
            {"method": "pfl-nearest", "pfl-nearest.base": "pfedhn"},
            SERVED.format("training"),
            SERVED.format("novel"),
        ),
        (
            {"method": "fedrep", "fedrep.heads": "server"},
            SERVED.format("training"),
            "fedrep has no model without labels",
        ),
        (
            {"method": "pfedme", "pfedme.heads": "server"},
            SERVED.format("training"),
            "pfedme has no model without labels",
        ),
        (
            {"method": "lg-fedavg", "lg-fedavg.fedavg-rounds": 1},
            FAILED,
            "lg-fedavg has no model without labels",
        ),
    ],
)
def test_a_personal_part_must_be_on_its_node_or_arrive(
    settings, training, novel, folders, tmp_path
):
    """A training node has its model only where its state-dir holds its part, or the server does; a
    novel one has the global model, if there is one."""
    run_in_process(SMALL | settings | {"output-dir": str(tmp_path / "run")})
    run = fedapps.load(tmp_path / "run")
    strategy = restore_strategy(run, Nodes(run, places([folders[0], folders[3]], tmp_path)))
    assert serve_once(strategy, run) == {0: training, 1: novel}


@pytest.mark.parametrize(
    ("key", "value"),
    [("serve-every", 0.0), ("serve-timeout", float("nan")), ("serve-dir", "results/x")],
)
def test_settings_of_serving_are_checked(key, value):
    config = defaults() | {"serve-dir": "/run"} | {key: value}
    with pytest.raises(ValueError, match=f"{key} is"):
        check_serving(config)


def test_a_card_of_very_many_classes_fits_a_setting():
    card = Card("fedavg", "omniglot", "mlp", (1, 28, 28), tuple("abc"), 255.0, (0.5,), (0.25,))
    many = replace(card, classes=tuple(f"character {i}" for i in range(1623)))
    assert Card.parse(card.line()) == Card.parse(card.text()) == card
    assert len(many.line()) < LONGEST
    assert Card.parse(many.line()) == replace(many, classes=tuple(map(str, range(1623))))


def test_what_a_deployment_writes(tmp_path):
    deployment = plan(tmp_path / "d", 2, tls=True, host="127.0.0.1", data=None)
    deployment.write()
    assert Deployment.read(tmp_path / "d") == deployment
    for secret in ("keys/node-0", "keys/node-1", "tls/ca.key", "tls/server.key"):
        assert (tmp_path / "d" / secret).stat().st_mode & 0o777 == 0o600
    readme = (tmp_path / "d" / "README.md").read_text()
    assert len(readme.strip().splitlines()) == 6 and "--run-config" in readme
    written = tomllib.loads((tmp_path / "d" / "run.toml").read_text())
    assert written == {"protect": True}  # nodes of others may send anything
    assert (tmp_path / "d" / "superlink.db").stat().st_mode & 0o777 == 0o600
    for private in ("state", "state/node-0", "state/node-1"):
        assert (tmp_path / "d" / private).stat().st_mode & 0o777 == 0o700
    script = (tmp_path / "d" / "start-node-1.sh").read_text()
    assert "partition-id=1 num-partitions=2" in script and "--root-certificates" in script
    assert not deployment.alive(SUPERLINK)


def test_certificates_hold_for_their_host_alone(tmp_path):
    """TLS handshakes in memory: an authority vouches for its host, an address or a name, but not
    for another host, and another authority does not."""
    for folder, host in (("a", "127.0.0.1"), ("b", "127.0.0.1"), ("c", "flower.example")):
        make_certificates(tmp_path / folder, host)

    def handshake(folder, authority, host):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / folder / "server.pem", tmp_path / folder / "server.key")
        client = ssl.create_default_context(cafile=tmp_path / authority / "ca.crt")
        client.verify_flags |= ssl.VERIFY_X509_STRICT
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(down, up, server_hostname=host),
            server.wrap_bio(up, down, server_side=True),
        )
        for end in ends * 4:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return ends[0].version()

    assert handshake("a", "a", "127.0.0.1") == handshake("c", "c", "flower.example") == "TLSv1.3"
    for arguments in (("a", "a", "127.0.0.2"), ("a", "b", "127.0.0.1"), ("c", "c", "a.example")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(*arguments)


def test_processes_are_started_and_stopped(tmp_path, monkeypatch):
    """Nodes whose scripts sleep, one of them in a child: stopping one leaves the other alone.
    Meanwhile the clock is set two seconds forward."""
    folder = tmp_path / "d"
    deployment = plan(folder, 2, tls=False, host="127.0.0.1", data=None)
    deployment.write()
    for node in deployment.nodes:
        (folder / f"start-{node}.sh").write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    try:
        deployment.start(["node-0", "node-1"])
        pid = json.loads((folder / "run" / "node-0.json").read_text())["pid"]
        children = psutil.Process(pid).children
        wait(lambda: len(children()) == 1, 10, lambda: "no child")
        (child,) = children()
        boot = psutil.boot_time()
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 2)
        shown = invoke("deploy", folder, "--status").output.split()
        assert " ".join(shown) == "superlink: down node-0: alive node-1: alive"
        deployment.stop(["node-0"])
        assert not child.is_running() and not deployment.alive("node-0")
        assert deployment.alive("node-1")
        assert "may be running" in invoke("deploy", folder, "--nodes", 3, code=2).output
    finally:
        deployment.stop(deployment.nodes)


def test_a_deployment_is_not_replaced(tmp_path):
    """Its nodes, perhaps on other machines, have keys and certificates of it."""
    words = ("deploy", str(tmp_path / "fed"), "--nodes", "1", "--tls")
    invoke(*words)
    authority = (tmp_path / "fed" / "tls" / "ca.crt").read_bytes()
    said = invoke(*words, code=2).output
    assert f"start it: fedapps deploy {tmp_path / 'fed'} --start; for a new one name" in said
    assert (tmp_path / "fed" / "tls" / "ca.crt").read_bytes() == authority


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"ports": [1], "data": 3}'])
def test_a_damaged_deployment_is_named(content, tmp_path):
    file = tmp_path / "deployment.json"
    file.write_text(content)
    for words in (("deploy", str(tmp_path), "--status"), ("status", str(tmp_path))):
        assert f"error: {file} is damaged: " in invoke(*words, code=2).output


def test_a_copy_of_a_deployment_does_not_start_the_first_one(tmp_path):
    """Its scripts name the first one's database, state and keys."""
    first = tmp_path / "a b"
    plan(first, 1, tls=False, host="127.0.0.1", data=None).write()
    Deployment.read(first)._check_place("node-0")
    first.rename(tmp_path / "moved")
    expected = f"start-node-0.sh starts the deployment in {first}, from which this folder was moved"
    with pytest.raises(ValueError, match=expected):
        Deployment.read(tmp_path / "moved").start(["node-0"])


def test_a_key_that_is_registered_already_is_no_error(tmp_path, monkeypatch):
    """By Flower's own sentence; whatever else it says goes on."""
    deployment, said = Deployment(tmp_path, "127.0.0.1", 9, True, (10,), ("",)), [KNOWN, "no room"]
    asked = []

    def call(self, *arguments):
        asked.append(arguments)
        raise RuntimeError(f"flwr supernode failed: Failed to register: {said.pop(0)} (code 7)")

    monkeypatch.setattr(Flwr, "call", call)
    deployment.register("node-0")
    with pytest.raises(RuntimeError, match="no room"):
        deployment.register("node-0")
    key = str(tmp_path / "keys" / "node-0.pub")
    assert asked == [("supernode", "register", key, "deployment")] * 2
