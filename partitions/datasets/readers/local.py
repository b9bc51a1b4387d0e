"""A user's data without code, by its path: a folder of class folders (torchvision's
ImageFolder), a ``.npz`` of arrays or a ``.npy`` of inputs, a ``.csv``, a folder or a parquet file
of the `datasets` library.

Images become uint8 (C, H, W), C = 1 where all of them are grey, else 3."""

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedapps.common.memory_limits import check_size
from partitions.datasets.readers import hub
from partitions.datasets.readers.raw import UNLABELED, Raw, concatenate

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # Pillow reads EPS by Ghostscript
GREY = ("1", "L", "LA")
CSV_GROWTH = 4  # bytes in memory of a byte of CSV, at most: "1," becomes a number of 8 bytes
FEATURES = ("x", "features", "embedding", "input")  # names of a column of numbers
NATURAL = ("string", "large_string", "int64")  # types of natural columns
TRAIN, TEST = ("train", "training"), ("test", "val", "validation")  # folders, or ends of names
SPLITS = tuple(f"{name}_{split}" for split in ("train", "test") for name in "xy")  # in a .npz
MAX_FLOAT = 10.0  # larger floats in images are hardly scaled or standardized

logger = logging.getLogger(__name__)


def read_local(path: Path, size: int = 0, whole: bool = False, label: str = "") -> Raw:
    """The samples at `path`, training ones first; images cropped and resized to `size`×`size`
    (0: as they are, which must be equal sizes). For a later client, `whole` numbers stay whole, as
    in `scaled_pixels`, and a table may lack the column `label`.

    A folder may hold ``train`` and ``test`` folders of class folders; what has no class folder, no
    ``y`` and no column of labels has label −1. A table has them in the column `label`, "": the
    first of the usual names. Raises ValueError for what cannot be read, naming the file."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if path.suffix in (".npz", ".npy"):
        return _arrays(path, whole)
    if path.is_file() and path.suffix not in (".parquet", ".csv"):
        raise ValueError(
            f"{path} is no data that can be read: an .npz, .npy, .csv or .parquet file, a folder "
            "of images, or one of the datasets library (save_to_disk or parquet)"
        )
    if path.suffix == ".csv":
        check_size(CSV_GROWTH * path.stat().st_size, path)
        return _table(_csv(path, label), path, size, whole, label)
    with _readable(path):
        unpacked = hub.unpacked(path)
    check_size(unpacked, path)
    with _readable(path):
        loaded = hub.open_folder(path, decode=False)
    return _folder(path, size) if loaded is None else _table(loaded, path, size, whole, label)


def _csv(path: Path, label: str) -> Any:
    """A CSV file with a header as a table of the `datasets` library. A warning names the columns of
    numbers, but for labels, that some other cells make texts."""
    import datasets
    import pandas

    try:
        frame = pandas.read_csv(path)
        table = datasets.Dataset.from_pandas(frame, preserve_index=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no CSV file with a header ({error})") from error
    if not len(frame):
        raise ValueError(f"{path} has a header and no rows; add a row for each sample")
    labels, mixed = [label] if label else hub.LABELS, []
    for name, cells in frame.select_dtypes(exclude="number").items():
        texts = cells[pandas.to_numeric(cells, errors="coerce").isna() & cells.notna()]
        if name not in labels and 0 < 2 * len(texts) <= cells.count():
            mixed.append(f"{name} ({len(texts)} cells such as {texts.iloc[0]!r:.50})")
    if mixed:
        logger.warning(
            "%s: columns are no inputs because some cells are not numbers: %s",
            path, ", ".join(mixed),
        )  # fmt: skip
    return table


def _folder(folder: Path, size: int) -> Raw:
    train, test = ([folder / n for n in names if (folder / n).is_dir()] for names in (TRAIN, TEST))
    if not train:
        return _class_folders(folder, size, True)
    parts = [_class_folders(train[0], size, True)]
    parts += [_class_folders(place, size, False) for place in test[:1]]
    if len({part.classes for part in parts}) > 1:
        differing = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise ValueError(
            f"{train[0]} and {test[0]} hold different class folders; only one of them has "
            f"{', '.join(differing)}; give both the same folders, which may be empty"
        )
    return joined(parts, folder)


def _class_folders(folder: Path, size: int, train: bool) -> Raw:
    """ImageFolder's rule: a class is a folder, in alphabetical order, and holds images at any
    depth. Links as in `_is_new`."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    root, visited = folder.resolve(), set[Path]()
    folders = [f for f in sorted(folder.iterdir()) if f.is_dir() and _is_new(f, root, visited)]
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
    x = _images([(name, name) for name, _ in files], size)
    labels = np.array([label for _, label in files])
    samples = tuple(Path(name).relative_to(folder).as_posix() for name, _ in files)
    return Raw(x, labels, len(x) * train, {}, classes, samples)


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


