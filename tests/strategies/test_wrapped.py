"""Flower's privacy wrappers: around these strategies they work as documented, or are refused."""

import weakref

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

import strategies
from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies import AFL, PFL, CentralAdam, FedAMP, FedAvg, FedGMA, PFedHN, Scaffold

START = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
STEPS = (1.0, -3.0, 2.0)  # by round


def clients(samples=(1, 1, 1), failing=(), lost=()):
    """Three nodes; node i adds i times the round's step to all it is sent, and says that it has
    so many samples. Those that are `failing` send NaN, those `lost` raise an error."""
    client_app = ClientApp()

    @client_app.train()
    def train(message, context):
        if context.node_id in lost:
            raise OSError("no data")
        arrays = from_record(message.content["arrays"])
        step = STEPS[message.content["config"]["server-round"] - 1] * context.node_id
        if context.node_id in failing:
            step = np.nan
        moved = {n: np.asarray(a + np.float32(step)) for n, a in arrays.items()}
        got = MetricRecord({"num-examples": samples[context.node_id - 1], "one": 1, "risk": 1.0})
        return Message(RecordDict({"arrays": to_record(moved), "metrics": got}), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        value = float(from_record(message.content["arrays"])["w"][0])
        got = MetricRecord({"num-examples": 1, "value": value})
        return Message(RecordDict({"metrics": got}), reply_to=message)

    return InProcessGrid.simulation(client_app, {}, 3)


def fixed(strategy, noise=0.0, norm=1e6):
    return DifferentialPrivacyServerSideFixedClipping(strategy, noise, norm, 3)


def adaptive(strategy):
    return DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.0, 3, 1.0)


def weights(result):
    return from_record(result.arrays)["w"]


@pytest.mark.parametrize("wrap", [lambda s: fixed(s, norm=1.0), adaptive])
def test_updates_are_clipped_and_averaged(wrap):
    """Of three equal entries that all change by i ≥ 1 each moves by 1/√3 at norm 1."""
    result = wrap(FedAvg()).start(clients(), to_record(START), num_rounds=1)
    np.testing.assert_allclose(weights(result), [3**-0.5] * 2, rtol=1e-6)


@pytest.mark.parametrize("strategy", [FedAvg, FedGMA, AFL, CentralAdam])
def test_noise_comes_into_the_model_that_clients_get(strategy):
    """σ = 30 · 1 / 3 = 10, which no client's step comes near."""
    np.random.seed(0)
    result = fixed(strategy(evaluate_every=1), 30.0, 1.0).start(
        clients(), to_record(START), num_rounds=1
    )
    noisy = weights(result)
    assert (abs(noisy) > 1.5).all()
    assert result.evaluate_metrics_clientapp[1]["value"] == pytest.approx(noisy[0])


