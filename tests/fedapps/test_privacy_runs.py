"""Privacy from a run's settings to what its folder and its table say."""

import json
import math
from itertools import pairwise

import pytest
from small_runs import NEEDS, SMALL, dying_in, fedapps, federate

from clients.core.arrays import settled, to_record
from fedapps.building import shared_arrays
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.ledger import policy_of
from fedapps.results.comparison import as_table, compare
from fedapps.results.runs import read_runs
from fedapps.results.table import results
from fedapps.serverapp import check_run
from fedapps.settings.config import construct
from fedapps.tuning import Tuning
from strategies.core.accountant import central_epsilon
from strategies.core.privacy import Privacy
from strategies.methods.fedavg import FedAvg

PRIVATE = {"dp": "central", "dp-noise-multiplier": 1.5, "fraction-train": 0.5, "local-steps": 1}
ALL = {"fraction-train": 1.0}  # a closed form: no numbers to compose


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_budget_goes_on_with_the_model(tmp_path):
    """Two rounds and one more are three; evaluated later, the model has still cost three."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    start = {}
    for folder, rounds in zip(folders, (2, 1, 0), strict=True):
        federate(**PRIVATE | ALL | start, rounds=rounds, **{"output-dir": str(folder)})
        start = {"from-dir": str(folder)}
    got = [summary(folder)["privacy"]["epsilon"] for folder in folders]
    two, three = (central_epsilon({(1.5, 1.0): n}, 1e-5) for n in (2, 3))
    assert got == [two, three, three]


OF_FEDEMBED = [
    *[{"fedembed.assignment": how} for how in ("prototype", "som", "personal", "type")],
    {"fedembed.assignment": "personal", "fedembed.heads": "server"},
]
OTHERS = [m for m, entry in METHODS.items() if "central" in entry.dp and m != "fedembed"]


@pytest.mark.parametrize(
    "changes",
    [
        *[{"method": "fedembed"} | changes for changes in OF_FEDEMBED],
        {"method": "fedavg"},
        *[pytest.param({"method": m}, marks=pytest.mark.slow) for m in OTHERS],
    ],
    ids=str,
)
def test_a_round_in_which_nobody_is_sampled_adds_noise(changes, monkeypatch):
    """The first of two rounds is empty: the model moves all the same, and the run goes on."""
    sample, numbers = Privacy.sample, []

    def none_at_first(self, nodes, round_):
        numbers.append(round_)
        return [] if round_ == 1 else sample(self, nodes, round_)

    monkeypatch.setattr(Privacy, "sample", none_at_first)
    models = []
    monkeypatch.setattr(
        "strategies.core.strategy.settled",
        lambda arrays, like: models.append((like, settled(arrays, like))) or models[-1][1],
    )
    own = PRIVATE | NEEDS.get(changes["method"], {}) | changes
    federate(**own, rounds=2, **{"dp-covers": "model-updates"})
    before, after = models[0]
    assert numbers == [1, 2] and len(models) == 2
    assert all((after[n] != x).any() for n, x in before.items() if x.dtype.kind == "f")


@pytest.mark.parametrize("checkpoint_every", [1, 0])
def test_rounds_that_a_crash_lost_are_spent(checkpoint_every, tmp_path):
    """Killed in its third round, a run of four resumes. With checkpoints, the third is trained
    twice: five rounds in all. Without, the run starts over: the three lost and four more."""
    own = PRIVATE | ALL | {"output-dir": str(tmp_path), "rounds": 4}
    own |= {"checkpoint-every": checkpoint_every}
    with dying_in(3), pytest.raises(SystemExit):
        federate(**own)
    federate(**own, resume=True)
    spent = central_epsilon({(1.5, 1.0): 5 if checkpoint_every else 7}, 1e-5)
    assert summary(tmp_path)["privacy"]["epsilon"] == spent


def test_a_resumed_run_keeps_its_epsilon(tmp_path):
    """The round that is trained again has to be paid for: by more noise in the rounds to come."""
    own = PRIVATE | ALL | {"output-dir": str(tmp_path), "rounds": 4, "checkpoint-every": 1}
    own |= {"dp-noise-multiplier": 0.0, "dp-epsilon": 3.0}
    with dying_in(1), pytest.raises(SystemExit):
        federate(**own)
    federate(**own, resume=True)
    got = summary(tmp_path)["privacy"]
    (_, first), (_, rest) = json.loads((tmp_path / "privacy.json").read_text())["spent"].items()
    assert (first, rest) == (1, 4) and 2.99 < got["epsilon"] <= 3.0


def test_a_model_trained_without_privacy_is_no_start(tmp_path):
    federate(rounds=1, **{"output-dir": str(tmp_path), "local-steps": 1})
    with pytest.raises(ValueError, match=r"holds no privacy\.json: its model was trained without"):
        federate(**PRIVATE, **{"from-dir": str(tmp_path)})


def test_what_another_run_has_spent_is_none_of_one_without_privacy(tmp_path):
    """A private run's folder is taken by one without, from which a private one must not go on."""
    own = {"rounds": 1, "local-steps": 1, "output-dir": str(tmp_path), "resume": True}
    federate(**PRIVATE | own)
    assert (tmp_path / "privacy.json").is_file()
    federate(**own)
    with pytest.raises(ValueError, match=r"holds no privacy\.json"):
        federate(**PRIVATE, **{"from-dir": str(tmp_path)})


