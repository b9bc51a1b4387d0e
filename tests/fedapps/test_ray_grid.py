"""RayGrid: the bits of the other engines, and actors that die or hang."""

import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import lab
import numpy as np
import pytest
import ray
from flwr.app import ConfigRecord, Message, RecordDict
from tiny import SMALL, left

import partitions
from clients.arrays import from_record, to_record
from fedapps.clientapp import app
from fedapps.engines import ray_grid
from fedapps.engines.cluster import ray_cluster
from fedapps.engines.grid import InProcessGrid, named, simulated
from fedapps.engines.jobs import _client_app
from fedapps.engines.mailboxes import MEMORY, Mailboxes
from fedapps.engines.ray_grid import AHEAD, Actors, Answer, Batch, RayGrid, Task
from fedapps.node.building import method_model
from fedapps.results.recorder import Recorder
from fedapps.serverapp import run
from strategies.base import PersonalizedStrategy

NODE = 2  # of a training client that takes part in rounds 1 and 2, which the tests check


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """A file that says what becomes of the process in which NODE trains in round 2."""
    return tmp_path_factory.mktemp("orders") / "now"


@pytest.fixture(scope="module")
def actors(orders, tmp_path_factory):
    """Two actors of a Ray that started where somebody's own package lies in a folder of
    PYTHONPATH. One test after the other asks them: a process costs seconds."""
    with lab.written(tmp_path_factory.mktemp("lab")) as folder, pytest.MonkeyPatch.context() as env:
        env.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with ray_cluster():
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            with Actors(obeying(orders), 2) as found:
                yield found


def obeying(orders):
    """The ClientApp, but for what `orders` says."""

    def load():
        answer = _client_app()

        def client_app(message, context):
            config = message.content.config_records.get("config", {})
            training = message.metadata.message_type == "train"
            if training and config["server-round"] == 2 and context.node_id == NODE:
                obey(orders)
            return answer(message, context)

        return client_app

    return load


def obey(orders):
    said = orders.read_text() if orders.exists() else ""
    if said == "die once":
        orders.unlink()
    if said.startswith("die"):
        os._exit(1)
    if said == "sleep":
        time.sleep(600)


@pytest.fixture
def ordered(orders):
    """Gives orders for the test's time."""
    yield orders.write_text
    orders.unlink(missing_ok=True)


def configuration(method, **changes):
    return SMALL | {"method": method, "fraction-train": 0.7, "rounds": 3} | changes


ALL = {"fraction-train": 1.0, "train-fraction": 0.9}  # five clients train


def in_process(config):
    return run(InProcessGrid.simulation(app, config, 6), config, "in-process")


def on_actors(actors, config):
    return run(RayGrid(actors, config, simulated(6)), config, "ray")


def numbers(result):
    arrays = {name: array.tobytes() for name, array in from_record(result.arrays).items()}
    return arrays, {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()}


def test_the_bits_are_those_of_one_process(actors):
    """Methods with and without states, of one exchange and several, one after the other on the
    same actors."""
    for method in ("scaffold", "fedtta++", "odpfl-hn", "lg-fedavg", "pfl-nearest"):
        config = configuration(method)
        assert numbers(on_actors(actors, config)) == numbers(in_process(config))


def stateful(actor):
    """The nodes whose states it holds."""
    call = actor.__ray_call__.remote
    return ray.get(call(lambda own: [n for n, c in own.grid.contexts.items() if c.state]))


@pytest.mark.parametrize("method", ["scaffold", "fedper"])
def test_actors_that_forget_whom_they_do_not_serve_leave_the_bits_as_they_are(
    actors, monkeypatch, method
):
    """Five clients train. Before a batch an actor forgets all but those of the batches it has."""
    config = configuration(method, **ALL)
    grid = RayGrid(actors, config, simulated(6))
    run(grid, config, "ray")
    training = {node for actor in actors.all for node in stateful(actor)}
    assert len(training) == 5
    monkeypatch.setattr(ray_grid, "HELD", 0)
    grid = RayGrid(actors, config, simulated(6))
    assert numbers(run(grid, config, "ray")) == numbers(in_process(config))
    novel = [asked for asked in questions(grid) if asked.metadata.dst_node_id not in training]
    list(grid.answer(named(novel), 60))
    assert any(not stateful(actor) for actor in actors.all)


