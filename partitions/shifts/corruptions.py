"""Corruptions of images at severities 1 to 5 (Hendrycks and Dietterich, ICLR 2019).

The constants are those for 32×32 pixels in the code of ATP's authors. Departs from that code: a
client has one angle of motion and one fog; elastic distortion has no affine part, so its first
three severities are ours; contrast and brightness change each channel alike. `inversion` and
`background` are ours: they have no severity, and make other domains, as MNIST-M does with
photographs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedapps.common.seeds import seed_of
from partitions.shifts.changes import Change, blur

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
    alpha, width = (part * x.shape[-1] for part in strength)
    noise = 2 * torch.rand((len(x), 2, *x.shape[2:]), generator=generator) - 1
    return _moved(x, alpha * blur(noise, width).movedim(1, -1))


def inversion(x: Tensor, _: None, generator: Generator) -> Tensor:
    """1 − x."""
    return 1 - x


def background(x: Tensor, _: None, generator: Generator) -> Tensor:
    """|x − plasma|, another plasma for each image."""
    return (x - plasma(x, 2.0, generator)).abs()


def plasma(x: Tensor, decay: float, generator: Generator) -> Tensor:
    """Fields (n, 1, H, W) from 0 to 1: noise on grids of 2, 4, 8, … points a side, enlarged
    bilinearly and added; each finer grid is weaker by `decay`."""
    levels = math.ceil(math.log2(max(x.shape[2:])))
    grids = [torch.rand((len(x), 1, 2**k, 2**k), generator=generator) for k in range(1, levels + 1)]
    wide = [F.interpolate(g, x.shape[2:], mode="bilinear", align_corners=True) for g in grids]
    total = torch.stack([field / decay**k for k, field in enumerate(wide)]).sum(0)
    least, most = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - least) / (most - least)


def _grid(x: Tensor) -> Tensor:
    """The places (n, H, W, 2) of the pixels, (x, y) in [−1, 1]."""
    return F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)


def _moved(x: Tensor, pixels: Tensor) -> Tensor:
    """Each pixel takes the value `pixels` (…, 2) further, (x, y), bilinearly."""
    size = torch.tensor([x.shape[3], x.shape[2]])
    return _sampled(x, _grid(x) + 2 * pixels / size)


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


SMALLEST = 16  # pixels a side, from which the corruptions that move or merge pixels make sense
CORRUPTIONS: dict[str, tuple[Corrupt, tuple[Any, ...], int]] = {  # constants, pixels a side
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
    """Inputs in [0, 1] in the scale of stored ones, and as bytes where these are."""
    x = x * scale
    return x.round().to(dtype) if scale == 255 and dtype == torch.uint8 else x


class UnseenCorruptions(Change):
    """A client has one corruption of its role's list, which may hold "none", at one severity:
    `severity` or, with 0, one of 1 to 5. With `every` a novel client's corruption changes after so
    many samples.

    `scale` is the largest value of an input as stored. Raises ValueError for unknown corruptions,
    for one in both lists, and for one that needs larger images than `shape`."""

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
            if unknown := [name for name in names if name not in {"none", *CORRUPTIONS}]:
                known = ", ".join(["none", *CORRUPTIONS])
                raise ValueError(f"{key} names {unknown[0]!r}; known: {known}")
            for name in set(names) - {"none"}:
                least = CORRUPTIONS[name][2]
                if len(shape) != 3 or min(shape[1:]) < least:
                    raise ValueError(
                        f"{key} names {name!r}, which needs images of at least {least}×{least} "
                        f"pixels, not inputs of shape {shape}"
                    )
        if both := sorted({*lists[0]} & {*lists[1]} - {"none"}):
            raise ValueError(
                f"{keys[1]} names {both[0]!r}, and so does {keys[0]}; novel clients must have "
                "corruptions that no training client has"
            )
        self._novel, self._every, self._scale, self._seed = novel, every, scale, seed
        self._kinds, self._severities = [], []
        for client, role in enumerate(novel):
            generator = np.random.default_rng(seed_of(seed, "corruption", client))
            names = list(lists[int(role)]) or ["none"]
            self._kinds.append([names[i] for i in generator.permutation(len(names))])
            self._severities.append(severity or int(generator.integers(1, 6)))

    def inputs(self, client: int, x: Tensor) -> Tensor | None:
        """Corrupted, in random order of the list if the corruption changes."""
        stream = self._every if self._novel[client] else 0
        kinds = self._kinds[client] if stream else self._kinds[client][:1]
        if set(kinds) == {"none"} or not len(x):
            return None
        generator = torch.Generator().manual_seed(seed_of(self._seed, "corrupted", client))
        parts = []
        for number, part in enumerate((x.float() / self._scale).split(stream or len(x))):
            name = kinds[number % len(kinds)]
            clean = name == "none"
            parts.append(
                part if clean else corrupted(part, name, self._severities[client], generator)
            )
        return as_stored(torch.cat(parts), self._scale, x.dtype)

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The first corruption and its severity, 0 for none."""
        kind = self._kinds[client][0]
        return {"corruption": kind, "severity": (kind != "none") * self._severities[client]}
