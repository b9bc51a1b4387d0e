"""Nodes that keep their rows agree on one encoding of inputs, the same as a simulation's.

Each training client sends sums over its training rows once; the server merges them."""

import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import nn
from wire_table import DOWN, UP, table

import fedapps
import partitions
from clients.core.arrays import to_record
from clients.core.flower_fast import NumPyClient
from clients.core.protocol import ENCODING, STATISTICS, SUMS
from fedapps.common.errors import Refusal
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node.own_data import share_of
from fedapps.node.own_encoding import TableReader, encoded, statistics_of
from fedapps.saved import read_state, state_bytes
from fedapps.settings.config import defaults
from partitions.datasets.description import SIGNAL, VECTOR
from partitions.datasets.shared_encoding import Sent, agreeing, in_other_units, learnt
from partitions.datasets.statistics import Statistics, Sums, number_sums
from partitions.datasets.statistics_reading import read_encoding, read_statistics
from partitions.reading import Form
from strategies.core.column_encoder import ColumnEncoder
from strategies.core.privacy import Privacy
from strategies.fedavg import FedAvg

ASK = {"standardize": "training-clients"}
SEEN = []  # inputs of the network, while it predicts


class Linear(nn.Linear):
    def __init__(self, inputs=2, outputs=2):
        super().__init__(inputs, outputs)

    def forward(self, x):
        if not self.training:
            SEEN.append(x.detach().clone())
        return super().forward(x)


def rows(*ages, doses=None, **more):
    """A node's table: the label says whether the age is above 50."""
    ages = np.array(ages, dtype=float)
    doses = 100 * ages + np.arange(len(ages)) if doses is None else doses
    columns = {"age": ages, "dose": doses, **more, "label": (ages > 50).astype(int)}
    return pd.DataFrame(columns)


A, B = rows(20, 30, 60, 70), rows(10, 90)


class Watched(InProcessGrid):
    """Keeps all messages, and lets `change` alter the replies with sums."""

    def __init__(self, *arguments, change=None):
        super().__init__(*arguments)
        self.seen = []
        self.change = change

    def answer(self, messages, timeout):
        self.seen += messages
        for reply in super().answer(messages, timeout):
            queried = reply.metadata.message_type.startswith("query")
            if queried and not reply.has_error() and self.change is not None:
                self.change(reply)
            self.seen.append(reply)
            yield reply

    def asked(self, kind=STATISTICS):
        """The messages of a kind to nodes."""
        return [
            message
            for message in self.seen
            if message.metadata.message_type == kind and not message.metadata.reply_to_message_id
        ]


def apps(tables, *, inputs=2, outputs=2, method="fedavg", of_client=None, of_server=None, **both):
    """Both components, and a list that gets the result and the strategy."""
    ended = []
    both = {**ASK, **both}

    def data(context):
        given = tables[context.node_config["partition-id"]]
        return given if isinstance(given, tuple) or "label" not in given else (given, given)

    def make():
        return Linear(inputs, outputs)

    client = fedapps.client_app(method, model=make, data=data, **both, **(of_client or {}))
    server = fedapps.server_app(
        method, model=make, shape=(inputs,), min_available_nodes=len(tables),
        then=lambda *given: ended.extend(given), **{"rounds": 1, **both, **(of_server or {})},
    )  # fmt: skip
    return client, server, ended


def run(tables, *, change=None, nodes=None, run_config=None, **options):
    """The run's strategy and its grid."""
    client, server, ended = apps(tables, **options)
    nodes = nodes or [{}] * len(tables)
    places = [{"partition-id": number, **node} for number, node in enumerate(nodes)]
    grid = Watched(client, run_config or {}, places, change=change)
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    return ended[1], grid


