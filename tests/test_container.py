"""The files for a repository and for containers: valid by their schemas, and their commands run."""

import re
import shlex
import subprocess
import sys
import time
import tomllib
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fedapps.common.addresses import connection_error
from fedapps.engines.flower import environment, free_port

ROOT = Path(__file__).parents[1]
COMMANDS = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("file", "schema"),
    [("compose.yaml", "compose-spec"), (".github/workflows/ci.yml", "github-workflows")],
)
def test_yaml_files_follow_their_schema(file, schema):
    check = [COMMANDS / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", ROOT / file]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_for_kubernetes_follows_its_schema_and_names_what_is_there():
    """Each resource by its schema, strictly; Flower's commands by their parsers; volumes, secrets
    and labels by what defines them."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = (ROOT / "operate" / "kubernetes.yaml").read_text("utf-8")
    resources = list(yaml.safe_load_all(text))
    for resource in resources:
        kubernetes_validate.validate(resource, "1.33", strict=True)
    kinds = [resource["kind"] for resource in resources]
    assert kinds == ["Service", "PersistentVolumeClaim", "Deployment", "StatefulSet"]
    service, claim, *workloads = resources
    labels = []
    for workload in workloads:
        spec = workload["spec"]
        pod = spec["template"]
        assert spec["selector"]["matchLabels"] == pod["metadata"]["labels"]
        labels.append(pod["metadata"]["labels"])
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        volumes |= {c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert service["spec"]["selector"] in labels
    link, node = (w["spec"]["template"]["spec"] for w in workloads)
    claims = [v["persistentVolumeClaim"]["claimName"] for v in link["volumes"] if len(v) == 2
              and "persistentVolumeClaim" in v]  # fmt: skip
    assert claims == [claim["metadata"]["name"]]
    script = node["containers"][0]["args"][0].partition("exec ")[2]
    for words in (link["containers"][0]["command"], shlex.split(script)):
        parser = argument_parser(words[0])
        _, unknown = parser.parse_known_args(words[1:])
        assert unknown == []
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert address in script


def argument_parser(command):
    """The parser of one of Flower's commands. Their modules take half a second."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    if command == "flower-superlink":
        return _parse_args_run_superlink()
    return _parse_args_run_supernode()


REQUEUE = """#!/bin/sh
echo "requeue $2" >> "$SAID"
"""
COMMAND = """#!/bin/sh
trap 'sleep 0.3; exit 143' TERM
echo "begun $*" >> "$SAID"
while :; do sleep 0.05; done
"""


def test_a_job_of_slurm_that_is_told_to_end_waits_for_its_command_and_queues_itself(tmp_path):
    """The signal reaches the script alone; the stand-in for the command takes 0.3 s to end."""
    for name, text in (("fedapps", COMMAND), ("scontrol", REQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    said = tmp_path / "said"
    job = subprocess.Popen(
        [ROOT / "operate" / "slurm.sh", "--seeds", "0,1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SAID": str(said), "SLURM_JOB_ID": "7",
             "HOME": str(tmp_path)},
    )  # fmt: skip
    while not said.is_file() or not said.read_text():
        time.sleep(0.02)
    job.terminate()
    assert job.wait(30) == 143
    assert said.read_text() == "begun run --seeds 0,1\nrequeue 7\n"


def test_the_units_of_systemd_start_what_a_deployment_writes():
    for name, script in (("superlink", "/srv/fed/start-superlink.sh"),
                         ("node", "/srv/node/start-node-0.sh /srv/node/data")):  # fmt: skip
        unit = ConfigParser(strict=False)
        unit.optionxform = str
        unit.read(ROOT / "operate" / f"fedapps-{name}.service", "utf-8")
        assert unit["Service"]["ExecStart"] == script
        assert script.startswith(f"{unit['Service']['ReadWritePaths']}/")


def test_the_constraints_are_the_tested_versions():
    """Each dependency has one version there, within its range, and no address."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert not any(pin.url for pin in pins)
    pinned = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for text in project["dependencies"]:
        needed = Requirement(text)
        (pin,) = pinned[needed.name].specifier
        assert pin.operator == "==" and needed.specifier.contains(pin.version), text
        assert needed.specifier.contains(version(needed.name)), text


def test_the_dockerfile_installs_this_project():
    lines = re.findall(r"^RUN (uv .*)$", (ROOT / "Dockerfile").read_text("utf-8"), re.M)
    words = shlex.split(lines[-1])
    assert words[:3] == ["uv", "pip", "install"] and words[-2:] == ["--editable", "."]
    assert (ROOT / words[words.index("--constraint") + 1]).is_file()


def test_any_user_of_the_image_can_write_where_the_composed_services_do():
    """Flower's home, where its configuration is mounted, and the places of the volumes."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    (folders,) = re.findall(r"^RUN mkdir --mode 1777 (.*)$", text, re.M)
    writable = folders.split()
    variables = dict(word.split("=") for word in re.findall(r"^ENV (.*)$", text, re.M)[-1].split())
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    for service in services.values():
        (config,) = service["configs"]
        assert config["target"] == f"{variables['FLWR_HOME']}/config.toml"
        for volume in service["volumes"]:
            assert volume.split(":")[1] in writable
    assert variables["FLWR_HOME"] in writable and variables["HOME"] == "/tmp"


@pytest.mark.slow
def test_the_composed_federation_trains_and_serves_a_later_client(tmp_path):
    """Its commands run on this machine in the order of the file's head, with own ports and folders
    in place of the containers'."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    text, port, home = services["configs"]["flwr"]["content"], str(free_port()), tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(text.replace("superlink:9092", f"127.0.0.1:{port}"))
    processes = []

    def start(name):
        command = services["services"][name]["command"]
        changes = {
            "superlink:9092": f"127.0.0.1:{port}", "0.0.0.0": "127.0.0.1", "9092": port,
            "9400": str(free_port()), "/state": f"{tmp_path}/state-{name}",
            "/data": f"{tmp_path}/data", "/results": f"{tmp_path}/results",
        }  # fmt: skip
        for word, value in changes.items():
            command = command.replace(word, value)
        words = shlex.split(command)
        log = (tmp_path / f"{name}.log").open("wb")
        processes.append(
            subprocess.Popen([COMMANDS / words[0], *words[1:]], cwd=ROOT, stdout=log, stderr=log,
                             env=environment(home) | {"OMP_NUM_THREADS": "1"})
        )  # fmt: skip
        return processes[-1]

    try:
        assert start("export").wait(120) == 0
        start("superlink")
        until(lambda: not connection_error("127.0.0.1", int(port)))
        for node in ("node-1", "node-2", "node-3"):
            start(node)
        assert start("train").wait(600) == 0
        assert (tmp_path / "results" / "summary.json").is_file()
        start("late"), start("serve")
        until((tmp_path / "state-late" / "predictions.csv").is_file)
    finally:
        for process in processes[::-1]:
            process.terminate()
            process.wait(30)


def until(done):
    """Wait until `done()`."""
    deadline = time.monotonic() + 600
    while not done():
        assert time.monotonic() < deadline
        time.sleep(1)
