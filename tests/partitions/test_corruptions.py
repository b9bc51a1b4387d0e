"""Each corruption against its formula, and who gets which: training clients' are no novel ones'."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedapps.settings.config import defaults
from partitions import federation
from partitions.datasets.loading import Dataset, Info
from partitions.shifts.changes import blur
from partitions.shifts.corruptions import (
    CORRUPTIONS,
    UnseenCorruptions,
    corrupted,
    elastic,
    fog,
    motion_blur,
    pixelate,
)


def bytes_of(n):
    """Random images of bytes, 28×28, the left half dark."""
    x = np.random.default_rng(5).integers(0, 256, (n, 1, 28, 28), dtype=np.uint8)
    x[..., :14] //= 4
    info = Info("bytes", (1, 28, 28), 2, "")
    return Dataset(info, torch.from_numpy(x), torch.arange(n) % 2, n, {})


def drawn(seed=3):
    return torch.Generator().manual_seed(seed)


def test_what_draws_nothing():
    """The mean of 0, 0.2, 0.4, 1 is 0.4; half of each distance to it: 0.2, 0.3, 0.4, 0.7. A second
    image has its own mean. 0.15 more of 1 is cut off."""
    x = torch.tensor([[[[0.0, 0.2], [0.4, 1.0]]], [[[0.0, 0.0], [0.0, 0.4]]]])
    expected = {
        ("contrast", 2): [[[[0.2, 0.3], [0.4, 0.7]]], [[[0.05, 0.05], [0.05, 0.25]]]],
        ("brightness", 3): [[[[0.15, 0.35], [0.55, 1.0]]], [[[0.15, 0.15], [0.15, 0.55]]]],
        ("inversion", 4): [[[[1.0, 0.8], [0.6, 0.0]]], [[[1.0, 1.0], [1.0, 0.6]]]],
    }
    for (name, severity), values in expected.items():
        torch.testing.assert_close(corrupted(x, name, severity, drawn()), torch.tensor(values))
    wide = torch.rand(2, 1, 20, 17, generator=drawn())
    torch.testing.assert_close(corrupted(wide, "blur", 3, drawn()), blur(wide, 0.7))


@pytest.mark.parametrize(
    ("name", "severity", "level", "mean", "deviation"),
    [  # σ; √(x/c); pixels of x that stay, 0 and 1; x·σ
        ("gaussian-noise", 3, 0.5, 0.5, 0.08),
        ("shot-noise", 4, 0.3, 0.3, (0.3 / 75) ** 0.5),
        ("impulse-noise", 5, 0.25, 0.25 + 0.035 * 0.75 - 0.035 * 0.25, None),
        ("speckle-noise", 2, 0.4, 0.4, 0.04),
    ],
)
def test_the_noises_have_their_means_and_deviations(name, severity, level, mean, deviation):
    x = torch.full((40, 1, 50, 50), level)
    y = corrupted(x, name, severity, drawn())
    assert float(y.mean()) == pytest.approx(mean, abs=0.002)
    if deviation is not None:
        assert float(y.std()) == pytest.approx(deviation, rel=0.02)
    else:
        assert float((y == 0).float().mean()) == pytest.approx(0.035, rel=0.05)
        assert float((y == 1).float().mean()) == pytest.approx(0.035, rel=0.05)
    assert not torch.equal(y[0], y[1])  # each image has its own noise
    black = corrupted(torch.zeros(1, 1, 9, 9), name, severity, drawn())
    assert (name in ("shot-noise", "speckle-noise")) == (not black.any())


def test_pixelation_averages_and_enlarges():
    """A side of 4 halved: the means of the blocks of four, 2.5, 0.5, 5, and 9 of a lone 36."""
    x = torch.tensor([[1.0, 2, 0, 0], [3, 4, 2, 0], [5, 5, 0, 0], [5, 5, 0, 36]])[None, None]
    got = pixelate(x, 0.5, drawn())[0, 0]
    assert got.tolist() == [[2.5, 2.5, 0.5, 0.5]] * 2 + [[5.0, 5.0, 9.0, 9.0]] * 2


def test_motion_smears_along_one_angle():
    """A point moves on the mean by m = Σ d·w_d / Σ w_d: along the angle, which points upwards for
    positive degrees."""
    x = torch.zeros(1, 1, 31, 31)
    x[0, 0, 15, 15] = 1.0
    weights = torch.tensor([math.exp(-(d**2) / (2 * 1.5**2)) for d in range(7)])
    m = float((weights * torch.arange(7)).sum() / weights.sum())
    angle = math.radians(float(torch.rand((), generator=drawn())) * 90 - 45)
    got = motion_blur(x, (6, 1.5), drawn())[0, 0]
    place = torch.arange(31) - 15.0
    assert float(got.sum()) == pytest.approx(1, abs=1e-4)
    centre = float((got.sum(0) * place).sum()), float(-(got.sum(1) * place).sum())
    assert centre == pytest.approx((m * math.cos(angle), m * math.sin(angle)), abs=1e-3)


def test_zoom_of_a_ramp():
    """A zoom by z of a ramp a·u about the centre is a·u/z, here averaged over 1 and 1, …, 1.1."""
    u = (torch.arange(20) - 9.5) / 100
    ramp = (0.5 + u).expand(1, 1, 20, 20)
    factor = (1 + sum(1 / (1 + k / 100) for k in range(11))) / 12
    got = corrupted(ramp, "zoom-blur", 2, drawn())[0, 0, 7]
    torch.testing.assert_close(got, 0.5 + u * factor)


def test_fog_and_background():
    """Of 0.5 everywhere fog makes (0.5 + c·p)·0.5/(0.5 + c): for p from 0 to 1 and c = 1.5, from
    0.125 to 0.5. A background p makes 1 − p of white and p of black."""
    grey = torch.full((3, 1, 28, 20), 0.5)
    got = fog(grey, (1.5, 1.75), drawn())
    assert (float(got.min()), float(got.max())) == pytest.approx((0.125, 0.5))
    assert torch.equal(got[0], got[2])  # one fog for a client
    white, black = (corrupted(torch.full_like(grey, v), "background", 1, drawn()) for v in (1, 0))
    torch.testing.assert_close(white + black, torch.ones_like(grey))
    assert not torch.equal(black[0], black[1])
    assert (float(black[1].min()), float(black[1].max())) == pytest.approx((0, 1))


def test_elastic_moves_pixels_by_smoothed_noise():
    """A ramp x = u/100 rises by dx/100 where its pixels come from dx further right."""
    ramp = (torch.arange(24) / 100).expand(2, 1, 24, 24)
    noise = 2 * torch.rand((2, 2, 24, 24), generator=drawn()) - 1
    dx = 0.1 * 24 * blur(noise, 0.05 * 24)[:, 0]
    got = 100 * (elastic(ramp, (0.1, 0.05), drawn()) - ramp)[:, 0]
    torch.testing.assert_close(got[:, 3:-3, 3:-3], dx[:, 3:-3, 3:-3], atol=1e-3, rtol=0)
    assert dx.abs().max() > 0.3


def test_severities_get_worse_and_keep_the_range():
    """Farther from the image at severity 5 than at 1, and in [0, 1]."""
    x = bytes_of(6).x.float() / 255
    for name, (_, constants, _) in CORRUPTIONS.items():
        assert len(constants) == 5
        first, last = (corrupted(x, name, severity, drawn()) for severity in (1, 5))
        assert 0 <= float(last.min()) <= float(last.max()) <= 1
        worse = F.mse_loss(last, x) > F.mse_loss(first, x)
        assert bool(worse) == (constants[0] != constants[4]), name


NOISY = {"partition_corruptions": "contrast,shot-noise", "partition_novel_corruptions": "inversion"}


def test_novel_clients_have_other_corruptions_than_training_clients(divide):
    """Any partition takes them; the labels and the rows stay."""
    plain = divide(partition="dirichlet", partition_alpha=5.0, num_clients=12)
    fed = divide(partition="dirichlet", partition_alpha=5.0, num_clients=12, **NOISY)
    kinds = {True: set(), False: set()}
    for client in range(12):
        mine, clean = fed.share(client), plain.share(client)
        kinds[mine.novel].add(mine.attributes["corruption"])
        assert 1 <= mine.attributes["severity"] <= 5
        assert torch.equal(mine.everything[:][1], clean.everything[:][1])
        if mine.novel:
            torch.testing.assert_close(mine.everything[:][0], 1 - clean.everything[:][0])
        else:
            assert not torch.equal(mine.train[:][0], clean.train[:][0])
            assert len(mine.train) == len(clean.train)
    assert kinds == {True: {"inversion"}, False: {"contrast", "shot-noise"}}


def test_seed_and_client_decide(divide):
    def inputs(seed, client):
        fed = divide(partition="iid", data_seed=0, seed=seed, num_clients=4, partition_severity=5,
                     partition_corruptions="gaussian-noise", train_fraction=1.0)  # fmt: skip
        share = fed.share(client)
        assert share.attributes["severity"] == 5
        return share.everything[:][0]

    assert torch.equal(inputs(1, 2), inputs(1, 2))
    assert not torch.equal(inputs(1, 2), inputs(2, 2))
    noises = [inputs(1, client)[:5, 0, 0, 0] for client in (0, 1)]  # a corner, always 0, has noise
    assert not torch.equal(*noises)


def test_a_stream_changes_its_corruption(divide):
    """Samples 0 … 19, 20 … 39, … of a novel client: inverted, clean, inverted, or the other way."""
    stream = {"partition_novel_corruptions": "inversion,none", "partition_corruption_every": 20}
    fed, plain = (divide(partition="iid", num_clients=20, **how) for how in (stream, {}))
    firsts = set()
    for client in map(int, np.flatnonzero(fed.novel)):
        share = fed.share(client)
        x, clean = share.everything[:][0], plain.share(client).everything[:][0]
        inverted = torch.isclose(x, 1 - clean).all((1, 2, 3))
        first = share.attributes["corruption"] == "inversion"
        assert inverted.tolist() == [(i // 20 % 2 == 0) == first for i in range(len(x))]
        firsts.add(first)
    assert firsts == {True, False}


def test_bytes_stay_bytes():
    """Brightness 0.2 adds 51, up to 255."""
    novel = np.array([False, True])
    x = bytes_of(3).x
    change = UnseenCorruptions(novel, ([], ["brightness"]), 4, 0, (1, 28, 28), 255.0, 0)
    assert change.inputs(0, x) is None
    got = change.inputs(1, x)
    assert got.dtype == torch.uint8
    assert torch.equal(got.int(), (x.int() + 51).clamp(max=255))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_corruptions": "fgo"}, "partition.corruptions names 'fgo'; known: none, gauss"),
        (
            {"partition_corruptions": "contrast,none",
             "partition_novel_corruptions": "none,contrast"},
            "novel-corruptions names 'contrast', and so does partition.corruptions",
        ),
        ({"partition_novel_corruptions": "fog"}, r"'fog', which needs .* 16×16 pixels, .*8"),
        ({"partition": "preference", "partition_permuted_labels": True}, "takes neither"),
        ({"partition": "preference", "partition_test_shift": "mixture"}, "takes neither"),
    ],
)  # fmt: skip
def test_impossible_corruptions_are_refused(changes, message):
    named = {k.replace("_", "-").replace("partition-", "partition."): v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        federation(defaults() | named)


def test_only_novel_labels_are_permuted(divide):
    """By a permutation for each client: equal labels stay equal, different ones different."""
    fed, plain = (
        divide(partition="iid", num_clients=8, partition_permuted_labels=on) for on in (True, False)
    )
    seen = set()
    for client in range(8):
        mine, true = (f.share(client) for f in (fed, plain))
        assert torch.equal(mine.everything[:][0], true.everything[:][0])
        y, was = mine.everything[:][1], true.everything[:][1]
        if not mine.novel:
            assert torch.equal(y, was) and torch.equal(mine.validation[:][1], true.validation[:][1])
            continue
        pairs = set(zip(was.tolist(), y.tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) == 10
        seen.add(tuple(sorted(pairs)))
    assert len(seen) == 4