def test_sums_of_unequal_clients_merge_to_those_of_all_rows():
    """1, 2, 3, 4 and 10 have mean 20/5 = 4 and M₂ = 9 + 4 + 1 + 0 + 36 = 50; one cell is empty."""
    first = number_sums("age", np.array([1.0, 2.0, 3.0, 4.0]))
    second = number_sums("age", np.array([10.0, np.nan]))
    assert (first.count, first.mean, first.squares) == (4, 2.5, 5.0)
    assert first.merged(second) == Sums("age", "number", 5, 1, 4.0, 50.0)
    assert second.merged(first) == Sums("age", "number", 5, 1, 4.0, 50.0)


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, 1 / 3])
def test_a_constant_column_has_no_deviation_at_all(value):
    """Rounding of a mean would make it a column to be scaled by 10⁻¹⁷."""
    many, few = (number_sums("c", np.full(n, value)) for n in (7, 3))
    merged = many.merged(few)
    assert (merged.mean, merged.squares) == (value, 0.0)


def test_a_large_mean_costs_no_digits():
    """±1 beside 10⁹: Σx² − n mean² in float64 has errors of hundreds there."""
    signs = np.tile([-1.0, 1.0], 50)
    merged = number_sums("x", 1e9 + signs[:31]).merged(number_sums("x", 1e9 + signs[31:]))
    assert merged.squares == pytest.approx(100, rel=1e-9)


# The same numbers as a simulation's

SPLIT = {
    "partition": "dirichlet",
    "partition.alpha": 5.0,
    "num-clients": 5,
    "train-fraction": 0.8,
    "standardize": "training-clients",
    "missing": "mean",
}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache of datasets."""
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDAPPS_DATA_DIR", raising=False)


def hospital(task):
    """A table of 240 rows with numbers, truth values, categories, gaps, an identifier and a column
    that is constant."""
    generator = np.random.default_rng(0)
    n = 240
    ages = generator.normal(50, 12, n)
    given = pd.DataFrame(
        {
            "patient_id": generator.permutation(n) + 1000,
            "age": ages,
            "dose": generator.normal(1e6, 3, n),
            "smokes": np.where(generator.random(n) > 0.4, "yes", "no"),
            "alive": generator.random(n) > 0.3,
            "ward": generator.choice(["north", "south", "east"], n),
            "site": "one",
        }
    )
    given.loc[generator.choice(n, 60, replace=False), "dose"] = np.nan
    given.loc[generator.choice(n, 60, replace=False), "ward"] = None
    given["target"] = ages * 3 + generator.normal(0, 1, n) if task == "values" else ages > 50
    return given


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("task", ["classes", "values"])
def test_a_table_is_encoded_as_in_a_simulation(tmp_path, task):
    given = hospital(task)
    given.to_csv(tmp_path / "d.csv", index=False)
    given = pd.read_csv(tmp_path / "d.csv")  # as the simulation reads it
    changes = {"dataset": str(tmp_path / "d.csv"), "label": "target", "task": task}
    if task == "values":
        changes["partition"] = "iid"
    config = defaults() | SPLIT | changes
    federation = partitions.federation(config)
    sent = []
    shares = {}
    for client in range(federation.num_clients):
        parts = federation.rows(client)
        novel = bool(federation.novel[client])
        training = np.concatenate([*parts.values()]) if novel else parts["train"]
        tables = (given.iloc[training], given.iloc[parts["validation"]])
        shares[client] = (tables, novel)
        if not novel:
            share, reader = read(tables, task)
            sums = statistics_of(share, reader, "mean", 1)
            sent.append(Sent(str(client), read_statistics(sums.text())))
    encoding = learnt(sent, "mean", [])
    expected = federation.encoding
    assert [replace(f, fill=0.0) for f in encoding.table.features] == [
        replace(f, fill=0.0) for f in expected.features
    ]
    assert [f.name for f in expected.features] == ["age", "dose", "smokes", "alive", "ward"]
    close(
        [f.fill for f in encoding.table.features], [f.fill for f in expected.features], rtol=1e-13
    )
    close(encoding.mean, federation._mean, rtol=1e-13)
    close(encoding.std, federation._std, rtol=1e-11)
    assert len(encoding.targets.mean) == (task == "values")
    close(encoding.targets.mean, federation.targets.mean, rtol=1e-13)
    close(encoding.targets.std, federation.targets.std, rtol=1e-13)
    sent_down = read_encoding(encoding.text())
    assert sent_down == encoding
    for client, (tables, novel) in shares.items():
        share = encoded(read(tables, task, sent_down, novel)[0], sent_down)
        inside = federation.share(client)
        mine, theirs = (share.everything, share_rows(inside, tables)) if novel else (
            share.train, inside.train)  # fmt: skip
        close(mine[:][0], theirs[:][0], rtol=1e-5, atol=1e-6)
        close(mine[:][1], theirs[:][1], rtol=1e-6, atol=1e-6)


def read(tables, task, encoding=None, novel=False):
    """A node's share, and what read it."""
    reader = TableReader(encoding)
    node = {"novel": True} if novel else {}
    context = Context(1, 1, node, RecordDict(), {})
    return share_of(tables, context, form=Form(task, "target", table=reader)), reader


