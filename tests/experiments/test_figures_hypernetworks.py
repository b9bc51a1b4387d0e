import json

import numpy as np
import pytest

import partitions
from experiments.analysis import (
    configuration,
    kullback_leibler,
    later,
    mix_and_match,
    nearest,
    total_variation,
)
from experiments.figures_hypernetworks import by_distance, cli
from fedapps.engines.jobs import run_in_process
from fedapps.files import read_arrays
from fedapps.service.figures import descriptors, label_shares
from fedapps.settings.config import defaults

from typer.testing import CliRunner  # isort: skip

TINY = {"num-clients": 6, "local-steps": 2, "rounds": 2, "evaluate-every": 1}
TINY |= {f"{method}.hidden-dim": 8 for method in ("pfedhn", "pfedhn-pc", "odpfl-hn")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An ODPFL-HN and a pFedHN run with novel rounds, finished."""
    folders = {}
    changes = {"odpfl-hn": {"odpfl-hn.encoder": "ds-sphere"}, "pfedhn": {"novel-rounds": 1}}
    for method, own in changes.items():
        folders[method] = tmp_path_factory.mktemp(method)
        keys = {"method": method, "output-dir": str(folders[method])} | own
        run_in_process(defaults() | TINY | keys)
    return folders


def test_distances_of_label_distributions():
    """TV((½, ½), (1, 0)) = ½; KL((½, ½), (¼, ¾)) = ½ ln 2 + ½ ln ⅔; of itself 0."""
    half, one, quarter = np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([0.25, 0.75])
    assert total_variation(half, one) == 0.5
    assert kullback_leibler(half, quarter) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert kullback_leibler(quarter, quarter) == 0
    assert 0 < kullback_leibler(half, one) < 10


def test_the_nearest_training_client_is_found(saved):
    config = configuration(saved["odpfl-hn"])
    p = label_shares(config)
    assert p.shape == (6, 10)
    np.testing.assert_allclose(p.sum(1), 1)
    assert (p > 0).sum(1).max() == 2  # its own samples' alone: two classes a client
    found = nearest(config, total_variation)
    assert found.shape == (3,)
    assert ((found >= 0) & (found <= 1)).all()


def test_a_dot_is_a_novel_client(saved):
    """Its distance and its accuracy stand together, whatever the order of the clients."""
    found = by_distance([saved["pfedhn"]], total_variation)
    config = configuration(saved["pfedhn"])
    summary = json.loads((saved["pfedhn"] / "summary.json").read_text())
    clients = np.flatnonzero(partitions.federation(config).novel)
    accuracies = [100 * summary["per_client"][str(c)]["accuracy"] for c in clients]
    assert len(clients) == 3
    assert found == {"pfedhn": [*zip(nearest(config, total_variation), accuracies, strict=True)]}


def test_a_saved_run_evaluated_later_gives_its_numbers(saved):
    before = json.loads((saved["odpfl-hn"] / "summary.json").read_text())
    after = later(saved["odpfl-hn"])
    assert after["novel"] == before["novel"]
    assert after["per_client"] == before["per_client"]


def test_descriptors_are_those_of_all_clients(saved):
    for folder, count in ((saved["odpfl-hn"], 6), (saved["pfedhn"], 6)):
        found = descriptors(configuration(folder), read_arrays(folder))
        assert sorted(found) == list(range(count))
        assert len({v.shape for v in found.values()}) == 1


def test_mixing_and_matching_has_the_run_on_its_diagonal():
    """A client's classifier on its own features is what the run itself evaluated."""
    from tiny import federate

    keys = TINY | {"method": "pfedhn-pc", "train-fraction": 1.0, "evaluate-every": 2}
    matrix = mix_and_match(defaults() | keys)
    result, _ = federate(**keys)
    assert matrix.shape == (6, 6)
    told = result.evaluate_metrics_clientapp[2]["train-accuracy"]
    assert matrix.diagonal().mean() == pytest.approx(told)


def test_every_figure_is_drawn(saved, tmp_path):
    odpfl, pfedhn = map(str, (saved["odpfl-hn"], saved["pfedhn"]))
    keys = [f"{key}={value}" for key, value in TINY.items()]
    calls = {
        "mix": ["OUT", *keys],
        "gap": ["OUT", pfedhn],
        "scatter": ["OUT", pfedhn, odpfl],
        "shift": ["OUT", odpfl],
        "corruption": ["OUT", odpfl, "--blurs", "0,1", "--angles", "0,30"],
        "privacy": ["OUT", odpfl, "--counts", "5,20", "--epsilons", "1,0"],
    }
    for name, arguments in calls.items():
        out = tmp_path / f"{name}.png"
        done = CliRunner().invoke(cli, [name, *(str(out) if a == "OUT" else a for a in arguments)])
        assert done.exit_code == 0, (name, done.output, done.exception)
        assert out.stat().st_size > 1000
    assert "ε inf: 20 samples" in done.output
