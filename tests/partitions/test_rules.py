"""The papers' further rules: nothing twice, nothing lost that a rule keeps, its statistics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import SMALL, federate

from partitions import federation

few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 10**6)


def assert_each_at_most_once(parts):
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)


def shares_of(labels, parts, num_classes):
    """Share of each class's samples that each client holds, (num_clients, num_classes)."""
    counts = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in parts])
    return counts / np.maximum(counts.sum(0), 1)


@few
@given(seed=seeds, clients=st.integers(2, 12), k=st.integers(1, 4))
def test_class_fraction_holds_k_classes_each_equally_often(toy, divide, held, seed, clients, k):
    data = toy(np.arange(4000) % 10, num_train=3000)
    fed = divide(
        data,
        partition="class-fraction",
        num_clients=clients,
        seed=seed,
        partition_classes_per_client=k,
    )
    parts = held(fed)
    labels = data.y.numpy()
    assert_each_at_most_once(parts)
    assert all(len(np.unique(labels[rows])) == k for rows in parts)
    holders = np.bincount(np.concatenate([np.unique(labels[rows]) for rows in parts]), minlength=10)
    assert holders.max() - holders.min() <= 1
    # classes that anybody holds are dealt out whole
    assert sum(map(len, parts)) == 400 * np.count_nonzero(holders)


@few
@given(seed=seeds, fraction=st.sampled_from([0.15, 0.2]))
def test_class_fraction_divides_train_validation_and_test_alike(toy, divide, held, seed, fraction):
    """a ~ U(0.4, 0.6) among m holders gives shares between 0.4 / (0.4 + 0.6(m−1)) and
    0.6 / (0.6 + 0.4(m−1)): for 4 holders 2/11 to 1/3; the same for the three parts."""
    data = toy(np.arange(10_000) % 10, num_train=8000)
    fed = divide(
        data,
        partition="class-fraction",
        num_clients=20,
        seed=seed,
        partition_validation_fraction=fraction,
    )
    parts = {name: held(fed, name) for name in ("train", "validation", "test")}
    assert sum(map(len, parts["test"])) == 2000
    assert min(np.concatenate(parts["test"])) == 8000  # the official test rows, and only those
    assert sum(map(len, parts["validation"])) == pytest.approx(8000 * fraction, abs=1)
    shares = {n: shares_of(data.y.numpy(), rows, 10) for n, rows in parts.items()}
    for name, count in (("validation", 800 * fraction), ("test", 200)):
        # two roundings of a cut, and for validation a class's random count
        assert np.abs(shares[name] - shares["train"]).max() < 3 / count
    some = shares["train"][shares["train"] > 0]
    assert some.min() > 2 / 11 - 0.01
    assert some.max() < 1 / 3 + 0.01


def test_natural_leaves_small_writers_out(toy, divide):
    writers = np.repeat(["many", "few", "some"], [50, 9, 10])
    data = toy(np.zeros(69), writer=writers)
    changes = {"partition": "natural", "partition_column": "writer", "partition_min_samples": 10}
    fed = divide(data, num_clients=2, **changes)
    assert {fed.share(i).attributes["writer"] for i in range(2)} == {"many", "some"}
    with pytest.raises(ValueError, match="3, but only 2 values of 'writer' have at least 10"):
        divide(data, num_clients=3, **changes)
    with pytest.raises(ValueError, match="no column 'author'; it has writer"):
        divide(data, num_clients=2, **changes | {"partition_column": "author"})


@few
@given(seed=seeds, test=st.sampled_from([0.0, 0.15, 0.3]), n=st.integers(20, 90))
def test_a_client_keeps_validation_and_test_samples(toy, divide, held, seed, test, n):
    fed = divide(toy(np.zeros(n)), partition="iid", num_clients=2, seed=seed,
                 partition_test_fraction=test)  # fmt: skip
    for client, rows in enumerate(held(fed)):
        share = fed.share(client)
        assert (share.test is None) == (test == 0)
        assert len(share.validation) == round(0.15 * len(rows))
        assert len(share.test or ()) == round(test * len(rows))
        names = ("train", "validation", "test")[: 2 + bool(test)]
        parts = np.concatenate([held(fed, name)[client] for name in names])
        assert sorted(parts) == sorted(rows)


@few
@given(seed=seeds, count=st.integers(1, 60))
def test_public_samples_are_nobodys(toy, divide, held, seed, count):
    fed = divide(toy(np.arange(100) % 4), partition="iid", num_clients=3, seed=seed,
                 partition_public_samples=count)  # fmt: skip
    public = fed.share(0).public[:][0].numpy()[:, 0].astype(int)
    assert len(public) == count
    assert sorted(np.concatenate([public, *held(fed)])) == list(range(100))
    assert all(torch.equal(fed.share(i).public.index, fed.public.index) for i in range(3))


# FedTTA's protocol


