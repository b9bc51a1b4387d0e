"""The forms in which people bring samples to `client_app`: each is the same as its tensors, or is
refused by a sentence that says what to write."""

import logging
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from component_runs import run_components
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from flwr.app import Context, RecordDict
from PIL import Image
from scipy.sparse import csr_matrix
from text_networks import Bag, Classifier, TwoKinds, padded, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

import fedapps
from clients.models import foreign
from clients.models.foreign import adopted
from fedapps.common import once
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node.own_data import share_of
from partitions.arrays import as_tensor
from partitions.items import from_items

X = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0.5).long()
TABLE = pd.DataFrame(X.numpy(), columns=["age", "height", "weight"]).assign(sick=Y.numpy())
ROWS = TABLE.rename(columns={"sick": "label"}).to_dict("records")
ONE_STEP = {"local_steps": 1, "batch_size": 20}
LENGTHS = {"input_ids": (7,), "attention_mask": (7,)}


def linear():
    return nn.Linear(3, 2)


def trained(data, model=linear, shape=(3,), **settings):
    return run_components("fedavg", model, data, shape, **ONE_STEP | settings)


def assert_same(found, expected):
    arrays, scores = found
    assert arrays.keys() == expected[0].keys()
    for name, array in expected[0].items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, score in expected[1].items():
        assert scores[name] == pytest.approx(score, rel=1e-5), name


@pytest.fixture(scope="module")
def expected():
    return trained(((X, Y), (X, Y)))


def table_columns():
    return {name: TABLE[name].to_numpy() for name in ("age", "height", "weight")}


