"""The contract of every method: names, state, determinism, privacy, survival of bad clients."""

import sys
from contextlib import contextmanager

import numpy as np
import pytest
import small_runs
import wire_table
from flwr.app import ArrayRecord
from small_runs import FEWER, LATE, NEEDS, WEE, answering

import partitions
from clients.core.arrays import from_record, to_record
from clients.core.evaluation import CRITERIA
from clients.core.protocol import StateUse
from fedapps.building import method_model, with_public
from fedapps.clientapp import answer, app, make_client
from fedapps.common.tasks import ALL_TASKS, BINARY, CLASSES, LABELS, VALUES
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.strategy import PersonalizedStrategy

# Scores of an evaluation by task, the main one first.
TASK_SCORES = {
    BINARY: {"accuracy"},
    LABELS: {"accuracy", "micro-f1", "macro-f1"},
    VALUES: {"rmse", "mae", "r2"},
}
OTHER_TASKS = [
    (method, task)
    for method, entry in METHODS.items()
    for task in entry.served_tasks
    if task != CLASSES
]
NEED_IMAGES = ("fedbn", "bn-adapt", "memo")
SCORES = ("accuracy", "loss", "sem")  # ends of the keys whose values depend on labels
EVERY = pytest.mark.parametrize("method", METHODS)
# What the server alone decides: a method for each class of strategy and its further messages.
_SERVERS = {(m.strategy, m.client.exchanges): name for name, m in reversed(METHODS.items())}
EVERY_SERVER = pytest.mark.parametrize("method", sorted(_SERVERS.values()))
SMALL = {"num-clients": 6, "rounds": 3, "local-steps": 2, "evaluate-every": 3}
# Less work on digits; other data keep the defaults.
LESS = {"model": "mlp-small", "batch-size": 16} | FEWER


@pytest.fixture(scope="module", params=METHODS)
def finished(request):
    """A method's run that several tests check: its name, result, grid, and every prediction."""
    with predictions() as logits, draws() as drawn:
        result, grid = go(request.param, grid=Watched)
    grid.drawn = drawn
    return request.param, result, grid, logits


@contextmanager
def predictions():
    """Yields each client's logits, as bytes, in the order of the calls."""
    recorded: list[tuple[int, bytes]] = []
    classes = {cls for m in METHODS.values() for cls in m.client.__mro__ if "predict" in vars(cls)}
    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:

            def predict(self, x, real=cls.predict):
                logits = real(self, x)
                recorded.append((self.client, logits.detach().cpu().numpy().tobytes()))
                return logits

            patch.setattr(cls, "predict", predict)
        yield recorded


