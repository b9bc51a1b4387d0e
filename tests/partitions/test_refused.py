"""Requests that cannot be met and files that are not what they should be: a sentence names what is
wrong. What a folder does not hold at all is no error yet: other forms are tried."""

import json
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import datasets as hf
import numpy as np
import pytest
import torch
from PIL import Image

from fedapps.common import external_code
from fedapps.settings.config import defaults
from partitions import federation
from partitions.datasets import features, loading
from partitions.datasets.readers import hub, yahoo
from partitions.datasets.readers.cifar import _images, read_cifar10
from partitions.datasets.readers.federated_vision import read_landmarks
from partitions.datasets.readers.femnist import read_femnist
from partitions.datasets.readers.idx import read_idx, read_mnist
from partitions.datasets.readers.local import read_files
from partitions.datasets.readers.omniglot import read_omniglot
from partitions.datasets.readers.raw import Raw
from partitions.datasets.readers.stl10 import read_stl10
from partitions.federations import novel_shots
from partitions.items import from_items, from_tensors
from partitions.reading import Form, read
from partitions.rules.class_fraction import ClassFractionPartitioner
from partitions.rules.natural import NaturalPartitioner
from partitions.rules.preference import PreferencePartitioner
from partitions.shares import PreferredSamples
from partitions.shifts.translation import translated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_public_samples": 1797}, "samples is 1797, but digits has only 1797 samples"),
        ({"partition": "shards", "partition_shards_per_client": 90}, "is 90; 1800 shards for 1797"),
        ({"partition": "natural"}, "digits has no natural column"),
        ({"partition": "coarse"}, "no column 'coarse'; it has none"),
        ({"partition": "class-fraction", "partition_classes_per_client": 11}, "11.*only 10"),
        ({"partition": "pathological", "partition_classes_per_client": 11}, "11.*only 10"),
        ({"partition_classes_per_client": 0}, "classes-per-client is 0"),
        ({"partition": "dirichlet", "partition_alpha": 0.0}, "alpha is 0.0.*> 0"),
        ({"partition": "dirichlet", "partition_novel_alpha": -1.0}, "alpha is -1.0.*> 0"),
        ({"partition": "dirichlet-novel", "partition_alpha": 0.0}, "alpha is 0.0.*> 0"),
        ({"partition": "rotated", "partition_samples": 5}, "samples is 5.*num-clients=20"),
        ({"partition": "rotated", "partition_samples": 5000}, "samples is 5000.*1797"),
        ({"partition": "rotated", "partition_angles": "0,x"}, "angles is '0,x'"),
        ({"partition": "rotated", "partition_novel_angles": "nan"}, "novel-angles is 'nan'"),
        ({"partition": "corrupted", "partition_blur": -1.0}, "blur is -1.0"),
        ({"partition": "subsampled", "partition_keep_fraction": 0.0}, "keep-fraction is 0.0"),
        (
            {"partition": "mixed", "partition_novel_shifts": "blurr"},
            "'blurr'; known: none, alp",
        ),
        ({"partition": "mixed", "partition_novel_shifts": "blur"}, "'blur', which needs images"),
        ({"partition": "mixed", "partition_novel_shifts": "alpha-0"}, "'alpha-0'.*must be > 0"),
        ({"partition": "mixed", "partition_novel_shifts": "rotation-x"}, "write a number"),
        ({"partition": "mixed", "partition_novel_shifts": ""}, "novel-shifts is empty"),
        ({"partition_public_samples": -2}, "public-samples is -2"),
        ({"partition_public_samples": 1790}, "num-clients is 20, more than the 7 samples"),
        ({"partition_validation_fraction": 1.0}, "validation-fraction is 1.0"),
        ({"partition_test_fraction": 0.9}, "leave nothing to train on"),
        ({"partition": "class-fraction", "num_clients": 900}, "fewer than 2 samples"),
        ({"partition": "nope"}, "'nope'.*iid.*pathological"),
        ({"train_fraction": 1.5}, "train-fraction is 1.5"),
        ({"train_fraction": 0.01}, "train-fraction is 0.01"),
        (
            {"partition": "preference", "num_clients": 10, "partition_samples_per_user": 400},
            r"type 0 has \d+ rows to train, fewer than the 1\d\d positive ones of a user",
        ),
    ],
)
def test_what_the_data_cannot_give(divide, changes, message):
    with pytest.raises(ValueError, match=message):
        fed = divide(**changes)
        fed.share(0)


