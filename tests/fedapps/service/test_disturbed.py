"""Real nodes that stop for a minute, share a key, or meet an expired or another certificate."""

import json
import shutil
import signal
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from small_runs import fedapps, federate, wait

from fedapps.service import certificates
from fedapps.service.deploy import NAME, SUPERLINK, Deployment, plan
from fedapps.settings.config import defaults

SMALL = defaults() | {
    "num-clients": 2,
    "train-fraction": 1.0,
    "partition": "iid",
    "rounds": 40,
    "local-steps": 3,
    "evaluate-every": 40,
    "checkpoint-every": 0,
    "round-timeout": 60.0,
    "min-available-nodes": 1,
}


def test_an_expired_certificate_is_named_wherever_a_node_starts(tmp_path, monkeypatch):
    """Its last day was yesterday: no process starts, `--status` names it, and no run is served."""

    class Earlier(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=certificates.DAYS + 1)

    deployment = plan(tmp_path / "d", 1, tls=True, host="127.0.0.1", data=None)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Earlier)
        deployment.write()
    ended = datetime.now(UTC) - timedelta(days=1)
    named = f"to {ended:%Y-%m-%d}, so every node"
    for names in ([SUPERLINK, "node-0"], ["node-0"]):
        with pytest.raises(RuntimeError, match=named):
            deployment.start(names)
    assert not deployment.alive(SUPERLINK) and not deployment.alive("node-0")
    assert named in fedapps("deploy", deployment.folder, "--status", code=1)
    federate(method="fedtta++", rounds=1, **{"output-dir": str(tmp_path / "run")})
    assert named in fedapps("serve", tmp_path / "run", "--deployment", deployment.folder, code=2)


@pytest.mark.slow
def test_a_node_that_stops_for_a_minute_and_one_with_anothers_key(tmp_path):
    """Node 1 is stopped in round 1: rounds go on without it, and it takes part again afterwards. A
    node with node 0's key, and one that the server's certificate does not convince, stay out."""
    deployment = plan(tmp_path / "d", 2, tls=True, host="127.0.0.1", data=None)
    deployment.write()
    twin, other = (
        Deployment(**{**vars(plan(tmp_path / name, 1, tls=True, host="127.0.0.1", data=None)),
                      "port": deployment.port})
        for name in ("twin", "other")
    )  # fmt: skip
    for stranger in (twin, other):
        stranger.write()
    for file in ("keys/node-0", "tls/ca.crt"):
        shutil.copy(deployment.folder / file, twin.folder / file)
    shutil.copy(deployment.folder / "tls" / "server.pem", other.folder / "tls" / "ca.crt")
    flwr, folder = deployment.flwr(), tmp_path / "run"

    def got():
        file = folder / "metrics.jsonl"
        return [json.loads(x) for x in file.read_text().splitlines()] if file.is_file() else []

    def online():
        return sum(n["status"] == "online" for n in flwr.call("supernode", "list", NAME)["nodes"])

    def send(number):
        pid = json.loads((deployment.folder / "run" / "node-1.json").read_text())["pid"]
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            process.send_signal(number)

    try:
        deployment.start([SUPERLINK, *deployment.nodes])
        wait(lambda: online() == 2, 180, online)
        for stranger in (twin, other):
            stranger.start(["node-0"])
        number = flwr.submit(SMALL | {"output-dir": str(folder)})
        wait(got, 600, lambda: flwr.log(number)[-20:])
        send(signal.SIGSTOP)
        wait(lambda: got()[-1]["valid"] == 1, 300, got)
        stopped = len(got())
        wait(lambda: online() == 1, 300, online)
        assert deployment.alive("node-1")
        send(signal.SIGCONT)
        wait(lambda: any(x["valid"] == 2 for x in got()[stopped:]), 600, got)
        flwr.cancel(number)
        assert online() == 2
        log = {name: (d.folder / "log" / "node-0.log").read_text() for name, d in
               (("twin", twin), ("other", other))}  # fmt: skip
        assert "CERTIFICATE_VERIFY_FAILED" in log["other"]
        assert "Failed to activate SuperNode" in log["twin"]
    finally:
        for started in (deployment, twin, other):
            started.stop([SUPERLINK, *started.nodes])