@contextmanager
def draws():
    """Yields the words that seed each generator, with the client's message; None on the server."""
    drawn: list[tuple[tuple, tuple | None]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            folder = name.partition(".")[0]
            if folder in ("clients", "strategies") and hasattr(module, "seed_of"):

                def seed_of(*words, real=module.seed_of, server=folder == "strategies"):
                    drawn.append((words, None if server else Watched.now))
                    return real(*words)

                patch.setattr(module, "seed_of", seed_of)
        yield drawn


class Watched(small_runs.Watched):
    """Records every message and reply, and whether an evaluation changed a state."""

    changed_by_evaluation = False
    now = (0, 0, 0)  # number, node and round of the current message

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


def configured(method, **changes):
    return defaults() | WEE | SMALL | LESS | {"method": method} | NEEDS.get(method, {}) | changes


def go(method, client_app=app, grid=InProcessGrid, **changes):
    config = configured(method, **changes)
    grid = grid.simulation(client_app, config, config["num-clients"])
    return run(grid, config, "in-process"), grid


def broken(method, spoil):
    """The method's ClientApp, in which `spoil` changes one training client's train replies."""
    bad = {}

    def handle(message, context):
        reply = answer(message, context)
        novel = make_client(context, method).share.novel
        if message.metadata.message_type == "train" and not novel:
            bad.setdefault("node", context.node_id)
            if context.node_id == bad["node"]:
                return spoil(message, reply)
        return reply

    return answering(method, handle)


def raising(message, reply):
    raise OSError("disk full")


def changed(change):
    def spoil(message, reply):
        arrays = from_record(reply.content["arrays"])
        reply.content["arrays"] = to_record({n: change(a) for n, a in arrays.items()})
        return reply

    return spoil


not_finite = changed(lambda a: np.full_like(a, np.nan))
wrong_shape = changed(lambda a: a.reshape(-1)[:1])


def test_personal_names_are_never_sent_and_evaluation_changes_nothing(finished):
    method, _, grid, _ = finished
    _, initial = method_model(method, configured(method), partitions.task(configured(method)))
    personal = {name for name in initial if METHODS[method].client.is_personal(name)}
    sent = {
        name.rpartition("/")[2]
        for message in grid.seen
        if message.has_content()
        for record in message.content.array_records.values()
        for name in record
    }
    assert not personal & sent
    assert not grid.changed_by_evaluation
    assert not any(message.has_error() for message in grid.seen)


def test_no_two_draws_share_a_generator(finished):
    """Draws of two clients, of two rounds, or for two purposes in one message differ, and so do any
    two of the server's. A descriptor's gradient repeats the inputs of the previous message."""
    _, _, grid, _ = finished
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


def test_messages_hold_only_what_the_page_on_privacy_names(finished):
    method, _, grid, _ = finished
    assert not wire_table.unnamed(method, wire_table.held(method, configured(method), grid.seen))


def test_one_seed_gives_the_same_bits_whatever_held_out_labels_are(finished, monkeypatch):
    """Every label of validation and test samples, and of novel clients that are served without
    labels, is replaced by another class. Server arrays, messages, replies, predictions and
    adaptations (steps, entropies) stay the same, hence the chosen round; only scores change. Also
    with locked arrays, if the strategy does not claim to change them in place."""
    method, before, grid, logits = finished
    aggregate_train = PersonalizedStrategy.aggregate_train

    def locked(strategy, *arguments):
        for array in {} if strategy.in_place else strategy.arrays.values():
            array.flags.writeable = False
        return aggregate_train(strategy, *arguments)

    monkeypatch.setattr(PersonalizedStrategy, "aggregate_train", locked)
    federation = partitions.federation(with_public(configured(method), method))
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
            after, other = go(method, grid=Watched)
    finally:
        labels.copy_(kept)
    assert {n: a.data for n, a in before.arrays.items()} == {
        n: a.data for n, a in after.arrays.items()
    }
    assert logits == again and logits
    assert [contents(m) for m in grid.seen] == [contents(m) for m in other.seen]
    one, two = (dict(r.evaluate_metrics_clientapp[3]) for r in (before, after))
    changed = {key for key in one if one[key] != two[key]}
    assert changed & {"train-loss", "train-test-accuracy"}
    assert ("novel-loss" in changed) == bool(METHODS[method].novel)
    assert all(key.endswith(SCORES) or "-f1" in key for key in changed)


@EVERY_SERVER
def test_late_replies_are_used_or_dropped_as_the_strategy_says(method):
    """Of three training clients or more one is three times slower: its reply to round 1 is there
    by the end of round 3, or of an earlier one where a method's further messages take time."""
    changes = LATE | {"fraction-evaluate": 0.0, "local-steps": 1}
    reports = []
    strategy = METHODS[method].strategy
    record = strategy.aggregate_evaluate

    def recorded(self, *arguments):
        result = record(self, *arguments)
        reports.append(dict(self.now.report))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "aggregate_evaluate", recorded)
        result, _ = go(method, **changes)
    used = sum(report["late-used"] for report in reports)
    dropped = sum(report["late-dropped"] for report in reports)
    assert reports[0]["late"] > 0
    assert (used > 0, dropped > 0) == (strategy.uses_late_replies, not strategy.uses_late_replies)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


def test_what_novel_clients_get_is_validated():
    """Where training clients predict with what they kept, they score a novel client's model, too.
    PFL's novel clients get models of others, which no client tries on its labels."""
    kept = {n: m for n, m in METHODS.items() if m.client.needs_state == StateUse.PREDICTIONS}
    unseen = {name for name, m in kept.items() if m.novel and not m.client.also_scores_global_model}
    assert unseen == {"pfl-sampled", "pfl-nearest", "pfl-ensemble"}


