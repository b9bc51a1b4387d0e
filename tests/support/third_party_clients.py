"""Clients of other packages, over small and unequal shares of the digits, and what they send.

The first is Flower's quickstart of docs/how-to/flower-app.md. Nodes 1, 2 and 3 hold 10, 15 and 25
samples."""

import warnings

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from torch.utils.data import DataLoader, TensorDataset

import fedapps
from clients.core.arrays import Arrays, from_record
from fedapps.engines.in_process_grid import InProcessGrid

SIZES = (10, 15, 25)
DIGITS = load_digits()


def rows(node):
    """The inputs and labels of node 0, 1 or 2."""
    end = sum(SIZES[: node + 1])
    part = slice(end - SIZES[node], end)
    return DIGITS.images[part].astype(np.float32) / 16, DIGITS.target[part]


def load_data(partition_id, num_partitions):
    """Replaces that of the page: all samples for training and for testing."""
    x, y = rows(partition_id)
    data = TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y))
    return [DataLoader(data, 10), DataLoader(data, 10)]


class Old(NumPyClient):
    """A client of Flower's older API; node 0 has a text among its metrics."""

    def __init__(self, task, loaders, note):
        self.task, self.net, self.loaders, self.note = task, task.Net(), loaders, note

    def load(self, parameters):
        state = zip(self.net.state_dict(), map(torch.from_numpy, parameters), strict=True)
        self.net.load_state_dict(dict(state))

    def fit(self, parameters, config):
        self.load(parameters)
        loss = self.task.train(self.net, self.loaders[0], config["epochs"], 0.05)
        new = [t.numpy() for t in self.net.state_dict().values()]
        return new, len(self.loaders[0].dataset), {"train_loss": loss, **self.note}

    def evaluate(self, parameters, config):
        self.load(parameters)
        metrics = {"eval_acc": self.task.test(self.net, self.loaders[1]), **self.note}
        return 0.5, len(self.loaders[1].dataset), metrics


def old(task):
    def client_fn(context):
        node = int(context.node_config["partition-id"])
        note = {} if node else {"note": "fine"}
        made = Old(task, load_data(node, 3), note)
        return made if node == 1 else made.to_client()

    return fedapps.from_client_fn(client_fn)


def changed(client_app, change, query):
    """`client_app` with changed replies, and an answer to the opening query."""
    other = ClientApp()
    other.query()(query)
    for name, register in (("train", other.train), ("evaluate", other.evaluate)):
        answer = client_app._registered_funcs[f"{name}.default"]
        register()(lambda message, context, answer=answer: change(answer(message, context)))
    return other


def with_texts(client_app):
    """With texts under names that this package uses; raises an error on the opening query."""

    def change(reply):
        texts = {"accuracy": "high", "client": "me", "model": "two\nlines", "novel": "no"}
        reply.content["notes"] = ConfigRecord(texts)
        return reply

    def query(message, context):
        raise KeyError("task")

    return changed(client_app, change, query)


def with_float64(client_app):
    """With float64 arrays, half a sample more, and metrics of other names and ranges. It identifies
    itself as novel client 7 with 5 samples."""

    def change(reply):
        for record in reply.content.array_records.values():
            for name, array in from_record(record).items():
                record[name] = Array(array.astype(np.float64))
        metrics = reply.content["metrics"]
        metrics["num-examples"] += 0.5
        metrics.update({"accuracy": 93.5, "classes": [1, 2, 4], "client": -1, "loss": [0.5, 0.25]})
        metrics.update({f"layer{i}/norm": i for i in range(150)})
        return reply

    def query(message, context):
        identity = ConfigRecord({"num-examples": 5, "client": 7, "novel": True})
        return Message(RecordDict({"identity": identity}), reply_to=message)

    return changed(client_app, change, query)


def sklearn_app():
    """Flower's quickstart for scikit-learn: a linear model's float64 arrays, named by number."""
    client_app = ClientApp()

    def model_of(message):
        model = SGDClassifier(loss="log_loss", max_iter=3, tol=None, random_state=0)
        model.classes_ = np.arange(10)
        model.coef_, model.intercept_ = from_record(message.content["arrays"]).values()
        return model

    @client_app.train()
    def train(message, context):
        x, y = rows(context.node_config["partition-id"])
        model = model_of(message)
        inputs, labels = (
            np.concatenate([x.reshape(len(x), -1), np.zeros((10, 64))]),
            [*y, *range(10)],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(inputs, labels, coef_init=model.coef_, intercept_init=model.intercept_)
        metrics = MetricRecord({"num-examples": len(y), "train_loss": float(len(y))})
        arrays = ArrayRecord([model.coef_, model.intercept_])
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        x, y = rows(context.node_config["partition-id"])
        accuracy = float((model_of(message).predict(x.reshape(len(x), -1)) == y).mean())
        metrics = MetricRecord({"num-examples": len(y), "eval_acc": accuracy})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return client_app


def clients(task, quickstart):
    """ClientApps by name, each with its initial arrays."""
    task.load_data = load_data
    torch.manual_seed(0)
    net = ArrayRecord(task.Net().state_dict())
    linear = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    return {
        "Flower's quickstart": (quickstart, net),
        "scikit-learn": (sklearn_app(), linear),
        "`client_fn`": (old(task), net),
        "text metrics": (with_texts(quickstart), net),
        "float64": (with_float64(quickstart), net),
    }


class Noted(InProcessGrid):
    """Three nodes; records messages and replies by kind, round and node."""

    @classmethod
    def of(cls, client_app):
        grid = cls(client_app, {}, [{"partition-id": i, "num-partitions": 3} for i in range(3)])
        grid.sent, grid.came, grid.got = {}, {}, {}
        return grid

    def _deliver(self, message):
        reply, kind = super()._deliver(message), message.metadata.message_type
        if kind in ("train", "evaluate") and not reply.has_error():
            where = (kind, message.content["config"]["server-round"])
            node = message.metadata.dst_node_id
            self.sent.setdefault(where, {})[node] = arrays(message.content)
            self.came.setdefault(where, {})[node] = arrays(reply.content)
            self.got.setdefault(where, {})[node] = dict(reply.content["metrics"])
        return reply


def arrays(content) -> Arrays:
    return {n: a for r in content.array_records.values() for n, a in from_record(r).items()}
