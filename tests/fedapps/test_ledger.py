"""What a client gives under local privacy is counted by the client: no server gets more.

Messages go through the project's client app. A grid with new contexts is a node that was started
again, with nothing but the state-dir."""

import copy
import json
import math
import pickle
from functools import cache

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from small_runs import WEE, dying_in
from torch import nn

import fedapps
import partitions
from clients.core import privacy
from clients.core.arrays import from_record, to_record
from clients.core.protocol import LOCAL_NOISE
from fedapps.building import shared_arrays
from fedapps.clientapp import app, host
from fedapps.engines.hosting import TABLE, pack
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node import ledger
from fedapps.node.bridge import reply_of
from fedapps.node.context import SIMULATED, SIMULATION
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from partitions.inspect import export
from strategies.core.accountant import local_epsilon, local_loss
from strategies.core.privacy import Privacy

SMALL = defaults() | WEE | {"num-clients": 4, "rounds": 2, "local-steps": 1, "method": "fedavg"}
SMALL |= {"train-fraction": 0.75, "model": "mlp-small", "dp": "local", "dp-epsilon": 8.0}
START = shared_arrays(SMALL, "fedavg", "mlp-small")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Configurations of the three training nodes, each with data of its own."""
    federation = partitions.federation(SMALL)
    paths = export(federation, tmp_path_factory.mktemp("data"))
    return [{"data-path": str(paths[i])} for i in range(4) if not federation.novel[i]]


def noise_of(config):
    """What an honest server asks a client to add."""
    names = ("dp", "dp_clip", "dp_noise_multiplier", "dp_epsilon", "dp_delta", "rounds")
    return _noise_of(**{name: config[name.replace("_", "-")] for name in names})


@cache
def _noise_of(**got):
    return Privacy(**got).settings().get(LOCAL_NOISE, 0.0)


def node(place, folder=None, client_app=app, **changes):
    """A grid whose one node is at `place`, and a run's configuration."""
    own = place | ({"state-dir": str(folder)} if folder else {})
    return InProcessGrid(client_app, SMALL | changes, [own])


def ask(grid, action="train", **got):
    """The reply of the grid's first node to a message that tells this."""
    config = next(iter(grid.contexts.values())).run_config
    said = {"method": "fedavg", "server-round": 1, "run-token": "a"}
    if action == "train":
        said[LOCAL_NOISE] = noise_of(config) if LOCAL_NOISE not in got else got[LOCAL_NOISE]
    content = {"arrays": to_record(START), "config": ConfigRecord(said | got)}
    (reply,) = grid.send_and_receive([Message(RecordDict(content), 1, action)])
    return reply


def answer_of(reply):
    """The bytes of a reply's arrays, None for an error."""
    if reply.has_error():
        return None
    return b"".join(array.data for array in reply.content["arrays"].values())


def counted(folder):
    """μ² of all answers in a state-dir's only ledger."""
    (file,) = folder.glob("privacy*.safetensors")
    with safe_open(file, "numpy") as content:
        runs = json.loads(content.metadata()[ledger.LEDGER])["runs"]
    return sum(entry["spent"] for entry in runs.values())


# A round is answered once


@pytest.mark.parametrize("kept", [True, False])
def test_80_messages_get_no_more_than_the_10_answers_that_were_promised(places, kept, tmp_path):
    """ε of 8 is promised for 10 rounds. 80 answers with fresh noise would spend 30: the same
    message gets the same answer, others an error."""
    grid = node(places[0], tmp_path if kept else None, rounds=10)
    replies = [ask(grid) for _ in range(40)]
    assert len({answer_of(reply) for reply in replies}) == 1 and not replies[-1].has_error()
    assert dict(replies[-1].content["metrics"]) == {"num-examples": 1}
    assert list(replies[-1].content["arrays"]) == list(START)
    replies += [ask(grid, **{"server-round": number}) for number in range(2, 42)]
    answers = {answer_of(reply) for reply in replies} - {None}
    loss = len(answers) * local_loss(noise_of(SMALL | {"rounds": 10}))
    assert len(answers) == 10 and 7.9 < local_epsilon(loss, 1e-5) <= 8
    assert "this client has spent ε = 7.99" in replies[-1].error.reason
    assert "the limit that this run promised is 8" in replies[-1].error.reason


