"""A folder of class folders of images (torchvision's ImageFolder), with ``train`` and ``test``
folders or without.

Images become uint8 (C, H, W), C = 1 where all of them are grey, else 3. Photos are turned upright,
which ImageFolder leaves to a transform."""

import contextlib
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedapps.common.file_states import is_new
from fedapps.common.memory_limits import check_size
from partitions.datasets.alike import note_alike
from partitions.datasets.description import listed
from partitions.datasets.readers import hub
from partitions.datasets.readers.broken import left_out
from partitions.datasets.readers.convert import joined
from partitions.datasets.readers.raw import UNLABELED, Raw

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # Pillow reads EPS by Ghostscript
GREY = ("1", "L", "LA")
ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
LEVEL = re.compile(r"folder:\d")
# A word for an owner, and which one: hospital-1, Site_B, user 7.
OWNER = re.compile(
    r"(hospital|clinic|site|centre|center|client|user|patient|person|subject|participant|device|"
    r"phone|node|silo|writer|station|camera|institution)s?[ _-]?(\d+|[A-Za-z]|(?<=[ _-])\w+)",
    re.IGNORECASE,
)
# Names of folders, in small letters.
TRAIN = hub.TRAIN
VALIDATION = hub.OWN_VALIDATION
TEST = hub.OWN_TEST
NAME_OF_PART = re.compile(r"(?<![a-z])(train|test)(ing)?(?![a-z])", re.IGNORECASE)  # seg_train


def read_pictures(
    folder: Path, size: int, label: str = "", later: bool = False, skip: float = 0.0
) -> Raw:
    """The images of the folder, or of its ``train``, ``validation`` and ``test`` folders, in small
    or capital letters; what is left out is noted. Up to a share `skip` of each may be broken.

    `label` is "folder:0" if the outermost folders are the classes, "folder:1" for the folders in
    them, and so on; the folders of other levels are natural columns of these names. "" is level 1
    if the outermost folders are named as owners are, such as hospital-1, else level 0. Then raises
    ValueError if level 1 may be the classes as well, unless they are of a `later` client."""
    train = _first(folder, TRAIN)
    if train is not None and _is_class(train):
        train = None
    level = _level(label, train or folder, later)
    if train is None:
        raw = _class_folders(folder, size, True, level, later, skip)
        about = [*_about_classes(raw, folder, later), *_owners(raw, level, folder)]
        return raw.noted(*about, *_unread(folder, folder))
    validation = _first(folder, VALIDATION)
    test = _first(folder, TEST)
    places = [place for place in (train, validation, test) if place is not None]
    parts: list[Raw] = []
    for place in places:
        part = _class_folders(place, size, place == train, level, later, skip)
        if place == validation:
            part = replace(part, num_validation=len(part.x))
        differing = sorted(set(parts[0].classes) ^ set(part.classes)) if parts else []
        if differing:
            raise ValueError(
                f"{train} and {place} hold different class folders; only one of them has "
                f"{', '.join(differing)}; give both the same folders, which may be empty"
            )
        parts.append(part)
    others = [f.name for f in _folders(folder) if f not in places]
    notes = [note for place in places for note in _unread(place, folder)]
    if others:
        beside = " and ".join(place.name for place in places)
        notes.append(f"{folder}: folders beside {beside} are left out: {', '.join(others)}")
    whole = joined(parts, folder)
    about = [*_about_classes(whole, folder, later), *_owners(whole, level, folder)]
    return whole.noted(*about, *notes)


def _about_classes(raw: Raw, folder: Path, later: bool) -> list[str]:
    """Notes on folders of classes whose names look alike, and on those without an image. A `later`
    client may lack classes."""
    notes: list[str] = []
    if later:
        return notes
    alike = note_alike(raw.classes, "the folders", "classes")
    if alike:
        notes.append(f"{folder}: {alike}")
    present = set(np.unique(raw.y).tolist())
    empty = [name for number, name in enumerate(raw.classes) if number not in present]
    if empty:
        notes.append(
            f"{folder}: no image has the class {listed(empty)}, which counts as a class all the "
            "same; remove its folder if it is none"
        )
    return notes


