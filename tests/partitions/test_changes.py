"""Rotated, corrupted and subsampled clients."""

import numpy as np
import pytest
import torch

from partitions.datasets.loading import Dataset, Info
from partitions.shifts.changes import Corruption, Rotation, Subsampling, blur, rotate


def bars(n: int) -> Dataset:
    """A horizontal bar of Gaussian profile in 28×28, n times: its axis tells the rotation."""
    v, u = np.mgrid[-13.5:14.5, -13.5:14.5]
    bar = 255 * np.exp(-(u**2) / (2 * 5.0**2) - v**2 / (2 * 1.5**2))
    x = torch.from_numpy(np.tile(bar.astype(np.uint8), (n, 1, 1, 1)))
    return Dataset(Info("bars", (1, 28, 28), 2, ""), x, torch.arange(n) % 2, n, {})


def measured_angle(image: np.ndarray) -> float:
    """Degrees counterclockwise of the image's main axis: ½ atan2(2μ₁₁, μ₂₀ − μ₀₂), y upwards."""
    v, u = np.mgrid[0:28, 0:28]
    w = image / image.sum()
    u, v = u - (w * u).sum(), (w * v).sum() - v
    moments = (w * u * v).sum(), (w * u * u).sum(), (w * v * v).sum()
    return float(np.degrees(np.arctan2(2 * moments[0], moments[1] - moments[2]) / 2))


def test_rotated_clients_have_one_of_their_roles_angles(divide):
    fed = divide(bars(1200), partition="rotated", num_clients=50)
    sizes, seen = [], {True: set(), False: set()}
    for client in range(50):
        share = fed.share(client)
        images = share.everything[:][0].numpy()[:, 0]
        angles = [measured_angle(image) for image in images[:3]]
        assert angles == pytest.approx([share.attributes["angle"]] * 3, abs=1.0)
        assert angles == pytest.approx(
            [measured_angle(i) for i in share.train[:3][0][:, 0].numpy()]
        )
        seen[share.novel].add(share.attributes["angle"])
        sizes.append(len(share.everything))
    assert seen == {False: {0.0, 30.0, 60.0}, True: {15.0, 45.0}}
    assert sizes == [20] * 50
    assert fed.novel.sum() == 25


def test_shards_of_one_class_as_the_authors_of_fedtta_deal(divide):
    """100 rows of each of ten classes in 500 shards of two: a client gets ten, so it has 20
    samples, an even number of each class that it has, and hardly ever all classes."""
    data = Dataset(
        Info("ten", (1, 28, 28), 10, ""), bars(1000).x, torch.arange(1000) % 10, 1000, {}
    )
    changes = {"partition_class_shards": 10, "partition_angles": "75", "num_clients": 50}
    fed = divide(data, partition="rotated", partition_interpolation="bicubic", **changes)
    counts = [fed.share(i).everything[:][1].bincount(minlength=10) for i in range(50)]
    assert all(int(c.sum()) == 20 and not (c % 2).any() for c in counts)
    assert torch.stack(counts).sum(0).tolist() == [100] * 10
    assert 3 < np.mean([float((c > 0).sum()) for c in counts]) < 9
    trained = next(fed.share(i) for i in range(50) if not fed.novel[i])
    assert measured_angle(trained.train[:][0][0, 0].numpy()) == pytest.approx(75, abs=1)


def test_bicubic_rotation_is_pillows():
    """Bytes and floats, channel by channel; a smooth image turns by the angle, and an overshoot
    that bilinear interpolation cannot have shows that the kernel is cubic."""
    from PIL import Image

    x = torch.zeros(2, 3, 9, 9, dtype=torch.uint8)
    x[0, 1, 4, 4], x[1, 2, :, :4] = 200, 100
    turned = rotate(x, 30.0, "bicubic")
    assert turned.dtype == torch.uint8 and turned.shape == x.shape
    pillow = Image.fromarray(x[1, 2].numpy()).rotate(30, Image.Resampling.BICUBIC)
    assert turned[1, 2].tolist() == np.asarray(pillow).tolist()
    assert not turned[0, 0].any() and turned[0, 1].any()
    floats = rotate(x.float(), 30.0, "bicubic")
    assert floats.dtype == torch.float32 and floats.min() < 0 <= rotate(x.float(), 30.0).min()


def test_rotation_keeps_bytes_and_turns_counterclockwise():
    """A pixel right of the centre goes to the top under a quarter turn."""
    x = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    x[0, 0, 2, 4] = 200
    turned = rotate(x, 90.0)
    assert turned.dtype == torch.uint8
    assert turned[0, 0, 0, 2] == 200


def test_blur_spreads_by_its_width():
    """A point under a Gaussian of width σ has variance σ² along each axis."""
    x = torch.zeros(1, 1, 41, 41)
    x[0, 0, 20, 20] = 1.0
    for width in (1.0, 2.0):
        for axis in (0, 1):
            row = blur(x, width)[0, 0].sum(axis).numpy()
            assert (row * (np.arange(41) - 20) ** 2).sum() == pytest.approx(width**2, rel=0.05)