def test_a_restart_forgets_nothing(places, tmp_path):
    """The answer, what was spent, and under whatever id the server knows the node."""
    first = answer_of(ask(node(places[0], tmp_path, rounds=1)))
    assert answer_of(ask(node(places[0], tmp_path, rounds=1))) == first is not None
    grid = node(places[0], tmp_path, rounds=1)
    grid.contexts[1].node_id = 77
    assert answer_of(ask(grid)) == first
    assert "has spent ε" in ask(grid, **{"server-round": 2}).error.reason


@pytest.mark.parametrize(
    "change",
    [{"rounds": 40}, {"dp-epsilon": 50.0}, {"dp-epsilon": 0.0, "dp-noise-multiplier": 0.1}],
)
def test_a_run_cannot_raise_what_it_promised(places, change, tmp_path):
    """Two rounds were promised ε = 8 and given; whatever the run says later, there is no third."""
    for number in (1, 2):
        assert answer_of(ask(node(places[0], tmp_path), **{"server-round": number}))
    later = node(places[0], tmp_path, **change)
    assert "the limit that this run promised is 8" in ask(later, **{"server-round": 3}).error.reason


def test_a_run_that_lowers_its_promise_keeps_the_lower_one(places, tmp_path):
    noise = {LOCAL_NOISE: 1000.0}
    assert answer_of(ask(node(places[0], tmp_path), **noise))
    low = {"dp-epsilon": 0.05, "rounds": 1}
    assert answer_of(ask(node(places[0], tmp_path, **low), **noise, **{"server-round": 2}))
    again = ask(node(places[0], tmp_path), **{"server-round": 3})
    assert "the limit that this run promised is 0.05" in again.error.reason


def test_a_run_that_began_with_local_privacy_ends_neither_that_nor_what_it_covers(places, tmp_path):
    assert answer_of(ask(node(places[0], tmp_path)))
    for change in ({"dp": "none", "dp-epsilon": 0.0}, {"dp": "central"}):
        got = ask(node(places[0], tmp_path, **change), **{LOCAL_NOISE: 0.0}).error.reason
        assert "but 'local' is what this run began with" in got
    assert "is not covered" in ask(node(places[0], tmp_path), "evaluate").error.reason
    later = node(places[0], tmp_path, **{"dp-covers": "model-updates"})
    assert "is not covered" in ask(later, "evaluate").error.reason
    assert not ask(later, "evaluate", **{"run-token": "b"}).has_error()


@pytest.mark.parametrize("value", [True, 1, "true", "simulated"])
def test_no_text_in_a_nodes_configuration_makes_it_a_simulation(places, value, tmp_path):
    """Its answers are counted, its state stays on it, and its errors are not raised."""
    grid = node(places[0] | {"simulated": value, "debug": True}, tmp_path, rounds=1)
    assert answer_of(ask(grid)) and counted(tmp_path) > 0
    assert "has spent ε" in ask(grid, **{"server-round": 2}).error.reason
    assert "PermissionError" in ask(grid, "query.get_state").error.reason


def test_a_simulations_mark_is_itself_in_every_process():
    copies = [pickle.loads(pickle.dumps(SIMULATION)), copy.deepcopy(SIMULATION)]
    assert all(mark is SIMULATION for mark in copies)


def test_without_a_state_dir_that_is_said_once(places, caplog):
    grid = node(places[0])
    for number in (1, 2):
        assert answer_of(ask(grid, **{"server-round": number}))
    assert caplog.text.count("the node has no state-dir") == 1


def test_two_processes_at_once_do_not_spend_the_same(places, tmp_path, monkeypatch):
    """While the client trains for round 1, another process answers round 2, which is all that ε
    allows."""
    others = []

    def training(*arguments):
        if not others:
            others.append(None)
            others.append(ask(node(places[0], tmp_path, rounds=1), **{"server-round": 2}))
        return reply_of(*arguments)

    monkeypatch.setattr("fedapps.clientapp.reply_of", training)
    got = ask(node(places[0], tmp_path, rounds=1))
    assert answer_of(others[1]) and "has spent ε" in got.error.reason