def _level(label: str, folder: Path, later: bool) -> int:
    """The level of the folders that are the classes. Raises ValueError for other labels, and where
    nothing says which level it is."""
    if not label:
        return _concluded_level(folder, later)
    if not LEVEL.fullmatch(label):
        raise ValueError(
            f"label is {label!r}, but {folder} is a folder of images, whose labels are names of "
            "folders: label=folder:0 for the outermost ones, label=folder:1 for those in them"
        )
    return int(label.partition(":")[2])


def _concluded_level(folder: Path, later: bool) -> int:
    """1 if the outer folders alone are named as owners are, else 0.

    Raises ValueError if folders have inner folders of the same names, so that both levels may be
    the classes, and the other one who owns the images."""
    outer = _folders(folder)
    inner: Counter[str] = Counter()
    innermost: set[str] = set()
    for place in outer:
        if _holds_images(place):
            return 0
        for path in _folders(place):
            inner[path.name] += 1
            innermost.update(below.name for below in _folders(path))
    outer_are_owners = _are_owners([path.name for path in outer])
    inner_are_owners = _are_owners(list(inner))
    if innermost and outer_are_owners and not later:
        raise ValueError(
            f"{folder} has folders in three levels, such as "
            f"{outer[0].name}/{min(inner)}/{min(innermost)}; write label=folder:2 "
            "partition=natural partition.column=folder:0 if the innermost ones are the classes, or "
            "label=folder:1 if those in the middle are"
        )
    if inner and outer_are_owners and not inner_are_owners:
        return 1
    common = sorted(name for name, count in inner.items() if count > 1)
    if common and not later:
        _refuse_parts(folder, [path.name for path in outer])
    if common and not inner_are_owners and not later:
        raise ValueError(
            f"{folder} has {len(outer)} folders ({_shown([path.name for path in outer])}) in which "
            f"folders have the same names ({_shown(common)}); write label=folder:1 "
            "partition=natural partition.column=folder:0 if the outer ones are the owners and the "
            "inner ones the classes, or label=folder:0 partition=natural partition.column=folder:1 "
            "if it is the other way round"
            + ", or label=folder:2 if the classes are the folders in these"
            * bool(innermost)
        )
    return 0


