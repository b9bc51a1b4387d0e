"""The state of a deployment: its processes on this machine, its nodes, its runs."""

from collections import Counter
from datetime import timedelta
from pathlib import Path

from fedapps.common.errors import printable
from fedapps.results.status import status_lines
from fedapps.service import NOTED_RUNS
from fedapps.service.deploy import SUPERLINK, Deployment

SHOWN_RUNS = 3  # finished runs that are shown, the last ones
UNREGISTERED = ("deleted", "unregistered")


def deployment_lines(deployment: Deployment) -> tuple[list[str], bool]:
    """What a person reads, and whether the SuperLink runs on this machine."""
    alive = deployment.alive(SUPERLINK)
    lines = []
    for name in (SUPERLINK, *deployment.nodes):
        state = "alive" if deployment.alive(name) else "down"
        lines.append(f"{name}: {state}")
    if alive:
        lines += [*_node_lines(deployment), *_run_lines(deployment)]
    for folder in noted_runs(deployment.folder)[-SHOWN_RUNS:]:
        try:
            run_lines, _ = status_lines(folder)
        except (ValueError, OSError) as error:  # it was moved, or no round has begun
            run_lines = [printable(f"{folder}: {error}")]
        lines += run_lines
    return lines, alive


def noted_runs(folder: Path) -> list[Path]:
    """The folders of the deployment's runs, in the order in which they began last."""
    file = folder / NOTED_RUNS
    if not file.is_file():
        return []
    written = file.read_text("utf-8", "replace").splitlines()
    in_order = list(dict.fromkeys(reversed(written)))
    return [Path(line) for line in reversed(in_order)]


def _node_lines(deployment: Deployment) -> list[str]:
    """How many nodes the SuperLink knows, by state."""
    nodes = deployment.flwr().call("supernode", "list", deployment.name)["nodes"]
    states = Counter(str(node["status"]) for node in nodes)
    for state in UNREGISTERED:
        states.pop(state, None)
    words = [f"{count} {state}" for state, count in sorted(states.items())]
    return [printable(f"nodes at the superlink: {', '.join(words) or 'none'}")]


def _run_lines(deployment: Deployment) -> list[str]:
    """The SuperLink's runs that go on, and the last ones that have ended."""
    runs = deployment.flwr().call("ls", deployment.name)["runs"]
    runs.sort(key=lambda run: str(run["pending-at"]))
    ended = [run for run in runs if str(run["status"]).startswith("finished")]
    lines = []
    for run in runs:
        if run not in ended or run in ended[-SHOWN_RUNS:]:
            took = timedelta(seconds=round(float(run["elapsed"])))
            lines.append(printable(f"run {run['run-id']}: {run['status']}, {took}"))
    return lines
