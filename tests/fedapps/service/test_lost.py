"""A federation over TLS whose SuperLink is killed and started again, and a node, too."""

import json
import os
import signal

import pytest
from small_runs import left, wait

from fedapps.serverapp import run_in_process
from fedapps.service.deploy import NAME, SUPERLINK, Deployment, plan
from fedapps.settings.config import defaults

SMALL = defaults() | {
    "num-clients": 3,
    "train-fraction": 0.67,  # the last two train
    "partition": "iid",
    "rounds": 12,
    "local-steps": 3,
    "evaluate-every": 12,
    "checkpoint-every": 1,
    "round-timeout": 20.0,
    "min-available-nodes": 2,
    "resume": True,
}


@pytest.mark.slow
def test_what_is_lost_comes_back(tmp_path):
    """A node that trusts another authority stays out. The SuperLink is killed in round 2: the nodes
    stay, and the run goes on from its checkpoint with the numbers of one that was left in peace.
    A node is killed: rounds go on without it, and it is there again in the last one."""
    deployment = plan(tmp_path / "d", 3, tls=True, host="127.0.0.1", data=None)
    deployment.write()
    stranger = plan(tmp_path / "s", 1, tls=True, host="127.0.0.1", data=None)
    stranger = Deployment(**{**vars(stranger), "port": deployment.port})
    stranger.write()
    flwr, folder = deployment.flwr(), tmp_path / "run"
    config = SMALL | {"output-dir": str(folder)}

    def got():
        file = folder / "metrics.jsonl"
        return [json.loads(x) for x in file.read_text().splitlines()] if file.is_file() else []

    def process(name):
        return json.loads((deployment.folder / "run" / f"{name}.json").read_text())["pid"]

    def online():
        return sum(n["status"] == "online" for n in flwr.call("supernode", "list", NAME)["nodes"])

    try:
        deployment.start([SUPERLINK, *deployment.nodes])
        flwr.call("supernode", "register", str(stranger.folder / "keys" / "node-0.pub"), NAME)
        stranger.start(["node-0"])
        wait(lambda: online() == 3, 60, online)
        flwr.submit(config)
        wait(got, 120, got)
        os.kill(process(SUPERLINK), signal.SIGKILL)
        wait(lambda: not deployment.alive(SUPERLINK), 20, got)
        deployment.start([SUPERLINK])
        wait(lambda: online() == 3, 60, online)
        number = flwr.submit(config)
        wait(lambda: len(got()) >= 3, 120, lambda: flwr.log(number)[-20:])
        run_in_process(SMALL | {"rounds": 3, "output-dir": str(tmp_path / "undisturbed")})
        _, undisturbed, _ = left(tmp_path / "undisturbed")
        assert [line["loss"] for line in got()[:3]] == [line["loss"] for line in undisturbed]

        os.kill(process("node-1"), signal.SIGKILL)
        wait(lambda: "missing" in got()[-1]["dropped"], 60, got)
        wait(lambda: online() == 2, 90, online)  # until then Flower lets nobody in under its key
        deployment.start(["node-1"])
        list(flwr.follow(number))
        assert (flwr.status(number)[0], flwr.error(number)) == ("finished:completed", "")
        assert got()[-1]["round"] == SMALL["rounds"] and got()[-1]["valid"] == 2
        assert all(deployment.alive(node) for node in deployment.nodes)

        wait(lambda: not stranger.alive("node-0"), 60, lambda: "the stranger goes on")
        assert "CERTIFICATE_VERIFY_FAILED" in (stranger.folder / "log" / "node-0.log").read_text()
        assert online() == 3
    finally:
        deployment.stop([SUPERLINK, *deployment.nodes])
        stranger.stop(stranger.nodes)