@few
@given(seed=seeds, clients=st.sampled_from([5, 10, 15]), per_client=st.sampled_from([2, 4]))
def test_pathological_shards_of_unequal_sizes(toy, divide, held, seed, clients, per_client):
    """Classes of 370, 371, … 374 samples, each cut into clients·k/5 parts: nothing is left over."""
    labels = np.repeat(np.arange(5), np.arange(370, 375))
    fed = divide(
        toy(labels), partition="pathological", num_clients=clients, seed=seed,
        partition_classes_per_client=per_client, partition_equal_sizes=False,
    )  # fmt: skip
    parts = held(fed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1860))
    cuts = clients * per_client // 5
    for rows in parts:
        counts = np.bincount(labels[rows], minlength=5)
        assert np.count_nonzero(counts) <= per_client
        shards = counts / (np.arange(370, 375) / cuts)  # a shard is 1 ± 1/30
        assert np.round(shards).sum() == per_client


def test_classes_that_do_not_divide_the_shards_are_reported(toy, divide):
    with pytest.raises(ValueError, match=r"num-clients=7 .* 14 shards, which 5 classes"):
        divide(toy(np.arange(200) % 5), partition="pathological", num_clients=7,
               partition_equal_sizes=False)  # fmt: skip


def split(divide, data, **changes):
    return divide(data, partition="dirichlet-split", num_clients=20, **changes)


@few
@given(seed=seeds, novel_alpha=st.sampled_from([0.01, 0.05, 0.5, 10.0]))
def test_training_clients_hold_the_training_split_whatever_the_novel_alpha(
    toy, divide, held, seed, novel_alpha
):
    """Their very rows, and their cut into training and validation."""
    data = toy(np.arange(3000) % 10, num_train=2400)
    one, two = (
        split(divide, data, seed=seed, partition_alpha=0.3, partition_novel_alpha=alpha)
        for alpha in (novel_alpha, 1.0)
    )
    for part in ("train", "validation", "everything"):
        for client, (mine, again) in enumerate(zip(held(one, part), held(two, part), strict=True)):
            if not one.novel[client]:
                assert mine.tolist() == again.tolist()
    everything = held(one)
    train = np.concatenate([everything[i] for i in np.flatnonzero(~one.novel)])
    test = np.concatenate([everything[i] for i in np.flatnonzero(one.novel)])
    assert sorted(train.tolist()) == list(range(2400))
    assert sorted(test.tolist()) == list(range(2400, 3000))


def test_shares_are_drawn_again_until_each_training_client_has_two_samples(toy, divide, held):
    """Ten training clients of 20 share 400 samples of four classes by Dir(0.1): every third first
    draw leaves one short. With α = 0.001 at most four have any."""
    data = toy(np.arange(600) % 4, num_train=400)
    for seed in range(8):
        fed = split(divide, data, seed=seed, partition_alpha=0.1, partition_novel_alpha=0.01)
        sizes = np.array([len(rows) for rows in held(fed)])
        assert sizes[~fed.novel].min() >= 2 and sizes[~fed.novel].sum() == 400
        assert sizes[fed.novel].min() == 0
    with pytest.raises(ValueError, match=r"=20 or a larger partition\.alpha than 0\.001"):
        split(divide, data, partition_alpha=0.001, partition_novel_alpha=1.0)


def test_dirichlet_split_statistics(toy, divide, held):
    """Shares p ~ Dir(α) of a class over n clients: E Σ p² = (α + 1) / (nα + 1), for n = 10 and
    α = 1 and 0.1 that is 2/11 and 0.55."""
    data = toy(np.arange(12_000) % 10, num_train=6000)
    for novel_alpha, expected in ((1.0, 2 / 11), (0.1, 0.55)):
        squares = []
        for seed in range(12):
            fed = split(
                divide, data, seed=seed, partition_alpha=5.0, partition_novel_alpha=novel_alpha
            )
            parts = [rows for i, rows in enumerate(held(fed)) if fed.novel[i]]
            squares.append((shares_of(data.y.numpy(), parts, 10) ** 2).sum(0).mean())
        assert np.mean(squares) == pytest.approx(expected, rel=0.08)


def test_novel_clients_without_samples_are_left_out_of_the_means():
    """Digits over three novel clients at α = 0.01: some get nothing, and no reply is dropped."""
    config = SMALL | {
        "partition": "dirichlet-split", "num-clients": 10, "train-fraction": 0.3, "rounds": 1,
        "partition.alpha": 10.0, "partition.novel-alpha": 0.01,
    }  # fmt: skip
    fed = federation(config)
    sizes = np.array([len(fed.share(i).everything) for i in range(10)])
    assert (sizes[fed.novel] == 0).any() and (sizes[~fed.novel] >= 2).all()
    for method in ("fedtta++", "tent"):
        result, _ = federate(**config | {"method": method})
        got = result.evaluate_metrics_clientapp[1]
        assert got["novel-clients"] == np.count_nonzero(sizes[fed.novel])
        assert got["train-clients"] == 3


@pytest.mark.parametrize("key", ["partition_alpha", "partition_novel_alpha"])
def test_concentrations_of_the_split_must_be_positive(toy, divide, key):
    with pytest.raises(ValueError, match=r"-1\.0.*> 0"):
        split(divide, toy(np.arange(60) % 3, num_train=30), **{key: -1.0})
    with pytest.raises(ValueError, match="no test split"):
        split(divide, toy(np.arange(60) % 3))
