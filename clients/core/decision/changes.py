"""Changes of inputs for played newcomers, each of random strength.

Images have thirteen in four families: noise, loss of detail, tone, geometry. They see images (n,
channels, H, W) in [0, 1]: each channel of the client's own samples is scaled to that range, and
values beyond it are cut. Columns of tables, and channels of signals, have three: noise, scale and
shift, in deviations of the client's samples.

A user's own change is a function ``change(x, draw)`` of such inputs, or of tokens (n, length),
named ``module:NAME``."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.decision.choice import names_in
from fedapps.common.external_code import is_reference, load
from fedapps.common.spelling import did_you_mean

Draw = np.random.Generator
Change = Callable[[Tensor, Draw], Tensor]
TINY = 1e-6  # a range or a deviation; a constant channel stays as it is


def noise_like(x: Tensor, draw: Draw) -> Tensor:
    """Standard normal values of x's shape."""
    values = draw.standard_normal(tuple(x.shape), dtype=np.float32)
    return torch.from_numpy(values).to(x.device)


def signed(draw: Draw, low: float, high: float) -> float:
    """A number whose absolute value is uniform in [low, high], of either sign."""
    return float(draw.choice((-1, 1)) * draw.uniform(low, high))


# Noise


def gaussian(x: Tensor, draw: Draw) -> Tensor:
    """x + σ ε."""
    return x + draw.uniform(0.05, 0.5) * noise_like(x, draw)


def salt(x: Tensor, draw: Draw) -> Tensor:
    """A share of the pixels becomes 0 or 1."""
    share = draw.uniform(0.02, 0.4)
    u = torch.from_numpy(draw.random(tuple(x.shape), dtype=np.float32)).to(x.device)
    return torch.where(u < share, (u < share / 2).to(x.dtype), x)


# Loss of detail


def blur(x: Tensor, draw: Draw) -> Tensor:
    """A Gaussian of deviation σ pixels, cut off beyond 3 σ."""
    sigma = draw.uniform(0.5, 2.0)
    radius = math.ceil(3 * sigma)
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    weights = (-(offsets**2) / (2 * sigma**2)).exp()
    weights = weights / weights.sum()
    channels = x.shape[1]
    x = F.pad(x, (radius, radius, radius, radius), mode="replicate")
    rows = weights.reshape(1, 1, 1, -1).repeat(channels, 1, 1, 1)
    columns = weights.reshape(1, 1, -1, 1).repeat(channels, 1, 1, 1)
    return F.conv2d(F.conv2d(x, rows, groups=channels), columns, groups=channels)


def occlusion(x: Tensor, draw: Draw) -> Tensor:
    """A rectangle, elsewhere in each image, becomes 0."""
    n, _, height, width = x.shape
    share = draw.uniform(0.2, 0.6)
    boxes = []
    for side in (height, width):
        length = max(1, round(share * side))
        start = torch.from_numpy(draw.integers(0, side - length + 1, n)).to(x.device)
        places = torch.arange(side, device=x.device)
        boxes.append((places >= start[:, None]) & (places < start[:, None] + length))
    rows, columns = boxes
    box = rows[:, None, :, None] & columns[:, None, None, :]
    return x.masked_fill(box, 0.0)


# Tone


def contrast(x: Tensor, draw: Draw) -> Tensor:
    """Distances to an image's mean, by channel, times a factor below 1."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + draw.uniform(0.15, 0.8) * (x - mean)


def brightness(x: Tensor, draw: Draw) -> Tensor:
    """x plus or minus a number."""
    return x + signed(draw, 0.1, 0.6)


def gamma(x: Tensor, draw: Draw) -> Tensor:
    """x^γ."""
    return x.clamp(0, 1) ** math.exp(signed(draw, 0.3, 1.5))


def inversion(x: Tensor, draw: Draw) -> Tensor:
    """(1 − s) x + s (1 − x)."""
    s = draw.uniform(0.6, 1.0)
    return (1 - s) * x + s * (1 - x)


def gradient(x: Tensor, draw: Draw) -> Tensor:
    """x plus a ramp across the image, in a random direction."""
    height, width = x.shape[2:]
    angle = draw.uniform(0, 2 * math.pi)
    rows = torch.linspace(-0.5, 0.5, height, device=x.device)[:, None] * math.sin(angle)
    columns = torch.linspace(-0.5, 0.5, width, device=x.device) * math.cos(angle)
    return x + draw.uniform(0.2, 0.8) * (rows + columns)


# Geometry


def moved(x: Tensor, matrix: list[list[float]]) -> Tensor:
    """Bilinear values at the coordinates that `matrix` (2, 3) gives, in [−1, 1]; 0 outside."""
    theta = torch.tensor(matrix, device=x.device, dtype=x.dtype).expand(len(x), 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def rotation(x: Tensor, draw: Draw) -> Tensor:
    """Turned about the centre."""
    angle = math.radians(signed(draw, 10, 60))
    c, s = math.cos(angle), math.sin(angle)
    return moved(x, [[c, -s, 0], [s, c, 0]])


def shift(x: Tensor, draw: Draw) -> Tensor:
    """Moved by a share of each side."""
    across, down = signed(draw, 0.05, 0.3), signed(draw, 0.05, 0.3)
    return moved(x, [[1, 0, 2 * across], [0, 1, 2 * down]])


def scale(x: Tensor, draw: Draw) -> Tensor:
    """Enlarged or reduced."""
    factor = math.exp(signed(draw, 0.1, 0.5))
    return moved(x, [[factor, 0, 0], [0, factor, 0]])


def shear(x: Tensor, draw: Draw) -> Tensor:
    """Slanted."""
    return moved(x, [[1, signed(draw, 0.1, 0.6), 0], [0, 1, 0]])


# Columns of tables (n, d) and channels of signals (n, channels, time), standardised


def _by_column(x: Tensor, values: np.ndarray) -> Tensor:
    """A value for each column or channel, in x's number of dimensions."""
    tensor = torch.from_numpy(values).to(x)
    return tensor.reshape(1, -1, *[1] * (x.ndim - 2))


