"""A federation over TLS with a key per node: trained, then served to one that comes late."""

import signal
import subprocess

import numpy as np
import pytest
from small_runs import wait

import fedapps
import partitions
from fedapps.engines.flower import COMMANDS
from fedapps.service.certificates import make_node_key
from fedapps.service.deploy import NAME, SUPERLINK, Deployment, plan
from fedapps.settings.config import defaults
from partitions.inspect import export
from partitions.shares import Share

SMALL = defaults() | {"num-clients": 4, "train-fraction": 0.75, "rounds": 2, "local-steps": 3}


@pytest.fixture
def folders(tmp_path):
    """The exported data of SMALL's clients; training ones first, the novel one last."""
    federation = partitions.federation(SMALL)
    paths = export(federation, tmp_path / "data")
    return [paths[i] for i in np.argsort(federation.novel, kind="stable")]


@pytest.mark.slow
def test_a_late_node_over_tls(folders, tmp_path):
    """Three nodes train FedTTA++ and ODPFL-HN; one without a registered key stays out; one that
    comes later, with unlabeled data, gets both models, and predicts as `personalize` does."""
    late = tmp_path / "unlabeled.npy"
    np.save(late, Share.load(folders[3])[0].everything.x.numpy())
    deployment = plan(tmp_path / "d", 4, tls=True, host="127.0.0.1", data=None)
    data = (*map(str, folders[:3]), str(late))
    deployment = Deployment(**{**vars(deployment), "data": data})
    deployment.write()
    flwr, results = deployment.flwr(), tmp_path / "results"
    log = deployment.folder / "log"
    own = deployment.folder / "keys" / "node-3"
    try:
        deployment.start([SUPERLINK, "node-0", "node-1", "node-2"])
        methods = {"method": "fedtta++,odpfl-hn", "num-clients": 3, "output-dir": str(results)}
        number = flwr.submit(SMALL | methods | {"evaluate-every": 2})
        registered = own.read_bytes()
        make_node_key(own)
        deployment.start(["node-3"])
        wait(lambda: not deployment.alive("node-3"), 60, (log / "node-3.log").read_text)
        list(flwr.follow(number))  # until the run ends
        assert (flwr.status(number)[0], flwr.error(number)) == ("finished:completed", "")

        own.unlink()
        own.write_bytes(registered)
        own.chmod(0o600)
        deployment.stop(["node-0", "node-1", "node-2"])  # who is gone need not be waited for
        deployment.start(["node-3"])
        for method, end in (("fedtta++", signal.SIGINT), ("odpfl-hn", signal.SIGTERM)):
            run = fedapps.load(results / f"{method}-seed0")
            got = serve(run.folder, deployment, 3, end)
            runs = flwr.call("ls", NAME)["runs"]
            assert all(run["status"].startswith("finished") for run in runs)
            predictions = deployment.folder / "state" / "node-3" / "predictions.csv"
            assert predictions.read_text() == run.serve(run.inputs(late)).predictions()
            assert "client 3: has its model now (novel)" in got and "stopped" in got
    finally:
        deployment.stop([SUPERLINK, *deployment.nodes])
    assert not any(deployment.alive(name) for name in [SUPERLINK, *deployment.nodes])


def serve(run, deployment, client, end):
    """What `fedapps serve` says until it has served that client and gets the signal `end`."""
    command = [COMMANDS / "fedapps", "serve", run, "--deployment", deployment.folder]
    with subprocess.Popen(
        [*map(str, command), "--every", "1"], stdout=subprocess.PIPE, text=True
    ) as process:
        got = ""
        is_sent = False  # a second signal ends the process at once
        for line in process.stdout:
            got += line
            if f"client {client}:" in line and not is_sent:
                process.send_signal(end)
                is_sent = True
        assert process.wait(60) == 128 + end
    return got
