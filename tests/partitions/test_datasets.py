"""The real loaders on real MNIST where it is there, and on miniatures in the official forms."""

import os
from dataclasses import replace

import dataset_files
import datasets as hf
import numpy as np
import pytest

from partitions.datasets import loading
from partitions.datasets.readers.raw import Raw

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_folders_of_the_datasets_library(tmp_path, form):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (10, 28, 28), dtype=np.uint8)
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(num_classes=10)})
    splits = {
        name: hf.Dataset.from_dict(
            {"image": [{"bytes": png(i), "path": None} for i in x[rows]], "label": list(rows)},
            features=features,
        )
        for name, rows in (("train", range(8)), ("test", range(8, 10)))
    }
    folder = tmp_path / "mnist"
    if form == "save_to_disk":
        hf.DatasetDict(splits).save_to_disk(str(folder))
    else:
        folder.mkdir()
        for name, split in splits.items():
            split.to_parquet(str(folder / f"{name}-00000-of-00001.parquet"))
    data = loading.load("mnist", str(tmp_path))
    assert np.array_equal(data.x.numpy()[:, 0], x)
    assert data.y.tolist() == list(range(10))
    assert data.num_train == 8


def png(image: np.ndarray) -> bytes:
    from io import BytesIO

    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_truncated_file_is_named(tmp_path):
    dataset_files.idx_pairs(tmp_path / "mnist", suffix=".gz")
    file = next((tmp_path / "mnist").glob("train-images*"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.*truncated"):
        loading.load("mnist", str(tmp_path))


def test_labels_out_of_range_and_missing_sources_are_errors(tmp_path, monkeypatch):
    dataset_files.idx_pairs(tmp_path / "mnist")
    dataset_files.write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.full(100, 11))
    with pytest.raises(ValueError, match=r"labels 0…11 lie outside 0…9"):
        loading.load("mnist", str(tmp_path))
    monkeypatch.setattr(hf, "load_dataset", unreachable)
    monkeypatch.delenv("FEDAPPS_DATA_DIR", raising=False)
    with pytest.raises(ValueError) as error:
        loading.load("fashion-mnist", str(tmp_path))
    assert all(w in str(error.value) for w in ("official files", "save_to_disk", "hub"))


def unreachable(name):
    raise ConnectionError(f"no network that reaches {name}")


@pytest.mark.skipif(not os.environ.get("FEDAPPS_DATA_DIR"), reason="real MNIST is not there")
def test_real_mnist():
    data = loading.load("mnist")
    assert tuple(data.x.shape) == (70000, 1, 28, 28)
    assert data.num_train == 60000
    # class counts of LeCun's page: training and test set together
    assert np.bincount(data.y.numpy()).tolist() == [
        6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958,
    ]  # fmt: skip


def test_customary_constants_are_those_that_others_use():
    """Means and deviations of the training images, as papers' code standardises by them."""
    published = {
        "mnist": (0.1307, 0.3081),
        "femnist": (0.1307, 0.3081),
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    }
    known = {name: (info.mean, info.std) for name, info in loading.DATASETS.items() if info.std}
    assert known == published


def test_the_embedded_digits():
    """1797 images of 17 grey values, the last fifth for tests; scikit-learn's first ones count up
    from 0."""
    data = loading.load("digits")
    assert (tuple(data.x.shape), data.num_train, data.info.scale) == ((1797, 1, 8, 8), 1437, 16)
    assert (int(data.x.max()), data.y[:12].tolist()) == (16, [*range(10), 0, 1])


def test_the_files_names_of_classes_go_before_the_known_ones():
    raw = Raw(np.zeros((2, 1, 8, 8), np.uint8), np.arange(2), 2)
    known = loading.info("digits")
    assert loading._checked(known, raw, "here").classes == tuple("0123456789")
    own = tuple("abcdefghij")
    assert loading._checked(known, replace(raw, classes=own), "here").classes == own


def test_past_the_cache(tmp_path):
    """`reread` reads what `load` has kept; where there are no files, both are the same."""
    dataset_files.idx_pairs(tmp_path / "mnist")
    kept = loading.load("mnist", str(tmp_path))
    labels = np.arange(100)[::-1] % 10
    dataset_files.write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", labels)
    assert loading.load("mnist", str(tmp_path)) is kept
    assert loading.reread("mnist", str(tmp_path)).y[:100].tolist() == labels.tolist()
    assert loading.reread("digits", str(tmp_path)) is loading.load("digits", str(tmp_path))
