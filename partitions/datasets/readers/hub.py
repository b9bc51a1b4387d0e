"""Datasets in the `datasets` library's form: a local folder, or the Hugging Face hub."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partitions.datasets.description import listed
from partitions.datasets.features import bert, mobilenet_v2
from partitions.datasets.labels import one_per_sample
from partitions.datasets.readers.raw import Raw, concatenate

# Usual names of columns and of splits.
IMAGES = ("image", "img")
TEXTS = ("question_title", "question_content", "best_answer", "text")
LABELS = ("label", "labels", "fine_label", "character", "topic", "class")
TRAIN = ("train", "training")
TEST = ("test", "validation")
# Splits of a user's own data, whose validation split is not its test split.
OWN_VALIDATION = ("validation", "valid", "val", "dev")
OWN_TEST = ("test", "testing")
COLUMNS = {  # natural column → its names in datasets
    "coarse": ("coarse", "coarse_label"),
    "writer": ("writer", "writer_id"),
    "alphabet": ("alphabet",),
    "author": ("author", "user_id"),
    "cell": ("cell", "user_id"),
}


def read_folder(folder: Path, shape: tuple[int, ...], columns: Sequence[str]) -> Raw | None:
    """A folder of ``save_to_disk`` or of parquet files; None if it is neither."""
    loaded = open_folder(folder)
    if loaded is None:
        return None
    return _read(loaded, folder, shape, columns)


def open_folder(folder: Path, *, decode: bool = True) -> Any:
    """The `datasets` object of a folder of ``save_to_disk`` or of parquet files, or of one
    parquet file; None for anything else. Unless `decode`, images and sounds stay files."""
    loaded = _open_folder(folder)
    if decode or loaded is None:
        return loaded
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    return {name: _undecoded(split) for name, split in splits.items()}


def _undecoded(split: Any) -> Any:
    from datasets.features.features import require_decoding

    for name, feature in split.features.items():
        if hasattr(feature, "decode"):
            split = split.cast_column(name, type(feature)(decode=False))
        elif require_decoding(feature):  # lists of images
            split = split.remove_columns([name])
    return split


def unpacked(folder: Path) -> int:
    """A lower bound of the bytes that the parquet files in `folder`, or this file, take in
    memory."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.parquet"))
    if not files:
        return 0
    import pyarrow.parquet

    total = 0
    for file in files:
        metadata = pyarrow.parquet.read_metadata(file)
        for group_number in range(metadata.num_row_groups):
            group = metadata.row_group(group_number)
            for column_number in range(group.num_columns):
                chunk = group.column(column_number)
                # Encoded values can be short: in memory a value has at least four bytes.
                total += max(chunk.total_uncompressed_size, 4 * chunk.num_values)
    return total


def _open_folder(folder: Path) -> Any:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        return datasets.load_from_disk(str(folder))
    files: dict[str, list[str]] = {}
    if folder.suffix == ".parquet" and folder.is_file():
        files["train"] = [str(folder)]
    for path in sorted(folder.rglob("*.parquet")):  # data/train-00000-of-00001 or train/0000
        name = path.stem if path.parent in (folder, folder / "data") else path.parent.name
        files.setdefault(name.split("-")[0].lower(), []).append(str(path))
    if not files:
        return None
    import datasets

    names_of_splits = [_names_of_classes(paths) for paths in files.values()]
    if names_of_splits.count(names_of_splits[0]) == len(names_of_splits):
        return datasets.load_dataset("parquet", data_files=files)
    # Loaded together, all splits would have the names of one split's classes.
    splits = {}
    for split, paths in files.items():
        splits[split] = datasets.load_dataset("parquet", data_files={split: paths})[split]
    return splits


def _names_of_classes(paths: Sequence[str]) -> dict[str, list[str]]:
    """The names of classes by column that the parquet files of a split declare, in the form of the
    `datasets` library. Raises ValueError for files that declare others."""
    import pyarrow.parquet

    names_of_files = []
    for path in paths:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        content = json.loads(metadata.get(b"huggingface", b"{}"))
        names: dict[str, list[str]] = {}
        for column, feature in content.get("info", {}).get("features", {}).items():
            if isinstance(feature, dict) and "names" in feature:
                names[column] = feature["names"]
        names_of_files.append(names)
    for path, names in zip(paths, names_of_files, strict=True):
        for column, classes in names.items():
            first = names_of_files[0].get(column)
            if classes != first:
                raise ValueError(
                    f"column {column} has the classes {listed(first or [])} in {paths[0]}, and "
                    f"{listed(classes)} in {path}; number the classes of all files by one list"
                )
    return names_of_files[0]


