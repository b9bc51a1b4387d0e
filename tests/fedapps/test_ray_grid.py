"""RayGrid: the bits of the other engines; actors and machines that die or hang."""

import importlib
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
from documented_code import DITTO, RINGS, SIZES, written
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.simulation.ray_transport.ray_actor import ClientAppActor
from small_runs import ALL_SAMPLES, SMALL, UNUSUAL, Cut, bits, cut_before, left

import partitions
from clients.core.arrays import from_record, to_record
from clients.core.protocol import LOCAL_NOISE
from fedapps.building import method_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid, Simulated, with_ids
from fedapps.engines.memory_files import MEMORY, MemoryFiles
from fedapps.engines.ray_actors import AHEAD, Actors
from fedapps.engines.ray_engine import ray_cluster
from fedapps.engines.ray_grid import RayGrid, Task
from fedapps.node.context import is_simulated
from fedapps.node.ledger import agreed_terms, protected
from fedapps.serverapp import load_client_app, run

NODE = 2  # of a training client that takes part in rounds 1 and 2, which the tests check
ALL = {"fraction-train": 1.0, "train-fraction": 0.9}  # five clients train


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """A file with an order for the process in which NODE trains in round 2."""
    return tmp_path_factory.mktemp("orders") / "now"


@pytest.fixture(scope="module")
def actors(orders, tmp_path_factory):
    """Two actors of a Ray that started where somebody's own package lies in a folder of
    PYTHONPATH. All tests use them: a process costs seconds."""
    with (
        written(tmp_path_factory.mktemp("lab")) as folder,
        pytest.MonkeyPatch.context() as env,
    ):
        env.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with ray_cluster():
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            with Actors(obeying(orders), 2) as found:
                yield found


def obeying(orders):
    """Loads the ClientApp, which obeys the orders."""

    def load():
        answer = load_client_app()

        def client_app(message, context):
            if trains_in_round_2(message) and context.node_id == NODE:
                obey(orders)
            return answer(message, context)

        return client_app

    return load


def trains_in_round_2(message):
    config = message.content.config_records.get("config", {})
    return message.metadata.message_type == "train" and config["server-round"] == 2


def obey(orders):
    order = orders.read_text() if orders.exists() else ""
    if order == "die once":
        orders.unlink()
    if order.startswith("die"):
        os._exit(1)
    if order == "sleep":
        time.sleep(600)


@pytest.fixture
def ordered(orders):
    """Gives an order for the test's time."""
    yield orders.write_text
    orders.unlink(missing_ok=True)


def configuration(method, **changes):
    return SMALL | {"method": method, "fraction-train": 0.7, "rounds": 3} | changes


def in_process(config):
    return run(InProcessGrid.simulation(app, config, 6), config, "in-process")


def on_actors(actors, config):
    return run(RayGrid(actors, config, Simulated(6)), config, "ray")


@pytest.mark.parametrize("method", ["scaffold", "fedtta++", "odpfl-hn", "lg-fedavg", "pfl-nearest"])
def test_the_bits_are_those_of_one_process(method, actors):
    """Methods with and without states, of one exchange and several, on the same actors."""
    config = configuration(method, **{"rounds": 2, "evaluate-every": 2})
    assert bits(on_actors(actors, config)) == bits(in_process(config))


@pytest.mark.parametrize("case", UNUSUAL)
def test_clients_without_labels_streams_and_shifted_tests_are_the_same_in_actors(case, actors):
    """Where two of four training clients have labels, FLowDUP trains four and HyperFedZero two."""
    rounds = 3 if "late" in case else 2
    config = configuration(**UNUSUAL[case] | {"rounds": rounds})
    result = on_actors(actors, config)
    assert bits(result) == bits(in_process(config))
    metrics = result.train_metrics_clientapp[rounds]
    if "labels" in case:
        assert metrics["valid-replies"] == (4 if "flowdup" in case else 2)
        assert result.evaluate_metrics_clientapp[rounds]["train-clients"] == 2


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no files in memory on this system")
def test_messages_and_answers_go_by_files_without_names(actors, monkeypatch):
    returned, given = [], []

    def write(self, number, value, write=MemoryFiles.write):
        returned.append(write(self, number, value))
        return returned[-1]

    def read(self, number, value, read=MemoryFiles.read):
        given.append(value)
        return read(self, number, value)

    monkeypatch.setattr(MemoryFiles, "write", write)
    monkeypatch.setattr(MemoryFiles, "read", read)
    config = configuration("pfedhn")  # every client's message has arrays of its own
    grid = RayGrid(actors, config, Simulated(6))
    run(grid, config, "ray")
    assert len(returned) == len(given) >= 6
    assert {*returned, *given} == {None}
    names = [path for actor in grid._machines for path in actors.files[actor].paths]
    assert len(names) == len(grid._machines) * AHEAD
    assert not any(Path(name).exists() for name in names)


@pytest.fixture
def sent(monkeypatch):
    """The nodes of each batch that is sent, and its actor."""
    batches = []

    def send(grid, actor, tasks, *arguments, send=RayGrid._send):
        batches.append(([task.node for task in tasks], actor))
        return send(grid, actor, tasks, *arguments)

    monkeypatch.setattr(RayGrid, "_send", send)
    return batches