def test_a_central_optimizer_keeps_its_state():
    """Clipped at no norm and without noise it is as if there were no wrapper: Adam's three steps
    with the gradients −2, 6 and −4."""
    own = CentralAdam(server_lr=0.1).start(clients(), to_record(START), num_rounds=3)
    wrapped = fixed(CentralAdam(server_lr=0.1)).start(clients(), to_record(START), num_rounds=3)
    m = v = x = 0.0
    for t, g in enumerate((-2.0, 6.0, -4.0), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x -= 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
    np.testing.assert_allclose(weights(own), [x, x], rtol=1e-4)
    np.testing.assert_allclose(weights(wrapped), [x, x], rtol=1e-4)


def test_every_round_is_evaluated_since_none_is_known_to_be_the_last(caplog):
    result = fixed(FedAvg()).start(clients(), to_record(START), num_rounds=3)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert "the last round" not in caplog.text


def test_an_interval_is_kept_with_a_warning(caplog):
    result = fixed(FedAvg(evaluate_every=2)).start(clients(), to_record(START), num_rounds=3)
    assert sorted(result.evaluate_metrics_clientapp) == [2]
    (line,) = [r.getMessage() for r in caplog.records if "the last round" in r.getMessage()]
    assert "evaluate_every=2" in line and "may not be evaluated" in line


@pytest.mark.parametrize(
    ("strategy", "of_clients", "reason"),
    [
        (FedAvg(), {"samples": (1, 20, 3)}, "weighs clients by num-examples, here 1 to 20"),
        (FedAvg(), {"failing": (2,)}, "2 of 3 replies are valid, so that each counts more"),
        (FedAvg(robust="median"), {}, "robust is 'median', which is no mean"),
    ],
    ids=["weights", "dropped", "robust"],
)
def test_noise_that_is_too_small_for_the_mean_is_said_once(strategy, of_clients, reason, caplog):
    """The wrapper's noise is zC / 3, for three equal weights."""
    fixed(strategy, 1.0, 1.0).start(clients(**of_clients), to_record(START), num_rounds=2)
    (line,) = [r.getMessage() for r in caplog.records if "noise is too small" in r.getMessage()]
    assert line.startswith("round 1: FedAvg runs inside another strategy") and reason in line


def test_equal_weights_by_another_name_need_no_more_noise(caplog):
    strategy = FedAvg(weighted_by_key="one")
    fixed(strategy, 1.0, 1.0).start(clients(samples=(1, 20, 3)), to_record(START), num_rounds=1)
    FedAvg().start(clients(samples=(1, 20, 3)), to_record(START), num_rounds=1)  # no wrapper
    assert "noise is too small" not in caplog.text


def test_a_round_that_the_wrapper_skips_is_said(caplog):
    """All rounds went by, and the model stayed that of the start, without a warning."""
    fixed(FedAvg()).start(clients(lost=(3,)), to_record(START), num_rounds=2)
    lines = [r.getMessage() for r in caplog.records if "aggregates nothing" in r.getMessage()]
    assert [line.partition(":")[0] for line in lines] == ["round 1", "round 2"]


def test_a_second_run_in_a_wrapper_begins_anew():
    strategy = CentralAdam(server_lr=0.1)
    first, second = (fixed(strategy).start(clients(), to_record(START), 2) for _ in range(2))
    assert weights(first).tolist() == weights(second).tolist()


@pytest.mark.parametrize("wrap", [fixed, adaptive])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (PFedHN(), "its arrays stay on the server"),
        (PFL(base="pfedhn", lenient=True), "its arrays stay on the server"),
        (FedAMP(lenient=True), "its arrays stay on the server"),
        (Scaffold(), "do not get and return the very arrays"),
    ],
)
def test_a_strategy_that_no_wrapper_protects_is_refused(strategy, why, wrap):
    name = type(strategy).__name__
    with pytest.raises(ValueError, match=f"^{name} cannot run inside another strategy.*{why}"):
        wrap(strategy).start(clients(), to_record(START), num_rounds=1)


def test_a_failed_run_of_its_own_leaves_a_strategy_checked():
    strategy = Scaffold(min_valid_replies=4)
    with pytest.raises(RuntimeError, match="min-valid-replies is 4"):
        strategy.start(clients(), to_record(START), num_rounds=1)
    with pytest.raises(ValueError, match="Scaffold cannot run inside another strategy"):
        fixed(strategy).start(clients(), to_record(START), num_rounds=1)


def test_exchanges_are_no_wrappers_business(monkeypatch):
    monkeypatch.setattr(strategies.FedMA, "broadcast", FedAvg.broadcast)
    monkeypatch.setattr(strategies.FedMA, "initialize", FedAvg.initialize)
    strategy = strategies.FedMA()
    strategy.roster.requires = None  # clients of ours would be there
    wrapper = DifferentialPrivacyClientSideFixedClipping(strategy, 1.0, 1.0, 3)
    with pytest.raises(ValueError, match=r"clients answer `train.retrain`, which no wrapper"):
        wrapper.start(clients(), to_record(START), num_rounds=1)


def test_our_own_rounds_keep_no_reply_in_memory():
    grid, alive = clients(), []
    deliver, came = grid._deliver, []

    def noted(message):
        reply = deliver(message)
        if message.metadata.message_type == "train":
            came.append(weakref.ref(reply))
        return reply

    class Looking(FedAvg):
        def aggregate(self, arrays, updates):
            alive.extend(reply() for reply in came)
            return super().aggregate(arrays, updates)

    grid._deliver = noted
    Looking().start(grid, to_record(START), num_rounds=1)
    assert alive == [None] * 3