FORMS = {
    "table": TABLE,
    "inputs and labels of a table": (TABLE[["age", "height", "weight"]], TABLE["sick"]),
    "lists": (X.tolist(), Y.tolist()),
    "arrays": (X.numpy(), Y.numpy()),
    "columns": {"x": X.numpy(), "sick": Y.tolist()},
    "columns of numbers": table_columns() | {"sick": Y.numpy()},
    "lists of arrays": (list(X.numpy()), list(Y)),
    "a list of labels as tensors": (X, list(Y)),
    "items": list(zip(X, Y.tolist(), strict=True)),
    "rows": TABLE.to_dict("records"),
    "datasets": Dataset.from_pandas(TABLE),
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True),
    "a loader with a collate function": DataLoader(
        Subset(TensorDataset(X, Y), range(20)),
        collate_fn=lambda rows: (torch.stack([x for x, _ in rows]), [int(y) for _, y in rows]),
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_form_is_the_same_as_its_tensors(form, expected):
    assert_same(trained((form, form), label="sick"), expected)


@pytest.mark.parametrize("form", ["a loader with a collate function", "items"])
def test_a_method_that_holds_out_samples_takes_each_form(form):
    """Whose labels are known with the inputs alone: nothing is said of their order."""
    settings = {"held_out": 0.4, "batch_size": 12, "label": "sick"}
    data = (FORMS[form], (X, Y))
    arrays = ((X, Y), (X, Y))
    expected = run_components("bbse", linear, arrays, (3,), **settings)
    assert_same(run_components("bbse", linear, data, (3,), **settings), expected)


@pytest.mark.parametrize(
    "data",
    [
        ((X, Y), (X, Y), (X[:5], Y[:5])),
        {"train": (X, Y), "validation": (X, Y), "test": (X[:5], Y[:5])},
        DatasetDict(
            train=Dataset.from_list(ROWS), val=Dataset.from_list(ROWS),
            test=Dataset.from_list(ROWS[:5]),
        ),
        [DataLoader(TensorDataset(X[:n], Y[:n])) for n in (20, 20, 5)],
    ],
    ids=["a tuple", "a dict", "datasets", "loaders"],
)  # fmt: skip
def test_training_validation_and_test_samples(data, expected):
    arrays, scores = trained(data)
    assert_same((arrays, scores), expected)
    z = X[:5].numpy() @ arrays["weight"].T + arrays["bias"]
    assert scores["train-test-accuracy"] == pytest.approx((z.argmax(1) == Y[:5].numpy()).mean())


def test_train_and_test_alone_are_training_and_validation(expected):
    assert_same(trained({"train": (X, Y), "test": (X, Y)}), expected)


def test_a_tables_columns_are_found_by_name(expected):
    """Validation samples in another order of columns; a missing one is named."""
    other = TABLE[["sick", "weight", "age", "height"]]
    assert_same(trained((TABLE, other), label="sick"), expected)
    rows = Dataset.from_list(ROWS).select_columns(["weight", "label", "height", "age"])
    assert_same(trained((ROWS, rows)), expected)
    with pytest.raises(RuntimeError, match="a table lacks age of the training samples' columns"):
        trained((TABLE, TABLE.drop(columns="age")), label="sick")


def test_what_was_understood_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained((X, Y), rounds=2)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("data returned (x, y): the inputs of training samples and their labels") == 1
    (alone,) = (text for text in said if text.startswith("data returned training samples alone"))
    assert alone.endswith("the node's model is not evaluated; return (training, validation)")
    caplog.clear()
    trained(((X, Y), (X, Y)), rounds=2)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("data returned a pair: training samples and validation samples") == 1


@pytest.mark.parametrize(
    ("validation", "is_said"),
    [
        ((X, Y), True),
        ((X[:9], Y[:9]), False),
        (DataLoader(TensorDataset(X, Y)), False),
    ],
)
def test_validation_samples_that_train_are_said(validation, is_said, caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained(((X, Y), validation))
    assert ("the validation samples are the training samples" in caplog.text) == is_said


def test_loaders_of_one_dataset_hold_the_same_samples(caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    samples = TensorDataset(X, Y)
    trained((DataLoader(samples, shuffle=True), DataLoader(samples)))
    assert "the validation samples are the training samples" in caplog.text


def test_labels_of_pandas_in_another_order_are_refused():
    """Those of other rows, and arrays, are matched by their place."""
    x, y = TABLE.drop(columns="sick"), TABLE["sick"]
    expected = trained(((X, Y), (X, Y)))
    for labels in (y, y.to_numpy(), y.set_axis(range(100, 120))):
        assert_same(trained(((x, labels), (x, labels))), expected)
    with pytest.raises(RuntimeError, match=r"index has the rows .* in another order.*y\.loc\[x"):
        trained(((x, y[::-1]), (x, y)))


def in_another_order(part):
    """The nodes' samples: node 2 has its columns in another order."""
    others = {
        "table": TABLE[["sick", "weight", "age", "height"]],
        "rows": TABLE[["weight", "sick", "height", "age"]].rename(columns={"sick": "label"}),
        "columns": {name: TABLE[name].to_numpy() for name in ("weight", "height", "age", "sick")},
    }
    firsts = {"table": TABLE, "rows": ROWS, "columns": table_columns() | {"sick": Y.numpy()}}
    if part == "rows":
        others["rows"] = others["rows"].to_dict("records")
    return lambda node: (others[part] if node == 2 else firsts[part],) * 2


@pytest.mark.parametrize("part", ["table", "rows", "columns"])
def test_a_node_with_its_columns_in_another_order_is_refused(part, caplog, monkeypatch):
    """By position its weights would be ages: the model would fit neither."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    label = "label" if part == "rows" else "sick"
    expected = trained(lambda node: (TABLE, TABLE), count=2, label="sick")
    assert_same(trained(in_another_order(part), count=3, label=label), expected)
    assert (
        "refused, columns: its table has other columns than those of most nodes, or" in caplog.text
    )
    scaled = {"count": 3, "label": "sick", "standardize": "training-clients"}
    if part == "table":
        assert trained(in_another_order(part), **scaled)[1]["train-clients"] == 3


NAMES = (["cat", "dog"], ["cat", "dog"], ["bird", "cat"])  # a node's folders


def in_folders(node, root, **options):
    """Two pictures of each class in the node's folders; class k has the grey values 10 k."""
    for number, name in enumerate(NAMES[node]):
        folder = root / str(node) / name
        folder.mkdir(parents=True, exist_ok=True)
        for shade in (0, 5):
            Image.new("L", (3, 1), 10 * number + shade).save(folder / f"{shade}.png")
    return ImageFolder(root / str(node), ToTensor(), **options)


def with_class_label(node):
    features = Features({"x": List(Value("float32")), "label": ClassLabel(names=NAMES[node])})
    return Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}, features)


@pytest.mark.parametrize("form", ["folders", "part of folders", "datasets"])
def test_a_node_that_numbers_its_classes_otherwise_is_refused(form, caplog, monkeypatch, tmp_path):
    """Its birds would be trained as cats."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    def data(node):
        if form == "datasets":
            return (with_class_label(node),) * 2
        images = in_folders(node, tmp_path)
        return (images if form == "folders" else Subset(images, [0, 1, 2, 3]),) * 2

    options = {} if form == "datasets" else {"model": flat, "shape": (3, 1, 3)}
    assert trained(data, count=3, **options)[1]["train-clients"] == 2
    assert "refused, classes: its classes have other names than those of most" in caplog.text


def test_classes_that_a_transform_numbers_are_not_compared(tmp_path):
    numbers = {"bird": 2, "cat": 0, "dog": 1}

    def folders(node):
        of_all = [numbers[name] for name in NAMES[node]]
        return (in_folders(node, tmp_path, target_transform=of_all.__getitem__),) * 2

    def datasets(node):
        of_all = [numbers[name] for name in NAMES[node]]
        aligned = with_class_label(node).with_transform(
            lambda rows: rows | {"label": [of_all[label] for label in rows["label"]]}
        )
        return (aligned, aligned)

    three = {"count": 3, "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3))}
    assert trained(folders, shape=(3, 1, 3), **three)[1]["train-clients"] == 3
    scores = trained(datasets, model=lambda: nn.Linear(3, 3), count=3)[1]
    assert scores["train-clients"] == 3


def test_validation_samples_have_the_classes_of_training_samples():
    """Fewer are enough, if those that are there have their numbers."""
    with pytest.raises(RuntimeError, match="class 0 is 'bird', and in the training samples 'cat'"):
        trained((with_class_label(0), with_class_label(2)))
    features = Features({"x": List(Value("float32")), "label": ClassLabel(names=["cat"])})
    cats = Dataset.from_dict({"x": X.tolist(), "label": [0] * len(X)}, features)
    assert trained((with_class_label(0), cats))[1]["train-clients"] == 1


def flat():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2))


def pooled(*, tokens=0):
    """A network for images of any size, and for token ids."""
    if tokens:
        return nn.Sequential(nn.Embedding(tokens, 3), nn.Flatten(), nn.Linear(6, 2))
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))


IMAGES = torch.rand(20, 3, 4, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(40).view(20, 2)
SCALED = {"standardize": "training-clients"}
AXES_SAID = "inputs have the axes of most nodes' inputs in another order, such as channels last"
UNITS_SAID = "inputs are more than thirty times as large or as small as those of most nodes"
OTHER_INPUTS = {
    "channels last": (IMAGES, IMAGES.permute(0, 2, 3, 1), flat, AXES_SAID),
    "time first": (IMAGES[:, 0], IMAGES[:, 0].permute(0, 2, 1), flat, AXES_SAID),
    "bytes": (IMAGES, (255 * IMAGES).byte(), flat, UNITS_SAID),
    "metres": (100 * X, X, linear, UNITS_SAID),
    "upright": (IMAGES, IMAGES.transpose(2, 3), pooled, ""),
    "one channel": (IMAGES[:, :1], IMAGES[:, :1].permute(0, 2, 3, 1), flat, ""),
    "dark": (IMAGES, IMAGES / 20, flat, ""),
    "black": (255 * IMAGES, 0 * IMAGES, flat, ""),
    "tokens": (TOKENS % 2, TOKENS % 2 + 998, lambda: pooled(tokens=1000), ""),
}


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_inputs_in_another_order_or_unit_are_said(name, caplog, monkeypatch):
    """Node 2's; a network may tell them apart, so all three are trained."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    x, other, model, words = OTHER_INPUTS[name]

    def data(node):
        return ((other if node == 2 else x, Y),) * 2

    shape = tuple(x.shape[1:])
    assert trained(data, model, shape, count=3)[1]["train-clients"] == 3
    for said in (AXES_SAID, UNITS_SAID):
        assert caplog.text.count(f"node 3: its {said}") == (said == words)
    if name == "channels last":
        caplog.clear()
        monkeypatch.setattr(once, "_said", set())
        assert trained(data, model, shape, count=3, **SCALED)[1]["train-clients"] == 3
        assert caplog.text.count(f"node 3: its {AXES_SAID}") == 1


@pytest.mark.parametrize(("factor", "settings"), [(1000, {}), (2, {}), (1000, SCALED)])
def test_values_in_another_unit_are_said(factor, settings, caplog, monkeypatch):
    """Those of node 1; with one scaling for all nodes the server sees it in the sums."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    def data(node):
        return ((X, X[:, 0] * (factor if node == 1 else 1)),) * 2

    trained(data, lambda: nn.Linear(3, 1), count=3, task="values", lr=1e-3, **settings)
    said = [record.getMessage() for record in caplog.records if " unit" in record.getMessage()]
    word = (
        "client 1, value 0 to predict: " if settings else "node 2: its values to predict are more"
    )
    assert len(said) == (factor == 1000)
    assert all(text.startswith(word) for text in said)


def test_a_mini_batch_of_one_sample_names_the_batch_size_that_fits():
    def normed():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    data = ((X[:17], Y[:17]), (X, Y))
    words = r"batch-size is 16; of a client's 17 samples a mini-batch has one, .*batch-size to 17"
    with pytest.raises(RuntimeError, match=words):
        trained(data, normed, local_steps=0, local_epochs=1, batch_size=16)
    trained(data, normed, local_steps=0, local_epochs=1, batch_size=17)
    with pytest.raises(RuntimeError, match="a client has one sample to train on, and its network"):
        trained(((X[:1], Y[:1]), (X, Y)), normed)


def test_empty_validation_samples_are_named():
    with pytest.raises(RuntimeError, match="validation samples: there are 0 inputs"):
        trained(((X, Y), (X[:0], Y[:0])))


def gap():
    table = TABLE.copy()
    table.loc[3, "height"] = np.nan
    return table


class Stream(IterableDataset):
    def __iter__(self):
        return iter(FORMS["items"])


REFUSED = [
    (TABLE.assign(city="here"), r"column 'city' of a table is .*'here'.*leave it out"),
    (gap(), r"column 'height' of a table has no number in row 3, one of 1; fill"),
    (([*X.tolist()[:-1], [1.0]], Y.tolist()), r"lists of 1 to 3 numbers; pad"),
    ({"age": X, "height": X, "label": Y}, r"not clear which are its inputs"),
    ({"x": X, "height": X}, r"x and height, and none of the names of labels"),
    (pd.concat([TABLE, TABLE[["age"]]], axis=1), "several columns called age; rename"),
    ("table.csv", r"data returned the text 'table.csv'; read it first"),
    ((X.to_sparse(), Y), r"give dense ones .* x\.to_dense\(\)"),
    ((np.array([[1, "a"]] * 20, dtype=object), Y.numpy()), r"an array of object.*must be numbers"),
    (TensorDataset(X, X, Y), r"an item has 3 parts.*as \(\(a, b\), y\)"),
    ([(X[0], 0), (X[0][:2], 1)] * 9, r"item \d+ has inputs of shape .*collate_fn pads them"),
    (
        DataLoader(FORMS["items"], sampler=WeightedRandomSampler(torch.ones(20), 20)),
        "of validation or test samples has WeightedRandomSampler.*return its dataset, or",
    ),
    (DataLoader(Stream()), r"has a stream of samples \(Stream\).*return them as a list"),
    (DataLoader(FORMS["items"], collate_fn=lambda rows: (X[:3], Y[:3])), r"made 3 inputs and 3 la"),
]


@pytest.mark.parametrize(("form", "words"), REFUSED)
def test_what_is_not_understood_names_what_to_write(form, words):
    with pytest.raises(RuntimeError, match=words):
        trained((form, form))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((csr_matrix(X), Y), r"inputs are csr_matrix; give a dense array: x\.toarray\(\)"),
        (
            (X, TensorDataset(Y.float())),
            r"validation samples have inputs of shape \(\), the training samples of \(3,\)",
        ),
        (
            TABLE.rename(columns={"sick": "label"}).assign(ward=1.0),
            r"inputs of shape \(4,\): .*; the table's columns of inputs are age, height, .*, ward",
        ),
        ((memoryview(X.numpy()), Y), r"memoryview has no item 0"),
        ({"train": (X, Y), "extra": (X, Y)}, r"keys train, extra; .* and test, not extra"),
        ({"a": [[1], [1, 2]], "label": [0, 1]}, r"a list holds rows of several lengths"),
    ],
)
def test_data_of_other_kinds_names_what_to_write(data, words):
    with pytest.raises(RuntimeError, match=words):
        trained(data)


class Remembering(nn.Linear):
    """A network with a state that is no tensor."""

    def __init__(self):
        super().__init__(3, 2)

    def get_extra_state(self):
        return {"steps": 3}


class AlwaysDropping(nn.Linear):
    """A network whose dropout does not know that it is evaluated."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


class Centred(nn.Linear):
    """Changes its inputs in place, `always` or in training alone."""

    def __init__(self, always):
        super().__init__(3, 2)
        self.always = always

    def forward(self, x):
        if self.training or self.always:
            x -= 0.5
        return super().forward(x)


@pytest.mark.parametrize("always", [True, False])
def test_a_network_that_changes_its_inputs_gets_copies(always, caplog, monkeypatch):
    """Its predictions for the same inputs stay equal, and the inputs as they were."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    network, _ = adopted(Centred(always), "mine", (3,), 2)
    assert "Centred changes its inputs in place; it gets a copy" in caplog.text
    network.eval()
    x = X.clone()
    with torch.no_grad():
        first = network(x)
        assert torch.equal(network.train()(x), network(x))
        assert torch.equal(network.eval()(x), first)
    assert torch.equal(x, X)


@pytest.mark.parametrize("changes", [True, False])
def test_whether_inputs_change_is_tried_for_the_first_message_alone(changes, monkeypatch):
    """Networks of later messages get copies, or none, as the first one does."""
    known, tried = {}, []
    real = foreign.changes_inputs

    def counted(*arguments):
        tried.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(foreign, "changes_inputs", counted)
    for _ in range(3):
        network = Centred(True) if changes else linear()
        adopted(network, "mine", (3,), 2, known_changes=known)
        x = X.clone()
        with torch.no_grad():
            network(x)
        assert torch.equal(x, X)
    assert len(tried) == 1 and known == {(3,): changes}


def test_other_networks_get_their_inputs_themselves():
    """Without the time that a copy takes, and without a draw of the trial."""
    seen = []
    network = nn.Sequential(nn.Dropout(0.5), linear())
    network[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    adopted(network, "mine", (3,), 2)
    assert torch.equal(torch.get_rng_state(), before)
    network(X)
    assert seen[-1] is X


class RunningMean(nn.Linear):
    """Passes in evaluation change a buffer, or an attribute, that the outputs depend on."""

    def __init__(self, buffer):
        super().__init__(3, 2)
        if buffer:
            self.register_buffer("level", torch.zeros(2))
        else:
            self.level = torch.zeros(2)

    def forward(self, x):
        h = super().forward(x)
        self.level = 0.9 * self.level + 0.1 * h.detach().mean(0)
        return h - self.level


class Counting(nn.Linear):
    """Passes change a buffer, and no output."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


def check_said_of_evaluation(network, said, caplog, monkeypatch):
    """That training such a network logs lines about evaluation mode with the words `said`, one line
    for each."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained(((X, Y), (X, Y)), network)
    lines = [r.getMessage() for r in caplog.records if "evaluation mode" in r.getMessage()]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (partial(RunningMean, True), ["RunningMean changes its buffers level, also in evaluation"]),
        (partial(RunningMean, False), ["RunningMean changes what it keeps, also in evaluation"]),
        (Counting, []),
    ],
)
def test_a_network_that_its_passes_change_is_said(network, said, caplog, monkeypatch):
    check_said_of_evaluation(network, said, caplog, monkeypatch)


def test_dropout_in_evaluation_is_said(caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for network in (AlwaysDropping, lambda: nn.Sequential(nn.Dropout(0.5), linear())):
        trained(((X, Y), (X, Y)), network)
    (said,) = (r.getMessage() for r in caplog.records if "dropout" in r.getMessage())
    assert said.startswith("AlwaysDropping gives other outputs for the same inputs in evaluation")


class MinusMean(nn.Linear):
    """Outputs are less their mean over the inputs of a pass."""

    def forward(self, x):
        z = super().forward(x)
        return z - z.mean(0)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), linear()),
            ["the outputs of Sequential for an input depend on the other inputs of its batch, also "
             "in evaluation mode: 0 keep no running statistics; so scores"],
        ),
        (
            lambda: MinusMean(3, 2),
            ["the outputs of MinusMean for an input depend on the other inputs of its batch, also "
             "in evaluation mode; so scores"],
        ),
        (lambda: nn.Sequential(nn.BatchNorm1d(3), linear()), []),
    ],
)  # fmt: skip
def test_inputs_that_change_each_others_outputs_are_said(network, said, caplog, monkeypatch):
    check_said_of_evaluation(network, said, caplog, monkeypatch)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            lambda: linear().double(),
            r"parameters of float64, and inputs are float32: .*\.float\(\)",
        ),
        (
            lambda: torch.jit.script(linear()),
            r"a network of torch\.jit.* before torch\.jit\.script",
        ),
        (nn.Identity, r"Identity without parameters; there is nothing to train: add a layer"),
        (Remembering, r"the extra state '_extra_state' \(get_extra_state\), dict, which cannot be"),
    ],
)
def test_networks_that_cannot_be_trained_name_what_to_write(network, words):
    with pytest.raises(ValueError, match=words):
        trained(((X, Y), (X, Y)), network)


def test_a_declared_label_that_is_missing_is_no_input():
    """Else the network would learn from it, or a client would count as one without labels."""
    words = r"label is 'ill', but the columns are age, height, weight, sick; name one of them"
    for form in (TABLE, FORMS["rows"], FORMS["datasets"]):
        with pytest.raises(RuntimeError, match=words):
            trained((form, form), label="ill")


def test_gaps_in_inputs_are_said(caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    x = X.clone()
    x[4, 1] = torch.nan

    def filling():
        network = linear()
        network.register_forward_pre_hook(lambda module, inputs: (inputs[0].nan_to_num(),))
        return network

    trained(((x, Y), (X, Y)), filling)
    trained((TensorDataset(x[2:], Y[2:]), TensorDataset(X, Y)), filling)
    said, of_dataset = (r.getMessage() for r in caplog.records if "NaN" in r.getMessage())
    assert said.startswith("row 4 of the inputs holds NaN or infinity, one of 1; unless the net")
    assert of_dataset.startswith("row 2 of the inputs holds NaN")


def test_three_tensors_may_be_anything():
    with pytest.raises(RuntimeError, match=r"a tuple of 3 parts; return .*validation, test\)"):
        trained((X, Y, X))


IDS = torch.randint(0, 30, (20, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedhn", "ditto"])
def test_token_ids_stay_whole_numbers(method):
    data = ((IDS, (IDS[:, 0] > 15).long()),) * 2
    _, scores = run_components(method, Bag, data, (7,), rounds=2, lr=0.5)
    assert 0 <= scores["train-accuracy"] <= 1


def test_what_is_no_token_is_refused():
    for method in ("fedavg", "fedper"):  # FedPer's network is that of the user in two parts
        with pytest.raises(RuntimeError, match="row 0 of the inputs has fractions"):
            run_components(method, Bag, (IDS + 0.5, Y), (7,))
    with pytest.raises(RuntimeError, match=r"inputs go up to .* whole numbers up to 16777216"):
        trained((IDS + 2**25, Y), Bag, (7,))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedrep", "pfedhn", "tent"])
def test_text_as_a_tokenizer_gives_it(method):
    """Ids and a mask by keyword, padded by a collate function, outputs as an object."""
    loader = DataLoader(sentences(), batch_size=8, shuffle=True, collate_fn=padded)
    _, scores = run_components(
        method, Classifier, (loader, loader), LENGTHS, rounds=2, batch_size=8, lr=0.5
    )
    assert 0 <= scores["train-accuracy"] <= 1


def test_padding_by_mini_batch_is_padding_before(expected):
    """One step on all rows, from a loader and from tensors that were padded once; and by position,
    which the keywords' names do not matter for."""
    rows = sentences()
    whole = padded(rows)
    loader = DataLoader(rows, collate_fn=padded)
    by_loader = trained((loader, loader), Classifier, LENGTHS, batch_size=24)
    assert_same(trained((whole, whole), Classifier, LENGTHS, batch_size=24), by_loader)
    labels = whole.pop("labels")
    pair = (whole, labels)
    assert_same(trained((pair, pair), Classifier, LENGTHS, batch_size=24), by_loader)
    by_position = (tuple(whole.values()), labels)
    data = (by_position, by_position)
    assert_same(trained(data, Classifier, ((7,), (7,)), batch_size=24), by_loader)


def test_inputs_of_different_kinds_and_shapes():
    """Ids (7,) and numbers (3,); one step of gradient descent by torch alone."""
    data = ((IDS, X), Y)
    arrays, _ = trained((data, data), TwoKinds, ((7,), (3,)))
    torch.manual_seed(0)
    net = TwoKinds()
    nn.functional.cross_entropy(net(IDS, X), Y).backward()
    for name, p in net.named_parameters():
        np.testing.assert_allclose(
            arrays[name], (p - 0.1 * p.grad).detach().numpy(), rtol=1e-5, atol=1e-7
        )


def test_an_input_may_be_one_number_for_each_sample():
    """Beside others it is a column of its own; a single id stays a whole number."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(2, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x, group):
            return self.head(x + self.embedding(group))

    data = ((X, Y.clone()), Y)
    arrays, _ = trained((data, data), Grouped, ((3,), ()))
    torch.manual_seed(0)
    net = Grouped()
    nn.functional.cross_entropy(net(X, Y), Y).backward()
    expected = (net.embedding.weight - 0.1 * net.embedding.weight.grad).detach().numpy()
    np.testing.assert_allclose(arrays["embedding.weight"], expected, rtol=1e-5, atol=1e-7)


def test_a_collate_function_is_called_for_each_mini_batch():
    """Random transforms in it stay random: no two mini-batches are equal."""
    seen = []

    def noisy(rows):
        x = torch.stack([x for x, _ in rows]) + torch.rand(len(rows), 3)
        seen.append(x)
        return x, torch.tensor([y for _, y in rows])

    loader = DataLoader(FORMS["items"], collate_fn=noisy)
    trained(loader, local_steps=3, rounds=2)
    of_all = [x for x in seen if len(x) == 20]
    assert len(of_all) == 6
    assert len({tuple(x.sort(0).values.flatten().tolist()) for x in of_all}) == 6


def test_a_model_and_a_collator_of_transformers_work_as_they_are():
    """Without a download: a model of one layer, and a tokenizer of thirty words, which pads."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(30)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
    )
    config = transformers.DistilBertConfig(
        vocab_size=30, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=16
    )
    loader = DataLoader(
        Dataset.from_list(sentences()),
        batch_size=8,
        collate_fn=transformers.DataCollatorWithPadding(tokenizer),
    )
    arrays, scores = run_components(
        "fedper",
        lambda: transformers.DistilBertForSequenceClassification(config),
        (loader, loader),
        LENGTHS,
        rounds=3,
        batch_size=8,
        lr=0.5,
        local_steps=10,
    )
    assert not any(name.startswith("head.") for name in arrays)
    assert scores["train-accuracy"] > 0.8


