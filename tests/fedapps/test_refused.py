"""What the commands and the app refuse: a sentence names what is wrong, and nothing has begun."""

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import vouch
from small_runs import SMALL, fedapps, share
from torch import nn

from clients.core.client import Client
from fedapps.clientapp import _answer_simulated, app, make_client
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.jobs import Job
from fedapps.engines.run import run_jobs
from fedapps.planning import check
from fedapps.results import plot
from fedapps.results.card import Card, make_card, read_card
from fedapps.results.comparison import _value
from fedapps.results.sweep import begun_jobs
from fedapps.saved import MODEL, read_arrays
from fedapps.serverapp import APPS, check_run, main, run_in_process
from fedapps.service import onnx
from fedapps.service.inputs import read_input_files, unlabeled
from fedapps.service.served_node import node_inputs
from fedapps.service.serving import serve_once
from fedapps.settings import saved_configurations
from fedapps.settings.config import defaults
from fedapps.settings.saved_configurations import run_configuration
from fedapps.tuning import validation_score
from partitions import federation
from partitions.datasets.readers.convert import AUTO, as_inputs
from partitions.inspect import export
from strategies.core.roster import NoClientStartsError

CARD = Card("tent", "mine", "mlp", (4,), ("ant", "bee"), 16.0, 0.5, 0.25)


