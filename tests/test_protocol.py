"""What papers leave to their code: a decaying learning rate, one split for several seeds, means
over samples."""

import numpy as np
import pytest
import torch
from small_runs import SMALL, federate, share, update

import partitions
from clients.core.client import Client
from clients.core.sgd import batches
from fedapps.building import method_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.serverapp import run
from strategies.core.evaluation import means, trimmed
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.methods.afl import AFL
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedgma import FedGMA

# Decaying rates


def test_the_factor_of_a_round_by_hand():
    """0.5 in every 4 rounds, from round 1 on: 1 in round 1, 0.5 in round 5, 0.5^(5/4) in round 6;
    three rounds later where the saved model had as many."""
    strategy, later = (FedAvg(lr_decay=0.5, lr_decay_rounds=4, saved_rounds=n) for n in (0, 3))
    for round_, expected in ((0, 1.0), (1, 1.0), (5, 0.5), (6, 0.5**1.25)):
        strategy.now = Round(round_)
        assert strategy.decay == pytest.approx(expected)
    later.now = Round(2)
    assert later.decay == 0.5


class Watched(InProcessGrid):
    """Keeps the factor of the learning rates in each message."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.got: list[tuple[str, int, float | None]] = []

    def _deliver(self, message):
        config = message.content.config_records["config"]
        if "server-round" in config:
            kind = message.metadata.message_type
            self.got.append((kind, config["server-round"], config.get("lr-factor")))
        return super()._deliver(message)


def test_every_message_holds_the_factor():
    """Training, evaluation and further exchanges; without decay the messages are as ever."""
    config = SMALL | {"method": "odpfl-hn", "lr-decay": 0.5, "lr-decay-rounds": 1}
    grid = Watched.simulation(app, config, 6)
    run(grid, config, "in-process")
    kinds = {kind for kind, _, _ in grid.got}
    assert kinds == {"train", "evaluate", "query.encode", "train.backprop"}
    assert all(factor == 0.5 ** (round_ - 1) for _, round_, factor in grid.got)
    grid = Watched.simulation(app, SMALL, 6)
    run(grid, SMALL, "in-process")
    assert {factor for _, _, factor in grid.got} == {None}


def test_a_slowed_client_steps_shorter():
    """w = 0, x = 1, y = 0: the gradient is (−½, ½); lr 0.4 at a factor ¼ moves by 0.1·½."""
    model = torch.nn.Linear(1, 2, bias=False)
    start = {"weight": np.zeros((2, 1), np.float32)}
    client = Client(model, share([[1.0]], [0]), lr=0.4, local_steps=1, batch_size=1)
    for factor, step in ((0.25, 0.05), (1.0, 0.2), (0.25, 0.05)):
        reply, _, _ = client.fit(list(start.values()), {"lr-factor": factor})
        assert reply[0].flatten().tolist() == pytest.approx([step, -step])


@pytest.mark.parametrize("method", METHODS)
def test_every_learning_rate_of_a_client_decays(method):
    """Its settings named lr or …-lr are its `rates`, but those that only the server reads, and the
    one of novel clients' few labels, which learn once."""
    cls = METHODS[method].client
    rates = {key for key in cls.declared if key == "lr" or key.endswith("_lr")} - {"novel_lr"}
    assert rates == set(cls.rates)


def test_servers_rates_decay():
    """FedGMA: w = 0, Δ = 1, η_g = 2 at a factor ½ gives 1. AFL: λ = (½, ½), L = (1, 2) and
    γ_λ = 0.2 at ½ give Π(0.6, 0.7) = (0.45, 0.55)."""
    decay = {"lr_decay": 0.5, "lr_decay_rounds": 1}
    fedgma = FedGMA(server_lr=2.0, agreement=0.0, **decay)
    fedgma.now = Round(2)
    after = fedgma.aggregate({"w": np.zeros(1)}, [update(i, {"w": np.ones(1)}) for i in (0, 1)])
    assert after["w"].tolist() == [1.0]
    afl = AFL(mixture_lr=0.2, **decay)
    afl.now, afl.nodes = Round(2), [Node(0, 50), Node(1, 51)]
    afl.aggregate({}, [update(i, {"w": np.ones(1)}, risk=i + 1.0) for i in (0, 1)])
    assert list(afl.mixture.values()) == pytest.approx([0.45, 0.55])