def share_rows(share, tables):
    """All samples of a simulated novel client, in the order of its table's rows."""
    position = {row: i for i, row in enumerate(share.everything.index.tolist())}
    chosen = [position[row] for row in tables[0].index.tolist()]
    return replace(share.everything, index=share.everything.index[chosen])


def close(found, expected, **tolerance):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), **tolerance)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 4, 4)], ids=["vector", "signal", "image"])
def test_arrays_are_scaled_as_in_a_simulation(tmp_path, shape):
    generator = np.random.default_rng(0)
    x = generator.normal(7, 3, (60, *shape)) * np.arange(1, shape[0] + 1).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    x = x.astype(np.float32)  # as a simulation stores images
    y = np.arange(60) % 2
    np.savez(tmp_path / "d.npz", x=x, y=y)
    kind = {1: VECTOR, 2: SIGNAL, 3: "image"}[len(shape)]
    config = defaults() | SPLIT | {"dataset": str(tmp_path / "d.npz"), "inputs": kind}
    federation = partitions.federation(config)
    sent = []
    for client in np.flatnonzero(~federation.novel).tolist():
        chosen = federation.rows(client)["train"]
        share, reader = read((x[chosen], y[chosen]), "classes")
        sent.append(Sent(str(client), statistics_of(share, reader, "refuse", 1)))
    encoding = learnt(sent, "refuse", [])
    scale = federation.info.scale
    close(encoding.mean, np.multiply(federation._mean, scale).reshape(-1), rtol=1e-12)
    close(encoding.std, np.multiply(federation._std, scale).reshape(-1), rtol=1e-12)
    client = int(np.flatnonzero(~federation.novel)[0])
    chosen = federation.rows(client)["train"]
    share = encoded(read((x[chosen], y[chosen]), "classes")[0], encoding)
    close(share.train[:][0], federation.share(client).train[:][0], rtol=1e-5, atol=1e-6)


# Runs


def test_a_run_asks_once_and_sends_the_encoding_with_every_message():
    """Ages 20, 30, 60, 70, 10 and 90 have mean 280/6; novel clients are not asked. The table of
    the later client has its columns in another order, no labels, and counts for nothing."""
    later = rows(1000, 2000, 3000)[["dose", "age"]]
    SEEN.clear()
    strategy, grid = run([A, B, later])
    mean = np.mean([20, 30, 60, 70, 10, 90])
    deviation = np.std([20, 30, 60, 70, 10, 90])
    assert strategy.column_encoder.encoding.mean[0] == pytest.approx(mean, rel=1e-14)
    assert len(grid.asked()) == 2
    assert all(not m.content.array_records["arrays"] for m in grid.asked())
    for kind in ("train", "evaluate"):
        assert grid.asked(kind)
        for message in grid.asked(kind):
            text = message.content["config"][ENCODING]
            assert read_encoding(text) == strategy.column_encoder.encoding
    (novel,) = [x for x in SEEN if len(x) == 3]
    close(novel[:, 0], (np.array([1000, 2000, 3000]) - mean) / deviation, rtol=1e-5)


