"""The code of docs/how-to/flower-examples.md, with small networks and data of their form."""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from datasets import Dataset
from flwr.app import Context, RecordDict
from text_networks import sentences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.strategies import FedAvg

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "flower-examples.md"
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.S))


ROUNDS = 3


@pytest.fixture
def app(monkeypatch):
    """Makes modules: an example's `task` by its content, and the page's own by their names."""

    def made(*names, **examples):
        for name, content in examples.items():
            task = ModuleType(f"{name}.task")
            vars(task).update(content)
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            monkeypatch.setitem(sys.modules, task.__name__, task)
        modules = []
        for name in names:
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(FILES[name], name, "exec"), vars(module))
            modules.append(module)
        return modules

    return made


@pytest.fixture
def ended(monkeypatch):
    """Gets the result of a server's component."""
    results = []

    def then(result, strategy):
        results.append(result)

    server_app = partial(fedapps.server_app, rounds=ROUNDS, then=then)
    monkeypatch.setattr(fedapps, "server_app", server_app)
    return results


def run(client, server, ended, **run_config):
    """The arrays and the last scores, on two nodes."""
    run_config = {name.replace("_", "-"): value for name, value in run_config.items()}
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    grid = fedapps.InProcessGrid(client.app, run_config, nodes)
    server.app(grid, Context(1, 0, {}, RecordDict(), run_config))
    (result,) = ended
    return from_record(result.arrays), dict(result.evaluate_metrics_clientapp[ROUNDS])


@pytest.mark.slow
def test_the_hugging_face_quickstart(app, ended, tmp_path):
    """A BERT of one layer, saved and read as the example reads its own, with its collator."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(30)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
    )
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=512,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)

    def load_data(partition_id, num_partitions, model_name):
        rows = [row | {"token_type_ids": [0] * len(row["input_ids"])} for row in sentences(64)]
        collator = transformers.DataCollatorWithPadding(tokenizer)
        own = Dataset.from_list(rows[partition_id::num_partitions])
        train = DataLoader(own, shuffle=True, batch_size=32, collate_fn=collator)
        return train, DataLoader(own, batch_size=32, collate_fn=collator)

    modules = app("hf_client_app", "hf_server_app", huggingfaceexample={"load_data": load_data})
    start = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    arrays, scores = run(*modules, ended, model_name=str(tmp_path))
    before = dict(start.named_parameters())["bert.embeddings.word_embeddings.weight"]
    after = arrays["body.bert.embeddings.word_embeddings.weight"]
    assert not any(name.startswith("head.") for name in arrays)
    moved = np.abs(after - before.detach().numpy()).max()
    assert 0 < moved < 3 * ROUNDS * 5e-5  # AdamW's step is at most about its rate
    assert 0 <= scores["train-accuracy"] <= 1


class IncomeClassifier(nn.Module):
    """As in fl-tabular, smaller."""

    def __init__(self, input_dim=14):
        super().__init__()
        self.layer1 = nn.Linear(input_dim, 8)
        self.output = nn.Linear(8, 1)
        self.relu = nn.ReLU()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.output(self.relu(self.layer1(x))))


def test_the_tabular_example(app, ended):
    """Labels (n, 1) of decimals, and a sigmoid, as its BCELoss takes them."""

    def load_data(partition_id, num_partitions):
        draws = torch.Generator().manual_seed(partition_id)
        x = torch.randn(60, 14, generator=draws)
        y = (x[:, :1] > 0).float()
        loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
        return loader, loader

    content = {"load_data": load_data, "IncomeClassifier": IncomeClassifier}
    modules = app("tabular_client_app", "tabular_server_app", fltabular=content)
    arrays, scores = run(*modules, ended)
    assert arrays["output.weight"].shape == (1, 8)
    assert 0.4 < scores["train-accuracy"] <= 1


def gradients(arrays, x, y):
    """Of the mean cross entropy of z = x B H."""
    body, head = arrays["body.w"], arrays["head.w"]
    z = x @ body @ head
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    slope = (p - np.eye(2)[y]) / len(y)
    return {"head.w": (x @ body).T @ slope, "body.w": x.T @ slope @ head.T}


class Network:
    """Softmax regression without torch: a shared layer and a personal one, by name."""

    step = staticmethod(gradients)

    def __init__(self):
        self._arrays = {"body.w": np.eye(3), "head.w": np.zeros((3, 2))}

    def arrays(self):
        return self._arrays

    def set_arrays(self, arrays):
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}

    def fit(self, x, y):
        slopes = self.step(self._arrays, x, y)
        self._arrays = {n: a - 0.5 * np.asarray(slopes[n]) for n, a in self._arrays.items()}

    def accuracy(self, x, y):
        z = x @ self._arrays["body.w"] @ self._arrays["head.w"]
        return float((z.argmax(1) == y).mean())


def of_node(number):
    x = np.random.default_rng(number).normal(size=(12, 3))
    return x, (x[:, number] > 0).astype(int)


def by_hand():
    """FedPer over two nodes: the mean of the bodies, and each node's head."""
    shared = Network().arrays()["body.w"]
    nodes = [Network() for _ in range(2)]
    for _ in range(ROUNDS):
        for number, net in enumerate(nodes):
            net.set_arrays(net.arrays() | {"body.w": shared})
            net.fit(*of_node(number))
        shared = np.mean([net.arrays()["body.w"] for net in nodes], 0)
    return shared


