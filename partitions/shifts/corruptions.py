"""Corruptions of images at severities 1 to 5 (Hendrycks and Dietterich, ICLR 2019).

The constants are those for 32×32 pixels in the code of ATP's authors. Departs from that code: all
images of a client have the same angle of motion and the same fog; elastic distortion has no affine
part, so its first three severities are ours; contrast and brightness treat all channels alike.
`inversion` and `background` are ours. They have no severity, and create other domains, as MNIST-M
does with photographs."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedapps.common.seeds import seed_of
from partitions.rules.mixed import ALPHA, KEY, NONE, ROTATION, number_of
from partitions.shifts.changes import Change, blur, rotate

Corrupt = Callable[[Tensor, Any, Generator], Tensor]


def gaussian_noise(x: Tensor, sigma: float, generator: Generator) -> Tensor:
    """x + σε."""
    return x + sigma * torch.randn(x.shape, generator=generator)


def shot_noise(x: Tensor, c: float, generator: Generator) -> Tensor:
    """Poisson(c·x) / c."""
    return torch.poisson(c * x, generator=generator) / c


def impulse_noise(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Half of a `share` of the pixels becomes 0, the other half 1."""
    u = torch.rand(x.shape, generator=generator)
    return torch.where(u < share, (u < share / 2).to(x.dtype), x)


def speckle_noise(x: Tensor, sigma: float, generator: Generator) -> Tensor:
    """x + x·σε."""
    return x + x * sigma * torch.randn(x.shape, generator=generator)


def contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    """Distances to an image's mean, by channel, times `factor`."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def brightness(x: Tensor, more: float, generator: Generator) -> Tensor:
    """x + `more`."""
    return x + more


def gaussian_blur(x: Tensor, width: float, generator: Generator) -> Tensor:
    """A Gaussian of deviation `width` pixels."""
    return blur(x, width)


def pixelate(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Reduced to this share of the pixels of a side, and enlarged by the nearest pixel."""
    size = [int(side * share) for side in x.shape[2:]]
    return F.interpolate(F.interpolate(x, size, mode="area"), x.shape[2:], mode="nearest-exact")


def motion_blur(x: Tensor, motion: tuple[int, float], generator: Generator) -> Tensor:
    """Weights exp(−d²/2σ²) of the pixels d = 0 … radius behind, along one angle in ±45°."""
    radius, sigma = motion
    angle = math.radians(float(torch.rand((), generator=generator)) * 90 - 45)
    d = torch.arange(radius + 1)
    weights = (-(d**2) / (2 * sigma**2)).exp()
    step = torch.tensor([math.cos(angle), -math.sin(angle)])  # counterclockwise, y downwards
    behind = [_moved(x, -distance * step) for distance in d.tolist()]
    return torch.einsum("d,dnchw->nchw", weights / weights.sum(), torch.stack(behind))


def zoom_blur(x: Tensor, most: float, generator: Generator) -> Tensor:
    """The mean of x and of its zooms by 1, 1.01, … `most`."""
    zooms = torch.arange(1, most + 0.005, 0.01).tolist()
    return torch.stack([x, *(_sampled(x, _grid(x) / zoom) for zoom in zooms)]).mean(0)


def fog(x: Tensor, density: tuple[float, float], generator: Generator) -> Tensor:
    """(x + c·plasma)·m / (m + c), m the largest value of an image."""
    c, decay = density
    most = x.amax((1, 2, 3), keepdim=True)
    return (x + c * plasma(x, decay, generator)[:1]) * most / (most + c)


def elastic(x: Tensor, strength: tuple[float, float], generator: Generator) -> Tensor:
    """Pixels moved by uniform noise in ±α, smoothed by a Gaussian; both in shares of a side."""
    alpha = strength[0] * x.shape[-1]
    width = strength[1] * x.shape[-1]
    noise = 2 * torch.rand((len(x), 2, *x.shape[2:]), generator=generator) - 1
    return _moved(x, alpha * blur(noise, width).movedim(1, -1))


def inversion(x: Tensor, _: None, generator: Generator) -> Tensor:
    """1 − x."""
    return 1 - x


def background(x: Tensor, _: None, generator: Generator) -> Tensor:
    """|x − plasma|, another plasma for each image."""
    return (x - plasma(x, 2.0, generator)).abs()


