"""Each dataset in its official form goes through the real loader, a partition and FedAvg."""

import json
import pickle
from pathlib import Path

import dataset_files
import numpy as np
import pytest
import torch
from PIL import Image

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from partitions import federation
from partitions.cross_federation import CrossFederation
from partitions.datasets import features, loading
from partitions.datasets.readers.femnist import read_femnist
from partitions.shifts.translation import translated

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def random_extractors(monkeypatch):
    """MobileNetV2 and BERT with random weights; BERT's vocabulary is the miniature's words."""
    from torchvision.models import mobilenet_v2
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    images = mobilenet_v2().eval()
    config = BertConfig(
        vocab_size=200, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    texts = BertModel(config).eval()

    def tokenizer(batch, **options):
        assert options["truncation"]
        assert options["max_length"] == 128
        rows = [
            torch.tensor([1, *(ord(letter) for letter in text if letter < "~")]) for text in batch
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    monkeypatch.setattr(features, "mobilenet_network", lambda data_dir: images)
    monkeypatch.setattr(features, "bert_network", lambda data_dir: (tokenizer, texts))
    return images, tokenizer, texts


def three_rounds(tmp_path, dataset, partition, clients=4, **changes):
    """FedAvg over a dataset of `tmp_path`; every client takes part."""
    named = {f"partition.{key.replace('_', '-')}": value for key, value in changes.items()}
    config = defaults() | named | {
        "dataset": dataset, "data-dir": str(tmp_path), "partition": partition,
        "num-clients": clients, "rounds": 3, "local-steps": 2, "batch-size": 8, "model": "mlp",
        "evaluate-every": 1,
    }  # fmt: skip
    folder = tmp_path / "results"
    config["output-dir"] = str(folder)
    run(InProcessGrid.simulation(app, config, clients), config, "in-process")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert len(json.loads((folder / "summary.json").read_text())["per_client"]) == clients


def check_arrays(data, x, y, num_train):
    assert np.array_equal(data.x.numpy(), x)
    assert np.array_equal(data.y.numpy(), y)
    assert data.num_train == num_train


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_pairs(tmp_path, suffix):
    x, y = dataset_files.idx_pairs(tmp_path / "fashion-mnist", suffix=suffix)
    data = loading.load("fashion-mnist", str(tmp_path))
    check_arrays(data, x, y, 100)
    assert data.classes[9] == "Ankle boot"
    three_rounds(tmp_path, "fashion-mnist", "class-fraction", 5)


@pytest.mark.parametrize("number", [10, 100])
def test_cifar(tmp_path, monkeypatch, number):
    x, y = dataset_files.cifar(tmp_path / f"cifar{number}", number, monkeypatch)
    data = loading.load(f"cifar{number}", str(tmp_path))
    check_arrays(data, x, y, 1000 if number == 10 else 300)
    assert data.classes[9] == ("truck" if number == 10 else "class 9")
    if number == 100:
        assert data.columns["coarse"].tolist() == [f"super {i % 20:02}" for i in y]
        three_rounds(tmp_path, "cifar100", "coarse", 20)
    else:
        three_rounds(tmp_path, "cifar10", "corrupted", blur=1.0)


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_an_unverified_pickle_is_never_opened(tmp_path, monkeypatch, damage):
    dataset_files.cifar(tmp_path / "cifar10", 10, monkeypatch)
    file = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_3"
    content = file.read_bytes()
    damaged = content[:-9] if damage == "truncated" else content[:-1] + b"!"
    file.write_bytes(damaged)
    if damage == "missing":
        file.unlink()
    opened, real = [], pickle.loads
    monkeypatch.setattr(pickle, "loads", lambda data, **_: opened.append(data) or real(data, **_))
    with pytest.raises(ValueError, match=r"data_batch_3"):
        loading.load("cifar10", str(tmp_path))
    assert opened
    assert damaged not in opened


def test_cifar_from_its_archive(tmp_path, monkeypatch):
    import tarfile

    x, y = dataset_files.cifar(tmp_path / "made", 10, monkeypatch)
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / "cifar10" / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    check_arrays(loading.load("cifar10", str(tmp_path)), x, y, 1000)
    archive = tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:5000])
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz: no whole file"):
        loading.load("cifar10", str(tmp_path))


