"""Omniglot (Lake et al., 2015): folders `images_background` and `images_evaluation`, or their zips.

1 623 characters of 50 alphabets, 20 drawings each, 105×105. Scaled to 28×28 by area and inverted,
so that ink is 1 as in MNIST (ours: the papers do not say)."""

import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from partitions.datasets.readers.raw import Raw

HALVES = ("images_background", "images_evaluation")
SIZE = 28


def read_omniglot(folder: Path) -> Raw | None:
    """Images (n, 1, 28, 28), a class for each character, column "alphabet"."""
    from PIL import Image, UnidentifiedImageError

    x = []
    names = []
    alphabets = []
    for name, data in _drawings(folder):
        alphabet, character = name.split("/")[-3:-1]
        try:
            image = Image.open(BytesIO(data)).convert("L")
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{folder}: {name} is truncated or no image: {error}") from error
        x.append(255 - np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX)))
        names.append(f"{alphabet}/{character}")
        alphabets.append(alphabet)
    if not x:
        return None
    classes, y = np.unique(names, return_inverse=True)
    columns = {"alphabet": np.array(alphabets)}
    return Raw(np.stack(x)[:, None], y.astype(np.int64), len(y), columns, tuple(map(str, classes)))


def _drawings(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Path `…/alphabet/character/drawing.png` and content of every drawing, in order."""
    for half in HALVES:
        places = (folder, folder / "omniglot-py")
        unpacked = [place for place in places if (place / half).is_dir()]
        if unpacked:
            place = unpacked[0]
            for path in sorted((place / half).glob("*/*/*.png")):
                yield path.relative_to(place).as_posix(), path.read_bytes()
            continue
        for place in places:
            archive = place / f"{half}.zip"
            if archive.is_file():
                yield from _packed_drawings(archive)


def _packed_drawings(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of every drawing in a zip, in order. Raises ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(archive) as packed:
            for name in sorted(packed.namelist()):
                if name.endswith(".png"):
                    yield name, packed.read(name)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is truncated or no zip: {error}") from error