def test_values_are_learnt_in_deviations_and_scored_in_their_unit():
    """With lr 0 and a network of zeros predictions are the mean, and the error is the deviation."""
    values = [pd.DataFrame({"x": [1.0, 2, 4], "label": [100.0, 200, 300]}),
              pd.DataFrame({"x": [7.0], "label": [400.0]})]  # fmt: skip

    class Zeros(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

    ended = []
    both = ASK | {"task": "values"}
    client = fedapps.client_app(
        "fedavg", model=Zeros, data=lambda c: (values[c.node_config["partition-id"]],) * 2,
        lr=0.0, **both,
    )  # fmt: skip
    server = fedapps.server_app(
        "fedavg", model=Zeros, shape=(1,), rounds=1, min_available_nodes=2,
        average_over="samples", then=lambda *r: ended.extend(r), **both,
    )  # fmt: skip
    grid = Watched(client, {}, [{"partition-id": i} for i in range(2)])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    targets = ended[1].column_encoder.encoding.targets
    close(targets.mean, [250.0])
    close(targets.std, [np.std([100, 200, 300, 400])])
    scores = ended[0].evaluate_metrics_clientapp[1]
    own = [np.sqrt(np.mean([150**2, 50**2, 50**2])), 150]
    assert scores["train-rmse"] == pytest.approx((3 * own[0] + own[1]) / 4, rel=1e-6)


def test_a_resumed_run_keeps_the_encoding(tmp_path):
    """Also where the clients' rows have changed, and through the bytes of a file."""
    strategy, _ = run([A, B])
    file = tmp_path / "state.safetensors"
    file.write_bytes(state_bytes(strategy.state()))
    again, grid = run(
        [rows(1, 2, 99), rows(3, 98)], of_server={"former": read_state(file), "rounds": 2}
    )
    assert again.column_encoder.encoding == strategy.column_encoder.encoding
    assert not grid.asked()
    assert len(grid.asked("train")) == 2
    assert again.round == 2
    with pytest.raises(ValueError, match="the saved run scales inputs by the training clients'"):
        run([A, B], standardize="none", of_server={"former": read_state(file), "rounds": 2})


def test_inside_another_strategy_nobody_is_asked():
    client, _, _ = apps([A, B])
    grid = Watched(client, {}, [{"partition-id": 0}, {"partition-id": 1}])
    inner = FedAvg(min_available_nodes=2, column_encoder=ColumnEncoder("fedavg", (2,), "refuse"))
    initial = to_record({"weight": np.zeros((2, 2)), "bias": np.zeros(2)})
    with pytest.raises(ValueError, match="which no wrapper clips"):
        inner.configure_train(1, initial, ConfigRecord({"method": "fedavg"}), grid)
    assert not grid.asked()


def test_a_damaged_encoding_is_refused():
    strategy, _ = run([A, B])
    text = strategy.state()["column-encoder"]
    content = json.loads(text)
    for change in ({"std": [0.0, 1.0]}, {"mean": [1.0]}, {"table": None}, {"inputs": "tree"}):
        with pytest.raises(ValueError, match="encoding of inputs is damaged"):
            read_encoding(json.dumps(content | change))
    for broken in ("", "[]", "{}", text.replace("20", "NaN", 1)[:-1], 7):
        with pytest.raises(ValueError, match="encoding of inputs is damaged"):
            read_encoding(broken)


def test_without_being_asked_inputs_stay_as_they_are():
    SEEN.clear()
    _, grid = run([A, B], standardize="none")
    assert not grid.asked()
    assert all(ENCODING not in m.content["config"] for m in grid.asked("train"))
    assert {float(x[0, 0]) for x in SEEN if len(x) in (2, 4)} >= {20.0, 10.0}


def test_gaps_and_categories():
    """`ward` becomes a column for each category, and `dose` a second one that marks gaps. A node
    names only categories that two of its rows have: "west" is one row's, and counts as none."""
    doses = np.array([1.0, np.nan, 3.0, 4.0])
    first = rows(20, 30, 60, 70, doses=doses, ward=["north", "north", "south", "south"])
    second = rows(10, 90, 40, doses=np.array([5.0, 7.0, 6.0]), ward=["north", "north", "west"])
    strategy, grid = run([first, second], inputs=5, missing="mean")
    names = ("age", "dose", "dose is missing", "ward=north", "ward=south")
    assert strategy.column_encoder.encoding.table.outputs == names
    sent = [str(message.content.config_records) for message in grid.seen]
    assert not any("west" in text for text in sent)
    both, _ = run([first, second], inputs=6, missing="mean", of_client={"least_category_rows": 1})
    assert both.column_encoder.encoding.table.outputs == (*names, "ward=west")
    known = [1, 3, 4, 5, 7, 6]
    dose = strategy.column_encoder.encoding.table.features[1]
    assert dose.fill == pytest.approx(np.mean(known), rel=1e-14)
    filled = [*known, np.mean(known)]
    assert strategy.column_encoder.encoding.std[1] == pytest.approx(np.std(filled), rel=1e-14)


def test_a_dict_of_columns_is_a_table():
    tables = [{"age": [1.0, 2, 3], "dose": torch.tensor([4, 5, 7]), "label": [0, 1, 0]},
              {"dose": np.array([1, 2]), "age": [5.0, 6], "label": [1, 0]}]  # fmt: skip
    strategy, _ = run(tables)
    encoding = strategy.column_encoder.encoding
    assert encoding.table.outputs == ("age", "dose")
    close(encoding.mean, [17 / 5, 19 / 5])


# What is refused


def test_columns_that_differ_are_refused_by_name():
    other = A.rename(columns={"dose": "dosis"})
    words = r"no majority agrees: client 1: it lacks the columns dose and it has dosis in addition"
    with pytest.raises(RuntimeError, match=words):
        run([A, other])
    strategy, grid = run([A, other, B])  # a majority
    assert strategy.column_encoder.encoding.table.outputs == ("age", "dose")
    reasons = [message.error.reason for message in grid.seen if message.has_error()]
    assert any("no column dose" in reason for reason in reasons)
    texts = A.assign(dose=["low", "low", "high", "high"])
    with pytest.raises(RuntimeError, match="its column dose holds a category; that of others"):
        run([A, texts])


def test_what_the_encoding_does_not_fit_is_named():
    words = (
        r"columns give 2 inputs \(age, dose\), but shape is \(3,\); give server_app shape=\(2,\)"
    )
    with pytest.raises(RuntimeError, match=words):
        run([A, B], inputs=3)
    gaps = rows(1, 2, 90, doses=np.array([1.0, np.nan, 3]))
    with pytest.raises(
        RuntimeError, match=r"column dose has 1 cells without a value.*missing=mean"
    ):
        run([gaps, gaps])
    constant = pd.DataFrame({"age": [3.0, 3.0], "label": [0, 1]})
    with pytest.raises(RuntimeError, match="no column of inputs that differs"):
        run([constant, constant], inputs=1)
    items = [(torch.ones(2), 0), (torch.zeros(2), 1)]
    with pytest.raises(RuntimeError, match="data returned items, and standardize="):
        run([(items, items)] * 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"standardize": "channels"}, "standardize is 'channels'; client_app and server_app know"),
        ({"standardize": "none", "missing": "mean"}, "missing='mean' fills gaps with the training"),
        (ASK | {"dp": "local", "dp_epsilon": 8.0}, "sums over the columns .* would leave the clie"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(ValueError, match=words):
        fedapps.server_app("fedavg", model=Linear, shape=(2,), rounds=1, **settings)
    if "dp" in settings:
        settings = settings | {"rounds": 1}
    with pytest.raises(ValueError, match=words):
        fedapps.client_app("fedavg", model=Linear, data=lambda _: A, **settings)


def test_both_halves_need_to_say_it():
    for asks, asked in ((ASK, {}), ({}, ASK)):
        client = fedapps.client_app("fedavg", model=Linear, data=lambda _: (A, A), **asks)
        server = fedapps.server_app(
            "fedavg", model=Linear, shape=(2,), rounds=1, min_available_nodes=2, **asked
        )
        grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
        words = "client_app has standardize '.*' and server_app '.*'; give both the same"
        with pytest.raises(RuntimeError, match=words):
            server(grid, Context(1, 0, {}, RecordDict(), {}))


def test_a_strategy_that_makes_no_encoding_is_refused():
    client, _, _ = apps([A, B])
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
    with pytest.raises(RuntimeError, match="the server's messages hold no encoding of inputs"):
        FedAvg(min_available_nodes=2).start(grid, to_record({"weight": np.zeros((2, 2))}), 1)


def test_a_client_of_another_package_is_refused():
    class Other(NumPyClient):
        def fit(self, arrays, config):
            return arrays, 1, {}

    client = fedapps.from_client_fn(lambda cid: Other())
    server = apps([A, B])[1]
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
    words = r"FedAvg needs clients that send the sums of their columns; use .*standardize='training"
    with pytest.raises(RuntimeError, match=words):
        server(grid, Context(1, 0, {}, RecordDict(), {}))


def test_a_novel_client_sends_nothing():
    """Whatever a server asks: its rows would move the numbers."""
    share, reader = read(A.rename(columns={"label": "target"}), "classes", novel=True)
    with pytest.raises(Refusal, match="a novel client sends no sums"):
        statistics_of(share, reader, "refuse", 2)


# Privacy

LOCAL = {"dp": "local", "dp_noise_multiplier": 1.0, "dp_covers": "model-updates"}


def test_what_privacy_does_not_cover_is_recorded():
    """With dp-covers=model-updates the sums are sent, in the clear, and the terms say so. Sample
    counts are hidden, so each client counts the same: means 45 and 50 give 47.5."""
    strategy, _ = run([A, B], of_client={"rounds": 1}, **LOCAL)
    assert "not covered: sums over the columns of training rows" in strategy.privacy.terms()
    assert strategy.column_encoder.encoding.mean[0] == pytest.approx(47.5)


def test_a_strategy_by_hand_asks_only_what_privacy_covers():
    client, _, _ = apps([A, B])
    grid = Watched(client, {}, [{"partition-id": 0}, {"partition-id": 1}])
    strategy = FedAvg(
        min_available_nodes=2,
        privacy=Privacy(dp="local", dp_noise_multiplier=1.0, rounds=1),
        column_encoder=ColumnEncoder("fedavg", (2,), "refuse"),
    )
    initial = to_record({"weight": np.zeros((2, 2)), "bias": np.zeros(2)})
    with pytest.raises(ValueError, match=r"sums over the columns .* would leave the clients"):
        strategy.start(grid, initial, 1, train_config=ConfigRecord({"method": "fedavg"}))
    assert not grid.asked()


def test_a_nodes_policy_refuses_the_question(tmp_path):
    """The node's ε must cover everything, whatever the run says."""
    policy = {"dp-epsilon": 1e6, "state-dir": str(tmp_path)}
    words = "dp-covers is 'everything', and the answer to 'query.statistics' is not covered"
    with pytest.raises(RuntimeError, match=words):
        run([A, B], nodes=[policy, policy], of_client={"rounds": 1}, **LOCAL)


# Lies


def sums(**changes):
    """A client's text of one column, with these `changes`."""
    column = asdict(Sums("age", "number", 4, 0, 45.0, 1700.0)) | changes
    return json.dumps({"inputs": "table", "rows": 4, "columns": [column], "targets": []})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (sums(mean=float("nan")), "must be finite"),
        (sums(squares=float("inf")), "must be finite"),
        (sums(squares=-1.0), "no negative squares"),
        (sums(mean=1e200), "finite numbers"),
        (sums(mean="7"), "finite numbers"),
        (sums(mean=True), "finite numbers"),
        (sums(count=-1), "must count from 0"),
        (sums(count=4.5), "must count from 0"),
        (sums(count=10**10), "must count from 0"),
        (sums(count=5), "must have 4 rows, and column age has 5 cells"),
        (sums(kind="date"), "not 'date'"),
        (sums(kind="truth value"), "whose mean is 45"),
        (sums(name="a" * 201), "printable names"),
        (sums(name="a\nb"), "printable names"),
        (sums(categories={"a": 1}), "categories' cells"),
        (sums(kind="category", categories={"a": 3, "b": 2}), "categories' cells"),
        (sums(kind="category", categories={str(i): 1 for i in range(101)}), "at most 100"),
        (sums(kind="category", categories={"a": 0}), "must count from 1"),
        (sums(identifier=1), "by true or false"),
        (sums(more=1), "must have columns with"),
        (sums().replace("table", "vector").replace('"gaps": 0', '"gaps": 1'), "must have 4 rows"),
        (sums().replace("table", "tree"), "must be of a kind in"),
        (sums().replace('"rows": 4', '"rows": 0'), "must count from 1"),
        (sums().replace('"columns": [', '"columns": ['[:-1] + "[[],"), "must have columns with"),
        ('{"inputs":"table","rows":4,"columns":[],"targets":[]}', "must have a column"),
        ("[" * 100000, "must not be nested"),
        ("[]", "must hold inputs"),
        ("", "Expecting value"),
        (7, "must be a text"),
    ],
)  # fmt: skip
def test_sums_that_no_client_sends_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        read_statistics(text)
    assert read_statistics(sums()).columns[0].squares == 1700.0


