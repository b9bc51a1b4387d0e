"""docs/how-to/flower-*.md as a package; what each method and strategy makes of it."""

import importlib
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import datasets
import networks_with_parts
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.common.config import validate_config
from PIL import Image
from small_runs import WEE
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import fedapps
import strategies
from clients.core.arrays import to_record
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.own_data import share_of
from partitions.items import Items, from_items

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGE = "".join(page.read_text("utf-8") for page in sorted(HOW_TO.glob("flower-*.md")))
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.S))
(PROJECT,) = re.findall(r"```toml\n# pyproject.toml\n(.*?)```", PAGE, re.S)
TASTES = ("fedembed", "global", "global+", "pfedkm")


@pytest.fixture(scope="module")
def my_app(tmp_path_factory):
    """The page's files as the package `my_app`; gives its modules by name."""
    root = tmp_path_factory.mktemp("app")
    (root / "my_app").mkdir()
    for name, text in (FILES | {"__init__.py": ""}).items():
        (root / "my_app" / name).write_text(text, "utf-8")
    sys.path.insert(0, str(root))
    yield lambda name: importlib.import_module(f"my_app.{name}")
    sys.path.remove(str(root))


def nodes(count=4):
    return [{"partition-id": i, "num-partitions": count} for i in range(count)]


def over(client_app, configs=None):
    return InProcessGrid(client_app, {}, configs or nodes())


def context():
    return Context(1, 0, {}, RecordDict(), {})


def train(strategy, client_app, task, rounds):
    torch.manual_seed(0)
    initial = ArrayRecord(task.Net().state_dict())
    return strategy.start(grid=over(client_app), initial_arrays=initial, num_rounds=rounds)


def test_the_pages_first_app_learns(my_app, capsys, monkeypatch):
    """pFedHN with the quickstart's client, thirty rounds, as the page has it, on a third of the
    digits."""
    digits = my_app("task").DIGITS
    third = SimpleNamespace(images=digits.images[:600], target=digits.target[:600])
    monkeypatch.setattr(my_app("task"), "DIGITS", third)
    torch.manual_seed(0)
    my_app("server_app").app(over(my_app("client_app").app), context())
    got = eval(capsys.readouterr().out.strip().splitlines()[-1])
    assert got["eval_acc"] > 0.7


def test_the_pages_project_names_its_components_and_what_they_need(my_app):
    """As `flwr run` checks it."""
    project = tomllib.loads(PROJECT)
    valid, errors, warnings = validate_config(project)
    assert valid and not errors and not warnings
    for name in project["tool"]["flwr"]["app"]["components"].values():
        module, _, attribute = name.removeprefix("my_app.").partition(":")
        assert hasattr(my_app(module), attribute)
    # `my_app` depends on the first ones; the page's comparisons with other projects, on the others.
    known = {"my_app", "strategies", "fedapps", "torch", "sklearn", "flwr", "numpy", "transformers"}
    known |= {"fltabular", "huggingfaceexample", "keras", "my_net"} | {
        name.removesuffix(".py") for name in FILES
    }
    assert set(re.findall(r"^(?:from|import) (\w+)", "\n".join(FILES.values()), re.M)) <= known


def test_the_pages_test_of_a_strategy_passes(my_app, monkeypatch):
    page = my_app("test_strategy")
    page.test_it_goes_half_of_the_way()
    monkeypatch.delattr(page.Halved, "aggregate")
    with pytest.raises(AssertionError):
        page.test_it_goes_half_of_the_way()


def test_both_components_in_ten_lines_each(my_app, capsys):
    for name in ("any_client_app.py", "any_server_app.py"):
        assert len([line for line in FILES[name].splitlines() if line.strip()]) < 10
    my_app("any_server_app").app(over(my_app("any_client_app").app), context())
    assert 0 < eval(capsys.readouterr().out.strip().splitlines()[-1])["train-accuracy"] <= 1


