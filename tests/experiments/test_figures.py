import json

import numpy as np
import pytest
from small_runs import ALL_SAMPLES, federate

import partitions
from experiments import figures_fedembed, figures_hypernetworks
from fedapps.saved import read_arrays
from fedapps.serverapp import run_in_process
from fedapps.service.figures import descriptors
from fedapps.settings.config import defaults
from fedapps.settings.saved_configurations import run_configuration
from partitions import inspect

from typer.testing import CliRunner  # isort: skip

TINY = {"num-clients": 6, "local-steps": 2, "rounds": 2, "evaluate-every": 1}
TINY |= {f"{method}.hidden-dim": 8 for method in ("pfedhn", "pfedhn-pc", "odpfl-hn")}
KEYS = [f"{key}={value}" for key, value in TINY.items()]
USERS = {"num-clients": 10, "train-fraction": 1.0, "rounds": 1}
USERS |= {"fedembed.embedding-dim": 8, "fedembed.local-epochs": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of finished runs: ODPFL-HN, pFedHN with novel rounds."""
    folders = {}
    changes = {"odpfl-hn": {"odpfl-hn.encoder": "ds-sphere"}, "pfedhn": {"novel-rounds": 1}}
    for method, keys in changes.items():
        folders[method] = tmp_path_factory.mktemp(method)
        keys |= {"method": method, "output-dir": str(folders[method])}
        run_in_process(defaults() | TINY | keys)
    return folders


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_each_novel_client_has_its_distance_and_its_accuracy(saved):
    federation = partitions.federation(run_configuration(saved["pfedhn"]))
    novel = np.flatnonzero(federation.novel)
    clients = summary(saved["pfedhn"])["per_client"]
    accuracies = [100 * clients[str(i)]["accuracy"] for i in novel]
    both = inspect.distances(inspect.class_counts(federation), federation.novel)
    for kind, distances in enumerate(both):
        points = figures_hypernetworks.by_distance([saved["pfedhn"]], kind)
        assert points == {"pfedhn": [*zip(distances, accuracies, strict=True)]}


def test_a_saved_run_that_is_evaluated_again_has_the_same_results(saved):
    before, after = summary(saved["odpfl-hn"]), figures_hypernetworks.later(saved["odpfl-hn"])
    assert after["per_client"] == before["per_client"]
    for name in ("novel-accuracy", "novel-loss"):
        assert after["evaluation"][name] == before["evaluation"][name]


@pytest.mark.parametrize("method", ["odpfl-hn", "pfedhn"])
def test_every_client_has_a_descriptor(saved, method):
    vectors = descriptors(run_configuration(saved[method]), read_arrays(saved[method]))
    assert sorted(vectors) == list(range(6))
    assert len({v.shape for v in vectors.values()}) == 1


def test_the_diagonal_of_mix_and_match_is_the_runs_own_accuracy():
    keys = TINY | {"method": "pfedhn-pc", "train-fraction": 1.0, "evaluate-every": 2}
    matrix = figures_hypernetworks.mix_and_match(defaults() | keys)
    metrics = federate(**ALL_SAMPLES, **keys)[0].evaluate_metrics_clientapp[2]
    assert matrix.shape == (6, 6)
    assert matrix.diagonal().mean() == pytest.approx(metrics["train-accuracy"])


def test_prevalence_groups_sub_populations_of_one_share(tmp_path):
    """3 of 5 users are 60 %, the others 20 % each."""
    clients = {str(i): {"sub_population": kind} for i, kind in enumerate([0, 0, 0, 1, 2])}
    found = {"per_client": clients, "train": {"f1_0": 0.9, "f1_1": 0.5, "f1_2": 0.7}}
    assert figures_fedembed.by_prevalence(found) == {0.6: [0.9], 0.2: [0.5, 0.7]}
    (tmp_path / "summary.json").write_text(json.dumps(found))
    output = CliRunner().invoke(figures_fedembed.cli, ["prevalence", str(tmp_path)]).output
    assert "60 %" in output and "0.900" in output


def test_the_rand_index_of_heads_and_sub_populations_by_hand(tmp_path):
    """Four users of kinds 0, 0, 1, 1. Heads 5, 5, 3, 3 divide them alike. With heads 0, 0, 0, 1 two
    pairs are of one kind, three of one head, and one of both. By chance 2 · 3 / 6 = 1 is of both,
    so the index is (1 − 1) / (2.5 − 1) = 0."""
    for name, heads, index in (("alike", [5, 5, 3, 3], 1.0), ("chance", [0, 0, 0, 1], 0.0)):
        users = zip([0, 0, 1, 1], heads, strict=True)
        clients = {str(i): {"sub_population": k, "head": h} for i, (k, h) in enumerate(users)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"per_client": clients}))
        assert figures_fedembed.rand_index({"per_client": clients}) == pytest.approx(index)
    words = ["clusters", str(tmp_path / "alike"), str(tmp_path / "chance")]
    output = CliRunner().invoke(figures_fedembed.cli, words).output
    assert "alike: 1.000" in output and "mean 0.500, deviation 0.707" in output


def test_embeddings_are_those_that_the_users_keep():
    config = {"method": "fedembed", "partition": "preference", "fraction-train": 0.5}
    v, kinds = figures_fedembed.trained(defaults() | USERS | config | {"num-clients": 20})
    assert v.shape == (20, 8) == np.unique(v, axis=0).shape
    assert sorted(kinds) == sorted([*range(10)] * 2)


def test_neighbours_of_the_same_kind():
    """On a line at 0, 1, 10, 11 of kinds a, a, b, a with one neighbour each: 1, 1, 0, 0."""
    v = np.array([[0.0], [1.0], [10.0], [11.0]])
    assert figures_fedembed.own_kind(v, np.array([0, 0, 1, 0]), k=1) == 0.5
    assert figures_fedembed.own_kind(v, np.zeros(4)) == 1


FIGURES = {
    "mix": (figures_hypernetworks, [*KEYS], ""),
    "gap": (figures_hypernetworks, ["pfedhn"], ""),
    "scatter": (figures_hypernetworks, ["pfedhn", "odpfl-hn"], ""),
    "shift": (figures_hypernetworks, ["odpfl-hn"], ""),
    "corruption": (figures_hypernetworks, ["odpfl-hn", "--blurs=0,1", "--angles=0,30"], ""),
    "privacy": (
        figures_hypernetworks,
        ["odpfl-hn", "--counts=5,20", "--epsilons=1,0"],
        "ε inf: 20",
    ),
    "embeddings": (figures_fedembed, [f"{k}={v}" for k, v in USERS.items()], "without type head, "),
    "voices": (figures_fedembed, [], ""),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [*list(FIGURES)[:-1], pytest.param("voices", marks=SLOW)])
def test_every_figure_is_drawn(saved, tmp_path, name):
    module, words, printed = FIGURES[name]
    file, arguments = tmp_path / "figure.png", [str(saved.get(word, word)) for word in words]
    done = CliRunner().invoke(module.cli, [name, str(file), *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    assert file.stat().st_size > 1000
    assert printed in done.output