def test_two_columns_of_one_name_are_refused():
    text = Statistics("table", 1, (Sums("a", count=1), Sums("a", count=1))).text()
    with pytest.raises(ValueError, match="different names"):
        read_statistics(text)


def test_a_malformed_reply_is_dropped_and_the_others_count():
    def lie(reply):
        if reply.metadata.src_node_id == 2 and reply.metadata.message_type == STATISTICS:
            text = reply.content["statistics"][SUMS]
            reply.content["statistics"] = ConfigRecord({SUMS: re.sub("45.0|50.0", "NaN", text)})

    strategy, _ = run([A, B, A], change=lie)
    assert strategy.column_encoder.encoding.mean[0] == pytest.approx(45.0)
    assert strategy.now.number == 1


def test_rows_count_for_at_most_the_sample_count():
    """A client that joined with 2 samples claims 2 million rows with mean 1000."""

    def lie(reply):
        if reply.metadata.src_node_id == 2 and reply.metadata.message_type == STATISTICS:
            claimed = Sums("age", "number", 2_000_000, 0, 1000.0, 0.0)
            lied = Statistics("table", 2_000_000, (claimed, replace(claimed, name="dose")))
            reply.content["statistics"] = ConfigRecord({SUMS: lied.text()})

    strategy, _ = run([A, B], change=lie)
    mean = (4 * 45 + 2 * 1000) / 6
    assert strategy.column_encoder.encoding.mean[0] == pytest.approx(mean)


