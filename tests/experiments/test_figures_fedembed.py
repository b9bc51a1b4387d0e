import numpy as np

from experiments.figures_fedembed import by_prevalence, cli, own_kind, trained
from fedapps.settings.config import defaults

from typer.testing import CliRunner  # isort: skip

USERS = [(0, 0), (0, 0), (0, 1), (1, 1), (2, 1)]  # (sub-population, head)
SUMMARY = {
    "per_client": {
        str(i): {"sub_population": kind, "head": head} for i, (kind, head) in enumerate(USERS)
    },
    "train": {"f1_0": 0.9, "f1_1": 0.5, "f1_2": 0.7},
}
TINY = {
    "method": "fedembed",
    "partition": "preference",
    "num-clients": 20,
    "train-fraction": 1.0,
    "fraction-train": 0.5,
    "rounds": 1,
    "fedembed.embedding-dim": 8,
    "fedembed.local-epochs": 1,
}


def test_prevalence_groups_sub_populations_of_one_share():
    """3 of 5 users are 60 %, the others 20 % each."""
    assert by_prevalence(SUMMARY) == {0.6: [0.9], 0.2: [0.5, 0.7]}


def test_embeddings_are_those_the_users_keep():
    v, kinds = trained(defaults() | TINY)
    assert v.shape == (20, 8)
    assert sorted(kinds) == sorted(list(range(10)) * 2)
    assert len(np.unique(v, axis=0)) == 20


def test_neighbours_of_own_kind_by_hand():
    """On a line at 0, 1, 10, 11 of kinds a, a, b, a with one neighbour each: 1, 1, 0, 0."""
    v = np.array([[0.0], [1.0], [10.0], [11.0]])
    assert own_kind(v, np.array([0, 0, 1, 0]), k=1) == 0.5
    assert own_kind(v, np.zeros(4)) == 1


def test_figures_of_a_run(tmp_path):
    import json

    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "config.toml").write_text("")
    told = CliRunner().invoke(cli, ["prevalence", str(tmp_path)])
    assert "60 %" in told.output
    assert "0.900" in told.output
