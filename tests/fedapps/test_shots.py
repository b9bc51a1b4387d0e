"""Novel clients with a few labels: what they learn from is never scored, what is scored is never
learnt from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import FEW, NEEDS, SMALL, federate, share
from torch import nn

import partitions
from clients.core.arrays import model_arrays
from clients.core.client import Client
from clients.core.protocol import FewShot
from clients.methods.ditto import DittoClient
from clients.methods.fedbabu import FedBABUClient
from clients.methods.fedper import FedPerClient
from clients.methods.fedrep import FedRepClient
from clients.methods.fedtta import FedTTAClient
from clients.methods.perfedavg import PerFedAvgClient
from clients.methods.pfedme import PFedMeClient
from clients.models.adaptable import Adaptable, Adaptation
from fedapps.building import with_public
from fedapps.common.seeds import drawing
from fedapps.methods import METHODS
from fedapps.settings.variants import Variant

LEARN = ["fedavg", "fedper", "fedrep", "per-fedavg", "pfedme", "ditto", "fedbabu", "tent", "local",
         "odpfl-hn", "pefll", "pfedhn", "fedprox"]  # fmt: skip
LESS = {"num-clients": 4, "model": "mlp-small", "batch-size": 16} | FEW


def with_labels(labels, shots, seed=0):
    """A novel client's share of such labels; its inputs are their row numbers."""
    whole = share(torch.arange(float(len(labels)))[:, None], labels)
    object.__setattr__(whole, "novel", True)
    return whole.with_shots(shots, seed)


def rows(samples):
    return set(samples[:][0][:, 0].int().tolist())


def test_a_share_is_cut_by_class():
    """Classes 0 (4 samples), 1 (2), 2 (1) and unlabeled ones (2): of two shots a class the second
    class shows one and the third none, so that each keeps one to be scored."""
    labels = torch.tensor([0, 1, -1, 0, 2, 0, 1, 0, -1])
    cut = with_labels(labels, 2)
    shown = sorted(labels[list(rows(cut.train))].tolist())
    assert shown == [0, 0, 1]
    assert rows(cut.train) | rows(cut.everything) == set(range(9))
    assert len(cut.validation) == 0
    assert not rows(cut.train) & rows(cut.everything)
    assert rows(cut.train) <= rows(with_labels(labels, 3).train)
    assert len({tuple(rows(with_labels(labels, 2, seed).train)) for seed in range(9)}) > 1
    whole = share(torch.zeros(3, 1), [0, 0, 1])
    assert whole.with_shots(2, 0) is whole  # a training client's


@pytest.mark.parametrize("method", LEARN)
def test_labels_of_what_is_scored_change_accuracy_and_loss_alone(method, monkeypatch):
    changes = LESS | {"method": method, "novel-shots": 2, "novel-rounds": 2}
    if method != "pfedhn":
        changes["novel-rounds"] = 0
    got = []

    def predict(self, x):
        logits = plain(self, x)
        got.append((self.share.novel, x.clone(), logits.clone()))
        return logits

    plain = Client.predict
    monkeypatch.setattr(Client, "predict", predict)
    federation = partitions.federation(with_public(SMALL | changes, method))
    novel = [federation.share(i) for i in np.flatnonzero(federation.novel)]
    shown = [one.train[:][0] for one in novel]
    before, first = federate(**changes)[0], list(got)
    got.clear()
    kept = federation.dataset.y.clone()
    for one in novel:
        labels = federation.dataset.y[one.everything.index]
        federation.dataset.y[one.everything.index] = labels.roll(1)
    try:
        after = federate(**changes)[0]
    finally:
        federation.dataset.y.copy_(kept)
    assert {n: a.data for n, a in before.arrays.items()} == {
        n: a.data for n, a in after.arrays.items()
    }
    assert all(torch.equal(a[2], b[2]) for a, b in zip(first, got, strict=True))
    scored = [x for was_novel, x, _ in first if was_novel]
    assert scored and not any(
        torch.equal(one, sample) for x in scored for one in x for few in shown for sample in few
    )
    last = max(before.evaluate_metrics_clientapp)
    one, two = (r.evaluate_metrics_clientapp[last] for r in (before, after))
    differs = {key for key in one if one[key] != two[key]}
    assert "novel-loss" in differs
    scores = ("novel-accuracy", "novel-base-accuracy", "novel-loss", "novel-sem")
    assert differs <= set(scores)


