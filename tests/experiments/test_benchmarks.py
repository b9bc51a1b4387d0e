"""Every benchmark at its smallest, on a miniature of MNIST: pytest -n0 -m slow tests/experiments.

What runs in this process is measured by a clock that does not tell seconds, but the samples whose
loss was taken and the messages that were delivered: a ratio is then known beforehand, however busy
the machine is."""

import json
import logging
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from torch.nn import functional as F

from clients.base import Client
from clients.fedtta import FedTTAClient
from experiments import (
    bench_clients,
    bench_cohort,
    bench_data,
    bench_fedembed,
    bench_fedtta,
    bench_odpfl,
    bench_peers,
    bench_pfedhn,
    benchmark,
    figures_fedembed,
    method_pages,
    peers,
)
from fedapps.engines.grid import InProcessGrid
from fedapps.methods import METHODS

from typer.testing import CliRunner  # isort: skip

pytestmark = pytest.mark.slow
TINY = {"num-clients": 10, "local-steps": 3, "batch-size": 7}


@pytest.fixture(autouse=True, scope="module")
def mnist(tmp_path_factory):
    """2400 images of noise in MNIST's four files, where every process of the test looks."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "mnist").mkdir()
    for split, count in (("train", 2000), ("t10k", 400)):
        x = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", x), ("labels-idx1", np.arange(count) % 10)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            file = root / "mnist" / f"{split}-{kind}-ubyte"
            file.write_bytes(header + array.astype(np.uint8).tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPPS_DATA_DIR", str(root))
        patch.setenv("FEDAPPS_CACHE_DIR", str(root / "cache"))
        yield


@pytest.fixture
def work(monkeypatch):
    """The clock of benchmarks in process: samples and messages."""
    done, cross_entropy, deliver = [0], F.cross_entropy, InProcessGrid._deliver

    def loss(logits, y, *arguments, **named):
        done[0] += len(y)
        return cross_entropy(logits, y, *arguments, **named)

    def delivered(grid, message):
        done[0] += 1
        return deliver(grid, message)

    monkeypatch.setattr(F, "cross_entropy", loss)
    monkeypatch.setattr(InProcessGrid, "_deliver", delivered)
    for module in (benchmark, bench_odpfl, bench_pfedhn):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: done[0]))


def small(monkeypatch, module, **sizes):
    for name, value in sizes.items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)


def shrunk(monkeypatch, module):
    """Ten clients, five of whom train three steps of seven samples."""
    protocol = module.protocol
    monkeypatch.setattr(module, "protocol", lambda *arguments: protocol(*arguments) | TINY)


def spied(monkeypatch, module, name):
    """What the function of the module gives in the course of the test, call by call."""
    found, measure = [], getattr(module, name)

    def kept(*arguments):
        found.append(measure(*arguments))
        return found[-1]

    monkeypatch.setattr(module, name, kept)
    return found


def test_fedavg_does_the_steps_of_the_hand_written_loop(work, monkeypatch):
    """Of either's round 5 clients take the loss of 3 · 7 samples; ours sends each a message."""
    shrunk(monkeypatch, benchmark)
    small(monkeypatch, benchmark, ROUNDS=2, REPEATS=1)
    row = ("FedAvg in process / hand-written loop", 110 / 105, "1.05", "110.00 / 105.00 a round")
    assert benchmark.in_process() == [row]


def test_pfedhn_does_the_steps_of_its_hand_written_loop(work, monkeypatch):
    """Of either's round one client takes the loss of 2 · 64 samples; ours sends it a message."""
    small(monkeypatch, bench_pfedhn, STEPS=2, ROUNDS=2, REPEATS=1)
    row = ("pFedHN, 2 steps of LeNet / hand-written loop", 129 / 128, "1.15")
    assert bench_pfedhn.rows() == [(*row, "129.00 / 128.00 a round")]


def test_odpfl_hn_takes_losses_in_training_alone(work, monkeypatch):
    """As many as FedAvg, of which the one client asked takes 3 · 7 and a message; a message more
    for its descriptor, and one for the gradient; none on the server."""
    shrunk(monkeypatch, bench_odpfl)
    small(monkeypatch, bench_odpfl, ROUNDS=1, REPEATS=1)
    parts = {"round": 24, "encode": 1, "train": 22, "backprop": 1, "server": 0}
    assert bench_odpfl.rows() == [
        (f"ODPFL-HN {part} / FedAvg round", took / 22, "", f"{took}.00 / 22.00")
        for part, took in parts.items()
    ]