def test_whole_numbers_of_any_type_are_inputs():
    whole = (X * 9).long()
    expected = trained(((whole, Y), (whole, Y)))
    for kind in (np.uint16, np.uint32, np.uint64, np.int8):
        x = whole.numpy().astype(kind)
        assert_same(trained(((x, Y), (x, Y))), expected)
    x = whole.to(torch.uint16)
    assert_same(trained(((x, Y), (x, Y))), expected)


@pytest.mark.parametrize("format", [None, "torch", "numpy"])
def test_pictures_of_datasets_are_the_same_in_every_format(format):
    """Formats give bytes up to 255, and numpy's has the channels last."""
    colours = np.random.default_rng(0).integers(0, 256, (8, 4, 6, 3), dtype=np.uint8)
    pictures = Dataset.from_dict(
        {"image": [Image.fromarray(array) for array in colours], "label": [0, 1] * 4}
    )
    samples = from_items(pictures.with_format(format))
    expected = torch.from_numpy(colours).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(samples[:][0], expected)
    doubled = pictures.with_transform(
        lambda rows: {"x": [2 * as_tensor(i) for i in rows["image"]], "label": rows["label"]}
    )
    torch.testing.assert_close(from_items(doubled)[:][0], 2 * expected)


def test_masked_cells_are_refused():
    """numpy would give the values behind the mask."""
    masked = np.ma.masked_greater(X.numpy(), 0.9)
    with pytest.raises(RuntimeError, match=r"\d+ masked cells; fill them, as x.filled\(0\), or"):
        trained((masked, Y))