def _refuse_parts(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError for folders that seem to be parts of the data, such as seg_train and
    seg_test."""
    found = [match for match in map(NAME_OF_PART.search, names) if match]
    if {match[1].lower() for match in found} == {"train", "test"}:
        raise ValueError(
            f"{folder}: the folders {', '.join(match.string for match in found)} seem to be parts "
            "of the data; call them train and test, or name the level of the classes: "
            "label=folder:1"
        )


def _are_owners(names: Sequence[str]) -> bool:
    """Whether all names are one word for owners with a number or a name, such as hospital-1."""
    matches = [OWNER.fullmatch(name) for name in names]
    words = {match[1].lower() for match in matches if match}
    return bool(names) and all(matches) and len(words) == 1


def _owners(raw: Raw, level: int, folder: Path) -> list[str]:
    """A note with the owners of the classes, where the folders have two levels that could be
    confused; else empty."""
    other = f"folder:{1 - level}"
    if level > 1 or other not in raw.columns or not raw.classes:
        return []
    owners = raw.columns[other]
    names = np.unique(owners).tolist()
    classes_of = [tuple(np.unique(raw.y[owners == name])) for name in names]
    most_classes = max(map(len, classes_of), default=0)  # of an owner
    if len(names) < 2 or most_classes < 2:  # patients of one class each
        return []
    count = len(raw.classes)
    which = f"up to {most_classes} of {count} classes"
    if set(classes_of) == {tuple(range(count))}:
        which = f"the same {count} classes"
    return [
        f"{folder}: {len(names)} owners ({other}: {_shown(names)}) with {which} each "
        f"(folder:{level}: {_shown(raw.classes)}); partition=natural partition.column={other} "
        "makes each owner a client"
    ]


def _shown(names: Sequence[str]) -> str:
    """The first three names."""
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += ", …"
    return shown


def _no_images(folder: Path) -> str:
    """The sentence about a folder without images, which names a file of another kind."""
    others = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            others.append(path.relative_to(folder))
    if not others:
        holds = f"{folder} holds no images"
    else:
        holds = f"{folder} holds no images, but {len(others)} other files, such as {others[0]}"
    return (
        f"{holds}; it may hold one folder of images for each class, or be a folder of the datasets "
        "library (save_to_disk or parquet); write sounds and other samples into an .npz, all of "
        "one length, as x (n, channels, time) with inputs=signal"
    )


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of the names, in small letters, that is a folder in `folder`."""
    folders = {path.name.lower(): path for path in _folders(folder)}
    return next((folders[name] for name in names if name in folders), None)


def _is_class(train: Path) -> bool:
    """Whether the folder is a class called train beside others, such as bus and car. All of them
    hold images themselves, and some have no name of a part."""
    beside = _folders(train.parent)
    are_parts = all(path.name.lower() in (*TRAIN, *VALIDATION, *TEST) for path in beside)
    return not are_parts and all(map(_holds_images, beside))


def _holds_images(folder: Path) -> bool:
    return any(_is_image(file.name) for file in folder.iterdir())


def _is_image(name: str) -> bool:
    """Whether it is a file of an image, by its name, and none of the hidden ones that programs
    create, such as ._1.png."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".")


def _folders(folder: Path) -> list[Path]:
    """The folders in `folder`, without the hidden ones that programs create."""
    hidden = (".", "__MACOSX")
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    return [path for path in folders if not path.name.startswith(hidden)]


def _class_folders(
    folder: Path, size: int, train: bool, level: int, later: bool, skip: float
) -> Raw:
    """The images of a folder by ImageFolder's rule: each folder in it, in alphabetical order, is a
    class and holds images at any depth. `is_new` decides about links. Without folders, the images
    in the folder itself have no labels."""
    files, labels, classes = _by_folder(folder)
    names_of_folders = [Path(name).relative_to(folder).parts[:-1] for name in files]
    depth = min(map(len, names_of_folders), default=0)
    if level and depth > level:
        names_of_classes = [names[level] for names in names_of_folders]
        classes = tuple(sorted(set(names_of_classes)))
        labels = [classes.index(name) for name in names_of_classes]
    elif level:
        if not later:
            _refuse_shallow(files, names_of_folders, level)
        # A later client's images, without folders of classes.
        classes = ()
        labels = [UNLABELED] * len(files)
    if not files:
        raise ValueError(_no_images(folder))
    notes: list[str] = []
    x, kept = images([(name, name) for name in files], size, notes, skip)
    columns = {}
    for other in range(depth):
        if other != level:
            columns[f"folder:{other}"] = np.array([names_of_folders[row][other] for row in kept])
    return Raw(
        x,
        np.array([labels[row] for row in kept]),
        num_train=len(x) if train else 0,
        columns=columns,
        classes=classes,
        samples=tuple(Path(files[row]).relative_to(folder).as_posix() for row in kept),
        notes=tuple(notes),
        labeled=bool(classes),
    )


def _by_folder(folder: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """The images of a folder, the label of each by the folder that holds it, and the folders'
    names. Without folders, the images in `folder` itself, unlabeled."""
    root = folder.resolve()
    visited: set[Path] = set()
    class_folders = [path for path in _folders(folder) if is_new(path, root, visited)]
    if not class_folders:
        files = [str(path) for path in sorted(folder.iterdir()) if _is_image(path.name)]
        return files, [UNLABELED] * len(files), ()
    files = []
    labels: list[int] = []
    for label, class_folder in enumerate(class_folders):
        for name in _walk(class_folder, root, visited):
            if _is_image(os.path.basename(name)):
                files.append(name)
                labels.append(label)
    return files, labels, tuple(path.name for path in class_folders)


def _refuse_shallow(
    files: Sequence[str], names_of_folders: Sequence[tuple[str, ...]], level: int
) -> None:
    """Raise ValueError for an image that no folder of this level holds."""
    for file, names in zip(files, names_of_folders, strict=True):
        if len(names) <= level:
            raise ValueError(
                f"label is folder:{level}, but {file} is no image in {level + 1} folders"
            )


def _unread(folder: Path, source: Path) -> list[str]:
    """A note about the files in the folder that are not read; empty if all are."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = _folders(folder)
    others: list[str] = []
    for place in [folder, *classes]:
        files = place.rglob("*") if place != folder else place.iterdir()
        for file in files:
            if not file.is_file() or file.name.startswith(".") or file.name == "Thumbs.db":
                continue
            if not _is_image(file.name) or (place == folder and classes):
                others.append(file.relative_to(source).as_posix())
    if not others:
        return []
    return [
        f"{source}: {len(others)} files are left out, such as {min(others)}; images "
        f"({', '.join(IMG_EXTENSIONS)}) in a folder for each class are read"
    ]


def _walk(folder: Path, root: Path, visited: set[Path]) -> list[str]:
    """The files at any depth below `folder`, in ImageFolder's order."""
    names_in: dict[str, list[str]] = {}
    for place, folders, names in os.walk(folder, followlinks=True):
        # os.walk continues with the folders that this list holds after the assignment.
        folders[:] = [name for name in sorted(folders) if is_new(Path(place, name), root, visited)]
        names_in[place] = sorted(names)
    files = []
    for place in sorted(names_in):
        files += [os.path.join(place, name) for name in names_in[place]]
    return files


class BrokenImageError(ValueError):
    """A file that is no whole image."""


def _open(name: str, file: str | io.BytesIO) -> tuple[Image.Image, int]:
    """The first frame of an image file, and the number of its frames."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            frames = getattr(picture, "n_frames", 1)
            if frames > 1:
                picture.seek(0)  # counting them moved it
            picture.load()
            _turn_upright(picture)
    except Exception as error:  # Pillow raises many kinds of errors for damaged bytes
        reason = str(error)
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is empty, damaged or none of {', '.join(FORMATS)}"
        raise BrokenImageError(f"{name} is no whole image ({reason})") from error
    if picture.mode.startswith(("I", "F")):  # Pillow would clip them at 255
        raise ValueError(
            f"{name} has pixels of more than 8 bits (mode {picture.mode}); save it with 8 bits"
        )
    return picture, frames


def _turn_upright(picture: Image.Image) -> None:
    """Turn a photo as its camera was held, which EXIF says beside the pixels."""
    with contextlib.suppress(Exception):  # Pillow raises many kinds of errors for damaged EXIF
        ImageOps.exif_transpose(picture, in_place=True)


def images(
    files: Sequence[tuple[str, str | io.BytesIO]], size: int, notes: list[str], skip: float = 0.0
) -> tuple[np.ndarray, list[int]]:
    """(n, C, H, W) uint8 of image files with their names, for errors and notes, and the positions
    of the files that were read. Up to a share `skip` of them may be broken."""
    arrays: list[np.ndarray] = []
    kept: list[int] = []
    broken: list[str] = []
    several_frames: list[str] = []
    transparent: list[str] = []
    for position, (name, file) in enumerate(files):
        try:
            picture, frames = _open(name, file)
        except BrokenImageError as error:
            broken.append(str(error))
            continue
        if frames > 1:
            several_frames.append(name)
        if picture.mode in ALPHA or "transparency" in picture.info:
            transparent.append(name)
        if not arrays:  # the first image decides the size of all
            pixels = size**2 if size else picture.width * picture.height
            check_size(3 * len(files) * pixels, f"{name} with {len(files) - 1} more images")
        grey = picture.mode in GREY
        image = picture.convert("L" if grey else "RGB")
        if size:
            image = ImageOps.fit(image, (size, size))
        array = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        if arrays and array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"{name} has {array.shape[2]}×{array.shape[1]} pixels, the first image "
                f"{arrays[0].shape[2]}×{arrays[0].shape[1]}; image-size=32 makes all 32×32"
            )
        arrays.append(array)
        kept.append(position)
    notes += left_out(broken, len(files), skip, "images")
    for names, what in ((several_frames, "frames but the first"), (transparent, "transparency")):
        if names:
            notes.append(f"{names[0]}: {what} left out, here and in {len(names) - 1} more images")
    channels = max(len(array) for array in arrays)
    return np.stack([np.broadcast_to(a, (channels, *a.shape[1:])) for a in arrays]), kept
