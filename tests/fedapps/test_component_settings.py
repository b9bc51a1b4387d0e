"""Every setting of `client_app` and `server_app` has an effect, or is refused by a sentence."""

import logging
import math

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from setting_values import other_value
from torch import nn

import fedapps
from clients.core.arrays import from_record
from clients.core.protocol import APP_SETTINGS
from fedapps.component_settings import OF_SERVER, of_client, of_server
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.settings.sections import common, of_method, of_partitions
from strategies.core.accountant import central_epsilon, local_epsilon, local_loss
from strategies.core.privacy import Privacy
from strategies.core.strategy import PersonalizedStrategy

WIDTH = 5000  # inputs of the network, so that the deviation of the noise is seen
TASTES = ("fedembed", "global", "global+", "pfedkm")
PARAMETERS = {"method", "model", "rounds", "min-available-nodes"}  # of the functions themselves
DP = {key for key in common() if key == "dp" or key.startswith("dp-")}


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.out(x)


def data(context):
    i = context.node_config["partition-id"]
    x = torch.full((8, WIDTH), float(i + 1))
    return x, torch.arange(8) % 2


def run(of_client=None, of_server=None, *, method="fedavg", rounds=2, count=3):
    """The result and the strategy of both components."""
    found = []
    client = fedapps.client_app(method, model=Wide, data=data, **of_client or {})
    server = fedapps.server_app(
        method, model=Wide, shape=(WIDTH,), rounds=rounds, min_available_nodes=count,
        then=lambda *ended: found.extend(ended), **of_server or {},
    )  # fmt: skip
    places = [{"partition-id": i, "num-partitions": count} for i in range(count)]
    server(InProcessGrid(client, {}, places), Context(1, 0, {}, RecordDict(), {}))
    return found


def initial():
    torch.manual_seed(0)
    return Wide().out.weight.detach().numpy()


CENTRAL = {"dp": "central", "dp_noise_multiplier": 2.0, "dp_clip": 0.5, "num_clients": 4}


def test_central_privacy_of_the_server_component_adds_the_noise():
    """With lr 0 no client changes anything: two rounds add 2 draws of N(0, (zC/N)²), N = 4."""
    result, strategy = run({"lr": 0.0}, CENTRAL)
    change = from_record(result.arrays)["out.weight"] - initial()
    assert change.std() == pytest.approx(math.sqrt(2) * 2.0 * 0.5 / 4, rel=0.03)
    report = strategy.privacy.report()
    assert report["dp-epsilon"] == central_epsilon({(2.0, 1.0): 2}, 1e-5)
    assert report["dp-generator"] == "system"


def test_central_privacy_of_the_server_component_clips():
    """Noise of 1e-9 aside, the mean over N = 4 of three changes of norm C = 0.01 is at most
    0.0075 long; without the clip it is longer."""
    tiny = {"dp": "central", "dp_noise_multiplier": 1e-7, "dp_clip": 0.01, "num_clients": 4}
    for settings, shorter in ((tiny, True), ({}, False)):
        result, _ = run({"lr": 0.3}, settings, rounds=1)
        change = from_record(result.arrays)["out.weight"] - initial()
        assert (np.linalg.norm(change) <= 0.0075 * 1.001) == shorter


def test_more_clients_than_the_private_mean_is_over_are_refused():
    """Three equal changes over two users moved the model by 3/2 of each."""
    with pytest.raises(
        ValueError, match=r"^3 training clients are connected.*by 2 users.* 1\.5 ti"
    ):
        run({"lr": 0.1}, CENTRAL | {"num_clients": 2}, rounds=1)


def test_central_privacy_leaves_no_exact_scores():
    """ε covers everything by default, so nothing is evaluated; with model-updates scores are."""
    result, strategy = run({"lr": 0.1}, CENTRAL)
    assert not any(result.evaluate_metrics_clientapp.values())
    for metrics in result.train_metrics_clientapp.values():
        assert "loss" not in metrics and "valid-replies" not in metrics
    _, strategy = run({"lr": 0.1}, CENTRAL | {"dp_covers": "model-updates"})
    assert "not covered: scores of evaluations" in strategy.privacy.report()["dp-terms"]


