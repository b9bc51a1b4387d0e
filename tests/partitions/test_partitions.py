"""Every sample at most once, sizes and class counts as the rule says, reproducible by seed."""

import gc
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from clients.core.sgd import mini_batches
from fedapps.settings.config import defaults
from partitions.datasets.loading import info
from partitions.federations import Federation
from partitions.shares import PreferredSamples, Samples, row_major

PARTITIONS = ["iid", "shards", "pathological", "dirichlet"]
seeds = st.integers(0, 10**6)
sizes = st.integers(2, 40)
few = settings(max_examples=6, deadline=None)


def federation(**changes) -> Federation:
    return Federation(defaults() | {k.replace("_", "-"): v for k, v in changes.items()})


def rows(fed: Federation) -> list[list[int]]:
    return [sorted(fed.share(i).everything.index.tolist()) for i in range(fed.num_clients)]


def labels(fed: Federation, client: int) -> np.ndarray:
    return fed.share(client).everything[:][1].numpy()


@pytest.mark.parametrize("name", PARTITIONS)
@given(seed=seeds, clients=sizes)
@few
def test_no_sample_twice_and_seeds_decide(name, seed, clients):
    fed = federation(partition=name, num_clients=clients, seed=seed)
    dealt = list(chain.from_iterable(rows(fed)))
    assert len(dealt) == len(set(dealt))
    same = federation(partition=name, num_clients=clients, seed=seed)
    other = federation(partition=name, num_clients=clients, seed=seed + 1)
    assert rows(fed) == rows(same) != rows(other)
    assert (fed.novel == same.novel).all()