def test_stl10(tmp_path, caplog):
    x, y = dataset_files.stl10(tmp_path / "stl10")
    check_arrays(loading.load("stl10", str(tmp_path)), x, y, 60)
    assert "train_X.bin: md5" in caplog.text  # a miniature is not the official file
    three_rounds(tmp_path, "stl10", "iid")
    file = tmp_path / "stl10" / "stl10_binary" / "test_X.bin"
    file.write_bytes(file.read_bytes()[:-1])
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"test_X\.bin is truncated"):
        loading.load("stl10", str(tmp_path))


def test_femnist_of_leaf(tmp_path):
    x, y = dataset_files.leaf(tmp_path / "femnist")
    data = loading.load("femnist", str(tmp_path))
    check_arrays(data, x, y, 240)
    # a file a half: writers 0, 2, … and 1, 3, …, 20 samples each, then four each
    halves = [range(0, 12, 2), range(1, 12, 2)]
    writers = [f"f{i:04}_00" for n in (20, 4) for half in halves for i in half for _ in range(n)]
    assert data.columns["writer"].tolist() == writers
    three_rounds(tmp_path, "femnist", "natural", 6)
    file = tmp_path / "femnist" / "test" / "all_data_1_niid_0_keep_0_test_9.json"
    content = json.loads(file.read_text())
    content["user_data"]["f0001_00"]["y"][0] = 62
    file.write_text(json.dumps(content))
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"test_9\.json: labels .*62 lie outside 0…61"):
        loading.load("femnist", str(tmp_path))
    file.write_text(file.read_text()[:-50])
    with pytest.raises(ValueError, match=r"test_9\.json is truncated"):
        loading.load("femnist", str(tmp_path))


def test_grey_values_of_leaf_are_rounded(tmp_path):
    """0.399 · 255 = 101.745 is 102, 0.397 · 255 = 101.235 is 101."""
    one = {"x": [[0.399, 0.397, *[0.0] * 782]], "y": [5]}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(json.dumps({"user_data": {"me": one}}))
    assert read_femnist(tmp_path).x[0, 0, 0, :3].tolist() == [102, 101, 0]


def test_femnist_of_emnist_is_turned_and_dark_on_light(tmp_path):
    splits = ("emnist-byclass-train", "emnist-byclass-test")
    x, y = dataset_files.idx_pairs(tmp_path / "femnist", splits, classes=62)
    check_arrays(loading.load("femnist", str(tmp_path)), 255 - x.transpose(0, 1, 3, 2), y, 620)


def test_omniglot(tmp_path):
    dataset_files.omniglot(tmp_path / "omniglot")
    data = loading.load("omniglot", str(tmp_path))
    assert tuple(data.x.shape) == (72, 1, 28, 28)
    assert np.bincount(data.y.numpy()).tolist() == [6] * 12
    assert data.classes[0] == "Greek/character01"
    owners = [data.classes[y].split("/")[0] for y in data.y]
    assert data.columns["alphabet"].tolist() == owners
    assert set(owners) == {"Greek", "Latin", "Sanskrit", "Manx"}
    # a drawing of 20·c rows of ink from column 30 + d to 60: its share of 105×105 in [0, 1]
    drawing = data.x[data.y == 1][2].float() / 255
    assert drawing.mean().item() == pytest.approx(40 * 28 / 105**2, rel=0.02)
    # by area: a pixel is 105/28 = 3.75 wide; rows 10 … 50 have 1.25 of 7.5 … 11.25, a third
    first = data.x[data.y == 1][0, 0]  # from column 30 = 8 · 3.75
    assert (first[2, 8].item(), first[3, 8].item(), first[3, 7].item()) == (85, 255, 0)
    three_rounds(tmp_path, "omniglot", "natural", 4, test_fraction=0.15)
    (tmp_path / "omniglot/images_evaluation/Manx/character01/1_00.png").write_bytes(b"\x89PNG")
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"1_00\.png is truncated"):
        loading.load("omniglot", str(tmp_path))