def read_hub(name: str, root: Path, shape: tuple[int, ...], columns: Sequence[str]) -> Raw:
    """The dataset `name` of the hub; OSError or ValueError if it cannot be reached."""
    import datasets

    return _read(datasets.load_dataset(name), root / name, shape, columns)


def _read(loaded: Any, source: Path, shape: tuple[int, ...], columns: Sequence[str]) -> Raw:
    """Inputs and labels of the train split, then those of the test split."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    train_name = next((name for name in TRAIN if name in splits), None)
    if train_name is None:
        raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
    used = [train_name]
    test_name = next((name for name in TEST if name in splits), None)
    if test_name is not None:
        used.append(test_name)
    parts = []
    for name in used:
        parts.append(_split(splits[name], source, shape, columns, train=name == train_name))
    label_column = column(splits[train_name], LABELS, source)
    label_feature = splits[train_name].features[label_column]
    raw = replace(concatenate(parts), classes=tuple(getattr(label_feature, "names", ())))
    return raw.noted(*unused_splits(splits, used, source))


def _split(
    split: Any, source: Path, shape: tuple[int, ...], columns: Sequence[str], *, train: bool
) -> Raw:
    """One split, of training or of test samples. The shape of an input decides what it is: 768 BERT
    features of texts, 1280 MobileNetV2 features of images, or an image."""
    if shape == (768,):
        x = _text_features(split, source)
    else:
        image_column = column(split, IMAGES, source)
        pictures = _pictures(split.select_columns([image_column]), image_column, source)
        if shape == (1280,):
            rgb_pictures = (picture.convert("RGB") for picture in pictures)
            x = mobilenet_v2(rgb_pictures, len(split), source.parent)
        else:
            x = np.empty((len(split), *shape), np.uint8)
            for row, picture in enumerate(pictures):
                x[row] = _array(picture, shape, f"{source}, row {row}")
    natural = {}
    for name in columns:
        if any(known in split.column_names for known in COLUMNS[name]):
            natural[name] = np.asarray(split[column(split, COLUMNS[name], source)][:])
    label_column = column(split, LABELS, source)
    y = one_per_sample(split[label_column][:], f"{source}, column {label_column}")
    num_train = len(y) if train else 0
    return Raw(x, y, num_train, natural)


def _text_features(split: Any, source: Path) -> np.ndarray:
    """BERT features (n, 768) of the texts in a row, joined; empty texts are left out."""
    text_columns = [name for name in TEXTS if name in split.column_names]
    texts = []
    for row in split.select_columns(text_columns):
        texts.append(" ".join(filter(None, row.values())))
    return bert(texts, source.parent)


def _pictures(images: Any, name: str, source: Path) -> Iterator[Any]:
    """The pictures, or nested lists, of a column; ValueError with the row of a damaged one."""
    rows = iter(images)
    for number in range(len(images)):
        try:
            picture = next(rows)[name]
        except Exception as error:  # Pillow raises many kinds of errors for damaged bytes
            raise ValueError(
                f"{source}, row {number} is no whole image ({type(error).__name__})"
            ) from error
        if picture is None:
            raise ValueError(f"{source}, row {number} holds no image; leave such rows out")
        yield picture


def column(split: Any, names: Sequence[str], source: Path) -> str:
    """The one of the `names` that is a column of the split. ValueError if none or several are."""
    present = [name for name in names if name in split.column_names]
    if not present:
        raise ValueError(
            f"{source}: none of the columns {', '.join(split.column_names)} is called "
            f"{', '.join(names)}; give the one that is needed one of these names"
        )
    if len(present) > 1:
        raise ValueError(
            f"{source}: one of the columns {' and '.join(present)} is needed, and it is not clear "
            "which; leave the others out"
        )
    return present[0]


def unused_splits(splits: Iterable[str], used: Sequence[str], source: Path) -> list[str]:
    """A note that names the splits that are not `used`; empty if all are."""
    others = [name for name in splits if name not in used]
    if not others:
        return []
    return [f"{source}: of the splits {', '.join(used)} is read, not {', '.join(others)}"]


def _array(picture: Any, shape: tuple[int, ...], where: str) -> np.ndarray:
    """A picture, or nested lists (H, W) or (H, W, C), as (C, H, W) uint8."""
    if hasattr(picture, "convert"):
        picture = picture.convert("L" if shape[0] == 1 else "RGB")
    array = np.asarray(picture, dtype=np.uint8)
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    if array.shape != shape:
        raise ValueError(f"{where}: image of shape {array.shape}, not {shape}")
    return array