def _open(name: str, file: str | io.BytesIO) -> Image.Image:
    try:
        with Image.open(file, formats=FORMATS) as picture:
            picture.load()
    except Exception as error:  # whatever damaged bytes raise in Pillow
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is empty, damaged or none of {', '.join(FORMATS)}" if unknown else error
        raise ValueError(f"{name} is no whole image ({reason})") from error
    if picture.mode.startswith(("I", "F")):  # Pillow would clip them at 255
        raise ValueError(
            f"{name} has pixels of more than 8 bits (mode {picture.mode}); save it with 8 bits"
        )
    return picture


def _images(files: Sequence[tuple[str, str | io.BytesIO]], size: int) -> np.ndarray:
    """(n, C, H, W) uint8 of image files with their names, for errors."""
    arrays: list[np.ndarray] = []
    for name, file in files:
        picture = _open(name, file)
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
    channels = max(len(array) for array in arrays)
    return np.stack([np.broadcast_to(a, (channels, *a.shape[1:])) for a in arrays])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever damaged bytes raise in zipfile and numpy
        pickled = "allow_pickle" in str(error)  # numpy says so of any bytes that it does not know
        reason = "it is damaged, or holds Python objects" if pickled else error
        raise ValueError(
            f"{path} is no whole {path.suffix or 'folder'} of plain data ({reason})"
        ) from error


def _arrays(path: Path, whole: bool) -> Raw:
    """``x`` (n, …) and ``y`` (n,), or ``x_train``, ``y_train``, ``x_test``, ``y_test``; further
    arrays (n,) beside x and y are natural columns."""
    with _readable(path):
        loaded: Any = np.load(path, mmap_mode="c", allow_pickle=False)
    if isinstance(loaded, np.ndarray):  # the file is as long as its header says
        arrays = {"x": loaded}
    else:
        with loaded as file:
            check_size(sum(entry.file_size for entry in file.zip.infolist()), path)
            with _readable(path):
                arrays = {name: file[name] for name in file.files}
    if not arrays.keys().isdisjoint(("x", "y")) and not arrays.keys().isdisjoint(SPLITS):
        raise ValueError(
            f"{path} holds {', '.join(sorted(arrays))}; it must hold either x and y, or "
            "x_train, y_train, x_test and y_test"
        )
    parts = []
    for ending in ("", "_train", "_test"):
        if f"x{ending}" in arrays:
            x, y = arrays[f"x{ending}"], arrays.get(f"y{ending}")
            if x.ndim == 0 or (y is not None and not y.size):
                raise ValueError(f"{path}: x{ending} and y{ending} must have a row for each sample")
            y = np.full(len(x), UNLABELED) if y is None else y.reshape(len(y), -1)[:, 0]
            columns = {} if ending else {
                name: a for name, a in arrays.items()
                if name not in ("x", "y") and a.shape == (len(x),)
            }  # fmt: skip
            parts.append(
                Raw(scaled_pixels(x, path, whole), y, len(x) * (ending != "_test"), columns)
            )
    if not parts:
        raise ValueError(f"{path} holds {sorted(arrays)}; it must hold x and y")
    return joined(parts, path)