def test_another_seed_gives_other_numbers_on_the_same_data():
    one, other = (go("fedavg", seed=seed, **{"data-seed": 0})[0] for seed in (0, 1))
    assert one.evaluate_metrics_clientapp[3] != other.evaluate_metrics_clientapp[3]


def contents(message):
    """What a message holds, without its scores, its duration and the run's token."""
    arrays = [{n: a.data for n, a in r.items()} for r in message.content.array_records.values()]
    records = [*message.content.config_records.values(), *message.content.metric_records.values()]
    values = {key: value for record in records for key, value in record.items()}
    values.pop("run-token", None)
    if message.metadata.message_type == "evaluate":
        values = {
            key: v for key, v in values.items() if not key.endswith((*SCORES, "counts", "seconds"))
        }
    return message.metadata.message_type, arrays, values


@EVERY
def test_a_bad_client_is_dropped_and_counted(method):
    """It raises in the first round, sends NaN in the second, and one entry in the third."""
    spoils = {1: raising, 2: not_finite, 3: wrong_shape}
    causes = {1: ["error"], 2: ["not-finite"], 3: ["shape", "malformed", "names"]}
    if method == "local":  # its replies hold no array
        spoils, causes = dict.fromkeys(spoils, raising), {n: ["error"] for n in causes}

    def spoil(message, reply):
        return spoils[message.content["config"]["server-round"]](message, reply)

    result, _ = go(method, broken(method, spoil))
    for round_, metrics in result.train_metrics_clientapp.items():
        assert metrics["valid-replies"] == 2
        assert sum(metrics.get(f"dropped-{cause}", 0) for cause in causes[round_]) == 1
    assert len(result.train_metrics_clientapp) == 3
    arrays = from_record(result.arrays or ArrayRecord()).values()
    assert all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


@EVERY_SERVER
@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("on-client-failure", "stop", "client failed"),
        ("min-valid-replies", 3, "min-valid-replies is 3"),
    ],
)
def test_a_failing_client_stops_the_run_if_asked(method, key, value, error):
    with pytest.raises(RuntimeError, match=error):
        go(method, broken(method, raising), **{key: value})


@pytest.fixture(scope="module")
def task_data(tmp_path_factory):
    """A file for each task of 60 samples, by task and by whether these are 2 × 4 × 4 images or six
    numbers. The labels depend on the first three numbers; values are about 100 ± 30."""
    folder = tmp_path_factory.mktemp("tasks")
    generator = np.random.default_rng(0)
    files = {}
    for images in (False, True):
        numbers = generator.normal(size=(60, 32 if images else 6)).astype(np.float32)
        x = numbers.reshape(60, 2, 4, 4) if images else numbers
        labels = {
            BINARY: (numbers[:, 0] > 0).astype(int),
            LABELS: (numbers[:, :3] > 0).astype(int),
            VALUES: 100 + 20 * numbers[:, 0] + 20 * numbers[:, 1],
        }
        for task, y in labels.items():
            files[task, images] = folder / f"{task}-{images}.npz"
            np.savez(files[task, images], x=x, y=y)
    return files


def on_task(method, task, task_data, **changes):
    """Settings of a small run of the method on a dataset of the task."""
    images = method in NEED_IMAGES
    config = {"dataset": str(task_data[task, images]), "task": task, "partition": "iid"}
    config |= {key: defaults()[key] for key in LESS}
    config |= {"rounds": 2, "evaluate-every": 2, "lr": 0.05}
    if images:
        config["model"] = "mlp" if method == "memo" else "convnet-bn"
    if METHODS[method].client.needs_public:
        config["partition.public-samples"] = 12
    if method == "pefll":
        config["novel-shots"] = 2
    return config | changes


def counted(task, monkeypatch):
    """The shapes of outputs and labels for which the task's loss is computed in training."""
    shapes: list[tuple] = []
    loss = CRITERIA[task]

    def counting(z, y):
        if z.requires_grad:
            shapes.append((tuple(z.shape), tuple(y.shape)))
        return loss(z, y)

    monkeypatch.setitem(CRITERIA, task, counting)
    return shapes