def test_epsilon_chooses_the_noise_of_all_rounds():
    _, strategy = run({"lr": 0.0}, {"dp": "central", "dp_epsilon": 1.0, "num_clients": 3})
    assert strategy.privacy.report()["dp-epsilon"] == pytest.approx(1.0, rel=0.02)


LOCAL = {"dp": "local", "dp_noise_multiplier": 3.0, "dp_clip": 0.5}


def test_local_privacy_of_both_components_adds_the_noise_on_the_clients():
    """With lr 0 the mean of three replies is N(0, (zC)² / 3); two rounds add up."""
    result, strategy = run(LOCAL | {"lr": 0.0, "rounds": 2}, LOCAL)
    change = from_record(result.arrays)["out.weight"] - initial()
    assert change.std() == pytest.approx(math.sqrt(2 / 3) * 3.0 * 0.5, rel=0.03)
    spent = local_epsilon(2 * local_loss(3.0), 1e-5)
    assert strategy.privacy.report()["dp-epsilon"] == pytest.approx(spent)


def test_a_client_counts_what_it_reveals():
    """Told of one round, its ledger ends the second of a strategy by hand, which does not say how
    many it runs."""
    from clients.core.arrays import to_record
    from strategies import FedAvg

    client = fedapps.client_app("fedavg", model=Wide, data=data, rounds=1, **LOCAL)
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
    privacy = Privacy(dp="local", dp_noise_multiplier=3.0, dp_clip=0.5, rounds=2)
    start = {name: t.numpy() for name, t in Wide().state_dict().items()}
    with pytest.raises(RuntimeError, match=r"^round 2.*the limit that this run promised"):
        FedAvg(privacy=privacy, min_available_nodes=2).start(grid, to_record(start), 2)


@pytest.mark.parametrize(
    ("of_client", "of_server", "words"),
    [
        ({}, LOCAL, "give client_app dp='local'"),
        (LOCAL | {"rounds": 2}, {}, "client_app has dp 'local' and server_app 'none'"),
        (LOCAL | {"rounds": 2}, LOCAL | {"dp_noise_multiplier": 1.0}, "3.0 and server_app 1.0; g"),
        (LOCAL | {"rounds": 2}, LOCAL | {"dp_clip": 5.0}, "has dp-clip 0.5 and server_app 5.0"),
        (LOCAL | {"rounds": 2}, LOCAL | {"dp_covers": "model-updates"}, "has dp-covers 'everyth"),
        (LOCAL | {"rounds": 1}, LOCAL, "rounds 1, over which it promises .* server_app runs 2; g"),
        (LOCAL | {"rounds": 3}, LOCAL, "rounds 3, over which it promises .* server_app runs 2; g"),
        ({"lr": 0.1}, {"lr": 0.2}, "client_app has lr 0.1 and server_app 0.2"),
        ({}, {"lr": 0.2}, "client_app has lr 0.3 and server_app 0.2"),
        ({"evaluate_every": 2}, {}, "client_app has evaluate-every 2 and server_app 1"),
        ({"seed": 3}, {}, "client_app has seed 3 and server_app 0"),
        ({}, {"seed": 3}, "client_app has seed 0 and server_app 3"),
    ],
    ids=str,
)
def test_components_that_disagree_do_not_train(of_client, of_server, words):
    """Of another clip all noise was too large, and another number of rounds ended a run."""
    with pytest.raises(RuntimeError, match=words):
        run(of_client, of_server)