def test_no_answer_leaves_before_it_is_written(places, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("fedapps.files.write_files", full)
        assert "OSError" in ask(node(places[0], tmp_path)).error.reason
    assert answer_of(ask(node(places[0], tmp_path)))
    (file,) = tmp_path.glob("privacy*")
    file.write_bytes(file.read_bytes()[:40])
    assert f"{file} is damaged" in ask(node(places[0], tmp_path)).error.reason


# What a node's own policy says


@pytest.mark.parametrize(
    ("change", "got", "why"),
    [
        ({"dp": "none", "dp-epsilon": 0.0}, {}, "'local' is this node's own policy"),
        ({"dp": "central"}, {LOCAL_NOISE: 9.0}, "'local' is this node's own policy"),
        ({"dp-generator": "seeded"}, {}, "this node draws noise by 'system'"),
        ({"dp-clip": -1.0}, {LOCAL_NOISE: 1e-9}, "promises no privacy"),
        ({"dp-clip": math.nan}, {LOCAL_NOISE: 1e-9}, "promises no privacy"),
        ({"dp-epsilon": 0.0}, {LOCAL_NOISE: 1e-9}, "promises no privacy"),
        (
            {"dp-epsilon": -3.0, "dp-noise-multiplier": 1.0},
            {LOCAL_NOISE: 9.0},
            "promises no privacy",
        ),
        ({}, {LOCAL_NOISE: math.nan}, "the server asked for noise of nan"),
        ({}, {LOCAL_NOISE: math.inf}, "the server asked for noise of inf"),
        ({}, {LOCAL_NOISE: -9.0}, "the server asked for noise of -9"),
    ],
)
def test_no_run_weakens_a_policy(places, change, got, why, tmp_path):
    grid = node(places[0] | {"dp": "local"}, tmp_path, **change)
    assert why in ask(grid, **got).error.reason
    assert not list(tmp_path.glob("privacy*"))


@pytest.mark.parametrize("action", ["evaluate", "query.som"])
def test_a_policy_covers_everything_unless_it_says_otherwise(places, action, tmp_path):
    run_ = {"dp-covers": "model-updates", "method": "fedembed"}
    grid = node(places[0] | {"dp": "local"}, tmp_path, **run_)
    assert "is not covered" in ask(grid, action).error.reason
    own = places[0] | {"dp": "local", "dp-covers": "model-updates"}
    assert not ask(node(own, tmp_path, **{"dp-covers": "model-updates"}), "evaluate").has_error()
    assert "is not covered" in ask(node(own, tmp_path), "evaluate").error.reason


def test_a_policy_is_one_for_all_runs(places, tmp_path):
    """Of ε = 3 for a round each, μ² is three times that of 1.6 or so: three runs have theirs."""
    own = places[0] | {"dp-epsilon": 3.0}
    grid = node(own, tmp_path, rounds=1, **{"dp-epsilon": 1.6})
    replies = [ask(grid, **{"run-token": name}) for name in "abcd"]
    assert [reply.has_error() for reply in replies] == [False] * 3 + [True]
    assert "the limit of this node for all runs is 3" in replies[-1].error.reason
    loss = 3 * local_loss(noise_of(SMALL | {"rounds": 1, "dp-epsilon": 1.6}))
    assert counted(tmp_path) == pytest.approx(loss)
    assert 2.8 < local_epsilon(loss, 1e-5) <= 3


@pytest.mark.parametrize(("own", "of_run", "norm"), [(0.01, 1.0, 0.01), (1.0, 0.02, 0.02)])
def test_the_smaller_clip_holds(places, own, of_run, norm, tmp_path, monkeypatch):
    """Without its noise the change has that norm. μ² is that of (2 · norm / σ)²."""
    monkeypatch.setattr(privacy, "noised", lambda arrays, *_: arrays)
    grid = node(places[0] | {"dp-clip": own}, tmp_path, lr=5.0, **{"dp-clip": of_run})
    trained = from_record(ask(grid, **{LOCAL_NOISE: 4.0}).content["arrays"])
    square = sum(((a - START[name].astype(float)) ** 2).sum() for name, a in trained.items())
    assert square**0.5 == pytest.approx(norm, rel=1e-3)
    assert counted(tmp_path) == pytest.approx((2 * norm / 4) ** 2)


@pytest.mark.parametrize("action", ["train", "query"])
def test_an_error_is_in_the_nodes_log_and_its_text_not_on_the_server(
    places, action, tmp_path, monkeypatch, caplog
):
    """Each says where the text is, which may hold a person's data."""

    def fail(*arguments):
        raise ValueError("row 7 holds 31 years")

    monkeypatch.setattr("fedapps.clientapp.make_client", fail)
    grid = node(places[0] | {"dp": "local"}, tmp_path)
    reply = ask(grid, action)
    text = reply.error.reason if reply.has_error() else reply.content["properties"]["error"]
    assert "ValueError: its text is withheld under differential privacy, see the node's log" in text
    assert "31 years" not in text
    assert "31 years" in caplog.text
    assert "under differential privacy the server gets its type and place, not its text" in (
        caplog.text
    )


def test_a_policy_holds_in_an_app_of_ones_own(places):
    own = fedapps.client_app(
        "fedavg", model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), data=lambda _: None
    )
    grid = InProcessGrid(own, {}, [{"dp": "local"}])
    assert "'local' is this node's own policy" in ask(grid, **{LOCAL_NOISE: 1.0}).error.reason


