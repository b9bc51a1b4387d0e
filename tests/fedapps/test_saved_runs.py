"""``fedapps run --from`` and ``--bound``."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from small_runs import fedapps

SMALL = ["num-clients=6", "rounds=2", "local-steps=3", "model=mlp-small", "batch-size=16",
         "partition.public-samples=1200", "--engine", "in-process"]  # fmt: skip


def test_novel_labeled_clients_join_a_saved_model(tmp_path):
    first, later = tmp_path / "first", tmp_path / "later"
    got = fedapps("run", "--methods", "pfedhn,fedavg", *SMALL, "--output", first)
    assert "cannot without labels" in got
    more = ["--engine", "in-process", "--output", later, "--methods", "pfedhn", "novel-rounds=2"]
    assert "cannot without labels" not in fedapps("run", "--from", first, *more)
    summary = json.loads((later / "pfedhn-seed0" / "summary.json").read_text())
    before = json.loads((first / "pfedhn-seed0" / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["evaluation"]["novel-clients"] == 3
    name = "train-accuracy"
    assert summary["evaluation"][name] == before["evaluation"][name]  # φ is frozen


def test_what_clients_keep_to_themselves_is_part_of_a_saved_run(tmp_path):
    """Evaluated again, methods whose parts stay on clients score as they did in the run; without
    these parts, or a strategy's own, they are refused, not evaluated wrongly."""
    first, later = tmp_path / "first", tmp_path / "later"
    methods = "pfl-ensemble,lg-fedavg fedavg-rounds=1"
    options = [*SMALL, "rounds=4", "evaluate-every=1"]
    fedapps("run", "--methods", methods, *options, "--output", first)
    fedapps("run", "--from", first, *SMALL[-2:], "--output", later)
    for run in ("pfl-ensemble-seed0", "lg-fedavg,fedavg-rounds=1-seed0"):
        before, after = (
            json.loads((folder / run / "summary.json").read_text()) for folder in (first, later)
        )
        assert {c: got["accuracy"] for c, got in before["per_client"].items()} == {
            c: got["accuracy"] for c, got in after["per_client"].items()
        }
    shutil.rmtree(first / "pfl-ensemble-seed0" / "clients")
    more = ["--methods", "pfl-ensemble", *SMALL[-2:], "--output", tmp_path / "refused"]
    assert "holds no clients/ of pfl-ensemble" in fedapps("run", "--from", first, *more, code=2)


def test_methods_start_from_one_run_of_fedavg(tmp_path):
    """In 0 rounds the corrections differ in their predictions alone: the saved arrays are FedAvg's.
    ATP learns rates from round 1 on, with the network fixed. FedAvg scores as before. From one
    run's folder every method starts from that run, and what a strategy or a client has kept is
    another method's: not taken over. Ditto's predictions need states, and scaffold's server needs
    more than a model."""
    base, later, learnt = (tmp_path / name for name in ("base", "later", "learnt"))
    end = ["--engine", "in-process", "--output"]
    more = ["rounds=4", "partition=rotated", "partition.samples=300", "model=convnet-bn"]
    more += ["lr=0.05", *end, base]
    fedapps("run", "--methods", "fedavg,bbse", "num-clients=4", *more)
    methods = "fedavg,prior-em,bn-adapt,memo,tent,atp"
    fedapps("run", "--from", base, "--methods", methods, "memo.views=2", *end, later)
    saved = load_file(base / "fedavg-seed0" / "model.safetensors")
    scores = {}
    for method in methods.split(","):
        arrays = load_file(later / f"{method}-seed0" / "model.safetensors")
        assert {n: arrays[n].tobytes() for n in saved} == {n: a.tobytes() for n, a in saved.items()}
        summary = json.loads((later / f"{method}-seed0" / "summary.json").read_text())
        scores[method] = [client["accuracy"] for client in summary["per_client"].values()]
    before = json.loads((base / "fedavg-seed0" / "summary.json").read_text())["per_client"]
    assert scores["fedavg"] == scores["atp"] == [client["accuracy"] for client in before.values()]
    assert len({str(s) for s in scores.values()}) == len(scores) - 1
    fedapps("run", "--from", base, "--methods", "atp", "rounds=2", *end, learnt)
    arrays = load_file(learnt / "atp-seed0" / "model.safetensors")
    assert all(arrays[n].tobytes() == a.tobytes() for n, a in saved.items())
    assert abs(arrays["adaptation_rates"]).min() > 0
    folder = base / "bbse-seed0"
    assert load_file(folder / "strategy.safetensors")
    got = fedapps("run", "--from", folder, "--methods", "prior-em", *end, tmp_path / "em")
    assert "has not finished" not in got
    assert not load_file(tmp_path / "em" / "prior-em-seed0" / "strategy.safetensors")
    killed = base / "fedavg-seed0"
    summary = json.loads((killed / "summary.json").read_text()) | {"finished": None}
    (killed / "summary.json").write_text(json.dumps(summary))
    for method, words in (("ditto", "no clients/ of ditto"), ("scaffold", "saved arrays do not")):
        methods = f"{method},{method} lr=0.2"
        got = fedapps("run", "--from", base, "--methods", methods, *end, later, code=2)
        assert words in got
    assert got.count(f"{killed} has not finished: its best model so far is taken") == 1