def test_superclasses_are_dealt_to_equally_many_clients(divide, toy):
    dataset = toy([0, 0, 1, 1], coarse=["pet", "pet", "tree", "tree"])
    with pytest.raises(ValueError, match="num-clients is 3; it must be a multiple of the 2 super"):
        divide(dataset, partition="coarse", num_clients=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassFractionPartitioner(2, 0, 0), "classes-per-client is 0"),
        (
            lambda: ClassFractionPartitioner(2, 3, 0).assign(np.arange(4) % 2),
            "3, more than the 2 cl",
        ),
        (lambda: NaturalPartitioner(2, "writer", 0, 0), "min-samples is 0"),
        (lambda: novel_shots({"novel-shots": -1}), "novel-shots is -1"),
        (lambda: from_items(3), "int is not a dataset with items"),
        (lambda: from_items([]), "list is not a dataset with items and a length above 0"),
        (lambda: from_tensors(torch.ones(2, 4), torch.ones(3)), "2 inputs, but 3 labels"),
        (lambda: read(("a", 1), Form()), "str where its input should be a tensor"),
        (lambda: external_code.call_with("a:b", 3, {}, {}), "'a:b' is 3; it must be a function"),
        (lambda: loading._made("os:getcwd", {}), "'os:getcwd' is .*; a dataset must be an Info"),
        (lambda: hub._read({"dev": []}, "here", (1,), ()), r"here: no split 'train'.*\['dev'\]"),
        (lambda: hub._array(np.ones((3, 4)), (1, 4, 4), "row 7"), r"row 7: .*\(1, 3, 4\), not"),
        (
            lambda: hub.column(SimpleNamespace(column_names=["a"]), ("img", "x"), "here"),
            "here: none of the columns a is called img, x; give the one that is needed one of",
        ),
        (lambda: _images({"data": np.ones((1, 9)), "y": [0]}, "y", "b"), r"b: float64 \(1, 9\) an"),
    ],
)
def test_what_is_asked_wrongly(make, message):
    external_code.allow("os:getcwd")
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rule", ["iid", "preference", "cross-dataset"])
def test_there_are_no_other_clients(rule):
    changes = {"partition": rule, "partition.novel-dataset": "digits", "partition.base-rule": "iid"}
    fed = federation(defaults() | changes)
    for client in (-1, 20):
        with pytest.raises(ValueError, match=f"client {client} is not one of the 20 clients"):
            fed.share(client)


def test_a_user_with_a_taste_is_a_partition_as_others_are():
    """Of 6 samples 2 are for testing and 4 for training, half of either of the type preferred."""
    rule = PreferencePartitioner([1, 2], 6, 0, 2, seed=0)
    rule.dataset = hf.Dataset.from_dict({"label": np.arange(60) % 3})
    assert rule.num_partitions == 2
    for user, kind in enumerate((1, 2)):
        liked = np.array(rule.load_partition(user)["label"]) == kind
        assert (liked[:4].sum(), liked[4:].sum()) == (2, 1)


def test_a_tastes_samples_move_to_a_device():
    x, types = torch.ones(3, 2), torch.tensor([0, 1, 1])
    mine = PreferredSamples(x, types, torch.tensor([2, 0]), scale=1.0, preferred=1)
    assert mine.to("cpu") is mine
    moved = mine.to("meta")
    assert (moved.x.device.type, moved.y.device.type, moved.preferred) == ("meta", "meta", 1)