@pytest.mark.parametrize("method", ["pfedhn", "odpfl-hn", "pfl-ensemble", "global"])
def test_servers_optimizers_are_slowed(method):
    """With a decay to nearly nothing the server's arrays stop in the second round."""
    changes = {"method": method, "partition": "preference" if method == "global" else "iid"}
    if method == "pfl-ensemble":
        changes |= {"pfl-ensemble.base": "pfedhn"}
    stopped = {"lr-decay": 1e-12, "lr-decay-rounds": 1}
    one, two = (federate(**changes, **stopped, rounds=rounds)[0] for rounds in (1, 2))
    free = federate(**changes, rounds=2)[0]
    for name, array in two.arrays.items():
        np.testing.assert_allclose(array.numpy(), one.arrays[name].numpy(), rtol=1e-3, atol=1e-6)
    assert any(not np.array_equal(a.numpy(), free.arrays[n].numpy()) for n, a in two.arrays.items())


def test_a_saved_models_rates_are_those_of_its_round(tmp_path):
    """TENT from a model of round 2 is scored as it was in that round."""
    decay = {"method": "tent", "lr-decay": 0.1, "lr-decay-rounds": 1, "evaluate-every": 2}
    first, _ = federate(**decay, **{"output-dir": str(tmp_path)})
    again, _ = federate(**decay, **{"from-dir": str(tmp_path), "rounds": 0})
    expected = dict(first.evaluate_metrics_clientapp[2])
    assert dict(again.evaluate_metrics_clientapp[0]) == expected
    fresh, _ = federate(**(decay | {"lr-decay": 1.0, "from-dir": str(tmp_path), "rounds": 0}))
    assert dict(fresh.evaluate_metrics_clientapp[0]) != expected


# Mini-batches, means, splits


def test_short_batches_end_with_their_pass():
    """Seven samples in threes: 3, 3, 1 a pass; a fourth batch is the start of the next."""
    drawn = batches(7, 3, steps=4, epochs=0, generator=torch.Generator().manual_seed(0), short=True)
    assert [len(rows) for rows in drawn] == [3, 3, 1, 3]
    assert sorted(torch.cat(drawn[:3]).tolist()) == list(range(7))
    client = Client(torch.nn.Linear(1, 2), share([[1.0]] * 7, [0] * 7), local_steps=4, batch_size=3)
    assert [len(rows) for rows in client.rows({})] == [3, 3, 3, 3]
    client.short_batches = True
    assert [len(rows) for rows in client.rows({})] == [3, 3, 1, 3]


def test_independent_draws_of_mini_batches():
    """Two of four samples are one of 6 pairs. The second of two draws has neither sample of the
    first in one of 6 cases; the second half of a pass always."""
    x = [[float(i)] for i in range(4)]
    client = Client(torch.nn.Linear(1, 2), share(x, [0] * 4), local_steps=1200, batch_size=2)
    shares = {}
    for draws in ("passes", "independent"):
        client.batch_draws = draws
        rows = [set(row.tolist()) for row in client.rows({})]
        assert len(rows) == 1200 and all(len(row) == 2 for row in rows)
        apart = [
            first.isdisjoint(second) for first, second in zip(rows[::2], rows[1::2], strict=True)
        ]
        shares[draws] = sum(apart) / 600
    assert shares["passes"] == 1
    assert shares["independent"] == pytest.approx(1 / 6, abs=0.05)
    client.batch_size = 9
    assert [sorted(row.tolist()) for row in client.rows({})[:2]] == [[0, 1, 2, 3]] * 2
    client.local_epochs = 1
    client.batch_size = 3
    assert sorted(torch.cat(list(client.rows({}))).tolist()) == [0, 1, 2, 3]