@pytest.mark.parametrize(("method", "task"), OTHER_TASKS)
def test_every_method_serves_its_tasks(method, task, task_data, monkeypatch):
    """It trains on the task's loss, of outputs and labels of the task's shapes, every client
    replies, and its scores are finite, under the task's names and no other's. The tests above run
    every method on classes."""
    shapes = counted(task, monkeypatch)
    result, _ = go(method, **on_task(method, task, task_data))
    assert shapes
    for outputs, labels in shapes:
        columns = 3 if task == LABELS else 1
        assert outputs == (outputs[0], columns)
        assert labels == outputs if task != BINARY else outputs[:1]
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["valid-replies"] == 3
        assert not any(value for key, value in metrics.items() if key.startswith("dropped"))
    scores = dict(result.evaluate_metrics_clientapp[2])
    assert all(np.isfinite(value) for value in scores.values())
    known = {score for names in TASK_SCORES.values() for score in names}
    for role in ("train", "novel") if METHODS[method].novel else ("train",):
        given = {score for score in known if f"{role}-{score}" in scores}
        assert given == TASK_SCORES[task], role
        assert scores[f"{role}-clients"] == 3


@EVERY
def test_the_table_and_the_class_name_the_same_tasks(method):
    """`fedapps list` reads the table, which needs no torch; a client reads its class."""
    entry = METHODS[method]
    assert entry.tasks == entry.client.served_tasks()
    assert set(entry.tasks) <= set(ALL_TASKS)


def test_eighteen_methods_and_more_serve_values():
    able = {name for name, entry in METHODS.items() if VALUES in entry.served_tasks}
    assert able >= {
        "local", "fedavg", "fedprox", "scaffold", "fedper", "fedrep", "ditto", "apfl",
        "per-fedavg", "pfedme", "pfedhn", "odpfl-hn", "pefll", "bn-adapt",
    }  # fmt: skip
    assert len(able) >= 18
    assert not able & {"tent", "t3a", "shot", "bbse", "prior-em", "memo", "atp", "fedtta++"}


@pytest.mark.parametrize("task", TASK_SCORES)
def test_fedavg_learns_every_task(task, task_data):
    """Twelve rounds halve the loss, and the error of values. A classifier ends above a guess: of
    the more frequent class, 0.6, or of all labels as true, F1 0.67."""
    changes = {"rounds": 12, "evaluate-every": 12, "local-steps": 10}
    result, _ = go("fedavg", **on_task("fedavg", task, task_data, **changes))
    losses = [metrics["loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses[-1] < 0.5 * losses[0]
    scores = result.evaluate_metrics_clientapp[12]
    if task == VALUES:
        assert scores["novel-rmse"] < 14  # the labels' deviation is 28
        assert 0.75 < scores["novel-r2"] < 1
    else:
        assert scores["novel-micro-f1" if task == LABELS else "novel-accuracy"] > 0.7


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedrep"])
@pytest.mark.parametrize("task", [LABELS, VALUES])
def test_stacked_clients_train_on_labels_with_columns(method, task, task_data):
    """Up to rounding, a cohort of three trains as three clients one by one."""
    one_by_one, _ = go(method, **on_task(method, task, task_data))
    stacked, _ = go(method, **on_task(method, task, task_data, **{"stacked-clients": 3}))
    arrays = from_record(one_by_one.arrays)
    others = from_record(stacked.arrays)
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(others[name], array, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("method", ["fedper", "pfedhn"])
def test_a_run_on_values_resumes(method, task_data, tmp_path):
    """Cut before its second round, it ends with the bits of a run that was not cut."""
    changes = {"checkpoint-every": 1, "evaluate-every": 1}
    config = on_task(method, VALUES, task_data, **changes)
    go(method, **config, **{"output-dir": str(tmp_path / "whole")})
    with small_runs.cut_before(2):
        go(method, **config, **{"output-dir": str(tmp_path / "cut")})
    go(method, **config, **{"output-dir": str(tmp_path / "cut"), "resume": True})
    assert small_runs.left(tmp_path / "whole") == small_runs.left(tmp_path / "cut")