TASTES = ["run", "--methods", "fedembed", "partition=preference", "num-clients=4"]
VECTORS = [*TASTES, "fedembed.embedding-dim=8", "fedembed.model=convnet-atp"]  # 20 samples a user


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*VECTORS, "fedembed.batch-size=1"],
            "error: fedembed.batch-size is 1; of a client's 20 samples a mini-batch has one, and "
            "convnet-atp trains on two or more: set fedembed.batch-size to 2, or take another",
        ),
        ([*VECTORS, "fedembed.batch-size=19"], "is 19; of a client's 20 samples"),
        (
            ["run", "--methods", "fedavg,pfedkm", "num-clients=4"],
            "error: pfedkm: the method needs users with preferences: set partition to 'preference'",
        ),
        (
            ["run", "--methods", "fedavg,global+", "num-clients=4"],
            "error: global+: the method's embedding-dim is 16",
        ),
        (
            ["run", "--methods", "fedavg,fedma", "num-clients=4", "model=convnet-bn"],
            "error: fedma matches linear and convolutional layers with biases; 'norm1' is none",
        ),
        (
            ["run", "--methods", "fedavg,bn-adapt", "num-clients=4"],
            "error: bn-adapt needs batch normalisation",
        ),
        ([*VECTORS, "fedembed.batch-size=19"], "set fedembed.batch-size to 20"),
        (
            ["run", "--methods", "fedavg", "num-clients=4", "model=convnet-atp", "batch-size=1"],
            "error: batch-size is 1; of a client's",
        ),
        (TASTES, "images of 8×8 pixels: set it to at most 8"),
        (
            ["run", "--methods", "fedavg", "fedembed.batch-size=1"],
            "fedembed does not run, but fedavg",
        ),
        (["run", "--resume", "OUT", "lr=0.1"], "--resume continues runs as they are"),
        (["run", "--resume", "OUT"], "holds no run that could go on: no config.toml in it"),
        (["run", "a.toml", "b.toml"], "one experiment at a time, not a.toml, b.toml"),
        (["run", "--gpus-per-client", "0.5"], "is 0.5, but this machine has 0 GPUs"),
        (["run", "output-dir=x"], "output-dir is set by the command: use --output"),
        (["run", "--methods", "fedavg seed=5"], "seed is no setting of a single method"),
        (["run", "--methods", "fedavg lr=0.1 lr=0.2"], "'fedavg lr=0.1 lr=0.2' sets lr twice"),
        (["run", "--methods", "fedavg tent.adapt-steps=1"], "fedavg does not read tent.adapt-step"),
        (["run", "OUT/empty.toml"], "lr is [], an empty list"),
        (["run", "OUT/both.toml"], "two included experiments would write to results/empty;"),
        (["table", "OUT", "--scores", "gain", "--by", "lr"], "--by does not go with --scores"),
        (["tune", "--engine", "spark"], "unknown engine 'spark'; known: "),
        (["tune", "--trials", "0"], "--trials is 0; it must be at least 1"),
        (["tune", "--seeds", "0,one"], "seed 'one' is not a whole number"),
        (["run", "--seeds", "0..3"], "seed '0..3' is not a whole number from 0; write each seed"),
        (["tune", "--methods", ","], "methods are ','; name at least one"),
        (["show", "OUT"], "holds no run; name a folder such as results/"),
        (["serve", "OUT"], "name either --deployment or --superlink"),
        (["serve", "OUT", "--superlink", "mine"], "holds no run; name a folder such as results/"),
        (["deploy", "OUT"], "holds no deployment.json"),
        (["deploy", "OUT/d", "--nodes", "2", "--only", "node-5"], "unknown node-5; known: super"),
        (["deploy", "OUT/d", "--nodes", "2", "--only", "node-1"], "--only chooses what --start"),
        (
            ["deploy", "OUT/d", "--tls"],
            "--tls, --own-keys, --host and --data belong to a new deployment",
        ),
        (["deploy", "OUT/d", "--host", "10.0.0.1"], "belong to a new deployment: add --nodes"),
        (["deploy", "OUT/d", "--nodes", "2", "--data", "OUT"], "--nodes is 2; "),
        (["deploy", "OUT/d", "--nodes", "-1"], "--nodes is -1"),
        (["deploy", 'OUT/a"b', "--nodes", "1"], "has a quote, a backslash or a line break"),
    ],
)
def test_commands_that_cannot_be_followed(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "search.toml").write_text("methods = 'fedavg'\n[search]\nlr = [0.1, 0.2]\n")
    (tmp_path / "empty.toml").write_text("methods = 'fedavg'\nlr = []\n")
    (tmp_path / "both.toml").write_text(f"include = ['{tmp_path}/empty.toml', 'lab/empty']\n")
    arguments = [word.replace("OUT", str(tmp_path)) for word in arguments]
    if arguments[0] == "tune":
        arguments += [str(tmp_path / "search.toml"), "--output", str(tmp_path / "study")]
    assert words in fedapps(*arguments, code=2)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "--resume", "OUT"], "OUT/a, OUT/b/grid"),
        (["status", "OUT"], "OUT/a, OUT/b/grid"),
        (["table", "OUT"], "OUT/a, OUT/b/grid"),
        (["run", "--from", "OUT"], "OUT/a, OUT/b/grid"),
        (["show", "OUT"], "OUT/a/fedavg-seed0, OUT/b/grid/fedper-seed1"),
        (["show", "OUT/a"], "OUT/a/fedavg-seed0"),
    ],
)
def test_a_folder_above_those_of_runs_names_them(arguments, named, tmp_path):
    """Runs are in OUT/a and OUT/b/grid. A link to the folder itself is not followed."""
    for run in ("a/fedavg-seed0", "b/grid/fedper-seed1"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.toml").write_text("")
    (tmp_path / "c").symlink_to(tmp_path)
    said = fedapps(*[word.replace("OUT", str(tmp_path)) for word in arguments], code=2)
    found = said.partition("below it")[2].partition(": ")[2].partition(";")[0]
    assert found.replace(str(tmp_path), "OUT") == named


def test_a_search_for_runs_has_an_end(tmp_path, monkeypatch):
    """Of 4 folders 2 are opened: the given one and `a`. The run is in `b`."""
    monkeypatch.setattr(saved_configurations, "SEARCHED", 2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b/fedavg-seed0").mkdir(parents=True)
    (tmp_path / "b/fedavg-seed0/config.toml").write_text("")
    assert saved_configurations.runs_below(tmp_path) == []
    assert saved_configurations.runs_below(tmp_path / "b") == [tmp_path / "b/fedavg-seed0"]


def test_a_deployment_tells_what_is_down(tmp_path):
    """Its scripts are there, none of its processes; a pid that is another's by now is none."""
    assert "2 start scripts" in fedapps("deploy", tmp_path / "d", "--nodes", 1)
    (tmp_path / "d" / "run").mkdir(exist_ok=True)
    (tmp_path / "d" / "run" / "node-0.json").write_text(json.dumps({"pid": 1, "birth": "boot 0"}))
    said = fedapps("deploy", tmp_path / "d", "--status")
    assert "superlink: down node-0: down" in said


def test_an_engine_that_breaks_down_is_reported(tmp_path, monkeypatch):
    def broken(*arguments, **named):
        raise RuntimeError("Ray's raylet has died")

    monkeypatch.setattr("fedapps.engines.run.run_jobs", broken)
    said = fedapps("run", "num-clients=6", "--output", tmp_path, "--engine", "ray", code=1)
    assert "Ray's raylet has died" in said


def test_jobs_that_an_engine_refuses_leave_former_results(tmp_path):
    jobs = [Job("fedavg", seed, defaults(), tmp_path) for seed in (0, 1)]
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="ray gives all cores to one run"):
        run_jobs(jobs, "ray", APPS, parallel=2, follow=lambda jobs: None)
    assert len(list(tmp_path.iterdir())) == 2


def test_real_nodes_have_their_own_seconds():
    """A deployment waits by the clock: it takes a quorum without latency, and no latency."""
    check_run(defaults() | {"round-quorum": 0.8}, "deployment")
    with pytest.raises(ValueError, match=r"latency is 'lognormal', .* these are real nodes; set"):
        check_run(defaults() | {"latency": "lognormal"}, "deployment")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "fedmd", "robust": "median"}, "fedmd takes no robust 'median'; able: local"),
        ({"robust": "median", "dp": "central"}, "robust and dp exclude each other"),
        (
            {"robust": "krum", "fraction-train": 0.4},  # 4 of the 10 training clients
            "robust is 'krum', but robust-fraction 0.2 of 4 clients .*it is the plain mean. Take",
        ),
        (
            {"dp": "central", "dp-epsilon": 8.0, "standardize": "training-clients"},
            "with dp 'central' moments of inputs would leave the clients without noise",
        ),
        ({"round-quorum": 0.8}, "round-quorum is 0.8 .* set latency=lognormal as well, or round-q"),
        (
            {"round-deadline": 9.0},
            "round-deadline 9, but simulated clients have no seconds of their own; set latency=",
        ),
        ({"output-dir": "here"}, "output-dir is 'here'; it must be an absolute path"),
        (
            {"output-dir": "/runs/here", "fraction-evaluate": 0.0},
            "fraction-evaluate is 0, but output-dir keeps .*; give a share above 0, or a larger",
        ),
        ({"callbacks": "tensorboard"}, "output-dir is not set"),
    ],
)
def test_settings_that_exclude_each_other(changes, words):
    with pytest.raises(ValueError, match=words):
        check_run(defaults() | changes)


