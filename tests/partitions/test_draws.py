"""What a rule draws: by a seed of its own, at random where it says so, and by hand where it can."""

from importlib import import_module

import datasets
import numpy as np
import pytest
import torch

import partitions
from fedapps.common.seeds import drawing, seed_of
from fedapps.settings.config import defaults
from partitions import task
from partitions.rules import class_fraction
from partitions.rules.class_fraction import ClassFractionPartitioner
from partitions.rules.coarse import CoarsePartitioner
from partitions.rules.dirichlet import DirichletPartitioner, NormalizedDirichletPartitioner, _draw
from partitions.rules.dirichlet_split import SplitDirichletPartitioner
from partitions.rules.iid import SubsetIidPartitioner
from partitions.rules.mixed import MixedPartitioner
from partitions.rules.natural import NaturalPartitioner
from partitions.rules.partitioner import assign_by_shares
from partitions.rules.pathological import PathologicalPartitioner

NOVEL = np.array([False, True, True, False, False])


def dealt(rule, labels, **columns):
    """The rows of each client of `rule`, of rows 0, 1, … of these labels in this order."""
    columns = {
        "part": np.arange(len(labels)) % 7 // 5 * 2,
        **columns,
    }  # a part in four is for tests
    rule.dataset = datasets.Dataset.from_dict({"label": np.asarray(labels), **columns})
    return [np.asarray(rule.rows(client)) for client in range(rule.num_partitions)]


def sets(parts):
    return [sorted(rows.tolist()) for rows in parts]