def _table(loaded: Any, source: Path, size: int, whole: bool, label: str) -> Raw:
    """Splits of the `datasets` library; columns of texts and numbers are natural columns."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    train, test = ([s for s in names if s in splits][:1] for names in (hub.TRAIN, hub.TEST))
    if len(splits) == 1:
        train, test = list(splits), []
    if not train:
        raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
    parts = []
    for name in train + test:
        split = splits[name]
        labels = [label] if label else hub.LABELS
        labelled = next((name for name in labels if name in split.column_names), "")
        if label and not labelled and not whole:
            raise ValueError(
                f"{source} has no column {label!r} of labels; label=NAME must be one of "
                f"{', '.join(split.column_names)}"
            )
        x, inputs, pictures = _inputs(split, source, size, whole, (label, labelled))
        samples = tuple(map(str, range(len(x)))) if pictures else ()
        columns = {
            key: np.asarray(split[key][:])
            for key, feature in split.features.items()
            if key not in (labelled, *inputs) and _dtype(feature) in NATURAL
        }
        y = np.asarray(split[labelled][:]) if labelled else np.full(len(x), UNLABELED)
        names = tuple(getattr(split.features.get(labelled), "names", None) or ())
        parts.append(Raw(x, y, len(x) * (name in train), columns, names, samples))
    return joined(parts, source)


def _inputs(
    split: Any, source: Path, size: int, whole: bool, labels: tuple[str, ...]
) -> tuple[np.ndarray, list[str], bool]:
    """The inputs, their columns, and whether they are pictures: the column of one of the usual
    names, else all columns of numbers but those of `labels`."""
    known = (*hub.IMAGES, *FEATURES)
    numbers = [
        key for key, feature in split.features.items()
        if key not in labels and _dtype(feature).startswith(("int", "uint", "float", "double"))
    ]  # fmt: skip
    if numbers and not any(name in split.column_names for name in known):
        check_size(8 * len(split) * len(numbers), source)
        table = split.select_columns(numbers).to_pandas()
        return scaled_pixels(table.to_numpy(), source, whole), numbers, False
    inputs = hub.column(split, known, source)
    rows = split.select_columns([inputs])
    if type(split.features[inputs]).__name__ == "Image":  # its path, maybe a URL, is not opened
        data = [(row[inputs] or {}).get("bytes") or b"" for row in rows]
        files = [(f"{source}, row {i}", io.BytesIO(file)) for i, file in enumerate(data)]
        return _images(files, size), [inputs], True
    check_size(rows.data.nbytes, source)
    x = np.asarray(rows.with_format("numpy")[inputs][:])
    if _stored(split.features[inputs]) == "uint8":  # numpy's format widens it
        x = x.astype(np.uint8)
    return scaled_pixels(x, source, whole), [inputs], False


def _dtype(feature: Any) -> str:
    """The type of a column of single numbers or texts; "" for other columns."""
    return str(getattr(feature, "dtype", ""))


def _stored(feature: Any) -> str:
    """The type of the numbers in a column of lists or arrays."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return _dtype(feature)


def scaled_pixels(x: np.ndarray, source: Path | str, whole: bool = False) -> np.ndarray:
    """Inputs as uint8 (0 … 255) or float32, other whole numbers as int64 if `whole`; images
    (n, H, W) and (n, H, W, C) with the channels first. Unless `whole`, whole numbers in images are
    bytes: ValueError for others than 0 … 255."""
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise ValueError(f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed")
    converted = np.int64 if whole and x.dtype.kind in "ui" else np.float32
    pixels = x.dtype == np.uint8 or (not whole and _are_bytes(x, source))
    dtype = np.dtype(np.uint8 if pixels else converted)
    check_size(dtype.itemsize * x.size, source)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and (
        (x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)) or (x.shape[3] == 4 < x.shape[1])
    ):
        x = x.transpose(0, 3, 1, 2)
    x = x.astype(dtype, copy=False)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError(f"{source}: inputs hold NaN or infinity")
    return x


def _are_bytes(x: np.ndarray, source: Path | str) -> bool:
    """Whether x is an array of images of whole numbers, which must be 0 … 255. A warning for large
    floats, and for whole numbers that are no uint8."""
    if x.ndim < 3 or not x.size or x.dtype == np.uint8:
        return False
    low, high = x.min(), x.max()
    if x.dtype.kind == "f":
        if max(-low, high) > MAX_FLOAT:
            logger.warning(
                "%s: images hold floats from %g to %g; only bytes (whole numbers from 0 to 255) "
                "are divided by 255", source, low, high,
            )  # fmt: skip
        return False
    if low < 0 or high > 255:
        raise ValueError(
            f"{source}: images hold whole numbers from {low} to {high}; give bytes from 0 to 255, "
            "or scale them to [0, 1] and store them as float32"
        )
    logger.warning(
        "%s: %s images hold whole numbers up to %d; they are divided by 255, as bytes are",
        source, x.dtype, high,
    )  # fmt: skip
    return True


def joined(parts: list[Raw], source: Path | str) -> Raw:
    """Parts of one dataset; labels that are texts become numbers, in alphabetical order."""
    for part in parts:
        if part.y.shape != part.x.shape[:1]:
            raise ValueError(f"{source}: {len(part.x)} inputs, but {part.y.size} labels")
        if part.x.shape[1:] != parts[0].x.shape[1:] or part.x.dtype != parts[0].x.dtype:
            raise ValueError(f"{source}: training and test inputs differ in shape or type")
        if missing := sorted(parts[0].columns.keys() - part.columns.keys()):
            raise ValueError(
                f"{source}: the training samples have columns that the test samples lack: "
                f"{', '.join(missing)}; both need them"
            )
    raw = concatenate(parts)
    if raw.y.dtype.kind in "iu":
        return raw
    if raw.y.dtype.kind not in "US":
        raise ValueError(f"{source}: labels are {raw.y.dtype}; whole numbers or texts are needed")
    classes, y = np.unique(raw.y.astype(str), return_inverse=True)
    return Raw(raw.x, y, raw.num_train, raw.columns, tuple(classes.tolist()))