def plasma(x: Tensor, decay: float, generator: Generator) -> Tensor:
    """Random fields (n, 1, H, W) with values from 0 to 1: the sum of noise on grids of 2, 4, 8, …
    points a side, enlarged bilinearly. Each grid is weaker than the one before by `decay`."""
    levels = math.ceil(math.log2(max(x.shape[2:])))
    fields = []
    for level in range(levels):
        side = 2 ** (level + 1)
        grid = torch.rand((len(x), 1, side, side), generator=generator)
        field = F.interpolate(grid, x.shape[2:], mode="bilinear", align_corners=True)
        fields.append(field / decay**level)
    total = torch.stack(fields).sum(0)
    minimum = total.amin((2, 3), keepdim=True)
    maximum = total.amax((2, 3), keepdim=True)
    return (total - minimum) / (maximum - minimum)


def _grid(x: Tensor) -> Tensor:
    """The coordinates (n, H, W, 2) of the pixels, (x, y) in [−1, 1]."""
    return F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)


def _moved(x: Tensor, pixels: Tensor) -> Tensor:
    """Each pixel gets the bilinear value at an offset of `pixels` (…, 2), in the order (x, y)."""
    size = torch.tensor([x.shape[3], x.shape[2]])
    return _sampled(x, _grid(x) + 2 * pixels / size)


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


SMALLEST = 16  # minimum side in pixels for corruptions that move or merge pixels
# name → function, its constant at severities 1 to 5, minimum side of an image in pixels
CORRUPTIONS: dict[str, tuple[Corrupt, tuple[Any, ...], int]] = {
    "gaussian-noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), 1),
    "shot-noise": (shot_noise, (500, 250, 100, 75, 50), 1),
    "impulse-noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), 1),
    "speckle-noise": (speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2), 1),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15), 1),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3), 1),
    "inversion": (inversion, (None,) * 5, 1),
    "blur": (gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1), SMALLEST),
    "pixelate": (pixelate, (0.95, 0.9, 0.85, 0.75, 0.65), SMALLEST),
    "motion-blur": (motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)), SMALLEST),
    "zoom-blur": (zoom_blur, (1.05, 1.1, 1.15, 1.2, 1.25), SMALLEST),
    "fog": (fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)), SMALLEST),
    "elastic": (
        elastic, ((0.05, 0.06), (0.08, 0.06), (0.1, 0.05), (0.1, 0.04), (0.1, 0.03)), SMALLEST
    ),
    "background": (background, (None,) * 5, SMALLEST),
}  # fmt: skip


def corrupted(x: Tensor, name: str, severity: int, generator: Generator) -> Tensor:
    """Images x (n, C, H, W) in [0, 1] under the corruption, cut off to [0, 1]."""
    corrupt, constants, _ = CORRUPTIONS[name]
    return corrupt(x, constants[severity - 1], generator).clamp(0, 1)


def as_stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Inputs in [0, 1], multiplied by the dataset's `scale`, as bytes if it stores bytes."""
    x = x * scale
    if scale == 255 and dtype == torch.uint8:
        return x.round().to(dtype)
    return x


def check_corruption(key: str, name: str, known: Iterable[str], shape: tuple[int, ...]) -> None:
    """Raise ValueError, by the option's key, unless `name` is a corruption that images of this
    shape can have; `known` are the names beside the corruptions."""
    if name not in CORRUPTIONS:
        choices = ", ".join([*known, *CORRUPTIONS])
        raise ValueError(f"{key} names {name!r}; known: {choices}")
    min_side = CORRUPTIONS[name][2]
    if len(shape) != 3 or min(shape[1:]) < min_side:
        raise ValueError(
            f"{key} names {name!r}, which needs images of at least "
            f"{min_side}×{min_side} pixels, not inputs of shape {shape}"
        )


