"""Datasets in the `datasets` library's form: a local folder, or the Hugging Face hub."""

from pathlib import Path
from typing import Any

import numpy as np

from partitions.raw import Raw

IMAGES, LABELS = ("image", "img"), ("label", "labels", "fine_label", "character")


def read_folder(folder: Path) -> Raw | None:
    """A folder of ``save_to_disk`` or of parquet files; None if it is neither."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        return _read(datasets.load_from_disk(str(folder)), str(folder))
    files = sorted(folder.rglob("*.parquet"))
    if files:
        import datasets

        splits = {
            split: [str(f) for f in files if split in f.name or split in f.parent.name]
            for split in ("train", "test")
        }
        splits = {k: v for k, v in splits.items() if v} or {"train": [str(f) for f in files]}
        return _read(datasets.load_dataset("parquet", data_files=splits), str(folder))
    return None


def read_hub(name: str) -> Raw:
    """The dataset `name` of the hub; OSError or ValueError if it cannot be reached."""
    import datasets

    return _read(datasets.load_dataset(name), name)


def _read(loaded: Any, source: str) -> Raw:
    """Images and labels of the train split, then those of the test split."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    ordered = [splits[name] for name in ("train", "test") if name in splits]
    if not ordered:
        raise ValueError(f"{source}: no split 'train' among {sorted(splits)}")
    xs, ys = [], []
    for split in ordered:
        image, label = (_column(split, names, source) for names in (IMAGES, LABELS))
        xs += [_array(value) for value in split[image]]
        ys.append(np.asarray(split[label]))
    return Raw(np.stack(xs), np.concatenate(ys), len(ordered[0]))


def _column(split: Any, names: tuple[str, ...], source: str) -> str:
    for name in names:
        if name in split.column_names:
            return name
    raise ValueError(f"{source}: none of the columns {names} among {split.column_names}")


def _array(value: Any) -> np.ndarray:
    """An image (H, W) or (H, W, C) as (C, H, W) uint8."""
    array = np.asarray(value, dtype=np.uint8)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