def column_noise(x: Tensor, draw: Draw) -> Tensor:
    """x + σ ε."""
    return x + draw.uniform(0.1, 1.0) * noise_like(x, draw)


def column_scale(x: Tensor, draw: Draw) -> Tensor:
    """Each column times a factor around 1."""
    spread = draw.uniform(0.1, 1.0)
    return x * _by_column(x, np.exp(spread * draw.standard_normal(x.shape[1])))


def column_shift(x: Tensor, draw: Draw) -> Tensor:
    """Each column plus a number."""
    spread = draw.uniform(0.1, 1.5)
    return x + _by_column(x, spread * draw.standard_normal(x.shape[1]))


IMAGE_CHANGES: dict[str, Change] = {
    "gaussian": gaussian,
    "salt": salt,
    "blur": blur,
    "occlusion": occlusion,
    "contrast": contrast,
    "brightness": brightness,
    "gamma": gamma,
    "inversion": inversion,
    "gradient": gradient,
    "rotation": rotation,
    "shift": shift,
    "scale": scale,
    "shear": shear,
}
COLUMN_CHANGES: dict[str, Change] = {
    "column-noise": column_noise,
    "column-scale": column_scale,
    "column-shift": column_shift,
}
EVERY = ",".join(IMAGE_CHANGES | COLUMN_CHANGES)


def named_changes(names: str, num_dimensions: int, whole: bool = False) -> list[Change]:
    """The changes with these names, separated by commas, that inputs of a batch of so many
    dimensions have, and all that are ``module:NAME``, none twice. Inputs that are `whole` numbers,
    as tokens are, have these alone. Raises ValueError for an unknown name."""
    known = IMAGE_CHANGES | COLUMN_CHANGES
    fitting = _fitting(num_dimensions, whole)
    chosen: list[Change] = []
    for name in names_in(names):
        if is_reference(name):
            chosen.append(OwnChange(name))
        elif name not in known:
            raise ValueError(
                f"auto.changes names {name!r}{did_you_mean(name, known)}; known: "
                f"{', '.join(known)}, and module:NAME of a function of inputs and a generator"
            )
        elif name in fitting:
            chosen.append(known[name])
    return chosen


def left_out_changes(names: str, num_dimensions: int, whole: bool = False) -> list[str]:
    """Those of the names that `named_changes` leaves out; none of `EVERY`, the default."""
    if names == EVERY:
        return []
    fitting = _fitting(num_dimensions, whole)
    return [name for name in names_in(names) if not is_reference(name) and name not in fitting]


def _fitting(num_dimensions: int, whole: bool) -> dict[str, Change]:
    """The package's changes that such inputs may have."""
    if whole:
        return {}
    return IMAGE_CHANGES if num_dimensions == 4 else COLUMN_CHANGES


class OwnChange:
    """A function of the user's, ``change(x, draw)``: x (n, *shape) in the units above or tokens,
    `draw` a numpy generator. Raises ValueError for one that is no function."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._function = load(reference)
        if not callable(self._function):
            raise ValueError(
                f"auto.changes names {reference!r}, which is {self._function!r:.80}; it must be a "
                "function of inputs and a numpy generator"
            )

    def __call__(self, x: Tensor, draw: Draw) -> Tensor:
        """The changed inputs. Raises ValueError for others than finite ones of the same shape."""
        changed = self._function(x, draw)
        if not isinstance(changed, Tensor) or changed.shape != x.shape:
            given = f"a {type(changed).__name__}"
            if isinstance(changed, Tensor):
                given = f"the shape {tuple(changed.shape)}"
            raise ValueError(
                f"{self.reference} gives {given}; a change gives a tensor of the inputs' "
                f"shape {tuple(x.shape)}"
            )
        if changed.is_floating_point() and not x.is_floating_point():
            raise ValueError(decimals_of_tokens(self.reference))
        if not changed.isfinite().all():
            raise ValueError(f"{self.reference} gives numbers that are not finite")
        return changed.to(x)


def decimals_of_tokens(reference: str) -> str:
    """The sentence that refuses a user's change which makes decimals of tokens."""
    return f"{reference} gives decimals; a change of tokens gives tokens"


class Changer:
    """Applies changes in the units of the client's samples x (n, *shape). Those that are `whole`
    numbers, as tokens are, have no unit."""

    def __init__(self, x: Tensor, whole: bool = False) -> None:
        self.is_image = x.ndim == 4
        self.is_whole = whole
        if self.is_whole:
            return
        others = [0, *range(2, x.ndim)]
        if self.is_image:
            self.start = x.amin(others, keepdim=True)
            self.unit = (x.amax(others, keepdim=True) - self.start).clamp(min=TINY)
        else:
            self.start = x.mean(others, keepdim=True)
            self.unit = x.std(others, keepdim=True, correction=0).clamp(min=TINY)

    def __call__(self, change: Change, x: Tensor, draw: Draw) -> Tensor:
        """The changed inputs; pixels stay in their range."""
        if self.is_whole:
            return change(x.clone(), draw)  # it may change them in place
        changed = change((x - self.start) / self.unit, draw)
        if self.is_image:
            changed = changed.clamp(0, 1)
        return changed * self.unit + self.start