def named(app, network):
    (module,) = app("named_client_app", my_net={"Network": network, "load_data": of_node})
    grid = fedapps.InProcessGrid(module.app, {}, [{"partition-id": i} for i in range(2)])
    start = to_record({"body.w": network().arrays()["body.w"]})
    result = FedAvg(min_available_nodes=2).start(grid, start, num_rounds=ROUNDS)
    return from_record(result.arrays)["body.w"], result.evaluate_metrics_clientapp[ROUNDS]


def test_named_arrays_of_a_client_without_torch_are_fedper(app):
    body, scores = named(app, Network)
    np.testing.assert_allclose(body, by_hand(), rtol=1e-6)
    assert abs(body - np.eye(3)).max() > 0.01
    assert scores["accuracy"] > 0.5


@pytest.mark.slow
def test_named_arrays_of_keras(app, monkeypatch):
    """The page's network: FedPer as by hand, with models that Keras numbers anew for each turn."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    (module,) = app("keras_task")

    class KerasNetwork(module.Network):
        def __init__(self):
            keras.utils.set_random_seed(0)
            super().__init__()

    shared = {name: a for name, a in KerasNetwork().arrays().items() if name.startswith("body.")}
    assert sorted(shared) == ["body.bias", "body.kernel"]
    (client,) = app("named_client_app", my_net={"Network": KerasNetwork, "load_data": of_node})
    grid = fedapps.InProcessGrid(client.app, {}, [{"partition-id": i} for i in range(2)])
    result = FedAvg(min_available_nodes=2).start(grid, to_record(shared), num_rounds=ROUNDS)
    found = from_record(result.arrays)

    start = dict(shared)
    nodes = [KerasNetwork() for _ in range(2)]
    for _ in range(ROUNDS):
        for number, net in enumerate(nodes):
            net.set_arrays(net.arrays() | shared)
            net.fit(*of_node(number))
        shared = {name: np.mean([net.arrays()[name] for net in nodes], 0) for name in shared}
    assert found.keys() == shared.keys()
    for name, array in shared.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
        assert abs(array - start[name]).max() > 0.001
    assert 0 < result.evaluate_metrics_clientapp[ROUNDS]["accuracy"] <= 1


@pytest.mark.slow
def test_named_arrays_of_jax(app):
    """Its gradients in the place of those by hand; needs the group examples."""
    jax = pytest.importorskip("jax")

    def loss(arrays, x, y):
        z = x @ arrays["body.w"] @ arrays["head.w"]
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()

    class JaxNetwork(Network):
        step = staticmethod(jax.grad(loss))

    body, _ = named(app, JaxNetwork)
    np.testing.assert_allclose(body, by_hand(), rtol=1e-4, atol=1e-5)