def test_one_users_data_are_not_asked_under_many_numbers(places, tmp_path):
    """A message to a node that hosts clients tells their numbers, each with a ledger of its own."""
    grid = node(places[0] | {"dp-epsilon": 8.0}, tmp_path, host)
    content = RecordDict({"arrays": to_record(START), "config": ConfigRecord({"method": "fedavg"})})
    packed = pack([content] * 2, {"clients": [0, 1], "of": 4})
    (reply,) = grid.send_and_receive([Message(packed, 1, "train")])
    table = json.loads(reply.content[TABLE]["json"])[1]
    assert table == [f"this node hosts no client {i}" for i in (0, 1)]
    grid = InProcessGrid(host, SMALL, [{"partition-id": 1, "num-partitions": 2}])
    packed = pack([RecordDict()] * 4, {"clients": [0, 1, -1, True], "of": 4})
    (reply,) = grid.send_and_receive([Message(packed, 1, "query")])
    table = json.loads(reply.content[TABLE]["json"])[1]
    assert [isinstance(one, str) for one in table] == [True, False, True, True]


def test_a_simulations_recall_lowers_nothing(places, tmp_path):
    """A simulated client takes back what a checkpoint kept of it; its ledger is no part of that."""
    own = places[0] | {"dp-epsilon": 8.0, SIMULATED: SIMULATION}
    grid = node(own, tmp_path, rounds=1)
    kept = ask(grid, "query.get_state").content["arrays"]
    assert answer_of(ask(grid)) and not list(kept)
    before = counted(tmp_path)
    assert not ask(grid, "train.set_state").has_error()
    assert counted(tmp_path) == before > 0
    assert "has spent ε" in ask(grid, **{"server-round": 2}).error.reason


# No sequence of messages

MESSAGES = st.fixed_dictionaries(
    {
        "round": st.integers(1, 3),
        "token": st.sampled_from("abcdefgh"),
        "anew": st.booleans(),  # the node starts anew
        "action": st.sampled_from(["train"] * 8 + ["evaluate", "query", "train.set_state"]),
        "run": st.sampled_from(
            [
                *[{}] * 6,
                {"rounds": 1000},
                {"dp-epsilon": 2.0},
                {"dp-epsilon": 900.0},
                {"dp-epsilon": 0.0, "dp-noise-multiplier": 0.5},
                {"dp-clip": 0.1},
                {"dp-clip": 30.0},
                {"dp-clip": -1.0},
                {"dp-delta": 0.5},
                {"dp-covers": "model-updates"},
                {"dp-generator": "seeded"},
                {"dp": "none", "dp-epsilon": 0.0},
                {"dp": "central"},
            ]
        ),
        "noise": st.sampled_from([1.0] * 6 + [0.5, 3.0, 0.0, -1.0, 1e-6, math.nan, math.inf]),
        "lr-factor": st.sampled_from([1.0, 0.5]),
    }
)