@pytest.mark.parametrize(("name", "column"), [("inaturalist", "cell"), ("landmarks", "author")])
def test_federated_vision(tmp_path, random_extractors, name, column):
    dataset_files.federated_vision(tmp_path / name, name == "inaturalist")
    data = loading.load(name, str(tmp_path))
    assert (tuple(data.x.shape), data.x.dtype, data.num_train) == ((27, 1280), torch.float32, 24)
    assert data.y.tolist() == [i % 3 for i in range(27)]
    assert data.columns[column].tolist() == [f"user {i % 4}" for i in range(24)] + [""] * 3
    for row in (5, 25):  # each row has its own photograph's features
        picture = Image.fromarray(dataset_files.images(1, 40, 50, 3, seed=row)[0])
        picture.save(tmp_path / "own.jpg")
        own = features.mobilenet_v2([Image.open(tmp_path / "own.jpg")], 1, Path())
        others = [float((data.x[i] - torch.from_numpy(own[0])).norm()) for i in range(27)]
        assert np.argmin(others) == row
    (tmp_path / "own.jpg").unlink()
    three_rounds(tmp_path, name, "natural")
    next((tmp_path / name).rglob("*.jpg")).unlink()
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"federated_train\.csv: no image of 1 ids"):
        loading.load(name, str(tmp_path))


def test_image_features_are_what_the_classifier_sees(random_extractors):
    """What enters the classifier when the network is asked for classes."""
    from torchvision.models import MobileNet_V2_Weights

    network, seen = random_extractors[0], []
    pictures = [Image.fromarray(dataset_files.images(1, 60, 70, 3, seed=s)[0]) for s in range(3)]
    found = torch.from_numpy(features.mobilenet_v2(pictures, 3, Path()))
    transform = MobileNet_V2_Weights.IMAGENET1K_V1.transforms()
    hook = network.classifier.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    with torch.inference_mode():
        network(torch.stack([transform(picture) for picture in pictures]))
    hook.remove()
    assert float((found - seen[0]).norm() / seen[0].norm()) < 1e-4


def test_features_come_in_batches_in_the_order_of_the_items():
    """100 items are a batch of 64 and one of 36."""
    sizes = []

    def encode(batch):
        sizes.append(len(batch))
        return torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 2)

    found = features._extract(encode, range(100), 100, 2)
    assert sizes == [64, 36] and found.tolist() == [[i, i] for i in range(100)]


def test_weights_in_the_folder_are_those_of_the_extractors(tmp_path, monkeypatch):
    """Their own weights, in evaluation mode, are what features come from."""
    import hashlib

    from torchvision.models import mobilenet_v2
    from transformers import BertConfig, BertModel, BertTokenizer

    place = tmp_path / "weights"
    place.mkdir()
    torch.manual_seed(1)
    saved = mobilenet_v2()
    torch.save(saved.state_dict(), place / "own")
    digits = hashlib.sha256((place / "own").read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(features, "MOBILENET", f"mobilenet_v2-{digits}.pth")
    (place / "own").rename(place / features.MOBILENET)
    network = features.mobilenet_network(tmp_path)
    assert not network.training
    assert torch.equal(network.features[0][0].weight, saved.features[0][0].weight)

    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=8, hidden_size=8, **shape))
    bert.save_pretrained(place / features.BERT)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "why", "so", "?"]
    (place / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(place / "vocab.txt")).save_pretrained(place / features.BERT)
    tokenizer, network = features.bert_network(tmp_path)
    assert not network.training
    assert torch.equal(network.pooler.dense.weight, bert.pooler.dense.weight)
    assert tokenizer(["why so ?"])["input_ids"] == [[2, 5, 6, 7, 3]]


def test_damaged_weights_are_not_used(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / features.MOBILENET).write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"mobilenet_v2-b0353104\.pth is truncated"):
        features.mobilenet_network(tmp_path)


def test_yahoo_answers(tmp_path, random_extractors):
    dataset_files.yahoo(tmp_path / "yahoo-answers")
    data = loading.load("yahoo-answers", str(tmp_path))
    assert (tuple(data.x.shape), data.num_train) == ((100, 768), 80)
    assert data.y.tolist() == [i % 10 for i in range(80)] + [i % 10 for i in range(20)]
    _, tokenizer, network = random_extractors
    tokens = tokenizer(["why 7? because 7"], truncation=True, max_length=128)
    with torch.inference_mode():  # a text alone has the features it has in a padded batch
        assert torch.allclose(data.x[7], network(**tokens).last_hidden_state[0, 0], atol=1e-5)
    three_rounds(tmp_path, "yahoo-answers", "dirichlet", alpha=10.0)
    file = tmp_path / "yahoo-answers" / "test.csv"
    file.write_text(file.read_text() + '"11","a","b","c"\n')
    loading._load.cache_clear()
    with pytest.raises(ValueError, match=r"test\.csv, row 21: no class 1…10"):
        loading.load("yahoo-answers", str(tmp_path))


