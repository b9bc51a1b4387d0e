"""Changes of clients after partitioning: rotation, corruption, subsampling, permuted labels.

Rotation: FedTTA, appendix F. Blurred or rotated novel clients: ODPFL-HN, section 6.8; novel clients
with fewer samples: section 7. Corruptions that training clients do not have: ATP, section 5."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedapps.common.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor


class Change:
    """The base class of changes, which changes nothing."""

    def rows(self, client: int, rows: np.ndarray) -> np.ndarray:
        """The rows that the client keeps; by default all."""
        return rows

    def inputs(self, client: int, x: "Tensor") -> "Tensor | None":
        """The changed inputs (n, *shape), as stored; None if they stay unchanged."""
        return None

    def labels(self, client: int, y: "Tensor") -> "Tensor | None":
        """The changed labels (n,); None if they stay unchanged."""
        return None

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The change, as attributes of the client."""
        return {}


def rotate(x: "Tensor", degrees: float, interpolation: str = "bilinear") -> "Tensor":
    """Images (n, C, H, W) rotated counterclockwise about their centre, zeros outside.

    `interpolation` is "bilinear", or "bicubic" as Pillow has it."""
    if interpolation == "bicubic":
        return _rotate_bicubic(x, degrees)
    from torchvision.transforms.v2 import InterpolationMode, functional

    return functional.rotate(x, degrees, interpolation=InterpolationMode.BILINEAR)


def _rotate_bicubic(x: "Tensor", degrees: float) -> "Tensor":
    import torch
    from PIL import Image

    planes = [Image.fromarray(plane) for plane in x.flatten(0, 1).numpy()]
    turned = [np.array(plane.rotate(degrees, Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(turned)).to(x.dtype).reshape(x.shape)


def blur(x: "Tensor", width: float) -> "Tensor":
    """Images (n, C, H, W) under a Gaussian of deviation `width` pixels, cut off beyond 3·width."""
    from torchvision.transforms.v2 import functional

    size = 2 * min(math.ceil(3 * width), min(x.shape[-2:]) - 1) + 1
    return functional.gaussian_blur(x, [size, size], [width, width])


class Rotation(Change):
    """Every client has one angle, drawn uniformly from its role's angles."""

    def __init__(
        self,
        novel: np.ndarray,
        angles: Sequence[float],
        novel_angles: Sequence[float],
        seed: int,
        interpolation: str = "bilinear",
    ) -> None:
        self._interpolation = interpolation
        generator = np.random.default_rng(seed_of(seed, "angles"))
        if_training = generator.choice(list(angles), len(novel))
        if_novel = generator.choice(list(novel_angles), len(novel))
        self.angles = np.where(novel, if_novel, if_training)  # degrees, counterclockwise

    def inputs(self, client: int, x: "Tensor") -> "Tensor | None":
        """Rotated by the client's angle."""
        return rotate(x, float(self.angles[client]), self._interpolation)

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The angle in degrees."""
        return {"angle": float(self.angles[client])}


class Corruption(Change):
    """Novel clients' inputs are blurred (`blur` in pixels), then rotated (`rotation`, degrees)."""

    def __init__(self, novel: np.ndarray, blur: float, rotation: float) -> None:
        if blur < 0:
            raise ValueError(f"partition.blur is {blur}; it must be at least 0")
        self._novel = novel
        self._width = blur
        self._degrees = rotation

    def inputs(self, client: int, x: "Tensor") -> "Tensor | None":
        """Corrupted if the client is novel."""
        if not self._novel[client] or not (self._width or self._degrees):
            return None
        if self._width:
            x = blur(x, self._width)
        if self._degrees:
            x = rotate(x, self._degrees)
        return x

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """Width and angle, 0 for training clients."""
        if not self._novel[client]:
            return {"blur": 0.0, "angle": 0.0}
        return {"blur": float(self._width), "angle": float(self._degrees)}


class Subsampling(Change):
    """Novel clients keep a random fraction of their samples. The samples kept with a smaller
    fraction are also kept with a larger one."""

    def __init__(self, novel: np.ndarray, keep_fraction: float, seed: int) -> None:
        if not 0 < keep_fraction <= 1:
            raise ValueError(f"partition.keep-fraction is {keep_fraction}; it must lie in (0, 1]")
        self._novel = novel
        self._fraction = keep_fraction
        self._seed = seed

    def rows(self, client: int, rows: np.ndarray) -> np.ndarray:
        """The first rows of a random order that does not depend on the fraction."""
        if not self._novel[client]:
            return rows
        generator = np.random.default_rng(seed_of(self._seed, "subsample", client))
        count = max(1, round(self._fraction * len(rows)))
        return generator.permutation(rows)[:count]

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The fraction of its samples that the client kept."""
        return {"kept": self._fraction if self._novel[client] else 1.0}


class PermutedLabels(Change):
    """Each novel client's labels are permuted by a random permutation σ of the classes."""

    def __init__(self, novel: np.ndarray, num_classes: int, seed: int) -> None:
        self._novel = novel
        self._num_classes = num_classes
        self._seed = seed

    def labels(self, client: int, y: "Tensor") -> "Tensor | None":
        """σ(y) of a novel client; unlabeled samples stay unlabeled."""
        if not self._novel[client]:
            return None
        import torch

        generator = np.random.default_rng(seed_of(self._seed, "permuted labels", client))
        permuted = torch.from_numpy(generator.permutation(self._num_classes))
        return torch.where(y < 0, y, permuted[y])

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """Whether its labels are permuted."""
        return {"permuted": int(self._novel[client])}