def test_pictures_are_their_colours_in_0_to_1():
    """A picture of a palette is not the numbers of its colours; 16 bits have no known range."""
    colours = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    rgb = Image.fromarray(colours)
    expected = torch.from_numpy(colours).permute(2, 0, 1) / 255
    torch.testing.assert_close(as_tensor(rgb), expected)
    palette = rgb.quantize(256)
    torch.testing.assert_close(as_tensor(palette), as_tensor(palette.convert("RGB")))
    assert as_tensor(rgb.convert("CMYK")).shape == (3, 4, 6)
    assert as_tensor(rgb.convert("RGBA")).shape == (4, 4, 6)
    wide = Image.fromarray(np.full((4, 6), 60000, np.uint16))
    with pytest.raises(
        RuntimeError, match=r"more than 8 bits \(mode I;16\); give an array .*/ 65535"
    ):
        trained(([(wide, 0), (wide, 1)], [(wide, 0)]))


PICTURES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (4, 6), dtype=np.uint8))
    for i in range(6)
]
CLASSES = [0, 1] * 3
FORMS_OF_PICTURES = {
    "items": list(zip(PICTURES, CLASSES, strict=True)),
    "lists": (PICTURES, CLASSES),
    "a list and an array": (PICTURES, np.array(CLASSES)),
    "columns": {"image": PICTURES, "label": CLASSES},
    "rows of datasets": Dataset.from_dict({"image": PICTURES, "label": CLASSES})[:],
}