def test_a_trimmed_mean_by_hand():
    """Of 0.9, 0, 0.5 and 1 the middle two count: 0.7, over 1 and 3 samples 0.6. Of 21 values two
    are cut at each end, of two none. Novel clients have none."""
    scores = [(0.9, 1), (0.0, 9), (0.5, 3), (1.0, 99)]
    replies = [update(i, {}, n, accuracy=score) for i, (score, n) in enumerate(scores)]
    assert means(replies)["train-trimmed-accuracy"] == pytest.approx(0.7)
    assert means(replies, "samples")["train-trimmed-accuracy"] == pytest.approx(0.6)
    assert trimmed([0, 0, *[0.5] * 17, 0.75, 1]) == trimmed([1.0, 0.0]) == 0.5
    novel = Update(Node(0, 50, novel=True), {}, 1, {"accuracy": 1.0})
    assert not {name for name in means([novel]) if "trimmed" in name}


def test_the_score_that_chooses_the_round_is_trimmed_for_both_models():
    """Of losses 9, 1, 3 and 5 the middle two count: 4; of the global model's 2, 8, 4, 0.5: 3."""
    losses = [(9.0, 2.0), (1.0, 8.0), (3.0, 4.0), (5.0, 0.5)]
    replies = [
        update(i, {}, accuracy=0.25, loss=own, **{"global-loss": shared, "global-accuracy": 0.5})
        for i, (own, shared) in enumerate(losses)
    ]
    got = {k: v for k, v in means(replies, select="loss").items() if "trimmed" in k}
    assert got == {"train-trimmed-loss": 4, "train-trimmed-global-loss": 3}
    got = {k: v for k, v in means(replies).items() if "trimmed" in k}
    assert got == {"train-trimmed-accuracy": 0.25, "train-trimmed-global-accuracy": 0.5}
    plain = means(replies, selection_mean="plain")
    assert plain == {k: v for k, v in means(replies).items() if "trimmed" not in k}


def test_means_over_clients_and_over_samples():
    """Accuracies 1 of 1 sample and 0.5 of 3: ¾ over clients, 2.5/4 over samples."""
    replies = [update(0, {}, 1, accuracy=1.0), update(1, {}, 3, accuracy=0.5)]
    assert means(replies)["train-accuracy"] == 0.75
    assert means(replies, "samples")["train-accuracy"] == 0.625
    unlabeled = [update(0, {}, 0, entropy=1.0), update(1, {}, 0, entropy=2.0)]
    assert means(unlabeled, "samples") == {"train-entropy": 1.5}
    tested = [
        update(0, {}, 1, **{"test-accuracy": 1.0, "test-accuracy-examples": 3}),
        update(1, {}, 3, **{"test-accuracy": 0.5, "test-accuracy-examples": 1}),
    ]
    assert means(tested, "samples") == {"train-test-accuracy": 0.875}  # 3.5 / 4


def test_the_standard_error_is_that_of_novel_clients():
    """0.2, 0.6 and 1 deviate by √((0.16 + 0 + 0.16) / 2) = 0.4: 0.4 / √3; of one there is none."""
    replies = [
        Update(Node(i, 50 + i, novel=True), {}, 5 + i, {"accuracy": a})
        for i, a in enumerate((0.2, 0.6, 1.0))
    ]
    assert means(replies)["novel-sem"] == pytest.approx(0.4 / 3**0.5)
    assert "novel-sem" not in means(replies[:1])


def test_one_split_for_several_seeds():
    """data-seed deals and gives roles; seed still decides the model and the batches."""
    one, two, other = (
        partitions.federation(SMALL | {"data-seed": data, "seed": seed})
        for data, seed in ((24, 0), (24, 1), (-1, 24))
    )
    assert one is two is other
    rows, others = (f.share(0).everything.index for f in (one, partitions.federation(SMALL)))
    assert rows.tolist() != others.tolist()
    weights = [
        method_model("fedavg", SMALL | {"data-seed": 24, "seed": seed}, one.info)[1]
        for seed in (0, 1)
    ]
    assert not np.array_equal(weights[0]["head.weight"], weights[1]["head.weight"])
