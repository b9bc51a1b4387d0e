"""Flower's mods around the clients of a ported app: their effect on what the server gets."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.client import NumPyClient
from flwr.client.mod import LocalDpMod as FormerLocalDpMod
from flwr.client.mod import fixedclipping_mod as former_clipping
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
from small_runs import Watched

import fedapps
from clients.core.arrays import from_record, to_record
from strategies.methods.fedavg import FedAvg

START = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
NODES = [{"partition-id": i} for i in range(2)]


class Steps(NumPyClient):
    """Adds 3 to every entry: a change of norm 3 √8 = 8.5."""

    def fit(self, parameters, config):
        return [a + np.float32(3) for a in parameters], 1, {}

    def evaluate(self, parameters, config):
        return 0.5, 1, {"mean": float(parameters[1].mean())}


def samples(context):
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(context.node_id))
    pair = (x, (x[:, 0] > 0).long())
    return pair, pair


APPS = {
    "client_fn": lambda mods: fedapps.from_client_fn(lambda context: Steps(), mods=mods),
    "client_app": lambda mods: fedapps.client_app(
        "fedavg", model=lambda: torch.nn.Linear(3, 2), data=samples, lr=50.0, mods=mods
    ),
}


def go(app, strategy, rounds=1):
    """The norms of the changes that clients sent back, by train message, and the result."""
    grid = Watched(app, {}, NODES)
    config = ConfigRecord({"method": "fedavg"})
    result = strategy.start(grid, to_record(START), num_rounds=rounds, train_config=config)
    norms = []
    for message, reply in zip(grid.seen[::2], grid.seen[1::2], strict=True):
        if message.metadata.message_type == "train" and reply.has_content():
            sent, got = (from_record(m.content["arrays"]) for m in (message, reply))
            norms.append(float(np.sqrt(sum(((got[n] - sent[n]) ** 2).sum() for n in sent))))
    return norms, result


@pytest.mark.parametrize("kind", APPS)
def test_clipping_bounds_what_is_sent(kind):
    """The server's wrapper tells the norm; evaluations pass."""
    unclipped, _ = go(APPS[kind](None), FedAvg(evaluate_every=1))
    assert min(unclipped) > 1
    for mod, wrapper in (
        (
            fixedclipping_mod,
            DifferentialPrivacyClientSideFixedClipping(FedAvg(evaluate_every=1), 0.0, 0.25, 2),
        ),
        (
            adaptiveclipping_mod,
            DifferentialPrivacyClientSideAdaptiveClipping(
                FedAvg(evaluate_every=1), 0.0, 2, initial_clipping_norm=0.25
            ),
        ),
    ):
        norms, result = go(APPS[kind]([mod]), wrapper)
        assert norms == pytest.approx([0.25, 0.25])
        assert result.evaluate_metrics_clientapp[1]


def wrapped():
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.0, 0.25, 2)


@pytest.mark.parametrize("kind", APPS)
def test_a_server_that_relies_on_clipping_is_refused_by_clients_that_do_not_clip(kind, caplog):
    """Its noise is made for the norm 0.25, and whole updates of norm 8.5 were sent. A mod of
    one's own may clip."""

    def own(message, context, call_next):
        return call_next(message, context)

    noise = LocalDpMod(clipping_norm=9.0, sensitivity=1e-3, epsilon=0.1, delta=0.1)
    for mods in (None, [], [noise], [arrays_size_mod]):
        caplog.clear()
        norms, result = go(APPS[kind](mods), wrapped())
        assert not norms
        assert "clipped to norm 0.25, and no mod of this app clips; give mods=[fi" in caplog.text
        assert not from_record(result.arrays)  # the wrapper has aggregated nothing
    assert min(go(APPS[kind]([own]), wrapped())[0]) > 1


@pytest.mark.parametrize("kind", APPS)
def test_local_noise_comes_after_the_clipping(kind):
    """σ = 0.001 · √(2 ln(1.25 / 0.1)) / 0.1 = 0.0225: near the norm, and never on it."""
    np.random.seed(0)
    noise = LocalDpMod(clipping_norm=0.25, sensitivity=0.001, epsilon=0.1, delta=0.1)
    norms, result = go(APPS[kind]([noise]), FedAvg(evaluate_every=1))
    assert norms == pytest.approx([0.25, 0.25], abs=0.1)
    assert 0.25 not in norms
    assert result.evaluate_metrics_clientapp[1]


@pytest.mark.parametrize("kind", APPS)
def test_others_run_around_every_message_in_order(kind):
    called = []

    def mod_of(name):
        def mod(message, context, call_next):
            called.append((name, message.metadata.message_type))
            return call_next(message, context)

        return mod

    go(APPS[kind]([mod_of("outer"), mod_of("inner")]), FedAvg(evaluate_every=1))
    types = ("query", "train", "evaluate")
    assert set(called) == {(name, t) for name in ("outer", "inner") for t in types}
    assert called[0][0] == "outer" and called[1] == ("inner", called[0][1])


def test_a_mods_error_about_a_reply_is_an_answer_to_the_message():
    """Flower's mods address it to the client's reply: the server would wait for the timeout."""

    def renamed(message, context, call_next):
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            reply.content["arrays"] = to_record({"other": np.zeros(1, np.float32)})
        return reply

    noise = LocalDpMod(1.0, 1.0, 1.0, 0.1)
    with pytest.raises(RuntimeError, match=r"0 valid replies of 2.*keys in the ArrayRecord"):
        go(APPS["client_fn"]([noise, renamed]), FedAvg())


@pytest.mark.parametrize("kind", APPS)
@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ([secaggplus_mod], "secaggplus_mod answers .* SecAgg.* leave it out"),
        ([secagg_mod], "secagg_mod answers .* the server then sees each client's model"),
        ([former_clipping], "fixedclipping_mod of flwr.client.mod reads .* flwr.clientapp.mod"),
        ([FormerLocalDpMod(1, 1, 1, 0.1)], "LocalDpMod of flwr.client.mod reads"),
        ([LocalDpMod], r"give a function or an object, such as LocalDpMod\(…\)"),
        (fixedclipping_mod, "mods= is .*must be a list"),
        (["clip"], "mods= has 'clip'"),
    ],
)
def test_mods_that_could_not_work_are_refused(kind, mods, message):
    with pytest.raises(ValueError, match=message):
        APPS[kind](mods)


def test_clipping_is_refused_where_other_messages_would_go_in_the_clear():
    with pytest.raises(ValueError, match=r"also answer query.encode, train.backprop, which would"):
        fedapps.client_app(
            "odpfl-hn",
            model=lambda: torch.nn.Linear(3, 2),
            data=samples,
            mods=[LocalDpMod(1.0, 1.0, 1.0, 0.1)],
        )