@pytest.mark.parametrize("form", FORMS_OF_PICTURES.values(), ids=FORMS_OF_PICTURES)
def test_pictures_in_a_list_are_those_of_items(form):
    """(channels, height, width) in [0, 1], with their labels."""
    samples = share_of(form, Context(0, 1, {}, RecordDict(), {})).train
    x, y = samples[torch.arange(6)]
    expected = torch.stack([as_tensor(picture) for picture in PICTURES])
    torch.testing.assert_close(x, expected)
    assert y.tolist() == CLASSES


def two_values(high, mode="L"):
    """Six pictures whose pixels are 0 and `high`."""
    cells = np.random.default_rng(0).integers(0, 2, (6, 4, 6), dtype=np.uint8)
    return [Image.fromarray(high * array).convert(mode) for array in cells]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("listed", [True, False])
def test_pictures_of_0_and_1_alone_are_refused(listed, mode):
    """They may be truth values, which are not divided by 255, or bytes. The values behind full
    transparency do not decide."""
    pictures = two_values(1, mode)
    data = (pictures, CLASSES) if listed else list(zip(pictures, CLASSES, strict=True))
    with pytest.raises(
        RuntimeError, match=r"pictures are 0 and 1: .* give arrays: .* 255 of bytes"
    ):
        trained((data, data))