def test_methods_side_by_side_in_flower_fail_each_for_itself(tmp_path, caplog):
    """FedBN finds no layer of its kind; FedAvg has run to its end."""
    config = SMALL | {"method": "fedbn,fedavg", "output-dir": str(tmp_path), "num-clients": 4}
    grid = InProcessGrid.simulation(app, config, 4)
    caplog.set_level(logging.CRITICAL, "flwr")
    with pytest.raises(RuntimeError, match=r"^fedbn: ValueError: "):
        main(grid, SimpleNamespace(run_config=config))
    assert json.loads((tmp_path / "fedavg-seed0" / "summary.json").read_text())["finished"]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("folder", "method"), [("run", "fedper"), ("fedavg-seed0", "fedper,fedavg")]
)
def test_flwr_run_does_not_replace_a_finished_run_of_another_configuration(
    folder, method, resume, tmp_path
):
    """FedAvg with 3 local steps was there. The second command runs it with the default number."""
    run_in_process(SMALL | {"method": "fedavg", "output-dir": str(tmp_path / folder)})
    before = (tmp_path / folder / "summary.json").read_bytes()
    output = tmp_path if "," in method else tmp_path / folder
    config = {"method": method, "output-dir": str(output), "resume": resume}
    grid = InProcessGrid.simulation(app, SMALL, 4)
    with pytest.raises(ValueError, match=r"holds a finished run of another .*; choose another out"):
        main(grid, SimpleNamespace(run_config=config))
    assert (tmp_path / folder / "summary.json").read_bytes() == before