@pytest.mark.parametrize("other", ["ditto", "afl"])
def test_a_node_of_another_method_is_refused(other, monkeypatch, caplog):
    """Its replies look like those of the others."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    apps = [fedapps.client_app(name, model=Wide, data=data) for name in ("fedavg", "fedavg", other)]
    nodes = [{"partition-id": i} for i in range(3)]
    grid = InProcessGrid(lambda m, c: apps[c.node_config["partition-id"]](m, c), {}, nodes)
    ended = []
    server = fedapps.server_app(
        "fedavg", model=Wide, shape=(WIDTH,), rounds=1, then=lambda *found: ended.extend(found)
    )
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    assert ended[0].train_metrics_clientapp[1]["valid-replies"] == 2
    words = f"client_app has the method '{other}' and server_app 'fedavg'; give both the same"
    assert words in caplog.text


def test_components_that_agree_train():
    both = {"lr": 0.1, "evaluate_every": 2, "seed": 3, "local_steps": 2}
    result, strategy = run(both, both)
    assert strategy.evaluate_every == 2 and strategy.seed == 3
    assert (from_record(result.arrays)["out.weight"] != initial()).any()


def test_a_setting_of_the_server_alone_is_refused_beside_a_strategy_by_hand():
    """Such a strategy says nothing of its settings."""
    client = fedapps.client_app("fedavg", model=Wide, data=data, evaluate_every=2)
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
    from clients.core.arrays import to_record
    from strategies import FedAvg

    with pytest.raises(RuntimeError, match="was given evaluate-every, which the server alone"):
        FedAvg(min_available_nodes=2).start(grid, to_record({"out.weight": initial()}), 1)


@pytest.mark.parametrize(
    ("component", "settings", "words"),
    [
        ("client_app", {"dp": "central", "dp_epsilon": 1.0}, "give dp and its settings to serv"),
        ("client_app", {"dp": "local", "dp_epsilon": 1.0}, "give their number as rounds="),
        ("client_app", {"dp_epsilon": 1.0}, "dp is 'none'"),
        ("client_app", {"rounds": 3}, "with dp='local' alone"),
        ("client_app", {"min_available_nodes": 3}, "it belongs to server_app"),
        ("server_app", {"dp": "central", "dp_epsilon": 1.0}, "give their number as num_clients"),
        ("server_app", {"dp_epsilon": 1.0}, "dp is 'none'"),
        ("server_app", {"dp": "local"}, "exactly one must be positive"),
        ("server_app", {"num_clients": 3}, "with dp='central' alone"),
        ("server_app", CENTRAL | {"robust": "median"}, "ε is that of the mean"),
    ],
    ids=str,
)
def test_privacy_that_cannot_be_carried_out_is_refused_before_the_app_starts(
    component, settings, words
):
    with pytest.raises(ValueError, match=words):
        make(component, "fedavg", settings)


def test_a_method_that_cannot_keep_privacy_is_refused():
    with pytest.raises(ValueError, match=r"scaffold cannot keep dp 'central'; able: .*fedavg"):
        make("server_app", "scaffold", CENTRAL)


# The matrix: every declared setting, every method, both components


def make(component, method, settings):
    if component == "client_app":
        return fedapps.client_app(method, model=Wide, data=data, **settings)
    return fedapps.server_app(method, model=Wide, shape=(WIDTH,), rounds=1, **settings)


ALL = {
    method: common() | of_partitions() | of_method(method, METHODS[method])
    for method in METHODS
    if method not in TASTES
}
SHARED = {*common(), *of_partitions()}  # keys that no method's section has
FIRST = {}  # by class of strategy, the method whose cells stand for all methods with this class
FIRST_CLIENT = {}  # the same by the clients' constructor
for _method in ALL:
    FIRST.setdefault(METHODS[_method].strategy, _method)
    FIRST_CLIENT.setdefault(METHODS[_method].client.__init__, _method)


def strategy_of(method, monkeypatch, settings):
    """The strategy that `server_app` constructs, when it asks for its nodes."""
    found = []

    def present(self):
        found.append(self)
        raise LookupError

    monkeypatch.setattr(PersonalizedStrategy, "present", present)
    server = fedapps.server_app(
        method, model=model_for(method), shape=(1, 8, 8), rounds=1, **settings
    )
    with pytest.raises(LookupError):
        server(InProcessGrid(None, {}, []), Context(1, 0, {}, RecordDict(), {}))
    return found[0]


def model_for(method):
    def normalised():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def plain():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3))

    return normalised if method in ("fedbn", "bn-adapt") else plain


def is_read(method, condition):
    """Whether the condition of a setting's declaration holds for the method's defaults."""
    name, _, value = condition.partition("=")
    default = str(ALL[method][name.removesuffix("!")].default)
    return (default == value) != name.endswith("!")


@pytest.mark.parametrize("method", ALL)
def test_every_setting_reaches_the_strategy_or_is_refused(method, monkeypatch):
    """Of the server's component: the strategy has the value; what clients read is announced to
    them; dp reaches its privacy; all else is refused with what to do instead. A common key goes
    the same way to every method of one class of strategy."""
    carried = 0
    is_first = FIRST[METHODS[method].strategy] == method
    own = of_method(method, METHODS[method]).keys()
    for key, setting in ALL[method].items():
        name, value = key.replace("-", "_"), other_value(setting)
        if key in DP | PARAMETERS:
            continue  # the cases above
        if key in OF_SERVER and key not in of_server(method):
            continue
        if key not in of_client(method) | of_server(method):
            with pytest.raises(ValueError, match=f"server_app does not carry out .*{key}"):
                make("server_app", method, {name: value})
            continue
        if key in SHARED and key not in own and not is_first:
            continue
        try:
            strategy = strategy_of(method, monkeypatch, {name: value})
        except ValueError as error:  # another setting is needed beside it
            assert key in str(error) or name in str(error), (key, error)
            continue
        carried += 1
        assert f'"{key}"' in strategy.common_config[APP_SETTINGS]
        if name in type(strategy).declared:
            assert getattr(strategy, name) == value, key
    assert carried > 20 or not is_first


@pytest.mark.parametrize("method", ALL)
def test_every_setting_reaches_the_client_or_is_refused(method, monkeypatch):
    """Of the clients' component: the client has the value; what the server alone reads is compared
    with what the server says, see the cases above; all else is refused. A common key goes the same
    way to all clients with one constructor."""
    kind, found = METHODS[method].client, []
    is_first = method in FIRST_CLIENT.values()
    own = of_method(method, METHODS[method]).keys()
    original = kind.__init__

    def noting(self, *arguments, **options):
        original(self, *arguments, **options)
        found.append(self)

    monkeypatch.setattr(kind, "__init__", noting)
    samples = torch.rand(8, 1, 8, 8), torch.arange(8) % 3
    carried = 0
    for key, setting in ALL[method].items():
        name, value = key.replace("-", "_"), other_value(setting)
        if key in DP | PARAMETERS:
            continue
        if key not in of_client(method) | of_server(method):
            with pytest.raises(ValueError, match=f"client_app does not carry out .*{key}"):
                make("client_app", method, {name: value})
            continue
        if name not in kind.declared or value == "cuda":
            continue
        if key in SHARED and key not in own and not is_first:
            continue
        found.clear()
        if setting.beside and not is_read(method, setting.beside):
            with pytest.raises(ValueError, match=f"{key}=.* changes nothing here"):
                make("client_app", method, {name: value})
            continue
        app = fedapps.client_app(
            method, model=model_for(method), data=lambda _: (samples, samples),
            public=lambda: torch.rand(4, 1, 8, 8), **{name: value},
        )  # fmt: skip
        grid = InProcessGrid(app, {}, [{"partition-id": 0}])
        reply = query(grid, {APP_SETTINGS: "{}", "method": method})
        if not found:
            assert "error" in reply, (key, reply)
            continue
        carried += 1
        assert getattr(found[0], name) == value, key
    assert carried >= 10 or not is_first


def query(grid, config):
    from flwr.app import ConfigRecord, Message

    message = Message(RecordDict({"config": ConfigRecord(config)}), 1, "query")
    (reply,) = grid.send_and_receive([message])
    if reply.has_error():
        return {"error": reply.error.reason}
    return dict(reply.content["properties"])


def test_privacy_in_the_runs_configuration_alone_is_refused_by_a_sentence():
    """`dp` without its other settings, which a run of this package always has."""
    app = fedapps.client_app("fedavg", model=Wide, data=data)
    grid = InProcessGrid(app, {"dp": "central"}, [{"partition-id": 0}])
    assert "takes privacy by its keywords alone" in query(grid, {"method": "fedavg"})["error"]