@pytest.mark.parametrize("method", [n for n, e in METHODS.items() if e.client.few_shot])
def test_all_who_can_learn_do(method):
    """No novel client fails on the way."""
    changes = LESS | {"method": method, "rounds": 1, "local-steps": 1}
    changes |= {
        "novel-shots": 2,
        "novel-rounds": int(METHODS[method].client.few_shot == FewShot.ROUNDS),
    }
    got = federate(**changes | NEEDS.get(method, {}))[0].evaluate_metrics_clientapp
    assert got[max(got)]["novel-clients"] == 2


def test_fedtta_learns_from_shots_as_a_training_client_does():
    """All batches are one sample: the weights of a round of meta-training."""
    found = []
    for novel in (False, True):
        own = replace(share(torch.ones(1, 1), [0]), novel=novel, shots=int(novel))
        with drawing(0):
            model = Adaptable(nn.Linear(1, 2), Adaptation(2, 16))
        rates = {"inner_lr": 0.1, "adapt_lr": 0.2, "lr": 0.3, "novel_lr": 0.0}
        client = FedTTAClient(model, own, **rates, local_steps=2, novel_steps=2)
        if novel:
            client.score(client.initial, {})
        else:
            client.train(client.initial, {})
        found.append(model_arrays(client.model))
        moved = [n for n, a in client.initial.items() if not np.array_equal(a, found[-1][n])]
        assert {name.partition(".")[0] for name in moved} == {"base", "adaptation"}
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)


def test_shots_teach():
    """A client alone knows nothing of a novel client's classes until it is shown some."""
    config = {"method": "local", "num-clients": 4, "local-steps": 20}
    accuracy = [
        federate(**config, **{"novel-shots": k})[0].evaluate_metrics_clientapp[2] for k in (1, 8)
    ]
    assert accuracy[0]["novel-accuracy"] < accuracy[1]["novel-accuracy"] > 0.8


def tuned(cls, steps=1, **settings):
    """A novel client of class 0 at x = 1 whose logits are the weights, sent w = (0, 0). Training
    has another rate and number of steps."""
    few = share(torch.ones(1, 1), [0])
    object.__setattr__(few, "novel", True)
    object.__setattr__(few, "shots", 1)
    model = nn.Sequential()
    model.head = nn.Linear(1, 2, bias=False)
    settings = {"lr": 9.0, "local_steps": 7, "novel_lr": 0.5, "novel_steps": steps} | settings
    client = cls(model, few, **settings)
    config = {"lr-factor": 0.1, "names": "head.weight"}
    client.evaluate([np.zeros((2, 1), np.float32)], config)
    return client.model.head.weight.flatten().tolist()


@pytest.mark.parametrize("cls", [Client, FedPerClient, FedRepClient, FedBABUClient, DittoClient])
def test_novel_steps_and_novel_lr_decide_what_few_labels_teach(cls):
    """∇L(0, 0) = (−½, ½): a step at ½ gives (¼, −¼), and at (a, −a) a step adds ½(1 − σ(2a)).
    Ditto's penalty is 0. With novel-lr = 0 the rate is that of training, which decays: 0.9."""
    assert tuned(cls, **NO_PULL.get(cls, {})) == pytest.approx([0.25, -0.25])
    second = 0.25 + 0.5 * (1 - 1 / (1 + np.exp(-0.5)))
    assert tuned(cls, 2, **NO_PULL.get(cls, {})) == pytest.approx([second, -second])
    assert tuned(cls, novel_lr=0.0) == pytest.approx([0.45, -0.45])
    assert tuned(cls, 0) == [0, 0]


NO_PULL = {DittoClient: {"penalty": 0.0}}


def test_methods_that_learn_in_their_own_way():
    """Ditto's second step from ¼ also pulls by ½·0.4·¼ towards w = 0. Per-FedAvg takes one step at
    α = 0.2, or as many as it is sent, at (0.1, −0.1) by 0.2·(1 − σ(0.2)). pFedMe: a step at 0.1
    towards its proximal point, or at novel-lr."""
    second = 0.25 + 0.5 * (1 - 1 / (1 + np.exp(-0.5))) - 0.05
    assert tuned(DittoClient, 2, penalty=0.4) == pytest.approx([second, -second])
    own = {"novel_steps": PerFedAvgClient.novel_steps, "novel_lr": PerFedAvgClient.novel_lr}
    assert tuned(PerFedAvgClient, inner_lr=2.0, **own) == pytest.approx([0.1, -0.1])
    second = 0.1 + 0.2 * (1 - 1 / (1 + np.exp(-0.2)))
    assert tuned(PerFedAvgClient, 2, novel_lr=0.2) == pytest.approx([second, -second])
    near = {"personal_lr": 1.0, "inner_steps": 1, "penalty": 2.0}
    assert tuned(PFedMeClient, novel_lr=PFedMeClient.novel_lr, **near) == pytest.approx(
        [0.05, -0.05]
    )
    assert tuned(PFedMeClient, novel_lr=0.2, **near) == pytest.approx([0.1, -0.1])


