"""Other test samples for training clients: which change, by what, and that nothing else does."""

import numpy as np
import pytest
import torch

from partitions.datasets.loading import Dataset, Info
from partitions.shifts.shifted_tests import corruptions_for

KINDS = ("corruption", "out-of-client", "mixture")
HOW = {"partition": "iid", "num_clients": 6, "train_fraction": 0.5, "partition_test_fraction": 0.2}


def rows_of(found, among):
    """For each input, the row among those that equals it; −1 if none does."""
    equal = (found.flatten(1)[:, None] == among.flatten(1)[None]).all(2)
    return torch.where(equal.any(1), equal.int().argmax(1), -1)


@pytest.fixture(scope="module")
def numbered():
    """240 images of 20×20 bytes in four classes; each has its row as a code in the first pixels."""

    def make(name="numbered", classes=("zero", "one", "two", "three"), n=240):
        x = torch.full((n, 1, 20, 20), 100, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = torch.arange(n) % 200, torch.arange(n) // 200
        info = Info(name, (1, 20, 20), 4, "")
        return Dataset(info, x, torch.arange(n) % 4, n, {}, classes)

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"partition_corruptions": "contrast"}])
def test_only_the_test_samples_of_training_clients_change(divide, kind, changes):
    """Novel clients, training and validation samples, and the numbers of test samples stay."""
    fed = divide(partition_test_shift=kind, **HOW, **changes)
    again, plain = divide(partition_test_shift=kind, **HOW, **changes), divide(**HOW, **changes)
    other = divide(partition_test_shift=kind, **HOW | changes | {"seed": 1})
    for client, novel in enumerate(fed.novel):
        mine, same, before = (f.share(client) for f in (fed, again, plain))
        for part in ("train", "validation", "test", "everything"):
            (x, y), (x2, y2), (x0, y0) = (getattr(s, part)[:] for s in (mine, same, before))
            assert torch.equal(x, x2) and torch.equal(y, y2) and x.shape == x0.shape
            shifted = not novel and part in ("test", "everything")
            assert torch.equal(x, x0) != shifted
            assert shifted or torch.equal(y, y0)
    first = int(np.flatnonzero(~other.novel & ~fed.novel)[0])
    assert not torch.equal(other.share(first).test[:][0], fed.share(first).test[:][0])


def test_each_image_has_a_corruption_of_its_own(divide, numbered):
    """Labels stay. Ten corruptions of the benchmark suit 20×20 pixels, five smaller images; bytes
    stay bytes. Contrast 0.15 leaves the grey 100, noises do not: several kinds are seen."""
    fed, plain = (
        divide(numbered(), partition_test_shift=kind, **HOW) for kind in ("corruption", "none")
    )
    client = int(np.flatnonzero(~fed.novel)[0])
    mine, before = fed.share(client).test, plain.share(client).test
    x, y = mine.x[mine.index], mine[:][1]
    assert x.dtype == torch.uint8 and torch.equal(y, before[:][1])
    spread = x.float()[:, 0, 2:-2, 2:-2].flatten(1).std(1)
    assert (spread < 5).any() and (spread > 15).any()
    assert (rows_of(x, before.x[before.index]) == -1).float().mean() > 0.9
    names = corruptions_for(fed.info)
    assert len(names) == 10 and not {"blur", "background", "inversion"} & {*names}
    small = corruptions_for(Info("small", (1, 8, 8), 10, ""))
    assert small == ["gaussian-noise", "shot-noise", "impulse-noise", "contrast", "brightness"]
    with pytest.raises(ValueError, match=r"corrupts images; tabular has inputs of shape \(64,\)"):
        corruptions_for(Info("tabular", (64,), 10, ""))


def test_out_of_client_samples_are_tests_of_other_training_clients(divide, numbered):
    """Each at most once, with its label, and of more than one client."""
    fed, plain = (
        divide(numbered(), partition_test_shift=kind, **HOW) for kind in ("out-of-client", "none")
    )
    training = np.flatnonzero(~fed.novel).tolist()
    tests = {c: plain.share(c).test.index for c in training}
    for client in training:
        mine = fed.share(client).test
        x, y = mine.x[mine.index], mine[:][1]
        rows = rows_of(x, plain.dataset.x)
        assert torch.equal(plain.dataset.y[rows], y) and len(rows.unique()) == len(rows)
        owners = {c for c in training if {*tests[c].tolist()} & {*rows.tolist()}}
        assert owners == {*training} - {client}
        assert {*rows.tolist()} <= {*torch.cat([tests[c] for c in owners]).tolist()}