@given(seed=seeds, clients=sizes, per_client=st.integers(1, 4))
@few
def test_pathological_holds_few_classes_and_equal_sizes(seed, clients, per_client):
    changes = {"partition.classes-per-client": per_client}
    fed = federation(partition="pathological", num_clients=clients, seed=seed, **changes)
    assert all(len(np.unique(labels(fed, i))) <= per_client for i in range(clients))
    sizes = {len(r) for r in rows(fed)}
    assert len(sizes) == 1
    shard = sizes.pop() // per_client
    counts = np.bincount(fed.dataset.y.numpy())
    # the largest shard for which pure shards suffice: one sample more a shard would not do
    assert (counts // shard).sum() >= clients * per_client
    larger = shard + 1
    assert (
        larger > 1797 // (clients * per_client) or (counts // larger).sum() < clients * per_client
    )


def test_dirichlet_statistics():
    """E‖q‖² of Dir(α) over C classes is (α + 1) / (Cα + 1): 0.55 for α = 0.1, 0.1009 for α = 100.

    Measured on clients of 36 samples; sampling adds (1 − E‖q‖²) / 36."""
    for alpha, expected in ((0.1, 0.55), (100.0, 0.1009)):
        squares = []
        for seed in range(8):
            fed = federation(
                partition="dirichlet", num_clients=50, seed=seed, **{"partition.alpha": alpha}
            )
            for client in range(50):
                share = np.bincount(labels(fed, client), minlength=10) / len(labels(fed, client))
                squares.append((share**2).sum())
        sampled = expected + (1 - expected) / 35
        assert np.mean(squares) == pytest.approx(sampled, rel=0.12)


def test_dirichlet_takes_another_alpha_for_novel_clients():
    changes = {"partition.alpha": 0.05, "partition.novel-alpha": 100.0}
    fed = federation(partition="dirichlet", num_clients=20, seed=3, **changes)
    held = np.array([len(np.unique(labels(fed, i))) for i in range(20)])
    assert held[fed.novel].min() > held[~fed.novel].mean()


def test_one_channel_is_standardised_by_its_constants():
    """MNIST's: 0.1307 and 0.3081; a dataset without constants says who has some."""
    known = info("mnist")
    assert (known.mean, known.std) == (0.1307, 0.3081)
    with pytest.raises(ValueError, match=r"digits has no customary constants.*mnist.*cifar100"):
        federation(standardize="channels")
    with pytest.raises(ValueError, match=r"'yes'.*training-clients"):
        federation(standardize="yes")


def test_converted_samples_are_the_same_to_the_bit():
    """Conversion once and conversion batch by batch agree, standardised or not."""
    x = torch.arange(24, dtype=torch.uint8).reshape(6, 4)
    y, rows = torch.arange(6), torch.tensor([2, 0])
    for mean, std in ((0.0, 1.0), (0.1, 0.3)):
        samples = Samples(x, y, torch.tensor([5, 1, 3]), mean=mean, std=std)
        for one, two in zip(samples[rows], samples.converted()[rows], strict=True):
            assert torch.equal(one, two)


def test_samples_by_hand():
    """(v / scale − mean) / std for v = 6 and 2: (6/4 − ½)/¼ and 0; (6 − ½)/¼ where nothing scales;
    by channel, 6 in each of two, (1.5 − ½)/¼ and (1.5 − 1)/2."""
    y, rows = torch.zeros(3, dtype=torch.int64), torch.tensor([2, 0])
    x = torch.tensor([[2.0], [9.0], [6.0]])
    assert Samples(x, y, rows, 4.0, 0.5, 0.25)[:][0].flatten().tolist() == [4.0, 0.0]
    assert Samples(x, y, rows, 1.0, 0.5, 0.25)[:][0].flatten().tolist() == [22.0, 6.0]
    images = torch.full((3, 2, 1, 2), 6, dtype=torch.uint8)
    found = Samples(images, y, rows, 4.0, (0.5, 1.0), (0.25, 2.0))[:][0]
    assert found[:, :, 0].tolist() == [[[4.0, 4.0], [0.25, 0.25]]] * 2


def test_samples_have_the_strides_of_a_new_tensor():
    """Also images of one channel, whose strides of channels last mean the same memory, and inputs
    that were stored with other strides: a network may flatten a convolution's output by `view`."""
    y, rows = torch.arange(4), torch.tensor([3, 1])
    gray, rgb = torch.arange(60.0).reshape(4, 1, 3, 5), torch.arange(180.0).reshape(4, 3, 3, 5)
    for images in (gray, rgb):
        usual = images.stride()
        for stored in (images, images.to(memory_format=torch.channels_last)):
            x, _ = Samples(stored, y, rows, scale=1.0)[:]
            assert torch.equal(x, images[rows]) and x.stride() == usual
    assert row_major(gray) is gray
    last = gray.as_strided(gray.shape, (15, 1, 5, 1))  # as torch gives channels last
    assert row_major(last).stride() == (15, 15, 5, 1)
    assert row_major(last).data_ptr() == gray.data_ptr()


def test_rows_of_the_cpu_choose_samples_of_a_gpu():
    """Torch's stand-ins for tensors on a GPU have shapes, and devices, which they must share."""
    with FakeTensorMode():
        x = torch.zeros(6, 1, 4, 4, dtype=torch.uint8, device="cuda:0")
        y = torch.zeros(6, dtype=torch.int64, device="cuda:0")
        rows = torch.zeros(2, dtype=torch.int64)
        for samples in (Samples(x, y, y[:4]), PreferredSamples(x, y, y[:4])):
            for batches in ([rows], [rows] * 2, [rows] * 3):  # a pass, or more
                for got in (samples[rows], *mini_batches(samples, batches)):
                    assert [t.device.type for t in got] == ["cuda", "cuda"]
                    assert [t.shape for t in got] == [(2, 1, 4, 4), (2,)]
        assert samples.types(rows).device.type == "cuda"


def test_a_shared_tensor_is_moved_once():
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    one, two = (Samples(x, y, torch.tensor([i])).to("meta") for i in (1, 2))
    assert one.x is two.x and one.y is two.y
    assert one.x.device.type == "meta" and one.index is not two.index
    gone = weakref.ref(one.x)
    del x, one, two
    gc.collect()
    assert gone() is None  # nor is it kept there when nobody has it here


def test_shares_that_memory_does_not_keep_are_cut_again_the_same(monkeypatch):
    """Of 6 clients, two at a time: rows, corrupted inputs, labels, permutations, shots and all."""
    changes = {"num_clients": 6, "train_fraction": 0.5, "partition.corruptions": "gaussian-noise",
               "partition.novel-corruptions": "shot-noise", "partition.permuted-labels": True,
               "partition.test-fraction": 0.2, "partition.test-shift": "mixture",
               "partition.labeled-clients": 0.7, "novel_shots": 2}  # fmt: skip
    fed = federation(**changes)
    first = [fed.share(i) for i in range(6)]
    assert all(fed.share(i) is share for i, share in enumerate(first))
    monkeypatch.setattr("partitions.federations.SHARES_KEPT", 2)
    bounded = federation(**changes)
    for turn in (range(6), (3, 5, 0, 4, 1, 2)):
        for i in turn:
            share = bounded.share(i)
            assert bounded.share(i) is share
            for part in ("train", "validation", "everything", "test"):
                one, other = getattr(first[i], part), getattr(share, part)
                assert (one is None) == (other is None)
                if one is not None:
                    for a, b in zip(one[:], other[:], strict=True):
                        assert torch.equal(a, b)
            assert share.attributes == first[i].attributes
    before = bounded.share(2)
    for i in range(6):
        bounded.share(i)
    assert bounded.share(2) is not before


def test_a_training_client_has_something_to_train_on(divide, toy):
    """Of two samples one is for validation and one for test: nothing to train on, which raised
    ZeroDivisionError in each of the client's rounds. The smallest client is named."""
    few = {"num_clients": 2, "train_fraction": 1.0, "partition": "natural"}
    few |= {"partition_column": "place", "partition_min_samples": 1}
    dataset = toy([0, 1] * 4, place=list("aabbbbbb"))
    small = int(np.argmin([len(rows) for rows in divide(dataset, **few)._rows]))
    words = rf"client {small} has 2 samples \(0 for train, 1 for validation, 1 for test\), and none"
    with pytest.raises(ValueError, match=words):
        divide(dataset, **few, partition_test_fraction=0.2)
    for enough in ({"partition_test_fraction": 0.0}, {"partition_validation_fraction": 0.0}):
        fed = divide(dataset, **few | {"partition_test_fraction": 0.2} | enough)
        assert min(len(fed.share(i).train) for i in range(2)) == 1


def test_a_novel_client_needs_nothing_to_train_on(divide, toy):
    few = {"num_clients": 2, "train_fraction": 0.5, "partition_test_fraction": 0.2}
    dataset = toy([0, 1, 0, 1, 0, 1, 0], place=[*"aabbbbb"])
    column = {"partition": "natural", "partition_column": "place", "partition_min_samples": 1}
    sizes = []
    for seed in range(6):
        try:
            fed = divide(dataset, **few, **column, seed=seed)
        except ValueError as error:
            assert "none is left to train on" in str(error)
            continue
        sizes.append(sorted(len(fed.share(i).everything) for i in range(2)))
    assert sizes and sizes[0] == [2, 5]