RULES = {
    "pathological": lambda seed: PathologicalPartitioner(5, 2, seed),
    "unequal": lambda seed: PathologicalPartitioner(5, 2, seed, equal_sizes=False),
    "class-fraction": lambda seed: ClassFractionPartitioner(5, 2, seed),
    "dirichlet": lambda seed: DirichletPartitioner([0.5] * 5, seed),
    "dirichlet-novel": lambda seed: NormalizedDirichletPartitioner([0.5] * 5, seed),
    "dirichlet-split": lambda seed: SplitDirichletPartitioner(NOVEL, 0.5, 0.5, seed),
    "mixed": lambda seed: MixedPartitioner(["none"] * 3 + ["alpha-0.5"] * 2, seed),
    "natural": lambda seed: NaturalPartitioner(5, "writer", 1, seed),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_rules_own_seed_decides(rule):
    """Of the same rows in the same order, which the federation's own shuffle hides otherwise."""
    labels, writer = np.arange(200) % 5, np.arange(200) // 10
    one, same, other = (sets(dealt(rule(seed), labels, writer=writer)) for seed in (3, 3, 4))
    assert one == same != other


def test_a_seed_is_the_same_on_every_machine():
    """BLAKE2b of 8 bytes: `printf 7/rows/2/3 | b2sum -l 64` is d93cd4a74d877afe; half of it fits
    into 63 bits. No two purposes or counters run into one another."""
    assert seed_of(7, "rows", 2, 3) == 0xD93CD4A74D877AFE // 2
    got = [(1, "a"), (1, "b"), (2, "a"), (1, "a", 1, 11), (1, "a", 11, 1), (1, "a", 1), (11, "a")]
    assert len({seed_of(*one) for one in got}) == len(got)


def test_what_is_drawn_by_a_seed_of_its_own_disturbs_nobody():
    """torch's 5th and 6th numbers after seed 3, whatever is drawn in between by seed 4; an error
    within changes nothing of that."""
    torch.manual_seed(3)
    expected = torch.rand(6)
    torch.default_generator.manual_seed(3)
    torch.rand(4)
    with drawing(4):
        inside = torch.rand(5)
    with pytest.raises(ZeroDivisionError), drawing(4):
        torch.rand(torch.randint(9, (1,)).item() // 0)
    assert torch.equal(torch.rand(2), expected[4:])
    assert torch.equal(inside, torch.rand(5, generator=torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("base", ["iid", "class-fraction"])
def test_no_two_draws_of_a_federation_share_a_generator(toy, divide, monkeypatch, base):
    got = []

    def noted(*words):
        got.append(words)
        return seed_of(*words)

    for name in ("federations", "rules.registry", "shifts.changes"):
        monkeypatch.setattr(import_module(f"partitions.{name}"), "seed_of", noted)
    fed = divide(toy(np.arange(600) % 4, 500), partition="subsampled", partition_base_rule=base,
                 num_clients=4, seed=3, novel_shots=1)  # fmt: skip
    assert all(fed.share(client) for client in range(4))
    assert {words[1] for words in got} >= {"roles", "rows", "pools", "split", "shots", "subsample"}
    assert {words[0] for words in got} == {3}
    assert len(got) == len(set(got))


def test_shards_of_the_largest_size_at_random():
    """Of 6 and 4 samples five shards of 2 can be cut. Of five classes of 40 in 20 shards a client
    gets two of one class with probability 3/19: most of ten clients hold two classes."""
    assert [len(rows) for rows in dealt(PathologicalPartitioner(5, 1, 0), [0] * 6 + [1] * 4)] == (
        [2] * 5
    )
    labels = np.repeat(np.arange(5), 40)
    for equal in (True, False):
        parts = dealt(PathologicalPartitioner(10, 2, 0, equal), labels)
        assert sum(len(np.unique(labels[rows])) == 2 for rows in parts) >= 6


@pytest.mark.parametrize(
    ("clients", "k", "classes", "held"),
    [
        # 2·10/10 = 2 hold each class, so a third of it goes to each of 3.
        (10, 2, 10, [200] * 10),
        # 1·7/2: 4 hold one class, all of it; 3 hold the other, with a quarter each.
        (7, 1, 2, [75] * 7),
        # Nobody holds two of three classes.
        (1, 1, 3, [300]),
    ],
)
@pytest.mark.parametrize("part", [0, 2])
def test_with_an_extra_holder_its_share_is_unused(monkeypatch, clients, k, classes, held, part):
    """All a_ic are ½, so the ⌊N·K/C⌋ + 1 holders of a class have equal shares of its 300 samples;
    a client that is missing among them leaves its share to nobody."""
    monkeypatch.setattr(class_fraction, "LOW", 0.5)
    monkeypatch.setattr(class_fraction, "HIGH", 0.5)
    labels = np.arange(300 * classes) % classes
    rule = ClassFractionPartitioner(clients, k, 0, extra_holder=True)
    parts = dealt(rule, labels, part=np.full(len(labels), part))
    assert list(map(len, parts)) == held
    assert len(np.unique(np.concatenate(parts))) == sum(held)


def test_an_extra_holder_draws_as_the_others():
    """Of 5 holders with a ~ U(0.4, 0.6) each, one that is missing has between 0.4 / (0.4 + 4·0.6)
    = 1/7 and 0.6 / (0.6 + 4·0.4) = 3/11 of its class, in the mean a fifth."""
    labels = np.arange(100_000) % 10
    rule = ClassFractionPartitioner(20, 2, 0, extra_holder=True)
    rows = np.concatenate(dealt(rule, labels))
    unused = 1 - np.bincount(labels[rows], minlength=10) / 10_000
    assert 1 / 7 < unused.min() < unused.max() < 3 / 11
    assert unused.mean() == pytest.approx(0.2, abs=0.02)
    assert unused.std() > 0.01


def test_class_fraction_draws_every_share_and_class_apart():
    """Two clients that both hold both classes: shares a / (a + a') of a ~ U(0.4, 0.6) lie between
    0.4 and 0.6, in each class another. Of five classes the first client's one is any."""
    labels = np.repeat([0, 1], 1000)
    shares = []
    for seed in range(20):
        first = dealt(ClassFractionPartitioner(2, 2, seed), labels)[0]
        shares.append(np.bincount(labels[first], minlength=2) / 1000)
    shares = np.array(shares)
    assert shares.min() >= 0.397 and shares.max() <= 0.603
    assert np.ptp(shares) > 0.12
    assert abs(shares[:, 0] - shares[:, 1]).max() > 0.05
    labels = np.repeat(np.arange(5), 10)
    firsts = {labels[dealt(ClassFractionPartitioner(2, 1, s), labels)[0][0]] for s in range(12)}
    assert len(firsts) > 2


def test_no_client_is_always_the_last_to_draw():
    """Ten samples of each of two classes. Client 0 takes about as many of each, client 1 wants
    one class alone, which it gets where it draws first. Both get ten."""
    labels = np.repeat([0, 1], 10)
    most = []
    for seed in range(12):
        parts = dealt(DirichletPartitioner([1e6, 1e-3], seed), labels)
        assert [len(rows) for rows in parts] == [10, 10]
        most.append(np.bincount(labels[parts[1]]).max())
    assert max(most) == 10 and min(most) < 10
    for seed in range(4):  # three classes, proportions in between: equal sizes all the same
        labels = np.repeat([0, 1, 2], 33)
        assert {len(rows) for rows in dealt(DirichletPartitioner([0.7] * 9, seed), labels)} == {11}


def test_who_finds_its_classes_used_up_takes_any_other_alike():
    """Of 100 and 300 left about 50 each, within three deviations of 5, not 25 of the ones."""
    q, left = np.array([1.0, 0.0, 0.0]), np.array([0, 100, 300])
    counts = _draw(q, left, 100, np.random.default_rng(0))
    assert counts.sum() == 100 and counts[0] == 0
    assert counts[1] == pytest.approx(50, abs=15)


def test_shares_are_cut_where_their_sum_rounds_to():
    """Thirds of 5 rows: 5/3 and 10/3 are next to 2 and 3, so 2, 1 and 2 rows; in each part."""
    thirds = np.full((3, 1), 1 / 3)
    parts = assign_by_shares(np.zeros(10, int), np.repeat([0, 2], 5), thirds)
    assert sets(parts) == [[0, 1, 5, 6], [2, 7], [3, 4, 8, 9]]
    rule = SplitDirichletPartitioner(np.zeros(3, bool), 1e12, 1.0, 0)
    assert [len(rows) for rows in dealt(rule, [0] * 5, part=[0] * 5)] == [2, 1, 2]


def test_the_split_draws_for_training_and_novel_clients_apart():
    """Of 100 rows for two clients each: other shares for each pair, and the first one's is now
    the smaller, now the larger one."""
    novel = np.array([False, False, True, True])
    firsts = []
    for seed in range(10):
        rule = SplitDirichletPartitioner(novel, 1.0, 1.0, seed)
        parts = dealt(rule, [0] * 200, part=np.repeat([0, 2], 100))
        firsts.append([len(parts[0]), len(parts[2])])
    train, other = np.array(firsts).T
    assert (train != other).all()
    assert min(train) < 50 < max(train) and min(other) < 50 < max(other)


def test_rows_without_a_value_are_nobodys():
    writer = np.array([""] * 9 + ["a"] * 3 + ["b"] * 4)
    for seed in range(6):
        parts = dealt(NaturalPartitioner(2, "writer", 3, seed), [0] * 16, writer=writer)
        assert sets(parts) == [[9, 10, 11], [12, 13, 14, 15]]
    chosen = {
        tuple(sets(dealt(NaturalPartitioner(1, "writer", 1, s), [0] * 16, writer=writer))[0])
        for s in range(9)
    }
    assert len(chosen) == 2


def test_some_samples_and_superclasses_by_hand():
    """7 of 9 rows over 3 clients: 3, 2, 2. Two superclasses over four clients: each has both."""
    assert sets(dealt(SubsetIidPartitioner(3, 7), [0] * 9)) == [[0, 1, 2], [3, 4], [5, 6]]
    labels, coarse = [1, 0, 3, 2, 0, 1, 2, 3], ["x", "x", "y", "y", "x", "x", "y", "y"]
    rule = CoarsePartitioner(4)
    assert sets(dealt(rule, labels, coarse=coarse)) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [rule.attributes(i)["coarse"] for i in range(4)] == ["x", "x", "y", "y"]


def test_a_clients_validation_rows_are_any_of_its_rows(toy, divide):
    """Two shards of two classes each: 9 rows of 60 are of both; where the rule has divided the
    parts itself, they are not the first rows of the dataset, and neither are public ones."""
    data = toy(np.repeat(np.arange(4), 60))
    fed = divide(data, partition="pathological", num_clients=4, partition_public_samples=0)
    two = [fed.share(i) for i in range(4) if fed.share(i).attributes["classes"] == 2]
    assert two and any(len(one.validation[:][1].unique()) == 2 for one in two)
    fed = divide(data, partition="class-fraction", num_clients=2, partition_public_samples=20)
    rows = [fed.share(i).validation.index.numpy() for i in range(2)]
    assert np.concatenate(rows).max() > 60 and fed.public.index.max() > 60


def test_every_client_validates_on_something(toy, divide):
    """0.15 of 3 rows are none: one all the same. Of 10 rows they are 1.5, rounded 2."""
    for rows, count in ((3, 1), (10, 2)):
        fed = divide(toy([0] * rows * 2), partition="iid", num_clients=2)
        assert [len(fed.share(i).validation) for i in range(2)] == [count] * 2


def test_a_novel_client_without_enough_samples_is_refused(toy, divide):
    """Writer b has one sample, whichever role it has by seed."""
    data = toy([0] * 30 + [1], writer=["a"] * 30 + ["b"])
    for seed in range(4):
        with pytest.raises(ValueError, match="clients 1 got fewer than 2 samples"):
            divide(data, partition="natural", num_clients=2, seed=seed,
                   partition_column="writer", partition_min_samples=1)  # fmt: skip


def test_attributes_and_moments_are_of_the_clients_own_rows(toy, divide):
    """Writer a has classes 0 and 1, b class 2 alone. Inputs are row numbers: a's 0 … 9 have mean
    4.5 and variance 82.5 / 10, b's 10 … 19 ten more; who is novel is left out."""
    data = toy([0, 1] * 5 + [2] * 10, writer=["a"] * 10 + ["b"] * 10)
    fed = divide(data, partition="natural", num_clients=2, partition_column="writer",
                 partition_min_samples=1, standardize="training-clients",
                 partition_validation_fraction=0.0, partition_test_fraction=0.0)  # fmt: skip
    assert [fed.share(i).attributes["classes"] for i in range(2)] == [2, 1]
    samples = fed.share(0).everything
    mean = 4.5 + 10 * fed.novel[0]
    assert (*samples.mean, *samples.std) == pytest.approx((mean, (82.5 / 10) ** 0.5))
    assert fed.novel.sum() == 1


def test_training_and_novel_clients_have_concentrations_of_their_own():
    """Novel ones at α = 10⁹ share alike, whatever the training clients' 10⁻³ does: 50 rows each
    of a class's 100, while a training client has all of a class or none of it."""
    novel = np.array([True, False, True, False])
    labels, part = np.repeat([0, 1], 200), np.tile(np.repeat([0, 2], 100), 2)
    parts = dealt(SplitDirichletPartitioner(novel, 1e-3, 1e9, 1), labels, part=part)
    counts = [np.bincount(labels[rows], minlength=2).tolist() for rows in parts]
    assert counts[0] == counts[2] == [50, 50]
    assert {n for i in (1, 3) for n in counts[i]} <= {0, 100}


def test_normalised_shares_by_hand():
    """α = 10⁹: p = ½ for both classes of all three clients, hence a third of a class each. With
    10⁻³ client 0 has p = 1 in one class, where the others' ½ leave it 1 / 2 and them 1 / 4; of the
    other class they share alike."""
    labels = np.repeat([0, 1], 120)
    parts = dealt(NormalizedDirichletPartitioner([1e9] * 3, 0), labels, part=[0] * 240)
    assert [np.bincount(labels[rows]).tolist() for rows in parts] == [[40, 40]] * 3
    parts = dealt(NormalizedDirichletPartitioner([1e-3, 1e9, 1e9], 0), labels, part=[0] * 240)
    first = np.bincount(labels[parts[0]], minlength=2)
    for rows in parts[1:]:
        assert np.bincount(labels[rows]).tolist() == [30 if n else 60 for n in first]
    assert sorted(first.tolist()) == [0, 60]


def test_normalised_shares_draw_each_client_by_itself():
    """Where the middle client's α changes, the others' p do not: of every class their ratio
    p̂_0j / p̂_2j is p_0j / p_2j, whatever all shares add up to. 30 000 rows tell it to 1 %."""
    labels, ratios = np.repeat(np.arange(3), 30_000), []
    for alpha in (1.0, 5.0):
        rule = NormalizedDirichletPartitioner([2.0, alpha, 3.0], 4)
        parts = dealt(rule, labels, part=np.zeros(len(labels)))
        first, _, last = (np.bincount(labels[rows], minlength=3) for rows in parts)
        ratios.append(first / last)
    assert ratios[0] == pytest.approx(ratios[1], rel=0.01)


def test_what_a_novel_client_draws_before_it_is_normalised():
    """Beside a client of α = 10⁹, p = ¼ for four classes, one of p has the share s = p / (p + ¼) of
    a class, p = ¼ s / (1 − s). For α = 1 E Σ p² = (α + 1) / (4 α + 1) = 2/5, and the deviation of
    one Σ p² is 0.12: of 60 seeds' mean 0.016."""
    labels, squares = np.repeat(np.arange(4), 300), []
    for seed in range(60):
        rule = NormalizedDirichletPartitioner([1.0, 1e9], seed)
        s = np.bincount(labels[dealt(rule, labels, part=[0] * 1200)[0]], minlength=4) / 300
        squares.append(((s / (1 - s) / 4) ** 2).sum())
    assert np.mean(squares) == pytest.approx(0.4, abs=0.06)


def test_who_is_novel_is_drawn(toy, divide):
    """0.5 of five clients is two (2.5 rounds to the even one), 0.7 is four of them."""
    data = toy(np.arange(100) % 2)
    for fraction, count in ((0.5, 2), (0.7, 4)):
        roles = [
            divide(data, num_clients=5, partition="iid", train_fraction=fraction, seed=seed).novel
            for seed in range(8)
        ]
        assert {int((~novel).sum()) for novel in roles} == {count}
        assert len({tuple(novel.tolist()) for novel in roles}) > 2


def test_what_tells_federations_apart():
    """Data seed 0 is a seed, and seed 0 where it is the run's own; every setting of a partition
    counts, and what has nothing to do with the data does not. Users have two classes."""
    config = defaults() | {"num-clients": 4, "partition": "dirichlet", "data-seed": 0, "seed": 7}
    one = partitions.federation(config)
    assert partitions.federation(config | {"seed": 8, "lr": 0.5}) is one
    assert partitions.federation(config | {"data-seed": -1, "seed": 0}) is one
    assert partitions.federation(config | {"data-seed": -1}) is not one
    for other in ({"partition.alpha": 0.3}, {"own.rules:NAME.width": 2}):
        assert partitions.federation(config | other) is not one
    known = task(config | {"partition": "preference"})
    assert (known.num_classes, known.num_types, task(config).num_classes) == (2, 10, 10)


def test_how_many_samples_are_public_by_default(toy, divide):
    """A sixth of 120, at most 5000: of 30 012 a sixth were two more."""
    for rows, count in ((120, 20), (30_012, 5000)):
        fed = divide(toy(np.arange(rows) % 2), partition="iid", num_clients=2,
                     partition_public_samples=-1)  # fmt: skip
        assert len(fed.public) == count