def test_a_dark_picture_is_read_as_the_others_are():
    """The third picture has bytes; each place in a sample counts by itself, whatever the others
    hold. Truth values of Pillow and black pictures have one reading."""
    dark, white = two_values(1), two_values(255)
    items = list(zip([*dark[:2], *white[2:]], CLASSES, strict=True))
    x, _ = from_items(items)[:]
    assert float(x[:2].max()) == pytest.approx(1 / 255)
    assert float(x[2:].max()) == 1.0
    with pytest.raises(ValueError, match="truth values, or dark bytes"):
        from_items([((w, d), 0) for w, d in zip(white, dark, strict=True)])
    assert float(from_items(two_values(255, "1"))[:][0].max()) == 1.0
    assert float(from_items(two_values(0))[:][0].max()) == 0.0


def test_pictures_of_several_sizes_are_named():
    data = ([*PICTURES[:5], PICTURES[5].resize((8, 8))], CLASSES)
    with pytest.raises(
        RuntimeError, match=r"picture 0 has the shape \(1, 4, 6\), picture 5 \(1, 8"
    ):
        trained((data, data))


def test_nodes_without_labels_say_why_nobody_trains():
    items = [(x, None) for x in X]
    with pytest.raises(
        RuntimeError,
        match=r"no training client among 1 connected nodes; 1 are novel: their training samples "
        r"have no labels \(the first item decides for a dataset\), or .* novel=true",
    ):
        trained(items)