def test_novel_clients_of_another_dataset(tmp_path, monkeypatch):
    """STL-10's nine classes that CIFAR-10 has under CIFAR-10's numbers, 32×32, no monkeys."""
    dataset_files.cifar(tmp_path / "cifar10", 10, monkeypatch)
    dataset_files.stl10(tmp_path / "stl10")
    config = defaults() | {
        "dataset": "cifar10", "data-dir": str(tmp_path), "partition": "cross-dataset",
        "partition.base-rule": "iid", "num-clients": 6, "standardize": "training-clients",
    }  # fmt: skip
    fed = federation(config)
    assert isinstance(fed, CrossFederation)
    found = {False: [], True: []}
    for client in range(6):
        share = fed.share(client)
        assert share.novel == fed.novel[client]
        assert share.attributes["dataset"] == ("stl10" if share.novel else "cifar10")
        found[share.novel].append(share.everything[:])
    assert sum(len(y) for _, y in found[False]) == 1200
    x, y = (torch.cat(part) for part in zip(*found[True], strict=True))
    assert tuple(x.shape) == (90, 3, 32, 32)
    assert torch.bincount(y, minlength=10).tolist() == [10, 10, 10, 10, 10, 10, 0, 10, 10, 10]
    x, _ = (torch.cat(part) for part in zip(*found[False], strict=True))
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    three_rounds(tmp_path, "cifar10", "cross-dataset", base_rule="iid")
    with pytest.raises(ValueError, match=r"novel-dataset is 'digits' with inputs \(1, 8, 8\)"):
        federation(config | {"partition.novel-dataset": "digits"})
    with pytest.raises(ValueError, match="base-rule is 'cross-dataset'; known: iid"):
        federation(config | {"partition.base-rule": "cross-dataset"})


def test_classes_are_matched_by_name():
    """Of (car, monkey, cat) a car is class 1 of (cat, automobile), a monkey none."""
    grey = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 1, 8, 8) * 40
    other = loading.Dataset(
        loading.Info("other", (1, 8, 8), 3, ""), grey, torch.arange(6) % 3, 4, {},
        ("car", "monkey", "cat"),
    )  # fmt: skip
    to = loading.Dataset(
        loading.Info("to", (1, 4, 4), 2, "", scale=16.0), grey[:, :, :4, :4], torch.zeros(6), 6,
        {}, ("cat", "automobile"),
    )  # fmt: skip
    both = translated(other, to)
    assert both.y.tolist() == [1, 0, 1, 0]
    assert both.num_train == 3
    assert tuple(both.x.shape) == (4, 1, 4, 4)
    # 0, 80, 120, 200 of 255 are 0, 5, 8, 13 of 16
    assert both.x[:, 0, 2, 2].tolist() == [0, 5, 8, 13]


def test_channels_are_standardised_by_customary_constants(tmp_path, monkeypatch):
    """CIFAR-10: (v / 255 − m_c) / s_c for a stored v, with its own m and s in each channel; the
    same where they are converted at once, saved and loaded."""
    dataset_files.cifar(tmp_path / "cifar10", 10, monkeypatch)
    config = {"dataset": "cifar10", "data-dir": str(tmp_path), "partition": "iid"}
    fed = federation(defaults() | config | {"standardize": "channels"})
    share = fed.share(0)
    stored = fed.dataset.x[share.train.index].double()
    for c, (m, s) in enumerate(((0.4914, 0.2023), (0.4822, 0.1994), (0.4465, 0.2010))):
        expected = (stored[:, c] / 255 - m) / s
        torch.testing.assert_close(share.train[:][0][:, c].double(), expected, atol=1e-5, rtol=0)
    share.save(tmp_path / "out", fed.info)
    loaded = type(share).load(tmp_path / "out")[0].train
    assert torch.equal(loaded[:][0], share.train[:][0])
    assert torch.equal(share.train.converted()[:][0], share.train[:][0])