def run_apps(method, model, data, *, shape, rounds=1, count=4, public=None, loss=None, **settings):
    """Both components of the method over `count` nodes; its result and its strategy."""
    found = []
    client = fedapps.client_app(
        method, model=model, data=data, public=public, loss=loss, **settings
    )
    server = fedapps.server_app(
        method, model=model, shape=shape, rounds=rounds, min_available_nodes=count,
        then=lambda *result: found.extend(result), **settings,
    )  # fmt: skip
    server(over(client, nodes(count)), context())
    return found


def data_of(task):
    """What node i of four has in the page's app."""
    return lambda context: task.load_data(context.node_config["partition-id"], 4)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("method", [m for m in METHODS if m not in {*TASTES, "fedbn", "bn-adapt"}])
def test_any_method_runs_around_a_users_network(method, my_app):
    """Two rounds with three labeled nodes and an unlabeled one, of 24 samples each; a network
    without a `head`, and without the batch normalisation that FedBN and BN-adapt need."""
    task = my_app("task")

    def data(context):
        loaders = [
            DataLoader(Subset(loader.dataset, range(24)), loader.batch_size, shuffle=True)
            for loader in data_of(task)(context)
        ]
        if context.node_config["partition-id"] == 3:
            return torch.stack([x for x, _ in loaders[0].dataset])
        return loaders

    public = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = {"local_steps": 2}
    for key, value in WEE.items():
        section, _, name = key.partition(".")
        if section == method and not method.startswith("pfl-"):  # their base has no hypernetwork
            settings[name.replace("-", "_")] = value
    result, strategy = run_apps(
        method, task.Net, data, shape=(1, 8, 8), rounds=2, public=lambda: public, **settings
    )
    assert result.train_metrics_clientapp[2]["valid-replies"] == 3
    assert 0 <= result.evaluate_metrics_clientapp[2]["train-accuracy"] <= 1
    assert [node.novel for node in strategy.nodes] == [False] * 3 + [True]
    got = {update.node.client for update in strategy.evaluation}
    assert got == ({0, 1, 2, 3} if METHODS[method].novel else {0, 1, 2})