def test_a_run_that_cannot_begin_leaves_former_results(tmp_path, monkeypatch):
    """The same settings as before, of a network that is not to be built any more."""
    config = SMALL | {"method": "fedavg", "output-dir": str(tmp_path)}
    run_in_process(config)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}

    def fail(*arguments, **named):
        raise ValueError("no such layer")

    monkeypatch.setattr("fedapps.serverapp.strategy_of_run", fail)
    with pytest.raises(ValueError, match="no such layer"):
        run_in_process(config)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("inputs", "outputs", "array"), [(2, 3, r"'weight' has shape \(3, 2\)"), (4, 2, r"\(2, 4\)")]
)
def test_a_client_with_other_classes_or_columns_than_the_run_says_so(inputs, outputs, array):
    """Its two columns and two classes stand beside the run's."""
    client = Client(nn.Linear(2, 2), share([[1.0, 2.0]], [0]))
    arrays = {"weight": np.zeros((outputs, inputs)), "bias": np.zeros(outputs)}
    words = rf"{array}, the model \(2, 2\): .* whose inputs have the shape \(2,\); give all clients"
    with pytest.raises(ValueError, match=words):
        client.load(arrays)


@pytest.mark.parametrize(
    ("device", "words"), [("tpu", "unknown device 'tpu'; known: auto, cpu"), ("cuda", "no CUDA")]
)
def test_devices_that_are_not_there(device, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, held = torch.nn.Linear(1, 2), share([[1.0]], [0])
    assert [Client(model, held, device=d).device for d in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match=words):
        Client(model, held, device=device)


def test_what_a_real_node_keeps_stays_on_it():
    with pytest.raises(PermissionError, match="stays on it"):
        _answer_simulated(None, SimpleNamespace(node_config={}))


def test_a_node_with_data_of_its_own_needs_no_partition(tmp_path):
    """It trains on what its folder holds; one that names neither is told what it lacks."""
    (tmp_path / "data").mkdir()
    folders = export(federation(SMALL), tmp_path / "data")
    node = {"partition-id": 0, "data-path": str(folders[2])}
    context = SimpleNamespace(run_config=SMALL, node_config=node, state={}, node_id=7)
    own = make_client(context, "fedavg").share.everything[:][0]
    assert torch.equal(own, federation(SMALL).share(2).everything[:][0])
    context.node_config = {"partition-id": 0}
    with pytest.raises(ValueError, match="names neither its data"):
        make_client(context, "fedavg")


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ((0.0, 0.9), 0.5, (0.5, 0.01)),
        ((2.0, 0.001), 0.5, (0.5, 0.001)),
        ((0.25, 0.5), 0.5, (0.25, 0.01)),
        ((0.25, 0.5), 0, (0.25, 0.5)),
    ],
)
def test_a_novel_nodes_own_epsilon_is_weakened_by_no_run(asked, own, expected, tmp_path):
    """ε and δ of the descriptor: the run's and the node's, 0 for none, its δ the default."""
    config = SMALL | {"odpfl-hn.encoder": "ds-sphere"}
    config |= {
        f"odpfl-hn.descriptor-{k}": v for k, v in zip(("epsilon", "delta"), asked, strict=True)
    }
    made = federation(config)
    folders = export(made, tmp_path)
    novel = made.novel.tolist()
    for client, terms in ((novel.index(True), expected), (novel.index(False), asked)):
        node = {"data-path": str(folders[client]), "descriptor-epsilon": own}
        context = SimpleNamespace(run_config=config, node_config=node, state={}, node_id=7)
        one = make_client(context, "odpfl-hn")
        assert (one.descriptor_epsilon, one.descriptor_delta) == terms