def test_an_actor_forgets_who_lives_elsewhere_and_the_longest_unused(actors, monkeypatch):
    """It holds 230 bytes of 180: 50 too many. Node 1 is needed, 3 the longest unused, as 2 has just
    answered; 180 are left. Node 4 lives elsewhere. With 230 to hold all may stay."""
    grid = RayGrid(actors, SMALL, simulated(6))
    here, other = actors.all
    held = {1: 60, 2: 10, 3: 50, 4: 20, 5: 70}
    grid._held[here] = dict(held)
    grid._home = dict.fromkeys(held, here) | {4: other}
    grid._machines[here] = ray_grid._machine()
    batch = Batch(here, [Task(questions(grid)[1], 1.0)], 0, None)
    grid._remember(batch, [Answer(None, 0.1, state=30, changed=False)])
    monkeypatch.setattr(ray_grid, "HELD", 230)
    assert grid._surplus(here, {1}) == grid._surplus(other, {1}) == []
    monkeypatch.setattr(ray_grid, "HELD", 180)
    assert grid._surplus(here, {1}) == [3, 4]
    assert grid._held[here] == {1: 60, 5: 70, 2: 30}
    assert grid._home == {1: here, 2: here, 5: here, 4: other}


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no files in memory on this system")
def test_messages_and_answers_go_by_mailboxes_without_names(actors, monkeypatch):
    left, given = [], []

    def put(own, number, thing, put=Mailboxes.put):
        left.append(put(own, number, thing))
        return left[-1]

    def take(own, number, thing, take=Mailboxes.take):
        given.append(thing)
        return take(own, number, thing)

    monkeypatch.setattr(Mailboxes, "put", put)
    monkeypatch.setattr(Mailboxes, "take", take)
    config = configuration("pfedhn")  # every client's message has arrays of its own
    grid = RayGrid(actors, config, simulated(6))
    run(grid, config, "ray")
    assert len(left) == len(given) >= 6
    assert {*left, *given} == {None}
    names = [path for actor in grid._machines for path in actors.mailboxes[actor].paths]
    assert len(names) == len(grid._machines) * AHEAD
    assert not any(Path(name).exists() for name in names)


def out_of_reach(count, made=Mailboxes.made):
    """Mailboxes that an actor does not find, as on another machine."""
    boxes = made(count)
    boxes.hide()
    return boxes


@pytest.mark.parametrize("made", [lambda count: Mailboxes([]), out_of_reach])
def test_without_mailboxes_the_bits_are_the_same(actors, monkeypatch, made):
    config = configuration("pfedhn")
    monkeypatch.setattr(Mailboxes, "made", made)
    for actor in [*actors.all]:
        actors.replace(actor)
    grid = RayGrid(actors, config, simulated(6))
    assert numbers(run(grid, config, "ray")) == numbers(in_process(config))
    assert not any(len(actors.mailboxes[actor]) for actor in grid._machines)
    monkeypatch.undo()
    for actor in [*actors.all]:
        actors.replace(actor)


