"""Messages as calls: which state a client has, what of it stays, under which names arrays go."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.numpy import load_file
from small_runs import federate

from clients.core.arrays import from_record, to_record
from clients.core.client import Client
from fedapps.node.bridge import load_state, reply_of


class Data:
    """Of as many samples as its length says."""

    train = range(7)


class Counts(Client):
    """Keeps how often it was called, and tells the count as it found it."""

    exchanges = ("query.look", "query.note", "train.more")
    saves_state_after = ("query.note",)
    state_across_runs = ("worth",)

    def __init__(self):
        self.client, self.share, self.initial, self.state = 5, Data(), {}, {}
        self.rates, self._given_rates, self.lr, self.device = ("lr",), {}, 0.8, "cpu"
        self.seed = 0

    def count(self):
        found = int(self.state.get("calls", np.array(0)))
        self.state["calls"] = np.array(found + 1)
        return {"found": found, "lr": self.lr}

    def get_properties(self, config):
        return {"client": -1, "novel": False} | self.count()

    def hold(self, config):
        if "worth" in config:
            self.state["worth"] = np.array([1.0, config["worth"]])

    def train(self, arrays, config):
        self.hold(config)
        return {f"new/{name}": 2 * a for name, a in arrays.items()}, 3, self.count()

    def score(self, arrays, config):
        return 0.5, 4, self.count()

    def look(self, arrays, config):
        self.hold(config)
        return dict(reversed(arrays.items())), self.count()

    note = more = domain = look


def ask(context, action, arrays=None, **config):
    """The reply's names and arrays, and all that it tells."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    records = {"config": ConfigRecord(config)}
    if arrays is not None:
        records["arrays"] = to_record(arrays)
    message = Message(RecordDict(records), context.node_id, action)
    reply = reply_of(Counts(), message, context).content
    got = [*reply.config_records.values(), *reply.metric_records.values()]
    found = {n: a for r in reply.array_records.values() for n, a in from_record(r).items()}
    return found, {key: value for record in got for key, value in record.items()}


def node(**config):
    """A context of node 9; in the run's configuration the method is "counts"."""
    run = {"method": "counts"} | config.pop("run", {})
    return Context(1, 9, config, RecordDict(), run)


@pytest.mark.parametrize("worth", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_does_not_take_the_place_of_a_finite_one(worth, tmp_path):
    context = node(**{"state-dir": str(tmp_path)})
    ask(context, "train", {}, worth=2.0)
    ask(context, "train", {}, worth=worth)
    assert ask(context, "query", {})[1]["found"] == 1  # as the first training left it
    assert load_file(tmp_path / "counts.safetensors")["worth"].tolist() == [1.0, 2.0]
    ask(context, "train", {}, worth=3.0)
    assert load_file(tmp_path / "counts.safetensors")["worth"].tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="worth"):  # an answer that is forgotten stays
        ask(context, "query.note", {}, worth=worth)


ARRAYS = {"b": np.float32([1, 2]), "a": np.float32([3])}


def test_only_train_messages_and_those_it_remembers_leave_a_trace():
    """Every call counts itself; found is what the messages before have left."""
    context, found = node(), []
    for action in ("evaluate", "query", "query.look", "train", "evaluate", "query.look", "query",
                   "query.note", "train.more", "train"):  # fmt: skip
        found.append(ask(context, action, {})[1]["found"])
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3]


def test_replies_bear_the_clients_names_and_counts():
    arrays, got = ask(node(), "train", ARRAYS)
    assert list(arrays) == ["new/b", "new/a"]
    assert arrays["new/b"].tolist() == [2, 4] and arrays["new/a"].tolist() == [6]
    assert got == {"num-examples": 3, "found": 0, "lr": 0.8}
    arrays, got = ask(node(), "query.look", ARRAYS)
    assert [(n, a.tolist()) for n, a in arrays.items()] == [("a", [3]), ("b", [1, 2])]
    assert got["num-examples"] == 7  # of the training samples
    arrays, got = ask(node(), "evaluate", ARRAYS)
    assert got.pop("seconds") > 0
    assert not arrays and got == {"num-examples": 4, "loss": 0.5, "found": 0, "lr": 0.8}