def test_what_a_private_client_has_answered_outlives_its_actor(actors, sent):
    """Or it would answer another encoder as well, beyond its budget."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    config = configuration("odpfl-hn", **private)
    _, arrays = method_model("odpfl-hn", config, partitions.task(config))
    gamma = {name: a for name, a in arrays.items() if name.startswith("encoder.")}
    node = int(np.flatnonzero(partitions.federation(config).novel)[0]) + 1
    grid = RayGrid(actors, config, Simulated(6))

    def asked(encoder):
        content = {"arrays": to_record(encoder), "config": ConfigRecord({"method": "odpfl-hn"})}
        message = Message(RecordDict(content), node, "query.encode")
        (reply,) = grid.answer(with_ids([message]), 600)
        return from_record(reply.content["arrays"]) if reply.has_content() else reply.error.reason

    first = asked(gamma)["descriptor"]
    ((_, answered),) = sent
    for dies in (True, False):
        assert np.array_equal(asked(gamma)["descriptor"], first)
        other = asked({name: a + 1 for name, a in gamma.items()})
        assert "has answered what descriptor-epsilon 1" in other
        if dies:
            ray.kill(answered)


@pytest.fixture
def lacking(actors):
    """An actor that finds no files in memory, as on another machine; afterwards it has new ones. A
    new actor would take seconds."""

    def open_files(actor, paths):
        actor.files = MemoryFiles(paths)
        actor.files.unlink()
        return len(actor.files)

    lacking = actors.all[0]
    unlinked = actors.files[lacking].paths
    assert ray.get(lacking.__ray_call__.remote(open_files, unlinked)) == 0
    yield lacking
    files = actors.files[lacking] = MemoryFiles.create(AHEAD)
    assert ray.get(lacking.__ray_call__.remote(open_files, files.paths)) == AHEAD


def test_without_files_in_memory_the_bits_are_the_same(actors, lacking, sent):
    """One of the two actors finds none."""
    config = configuration("pfedhn")
    grid = RayGrid(actors, config, Simulated(6))
    assert bits(run(grid, config, "ray")) == bits(in_process(config))
    assert lacking in [actor for _, actor in sent]
    assert lacking in actors.all and not len(actors.files[lacking])


def queries(grid):
    """An opening query to every node."""
    return [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]


def begun(actors, count, **changes):
    """A grid of so many nodes, all of whose actors have begun."""
    config = configuration("fedavg", **{"num-clients": count, "rounds": 0} | changes)
    grid = RayGrid(actors, config, Simulated(count))
    list(grid.answer(with_ids(queries(grid)), 60))
    while grid._starting:
        list(grid.answer(with_ids(queries(grid)), 60))
    return grid


def test_batches_become_shorter_and_are_measured_in_seconds(actors, sent):
    """Of equal answers each batch is a quarter of the rest, rounded down, for two actors: 24 leave
    18, 14, 11, 9, 7. Of 54 seconds a quarter is 13: an answer of 30 goes first and alone. One of
    unknown length takes the others' mean, (30 + 22) / 23 = 2.3, so it is the second."""
    grid = begun(actors, 24)
    for expected, sizes in (({}, [6, 4, 3, 2, 2, *[1] * 7]), ({7: 30.0}, [1, 4, 4, 3])):
        grid._seconds = {(n, "query"): 1.0 for n in range(1, 24)} if expected else {}
        grid._seconds |= {(node, "query"): seconds for node, seconds in expected.items()}
        sent.clear()
        list(grid.answer(with_ids(queries(grid)), 60))
        assert [len(batch) for batch, _ in sent[: len(sizes)]] == sizes
        assert sent[0][1] is not sent[1][1]
    assert sent[0][0] == [7]
    assert sent[1][0][0] == 24


def test_a_node_that_was_late_is_asked_alone_and_nothing_waits_behind_it(actors, sent):
    grid = begun(actors, 8)
    asked = queries(grid)
    late = [Task(asked[2], 1.0), Task(asked[5], 1.0)]
    grid._late |= {3, 6}
    grid._seconds |= {(3, "query"): 20.0, (6, "query"): 20.0}
    assert grid._weight(late) == AHEAD
    sent.clear()
    list(grid.answer(with_ids(asked), 60))
    assert [nodes for nodes, _ in sent[:2]] == [[3], [6]]
    assert sent[0][1] is not sent[1][1]
    assert not grid._late and grid._seconds[3, "query"] < 20


def test_actors_find_what_comes_from_outside_the_package(actors):
    """Method, data and partition, and their settings."""
    config = configuration(DITTO, dataset=RINGS, partition=SIZES) | ALL_SAMPLES
    config |= {
        f"{DITTO}.penalty": 0.5,
        f"{RINGS}.noise": 0.1,
        f"{SIZES}.power": 0.5,
    }
    result = bits(on_actors(actors, config))
    assert result == bits(in_process(config))
    assert result != bits(in_process(config | {f"{DITTO}.penalty": 0.1}))


