"""A folder of class folders of images (torchvision's ImageFolder), with ``train`` and ``test``
folders or without.

Images become uint8 (C, H, W), C = 1 where all of them are grey, else 3."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedapps.common.memory_limits import check_size
from partitions.datasets.readers.convert import joined
from partitions.datasets.readers.raw import UNLABELED, Raw

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # Pillow reads EPS by Ghostscript
GREY = ("1", "L", "LA")
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
TRAIN, TEST = ("train", "training"), ("test", "val", "validation")  # folders


def read_pictures(folder: Path, size: int) -> Raw:
    """The images of the folder, or of its ``train`` and ``test`` folders; what is left out is
    noted."""
    train = _first(folder, TRAIN)
    if train is None:
        raw = _class_folders(folder, size, True)
        return raw.noted(*_unread(folder, folder))
    test = _first(folder, TEST)
    places = [train] if test is None else [train, test]
    parts = [_class_folders(place, size, place == train) for place in places]
    if len({part.classes for part in parts}) > 1:
        differing = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise ValueError(
            f"{train} and {test} hold different class folders; only one of them has "
            f"{', '.join(differing)}; give both the same folders, which may be empty"
        )
    others = [f.name for f in _folders(folder) if f not in places]
    notes = [note for place in places for note in _unread(place, folder)]
    if others:
        beside = " and ".join(place.name for place in places)
        notes.append(f"{folder}: folders beside {beside} are left out: {', '.join(others)}")
    return joined(parts, folder).noted(*notes)


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of the names that is a folder in `folder`."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _folders(folder: Path) -> list[Path]:
    """The folders in `folder` but hidden ones, which programs make."""
    hidden = (".", "__MACOSX")
    return [f for f in sorted(folder.iterdir()) if f.is_dir() and not f.name.startswith(hidden)]


def _class_folders(folder: Path, size: int, train: bool) -> Raw:
    """ImageFolder's rule: a class is a folder, in alphabetical order, and holds images at any
    depth. Links as in `_is_new`."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    root, visited = folder.resolve(), set[Path]()
    folders = [f for f in _folders(folder) if _is_new(f, root, visited)]
    classes = tuple(f.name for f in folders)
    if folders:
        files = [(f, i) for i, at in enumerate(folders) for f in _walk(at, root, visited)]
    else:
        files = [(str(f), UNLABELED) for f in sorted(folder.iterdir())]
    files = [(name, label) for name, label in files if name.lower().endswith(IMG_EXTENSIONS)]
    if not files:
        raise ValueError(
            f"{folder} holds no images; it may hold one folder of images for each class, or be a "
            "folder of the datasets library (save_to_disk or parquet)"
        )
    notes: list[str] = []
    x = images([(name, name) for name, _ in files], size, notes)
    labels = np.array([label for _, label in files])
    samples = tuple(Path(name).relative_to(folder).as_posix() for name, _ in files)
    num_train = len(x) if train else 0
    return Raw(x, labels, num_train, {}, classes, samples, tuple(notes), labeled=bool(folders))


def _unread(folder: Path, source: Path) -> list[str]:
    """What the folder holds beside the images that are read."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = _folders(folder)
    others: list[str] = []
    for place in [folder, *classes]:
        files = place.rglob("*") if place != folder else place.iterdir()
        for file in files:
            if not file.is_file() or file.name.startswith(".") or file.name == "Thumbs.db":
                continue
            is_image = file.name.lower().endswith(IMG_EXTENSIONS)
            if not is_image or (place == folder and classes):
                others.append(file.relative_to(source).as_posix())
    if not others:
        return []
    return [
        f"{source}: {len(others)} files are left out, such as {min(others)}; images "
        f"({', '.join(IMG_EXTENSIONS)}) in a folder for each class are read"
    ]


def _walk(folder: Path, root: Path, visited: set[Path]) -> list[str]:
    """The files at any depth below `folder`, in ImageFolder's order."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [f for f in sorted(folders) if _is_new(Path(place, f), root, visited)]
        found.append((place, sorted(names)))
    return [os.path.join(place, name) for place, names in sorted(found) for name in names]


def _is_new(folder: Path, root: Path, visited: set[Path]) -> bool:
    """Whether `folder` is to be read: it is not `visited` yet, and is no link into the data at
    `root`, which are read anyway, or to a folder that contains them."""
    target = folder.resolve()
    inside = target.is_relative_to(root) or root.is_relative_to(target)
    if target in visited or (folder.is_symlink() and inside):
        return False
    visited.add(target)
    return True


def _open(name: str, file: str | io.BytesIO) -> tuple[Image.Image, int]:
    """The first frame of an image file, and the number of its frames."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            frames = getattr(picture, "n_frames", 1)
            if frames > 1:
                picture.seek(0)  # counting them moved it
            picture.load()
    except Exception as error:  # whatever damaged bytes raise in Pillow
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is empty, damaged or none of {', '.join(FORMATS)}" if unknown else error
        raise ValueError(f"{name} is no whole image ({reason})") from error
    if picture.mode.startswith(("I", "F")):  # Pillow would clip them at 255
        raise ValueError(
            f"{name} has pixels of more than 8 bits (mode {picture.mode}); save it with 8 bits"
        )
    return picture, frames


def images(
    files: Sequence[tuple[str, str | io.BytesIO]], size: int, notes: list[str]
) -> np.ndarray:
    """(n, C, H, W) uint8 of image files with their names, for errors and notes."""
    arrays: list[np.ndarray] = []
    several_frames: list[str] = []
    transparent: list[str] = []
    for name, file in files:
        picture, frames = _open(name, file)
        if frames > 1:
            several_frames.append(name)
        if picture.mode in ALPHA or "transparency" in picture.info:
            transparent.append(name)
        if not arrays:  # all become as large as the first
            pixels = size**2 if size else picture.width * picture.height
            check_size(3 * len(files) * pixels, f"{name} with {len(files) - 1} more images")
        grey = picture.mode in GREY
        image = picture.convert("L" if grey else "RGB")
        image = ImageOps.fit(image, (size, size)) if size else image
        array = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        if arrays and array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"{name} has {array.shape[2]}×{array.shape[1]} pixels, the first image "
                f"{arrays[0].shape[2]}×{arrays[0].shape[1]}; image-size=32 makes all 32×32"
            )
        arrays.append(array)
    for names, what in ((several_frames, "frames but the first"), (transparent, "transparency")):
        if names:
            notes.append(f"{names[0]}: {what} left out, here and in {len(names) - 1} more images")
    channels = max(len(array) for array in arrays)
    return np.stack([np.broadcast_to(a, (channels, *a.shape[1:])) for a in arrays])