@pytest.mark.parametrize("action", ["train", "evaluate", "query.look", "train.more"])
def test_every_answer_is_at_the_rounds_rates(action):
    context = node()
    assert ask(context, action, {}, **{"lr-factor": 0.25})[1]["lr"] == 0.2
    assert ask(context, action, {})[1]["lr"] == 0.8


def test_a_node_is_the_client_of_its_partition_else_of_its_own_id():
    assert ask(node(), "query")[1]["client"] == 9
    assert ask(node(**{"partition-id": 0}), "query")[1]["client"] == 0


def test_another_methods_state_is_dropped():
    """The message's method goes before the run's."""
    context = node()
    assert [ask(context, "train", {})[1]["found"] for _ in range(2)] == [0, 1]
    assert ask(context, "train", {}, method="other")[1]["found"] == 0
    assert ask(context, "evaluate", {}, method="other")[1]["found"] == 1
    assert ask(context, "train", {})[1]["found"] == 0


def test_a_state_dir_survives_a_restart(tmp_path):
    for expected in (0, 1):
        context = node(**{"state-dir": str(tmp_path)})  # a new process knows the folder alone
        assert ask(context, "train", {})[1]["found"] == expected
        assert ask(context, "evaluate", {})[1]["found"] == expected + 1
    assert load_file(tmp_path / "counts.safetensors")["calls"] == 2
    assert ask(node(**{"state-dir": str(tmp_path)}), "train", {}, method="other")[1]["found"] == 0


def test_of_another_runs_file_only_what_lasts_is_taken(tmp_path):
    """`found` is what a new process finds, which knows the folder alone: of its own run all, of a
    message or a file without a token all, of another run only its worth, which stays there."""

    def found(action="evaluate", token=None, **config):
        config |= {"run-token": token} if token else {}
        return ask(node(**{"state-dir": str(tmp_path)}), action, {}, **config)[1]["found"]

    def worth():
        return load_file(tmp_path / "counts.safetensors")["worth"].tolist()

    found("train", worth=2.0)
    assert [found(), found(token="a"), found("train", "a")] == [1, 1, 1]
    assert [found(token=token) for token in ("a", "b", None)] == [2, 0, 2]
    assert [found("query", "b"), found("query.look", "b"), found("train", "b")] == [0, 0, 0]
    assert [found(token=token) for token in ("b", "a")] == [1, 0]
    assert worth() == [1.0, 2.0]


def test_what_lasts_outlives_another_method_and_a_new_node_id(tmp_path):
    """Found is the worth with which an exchange began: in memory alone, and in a folder."""

    def worth(context):
        made = Counts()
        made.state = load_state(context, "counts", made)
        return made.state["worth"].tolist()

    for own in ({}, {"state-dir": str(tmp_path)}):
        context = node(**own)
        ask(context, "query.note", {}, worth=2.0)
        ask(context, "evaluate", {}, method="other")
        assert worth(context) == [1.0, 2.0]
    other = Context(2, 77, {"state-dir": str(tmp_path)}, RecordDict(), {"method": "counts"})
    assert worth(other) == [1.0, 2.0]
    ask(other, "query.note", {}, worth=3.0)
    assert worth(context) == [1.0, 3.0]  # not what its own memory has
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {"counts.safetensors"}


def test_only_exchanges_of_the_method_and_of_the_run_are_answered():
    with pytest.raises(ValueError, match=r"counts answers no 'query.guess'.*query\.look"):
        ask(node(), "query.guess", {})
    with pytest.raises(ValueError, match=r"no 'query\.domain'"):
        ask(node(), "query.domain", {})
    assert (
        ask(node(run={"report-generalization-bound": True}), "query.domain", ARRAYS)[0].keys()
        == ARRAYS.keys()
    )
    context = node()
    ask(context, "train.set_state", {"calls": np.array(6)})
    assert ask(context, "query.get_state", {})[0] == {"calls": 6}


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_without_validation_data_there_is_no_loss(fraction):
    changes = {"partition.validation-fraction": fraction, "num-clients": 4, "rounds": 1}
    metrics = federate(**changes)[0].evaluate_metrics_clientapp[1]
    assert ("train-loss" in metrics) == bool(fraction) == ("train-accuracy" in metrics)
    assert metrics["novel-loss"] > 0