def test_tables_name_terms_and_test_settings(tmp_path):
    for name, more in (("fedavg-seed0", {"dp-generator": "seeded"}), ("fedprox-seed0", {})):
        own = {"method": name.split("-")[0], "output-dir": str(tmp_path / name), "rounds": 1}
        federate(**PRIVATE | own | more)
    shown = results(read_runs(tmp_path)[0])
    cells = [row[shown.columns.index("ε")] for row in shown.rows]
    assert cells[0].endswith("(1e-05) TEST") and cells[1].endswith("(1e-05)")
    assert "ε of fedavg dp-generator=seeded: one user added or removed" in shown.caption
    assert "TEST SETTING" in shown.caption
    assert [row[-1] for row in shown.rows] == ["–", "–"]
    assert summary(tmp_path / "fedprox-seed0")["evaluation"]["train-accuracy"] is None


def test_comparisons_name_what_no_run_of_theirs_covers(tmp_path):
    """A private run that is evaluated stands with its ε and what that leaves out; one that is not
    evaluated, with its ε alone."""
    covers = {"dp-covers": "model-updates"}
    for name, more in (("fedavg-seed0", covers), ("fedprox-seed0", {})):
        own = {"method": name.split("-")[0], "output-dir": str(tmp_path / name), "rounds": 1}
        federate(**PRIVATE | ALL | own | more)
    got = f"{central_epsilon({(1.5, 1.0): 1}, 1e-5):.2f} (1e-05)"
    found = as_table(compare(read_runs(tmp_path)[0]))
    assert {row[found.columns.index("ε")] for row in found.rows} == {got}
    assert "not covered: scores of evaluations" in found.caption
    assert f"not evaluated: fedprox-seed0, ε = {got}" in found.caption
    alone = as_table(compare(read_runs(tmp_path)[0].query('variant == "fedprox"')))
    assert alone.columns == ["not evaluated", "ε"] and alone.rows == [["fedprox-seed0", got]]
    assert "ε of fedprox dp-covers=everything: one user added or" in alone.caption


WEAK = {"dp-generator": "seeded", "dp-covers": "model-updates"}