def test_out_of_client_samples_have_the_changes_of_their_client(divide):
    """Of two training clients, rotated by their own angles, one gets the other's test samples."""
    how = HOW | {"partition": "rotated", "num_clients": 2, "train_fraction": 1.0}
    how |= {"partition_angles": "0,90", "partition_samples": 40, "seed": 1}
    fed, plain = (divide(partition_test_shift=kind, **how) for kind in ("out-of-client", "none"))
    assert plain.share(0).attributes != plain.share(1).attributes
    for client in (0, 1):
        mine, others = fed.share(client).test, plain.share(1 - client).test
        assert sorted(rows_of(mine[:][0], others[:][0]).tolist()) == list(range(len(others)))


@pytest.fixture
def with_natural(numbered, monkeypatch):
    """A dataset named mnist, and digits of half its size whose images are white."""
    digits = numbered("digits", n=40)
    digits.x[:] = 255 - torch.arange(40, dtype=torch.uint8)[:, None, None, None]
    monkeypatch.setattr("partitions.shifts.shifted_tests.configured", lambda config: digits)
    return numbered("mnist")


def test_a_natural_shift_keeps_the_labels(divide, with_natural):
    fed, plain = (
        divide(with_natural, partition_test_shift=kind, **HOW | {"seed": 2})
        for kind in ("natural", "none")
    )
    for client in np.flatnonzero(~fed.novel).tolist():
        mine = fed.share(client).test
        x, y = mine.x[mine.index], mine[:][1]
        assert torch.equal(y, plain.share(client).test[:][1])
        row = 255 - x[:, 0, 0, 0].int()
        assert (row < 40).all() and torch.equal(row % 4, y.int()) and (x == x[:, :1, :1, :1]).all()
    with pytest.raises(ValueError, match=r"'natural', but digits has no natural.*: mnist"):
        divide(partition_test_shift="natural", **HOW)


def test_a_mixture_has_equal_parts(divide, with_natural):
    """Of the 8 test samples 2 are the client's, 2 corrupted, 2 others', 2 natural, in any order."""
    fed, plain = (
        divide(with_natural, partition_test_shift=kind, **HOW) for kind in ("mixture", "none")
    )
    orders = set()
    for client in np.flatnonzero(~fed.novel).tolist():
        mine, before = fed.share(client).test, plain.share(client).test
        x = mine.x[mine.index]
        own = rows_of(x, before.x[before.index]) >= 0
        known = rows_of(x, plain.dataset.x) >= 0
        natural = (x == x[:, :1, :1, :1]).flatten(1).all(1) & (x[:, 0, 0, 0] > 215)
        assert [int(t.sum()) for t in (own, known & ~own, natural)] == [2, 2, 2] and len(x) == 8
        assert torch.equal(mine[:][1][own], before[:][1][own])
        orders.add(tuple(own.tolist()))
    assert len(orders) > 1


def test_a_mixture_does_not_round_corrupted_images(divide):
    """Digits are whole numbers up to 16; corrupted ones lie between."""
    fed = divide(partition_test_shift="mixture", **HOW)
    for client in np.flatnonzero(~fed.novel).tolist():
        test = fed.share(client).test
        whole = (test.x[test.index] % 1 == 0).flatten(1).all(1)
        assert 0 < int((~whole).sum()) <= -(-len(whole) // 3) and whole.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_test_fraction": 0.0}, "client . has none; set partition.test-fraction"),
        ({"num_clients": 2}, "of two training clients"),
    ],
)
def test_a_shift_without_samples_is_refused(divide, changes, message):
    with pytest.raises(ValueError, match=message):
        fed = divide(partition_test_shift="out-of-client", **HOW | changes)
        fed.share(int(np.flatnonzero(~fed.novel)[0]))


def test_labels_stay_hidden(divide):
    """A client without labels gets none with other clients' samples."""
    how = HOW | {"train_fraction": 1.0, "partition_labeled_clients": 0.5}
    fed = divide(partition_test_shift="out-of-client", **how)
    hidden = [fed.share(i).test[:][1] for i in np.flatnonzero(fed.unlabeled)]
    assert hidden and all((y == -1).all() for y in hidden)
    assert all((fed.share(i).test[:][1] >= 0).all() for i in np.flatnonzero(~fed.unlabeled))


def test_a_saved_share_has_the_shifted_samples(divide, tmp_path):
    fed = divide(partition_test_shift="mixture", **HOW)
    share = fed.share(int(np.flatnonzero(~fed.novel)[0]))
    share.save(tmp_path, fed.info)
    loaded, _ = type(share).load(tmp_path)
    for part in ("train", "validation", "test"):
        for a, b in zip(getattr(loaded, part)[:], getattr(share, part)[:], strict=True):
            assert torch.equal(a, b)
