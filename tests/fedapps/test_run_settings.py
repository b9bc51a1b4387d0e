"""Settings that come from the run's configuration and from messages: they hold, or are refused."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg as Foreign
from flwr.serverapp.strategy import FedProx

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.common.errors import Refusal
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.run_settings import ALIASES, with_run_config
from fedapps.settings.config import defaults
from strategies.methods.fedavg import FedAvg

START = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
NODES = [{"partition-id": i} for i in range(2)]


def data(context):
    draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.randn(24, 3, generator=draws)
    return x, (x[:, 0] > 0).long()


def trained(run_config=None, train_config=None, **settings):
    """The weights after one round of FedAvg by a strategy of one's own."""
    app = fedapps.client_app("fedavg", model=lambda: torch.nn.Linear(3, 2), data=data, **settings)
    grid = InProcessGrid(app, run_config or {}, NODES)
    strategy = FedAvg(fraction_evaluate=0)
    config = ConfigRecord(train_config or {})
    result = strategy.start(grid, to_record(START), num_rounds=1, train_config=config)
    return from_record(result.arrays)["weight"]


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.05}, {"local-epochs": 2}, {"local_epochs": 2}, {"batch-size": 5}, {"momentum": 0.9}],
)
def test_a_setting_of_the_runs_configuration_holds_as_a_keyword(settings):
    """The same bits as with the keyword, and others than without."""
    keywords = {name.replace("-", "_"): value for name, value in settings.items()}
    by_run = trained(run_config=settings)
    np.testing.assert_array_equal(by_run, trained(**keywords))
    assert abs(by_run - trained()).max() > 1e-3