def test_a_score_of_few_samples_is_warned_of(caplog):
    """Twenty clients have 29 or 30 samples of two classes: 27 are left, or 6."""
    small = {"num-clients": 20, "rounds": 1, "local-steps": 1, "novel-steps": 1}
    for shots, warnings in ((1, 0), (12, 1)):
        caplog.clear()
        federate(**small, **{"novel-shots": shots, "evaluate-every": 1})
        words = [m for m in caplog.messages if "novel-shots leave more" in m]
        assert len(words) == warnings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"novel-shots": -1}, "novel-shots is -1"),
        ({"novel-shots": 1, "method": "pfl-nearest"}, "pfl-nearest cannot learn.*able: local"),
        ({"novel-shots": 1, "method": "pfedhn"}, "set novel-rounds"),
        ({"novel-shots": 1, "partition": "preference"}, "users with preferences"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        federate(**changes)


def test_a_trained_run_is_scored_with_other_shots(tmp_path):
    """`--from` finds the run of the same method, whatever settings of evaluation alone it has."""
    (tmp_path / "tent,lr=0.1-seed2").mkdir()
    (tmp_path / "tent,novel-shots=5-seed2").mkdir()
    for label, name in (
        ("tent lr=0.1 novel-shots=5", "tent,lr=0.1-seed2"),
        ("tent lr=0.1 novel-lr=0.1 novel-steps=9", "tent,lr=0.1-seed2"),
        ("tent novel-shots=5", "tent,novel-shots=5-seed2"),
        ("tent lr=0.1", "tent,lr=0.1-seed2"),
        ("tent lr=0.1 novel-batch=5 novel-stream=true", "tent,lr=0.1-seed2"),
    ):
        assert Variant.parse(label).former(tmp_path, 2) == name


def test_a_trained_grid_is_scored_with_other_settings(tmp_path):
    """`--from` finds the run of a grid that has most of a variant's settings. FedAvg's run comes
    before a run without settings, or on other data, but after a run of the grid."""

    def former(label, seed=0):
        return Variant.parse(label).former(tmp_path, seed)

    for name in ("h,encoder=a-seed0", "h,encoder=a,lr=0.1-seed0", "h,lr=0.1-seed0", "h-seed1"):
        (tmp_path / name.replace("h", "odpfl-hn")).mkdir()
    assert former("odpfl-hn encoder=a lr=0.2") == "odpfl-hn,encoder=a-seed0"
    assert former("odpfl-hn encoder=a lr=0.1 momentum=0.5") == "odpfl-hn,encoder=a,lr=0.1-seed0"
    assert former("odpfl-hn lr=0.1", seed=1) == "odpfl-hn-seed1"
    with pytest.raises(ValueError, match=r"no run with seed 0 for 'odpfl-hn encoder=b'"):
        former("odpfl-hn encoder=b")
    with pytest.raises(ValueError, match=r"seed 2 for .* odpfl-hn-seed1\..* --methods"):
        former("odpfl-hn encoder=a", seed=2)
    (tmp_path / "odpfl-hn,encoder=a,partition.alpha=1-seed0").mkdir()
    on_other_data = "odpfl-hn encoder=a partition.alpha=1 lr=0.2"
    assert former(on_other_data) == "odpfl-hn,encoder=a,partition.alpha=1-seed0"
    (tmp_path / "odpfl-hn,momentum=0.5-seed0").mkdir()
    with pytest.raises(ValueError, match=r"odpfl-hn,lr=0\.1-seed0 or odpfl-hn,mom"):
        former("odpfl-hn lr=0.1 momentum=0.5")
    for seed in (0, 1):
        (tmp_path / f"fedavg-seed{seed}").mkdir()
    assert former("odpfl-hn encoder=a lr=0.2") == "odpfl-hn,encoder=a-seed0"
    assert former("odpfl-hn lr=0.2", seed=1) == "fedavg-seed1"
    assert former("odpfl-hn encoder=a partition.alpha=2") == "fedavg-seed0"