class Mean(nn.Module):
    """Ten tokens."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.vectors(x).mean(1))


@pytest.mark.parametrize(("padding", "fits"), [(12, 13), (-100, 10)])
def test_tokens_that_the_network_lacks_are_named(padding, fits):
    """A padding id above the vocabulary, or below 0, as loss functions of texts have it."""
    tokens = torch.randint(0, 9, (20, 5), generator=torch.Generator().manual_seed(0))
    tokens[:, 4] = padding
    with pytest.raises(
        RuntimeError,
        match=rf"inputs are tokens from .*{padding}.* has tokens from 0 to 9; .* {fits} entries",
    ):
        trained(((tokens, Y), (tokens, Y)), model=Mean, shape=(5,))


def test_rounds_count_those_of_the_former_run(caplog):
    """Repeating a component's call with its state trains nothing, which was not said."""
    ended = []
    client = fedapps.client_app("fedavg", model=linear, data=lambda _: ((X, Y), (X, Y)), lr=0.1)

    def continued(former):
        server = fedapps.server_app(
            "fedavg",
            model=linear,
            shape=(3,),
            rounds=1,
            min_available_nodes=1,
            former=former,
            then=lambda *result: ended.append(result),
        )
        grid = InProcessGrid(client, {}, [{"partition-id": 0}])
        server(grid, Context(1, 0, {}, RecordDict(), {}))

    continued(None)
    assert "nothing is trained" not in caplog.text
    continued(ended[0][1].state())
    assert "former has had 1 rounds, and rounds=1 counts them; for 1 further rounds write" in (
        caplog.text
    )