def test_a_step_of_fedtta_is_measured_over_one_of_sgd(monkeypatch):
    """Multiplications of a sample in the network of 784, 200, 200 and 10 units, M = 198 800, of
    which I = 156 800 stand before the first layer, whose inputs need no gradient.

    SGD: M forward, M for the weights' gradients and M − I for the activations', 3M − I. FedTTA:
    that for the inner gradient and that for the adapted weights, and the way back through the
    inner gradient, 6M − 4I: M and M − I through its weights' gradients, twice M − I through its
    activations', M and M − I from there through the forward pass. The adaptation network adds a
    hundredth."""
    times = {}
    measure = bench_fedtta._seconds

    def kept(client):
        times.setdefault(type(client), []).append(measure(client))
        return times[type(client)][-1]

    monkeypatch.setattr(bench_fedtta, "_seconds", kept)
    small(monkeypatch, bench_fedtta, STEPS=2, REPEATS=3)
    step, operations = bench_fedtta.rows()
    fedtta, sgd = (min(times[one][1:]) / 2 for one in (FedTTAClient, Client))
    assert step[:3] == ("FedTTA step / SGD step of the same network", fedtta / sgd, "3.5")
    many, first = 198_800, 156_800
    assert operations[1] == pytest.approx((12 * many - 6 * first) / (3 * many - first), rel=0.02)
    assert operations[3].endswith(" / 56 million")  # 2 · 64 · (3M − I)


def test_a_cohort_is_measured_over_clients_in_turn(monkeypatch):
    shrunk(monkeypatch, bench_cohort)
    small(monkeypatch, bench_cohort, ROUNDS=2, REPEATS=1)
    found = spied(monkeypatch, bench_cohort, "measured")
    table = bench_cohort.rows(("mlp",), cohort=5)
    cohort, in_turn = found
    assert [(what, bar) for what, _, bar, _ in table] == [
        ("mlp: round of a cohort / in turn", ""),
        ("mlp: clients' turn of a cohort / in turn", "0.10"),
    ]
    assert [ratio for _, ratio, _, _ in table] == [cohort[i] / in_turn[i] for i in (0, 1)]
    assert all(0 < turn < whole for whole, turn in found)


def test_a_round_of_many_registered_is_measured_over_one_of_few(monkeypatch, tmp_path):
    small(monkeypatch, bench_clients, REGISTERED=(4, 12), SAMPLED=2, ROUNDS=3)
    found = spied(monkeypatch, bench_clients, "measured")
    table = bench_clients.rows(("scaffold",), tmp_path / "drawn" / "figure.png")
    (few, _), (many, memory) = found
    assert [row[:3] for row in table] == [
        ("scaffold round, 12 registered / 4", many / few, "1.20"),
        ("scaffold memory, 12 registered", memory / 2500, "1.00"),
    ]
    assert f"exponent {np.log(many / few) / np.log(3):.2f}" in table[0][3]
    assert (tmp_path / "drawn" / "figure.png").stat().st_size > 1000


def test_a_round_of_many_registered_is_measured_on_actors_and_its_processes_weighed(monkeypatch):
    small(monkeypatch, bench_clients, REGISTERED=(4, 12), SAMPLED=2, ROUNDS=3)
    found = spied(monkeypatch, bench_clients, "measured_on_actors")
    table = bench_clients.on_actors(("fedavg",))
    (few, *_), (many, server, actor) = found
    assert [row[:3] for row in table] == [
        ("fedavg on ray, 12 registered / 4", many / few, "1.20"),
        ("fedavg, server's memory", server / 1500, "1.00"),
        ("fedavg, an actor's memory", actor / 1000, "1.00"),
    ]
    assert 200 < server < 1500 and 200 < actor < 1500  # torch alone takes 250


def test_an_error_in_a_process_of_its_own_is_told():
    with pytest.raises(ValueError, match=r"fraction-train is 25\.0"):
        bench_clients.measured("fedavg", 4)


def test_fedembed_s_users_are_measured_most_over_fewest(monkeypatch):
    small(monkeypatch, bench_fedembed, REGISTERED=(20, 60), SAMPLED=10, ROUNDS=3)
    found = spied(monkeypatch, bench_fedembed, "measured")
    table = bench_fedembed.rows()
    (_, few, small_), (first, many, large) = found
    assert [row[:2] for row in table] == [
        ("FedEmbed round, 60 users / 20", many / few),
        ("its first round, roster included / a later one, 60 users", first / many),
        ("peak memory, 60 / 20", large / small_),
    ]