def test_protection_limits_the_sample_count_of_a_client():
    """With protect a client counts at most three medians: of 4, 4 and 10⁶ samples that is 12."""

    def lie(reply):
        if reply.metadata.src_node_id != 3:
            return
        claimed = Sums("age", "number", 1_000_000, 0, 1000.0, 0.0)
        lied = Statistics("table", 1_000_000, (claimed, replace(claimed, name="dose")))
        reply.content["statistics"] = ConfigRecord({SUMS: lied.text()})
        reply.content["metrics"]["num-examples"] = 1_000_000

    def lie_twice(reply):
        if reply.metadata.message_type == "query" and reply.metadata.src_node_id == 3:
            reply.content["properties"]["num-examples"] = 1_000_000
        elif reply.metadata.message_type == STATISTICS:
            lie(reply)

    strategy, _ = run([A, A, A], change=lie_twice, of_server={"protect": True})
    mean = (4 * 45 + 4 * 45 + 12 * 1000) / 20
    assert strategy.column_encoder.encoding.mean[0] == pytest.approx(mean)


def test_no_answer_ends_the_run():
    def lie(reply):
        if reply.metadata.message_type == STATISTICS:
            reply.content["statistics"] = ConfigRecord({})

    with pytest.raises(RuntimeError, match=r"none of 2 training clients sent the sums.*malformed"):
        run([A, B], change=lie)