def test_a_method_starts_from_fedavgs_run_on_the_same_data(tmp_path):
    """A sweep over the data: each run of TENT, whose steps are swept as well, starts from FedAvg's
    run with its α, not from another one. Where FedAvg has no such run, nothing starts."""
    base, later = tmp_path / "base", tmp_path / "later"
    sweep, end = ["partition=dirichlet", "partition.alpha=0.5,5"], ["--engine", "in-process"]
    fedapps("run", "--methods", "fedavg", *sweep, *SMALL, "--output", base)
    more = ["--methods", "tent", "tent.adapt-steps=1,2", *end, "--output", later]
    fedapps("run", "--from", base, sweep[1], *more)
    runs = {
        alpha: [path / "model.safetensors" for path in later.glob(f"*alpha={alpha}*")]
        for alpha in ("0.5", "5")
    }
    saved = {
        alpha: (base / f"fedavg,partition.alpha={alpha}-seed0/model.safetensors").read_bytes()
        for alpha in runs
    }
    assert saved["0.5"] != saved["5"]
    assert {alpha: [file.read_bytes() for file in files] for alpha, files in runs.items()} == {
        alpha: [model] * 2 for alpha, model in saved.items()
    }
    got = fedapps("run", "--from", base, "partition.alpha=5,50", *more, code=2)
    assert "holds no run with seed 0 for 'tent partition.alpha=50" in " ".join(got.split())


def test_one_run_does_not_start_a_sweep_that_deals_its_training_samples_anew(tmp_path):
    base, end = tmp_path / "base", ["--engine", "in-process", "--output", tmp_path / "later"]
    fedapps("run", "--methods", "fedavg", "partition=dirichlet", *SMALL, "--output", base)
    got = fedapps("run", "--from", base, "--methods", "tent", "partition.alpha=0.1,5", *end, code=2)
    assert "samples that clients would be scored on were trained on in" in got
    assert "where partition.alpha was 0.1" in got
    assert not (tmp_path / "later").exists()


def test_rates_decay_over_all_runs_that_follow_each_other(tmp_path):
    """TENT's rate is 0.3ʳ of it after r rounds. The third run trains none: it adapts as the second
    did, after the rounds of both."""
    first, second, third = (tmp_path / name for name in "abc")
    decay = ["lr-decay=0.3", "lr-decay-rounds=1", "tent.adapt-steps=3"]
    fedapps("run", "--methods", "tent", *SMALL, *decay, "--output", first)
    engine = ["--engine", "in-process", "--output"]
    fedapps("run", "--from", first, "rounds=2", *engine, second)
    fedapps("run", "--from", second, *engine, third)
    found = [
        json.loads((f / "tent-seed0" / "summary.json").read_text()) for f in (first, second, third)
    ]
    rounds = [one["novel_round"] for one in found]
    assert [one.get("earlier_rounds") for one in found] == [None, rounds[0], sum(rounds[:2])]
    novel = []
    for one in found:
        novel.append({k: v for k, v in one["evaluation"].items() if k.startswith("novel-")})
    assert novel[2] == novel[1] != novel[0]


