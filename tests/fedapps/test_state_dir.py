"""What nodes keep in their state-dir is a run's: another one begins as if there were none, and the
run itself finds it when it is resumed, continued or served; a privacy budget is one for all runs.

Nodes in process, each grid with contexts of its own, so that the folders alone join two runs; the
engine is said to be the real one, to which no client tells what it keeps."""

import json

import pytest
from safetensors.numpy import load_file
from small_runs import NEEDS, WEE, Watched, cut_before, federate, left

import fedapps
import partitions
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid, Simulated
from fedapps.serverapp import run
from fedapps.service.finished_run import restore_strategy
from fedapps.service.serving import serve_once
from fedapps.settings.config import defaults
from partitions.inspect import export

SMALL = defaults() | WEE | {"num-clients": 4, "rounds": 2, "local-steps": 3, "evaluate-every": 1}
SMALL |= {"checkpoint-every": 1, "train-fraction": 0.75, "model": "mlp-small"}
PRIVATE = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}


def go(folder, state, method="fedper", **changes):
    """A run into `folder` over nodes with their state in `state`, without any if it is None."""
    config = SMALL | NEEDS.get(method, {}) | {"method": method, "output-dir": str(folder)} | changes
    nodes = [
        own | ({"state-dir": str(state / str(own["partition-id"]))} if state else {})
        for own in Simulated(4)
    ]
    run(InProcessGrid(app, config, nodes), config, "deployment")
    return left(folder)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedper", {"model": "convnet"}), ("scaffold", {"lr": 0.1}), ("fedembed", {"lr": 0.1})],
)
def test_a_new_run_begins_as_if_there_were_no_state(method, changes, tmp_path):
    """FedPer with another network, whose head has other shapes; SCAFFOLD, whose control variates
    would fit; FedEmbed, whose users tell in the opening question what they know."""
    go(tmp_path / "first", tmp_path / "state", method)
    files = {file: file.read_bytes() for file in (tmp_path / "state").rglob("*.safetensors")}
    assert len(files) == 3  # of the training clients
    again = go(tmp_path / "again", tmp_path / "state", method, **changes)
    assert again == go(tmp_path / "alone", None, method, **changes)
    assert all(file.read_bytes() != before for file, before in files.items())


def test_a_resumed_run_goes_on_from_its_state(tmp_path):
    """It dies between rounds 2 and 3, and nobody but the nodes knows their heads."""
    whole = go(tmp_path / "whole", tmp_path / "other", rounds=4)

    with cut_before(3):
        go(tmp_path / "cut", tmp_path / "state", rounds=4)
    assert go(tmp_path / "cut", tmp_path / "state", rounds=4, resume=True) == whole


def test_a_run_that_goes_on_from_a_saved_one_finds_its_state(tmp_path):
    """Evaluated again, clients score as in the saved run; where that tells no token they have but
    their initial heads."""

    def scores(folder, **changes):
        summary, _, _ = go(tmp_path / folder, tmp_path / "state", **changes)
        return {c: got["accuracy"] for c, got in summary["per_client"].items()}

    first = scores("first", rounds=1)
    saved = {"from-dir": str(tmp_path / "first"), "rounds": 0}
    assert scores("later", **saved) == first
    assert token(tmp_path / "later") == token(tmp_path / "first")
    (tmp_path / "first" / "token.json").unlink()
    assert scores("stranger", **saved) != first


def token(folder):
    return json.loads((folder / "token.json").read_text())["run-token"]


def test_a_training_node_is_served_the_run_that_it_trained_last(tmp_path):
    federation = partitions.federation(SMALL)
    paths = export(federation, tmp_path / "data")
    places = [
        {"partition-id": i, "data-path": str(paths[i]), "state-dir": str(tmp_path / f"state-{i}")}
        for i in range(4)
        if not federation.novel[i]
    ]
    config = SMALL | {"method": "fedper", "min-available-nodes": 3, "rounds": 1}
    for name in ("first", "second"):
        own = config | {"output-dir": str(tmp_path / name)}
        run(InProcessGrid(app, own, places), own, "deployment")
        served = fedapps.load(tmp_path / name)
        grid = InProcessGrid(app, own | {"serving": served.card.line()}, places)
        got = serve_once(restore_strategy(served, grid), served)
        assert set(got.values()) == {"has its model now (training)"} and len(got) == 3
    first = fedapps.load(tmp_path / "first")
    grid = InProcessGrid(app, config | {"serving": first.card.line()}, places)
    assert set(serve_once(restore_strategy(first, grid), first).values()) == {
        "it failed; see the log"
    }


def test_a_novel_clients_budget_is_one_for_all_runs(tmp_path):
    """Its one answer is given in the first run; the second has another encoder."""
    (novel,) = (i for i in range(4) if partitions.federation(SMALL).novel[i])
    file = tmp_path / "state" / str(novel) / f"odpfl-hn-{novel}.safetensors"
    got = []
    for rate in (0.5, 0.1):
        settings = PRIVATE | {"odpfl-hn.encoder-lr": rate}
        *_, last = go(tmp_path / f"{rate}", tmp_path / "state", "odpfl-hn", **settings)[1]
        got.append(last.get("evaluation-dropped"))
        if len(got) == 1:
            before = load_file(file)
            assert {name.partition("/")[0] for name in before} == {"spent", "answer", "sigma"}
    assert got == [None, {"error": 1}]
    after = load_file(file)
    assert after.keys() == before.keys() and (after["spent"] == before["spent"]).all()


def test_every_message_of_a_run_tells_one_token():
    """The opening question, an exchange, training and evaluation."""
    tokens = []
    for _ in range(2):
        _, grid = federate(Watched, method="odpfl-hn", rounds=1)
        sent = [m for m in grid.seen if not m.metadata.reply_to_message_id]
        kinds = {message.metadata.message_type for message in sent}
        assert kinds == {"query", "query.encode", "train", "train.backprop", "evaluate"}
        tokens.append({message.content["config"]["run-token"] for message in sent})
    assert [len(found) for found in tokens] == [1, 1]
    assert tokens[0] != tokens[1]


def test_a_damaged_state_is_named_with_what_to_do(tmp_path):
    go(tmp_path / "first", tmp_path / "state")
    for file in (tmp_path / "state").rglob("*.safetensors"):
        file.write_bytes(b"half of a file")
    with pytest.raises(
        RuntimeError,
        match=r"1 are novel: .*; 3 more are refused; one said: .*fedper-\d.safetensors, what the ",
    ):
        go(tmp_path / "again", tmp_path / "state")