def test_runs_that_are_not_whole(tmp_path):
    """Each file that is wrong is named."""
    (tmp_path / "config.toml").write_text("lr = [")
    with pytest.raises(ValueError, match=r"config\.toml is damaged: "):
        run_configuration(tmp_path)
    (tmp_path / MODEL).write_bytes(b"none")
    with pytest.raises(ValueError, match=r"holds no summary\.json, which vouches .* --fresh$"):
        read_arrays(tmp_path)
    vouch(tmp_path)
    with pytest.raises(ValueError, match=rf"{MODEL} is damaged"):
        read_arrays(tmp_path)
    with pytest.raises(ValueError, match=r"holds no serving\.json; name the folder of a run that"):
        read_card(tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(ValueError, match="holds no run that could go on"):
        begun_jobs(tmp_path)


def test_figures_of_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"a\.gif must end in one of \.pdf"):
        plot.save(None, tmp_path / "a.gif")
    with pytest.raises(ValueError, match="no run has the numbers for this figure"):
        plot._panels([])


def test_another_methods_setting_is_a_dash_in_a_table():
    run = "fedprox mu=0.1", defaults() | {"method": "fedprox", "fedprox.mu": 0.1}
    assert _value(*run, "method", ["mu"]) == "fedprox"
    assert _value(*run, "mu", []) == "0.1"
    assert _value(*run, "rates", []) == "–"


def test_a_search_without_its_library_names_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("methods = 'fedavg'\n[search]\nlr = [0.1, 0.2]\n")
    monkeypatch.setitem(sys.modules, "optuna.distributions", None)
    said = fedapps("tune", tmp_path / "mine.toml", "--output", tmp_path / "study", code=2)
    assert "pip install 'fedapps[tune]'" in said


def test_data_are_told_with_their_files_and_columns(tmp_path):
    assert "official files: {train,t10k}-" in fedapps("data", "mnist", "--info")
    x = np.ones((6, 4), np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=[0, 1] * 3, writer=[5, 5, 7, 7, 9, 9])
    assert "column writer: 3 values" in fedapps("data", tmp_path / "own.npz")


def test_a_trial_counts_by_validation_alone(tmp_path):
    job = Job("fedavg", 0, defaults(), tmp_path)
    summary = {"finished": False, "train": {"accuracy": None}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert validation_score(job, "training") is None
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"finished": True}))
    with pytest.raises(ValueError, match="report no accuracy on validation samples to tune by"):
        validation_score(job, "training")


def test_inputs_that_do_not_fit_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"inputs have shape \(2, 3\); the run takes \(n, \*\(4,"):
        unlabeled(torch.ones(2, 3), CARD)
    with pytest.raises(ValueError, match=r"shape \(0, 4\); give at least one sample"):
        unlabeled(torch.ones(0, 4), CARD)
    np.save(tmp_path / "none.npy", np.zeros((0, 4)))
    with pytest.raises(ValueError, match=r"none.npy: .* shape \(0, 4\); give at least one sample"):
        read_input_files(tmp_path / "none.npy", CARD)
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 4)), y=np.zeros(0, int))
    assert "x has the shape (0, 4); give" in fedapps("data", tmp_path / "none.npz", code=2)
    with pytest.raises(ValueError, match=r"lab:data: .* shape \(0, 4\); give at least one sample"):
        as_inputs(np.zeros((0, 4)), "lab:data", False, [], AUTO)
    nowhere = Card("tent", "mine", "mlp", (4,), ("ant", "bee"), 16.0, None, None)
    with pytest.raises(ValueError, match="standardized inputs by constants that only its nodes"):
        unlabeled(torch.ones(2, 4), nowhere)
    folder = export(federation(SMALL), tmp_path)[0]
    with pytest.raises(ValueError, match=r"holds inputs of shape \(1, 8, 8\) and 10 classes"):
        read_input_files(folder, CARD)
    with pytest.raises(ValueError, match="must name its data: data-path"):
        node_inputs(SimpleNamespace(node_config={}), CARD)


