"""Nodes that never answer, are lost, and come back: what docs/how-to/real-nodes.md says of them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import SMALL

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import check_run, run

CONFIG = SMALL | {"num-clients": 4, "rounds": 3, "train-fraction": 1.0, "local-steps": 1}
CONFIG |= {"method": "fedper", "round-timeout": 7.0, "start-timeout": 90.0}
TROUBLED = 2  # the node of client 1


class Faulty(InProcessGrid):
    """Node TROUBLED does not answer in round 2; in round 3 its process is a new one. `waits` are
    the kinds of messages with the seconds that an answer was waited for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.round, self.waits = 1, []
        for node, context in self.contexts.items():
            context.node_config["state-dir"] = f"{context.run_config['output-dir']}/state-{node}"

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        kinds = {message.metadata.message_type for message in messages}
        self.waits += [(kind, timeout) for kind in sorted(kinds)]
        replies = super().send_and_receive(messages, timeout=timeout)
        silent = self.round == 2
        if "evaluate" in kinds:
            self.round += 1
            self.contexts[TROUBLED].state.clear()
        return [r for r in replies if not (silent and r.metadata.src_node_id == TROUBLED)]


class Lost(Faulty):
    """And it is not even connected in round 2."""

    def get_node_ids(self):
        return [i for i in self.contexts if i != TROUBLED or self.round != 2]


def go(grid_class, folder, **changes):
    config = CONFIG | {"output-dir": str(folder)} | changes
    grid = grid_class.simulation(app, config, 4)
    run(grid, config, "in-process")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return grid, [json.loads(line) for line in lines]


def test_a_node_that_never_answers_costs_a_round_timeout(tmp_path):
    grid, rounds = go(Faulty, tmp_path)
    assert [(r["sampled"], r["valid"], r["dropped"]) for r in rounds] == [
        (4, 4, {}), (4, 3, {"missing": 1}), (4, 4, {})
    ]  # fmt: skip
    assert rounds[1]["evaluation-dropped"] == {"missing": 1}
    first, *others = [wait for wait in grid.waits if wait[0] in ("query", "train", "evaluate")]
    assert first == ("query", 90.0)  # the longer one is for the first question alone
    assert {seconds for _, seconds in others} == {7.0}


def test_a_node_is_lost_and_comes_back_with_what_it_kept(tmp_path):
    """Rounds go on with three of four nodes; the fourth finds its head in its state-dir: FedPer's
    after round 1, since the head of its round 2 was trained after its last breath."""
    head = {}

    class Looked(Lost):
        def send_and_receive(self, messages, *, timeout=None):
            file = tmp_path / f"state-{TROUBLED}" / "fedper-1.safetensors"
            if self.round == 2:
                head.update(load_file(file))
            if self.round == 3 and "evaluate" not in [m.metadata.message_type for m in messages]:
                same = load_file(file)
                assert all(np.array_equal(same[name], head[name]) for name in head)
            return super().send_and_receive(messages, timeout=timeout)

    grid, rounds = go(Looked, tmp_path, **{"min-available-nodes": 3})
    assert [(r["sampled"], r["valid"], r["dropped"]) for r in rounds] == [
        (4, 4, {}), (3, 3, {}), (4, 4, {})
    ]  # fmt: skip
    assert head
    assert sum(kind == "query" for kind, _ in grid.waits) == 2  # it is asked again who it is


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min-available-nodes": 5}, ["min-available-nodes is 5", "num-clients only 4"]),
        ({"round-timeout": 91.0}, ["round-timeout is 91.0", "start-timeout 90.0"]),
        ({"resume": True, "output-dir": ""}, ["resume", "output-dir"]),
    ],
)
def test_settings_out_of_range_are_refused(changes, words):
    with pytest.raises(ValueError) as error:
        check_run(CONFIG | changes)
    assert all(word in str(error.value) for word in words)
