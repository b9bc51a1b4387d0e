"""What comes from outside the package: the code of docs/how-to/own-*.md, written to a folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from documented_code import DITTO, RINGS, SIZES, written
from PIL import Image
from small_runs import ALL_SAMPLES, federate

from clients.core.client import Client
from clients.core.decision.changes import Changer, named_changes
from clients.models import build_model
from clients.models.head import headed
from fedapps.building import Builder
from fedapps.common import external_code
from fedapps.planning import make_jobs
from fedapps.settings.config import defaults, override, own_settings, settings
from fedapps.settings.variants import Variant
from partitions import federation
from partitions.datasets.loading import configured, described

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def outside(tmp_path_factory):
    """The folder that the page's files are in."""
    with written(tmp_path_factory.mktemp("outside")) as folder:
        yield folder


def test_settings_are_declared_by_the_signature_and_checked():
    assert own_settings(DITTO) == {"penalty": 0.1, "lr": 0.1}
    assert own_settings("my_lab.data:rings") == {"samples": 600, "noise": 0.2}
    assert own_settings("my_lab.rules:BySize") == {"power": 1.0}
    assert own_settings("my_lab.nets:resnet10") == {"zero-init-residual": False}
    config = override(defaults(), {f"{DITTO}.penalty": 2, "method": DITTO})
    assert config[f"{DITTO}.penalty"] == 2.0
    known = settings(config, DITTO)
    assert (known["penalty"], known["lr"], defaults()["lr"]) == (2.0, 0.1, 0.3)
    own = Variant.parse(f"{DITTO} penalty=0.5 lr=0.2 momentum=0.9").apply(defaults())
    got = [own[key] for key in (f"{DITTO}.penalty", f"{DITTO}.lr", "lr", "momentum")]
    assert got == [0.5, 0.2, 0.3, 0.9]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "my_lab.dito:METHOD"}, ["'my_lab.dito:METHOD'", "PYTHONPATH"]),
        ({"method": "my_lab.ditto:METHODS"}, ["has no METHODS", "DittoClient"]),
        ({f"{DITTO}.mu": 1.0}, [f"'{DITTO}.mu'", "penalty"]),
        ({f"{DITTO}.penalty": "much"}, ["penalty", "'much'", "a number"]),
        ({"my_lab.data:rings.noise": True}, ["noise", "True", "a number"]),
    ],
)
def test_what_is_refused_names_value_and_choices(changes, words):
    external_code.allow(*external_code.named(changes))
    with pytest.raises(ValueError) as error:
        override(defaults(), changes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "my_lab.nets:resnet10"}, "must be a fedapps.methods.Method"),
        ({"method": DITTO, f"{DITTO}.penalty": -1.0}, "penalty is -1.0"),
        ({"partition": "my_lab.rules:BySize", "my_lab.rules:BySize.power": -1.0}, "power is -1"),
        ({"partition": "flwr_datasets.partitioner:DirichletPartitioner"}, "needs 'alpha'"),
        ({"dataset": "my_lab.rules:BySize"}, "a dataset must be an Info, or a function"),
        ({"model": "my_lab.data:rings"}, "a model must be a subclass of torch.nn.Module"),
        ({"model": "torch.nn:Flatten"}, "Flatten without parameters; there is nothing to train"),
        ({"model": "torch.nn:PReLU"}, r"gives \(2, 1, 8, 8\) for 2 inputs, not logits \(2, 10\)"),
        ({"dataset": "my_lab/nothing.npz"}, "unknown dataset 'my_lab/nothing.npz'"),
    ],
)
def test_a_run_refuses_what_does_not_fit(changes, words):
    external_code.allow(*external_code.named(changes))
    with pytest.raises((ValueError, RuntimeError), match=words):
        federate(**changes)