def test_data_without_a_class_in_common(toy):
    one, other = (replace(toy([0, 1]), classes=names) for names in (("a", "b"), ("c", "d")))
    with pytest.raises(ValueError, match="toy and toy have no class in common"):
        translated(one, other)


@pytest.mark.parametrize(
    "read",
    [
        read_cifar10,
        read_landmarks,
        read_femnist,
        read_mnist,
        read_omniglot,
        read_stl10,
        yahoo.read_yahoo,
    ],
)
def test_nothing_is_read_from_a_folder_of_other_files(read, tmp_path):
    (tmp_path / "notes.txt").write_text("train")
    assert read(tmp_path) is None


def test_a_folder_of_other_files_is_no_dataset(tmp_path):
    (tmp_path / "mnist").mkdir()
    with pytest.raises(ValueError, match="mnist holds neither mnist's files"):
        loading.load("mnist", str(tmp_path))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((2, 4)), [0, 1], r"here: inputs of shape \(4,\), toy has \(3,\)"),
        (np.ones((2, 3)), [0], "here: 2 inputs, but 1 labels"),
        (np.ones((2, 3)), [0, 5], "here: labels 0…5 lie outside 0…4"),
    ],
)
def test_arrays_that_are_not_the_datasets(x, y, message):
    with pytest.raises(ValueError, match=message):
        loading._checked(loading.Info("toy", (3,), 5, ""), Raw(x, np.array(y), 1), "here")


def test_idx_files_of_another_kind(tmp_path):
    """0x0D is the type of floats; two images and three labels are no pair."""
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(b"\0\0\x0d\x01\0\0\0\0")
    with pytest.raises(ValueError, match="no IDX file of unsigned bytes"):
        read_idx(file)
    for split in ("train", "t10k"):
        for kind, shape in (("images-idx3", (2, 1, 1)), ("labels-idx1", (3,))):
            header = b"\0\0\x08" + bytes([len(shape)]) + b"".join(n.to_bytes(4) for n in shape)
            content = header + bytes(int(np.prod(shape)))
            (tmp_path / f"{split}-{kind}-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match="2 train images, but 3 labels"):
        read_mnist(tmp_path)


def test_a_leaf_of_another_size(tmp_path):
    (tmp_path / "train").mkdir()
    user = {"x": [[0.5] * 10], "y": [1]}
    (tmp_path / "train" / "a.json").write_text(json.dumps({"user_data": {"me": user}}))
    with pytest.raises(ValueError, match=r"a\.json: inputs of shape \(1, 10\) for 1 labels"):
        read_femnist(tmp_path)


def test_labels_of_stl10_begin_at_one(tmp_path):
    place = tmp_path / "stl10_binary"
    place.mkdir()
    (place / "class_names.txt").write_text("cat dog")
    for split in ("train", "test"):
        (place / f"{split}_X.bin").write_bytes(bytes(3 * 96 * 96))
        (place / f"{split}_y.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"train_y\.bin has labels outside 1…2"):
        read_stl10(tmp_path)


def test_questions_without_a_test_file(tmp_path):
    (tmp_path / "train.csv").write_text('"1","a","b","c"\n')
    with pytest.raises(ValueError, match=r"has no file test\.csv"):
        yahoo.read_yahoo(tmp_path)


def test_drawings_are_read_from_archives_too(tmp_path):
    """As from folders: class and alphabet by the path, ink 1."""
    ink = np.full((105, 105), 255, np.uint8)
    ink[:15, :30] = 0
    Image.fromarray(ink).save(tmp_path / "a.png")
    archive = tmp_path / "images_evaluation.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for character in ("character02", "character01"):
            packed.write(tmp_path / "a.png", f"images_evaluation/Manx/{character}/1_01.png")
    raw = read_omniglot(tmp_path)
    assert raw.classes == ("Manx/character01", "Manx/character02")
    assert (raw.y.tolist(), raw.columns["alphabet"].tolist()) == ([0, 1], ["Manx", "Manx"])
    assert raw.x[0, 0, :5, :9].tolist() == [[255] * 8 + [0]] * 4 + [[0] * 9]  # 15 and 30 of 3.75
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"images_evaluation\.zip is truncated or no zip"):
        read_omniglot(tmp_path)


def test_photographs_of_users_that_are_not_whole(tmp_path, monkeypatch):
    read, table = read_landmarks, tmp_path / "federated_train.csv"
    monkeypatch.setattr(
        "partitions.datasets.readers.federated_vision.mobilenet_v2", lambda x, *_: list(x)
    )
    table.write_text("image_id,class,user_id\nabc,1,me\n,2,me\n")
    with pytest.raises(ValueError, match=r"federated_train\.csv, line 3: no image_id and class"):
        read(tmp_path)
    table.write_text("image_id,class,user_id\nabc,1,me\n")
    (tmp_path / "abc.jpg").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"abc\.jpg is truncated or no image"):
        read(tmp_path)
    (tmp_path / "train2017.json").write_text('{"images": [{"id": 1}]}')
    with pytest.raises(ValueError, match=r"train2017\.json is truncated or not iNaturalist's"):
        read(tmp_path)
    (tmp_path / "federated_train_2.csv").write_text("")
    with pytest.raises(ValueError, match="has several splits, keep one"):
        read(tmp_path)


