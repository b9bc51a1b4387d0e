"""Training clients of one dataset, novel ones of another: who holds what, and on which scale."""

import numpy as np
import pytest
import torch

from fedapps.common.seeds import seed_of
from fedapps.settings.config import defaults
from partitions import cross_federation
from partitions.cross_federation import CrossFederation
from partitions.datasets.loading import Dataset, Info


def images(name, rows, first, classes, **known):
    """Images of one value each, which count up from `first`; labels 0, 1, 0, …"""
    x = torch.arange(first, first + rows, dtype=torch.float32)[:, None, None, None]
    info = Info(name, (1, 1, 1), 2, "", scale=1.0, **known)
    return Dataset(info, x, torch.arange(rows) % 2, rows, {}, classes)


@pytest.fixture
def crossed(monkeypatch):
    """A federation of three training clients of "here" and two novel ones of "there", which has
    the same classes in the other order."""
    here = images("here", 30, 0, ("ant", "bee"), mean=3.0, std=2.0)
    there = images("there", 40, 1000, ("bee", "ant"))

    def one(config, key="dataset"):
        return there if key == "partition.novel-dataset" else here

    def got(config, key="dataset"):
        return one(config, key).info

    monkeypatch.setattr(cross_federation, "configured", one)
    monkeypatch.setattr(cross_federation, "described", got)
    changes = {"num-clients": 5, "train-fraction": 0.6, "partition.base-rule": "iid"}
    changes |= {"partition.novel-dataset": "there", "seed": 4}
    return lambda **more: CrossFederation(
        defaults() | changes | {key.replace("_", "-"): value for key, value in more.items()}
    )


def test_who_holds_what(crossed):
    """Ten of 30 images each, and 20 of 40; a novel client's bees bear the number of here's."""
    federation = crossed()
    assert federation.novel.sum() == 2
    held = {False: [], True: []}
    for client in range(5):
        share = federation.share(client)
        assert share.novel == federation.novel[client]
        x, y = share.everything[:]
        bee = (x[:, 0, 0, 0] % 2 == 1) != share.novel
        assert torch.equal(y, bee.long())
        held[share.novel].append(x[:, 0, 0, 0])
    assert [[len(rows) for rows in role] for role in held.values()] == [[10] * 3, [20] * 2]
    for role, rows in held.items():
        first = 1000 * role
        assert sorted(torch.cat(rows).tolist()) == list(range(first, first + (40 if role else 30)))


def label_shares(federation, novel):
    """The share of class 1 of each client of the role."""
    ids = [i for i in range(5) if federation.novel[i] == novel]
    return [float(federation.share(i).everything[:][1].float().mean()) for i in ids]


def test_novel_clients_are_dealt_by_their_own_concentration_and_draws(crossed):
    """α = 0.05 gives a training client one class alone, 1000 novel ones both; and with one α for
    both no novel client repeats the draw of the training client of its number."""
    found = crossed(**{"partition.base-rule": "dirichlet", "partition.alpha": 0.05,
                       "partition.novel-alpha": 1000.0})  # fmt: skip
    assert all(abs(share - 0.5) < 0.1 for share in label_shares(found, True))
    assert any(abs(share - 0.5) > 0.3 for share in label_shares(found, False))
    same = crossed(**{"partition.base-rule": "dirichlet", "partition.alpha": 1.0})
    pairs = zip(label_shares(same, True), label_shares(same, False), strict=False)
    assert all(abs(novel - training) > 0.05 for novel, training in pairs)


def test_public_samples_are_cut_from_the_training_clients_dataset_alone(crossed):
    federation = crossed(**{"partition.public-samples": 6})
    held = [len(federation.share(i).everything) for i in range(5)]
    assert sorted(held) == [8, 8, 8, 20, 20]
    assert len(federation.public) == 6


def test_all_are_standardised_as_the_training_clients_are(crossed):
    """0 … 29 have mean 14.5 and variance 2247.5 / 29; here's own constants are 3 and 2, which
    there has none of."""
    for how, moments in (("training-clients", (14.5, (2247.5 / 29) ** 0.5)), ("channels", (3, 2))):
        whole = {"partition.validation-fraction": 0.0, "partition.test-fraction": 0.0}
        federation = crossed(standardize=how, **whole)
        for client in range(5):
            samples = federation.share(client).everything
            assert (samples.mean, samples.std) == pytest.approx(moments)


def test_labels_that_are_shown_are_drawn_by_client(crossed, monkeypatch):
    noted = []
    monkeypatch.setattr(
        cross_federation, "seed_of", lambda *words: noted.append(words) or seed_of(*words)
    )
    federation = crossed(novel_shots=3)
    noted.clear()
    shares = [federation.share(client) for client in range(5)]
    drawn = dict.fromkeys(words for words in noted if words[:2] == (4, "shots"))
    assert sorted(drawn) == [(4, "shots", client) for client in range(5)]
    shown = [np.bincount(share.train[:][1]).tolist() for share in shares if share.novel]
    assert shown == [[3, 3]] * 2


def test_the_line_of_two_datasets_of_your_own_says_what_both_hold(tmp_path, own_cache):
    """A run of such data ended with an AttributeError before it began."""
    classes = {"here": (0, 1, 2), "there": (1, 2)}
    for name, labels in classes.items():
        y = np.resize(labels, 40)
        x = (y[:, None, None, None] * np.ones((1, 1, 4, 4))).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.array(["ant", "bee", "cat"])[y])
    changes = {
        "dataset": str(tmp_path / "here.npz"),
        "partition": "cross-dataset",
        "partition.novel-dataset": str(tmp_path / "there.npz"),
        "partition.base-rule": "iid",
        "num-clients": 4,
    }
    federation = CrossFederation(defaults() | changes)
    images = "40 rows, images of 1 channel and 4×4 pixels, 3 classes"
    assert federation.line == f"{images}; novel clients: {images}"
    everyone = CrossFederation(defaults() | changes | {"train-fraction": 1.0})
    assert everyone.line == images