def test_a_start_is_measured_over_torch_s(monkeypatch):
    small(monkeypatch, bench_data, REPEATS=1)
    found = spied(monkeypatch, bench_data, "first_batch")
    table = bench_data.start()
    (first, peak), (later, memory), (torch, nothing) = found
    assert [ratio for _, ratio, _, _ in table] == [first / torch, later / torch, peak / memory]
    assert nothing == 0
    assert min(later, peak) > torch > 0


def test_memory_of_processes_is_measured_over_that_without_data(monkeypatch):
    small(monkeypatch, bench_data, ACTORS=2, IMAGES=6000)
    found = spied(monkeypatch, bench_data, "_told")
    ((what, ratio, bar, _),) = bench_data.memory()
    _, _, empty, whole = found
    assert what == "memory of 2 processes, CIFAR-100, 100 clients / without data"
    assert (ratio, bar) == (whole / empty, f"{1500 / empty:.2f}")


def test_ray_is_measured_over_two_loops_side_by_side(monkeypatch):
    small(monkeypatch, benchmark, ROUNDS=1, REPEATS=1)
    ours = spied(monkeypatch, benchmark, "_on")
    loops = spied(monkeypatch, benchmark, "side_by_side")
    ((what, ratio, bar, _),) = benchmark.ray()
    assert what == "FedAvg on ray, two clients at once / two hand-written loops"
    assert (ratio, bar) == (ours[0] / loops[0], "1.15")


def test_a_start_of_ray_is_measured_over_flower_s(monkeypatch):
    small(monkeypatch, benchmark, REPEATS=1)
    found = spied(monkeypatch, benchmark, "seconds")
    ((_, ratio, bar, _),) = benchmark.start()
    assert (ratio, bar) == (found[0] / found[1], "0.50")


def test_the_table_names_what_was_asked_for(monkeypatch, capsys):
    small(monkeypatch, bench_fedtta, STEPS=1, REPEATS=2)
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.ERROR)
    benchmark.main(["fedtta"])
    told = capsys.readouterr().out
    assert "FedTTA step / SGD step" in told
    assert "≤ 3.5" in told
    assert "pFedHN" not in told
    with pytest.raises(SystemExit, match="unknown fedta; known: in-process, ray"):
        benchmark.main(["fedta"])


def test_simulators_are_measured_over_the_loop(monkeypatch):
    """Each in a process of its own, on every work, without the first round."""
    ours = ("hand-written loop", "fedapps, in process")
    small(monkeypatch, bench_peers, CONTESTANTS={name: peers.CONTESTANTS[name] for name in ours})
    found = spied(monkeypatch, bench_peers, "measured")
    table = bench_peers.rows(repeats=1)
    loop, in_process = found
    assert [what for what, _, _, _ in table] == [
        f"{model}, batches of {batch}: {name}" for model, batch in peers.WORKS for name in ours
    ]
    expected = [ratio for pair in in_process / loop for ratio in (1, pair)]
    assert [ratio for _, ratio, _, _ in table] == expected
    with pytest.raises(RuntimeError, match="nobody"):
        bench_peers.measured("nobody")


@pytest.mark.parametrize("name", ["Flower", "fluke", "FedLab", "pfl-research"])
def test_a_peer_tells_the_seconds_of_every_round(monkeypatch, capsys, name):
    """Of one that is there: uv run --with fluke-fl==0.8.1 pytest …, as bench_peers names them."""
    if name != "Flower":
        pytest.importorskip({"fluke": "fluke", "FedLab": "fedlab", "pfl-research": "pfl"}[name])
    small(monkeypatch, peers, CLIENTS=4, SAMPLED=2, ROUNDS={"mlp": 2}, WORKS=(("mlp", 64),))
    peers.main(name)
    (seconds,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_voices_and_embeddings_are_drawn(tmp_path):
    keys = ["num-clients=10", "rounds=1", "train-fraction=1.0"]
    keys += ["fedembed.embedding-dim=8", "fedembed.local-epochs=1"]
    for name, arguments in (("voices", []), ("embeddings", keys)):
        out = tmp_path / f"{name}.png"
        done = CliRunner().invoke(figures_fedembed.cli, [name, str(out), *arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        assert out.stat().st_size > 1000
    assert "with type head, " in done.output
    assert "without type head, " in done.output


def test_the_methods_pages_are_those_that_are_kept(monkeypatch, tmp_path):
    """As `python -m experiments.method_pages` writes them."""
    kept = method_pages.FOLDER
    small(monkeypatch, method_pages, FOLDER=tmp_path)
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.ERROR)
    method_pages.main()
    written = {file.name: file.read_text("utf-8") for file in tmp_path.iterdir()}
    assert written.keys() == {"README.md", *(f"{method}.md" for method in METHODS)}
    assert written == {name: (kept / name).read_text("utf-8") for name in written}