def test_what_a_private_client_has_answered_outlives_its_actor(actors):
    """Or it would answer another encoder as well, beyond its budget."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    config = configuration("odpfl-hn", **private)
    _, arrays = method_model("odpfl-hn", config, partitions.task(config))
    gamma = {name: a for name, a in arrays.items() if name.startswith("encoder.")}
    node = int(np.flatnonzero(partitions.federation(config).novel)[0]) + 1
    grid = RayGrid(actors, config, simulated(6))

    def asked(encoder):
        content = {"arrays": to_record(encoder), "config": ConfigRecord({"method": "odpfl-hn"})}
        message = Message(RecordDict(content), node, "query.encode")
        (reply,) = grid.answer(named([message]), 60)
        return from_record(reply.content["arrays"]) if reply.has_content() else reply.error.reason

    first = asked(gamma)["descriptor"]
    for _ in range(2):
        assert np.array_equal(asked(gamma)["descriptor"], first)
        assert "has answered what descriptor-epsilon 1" in asked(
            {n: a + 1 for n, a in gamma.items()}
        )
        ray.kill(grid._home[node])


@pytest.fixture
def chosen(monkeypatch):
    """The nodes of each batch that is chosen, and for which actor."""
    batches = []

    def choose(grid, actor, *given, choose=RayGrid._choose):
        batch = choose(grid, actor, *given)
        batches.append(([task.node for task in batch], actor))
        return batch

    monkeypatch.setattr(RayGrid, "_choose", choose)
    return batches


def questions(grid):
    """Who are you, all nodes?"""
    return [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]


def begun(grid):
    """Questions that were asked until every actor had begun."""
    asked = questions(grid)
    list(grid.answer(named(asked), 60))
    while grid._starting:
        list(grid.answer(named(asked), 60))
    return asked


def test_batches_become_shorter(actors, chosen):
    """Each a quarter of the rest, rounded down, for two actors: 24 leave 18, 14, 11, 9, 7."""
    config = configuration("fedavg", **{"num-clients": 24, "rounds": 1})
    run(RayGrid(actors, config, simulated(24)), config, "ray")
    sizes = [len(batch) for batch, _ in chosen]
    assert sizes[:12] == [6, 4, 3, 2, 2, *[1] * 7]  # who are you?


def test_a_batch_is_measured_in_seconds(actors, chosen):
    """Of 54 expected a quarter is 13: one that takes 30 goes first and alone. One of whom nothing
    is known takes what the others do on average: (30 + 22) / 23 = 2.3, so it is the second."""
    config = configuration("fedavg", **{"num-clients": 24, "rounds": 0})
    grid = RayGrid(actors, config, simulated(24))
    grid._seconds = {(node, "query"): 1.0 for node in range(1, 24)} | {(7, "query"): 30.0}
    asked = questions(grid)
    list(grid.answer(named(asked), timeout=60))
    assert chosen[0][0] == [7]
    assert chosen[1][0][0] == 24
    assert [len(batch) for batch, _ in chosen[1:4]] == [4, 4, 3]  # a quarter of 24.3, of 19, of 15
    begun(grid)
    chosen.clear()
    list(grid.answer(named(asked), timeout=60))  # both actors have begun
    assert chosen[0][1] is not chosen[1][1]


def test_actors_find_what_comes_from_outside_the_package(actors):
    """Method, data and partition, and their settings."""
    config = configuration(lab.DITTO, dataset=lab.RINGS, partition=lab.SIZES)
    own = {f"{lab.DITTO}.penalty": 0.5, f"{lab.RINGS}.noise": 0.1, f"{lab.SIZES}.power": 0.5}
    result = on_actors(actors, config | own)
    assert numbers(result) == numbers(in_process(config | own))
    assert numbers(result) != numbers(in_process(config | own | {f"{lab.DITTO}.penalty": 0.1}))


def test_replies_that_nobody_waits_for_disturb_no_later_exchange(actors):
    """What is at work when the caller turns away still uses its mailboxes."""
    config = configuration("fedavg", **{"local-steps": 300})
    grid = RayGrid(actors, config, simulated(6))
    who = begun(grid)
    _, arrays = method_model("fedavg", config, partitions.task(config))
    content = {"arrays": to_record(arrays), "config": ConfigRecord({"server-round": 1})}
    asked = [Message(RecordDict(content), node, "train") for node in grid.get_node_ids()]
    replies = grid.answer(named(asked), 60)
    next(replies)
    replies.close()
    assert grid._left
    replies = list(grid.answer(named(who), 60))
    told = {reply.metadata.src_node_id: reply.content["properties"]["client"] for reply in replies}
    assert told == {node: node - 1 for node in grid.get_node_ids()}
    list(grid.answer(named(who), 60))
    assert not grid._left


FAULTS = """
import resource, sys
import numpy as np
from fedapps.engines.ray_grid import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(200_000), np.ones(400_000)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_freed_memory_is_kept_for_the_next_arrays():
    """50 times arrays of 1.6 and 3.2 MB, in pages of 4 KB: 58 600 that have to be zeroed."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # else glibc learns it, sooner or later
    faults = [
        int(subprocess.run([sys.executable, "-c", FAULTS, what], env=env, capture_output=True,
                           check=True).stdout)
        for what in ("give", "keep")
    ]  # fmt: skip
    assert faults[0] > 50_000
    assert faults[1] < 1_000


def test_one_that_never_answers_costs_the_timeout_and_its_batch(actors, ordered):
    """Time enough for everybody else; the others of its batch are asked no more this round."""
    config = configuration("fedavg", **ALL)
    ordered("sleep")
    grid = RayGrid(actors, config, simulated(6))
    grid.answer = partial(impatient, grid.answer)
    told = run(grid, config, "ray").train_metrics_clientapp
    assert told[2]["dropped-missing"] >= 1
    assert told[3]["valid-replies"] == 5
    assert not grid._late
    assert np.isfinite(told[3]["loss"])


def test_who_did_not_answer_in_time_goes_alone_and_nobody_waits_behind(actors, chosen):
    config = configuration("fedavg", **{"num-clients": 8, "rounds": 0})
    grid = RayGrid(actors, config, simulated(8))
    asked = begun(grid)
    late = [Task(asked[2], 1.0), Task(asked[5], 1.0)]
    grid._suspect(late, 20.0)
    assert grid._weight(late) == AHEAD
    chosen.clear()
    list(grid.answer(named(asked), 60))
    assert [nodes for nodes, _ in chosen[:2]] == [[3], [6]]
    assert chosen[0][1] is not chosen[1][1]
    assert not grid._late and grid._seconds[3, "query"] < 20


def test_an_actor_that_ray_ends_for_want_of_memory_is_replaced(actors, monkeypatch):
    get, raised = ray.get, []

    def once(refs, **options):
        value = get(refs, **options)
        if value is None and not raised:  # answers that lie in the mailbox
            raised.append(value)
            raise ray.exceptions.OutOfMemoryError("1 worker was killed")
        return value

    config = configuration("scaffold")
    expected = numbers(in_process(config))
    monkeypatch.setattr(ray, "get", once)
    assert numbers(on_actors(actors, config)) == expected
    assert raised


def impatient(answer, messages, timeout):
    """Ten seconds for round 2, whose actors have answered before."""
    hangs = any(
        message.metadata.message_type == "train" and message.content["config"]["server-round"] == 2
        for message in messages
    )
    return answer(messages, 10.0 if hangs else timeout)


def test_an_actor_that_dies_is_replaced_and_its_clients_keep_their_states(actors, ordered, orders):
    """It dies once; asked again, the client goes on from the state that lay in the store."""
    config = configuration("scaffold", **ALL)
    ordered("die once")
    result = on_actors(actors, config)
    assert not orders.exists()
    assert numbers(result) == numbers(in_process(config))


def test_a_client_that_kills_every_process_costs_its_own_reply(actors, ordered):
    ordered("die")
    told = on_actors(actors, configuration("fedavg", **ALL)).train_metrics_clientapp
    assert [told[n].get("dropped-error", 0) for n in (1, 2, 3)] == [0, 1, 0]
    assert [told[n]["valid-replies"] for n in (1, 2, 3)] == [5, 4, 5]


class Cut(BaseException):
    """The run is cut, as by SIGKILL."""


def test_a_run_that_is_interrupted_stops_between_replies(actors):
    """Five clients' answers come in several batches: the third time that they are waited for."""
    config, waited = configuration("fedavg", **ALL), []

    def pause():
        waited.append(1)
        if len(waited) == 3:
            raise Cut

    with pytest.raises(Cut):
        run(RayGrid(actors, config, simulated(6), pause=pause), config, "ray")
    assert len(waited) == 3


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(actors, tmp_path, monkeypatch):
    """SCAFFOLD, whose clients' states lie in actors, cut when round 3 begins."""
    config = configuration("scaffold", **{"checkpoint-every": 1, "train-fraction": 0.9})
    begin = PersonalizedStrategy.configure_train

    def configure_train(self, server_round, *args):
        if server_round == 3:
            raise Cut
        return begin(self, server_round, *args)

    on_actors(actors, config | {"output-dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(PersonalizedStrategy, "configure_train", configure_train)
        patch.setattr(Recorder, "__exit__", lambda *_: None)
        on_actors(actors, config | {"output-dir": str(tmp_path / "cut")})
    on_actors(actors, config | {"output-dir": str(tmp_path / "cut"), "resume": True})
    assert left(tmp_path / "cut") == left(tmp_path / "whole")