def test_rotation_is_bilinear():
    """Turned by 45°, the four neighbours of a lit centre lie (√½, √½) from it in the image as it
    was: each weighs (1 − √½)² there."""
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 200.0
    turned = rotate(x, 45.0)[0, 0]
    assert turned[[1, 3, 2, 2], [2, 2, 1, 3]].tolist() == pytest.approx([17.157] * 4, abs=1e-2)


def test_inputs_are_blurred_before_they_are_rotated():
    """A white image stays white under a blur, and its turned corners are black: the other way
    about they would be blurred, too."""
    white = torch.ones(1, 1, 21, 21)
    novel = np.array([False, True])
    changed = Corruption(novel, 2.0, 45.0).inputs(1, white)
    torch.testing.assert_close(changed, rotate(white, 45.0))
    got = [Corruption(novel, 2.0, 45.0).attributes(client) for client in (0, 1)]
    assert got == [{"blur": 0.0, "angle": 0.0}, {"blur": 2.0, "angle": 45.0}]


def test_every_seed_and_client_has_draws_of_its_own():
    """Angles by seed; the places that are kept of 20 rows by seed and client, and not the first."""
    novel = np.arange(12) % 3 > 0
    drawn = [Rotation(novel, (0, 30, 60), (15, 45), seed).angles.tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    kept = [
        Subsampling(novel, 0.4, seed).rows(client, np.arange(20)).tolist()
        for seed, client in ((1, 1), (1, 1), (1, 2), (2, 1))
    ]
    assert kept[0] == kept[1]
    assert len({tuple(sorted(rows)) for rows in [*kept, list(range(8))]}) == 4


def test_how_many_samples_are_kept():
    """0.18 of ten are 1.8, rounded 2; 0.01 of ten are at least one; a training client keeps all."""
    novel, rows = np.array([True, False]), np.arange(10)
    for fraction, count in ((0.18, 2), (0.01, 1)):
        change = Subsampling(novel, fraction, 0)
        assert [len(change.rows(client, rows)) for client in (0, 1)] == [count, 10]
        assert [change.attributes(client)["kept"] for client in (0, 1)] == [fraction, 1.0]


@pytest.mark.parametrize("base", ["pathological", "class-fraction"])
def test_corruption_touches_novel_clients_alone(divide, base):
    plain = divide(partition=base, num_clients=6)
    changed = divide(
        partition="corrupted",
        num_clients=6,
        partition_base_rule=base,
        partition_blur=1.0,
        partition_rotation=30.0,
    )
    for client in range(6):
        mine, theirs = (fed.share(client).everything[:] for fed in (changed, plain))
        assert torch.equal(mine[1], theirs[1])
        assert torch.equal(mine[0], theirs[0]) != changed.novel[client]
        assert changed.share(client).attributes["blur"] == float(changed.novel[client])


def test_corruption_of_strength_zero_is_none(divide):
    fed = divide(partition="corrupted", num_clients=4)
    assert all(fed.share(i).everything.x is fed.dataset.x for i in range(4))


def test_each_novel_client_has_another_shift(divide):
    """Four shifts in turn for eight novel clients: two of each. Those of inputs are the formulas,
    of a client whose classes are those of all; that of classes leaves inputs as they are."""
    shifts = "none,alpha-0.01,rotation-90,inversion"
    config = {"partition": "mixed", "num_clients": 16, "train_fraction": 0.5}
    fed = divide(**config, partition_novel_shifts=shifts)
    plain = divide(**config, partition_novel_shifts="none,alpha-0.01,none,none")
    counts = dict.fromkeys(shifts.split(","), 0)
    for client in range(16):
        share = fed.share(client)
        shift = share.attributes["shift"]
        (x, y), (before, labels) = share.everything[:], plain.share(client).everything[:]
        assert torch.equal(y, labels)
        if not share.novel:
            assert shift == "none" and torch.equal(x, before) and len(y.unique()) == 10
            continue
        counts[shift] += 1
        assert (len(y.unique()) < 8) == (shift == "alpha-0.01")
        expected = {"rotation-90": before.rot90(1, (2, 3)), "inversion": 1 - before}
        torch.testing.assert_close(x, expected.get(shift, before))
    assert set(counts.values()) == {2}


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_subsampled_novel_clients_keep_a_nested_share(divide, fraction):
    plain = divide(partition="pathological", num_clients=8)
    some, more = (
        divide(partition="subsampled", num_clients=8, partition_keep_fraction=f)
        for f in (fraction, min(1.0, fraction + 0.3))
    )
    for client in range(8):
        whole, few, many = (
            set(fed.share(client).everything.index.tolist()) for fed in (plain, some, more)
        )
        if some.novel[client]:
            assert few <= many <= whole
            assert len(few) == round(fraction * len(whole))
        else:
            assert few == whole


def test_standardised_changes_use_the_training_clients_moments(divide):
    """Standardising is affine, so a changed input is (changed / 16 − mean) / deviation."""
    changes = {"partition": "corrupted", "num_clients": 4, "partition_rotation": 20.0}
    raw, scaled = divide(**changes), divide(standardize="training-clients", **changes)
    client = int(np.flatnonzero(raw.novel)[0])
    x, z = (fed.share(client).everything for fed in (raw, scaled))
    assert torch.allclose(z[:][0], (x[:][0] - z.mean) / z.std, atol=1e-5)
