"""Pictures of Pillow in a user's samples: as tensors, and whether their pixels have one reading."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PIXELS = ("1", "L", "LA", "RGB", "RGBA")  # modes of Pillow whose bands are channels
LOOKED_AT = 100  # samples whose pictures are looked at, at most


def is_picture(value: Any) -> bool:
    """Whether it is a picture of Pillow, which is not imported for it."""
    return hasattr(value, "getbands")


def are_pictures(values: Any) -> bool:
    """Whether it is a list of pictures, one for each sample."""
    return isinstance(values, list) and bool(values) and all(map(is_picture, values))


def of_picture(picture: Any) -> Tensor:
    """A picture of Pillow as (channels, height, width) in [0, 1]: as it is if it is grey, RGB or
    one of these with transparency, else converted to RGB. Raises ValueError for pixels of more than
    8 bits, whose range is unknown."""
    from torchvision.transforms.functional import to_tensor

    if picture.mode.startswith(("I", "F")):
        raise ValueError(
            f"a picture has pixels of more than 8 bits (mode {picture.mode}); give an array of its "
            "pixels in [0, 1], as np.asarray(picture) / 65535 of 16 bits"
        )
    pixels: Tensor = to_tensor(_of_known_mode(picture))
    return pixels


def of_pictures(pictures: Sequence[Any]) -> Tensor:
    """All pictures of a dataset as (n, channels, height, width) in [0, 1]. Raises ValueError as
    `of_picture` and `check_pixels`, and if their shapes differ."""
    tensors = [of_picture(picture) for picture in pictures]
    for number, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f"picture 0 has the shape {tuple(tensors[0].shape)}, picture {number} "
                f"{tuple(tensor.shape)}; give all pictures one size and one mode, as "
                'picture.convert("RGB").resize((64, 64))'
            )
    check_pixels([picture] for picture in pictures)
    return torch.stack(tensors)


def pictures_in(sample: Any) -> list[Any]:
    """The pictures that a sample holds, in their order; [] for a sample of other values."""
    if is_picture(sample):
        return [sample]
    parts: Iterable[Any] = ()
    if isinstance(sample, Mapping):
        parts = sample.values()
    elif isinstance(sample, tuple | list):
        parts = sample
    pictures: list[Any] = []
    for part in parts:
        pictures += pictures_in(part)
    return pictures


def check_pixels(samples: Iterable[Sequence[Any]]) -> None:
    """Raise ValueError if all pixels of the samples' pictures are 0 and 1, which may be truth
    values or nearly black bytes. Of several pictures in a sample each place counts by itself.

    It takes no further samples as soon as a pixel in each place is above 1."""
    with_ones: set[int] = set()
    decided: set[int] = set()
    for pictures in samples:
        for place, picture in enumerate(pictures):
            if place in decided:
                continue
            highest = _highest(picture)
            if picture.mode == "1" or highest > 1:
                decided.add(place)
            elif highest == 1:
                with_ones.add(place)
        if len(decided) == len(pictures):
            return
    if with_ones - decided:
        raise ValueError(
            "all pixels of the pictures are 0 and 1: truth values, or dark bytes; give arrays: "
            "np.asarray(picture, np.float32)[None] of truth values, the same / 255 of bytes"
        )


def _highest(picture: Any) -> float:
    """The highest value of the picture's pixels as it is stored; transparency does not count."""
    known = _of_known_mode(picture)
    bands = known.getbands()
    if len(bands) == 1:
        return float(known.getextrema()[1])
    by_band = dict(zip(bands, known.getextrema(), strict=True))
    return float(max(highest for band, (_, highest) in by_band.items() if band != "A"))


def _of_known_mode(picture: Any) -> Any:
    """The picture, in RGB if its bands are no channels: of a palette to_tensor gives the positions
    in it."""
    if picture.mode in PIXELS or picture.mode.startswith(("I", "F")):
        return picture
    return picture.convert("RGB")