def test_the_bounds_columns_add_up(tmp_path):
    got = fedapps("run", "--methods", "fedavg", *SMALL, "--output", tmp_path, "--bound")
    assert "êrr + ½ d̂" in got
    summary = json.loads((tmp_path / "fedavg-seed0" / "summary.json").read_text())
    evaluation = summary["evaluation"]
    terms = evaluation["train-training-error"], evaluation["novel-half-distance"]
    assert f"{terms[0]:.3f} │ {terms[1]:.3f} │ {sum(terms):.3f}" in got


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (
            "fedavg",
            "the saved array 'layers.0.weight' has the shape (100, 64), and the run's (100, 5)",
        ),
        ("fedma", "the saved network has other inputs or outputs"),
        ("pfedhn", "the saved hypernetwork has other layers, or generates another network"),
        ("odpfl-hn", "the saved hypernetwork has other layers, or generates another network"),
    ],
)
def test_a_run_of_other_data_or_another_network_is_refused_before_it_starts(
    method, reason, tmp_path
):
    fedapps("run", "--methods", method, *SMALL, "--output", tmp_path / "former")
    table = tmp_path / "table.npz"
    draw = np.random.default_rng(0)
    np.savez(table, x=draw.normal(size=(1797, 5)).astype(np.float32), y=np.arange(1797) % 10)
    again = ("run", "--from", tmp_path / "former", "--methods", method, "rounds=0")
    again += ("--engine", "in-process", "--output", tmp_path / "other")
    fedapps(*again)
    other_data = fedapps(*again, f"dataset={table}", code=2)
    assert reason in other_data and "take the data and the model of the saved run" in other_data
    other_network = fedapps(*again, "model=convnet", code=2)
    assert "take the data and the model of the saved run" in other_network


def test_a_hypernetwork_starts_from_its_own_kind_of_descriptors(tmp_path):
    """Of six clients three train, so pFedHN's embeddings have 1 + 3 // 4 = 1 entry."""
    first = tmp_path / "first"
    fedapps("run", "--methods", "pfedhn,odpfl-hn", *SMALL, "--output", first)
    again = ["run", "--engine", "in-process", "--output", tmp_path / "later", "--methods"]
    encoder = "the saved run has no encoder, or one of other layers"
    for method, start in (("odpfl-hn encoder=st", "odpfl-hn"), ("odpfl-hn", "pfedhn")):
        assert encoder in fedapps(*again, method, "--from", first / f"{start}-seed0", code=2)
    other = fedapps(*again, "pfedhn embedding-dim=7", "--from", first / "pfedhn-seed0", code=2)
    assert "embedding-dim is 7, and the saved embeddings have 1 entries" in other
    reported = "pfedhn descriptor=class-proportions"
    other = fedapps(*again, reported, "--from", first / "pfedhn-seed0", code=2)
    assert "the saved run's embeddings are those of descriptor='learnt': set that, or" in other
    assert not (tmp_path / "later").exists()