def test_columns_of_texts_and_pictures_become_features(monkeypatch, tmp_path):
    """Of a row's texts those that are there, in the columns' order; pictures in colour."""
    seen = []
    monkeypatch.setattr(hub, "bert", lambda texts, place: seen.append((texts, place)))
    columns = {name: [f"{name} 1", None] for name in hub.TEXTS[:2]} | {"label": [3, 4]}
    raw = hub._split(hf.Dataset.from_dict(columns), tmp_path / "yahoo", (768,), (), train=True)
    both = " ".join(f"{name} 1" for name in hub.TEXTS[:2])
    assert seen == [([both, ""], tmp_path)]
    assert (raw.y.tolist(), raw.num_train) == ([3, 4], 2)

    monkeypatch.setattr(hub, "mobilenet_v2", lambda x, n, place: [(p.mode, n, place) for p in x])
    pictures = [Image.new("L", (4, 4), 7)]
    split = hf.Dataset.from_dict({"image": pictures, "label": [5]}).cast_column("image", hf.Image())
    raw = hub._split(split, tmp_path / "birds", (1280,), (), train=False)
    assert raw.x == [("RGB", 1, tmp_path)]
    assert (raw.y.tolist(), raw.num_train) == ([5], 0)


def test_own_splits_that_do_not_belong_together(tmp_path):
    np.savez(tmp_path / "d.npz", x_train=np.ones((2, 3)), y_train=[0, 1], x_test=np.ones((1, 4)),
             y_test=[0])  # fmt: skip
    with pytest.raises(ValueError, match="training and test inputs differ in shape or type"):
        read_files(tmp_path / "d.npz")
    named = {name: hf.Dataset.from_dict({"x": [[1.0]], "label": [0]}) for name in ("a", "b")}
    hf.DatasetDict(named).save_to_disk(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"parts: no split 'train' among \['a', 'b'\]"):
        read_files(tmp_path / "parts")


def test_weights_that_are_nowhere(tmp_path, monkeypatch):
    """Neither in the folder, nor from the network; and a library that is not installed."""

    def unreachable(*arguments, **named):
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", unreachable)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with pytest.raises(ValueError, match=r"neither at .*mobilenet_v2.* nor to download"):
        features.mobilenet_network(tmp_path)
    nobody = SimpleNamespace(from_pretrained=unreachable)
    library = SimpleNamespace(AutoModel=nobody, AutoTokenizer=nobody)
    monkeypatch.setitem(sys.modules, "transformers", library)
    with pytest.raises(ValueError, match=r"BERT's weights are neither in .* nor at the hub"):
        features.bert_network(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'fedapps\[text\]'"):
        features.bert_network(tmp_path)
