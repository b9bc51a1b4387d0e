"""Datasets in the `datasets` library's form: a local folder, or the Hugging Face hub."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partitions.datasets.features import bert, mobilenet_v2
from partitions.datasets.labels import one_per_sample
from partitions.datasets.readers.raw import Raw, concatenate

IMAGES, TEXTS = ("image", "img"), ("question_title", "question_content", "best_answer", "text")
LABELS = ("label", "labels", "fine_label", "character", "topic", "class")
TRAIN, TEST = ("train", "training"), ("test", "validation")
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
    return None if loaded is None else _read(loaded, folder, shape, columns)


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
    """The bytes that the parquet files in `folder`, or this file, take in memory, at least."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.parquet"))
    if not files:
        return 0
    import pyarrow.parquet

    metas = [pyarrow.parquet.read_metadata(file) for file in files]
    groups = [meta.row_group(i) for meta in metas for i in range(meta.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(max(c.total_uncompressed_size, 4 * c.num_values) for c in columns)


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

    return datasets.load_dataset("parquet", data_files=files)


def read_hub(name: str, root: Path, shape: tuple[int, ...], columns: Sequence[str]) -> Raw:
    """The dataset `name` of the hub; OSError or ValueError if it cannot be reached."""
    import datasets

    return _read(datasets.load_dataset(name), root / name, shape, columns)


def _read(loaded: Any, source: Path, shape: tuple[int, ...], columns: Sequence[str]) -> Raw:
    """Inputs and labels of the train split, then those of the test split."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    train, test = ([s for s in names if s in splits][:1] for names in (TRAIN, TEST))
    if not train:
        raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
    parts = [_split(splits[s], source, shape, columns, s in TRAIN) for s in train + test]
    feature = splits[train[0]].features[column(splits[train[0]], LABELS, source)]
    raw = replace(concatenate(parts), classes=tuple(getattr(feature, "names", ())))
    return raw.noted(*unused_splits(splits, train + test, source))


def _split(
    split: Any, source: Path, shape: tuple[int, ...], columns: Sequence[str], train: bool
) -> Raw:
    if shape == (768,):
        texts = [name for name in TEXTS if name in split.column_names]
        x = bert([" ".join(filter(None, row.values())) for row in split.select_columns(texts)],
                 source.parent)  # fmt: skip
    else:
        images = split.select_columns([name := column(split, IMAGES, source)])
        pictures = _pictures(images, name, source)
        if shape == (1280,):
            rgb = (picture.convert("RGB") for picture in pictures)
            x = mobilenet_v2(rgb, len(split), source.parent)
        else:
            x = np.empty((len(split), *shape), np.uint8)
            for row, picture in enumerate(pictures):
                x[row] = _array(picture, shape, f"{source}, row {row}")
    natural = {
        name: np.asarray(split[column(split, COLUMNS[name], source)][:])
        for name in columns
        if any(known in split.column_names for known in COLUMNS[name])
    }
    labels = column(split, LABELS, source)
    y = one_per_sample(split[labels][:], f"{source}, column {labels}")
    return Raw(x, y, len(y) if train else 0, natural)


def _pictures(images: Any, name: str, source: Path) -> Iterator[Any]:
    """The pictures, or nested lists, of a column; ValueError with the row of a damaged one."""
    rows = iter(images)
    for number in range(len(images)):
        try:
            picture = next(rows)[name]
        except Exception as error:  # whatever damaged bytes raise in Pillow
            raise ValueError(
                f"{source}, row {number} is no whole image ({type(error).__name__})"
            ) from error
        if picture is None:
            raise ValueError(f"{source}, row {number} holds no image; leave such rows out")
        yield picture


def column(split: Any, names: Sequence[str], source: Path) -> str:
    """That of the names which the split has as a column; ValueError if it has none, or several."""
    found = [name for name in names if name in split.column_names]
    if not found:
        raise ValueError(f"{source}: none of the columns {names} among {split.column_names}")
    if len(found) > 1:
        raise ValueError(
            f"{source}: one of the columns {' and '.join(found)} is needed, and it is not clear "
            "which; leave the others out"
        )
    return found[0]


def unused_splits(splits: Iterable[str], used: Sequence[str], source: Path) -> list[str]:
    """A note of the splits that are not `used`, if there are any."""
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