def test_replies_that_nobody_waits_for_disturb_no_later_exchange(actors):
    """Batches that run when the caller stops iterating still use their files."""
    grid = begun(actors, 6, **{"local-steps": 100})
    _, arrays = method_model("fedavg", SMALL, partitions.task(SMALL))
    content = {"arrays": to_record(arrays), "config": ConfigRecord({"server-round": 1})}
    asked = [Message(RecordDict(content), node, "train") for node in grid.get_node_ids()]
    replies = grid.answer(with_ids(asked), 60)
    next(replies)
    replies.close()
    assert grid._abandoned
    replies = list(grid.answer(with_ids(queries(grid)), 60))
    got = {reply.metadata.src_node_id: reply.content["properties"]["client"] for reply in replies}
    assert got == {node: node - 1 for node in grid.get_node_ids()}
    list(grid.answer(with_ids(queries(grid)), 60))
    assert not grid._abandoned


def test_a_client_that_never_answers_costs_the_timeout_and_its_batch(actors, ordered):
    """Ten seconds for round 2, whose actors have answered before: enough for all others."""
    config = configuration("fedavg", **ALL)
    ordered("sleep")
    grid = RayGrid(actors, config, Simulated(6))

    def impatient(answer, messages, timeout):
        return answer(messages, 10.0 if any(map(trains_in_round_2, messages)) else timeout)

    grid.answer = partial(impatient, grid.answer)
    got = run(grid, config, "ray").train_metrics_clientapp
    assert got[2]["dropped-missing"] >= 1
    assert got[3]["valid-replies"] == 5
    assert not grid._late
    assert np.isfinite(got[3]["loss"])


def test_an_actor_that_dies_is_replaced_and_its_clients_keep_their_states(actors, ordered, orders):
    config = configuration("scaffold", **ALL)
    ordered("die once")
    result = on_actors(actors, config)
    assert not orders.exists()
    assert bits(result) == bits(in_process(config))


def test_a_client_that_kills_every_process_costs_its_own_reply(actors, ordered):
    ordered("die")
    got = on_actors(actors, configuration("fedavg", **ALL)).train_metrics_clientapp
    assert [got[n].get("dropped-error", 0) for n in (1, 2, 3)] == [0, 1, 0]
    assert [got[n]["valid-replies"] for n in (1, 2, 3)] == [5, 4, 5]


def test_a_run_that_is_interrupted_stops_between_replies(actors):
    """Five clients' answers come in several batches: the third time that they are waited for."""
    config, waited = configuration("fedavg", **ALL), []

    def pause():
        waited.append(1)
        if len(waited) == 3:
            raise Cut

    with pytest.raises(Cut):
        run(RayGrid(actors, config, Simulated(6), pause=pause), config, "ray")
    assert len(waited) == 3


def test_only_flowers_own_actors_say_that_they_simulate(actors):
    """Not a process whose code has started Ray, as this one, and not another actor."""
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 6}, RecordDict(), {})
    assert ray.is_initialized() and not is_simulated(context)

    def in_actor(_):
        importlib.import_module("flwr.simulation.ray_transport.ray_actor")
        return is_simulated(context)

    assert not ray.get(actors.all[0].__ray_call__.remote(in_actor))

    def app_of_flower():
        return lambda message, context: is_simulated(context)

    flowers = ClientAppActor.options(num_cpus=0).remote()
    _, answer, _ = ray.get(flowers.run.remote(app_of_flower, None, "0", context))
    assert answer
    ray.kill(flowers)


def test_a_real_node_whose_code_started_ray_counts_what_it_gives(actors, tmp_path):
    """A file with the ledger, before the client's answer leaves."""
    config = SMALL | {"dp": "local", "dp-noise-multiplier": 1.0, "rounds": 1}
    context = Context(1, 1, {"state-dir": str(tmp_path)}, RecordDict(), config)
    arrays = {"arrays": to_record({"w": np.zeros(2)}), "config": ConfigRecord({LOCAL_NOISE: 9.0})}
    grid = InProcessGrid(app, config, [{}])
    (message,) = with_ids([grid.create_message(RecordDict(arrays), "train", 1, "")])
    moved = {"arrays": to_record({"w": np.ones(2)}), "metrics": MetricRecord({"num-examples": 3})}
    terms = agreed_terms(message, context)
    reply = protected(Message(RecordDict(moved), reply_to=message), message, context, terms)
    assert not reply.has_error() and (tmp_path / "privacy.safetensors").is_file()


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(actors, tmp_path):
    """SCAFFOLD, whose clients' states are in Ray's store, cut when round 3 begins."""
    config = configuration("scaffold", **{"checkpoint-every": 1, "train-fraction": 0.9})
    on_actors(actors, config | {"output-dir": str(tmp_path / "whole")})
    config["output-dir"] = str(tmp_path / "cut")
    with cut_before(3):
        on_actors(actors, config)
    on_actors(actors, config | {"resume": True})
    assert left(tmp_path / "cut") == left(tmp_path / "whole")
