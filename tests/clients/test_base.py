"""The client's base: one SGD step by hand, names, state, scoring."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from clients.core.client import Client
from clients.core.domain import domain_gradient
from clients.core.evaluation import macro_f1
from clients.core.own_scores import named_scores
from clients.core.protocol import NAMES, FewShot, lr_factor
from clients.methods.ditto import DittoClient
from clients.methods.fedper import FedPerClient
from clients.methods.fedprox import FedProxClient
from fedapps.common.seeds import seed_of
from partitions.datasets.readers.raw import UNLABELED
from partitions.shares import Samples, Share


class Tiny(nn.Module):
    """Logits x·w (one feature, two classes), and a head that scales them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.body.weight.zero_()
            self.head.weight.copy_(torch.eye(2))

    def forward(self, x):
        return self.head(self.body(x))


def samples(x, y):
    return Samples(torch.tensor(x), torch.tensor(y), torch.arange(len(y)), scale=1.0)


def share(x=((1.0,), (2.0,)), y=(0, 1), novel=False):
    data = samples(x, y)
    return Share(data, data, None, data, novel)


def client(cls=Client, **options):
    settings = {"local_steps": 1, "batch_size": 2, "lr": 0.1}
    data = options.pop("share", share())
    return cls(Tiny(), data, **settings | options)


ZERO = {"body.weight": np.zeros((2, 1), np.float32), "head.weight": np.eye(2, dtype=np.float32)}


@pytest.mark.parametrize(("cls", "moved"), [(Client, {"body", "head"}), (FedPerClient, {"head"})])
def test_a_novel_clients_labels_move_what_is_tuned(cls, moved):
    """All of a shared model, FedPer's head alone."""
    one = client(cls)
    one.load({"body.weight": np.float32([[0.3], [-0.2]]), "head.weight": ZERO["head.weight"]})
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one.tune({})
    after = dict(one.model.named_parameters())
    assert {n.split(".")[0] for n, p in before.items() if not p.equal(after[n])} == moved


def test_one_step_of_sgd_by_hand():
    """At w = 0 both classes have probability ½, so dCE/dlogits is (−½, ½) for y = 0 and (½, −½)
    for y = 1. With x = 1 and 2: dL/dbody = mean(−½·1 + ½·2, ½·1 − ½·2) = (0.25, −0.25); the
    head's gradient is zero, since its input is. lr 0.1 gives body (−0.025, 0.025)."""
    arrays, n, metrics = client().train(ZERO, {})
    np.testing.assert_allclose(arrays["body.weight"], [[-0.025], [0.025]], atol=1e-7)
    np.testing.assert_allclose(arrays["head.weight"], np.eye(2), atol=1e-7)
    assert n == 2
    assert metrics["loss"] == pytest.approx(np.log(2))


def test_weight_decay_and_momentum_reach_sgd():
    """Two steps on x = 0: no gradient but weight decay 0.5 on the head I. v1 = 0.5, w1 = 0.95;
    v2 = 0.9·0.5 + 0.5·0.95 = 0.925, w2 = 0.95 − 0.0925 = 0.8575 on the diagonal."""
    still = client(share=share(x=((0.0,), (0.0,))), local_steps=2, momentum=0.9, weight_decay=0.5)
    arrays, _, _ = still.train(ZERO, {})
    np.testing.assert_allclose(np.diag(arrays["head.weight"]), 0.8575, atol=1e-6)


def test_fedprox_pulls_towards_the_server():
    """The second of two steps has the gradient of CE plus μ(w − w_server). With μ = 10 and
    lr 0.1 the proximal part alone takes the body back by all of its first step."""
    free = client(local_steps=2).train(ZERO, {})[0]["body.weight"]
    held = client(FedProxClient, local_steps=2, mu=10.0).train(ZERO, {})[0]["body.weight"]
    first = np.array([[-0.025], [0.025]], np.float32)
    np.testing.assert_allclose(free - held, first, atol=1e-6)