def test_everything_of_ones_own_runs_together():
    changes = {
        "method": DITTO, "dataset": RINGS, f"{RINGS}.samples": 90, f"{RINGS}.noise": 0.0,
        "partition": SIZES, f"{SIZES}.power": 2.0, "num-clients": 3,
    }  # fmt: skip
    config = override(defaults(), changes)
    parts = federation(config)
    # Shares 1, 1/4, 1/9 of 90 rows: ends at 66.1, 82.7, 90.
    assert [len(parts.share(i).everything) for i in range(3)] == [66, 17, 7]
    x, y = configured(config).x, configured(config).y
    assert torch.allclose(x.norm(dim=1).float(), y + 1.0)  # no noise: the radius is the ring
    result, _ = federate(**ALL_SAMPLES, **changes)
    assert result.evaluate_metrics_clientapp[2]["train-clients"] == 2


def test_an_info_tells_the_task_unread():
    config = defaults() | {"dataset": "my_lab.data:RINGS"}
    assert (described(config).shape, described(config).num_classes) == ((2,), 3)


@pytest.mark.parametrize("name", ["my_lab.nets:resnet10", "torchvision.models:mobilenet_v3_small"])
def test_a_foreign_network_ends_in_the_head_that_methods_know(name):
    """Grey inputs are repeated to three channels; head(features(x)) is the network. A method
    without a head gets the network under its own names."""
    external_code.allow(name)
    whole = build_model(name, (1, 32, 32), 7, 0).eval()
    assert not any(n.startswith(("body.", "head.")) for n in whole.state_dict())
    x = torch.rand(2, 1, 32, 32)
    logits = whole(x)
    network = headed(whole, "fedper", (1, 32, 32), 7).eval()
    assert torch.equal(network(x), logits)
    same = build_model(name, (1, 32, 32), 7, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(network.parameters(), same.parameters(), strict=True)
    )
    assert network.head.out_features == 7
    assert torch.equal(network(x), network.head(network.features(x)))
    assert torch.equal(network(x), network(x.repeat(1, 3, 1, 1)))


def test_a_torchvision_network_keeps_its_head_on_the_client(tmp_path):
    """A folder of images, fedper: what travels has no head."""
    for name, colour in (("rose", 200), ("tulip", 40)):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.new("L", (9 + i, 8), colour + i).save(tmp_path / name / f"{i}.png")
    result, _ = federate(**ALL_SAMPLES, **{
        "method": "fedper", "dataset": str(tmp_path), "image-size": 8, "partition": "iid",
        "num-clients": 3, "rounds": 1, "local-steps": 1,
        "model": "my_lab.nets:resnet10",
    })  # fmt: skip
    names = list(result.arrays)
    assert any(name.startswith("body.layer4") for name in names)
    assert not any(name.startswith("head") for name in names)


def test_relative_paths_become_absolute_for_the_engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=np.eye(2), y=[0, 1])
    config = override(defaults(), {"dataset": "d.npz", "data-dir": "."})
    [job] = make_jobs(config, ["fedavg"], [0], tmp_path / "out")
    assert job.config["dataset"] == str(tmp_path / "d.npz")
    assert job.config["data-dir"] == str(tmp_path)


def test_auto_chooses_from_the_pages_correction_and_plays_its_change():
    """The mean of an image's logits and those of its mirror image; fog brightens each pixel."""
    names = ["my_lab.corrections:METHOD", "my_lab.corrections:fog"]
    external_code.allow(*names)
    config = defaults() | {"method": "auto", "auto.candidates": f"bbse,{names[0]}"}
    config |= {"auto.changes": names[1], "num-clients": 6}
    client = Builder(config, "auto", federation(config).info).client(federation(config).share(1), 1)
    x = client.share.everything[:][0]
    client.load(client.initial)
    mirrored = client.predicted_by(names[0], x, Client.predict(client, x))
    expected = (Client.predict(client, x) + Client.predict(client, x.flip(-1))) / 2
    torch.testing.assert_close(mirrored, expected)
    (fog,) = named_changes(client.changes, 4)
    changed = Changer(x)(fog, x, np.random.default_rng(0))
    assert (changed >= x).all() and (changed[x < x.max()] > x[x < x.max()]).all()
