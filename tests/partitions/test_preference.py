import datasets
import numpy as np
import pytest

import partitions
from fedapps.settings.config import defaults
from partitions.rules import preference
from partitions.rules.preference import PreferencePartitioner, apportion
from partitions.shares import Share


def users(**changes):
    config = defaults() | {"partition": "preference", "num-clients": 40, "train-fraction": 1.0}
    return partitions.federation(config | {k.replace("_", "-"): v for k, v in changes.items()})


def test_labels_say_whether_the_type_is_the_users():
    federation = users()
    assert federation.info.num_classes == 2
    assert federation.info.num_types == 10
    for client in range(40):
        share = federation.share(client)
        kind = share.attributes["sub-population"]
        for part, count in ((share.train, 20), (share.test, 10)):
            rows = slice(None)
            _, y = part[rows]
            assert (y == (part.types(rows) == kind)).all()
            assert len(y) == count
            assert int(y.sum()) == count // 2
            assert len(part.index.unique()) == count
        assert len(share.validation) == 0
        assert len(share.everything) == 30


@pytest.mark.parametrize("validation", [0, 4])
def test_no_sample_is_trained_on_by_one_user_and_validates_or_tests_another(validation):
    federation = users(num_clients=300, **{"partition.validation-per-user": validation})
    shares = [federation.share(i) for i in range(300)]
    parts = ("train", "validation", "test")
    trained, validated, tested = (
        {int(r) for s in shares for r in getattr(s, part).index} for part in parts
    )
    assert not trained & validated | trained & tested | validated & tested
    assert bool(validated) == bool(validation)


def test_validation_samples_come_out_of_those_to_train_on():
    """30 samples, 6 to validate and 10 to test: 14 to train on, halves of them positive."""
    share = users(**{"partition.validation-per-user": 6}).share(3)
    for part, count in ((share.train, 14), (share.validation, 6), (share.test, 10)):
        _, y = part[:]
        assert (len(y), int(y.sum())) == (count, count // 2)


def test_users_are_dealt_by_the_shares_and_ranked_within_their_sub_population():
    """0.25, 0.15, 4 × 0.1 and 4 × 0.05 of 40 users: 10, 6, 4, 4, 4, 4, 2, 2, 2, 2."""
    shares = "0.25,0.15,0.1,0.1,0.1,0.1,0.05,0.05,0.05,0.05"
    federation = users(**{"partition.shares": shares})
    assert np.bincount(federation.preferred).tolist() == [10, 6, 4, 4, 4, 4, 2, 2, 2, 2]
    assert (np.diff(federation.preferred) < 0).any()  # in an order drawn by seed
    found = sorted(
        (a["sub-population"], a["rank"])
        for a in (federation.share(i).attributes for i in range(40))
    )
    assert found[:11] == [(0, r) for r in range(10)] + [(1, 0)]
    first = [
        a for a in (federation.share(i).attributes for i in range(40)) if not a["sub-population"]
    ]
    assert [a["rank"] for a in first] == list(range(10))  # by client id


def test_users_that_train_are_ranked_before_novel_ones():
    """Or a sub-population whose first user is novel would have nobody to volunteer."""
    federation = users(**{"num-clients": 60, "train-fraction": 0.5})
    for kind in range(10):
        mine = np.flatnonzero(federation.preferred == kind)
        rank = {i: federation.share(i).attributes["rank"] for i in mine}
        assert sorted(rank.values()) == list(range(len(mine)))
        novel = [federation.novel[i] for i in sorted(mine, key=rank.get)]
        assert novel == sorted(novel)


def dealt(preferred, seed=0):
    """Rows of 18 to train on, 6 to validate and 12 to test, of three types of 60 rows each."""
    rule = PreferencePartitioner(preferred, 36, 6, 12, seed)
    rule.dataset = datasets.Dataset.from_dict({"label": np.repeat([0, 1, 2], 60)})
    return [np.split(rule.rows(user), [18, 24]) for user in range(len(preferred))]


def test_pools_are_random_and_of_the_parts_proportions():
    """Of 60 rows of a type half are to train on, a sixth to validate, a third to test: 30, 10, 20.
    Nine rows of a user's type are among its 18; 200 users of each type see every row."""
    found = dealt([0, 1, 2] * 200)
    for part, each in enumerate((30, 10, 20)):
        seen = np.unique(np.concatenate([user[part] for user in found]))
        assert np.bincount(seen // 60).tolist() == [each] * 3
        assert np.ptp(seen[:each]) >= each  # not a run of rows
        other = np.unique(np.concatenate([user[part] for user in dealt([0, 1, 2] * 200, 1)]))
        assert seen.tolist() != other.tolist()


def test_users_draw_apart_and_what_they_dislike_is_of_every_other_type():
    """Two users of one taste, and one user under two seeds, hold other rows; positive and negative
    ones are mixed."""
    (one, *_), (two, *_), (again, *_) = *dealt([1, 1]), dealt([1, 1])[0]
    (other, *_) = dealt([1], seed=1)[0]
    assert one.tolist() == again.tolist()
    assert len({tuple(sorted(rows % 60)) for rows in (one, two, other)}) == 3
    places = np.sort(one)
    assert np.unique(one[one // 60 != 1] // 60).tolist() == [0, 2]
    assert len(places) == 18 and (one[:9] // 60 != 1).any()


def test_a_users_rows_are_drawn_by_the_seed_and_its_number(monkeypatch):
    noted = []
    seed_of = preference.seed_of
    monkeypatch.setattr(preference, "seed_of", lambda *w: noted.append(w) or seed_of(*w))
    dealt([1, 0], seed=5)
    assert noted == [(5, "user", 0), (5, "user", 1)]


def test_users_have_rows_of_the_training_split_alone_which_set_the_moments():
    """The digits' first 1437 images; their values, over 16, have mean 0 and deviation 1."""
    federation = users(num_clients=200, standardize="training-clients")
    rows = np.concatenate([federation.share(i).everything.index for i in range(200)])
    assert 1400 < rows.max() < 1437
    x = federation.dataset.x[:1437].double() / 16
    samples = federation.share(0).everything
    assert (samples.mean, samples.std) == pytest.approx((x.mean().item(), x.std().item()))


def test_apportion_gives_the_largest_remainders_the_rest():
    """0.5, 0.3, 0.2 of 7: 3.5, 2.1, 1.4, floors 3, 2, 1; the one left goes to 0.5."""
    assert apportion("0.5,0.3,0.2", 7, 3).tolist() == [4, 2, 1]
    assert apportion("", 9, 3).tolist() == [3, 3, 3]


@pytest.mark.parametrize("text", ["0.5,0.5", "0.5,0.3,0.3", "1.2,-0.1,-0.1", "a,b,c"])
def test_bad_shares_are_named(text):
    with pytest.raises(ValueError, match="shares is"):
        apportion(text, 9, 3)


def test_parts_that_cannot_be_halved_are_refused():
    with pytest.raises(ValueError, match="test-per-user 5"):
        users(**{"partition.test-per-user": 5})
    with pytest.raises(ValueError, match="validation-per-user 3"):
        users(**{"partition.validation-per-user": 3})


def test_exported_share_keeps_its_taste(tmp_path):
    federation = users()
    share = federation.share(7)
    share.save(tmp_path, federation.info)
    again, info = Share.load(tmp_path)
    assert (info.num_classes, info.num_types) == (2, 10)
    for part in ("train", "test", "everything"):
        one, two = getattr(share, part), getattr(again, part)
        assert all(a.equal(b) for a, b in zip(one[:], two[:], strict=True))
        assert one.types(slice(None)).equal(two.types(slice(None)))