@settings(
    max_examples=50,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(messages=st.lists(MESSAGES, min_size=10, max_size=40), epsilon=st.sampled_from([1.0, 2.0]))
def test_no_sequence_of_messages_gets_more_than_the_nodes_epsilon(
    messages, epsilon, places, tmp_path_factory
):
    """The noise that is really drawn, over what is really clipped, by the project's accountant."""
    folder, drawn, clips, answers = tmp_path_factory.mktemp("state"), [], [], []
    place = places[0] | {"dp-epsilon": epsilon, "dp-clip": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        clip, add = privacy.clipped, privacy.noised
        patch.setattr(privacy, "clipped", lambda a, norm: clips.append(norm) or clip(a, norm))
        patch.setattr(privacy, "noised", lambda a, s, by: drawn.append(s) or add(a, s, by))
        contexts = {}
        for message in messages:
            config = SMALL | {"dp-epsilon": 1.0} | message["run"]
            grid = node(place, folder, **config)
            if not message["anew"] and 1 in contexts:
                grid.contexts[1].state = contexts[1].state
            contexts = grid.contexts
            got = {"server-round": message["round"], "run-token": message["token"]}
            got |= {"lr-factor": message["lr-factor"]}
            promised = dict(config, **{"dp": "local", "dp-clip": abs(config["dp-clip"])})
            if not (promised["dp-epsilon"] or promised["dp-noise-multiplier"]):
                promised["dp-epsilon"] = 1.0
            asked = message["noise"] * noise_of(promised)
            reply = ask(grid, message["action"], **got, **{LOCAL_NOISE: asked})
            if message["action"] in ("evaluate", "train.set_state"):
                assert reply.has_error()
            elif message["action"] == "train" and not reply.has_error():
                answers.append(answer_of(reply))
    loss = sum((2 * norm / deviation) ** 2 for norm, deviation in zip(clips, drawn, strict=True))
    assert len(set(answers)) == len(drawn) and all(norm <= 0.5 for norm in clips)
    assert local_epsilon(loss, 1e-5) <= epsilon


# Honest runs


def federated(folder, state, places, **changes):
    """A run over real nodes with a policy."""
    nodes = [
        place | {"state-dir": str(state / str(i)), "dp-epsilon": 8.0, "partition-id": i}
        for i, place in enumerate(places)
    ]
    config = SMALL | {"min-available-nodes": 3, "num-clients": 3, "rounds": 4} | changes
    config |= {"checkpoint-every": 1, "output-dir": str(folder)}
    return run(InProcessGrid(app, config, nodes), config, "deployment")


def test_clients_count_what_the_server_counts(places, tmp_path):
    """And a second run, whose promise adds to the first one's, is refused."""
    federated(tmp_path / "run", tmp_path / "state", places)
    got = json.loads((tmp_path / "run" / "privacy.json").read_text())["spent"]
    assert got.keys() == {"0", "1", "2"}
    for client, spent in got.items():
        assert counted(tmp_path / "state" / client) == pytest.approx(spent)
    with pytest.raises(RuntimeError, match=r"0 valid replies of 3.*'error': 3"):
        federated(tmp_path / "again", tmp_path / "state", places)


@pytest.mark.parametrize("z", [0.0, 4.0])
def test_a_run_that_lost_a_round_goes_on(places, z, tmp_path):
    """The server dies when the third round's answers are on their way. With a fixed z it asks the
    same again, and gets the same; with a fixed ε it asks for more noise, and that is counted."""
    changes = {"dp-noise-multiplier": z, "dp-epsilon": 0.0} if z else {}
    with dying_in(3), pytest.raises(SystemExit):
        federated(tmp_path / "run", tmp_path / "state", places, **changes)
    federated(tmp_path / "run", tmp_path / "state", places, resume=True, **changes)
    for client in "012":
        spent = counted(tmp_path / "state" / client)
        if z:
            assert spent == pytest.approx(4 * local_loss(z))
        assert 5 * local_loss(noise_of(SMALL | {"rounds": 4})) * 0.8 < spent or z
        assert local_epsilon(spent, 1e-5) <= 8
