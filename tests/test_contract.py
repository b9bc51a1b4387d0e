"""What every method of the table keeps: names, state, determinism, survival of bad clients."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
import tiny
import wire
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from tiny import NEEDS, WEE

import partitions
from clients.arrays import from_record, to_record
from fedapps.clientapp import app, make_client
from fedapps.engines.grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.bridge import answer
from fedapps.node.building import method_model, with_public
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.base import PersonalizedStrategy

SCORES = ("accuracy", "loss", "sem")  # how keys end whose values labels decide
EVERY = pytest.mark.parametrize("method", METHODS)


SMALL = {"num-clients": 6, "rounds": 3, "local-steps": 2, "evaluate-every": 3}


@pytest.fixture(scope="module")
def config():
    return defaults() | WEE | SMALL


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(request, config):
    """A method's run that several tests look at: its name, result, grid, and every prediction."""
    with predictions() as seen, draws() as drawn:
        result, grid = go(request.param, config, grid=Watched)
    grid.drawn = drawn
    return request.param, result, grid, seen


@contextmanager
def predictions():
    """Within the context: each client's logits, as bytes, in the order of their making."""
    seen: list[tuple[int, bytes]] = []
    classes = {one for m in METHODS.values() for one in m.client.__mro__ if "predict" in vars(one)}
    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:

            def predict(self, x, real=cls.predict):
                logits = real(self, x)
                seen.append((self.client, logits.detach().cpu().numpy().tobytes()))
                return logits

            patch.setattr(cls, "predict", predict)
        yield seen