def test_an_empty_column_takes_the_kind_of_the_others():
    """A node whose column has no value at all cannot know its kind."""
    empty = Statistics("table", 2, (Sums("ward", "number", 0, 2), Sums("age", count=2)))
    ward = Sums("ward", "category", 2, 0, categories={"a": 1, "b": 1})
    known = Statistics("table", 2, (ward, Sums("age", "number", 2, 0, 1.0, 2.0)))
    sent = [Sent("1", empty), Sent("2", known)]
    assert agreeing(sent) == (sent, [])
    table_encoding = learnt(sent, "mean", []).table
    assert table_encoding.outputs == ("ward=a", "ward=b", "ward is missing", "age")


def test_a_column_in_another_unit_is_named(caplog, monkeypatch):
    """Pooled with grams, milligrams of two nodes are no scale for either."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    run([A, B, rows(20, 80, doses=[2.0, 8.0])])
    said = [record.getMessage() for record in caplog.records if " unit" in record.getMessage()]
    words = "client 2, column dose: numbers are about 5.8, on most nodes about 5e+03;"
    assert said == [f"{words} unless they are so, give all nodes one unit"]


def test_categories_that_nodes_write_otherwise_are_named():
    """One node's Yes is another column than the others' yes."""
    sent = []
    for word in ("yes", "yes", "Yes"):
        smoker = Sums("smoker", "category", 4, categories={word: 2, "no": 2})
        sent.append(Sent("", Statistics("table", 4, (smoker,))))
    notes = []
    assert learnt(sent, "", notes).table.outputs == ("smoker=Yes", "smoker=no", "smoker=yes")
    assert [note.partition(",")[0] for note in notes] == [
        "column smoker: Yes and yes are several categories"
    ]


def in_units(*factors, inputs="image", empty=False):
    """Statistics of clients with the inputs and the values 3 and 4 times a factor."""
    sent = []
    for factor in factors:
        sums = number_sums("0", factor * np.array([3.0, 4.0]))
        columns = (Sums("0") if empty and factor == 1 else sums,)
        targets = (number_sums("0", 10 * factor * np.array([3.0, 4.0])),)
        sent.append(Sent(f"client {factor}", Statistics(inputs, 2, columns, targets)))
    return in_other_units(learnt(sent, "", []), sent)


def test_inputs_and_values_in_another_unit_are_named():
    """The root of (9 + 16) / 2 is 3.54. Thirty times as much may still be one unit."""
    pixels, values = in_units(1, 1, 255)
    assert pixels.startswith(
        "client 255, pixels: numbers are about 9e+02, on most nodes about 3.5;"
    )
    assert values.startswith("client 255, value 0 to predict: numbers are about 9e+03, on")
    assert in_units(100, 100, 1, inputs="vector")[0].startswith("client 1, column 0: numbers")
    assert in_units(1, 1, 29) == in_units(29, 29, 1) == []
    assert len(in_units(1, 60, 60, empty=True)) == 1  # of the values


# The wire table


def test_the_wire_table_names_what_is_sent():
    _, grid = run([A, B])
    documented = {(kind, way): set(names[way]) for kind, _, names in table() for way in (UP, DOWN)}
    up, down = set(), set()
    for message in grid.seen:
        if message.metadata.message_type == STATISTICS:
            answers = bool(message.metadata.reply_to_message_id)
            for record in (*message.content.config_records.values(),
                           *message.content.metric_records.values()):  # fmt: skip
                (up if answers else down).update(record)
    assert up == documented[STATISTICS, UP] == {SUMS, "num-examples"}
    every = {name for kind, _, names in table() if kind == "any" for name in names[DOWN]}
    assert down - {"fedapps-settings"} <= every
    assert {ENCODING, "input-shape"} <= every
    page = Path("docs/reference/wire.md").read_text("utf-8")
    assert "fedapps-settings" in page
