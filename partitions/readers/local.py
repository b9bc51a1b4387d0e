"""A user's data without code, by its path: a folder of class folders (torchvision's
ImageFolder), a ``.npz`` of arrays or a ``.npy`` of inputs, a ``.csv``, a folder or a parquet file
of the `datasets` library.

Images become uint8 (C, H, W), C = 1 where all of them are grey, else 3."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from partitions.limits import check_size
from partitions.readers import hub
from partitions.readers.raw import UNLABELED, Raw, concatenate

FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # Pillow reads EPS by Ghostscript
GREY = ("1", "L", "LA", "I;16")
CSV_GROWTH = 4  # bytes in memory of a byte of CSV, at most: "1," becomes a number of 8 bytes
FEATURES = ("x", "features", "embedding", "input")  # names of a column of numbers
NATURAL = ("string", "large_string", "int64")  # types of natural columns
TRAIN, TEST = ("train", "training"), ("test", "val", "validation")  # folders, or ends of names


def read_local(path: Path, size: int = 0, whole: bool = False, label: str = "") -> Raw:
    """The samples at `path`, training ones first; images cropped and resized to `size`×`size`
    (0: as they are, which must be equal sizes); `whole` numbers stay whole, as in `inputs_of`.

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
        return _table(_csv(path), path, size, whole, label)
    with _readable(path):
        unpacked = hub.unpacked(path)
    check_size(unpacked, path)
    with _readable(path):
        loaded = hub.open_folder(path, decode=False)
    return _folder(path, size) if loaded is None else _table(loaded, path, size, whole, label)


def _csv(path: Path) -> Any:
    """A CSV file with a header as a table of the `datasets` library."""
    import datasets
    import pandas

    try:
        return datasets.Dataset.from_pandas(pandas.read_csv(path), preserve_index=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no CSV file with a header ({error})") from error


def _folder(folder: Path, size: int) -> Raw:
    train, test = ([folder / n for n in names if (folder / n).is_dir()] for names in (TRAIN, TEST))
    if not train:
        return _class_folders(folder, size, True)
    parts = [_class_folders(train[0], size, True)]
    parts += [_class_folders(place, size, False) for place in test[:1]]
    if len({part.classes for part in parts}) > 1:
        raise ValueError(f"{train[0]} and {test[0]} hold different class folders")
    return joined(parts, folder)


def _class_folders(folder: Path, size: int, train: bool) -> Raw:
    """ImageFolder's rule: a class is a folder, in alphabetical order, and holds images at any
    depth."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    if any(path.is_dir() for path in folder.iterdir()):
        found = ImageFolder(str(folder), allow_empty=True)
        files, classes = found.samples, tuple(found.classes)
    else:
        names = sorted(f for f in folder.iterdir() if f.suffix.lower() in IMG_EXTENSIONS)
        files, classes = [(str(name), UNLABELED) for name in names], ()
    if not files:
        raise ValueError(
            f"{folder} holds no images; it may hold one folder of images for each class, or be a "
            "folder of the datasets library (save_to_disk or parquet)"
        )
    x = _images([(name, name) for name, _ in files], size)
    labels = np.array([label for _, label in files])
    samples = tuple(Path(name).relative_to(folder).as_posix() for name, _ in files)
    return Raw(x, labels, len(x) * train, {}, classes, samples)


def _open(name: str, file: str | io.BytesIO) -> Image.Image:
    try:
        with Image.open(file, formats=FORMATS) as picture:
            picture.load()
            return picture
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} is no whole image ({error})") from error


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
        raise ValueError(
            f"{path} is no whole {path.suffix or 'folder'} of plain data ({error})"
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
    parts = []
    for ending in ("", *(f"_{name}" for name in (TRAIN[0], TEST[0]))):
        if f"x{ending}" in arrays:
            x, y = arrays[f"x{ending}"], arrays.get(f"y{ending}")
            if x.ndim == 0 or (y is not None and not y.size):
                raise ValueError(f"{path}: x{ending} and y{ending} must have a row for each sample")
            y = np.full(len(x), UNLABELED) if y is None else y.reshape(len(y), -1)[:, 0]
            columns = {} if ending else {
                name: a for name, a in arrays.items()
                if name not in ("x", "y") and a.shape == (len(x),)
            }  # fmt: skip
            parts.append(Raw(inputs_of(x, path, whole), y, len(x) * (ending != "_test"), columns))
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
        return inputs_of(table.to_numpy(), source, whole), numbers, False
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
    return inputs_of(x, source, whole), [inputs], False


def _dtype(feature: Any) -> str:
    """The type of a column of single numbers or texts; "" for other columns."""
    return str(getattr(feature, "dtype", ""))


def _stored(feature: Any) -> str:
    """The type of the numbers in a column of lists or arrays."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return _dtype(feature)


def inputs_of(x: np.ndarray, source: Path | str, whole: bool = False) -> np.ndarray:
    """Inputs as uint8 (0 … 255) or float32, other whole numbers as int64 if `whole`; images
    (n, H, W) and (n, H, W, C) with the channels first."""
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise ValueError(f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed")
    converted = np.int64 if whole and x.dtype.kind in "ui" else np.float32
    dtype = np.dtype(np.uint8 if x.dtype == np.uint8 else converted)
    check_size(dtype.itemsize * x.size, source)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    x = x.astype(dtype, copy=False)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError(f"{source}: inputs hold NaN or infinity")
    return x


def joined(parts: list[Raw], source: Path | str) -> Raw:
    """Parts of one dataset; labels that are texts become numbers, in alphabetical order."""
    for part in parts:
        if part.y.shape != part.x.shape[:1]:
            raise ValueError(f"{source}: {len(part.x)} inputs, but {part.y.size} labels")
        if part.x.shape[1:] != parts[0].x.shape[1:] or part.x.dtype != parts[0].x.dtype:
            raise ValueError(f"{source}: training and test inputs differ in shape or type")
    raw = concatenate(parts)
    if raw.y.dtype.kind in "iu":
        return raw
    if raw.y.dtype.kind not in "US":
        raise ValueError(f"{source}: labels are {raw.y.dtype}; whole numbers or texts are needed")
    classes, y = np.unique(raw.y.astype(str), return_inverse=True)
    return Raw(raw.x, y, raw.num_train, raw.columns, tuple(classes.tolist()))