@contextmanager
def draws():
    """Within the context: what generators are seeded by, and in which message; None: the server's
    are in none."""
    drawn: list[tuple[tuple, tuple | None]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            folder = name.partition(".")[0]
            if folder in ("clients", "strategies") and hasattr(module, "seed_of"):

                def noted(*words, real=module.seed_of, here=folder == "strategies"):
                    drawn.append((words, None if here else Watched.now))
                    return real(*words)

                patch.setattr(module, "seed_of", noted)
        yield drawn


class Watched(tiny.Watched):
    """Keeps every message and reply, and whether an evaluation changed a state."""

    changed_by_evaluation = False
    now = (0, 0, 0)  # number, node and round of the message that is answered

    def _deliver(self, message):
        round_ = message.content.config_records["config"].get("server-round", 0)
        Watched.now = (len(self.seen), message.metadata.dst_node_id, round_)
        state = self.contexts[message.metadata.dst_node_id].state
        before = {key: dict(record) for key, record in state.items()}
        reply = super()._deliver(message)
        if message.metadata.message_type == "evaluate":
            after = {key: dict(record) for key, record in state.items()}
            self.changed_by_evaluation |= before != after
        return reply


def go(method, config, client_app=app, grid=InProcessGrid):
    config = config | {"method": method} | NEEDS.get(method, {})
    grid = grid.simulation(client_app, config, config["num-clients"])
    return run(grid, config, "in-process"), grid


def broken(method, config, spoil):
    """The method's ClientApp, in which one training client answers train messages by `spoil`."""
    bad = {}

    def handle(message, context):
        reply = answer(message, context, make_client)
        novel = make_client(context, method).share.novel
        if message.metadata.message_type == "train" and not novel:
            bad.setdefault("node", context.node_id)
            if context.node_id == bad["node"]:
                return spoil(message, reply)
        return reply

    client_app = ClientApp()
    client_app.query()(handle)
    client_app.train()(handle)
    client_app.evaluate()(handle)
    for exchange in METHODS[method].client.exchanges:
        category, _, action = exchange.partition(".")
        getattr(client_app, category)(action)(handle)
    return client_app


def raising(message, reply):
    raise OSError("disk full")


def not_finite(message, reply):
    arrays = from_record(reply.content["arrays"])
    reply.content["arrays"] = to_record({n: np.full_like(a, np.nan) for n, a in arrays.items()})
    return reply


def wrong_shape(message, reply):
    arrays = from_record(reply.content["arrays"])
    reply.content["arrays"] = to_record({n: a.reshape(-1)[:1] for n, a in arrays.items()})
    return reply


def test_personal_names_never_travel_and_evaluation_changes_nothing(undisturbed, config):
    method, _, grid, _ = undisturbed
    client = METHODS[method].client
    own = config | {"method": method} | NEEDS.get(method, {})
    _, initial = method_model(method, own, partitions.task(own))
    personal = {name for name in initial if client.is_personal(name)}
    travelled = {
        name.rpartition("/")[2]
        for message in grid.seen
        if message.has_content()
        for record in message.content.array_records.values()
        for name in record
    }
    assert not personal & travelled
    assert not grid.changed_by_evaluation
    assert not any(message.has_error() for message in grid.seen)


def test_no_two_draws_share_a_generator(undisturbed):
    """Not those of two clients, of two rounds, or of two purposes in one message; a descriptor's
    gradient draws the inputs of the message before it once more. Nor any two of the server's."""
    _, _, grid, _ = undisturbed
    server = [words for words, message in grid.drawn if message is None]
    assert len(server) == len(set(server)) and server
    uses: dict[tuple, list[tuple]] = {}
    for words, message in grid.drawn:
        if message is not None:
            uses.setdefault(words, []).append(message)
    assert uses
    for words, messages in uses.items():
        numbers, nodes, rounds = map(set, zip(*messages, strict=True))
        assert len(nodes) == len(rounds) == 1, words
        assert len(numbers) == len(messages), words


def test_messages_hold_what_the_page_on_privacy_names(undisturbed, config):
    method, _, grid, _ = undisturbed
    found = wire.held(method, config | NEEDS.get(method, {}), grid.seen)
    assert not wire.unnamed(method, found)


def test_same_seed_same_bits_and_another_seed_others(undisturbed, config, monkeypatch):
    """And arrays that a strategy does not claim to change in place may be locked."""
    method, one, *_ = undisturbed
    aggregate_train = PersonalizedStrategy.aggregate_train

    def locked(strategy, *arguments):
        for array in {} if strategy.in_place else strategy.arrays.values():
            array.flags.writeable = False
        return aggregate_train(strategy, *arguments)

    monkeypatch.setattr(PersonalizedStrategy, "aggregate_train", locked)
    two, other = (go(method, config | {"seed": seed})[0] for seed in (0, 1))
    numbers = [dict(r.evaluate_metrics_clientapp[3]) for r in (one, two, other)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert {n: a.data for n, a in one.arrays.items()} == {n: a.data for n, a in two.arrays.items()}


def test_held_out_labels_reach_nothing_but_the_score(undisturbed, config):
    """With every label of validation and test samples, and of novel clients that are served without
    labels, replaced by another class: the same server arrays, messages, replies, predictions and
    adaptations (steps, entropies), hence the same chosen round; only scores change."""
    method, before, grid, seen = undisturbed
    own = config | NEEDS.get(method, {})
    federation = partitions.federation(with_public(own, method))
    labels = federation.dataset.y
    kept = labels.clone()
    for share in map(federation.share, range(federation.num_clients)):
        parts = (share.validation, share.test)
        if share.novel:
            parts = (share.everything,) if METHODS[method].novel else ()
        for index in (part.index for part in parts if part is not None):
            labels[index] = (kept[index] + 3) % 10
    try:
        with predictions() as again:
            after, other = go(method, config, grid=Watched)
    finally:
        labels.copy_(kept)
    if before.arrays is not None:
        one, two = ({n: a.data for n, a in r.arrays.items()} for r in (before, after))
        assert one == two
    assert seen == again and seen
    assert [contents(m) for m in grid.seen] == [contents(m) for m in other.seen]
    one, two = (dict(r.evaluate_metrics_clientapp[3]) for r in (before, after))
    changed = {key for key in one if one[key] != two[key]}
    assert changed & {"train-loss", "train-test-accuracy"}
    assert ("novel-loss" in changed) == bool(METHODS[method].novel)
    assert all(key.endswith(SCORES) or "-f1" in key for key in changed)


def contents(message):
    """What a message holds but its scores and the run's token, to be compared."""
    arrays = [{n: a.data for n, a in r.items()} for r in message.content.array_records.values()]
    records = [*message.content.config_records.values(), *message.content.metric_records.values()]
    told = {key: value for record in records for key, value in record.items()}
    told.pop("run-token", None)
    if message.metadata.message_type == "evaluate":
        told = {key: v for key, v in told.items() if not key.endswith((*SCORES, "counts"))}
    return message.metadata.message_type, arrays, told


@EVERY
def test_a_bad_client_is_dropped_and_counted(method, config):
    """It raises in the first round, sends NaN in the second, and one entry in the third."""
    spoils = {1: raising, 2: not_finite, 3: wrong_shape}
    causes = {1: ["error"], 2: ["not-finite"], 3: ["shape", "malformed", "names"]}
    if method == "local":  # whose replies hold nothing that could be spoilt
        spoils = dict.fromkeys(spoils, raising)
        causes = {round_: ["error"] for round_ in causes}

    def spoil(message, reply):
        return spoils[message.content["config"]["server-round"]](message, reply)

    result, _ = go(method, config, broken(method, config, spoil))
    for round_, metrics in result.train_metrics_clientapp.items():
        assert metrics["valid-replies"] == 2
        assert sum(metrics.get(f"dropped-{cause}", 0) for cause in causes[round_]) == 1
    assert len(result.train_metrics_clientapp) == 3
    assert all(
        np.isfinite(a.numpy()).all()
        for a in (result.arrays or ArrayRecord()).values()
        if a.numpy().dtype.kind == "f"
    )


@EVERY
def test_stop_on_failure_stops(method, config):
    with pytest.raises(RuntimeError, match="client failed"):
        go(method, config | {"on-client-failure": "stop"}, broken(method, config, raising))


@EVERY
def test_too_few_valid_replies_stop_the_run(method, config):
    with pytest.raises(RuntimeError, match="min-valid-replies is 3"):
        go(method, config | {"min-valid-replies": 3}, broken(method, config, raising))