def test_what_clients_have_kept_must_fit_the_run(tmp_path):
    """The server of FedMD holds logits of public samples and no network, and that of local nothing:
    what clients keep shows that the network is another one. The digits in
    reverse are as many public samples, and others."""
    first = tmp_path / "first"
    again = ["run", "--from", first, "--engine", "in-process", "--output", tmp_path / "later"]
    narrow = tmp_path / "narrow.npz"
    rows = np.random.default_rng(0).normal(size=(2000, 3))
    np.savez(narrow, x=rows, y=np.arange(2000) % 10)
    quick = "fedmd.novel-digest-epochs=1"
    fedapps("run", "--methods", "fedmd,local", *SMALL, quick, "--output", first)
    for method in ("fedmd", "local"):
        start = f"{method} cannot start from {first / method}-seed0: "
        deeper = fedapps(*again, "--methods", method, "model=mlp", code=2)
        assert f"{start}the arrays that client" in deeper and "'layers.1.bias'" in deeper
        table = [*again, "--methods", method, f"dataset={narrow}", "partition=iid"]
        assert "has the shape (100, 64), and the run's (100, 3)" in fedapps(*table, code=2)
    fewer = fedapps(*again, "--methods", "fedmd", "partition.public-samples=600", code=2)
    assert "the saved consensus 'logits' has the shape (1200, 10), and the run has 600" in fewer
    digits = load_digits()
    np.savez(tmp_path / "others.npz", x=digits.images[::-1, None] / 16, y=digits.target[::-1])
    others = f"dataset={tmp_path / 'others.npz'}"
    assert "is of other public samples" in fedapps(*again, "--methods", "fedmd", others, code=2)


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "holds no finished run" in fedapps("run", "--from", tmp_path, *SMALL, code=2)
    fedapps("run", "--methods", "fedavg", *SMALL, "--output", tmp_path)
    other = fedapps(
        "run", "--from", tmp_path, "--methods", "pfedhn", "--engine", "in-process", code=2
    )
    assert "pfedhn cannot start from" in other


def test_a_saved_run_is_not_scored_by_what_it_was_trained_on(tmp_path):
    """Of 1797 digits six clients have 299 or 300 each. Who keeps 0.3 of them for validation, after
    0.1, has 60 among them that were trained on: 180 of the three training clients. Inputs that are
    turned otherwise were not trained on by anybody else."""
    first, turned, later = (tmp_path / name for name in ("first", "turned", "later"))
    fraction, end = "partition.validation-fraction", [*SMALL[-2:], "--output", later]
    whole = [word for word in SMALL if not word.startswith("partition.public-samples")]
    options = ["--methods", "fedavg", *whole, "--output"]
    fedapps("run", "partition=iid", f"{fraction}=0.1", *options, first)
    got = fedapps("run", "--from", first, f"{fraction}=0.3", *end, code=2)
    assert "180 of the" in got
    assert f"where {fraction} was 0.1" in got
    saved = f"from-dir={first / 'fedavg-seed0'}"
    dealt = ["partition=iid", f"{fraction}=0.1", *options, later, "--seeds", "0,1"]
    assert "where seed was 0" in fedapps("run", saved, "rounds=0", *dealt, code=2)
    fedapps("run", "partition=rotated", "partition.samples=100", *options, turned)
    fedapps("run", "--from", turned, "partition.novel-angles=90", *end)
    assert json.loads((later / "fedavg-seed0" / "summary.json").read_text())["rounds"] == 0
    assert "were trained on" in fedapps("run", "--from", turned, "data-seed=1", *end, code=2)


def test_a_private_run_goes_on_without_privacy_and_says_so(tmp_path):
    """dp=none was refused since dp-epsilon is 8, and dp-epsilon=0 beside it since dp is none."""
    first = tmp_path / "first"
    start, engine = first / "fedavg-seed0", ["--engine", "in-process", "--output"]
    fedapps("run", "--methods", "fedavg", *SMALL, "dp=central", "dp-epsilon=8", "--output", first)
    without = ["dp=none", "dp-epsilon=0"]
    got = fedapps("run", "--from", start, *without, "rounds=2", *engine, tmp_path / "later")
    assert f"{start} was trained with differential privacy, and dp is 'none' here" in got
    # Neither where nothing is trained, nor with privacy.
    got = fedapps("run", "--from", start, *without, *engine, tmp_path / "evaluated")
    assert "was trained with differential privacy" not in got
    got = fedapps("run", "--from", start, "rounds=2", "dp-epsilon=20", *engine, tmp_path / "both")
    assert "was trained with differential privacy" not in got
    # What the saved run does not have is still refused.
    got = fedapps("run", "--from", start, *without, "dp-clip=3", *engine, tmp_path / "x", code=2)
    assert "dp-clip=3.0 changes nothing here" in got