class UnseenCorruptions(Change):
    """Each client has one corruption from the list of its role, at one severity.

    `lists` are those of training and of novel clients; the entry "none" means uncorrupted.
    `severity` 0 draws one of 1 to 5 for each client. With `every` > 0, a novel client's corruption
    changes after this number of samples. `scale` is the largest value of an input as stored. Raises
    ValueError for unknown corruptions, for a corruption in both lists, and for a corruption that
    needs larger images than `shape`."""

    def __init__(
        self,
        novel: np.ndarray,
        lists: tuple[Sequence[str], Sequence[str]],
        severity: int,
        every: int,
        shape: tuple[int, ...],
        scale: float,
        seed: int,
    ) -> None:
        keys = ("partition.corruptions", "partition.novel-corruptions")
        for key, names in zip(keys, lists, strict=True):
            for name in names:
                if name != NONE:
                    check_corruption(key, name, [NONE], shape)
        in_both = sorted({*lists[0]} & {*lists[1]} - {NONE})
        if in_both:
            raise ValueError(
                f"{keys[1]} names {in_both[0]!r}, and so does {keys[0]}; novel clients must have "
                "corruptions that no training client has"
            )
        self._novel = novel
        self._every = every
        self._scale = scale
        self._seed = seed
        self._kinds: list[list[str]] = []  # of each client, in the order in which they are applied
        self._severities: list[int] = []
        for client, is_novel in enumerate(novel):
            generator = np.random.default_rng(seed_of(seed, "corruption", client))
            names = list(lists[int(is_novel)]) or [NONE]
            order = generator.permutation(len(names))
            self._kinds.append([names[i] for i in order])
            # Drawn after the order, so that a fixed severity leaves the kinds as they are.
            self._severities.append(severity or int(generator.integers(1, 6)))

    def inputs(self, client: int, x: Tensor) -> Tensor | None:
        """The corrupted inputs; None for a client without a corruption."""
        kinds = self._kinds[client][:1]
        part_size = len(x)
        if self._every and self._novel[client]:
            kinds = self._kinds[client]
            part_size = self._every
        if set(kinds) == {NONE} or not len(x):
            return None
        severity = self._severities[client]
        generator = torch.Generator().manual_seed(seed_of(self._seed, "corrupted", client))
        parts = []
        for number, part in enumerate((x.float() / self._scale).split(part_size)):
            name = kinds[number % len(kinds)]
            if name == NONE:
                parts.append(part)
            else:
                parts.append(corrupted(part, name, severity, generator))
        return as_stored(torch.cat(parts), self._scale, x.dtype)

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The first corruption and its severity, 0 for none."""
        kind = self._kinds[client][0]
        severity = 0 if kind == NONE else self._severities[client]
        return {"corruption": kind, "severity": severity}


class MixedShifts(Change):
    """The inputs of each client, by the name of its shift in `shifts` (see
    `partitions.rules.mixed`): rotated, corrupted, or unchanged.

    `severity` 0 draws one of 1 to 5 for each client. `scale` is the largest value of an input as
    stored. Raises ValueError for an unknown shift, and for one that needs larger images than
    `shape`."""

    def __init__(
        self,
        shifts: Sequence[str],
        severity: int,
        shape: tuple[int, ...],
        scale: float,
        seed: int,
    ) -> None:
        self._shifts = shifts
        self._scale = scale
        self._seed = seed
        self._degrees: dict[str, float] = {}  # by shift
        for name in dict.fromkeys(shifts):
            degrees = number_of(name, ROTATION)
            if degrees is not None:
                if len(shape) != 3:
                    raise ValueError(f"{KEY} names {name!r}; inputs of shape {shape} are no images")
                self._degrees[name] = degrees
            elif name != NONE and number_of(name, ALPHA) is None:
                check_corruption(KEY, name, [NONE, f"{ALPHA}A", f"{ROTATION}D"], shape)
        self._severities = []
        for client in range(len(shifts)):
            generator = np.random.default_rng(seed_of(seed, "severity", client))
            self._severities.append(severity or int(generator.integers(1, 6)))

    def inputs(self, client: int, x: Tensor) -> Tensor | None:
        """The changed inputs; None for a client whose classes alone are shifted."""
        name = self._shifts[client]
        if name in self._degrees:
            return rotate(x, self._degrees[name])
        if name not in CORRUPTIONS or not len(x):
            return None
        generator = torch.Generator().manual_seed(seed_of(self._seed, "corrupted", client))
        images = corrupted(x.float() / self._scale, name, self._severities[client], generator)
        return as_stored(images, self._scale, x.dtype)

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The shift, and the severity of a corruption."""
        name = self._shifts[client]
        if name not in CORRUPTIONS:
            return {"shift": name}
        return {"shift": name, "severity": self._severities[client]}
