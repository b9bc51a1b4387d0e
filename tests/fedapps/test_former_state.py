"""`server_app(former=…)` continues the run of a strategy's state: its rounds and its budget."""

import copy

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid

X = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0.5).long()
CENTRAL = {"dp": "central", "dp_epsilon": 4.0, "num_clients": 2}
LOCAL = {"dp": "local", "dp_epsilon": 8.0}
NODES = 2
PLACES = [{"partition-id": i} for i in range(NODES)]


def net():
    return nn.Linear(3, 2)


def ended(rounds, client_settings=None, method="fedavg", **of_server):
    """The result and the strategy of both components."""
    found = []
    client = fedapps.client_app(
        method, model=net, data=lambda context: (X, Y), lr=0.1, **client_settings or {}
    )
    server = fedapps.server_app(
        method, model=net, shape=(3,), rounds=rounds, then=lambda *got: found.extend(got),
        **of_server,
    )  # fmt: skip
    grid = InProcessGrid(client, {}, PLACES)
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    return found


def of_client(terms, rounds):
    """What the clients' component needs of these terms."""
    return {} if terms is CENTRAL else LOCAL | {"rounds": rounds}


@pytest.mark.parametrize("terms", [CENTRAL, LOCAL], ids=["central", "local"])
def test_epsilon_holds_for_all_rounds_of_both_runs(terms):
    """The second run spent noise for as many rounds as if nothing had been spent: ε = 5.06."""
    first = ended(2, of_client(terms, 2), **terms)[1]
    assert first.privacy.report()["dp-epsilon"] <= terms["dp_epsilon"]
    both = ended(4, of_client(terms, 4), former=first.state(), **terms)[1]
    report = both.privacy.report()
    assert both.round == 4
    assert 0.99 * terms["dp_epsilon"] < report["dp-epsilon"] <= terms["dp_epsilon"]
    assert "continues a saved run" in report["dp-terms"]


def test_the_rest_of_a_run_has_its_noise():
    """Of four planned rounds two were carried out: the others need no more noise than they."""
    whole = ended(4, of_client(LOCAL, 4), **LOCAL)[1]
    half = whole.state()
    half["round"] = 2
    half["privacy"]["spent"] = {client: x / 2 for client, x in half["privacy"]["spent"].items()}
    rest = ended(4, of_client(LOCAL, 4), former=half, **LOCAL)[1]
    assert rest.privacy.z == pytest.approx(whole.privacy.z, rel=2e-3)


def test_no_epsilon_holds_for_a_model_that_was_trained_without():
    """It ended with KeyError: 'mode', or said nothing of what had trained the arrays."""
    former = ended(1)[1].state()
    for state in (former, {"arrays": former["arrays"]}):
        with pytest.raises(ValueError, match="dp is 'central', but former was trained without pri"):
            ended(2, former=state, **CENTRAL)


def test_a_private_run_that_goes_on_without_privacy_says_so(caplog):
    former = ended(1, **CENTRAL)[1].state()
    ended(2, former=former, **CENTRAL)
    assert "its ε does not hold" not in caplog.text
    ended(2, former=former)
    assert "former was trained with differential privacy, and dp is 'none'" in caplog.text


ARRAYS = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("former", "words"),
    [
        ("state.pt", "former is a str"),
        (net().state_dict(), "former has no 'arrays' by name, but weight, bias"),
        (to_record(ARRAYS), "former has no 'arrays' by name, but weight, bias"),
        ({"arrays": to_record(ARRAYS)}, "the array 'weight' as a Array, not as numpy's"),
        ({"arrays": net().state_dict()}, "the array 'weight' as a Tensor, not as numpy's"),
    ],
    ids=["path", "state_dict", "record", "record of arrays", "tensors"],
)
def test_what_is_no_state_is_refused_before_the_app_starts(former, words):
    with pytest.raises(ValueError, match=rf"{words}.*give the strategy\.state\(\)"):
        fedapps.server_app("fedavg", model=net, shape=(3,), former=former)


def test_what_clients_keep_themselves_is_not_in_the_state(caplog):
    """Ditto's personal models began anew without a word; FedAvg's clients keep nothing."""
    for method, is_said in (("fedavg", False), ("ditto", True)):
        state = ended(1, method=method)[1].state()
        assert "keep a state of their own" not in caplog.text
        ended(2, method=method, former=state)
        assert ("clients of ditto keep a state of their own" in caplog.text) == is_said


class Leaving(InProcessGrid):
    """The last node leaves with the third round."""

    def get_node_ids(self):
        return range(1, NODES if len(states) == 2 else NODES + 1)


states = []


def test_a_run_that_fails_goes_on_from_its_last_round():
    """A node that left for longer than the fixed 120 seconds ended a run, and nothing was kept."""
    states.clear()
    client = fedapps.client_app("fedavg", model=net, data=lambda context: (X, Y), lr=0.1)
    server = fedapps.server_app(
        "fedavg", model=net, shape=(3,), rounds=4, wait=0.1,
        on_round=lambda report, strategy: states.append(copy.deepcopy(strategy.state())),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"1 of 2 nodes answered within 0 s; .*wait longer \(wa"):
        server(Leaving(client, {}, PLACES), Context(1, 0, {}, RecordDict(), {}))
    assert [state["round"] for state in states] == [1, 2]
    rest, whole = ended(4, former=states[-1])[0], ended(4)[0]
    assert sorted(rest.train_metrics_clientapp) == [3, 4]
    for name, array in from_record(whole.arrays).items():
        np.testing.assert_array_equal(from_record(rest.arrays)[name], array)


@pytest.mark.parametrize("wait", [-1.0, "long", None])
def test_a_wait_that_is_no_time_is_refused(wait):
    with pytest.raises(ValueError, match=r"wait is .*; it must be a number of seconds from 0"):
        fedapps.server_app("fedavg", model=net, shape=(3,), wait=wait)


def test_arrays_alone_are_a_state():
    result, _ = ended(1, {"local_steps": 1}, former={"arrays": ARRAYS})
    assert abs(from_record(result.arrays)["bias"]).max() < 0.1  # a step from zeros