@pytest.mark.usefixtures("anywhere")
def test_shot_finds_the_head_of_a_users_network():
    """The last linear layer becomes the head, which SHOT fixes. Without one it is refused."""

    def run_shot(*layers):
        return run_apps(
            "shot",
            lambda: nn.Sequential(nn.Flatten(), *layers),
            lambda _: (torch.rand(8, 1, 2, 2), torch.arange(8) % 3),
            shape=(1, 2, 2),
            count=2,
            local_steps=1,
        )

    result, _ = run_shot(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert result.arrays["head.weight"].shape == (3, 5)
    with pytest.raises(
        ValueError, match=r"does not end in a linear layer of 4 outputs.*it has no linear layer"
    ):
        run_shot(nn.BatchNorm1d(4))


def test_fedmd_without_public_inputs_says_where_to_give_them():
    with pytest.raises(RuntimeError, match=r"no public samples; .*pass public= to client_app"):
        run_apps(
            "fedmd",
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
            lambda _: (torch.rand(8, 1, 2, 2), torch.arange(8) % 3),
            shape=(1, 2, 2),
            count=2,
        )


@pytest.mark.parametrize("settings", [{}, {"standardize": "training-clients"}])
def test_a_node_with_other_public_inputs_is_refused(settings, monkeypatch, caplog):
    """Node 2 has the same ones in another order: the consensus would mix up its logits. The nodes
    prepare them alike, up to rounding."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    node = 0
    public = torch.rand(20, 4, generator=torch.Generator().manual_seed(0))

    def data(context):
        nonlocal node
        node = context.node_config["partition-id"]
        generator = torch.Generator().manual_seed(node)
        x = torch.rand(8, 4, generator=generator)
        return x, torch.arange(8) % 3

    def public_of_node():
        return public.flip(0) if node == 2 else public * (1 + 1e-6 * node)

    result, strategy = run_apps(
        "fedmd",
        lambda: nn.Linear(4, 3),
        data,
        shape=(4,),
        count=4,
        public=public_of_node,
        rounds=2,
        **settings,
    )
    assert result.train_metrics_clientapp[2]["valid-replies"] == 3
    assert [node.client for node in strategy.nodes] == [0, 1, 3]
    assert "refused, public-samples: its public samples are not those of most nodes" in caplog.text


class Backbone(nn.Module):
    """A body of frozen weights, a factor that no server sees, and a head."""

    def __init__(self, seed, factor=1.0):
        super().__init__()
        self.body = nn.Linear(4, 3).requires_grad_(False)
        nn.init.normal_(self.body.weight, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("factor", torch.tensor(factor), persistent=False)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x) * self.factor)


@pytest.mark.parametrize("other", ["", "body", "factor", "head"])
def test_a_node_with_other_frozen_weights_is_refused(other, monkeypatch, caplog):
    """They are never sent: under node 2's body the others' head means nothing. Node 1 has the same
    with fewer digits. What a node has to itself may differ: buffers that are not sent, and
    personal heads."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    def network(context):
        node = context.node_config.get("partition-id")
        made = Backbone(int(other == "body" and node == 2), 2.0 if other == "factor" else 1.0)
        if node == 1:
            made.body.weight.data = made.body.weight.data.half().float()
        if other == "head":
            made.head.requires_grad_(False)
            made.head.bias.data.fill_(node or 0)
            made.body.requires_grad_(True)
        return made

    _, strategy = run_apps(
        "fedper" if other == "head" else "fedavg",
        network,
        lambda context: ((torch.rand(8, 4), torch.arange(8) % 3),) * 2,
        shape=(4,),
        count=3,
    )
    assert [node.client for node in strategy.nodes] == ([0, 1] if other == "body" else [0, 1, 2])
    said = "refused, frozen: its network's frozen parameters are not those of most nodes"
    assert (said in caplog.text) == (other == "body")


@pytest.mark.parametrize("method", ["pfedhn", "odpfl-hn", "pfl-ensemble"])
def test_a_users_network_tells_what_is_not_generated(method):
    """Frozen parameters stay as they are; the `level`, a buffer of no known name, is averaged."""
    settings = {"local_steps": 2, "hidden_dim": 8}
    settings |= {"base": "pfedhn"} if method == "pfl-ensemble" else {}
    _, strategy = run_apps(
        method,
        lambda: networks_with_parts.Everything((1, 2, 2), 10),
        lambda _: (torch.rand(8, 1, 2, 2), torch.arange(8)),
        shape=(1, 2, 2),
        count=2,
        **settings,
    )
    (level,) = (a for name, a in strategy.arrays.items() if name.endswith("level"))
    assert level.shape == () and level != 0
    generated = getattr(strategy, "trainer", strategy).generator.targets.shapes()
    assert not any("first." in name or name.endswith("level") for name in generated)


def test_the_users_loss_is_what_is_trained_on(my_app):
    """With a loss of zero nothing moves: FedAvg's result is what it started from."""
    task = my_app("task")
    result, _ = run_apps(
        "fedavg",
        task.Net,
        data_of(task),
        shape=(1, 8, 8),
        loss=lambda logits, y: 0.0 * logits.sum(),
        seed=5,
    )
    torch.manual_seed(5)
    for name, tensor in task.Net().state_dict().items():
        np.testing.assert_allclose(result.arrays[name].numpy(), tensor.numpy(), rtol=1e-5)


@pytest.mark.parametrize("method", ["apfl", "fedala", "atp"])
def test_every_loss_of_labels_is_the_users(my_app, method):
    """With a loss of zero neither the server's model nor a client's own arrays move in 3 rounds:
    each is one of the initial arrays, or constant (weights of a mixture, rates)."""
    task = my_app("task")
    result, strategy = run_apps(
        method,
        task.Net,
        data_of(task),
        shape=(1, 8, 8),
        rounds=3,
        loss=lambda logits, y: 0.0 * logits.sum(),
        local_steps=2,
        seed=5,
        **({"fedavg_rounds": 1} if method == "atp" else {}),
    )
    torch.manual_seed(5)
    start = [tensor.numpy() for tensor in task.Net().state_dict().values()]
    found = list(result.arrays.values())
    for node in strategy.nodes:
        for record in strategy.grid.contexts[node.id].state.array_records.values():
            found.extend(record.values())
    for array in (value.numpy() for value in found):
        same = [first for first in start if first.shape == array.shape]
        moved = not any(np.allclose(array, first, rtol=1e-5) for first in same)
        assert not moved or not array.size or np.ptp(array) == 0


def test_random_transforms_stay_random_and_mappings_are_read():
    """Each access adds 1 to a counter, which is the input."""

    class Counting(torch.utils.data.Dataset):
        seen = 0

        def __len__(self):
            return 2

        def __getitem__(self, row):
            self.seen += 1
            return {"img": torch.full((1, 2, 3), float(self.seen)), "label": row + 4}

    samples = from_items(Counting())
    first, second = (samples.converted()[torch.tensor([0, 1])] for _ in range(2))
    assert first[1].tolist() == second[1].tolist() == [4, 5]
    assert (second[0] - first[0]).flatten().tolist() == [2.0] * 12
    assert samples.x.shape == (2, 1, 2, 3)
    assert first[0].stride() == (6, 6, 3, 1)


def test_tensors_in_datasets_are_taken_as_they_are_and_others_item_by_item():
    """A subset of a subset of five samples, whose labels are 10 … 14: rows 3 and 1. What a class
    of one's own, or one with transforms, makes of its tensors is asked for."""

    class Doubling(TensorDataset):
        def __getitem__(self, row):
            return 2 * self.tensors[0][row], self.tensors[1][row]

    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(10, 15)
    for make, factor in ((TensorDataset, 1), (Doubling, 2)):
        rows = Subset(Subset(make(x, y), [4, 3, 1]), [1, 2])
        samples = from_items(rows)
        assert (samples[:][0].tolist(), samples[:][1].tolist()) == (
            [[6.0 * factor, 7.0 * factor], [2.0 * factor, 3.0 * factor]], [13, 11],
        )  # fmt: skip
        assert samples[torch.tensor([1])][1].tolist() == [11]
        assert isinstance(samples, Items) == (factor == 2)
    assert share_of(TensorDataset(x), context()).novel
    known = TensorDataset(x, torch.tensor([-1, -1, 0, -1, -1]))
    with pytest.raises(ValueError, match="row 0 has the label -1, which is no class"):
        share_of(Subset(known, [0, 3]), context())
    with pytest.raises(ValueError, match="a length above 0"):
        from_items(Subset(known, []))


def test_numpy_pairs_and_unformatted_datasets_are_data():
    """Labels 2, 0 and 1: arrays, a reversed view of them, and items of the datasets library: lists,
    formatted arrays, and a picture with a pixel (0, 51, 255) / 255."""
    x, y = np.arange(6.0).reshape(3, 2), np.array([2, 0, 1])
    share = share_of(((x, y), (x[::-1], y[::-1])), context())
    for samples, step in ((share.train, 1), (share.validation, -1)):
        assert samples[:][0].equal(torch.tensor(x[::step].copy(), dtype=torch.float32))
        assert samples[:][1].tolist() == y[::step].tolist()
    assert share_of((x, y), context()).train[:][1].tolist() == [2, 0, 1]
    assert share_of(x, context()).novel
    lists = datasets.Dataset.from_dict({"x": x.tolist(), "label": y.tolist()})
    for given in (lists, lists.with_format("numpy"), lists.with_format("torch")):
        samples = share_of(given, context()).train
        assert (samples[:][0].tolist(), samples[:][1].tolist()) == (x.tolist(), [2, 0, 1])
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[1, 2] = 0, 51, 255
    pictures = {"img": [Image.fromarray(pixels)], "label": [7]}
    samples = share_of(datasets.Dataset.from_dict(pictures), context()).train
    assert samples[:][0].shape == (1, 3, 2, 3) and samples[:][1].tolist() == [7]
    torch.testing.assert_close(samples[:][0][0, :, 1, 2], torch.tensor([0, 0.2, 1]))
    texts = datasets.Dataset.from_dict({"text": ["a"], "x": ["b"]})
    with pytest.raises(ValueError, match="an item has x and text, and none of the names of labels"):
        share_of(texts, context())


def test_a_labeled_node_may_say_that_it_is_novel():
    given = (torch.ones(3, 2), torch.tensor([0, 1, 1]))
    one = Context(1, 0, {"novel": True}, RecordDict(), {})
    assert share_of(given, one).novel and len(share_of(given, one).train) == 0
    assert len(share_of((given, given), context()).validation) == 3
    assert share_of(given[0], context()).novel


@pytest.mark.parametrize("name", ["PFedHN", "FedAMP"])
def test_a_server_without_a_model_refuses_central_evaluation(name, my_app):
    strategy = getattr(strategies, name)(min_available_nodes=4)
    with pytest.raises(ValueError, match=f"{name} holds no model that evaluate_fn could evaluate"):
        strategy.start(
            grid=over(my_app("client_app").app),
            initial_arrays=ArrayRecord(my_app("task").Net().state_dict()),
            num_rounds=1,
            evaluate_fn=lambda round_, arrays: MetricRecord({"accuracy": 0.5}),
        )


def norms(task):
    """A central evaluation, and the norms of the layers that it has seen."""
    seen = []

    def evaluate(round_, arrays):
        net = task.Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        seen.append(float(net.fc2.weight.detach().norm()))
        return MetricRecord({"norm": seen[-1]})

    return evaluate, seen


def test_central_evaluation_gets_the_present_model_under_its_own_names(my_app):
    """SCAFFOLD's server also holds control variates; only the network is evaluated, another one
    in each round."""
    task = my_app("task")
    evaluate, seen = norms(task)
    client = fedapps.client_app(
        "scaffold",
        model=task.Net,
        data=data_of(task),
        local_steps=2,
    )
    strategies.Scaffold(min_available_nodes=4).start(
        grid=over(client),
        initial_arrays=ArrayRecord(task.Net().state_dict()),
        num_rounds=2,
        evaluate_fn=evaluate,
    )
    assert len(set(seen)) == 3


def test_fedtta_hands_over_the_model_that_it_adapts(my_app):
    """ψ alone, whose names have no prefix; with clients that do not adapt it is the whole model."""
    task = my_app("task")
    evaluate, seen = norms(task)
    _, strategy = run_apps("fedtta", task.Net, data_of(task), shape=(1, 8, 8), local_steps=2)
    evaluate(1, to_record(strategy.global_model()))
    base = strategy.arrays["base.fc2.weight"]
    assert seen == pytest.approx([float(np.linalg.norm(base))])
    strategies.FedTTA(min_available_nodes=4, lenient=True).start(
        grid=over(my_app("client_app").app),
        initial_arrays=ArrayRecord(task.Net().state_dict()),
        num_rounds=1,
        evaluate_fn=evaluate,
    )
    assert len(set(seen)) == 3


def test_unknown_methods_settings_and_layers_are_named():
    options = {"model": lambda: nn.Linear(2, 3), "data": lambda context: None}
    for method, more, words in (
        ("fedpr", {}, "unknown method 'fedpr'"),
        ("fedavg", {"momentun": 0.9}, "unknown key 'momentun'"),
        ("fedembed", {}, "tastes are known"),
        ("pfedhn", {"server_optimizer": "lamb"}, "server-optimizer 'lamb'"),
    ):
        with pytest.raises(ValueError, match=words):
            fedapps.client_app(method, **options, **more)


def test_a_folder_that_hides_ours_is_named(tmp_path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import fedapps"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert f"{tmp_path / 'clients'} hides the package 'clients'" in done.stderr.replace("\n", " ")