@pytest.mark.parametrize("known", [True, False])
def test_terms_go_on_with_the_model(known, tmp_path):
    """A run of one round, seeded and evaluated, calls a run that goes on from it the same, and the
    one after that; for a ledger without terms the weakest hold."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    own = PRIVATE | ALL | {"rounds": 1}
    federate(**own | WEAK | {"output-dir": str(folders[0])})
    if not known:
        ledger = folders[0] / "privacy.json"
        got = json.loads(ledger.read_text())
        ledger.write_text(json.dumps({key: got[key] for key in ("mode", "spent")}))
    for before, folder in pairwise(folders):
        federate(**own | {"from-dir": str(before), "output-dir": str(folder)})
        got = summary(folder)["privacy"]
        exclusion = "scores of evaluations" if known else "scores and exchanges of the"
        assert got["generator"] == "seeded" and f"not covered: {exclusion}" in got["terms"]
        assert "continues a saved run: other continuations of the same run" in got["terms"]
        assert "TEST SETTING" in got["terms"]
    assert "TEST SETTING" in fedapps("show", folders[1])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"mode": "central", "spent": {"1.5 1.0": -9}}', r"'spent' of '1\.5 1\.0' is -9"),
        ('{"mode": "central", "spent": {"1.5 1.0": NaN}}', r"'spent' of '1\.5 1\.0' is nan"),
        ('[{"mode": "central"}]', "its content is"),
        ('{"mode": ', "is damaged"),
        ("[" * 100_000, "is damaged"),
    ],
)
def test_a_ledger_that_no_run_wrote_is_no_start(text, why, tmp_path):
    federate(**PRIVATE | ALL | {"rounds": 1, "output-dir": str(tmp_path)})
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(ValueError, match=rf"privacy\.json is .*{why}|privacy\.json {why}"):
        federate(**PRIVATE | ALL, **{"from-dir": str(tmp_path)})
    with pytest.raises(ValueError, match=rf"privacy\.json is .*{why}|privacy\.json {why}"):
        federate(**PRIVATE | ALL, **{"output-dir": str(tmp_path), "resume": True})


def test_how_long_a_central_run_took_is_not_reported(tmp_path):
    """It tells how many took part."""
    folders = tmp_path / "fedavg-seed0", tmp_path / "fedprox-seed0"
    federate(**PRIVATE | {"output-dir": str(folders[0]), "rounds": 1})
    federate(method="fedprox", rounds=1, **{"output-dir": str(folders[1]), "local-steps": 1})
    assert summary(folders[0])["seconds"] is None and summary(folders[1])["seconds"] > 0
    shown = results(read_runs(tmp_path)[0])
    central, plain = (row[shown.columns.index("seconds")] for row in shown.rows)
    assert central == "–" and plain.isdecimal()


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"dp-epsilom": 1.0}, "has 'dp-epsilom'; known: dp, dp-covers, dp-epsilon"),
        ({"dp": "central"}, "the node's dp is 'central'; it must be 'local'"),
        ({"dp": "none", "dp-clip": 1.0}, "the node's dp is 'none'"),
        ({"dp-epsilon": 0.0, "state-dir": "x"}, "the node's dp-epsilon is 0.0; it must be pos"),
        ({"dp-delta": 1.0}, "the node's dp-delta is 1.0"),
        ({"dp-clip": math.nan}, "the node's dp-clip is nan"),
        ({"dp-covers": "nothing"}, "the node's dp-covers is 'nothing'; known: everything"),
        ({"dp-epsilon": 1.0}, "its configuration names no state-dir"),
    ],
)
def test_a_nodes_bad_policy_is_named(own, why):
    with pytest.raises(ValueError, match=why):
        policy_of(own)


# What looks at data before training, or beside it

LOOKS = [
    ({"dataset": "sent140", "model": "word-lstm"}, "the vocabulary of frequent words"),
    ({"standardize": "training-clients"}, "moments of inputs"),
    ({"early-stopping": 1}, "scores by which early-stopping ends the run"),
    ({"method": "prior-em", "prior-em.source-prior": "training"}, "label counts"),
    ({"method": "fedembed"} | NEEDS["fedembed"], "embeddings and sub-populations of prototypical"),
    (
        {"method": "fedembed", "fedembed.assignment": "som"} | NEEDS["fedembed"],
        "every user's embedding, in its map update",
    ),
]


@pytest.mark.parametrize(("changes", "what"), LOOKS, ids=[what for _, what in LOOKS])
@pytest.mark.parametrize("dp", ["central", "local"])
def test_what_looks_at_data_beside_training_is_refused_or_listed(changes, what, dp):
    """Before the first message, while ε is to cover everything; else it is named beside ε."""
    own = PRIVATE | ALL | {"dp": dp, "rounds": 1, "evaluate-every": 1} | changes
    with pytest.raises(ValueError, match=f"with dp '{dp}' {what}.* would leave the clients"):
        federate(**own)
    config = SMALL | own | {"dp-covers": "model-updates"}
    privacy = check_run(config)
    method = config["method"]
    construct(METHODS[method].strategy, config=config, method=method, privacy=privacy)
    assert what in privacy.terms()


@pytest.mark.parametrize("dp", ["central", "local"])
def test_tune_refuses_before_its_first_trial_what_it_cannot_compare(dp, tmp_path):
    config = SMALL | PRIVATE | {"dp": dp}
    with pytest.raises(ValueError, match="tune compares validation scores, which dp"):
        Tuning(config, [0], {"lr": [0.1]}, tmp_path, 1, print)
    Tuning(config | {"dp-covers": "model-updates"}, [0], {"lr": [0.1]}, tmp_path, 1, print)


def test_a_server_claims_no_local_privacy_of_clients_that_keep_none():
    """The clients' configuration says nothing of dp: they would train as if there were none."""
    privacy = Privacy(dp="local", dp_noise_multiplier=4.0)
    strategy = FedAvg(privacy=privacy, min_available_nodes=6)
    grid = InProcessGrid.simulation(app, SMALL | {"method": "fedavg"}, 6)
    start = to_record(shared_arrays(SMALL, "fedavg", SMALL["model"]))
    with pytest.raises(RuntimeError, match=r"0 valid replies.*not-private.*keeps no local"):
        strategy.start(grid, start, 1)
