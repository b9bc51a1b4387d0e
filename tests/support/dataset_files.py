"""Small data sets in their official on-disk forms, each with 10 images a class and split."""

import csv
import gzip
import hashlib
import json
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

OBJECTS = "airplane automobile bird cat deer dog frog horse ship truck"
Arrays = tuple[np.ndarray, np.ndarray]


def images(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    """An IDX file of unsigned bytes, gzipped if the name says so."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def idx_pairs(folder: Path, splits=("train", "t10k"), classes: int = 10, suffix="") -> Arrays:
    """Image and label files of two splits, as MNIST and EMNIST have them."""
    x, y = images(20 * classes, 28, 28), np.arange(20 * classes) % classes
    for split, rows in zip(splits, np.split(np.arange(len(y)), 2), strict=True):
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", x[rows])
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", y[rows])
    return x[:, None], y


def cifar(folder: Path, number: int, monkeypatch) -> Arrays:
    """The python batches; torchvision's table of checksums gets those of the miniature."""
    from torchvision import datasets

    table = datasets.CIFAR10 if number == 10 else datasets.CIFAR100
    place = folder / table.base_folder
    place.mkdir(parents=True)
    x, y = images(1200 if number == 10 else 600, 3, 32, 32), np.arange(1200) % number
    y = y[: len(x)]
    files = [name for name, _ in (*table.train_list, *table.test_list)]
    sums = {}
    for name, rows in zip(files, np.split(np.arange(len(y)), len(files)), strict=True):
        batch = {"data": x[rows].reshape(len(rows), -1)}
        if number == 10:
            batch["labels"] = y[rows].tolist()
        else:
            batch |= {"fine_labels": y[rows].tolist(), "coarse_labels": (y[rows] % 20).tolist()}
        sums[name] = _pickled(place / name, batch)
    classes = [f"class {i}" for i in range(number)] if number == 100 else OBJECTS.split()
    names = {table.meta["key"]: classes}
    names |= {"coarse_label_names": [f"super {i:02}" for i in range(20)]} if number == 100 else {}
    meta = table.meta | {"md5": _pickled(place / table.meta["filename"], names)}
    monkeypatch.setattr(table, "meta", meta)
    for kind in ("train_list", "test_list"):
        monkeypatch.setattr(table, kind, [[n, sums[n]] for n, _ in getattr(table, kind)])
    return x, y


def _pickled(path: Path, content: dict) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def stl10(folder: Path) -> Arrays:
    """The labeled binaries: images column by column, labels from 1."""
    place = folder / "stl10_binary"
    place.mkdir(parents=True)
    x, y = images(100, 3, 96, 96), np.arange(100) % 10
    for split, rows in (("train", slice(0, 60)), ("test", slice(60, None))):
        (place / f"{split}_X.bin").write_bytes(x[rows].transpose(0, 1, 3, 2).tobytes())
        (place / f"{split}_y.bin").write_bytes((y[rows] + 1).astype(np.uint8).tobytes())
    names = "airplane bird car cat deer dog horse monkey ship truck"
    (place / "class_names.txt").write_text(names.replace(" ", "\n"))
    return x, y


def leaf(folder: Path, writers: int = 12) -> Arrays:
    """LEAF's JSON of FEMNIST: two files a split, `writers` writers in both splits."""
    xs, ys = [], []
    for split in ("train", "test"):
        for part in range(2):
            users = {}
            for writer in range(part, writers, 2):
                n = 20 if split == "train" else 4
                x, y = images(n, 784, seed=writer), (np.arange(n) * 7 + writer) % 62
                users[f"f{writer:04}_00"] = {"x": (x / 255).tolist(), "y": y.tolist()}
                xs.append(x.reshape(-1, 1, 28, 28))
                ys.append(y)
            path = folder / split / f"all_data_{part}_niid_0_keep_0_{split}_9.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            counts = [len(user["y"]) for user in users.values()]
            path.write_text(
                json.dumps({"users": list(users), "num_samples": counts, "user_data": users})
            )
    return np.concatenate(xs), np.concatenate(ys)


def omniglot(folder: Path) -> None:
    """Three characters of each of four alphabets, six 105×105 drawings each, ink black."""
    for half, alphabets in (
        ("background", ("Greek", "Latin", "Sanskrit")),
        ("evaluation", ("Manx",)),
    ):
        for alphabet in alphabets:
            for character in range(1, 4):
                place = folder / f"images_{half}" / alphabet / f"character{character:02}"
                place.mkdir(parents=True)
                for drawing in range(6):
                    ink = np.full((105, 105), 255, np.uint8)
                    ink[10 : 10 + 20 * character, 30 + drawing : 60] = 0
                    Image.fromarray(ink).convert("1").save(place / f"{character}_{drawing:02}.png")


def federated_vision(folder: Path, inaturalist: bool) -> None:
    """24 training photographs of four users, 3 test ones, in three classes."""
    folder.mkdir(parents=True)
    index, train, test = [], [], []
    for number in range(27):
        stem = hashlib.md5(str(number).encode()).hexdigest()[:16]
        below = "train_val_images/Aves/Larus" if inaturalist else "train/" + "/".join(stem[:3])
        path = folder / below / f"{stem}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images(1, 40, 50, 3, seed=number)[0]).save(path)
        index.append({"id": number, "file_name": f"{below}/{stem}.jpg"})
        row = {"image_id": number if inaturalist else stem, "class": number % 3}
        (train if number < 24 else test).append(row)
    for i, row in enumerate(train):
        row["user_id"] = f"user {i % 4}"
    for name, rows in (("federated_train.csv", train), ("test.csv", test)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if inaturalist:
        (folder / "train2017.json").write_text(json.dumps({"images": index}))


def yahoo(folder: Path) -> None:
    """Eight questions a class for training, two for tests."""
    folder.mkdir(parents=True)
    for split, each in (("train", 8), ("test", 2)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = [[i % 10 + 1, f"why {i}?", "", f"because {i % 10}"] for i in range(10 * each)]
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