def test_fedprox_without_mu_is_fedavg():
    plain, _, _ = client(local_steps=5).train(ZERO, {"server-round": 2})
    prox, _, _ = client(FedProxClient, local_steps=5, mu=0.0).train(ZERO, {"server-round": 2})
    assert all(np.array_equal(plain[name], prox[name]) for name in plain)
    with pytest.raises(ValueError, match="mu is -1"):
        client(FedProxClient, mu=-1.0)


@pytest.mark.parametrize(("name", "hook"), [("fit", "train"), ("evaluate", "score")])
def test_what_only_flowers_former_api_calls_cannot_be_overridden(name, hook):
    with pytest.raises(TypeError, match=f"Mine overrides '{name}', .*; override '{hook}'"):
        type("Mine", (Client,), {name: lambda self, parameters, config: None})


def test_personal_arrays_stay_and_persist():
    one = client(FedPerClient, share=share(x=((1.0,), (2.0,))), local_steps=3)
    shared = {"body.weight": np.array([[1.0], [0.5]], np.float32)}
    arrays, _, _ = one.train(shared, {})
    assert list(arrays) == ["body.weight"]
    head = one.state["personal/head.weight"]
    assert not np.array_equal(head, np.eye(2))
    again = client(FedPerClient)
    again.state = one.state
    again.load(shared)
    assert np.array_equal(again.model.head.weight.detach().numpy(), head)
    fresh = client(FedPerClient)
    fresh.load(shared)
    assert np.array_equal(fresh.model.head.weight.detach().numpy(), np.eye(2))


def test_fit_keeps_names_in_any_order_and_falls_back_to_the_models():
    arrays = list(reversed(ZERO.items()))
    config = {NAMES: "\n".join(name for name, _ in arrays)}
    values, _, metrics = client().fit([a for _, a in arrays], config)
    named = dict(zip(metrics[NAMES].split("\n"), values, strict=True))
    np.testing.assert_allclose(named["body.weight"], [[-0.025], [0.025]], atol=1e-7)
    stock, _, plain = client().fit(list(ZERO.values()), {})
    np.testing.assert_allclose(stock[0], [[-0.025], [0.025]], atol=1e-7)
    assert NAMES not in plain
    assert [a.shape for a in client().get_parameters({})] == [(2, 1), (2, 2)]


