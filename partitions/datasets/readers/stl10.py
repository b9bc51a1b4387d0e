"""STL-10 (Coates et al., 2011): the labeled binaries, as folder or tar.gz."""

from pathlib import Path

import numpy as np

from partitions.datasets.readers.raw import Raw, concatenate, files_of, is_official

BYTES = 3 * 96 * 96  # of an image, column by column


def read_stl10(folder: Path) -> Raw | None:
    """Training, then test images (n, 3, 96, 96). ValueError naming a damaged file."""
    from torchvision.datasets import STL10

    get = files_of(folder, STL10.base_folder, STL10.filename, "train_X.bin")
    if get is None:
        return None
    known = dict((*STL10.train_list, *STL10.test_list))
    classes = tuple(get(STL10.class_names_file).decode().split())
    parts = []
    for split in ("train", "test"):
        images, labels = f"{split}_X.bin", f"{split}_y.bin"
        x, y = (np.frombuffer(get(name), np.uint8) for name in (images, labels))
        if len(x) != BYTES * len(y) or not len(y):
            raise ValueError(
                f"{folder}: {images} is truncated: {len(x)} bytes for {len(y)} labels in {labels}"
            )
        if y.min() < 1 or y.max() > len(classes):
            raise ValueError(f"{folder}: {labels} has labels outside 1…{len(classes)}")
        for name, data in ((images, x), (labels, y)):
            is_official(data.tobytes(), known[name], f"{folder}: {name}")
        x = x.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
        count = len(y) if split == "train" else 0
        parts.append(Raw(x, y.astype(np.int64) - 1, count, classes=classes))
    return concatenate(parts)