def test_a_server_without_data_keeps_no_moments(tmp_path, monkeypatch):
    """What it standardises by only its nodes know."""

    def unreachable(*arguments):
        raise OSError("no network")

    monkeypatch.setattr("partitions.datasets.readers.hub.read_hub", unreachable)
    config = defaults() | {"dataset": "mnist", "data-dir": str(tmp_path / "none")}
    card = make_card(config | {"standardize": "training-clients"})
    assert (card.mean, card.std, len(card.classes)) == (None, None, 10)


def test_nobody_to_serve_is_no_error():
    """A node that is there but cannot start is named; an empty federation is asked again."""

    def nodes(error):
        def present():
            raise error

        return SimpleNamespace(present=present)

    assert serve_once(nodes(RuntimeError("no client could start")), None) == {}
    assert serve_once(nodes(NoClientStartsError("a")), None) == {-1: "waiting: a"}


class Zeros(nn.Module):
    def forward(self, x):
        return torch.zeros(len(x), 2)


def test_an_export_that_differs_is_not_left(tmp_path, monkeypatch):
    """One that gives logits of 1 where the model gives 0."""
    import onnxruntime

    class Session:
        def __init__(self, file, **options):
            file.write_bytes(b"")

        def run(self, names, inputs):
            return (np.ones((len(inputs["x"]), 2), np.float32),)

    monkeypatch.setattr(torch.onnx, "export", lambda *arguments, **named: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    model = Zeros()
    model.card = SimpleNamespace(inputs="pixels", method="fedavg", task="classes")
    with pytest.raises(ValueError, match="differs from the model by up to 1"):
        onnx.export(model, (4,), tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(onnx, "REQUIRED", ("no_such_library",))
    with pytest.raises(ValueError, match="--onnx needs no_such_library: pip install 'fedapps"):
        onnx.check_installed()


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("convnet-bn", ["batch-size=1"]),  # normalises over an image's positions as well
        ("convnet-atp", ["batch-size=10", "local-epochs=1"]),  # 449 = 44·10 + 9
        ("convnet-atp", ["batch-size=7", "local-steps=3", "short-batches=true"]),  # 449 = 64·7 + 1
        ("convnet-atp", ["batch-size=7"]),  # steps of 7 go on into the next pass
        ("convnet-atp", ["batch-size=9999", "local-epochs=1"]),
    ],
)
def test_a_batch_size_that_leaves_no_sample_alone_is_taken(model, more, tmp_path):
    options = ["partition=iid", "num-clients=4", "partition.validation-fraction=0"]
    words = ["--methods", "fedavg", *options, f"model={model}", *more, "--output", tmp_path / "out"]
    assert "federation: " in fedapps("run", "--dry-run", *words)


def test_a_sample_that_stays_alone_at_the_end_of_a_pass_is_refused():
    """Clients hold 449 or 450 digits: 449 = 64·7 + 1, 64 mini-batches of 7 and one of 1."""
    options = ["partition=iid", "num-clients=4", "partition.validation-fraction=0"]
    words = ["--methods", "fedavg", *options, "model=convnet-atp", "--dry-run"]
    for more in (["local-epochs=1"], ["short-batches=true", "local-steps=65"]):
        got = fedapps("run", *words, "batch-size=7", *more, code=2)
        assert "batch-size is 7; of a client's 449 samples" in got
        assert "set batch-size to 9" in got  # 449 = 56·8 + 1 = 49·9 + 8


def test_a_run_that_trains_nobody_takes_any_batch_size(tmp_path):
    config = SMALL | {"model": "convnet-atp", "batch-size": 1, "from-dir": str(tmp_path)}
    check(config | {"rounds": 0})
    with pytest.raises(ValueError, match="set batch-size to 2"):
        check(config)