def test_load_refuses_unknown_names_and_shapes():
    with pytest.raises(ValueError, match=r"'nonsense'.*unknown"):
        client().load({"nonsense": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"body.weight.*\(1, 1\)"):
        client().load(ZERO | {"body.weight": np.zeros((1, 1), np.float32)})
    with pytest.raises(ValueError, match="1 arrays for 2 names"):
        client().fit([ZERO["body.weight"]], {})


def test_scores_count_labeled_samples_only():
    """Logits (x, 0): class 0 for x > 0, class 1 for x < 0. Of four labeled samples three are
    right; the fifth has no label."""
    data = share(x=((1.0,), (2.0,), (-1.0,), (-2.0,), (3.0,)), y=(0, 0, 1, 0, UNLABELED))
    arrays = ZERO | {"body.weight": np.array([[1.0], [0.0]], np.float32)}
    loss, n, metrics = client(share=data).score(arrays, {})
    assert (n, metrics["accuracy"]) == (4, 0.75)
    expected = np.mean([np.log1p(np.exp(-m)) for m in (1, 2, 1, -2)])
    assert loss == pytest.approx(expected, rel=1e-5)
    nothing = share(x=((1.0,),), y=(UNLABELED,), novel=True)
    assert client(share=nothing).score(arrays, {}) == (0.0, 0, {})


def parts(novel=False, **options):
    """Four samples to train on, three to validate, two to test; x = 1 … 9, labels 0111 001 01."""
    data = samples([[float(i)] for i in range(1, 10)], [0, 1, 1, 1, 0, 0, 1, 0, 1])
    train, validation, test = (
        replace(data, index=rows) for rows in torch.arange(9).split([4, 3, 2])
    )
    return Share(train, validation, test, data, novel, **options)


FIRST = ZERO | {"body.weight": np.array([[1.0], [0.0]], np.float32)}  # logits (x, 0): class 0


def test_each_number_is_that_of_its_own_rows():
    """Class 0 everywhere: right are 1 of 4 training, 2 of 3 validation, 1 of 2 test samples, and
    4 of all 9. The loss of validation is the mean of ln(1 + e^−x) of x = 5, 6, and 7 more of 7."""
    trained, novel = client(share=parts()), client(share=parts(novel=True))
    loss, n, metrics = trained.score(FIRST, {"bound": True})
    assert loss == pytest.approx(sum(math.log1p(math.exp(-x)) for x in (5, 6, 7)) / 3 + 7 / 3)
    assert n == 3 and metrics == pytest.approx(
        {"accuracy": 2 / 3, "test-accuracy": 1 / 2, "training-error": 3 / 4}
        | {"test-accuracy-examples": 2, "training-error-examples": 4}
    )
    assert "training-error" not in trained.score(FIRST, {})[2]
    _, n, metrics = novel.score(FIRST, {"bound": True})
    assert n == 9 and metrics == {"accuracy": pytest.approx(4 / 9)}
    assert [one.get_properties({})["num-examples"] for one in (trained, novel)] == [4, 9]
    assert trained.get_properties({})["input-size"] == 1
    assert trained.train(FIRST, {})[1] == 4
    assert trained.serve(FIRST, {})[1][:, 0].tolist() == list(range(1, 10))


def test_the_domain_classifier_sees_what_the_client_trains_on():
    """A novel client shows all that it holds."""
    for novel, rows in ((False, slice(4)), (True, slice(9))):
        one = client(share=parts(novel), client=2, seed=5)
        weights = np.array([[0.5, -1.0], [-0.2, 0.3]], np.float32)
        got, _ = one.domain({"weights": weights}, {"side": 1})
        every = one.share.everything
        seed = seed_of(5, "domain", 2)
        shown = replace(every, index=every.index[rows])
        expected = domain_gradient(shown, torch.from_numpy(weights), 1.0, seed)
        assert all(np.array_equal(got[name], expected[name]) for name in expected)


def test_what_an_adaptation_tells_is_of_the_samples_behind_the_accuracy():
    """Of the first of two stages 1 of the 2 labeled validation samples is right, 2 of the second;
    the unlabeled third counts in neither. Test samples bring no stages of their own."""

    class Adapts(Client):
        def predict(self, x):
            z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[: len(x)]
            self.intermediate_logits, self.adaptation_metrics = (
                {"base": z.flip(0)},
                {"adapt-steps": len(x)},
            )
            return z

    share = parts()
    share.everything.y[6:8] = torch.tensor([UNLABELED, 1])
    _, n, metrics = client(Adapts, share=share).score(FIRST, {})
    assert n == 2 and metrics == {
        "base-accuracy": 0.5, "accuracy": 1.0, "adapt-steps": 3, "test-accuracy": 0.0,
        "test-accuracy-examples": 2,
    }  # fmt: skip


def test_counts_of_a_user_with_a_taste():
    """Class 0 for x > 0, else 1: the labels 0 0 0 1 1 1 are predicted as 0 1 1 0 0 0, so that
    [TN, FP, FN, TP] = [1, 2, 3, 0]."""
    data = share(x=((1.0,), (-1.0,), (-2.0,), (1.0,), (2.0,), (3.0,)), y=(0, 0, 0, 1, 1, 1))
    data = replace(data, attributes={"sub-population": 4})
    _, _, metrics = client(share=data).score(FIRST, {})
    assert metrics["counts"] == [1, 2, 3, 0] and metrics["sub-population"] == 4


@pytest.mark.parametrize(("tested", "expected"), [(True, [2, 1, 0, 3]), (False, [1, 1, 0, 1])])
def test_counts_are_of_the_personal_model_on_test_samples(tested, expected):
    """The personal model predicts 1 for x > 0, else 0: test labels 0 0 0 1 1 1 as 1 0 0 1 1 1, and,
    of a client without test samples, validation labels 0 1 0 as 1 1 0. The global model predicts 0
    for all of them."""
    test = None
    if tested:
        test = samples(((1.0,), (-1.0,), (-2.0,), (1.0,), (2.0,), (3.0,)), (0, 0, 0, 1, 1, 1))
    data = share(x=((1.0,), (2.0,), (-1.0,)), y=(0, 1, 0))
    data = replace(data, test=test, attributes={"sub-population": 4})
    ditto = DittoClient(torch.nn.Linear(1, 2), data)
    ditto.state = {"own/weight": np.float32([[-1], [1]]), "own/bias": np.zeros(2, np.float32)}
    arrays = {"weight": np.zeros((2, 1), np.float32), "bias": np.float32([2, 0])}
    _, _, metrics = ditto.score(arrays, {})
    assert metrics["counts"] == expected and metrics["sub-population"] == 4


def test_what_is_sent_goes_before_what_is_kept_and_that_before_what_was_first():
    one = client(FedPerClient)
    kept, sent = 2 * np.eye(2, dtype=np.float32), 3 * np.eye(2, dtype=np.float32)
    for arrays, expected in (({}, np.eye(2)), ({"head.weight": sent}, sent)):
        one.load(arrays)
        assert np.array_equal(one.model.head.weight.detach(), expected)
    one.state = {"personal/head.weight": kept}
    for arrays, expected in (({}, kept), ({"head.weight": sent}, sent)):
        one.load(arrays)
        assert np.array_equal(one.model.head.weight.detach(), expected)


def test_rates_fall_from_the_second_round_on_and_smoothly():
    """× ½ in 4 rounds: 1 before and in round 1, √½ in round 3, ½ in round 5. Reported twice, a
    rate is the same: lr 0.1 at a factor ¼ moves the body by a quarter of 0.025."""
    found = [lr_factor(0.5, 4, round_) for round_ in (0, 1, 3, 5)]
    assert found == pytest.approx([1, 1, 0.5**0.5, 0.5])
    one = client()
    for factor, step in ((0.25, 0.00625), (0.25, 0.00625), (1.0, 0.025)):
        reply, _, _ = one.fit(list(ZERO.values()), {"lr-factor": factor})
        np.testing.assert_allclose(reply[0], [[-step], [step]], atol=1e-7)


def test_dropout_is_on_in_training_alone_and_drawn_anew_in_every_round():
    """Half of the units at random: what a client trains and tells is the same in the same round,
    and other in another one; scoring drops nothing."""

    class Dropping(Client):
        def loss(self, x, y):
            assert self.model.training
            return super().loss(nn.functional.dropout(x, training=self.model.training), y)

        def predict(self, x):
            assert not self.model.training
            return super().predict(x) + torch.rand(len(x), 2)

    one = client(Dropping, share=parts(), local_steps=8, batch_size=4)

    def got(round_, number):
        one.client = number
        scored = one.evaluate(list(FIRST.values()), {"server-round": round_})[0]
        torch.rand(number + 1)  # what others draw does not matter
        fitted, _, _ = one.fit(list(FIRST.values()), {"server-round": round_})
        return fitted[0].tolist(), scored

    torch.manual_seed(1)
    same, again, later, other = got(1, 0), got(1, 0), got(2, 0), got(1, 1)
    assert same == again
    assert all(a != b for a, b in zip(same, later, strict=True))
    assert all(a != b for a, b in zip(same, other, strict=True))


def test_a_novel_client_tunes_on_its_shots_by_plain_cross_entropy():
    """One step on one of nine samples, that of the draw "shots": at body 0 the gradient is ±½ x,
    whatever loss the method trains on. Where few labels are not for tuning nothing moves."""
    config, labeled = {"server-round": 3}, parts(novel=True, shots=2)
    labeled = replace(labeled, train=labeled.everything)
    one = client(FedProxClient, share=labeled, mu=5.0, batch_size=1, novel_steps=1)
    one.score(ZERO, config)
    (row,) = one.rows(config, "shots")[0].tolist()
    assert row != one.rows(config)[0].item()
    sign = 1 if labeled.train.y[row] else -1
    expected = -0.1 * sign * 0.5 * (row + 1) * np.array([[1], [-1]])
    np.testing.assert_allclose(one.model.body.weight.detach(), expected, rtol=1e-5)

    class Else(Client):
        few_shot = FewShot.ROUNDS

    other = client(Else, share=labeled, batch_size=1, novel_steps=1)
    other.score(ZERO, config)
    assert not other.model.body.weight.any()


def test_rounds_and_clients_draw_other_batches_and_repeat_exactly():
    wide = share(x=tuple((float(i),) for i in range(50)), y=tuple([0, 1] * 25))

    def draw(number, server_round):
        one = client(share=wide, client=number, local_steps=4, batch_size=8)
        return torch.stack(list(one.rows({"server-round": server_round})))

    assert draw(0, 1).equal(draw(0, 1))
    assert not draw(0, 1).equal(draw(0, 2))
    assert not draw(0, 1).equal(draw(1, 1))
    one = client(share=wide, local_steps=4, batch_size=8, local_epochs=2)
    assert not torch.cat(one.rows({})).equal(torch.cat(one.rows({}, "own")))
    counts = ({}, {"epochs": 3}, {"steps": 5})
    assert [sum(map(len, one.rows({}, **count))) for count in counts] == [100, 150, 40]


def test_the_loss_that_is_told_is_the_mean_over_the_steps():
    """Logits (x, 0): ln(1 + e⁻¹) of x = 1, y = 0 and ln(1 + e²) of x = 2, y = 1."""
    one = client(batch_size=1, local_steps=2, lr=0.0)
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2
    assert one.train(FIRST, {})[2]["loss"] == pytest.approx(expected)


def test_macro_f1_by_hand():
    """Labels 0 0 0 3 3 and predictions 0 0 3 3 1: F1 is 4/5 of class 0, 2/4 of class 3, and 0 of
    class 1, which is only predicted. Class 2 is absent."""
    y, predicted = torch.tensor([0, 0, 0, 3, 3]), torch.tensor([0, 0, 3, 3, 1])
    assert macro_f1(y, predicted) == pytest.approx(1.3 / 3)
    assert macro_f1(y, predicted) == pytest.approx(f1_score(y, predicted, average="macro"))


@pytest.mark.parametrize(
    ("select", "more"), [("", set()), ("loss", {"global-loss"}),
                         ("macro-f1", {"macro-f1", "global-macro-f1"}),
                         ("mine", {"global--mine"})],
)  # fmt: skip
def test_a_client_reports_the_score_that_chooses_the_round(select, more):
    """The weights send every input to class 0; one of three validation labels is 1."""
    data = share([[1.0]] * 3, [0, 1, 0])
    arrays = {"weight": np.zeros((2, 1), np.float32), "bias": np.float32([2, 0])}
    ditto = DittoClient(torch.nn.Linear(1, 2), data)
    ditto.own_scores = named_scores({"-mine": lambda z, y: len(y), "other": lambda z, y: 1})
    _, count, metrics = ditto.score(arrays, {"select": select} if select else {})
    assert count == 3
    assert metrics.keys() == {"accuracy", "global-accuracy", "-mine", "other"} | more
    if select == "macro-f1":
        assert metrics["global-macro-f1"] == pytest.approx(0.4)
    if select == "mine":
        assert (metrics["-mine"], metrics["global--mine"]) == (3, 3)
    if select == "loss":
        assert metrics["global-loss"] == pytest.approx(math.log(1 + math.exp(-2)) + 2 / 3)