def test_a_servers_keys_are_no_former_names_of_this_user():
    """Messages hold `select` and `bound`, which were names of settings: a warning would ask the
    user of a client to rename what the server writes."""
    ended = []
    model = partial(torch.nn.Linear, 3, 2)
    client = fedapps.client_app("fedavg", model=model, data=lambda c: (data(c), data(c)))
    server = fedapps.server_app(
        "fedavg", model=model, shape=(3,), rounds=1, selection_metric="macro-f1",
        report_generalization_bound=True, then=lambda *result: ended.extend(result),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        server(InProcessGrid(client, {}, NODES), Context(1, 0, {}, RecordDict(), {}))
    assert 0 < ended[0].evaluate_metrics_clientapp[1]["train-macro-f1"] <= 1


@pytest.mark.parametrize(
    ("run_config", "keywords", "message"),
    [
        ({"learning-rate": 0.05}, {}, "learning-rate = 0.05, which client_app calls lr"),
        ({"epochs": 2}, {}, "epochs = 2, which client_app calls local-epochs"),
        ({"lr": 0.05}, {"lr": 0.1}, "lr is 0.1 in client_app and 0.05 in the run's configuration"),
        ({"lr": "fast"}, {}, "lr is 'fast'; it must be a number"),
    ],
)
def test_what_contradicts_or_has_another_name_is_refused(run_config, keywords, message):
    with pytest.raises(RuntimeError, match=message):
        trained(run_config=run_config, **keywords)


@pytest.mark.parametrize("component", ["client_app", "server_app"])
def test_privacy_is_no_matter_of_the_runs_configuration(component):
    """It would be half of it: the other component has none."""
    message = f"dp = 'central'; {component} takes privacy by its keywords alone: dp="
    with pytest.raises(Refusal, match=message):
        with_run_config(component, "fedavg", defaults(), {}, {"dp": "central"})


def test_keys_of_the_app_itself_are_left_alone():
    own = {"num-server-rounds": 9, "dataset-name": "x", "wandb": True, "lr": 0.3}
    np.testing.assert_array_equal(trained(run_config=own), trained())


@pytest.mark.parametrize(
    ("train_config", "message"),
    [
        ({"lr": 0.01}, r"config has lr = 0.01, but lr of this client is 0.3, .*client_app"),
        ({"learning_rate": 0.01}, "has learning_rate = 0.01, but lr of this client is 0.3"),
        ({"local-epochs": 5}, "local-epochs = 5, but local-epochs of this client is 0"),
    ],
)
def test_a_message_does_not_change_how_clients_train(train_config, message):
    """It was ignored: the same bits with and without."""
    with pytest.raises(RuntimeError, match=message):
        trained(train_config=train_config)


def test_a_message_may_say_what_holds():
    same = {"lr": 0.1, "learning-rate": 0.1, "note": "x"}
    np.testing.assert_array_equal(trained(train_config=same, lr=0.1), trained(lr=0.1))


def test_every_other_name_stands_for_a_setting_of_fedprox():
    """Each is refused by the name that holds."""
    for name, setting in ALIASES.items():
        with pytest.raises(Refusal, match=f"{name} = 2, which client_app calls {setting}"):
            with_run_config("client_app", "fedprox", {}, {}, {name: 2})


def of_flower(strategy, method, **settings):
    """The number of arrays that a strategy of Flower has after two rounds with such clients."""
    app = fedapps.client_app(method, model=lambda: torch.nn.Linear(3, 2), data=data, **settings)
    result = strategy.start(InProcessGrid(app, {}, NODES), to_record(START), num_rounds=2)
    return len(result.arrays)


@pytest.mark.parametrize(
    ("strategy", "method", "settings", "words"),
    [
        (Foreign(), "scaffold", {}, "needs its own; write server_app('scaffold', …), or start Sca"),
        (Foreign(), "pfedhn", {}, "needs its own; write server_app('pfedhn', …), or start PFedHN"),
        (FedProx(proximal_mu=0.5), "fedavg", {}, "write client_app('fedprox', mu=0.5, …)"),
        (FedProx(proximal_mu=0.5), "fedprox", {"mu": 0.1}, "mu of this client is 0.1"),
    ],
)
def test_a_client_refuses_a_strategy_of_flower_that_does_not_fit(
    strategy, method, settings, words, caplog
):
    """SCAFFOLD's run ended without arrays; the others trained by FedAvg without a word."""
    assert of_flower(strategy, method, **settings) == 0
    assert words in caplog.text


def test_a_client_works_with_a_strategy_of_flower_that_fits():
    """Without validation samples evaluations are errors: zero samples were a ZeroDivisionError of
    Flower's server."""
    assert of_flower(Foreign(), "ditto") == 2
    assert of_flower(FedProx(proximal_mu=0.5), "fedprox", mu=0.5) == 2
    assert of_flower(FedProx(proximal_mu=0.0), "fedavg") == 2


def test_the_network_may_depend_on_the_context():
    """As `client_fn` does; a function of more is refused."""

    def network(context: Context):
        return torch.nn.Sequential(
            torch.nn.Linear(3, int(context.run_config["hidden"])), torch.nn.Linear(4, 2)
        )

    app = fedapps.client_app("fedavg", model=network, data=data)
    grid = InProcessGrid(app, {"hidden": 4}, NODES)
    torch.manual_seed(0)
    made = network(Context(1, 1, {}, RecordDict(), {"hidden": 4}))
    initial = to_record({n: t.numpy() for n, t in made.state_dict().items()})
    result = FedAvg(fraction_evaluate=0).start(grid, initial, num_rounds=1)
    assert from_record(result.arrays)["0.weight"].shape == (4, 3)
    app = fedapps.client_app("fedavg", model=lambda size, depth: None, data=data)
    with pytest.raises(RuntimeError, match="model= needs size, depth; give a function"):
        FedAvg().start(InProcessGrid(app, {}, NODES), initial, num_rounds=1)


def both(run_config, *, rounds=1, min_available_nodes=0, **settings):
    """The result of both components under one configuration of the run."""
    network = lambda: torch.nn.Linear(3, 2)  # noqa: E731
    client = fedapps.client_app("fedavg", model=network, data=data, **settings)
    found = []
    server = fedapps.server_app(
        "fedavg", model=network, shape=(3,), rounds=rounds,
        min_available_nodes=min_available_nodes, then=lambda *got: found.extend(got),
    )  # fmt: skip
    grid = InProcessGrid(client, run_config, NODES)
    server(grid, Context(1, 1, {}, RecordDict(), run_config))
    return found


def test_the_server_takes_its_settings_from_the_same_configuration():
    """Half of two nodes is one; another rate reaches the clients as well."""
    _, strategy = both({"fraction-train": 0.5, "min-available-nodes": 2, "lr": 0.05})
    assert strategy.fraction_train == 0.5
    assert strategy.now.report["sampled"] == 1
    with pytest.raises(Refusal, match=r"learning-rate = 0\.05, which server_app calls lr"):
        both({"learning-rate": 0.05})
    with pytest.raises(RuntimeError, match=r"lr is 0.2 in client_app and 0.05 in the run"):
        both({"lr": 0.05}, lr=0.2)


@pytest.mark.parametrize("key", ["num-server-rounds", "num_server_rounds", "rounds"])
def test_the_runs_configuration_says_the_rounds(key):
    """`rounds` and names with underscores were ignored: three rounds."""
    result, _ = both({key: 2}, rounds=0)
    assert max(result.train_metrics_clientapp) == 2


def test_without_a_number_there_are_three_rounds_and_two_nodes():
    result, strategy = both({}, rounds=0)
    assert len(result.train_metrics_clientapp) == 3
    assert strategy.roster.least == 2
    _, strategy = both({"min_available_nodes": 1})
    assert strategy.roster.least == 1


@pytest.mark.parametrize(
    ("run_config", "keywords", "message"),
    [
        ({"num-server-rounds": 5}, {"rounds": 2}, "rounds=2 and num-server-rounds = 5 in the run"),
        ({"num-server-rounds": 5, "rounds": 4}, {"rounds": 0}, "= 5 in .* and rounds = 4 in the"),
        ({"min-available-nodes": 1}, {"min_available_nodes": 2}, "nodes=2 and min-available-nod"),
        ({"num-rounds": 5}, {}, "num-rounds = 5, which server_app calls num-server-rounds; rename"),
        ({"min-available-clients": 1}, {}, "which server_app calls min-available-nodes; rename"),
        ({"fraction-fit": 0.5}, {}, "fraction-fit = 0.5, which server_app calls fraction-train"),
        ({"num-server-rounds": -5}, {}, "num-server-rounds is -5 in the run's configuration; it"),
        ({"num-server-rounds": 2.7}, {}, "is 2.7 in the run's configuration; it must be a whole"),
        ({"num-server-rounds": "10"}, {}, "is '10' in the run's configuration; it must be a whole"),
        ({}, {"rounds": -5}, "rounds is -5 in server_app; it must be a whole number from 0"),
        ({}, {"rounds": 2.0}, "rounds is 2.0 in server_app; it must be a whole number from 0"),
        ({}, {"min_available_nodes": "2"}, "min_available_nodes is '2' in server_app; it must"),
    ],
    ids=str,
)
def test_rounds_and_nodes_that_are_not_understood_are_refused(run_config, keywords, message):
    """Another number than the one given was taken, and -5 rounds returned what was not trained."""
    with pytest.raises(ValueError, match=message):
        both(run_config, **keywords)
