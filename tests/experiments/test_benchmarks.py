"""Every benchmark at its smallest, on a miniature of MNIST: pytest -n0 -m slow tests/experiments.

In-process measurements use a clock that counts samples whose loss was computed and delivered
messages, so the expected ratio does not depend on the machine."""

import json
import re
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from torch.nn import functional as F

from experiments.benchmarks import (
    __main__,
    auto,
    cohort,
    corrections,
    data,
    engines,
    measure,
    methods,
    registered,
    replies,
    simulators,
    turn,
)
from experiments.benchmarks.measure import Row
from fedapps.engines.in_process_grid import InProcessGrid

pytestmark = pytest.mark.slow
TINY = {"num-clients": 10, "local-steps": 3, "batch-size": 7}  # 5 clients, 3 · 7 samples each


@pytest.fixture(autouse=True, scope="module")
def mnist(tmp_path_factory):
    """2400 images of noise in MNIST's four files, for every process of the tests."""
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
    """Replaces the clock by one that counts samples and messages."""
    count, cross_entropy, deliver = [0], F.cross_entropy, InProcessGrid._deliver

    def loss(logits, y, *arguments, **named):
        count[0] += len(y)
        return cross_entropy(logits, y, *arguments, **named)

    def delivered(grid, message):
        count[0] += 1
        return deliver(grid, message)

    monkeypatch.setattr(F, "cross_entropy", loss)
    monkeypatch.setattr(InProcessGrid, "_deliver", delivered)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: count[0]))


@pytest.fixture
def small(monkeypatch):
    """Changes a module's constants; by `protocol=…`, the settings of its runs."""

    def shrink(module, **changes):
        for name, value in changes.items():
            old = getattr(module, name)
            new = (lambda *a, f=old, v=value: f(*a) | v) if callable(old) else value
            monkeypatch.setattr(module, name, new)

    return shrink


def test_fedavg_does_the_steps_of_the_hand_written_loop(work, small):
    """In a round of either, 5 clients compute the loss of 3 · 7 samples; the grid adds a message
    for each client."""
    small(engines, ROUNDS=2, REPEATS=1, protocol=TINY)
    what = "FedAvg in process / hand-written loop"
    assert engines.in_process() == [(what, 110 / 105, "1.05", "110.00 / 105.00 a round")]


@pytest.mark.parametrize("method", turn.METHODS)
def test_turns_and_their_loop_agree(method, small, monkeypatch):
    """25 clients a turn of two steps each; a loop at another learning rate is refused."""
    small(turn, ROUNDS={2: 2}, LIMITS={2: "1.5"}, REPEATS=1)
    assert turn.in_process("digits", method, 2).what == f"{method} in process, digits, 2 steps"
    real, config = turn.loop, turn.protocol("digits", method, 2)
    key = f"{method}.lr" if f"{method}.lr" in config else "lr"
    faster = {key: 1.1 * float(config[key])}
    monkeypatch.setattr(turn, "loop", lambda config, n: real(config | faster, n))
    with pytest.raises(RuntimeError, match="differ by"):
        turn.in_process("digits", method, 2)


def test_pfedhn_does_the_steps_of_its_hand_written_loop(work, small):
    """In a round of either, one client computes the loss of 2 · 64 samples; the grid adds a
    message."""
    small(methods, PFEDHN_STEPS=2, ROUNDS=2, REPEATS=1)
    what = "pFedHN, 2 steps of LeNet / hand-written loop"
    assert methods.pfedhn() == [(what, 129 / 128, "1.15", "129.00 / 128.00 a round")]


def test_odpfl_hn_computes_losses_only_in_training(work, small):
    """A FedAvg round is 3 · 7 samples and a message. ODPFL-HN adds a message for the descriptor and
    one for the gradient, and no loss on the server."""
    small(methods, ROUNDS=1, REPEATS=1, odpfl_hn_protocol=TINY)
    parts = {"round": 24, "encode": 1, "train": 22, "backprop": 1, "server": 0}
    assert methods.odpfl_hn() == [
        (f"ODPFL-HN {part} / FedAvg round", count / 22, "", f"{count}.00 / 22.00")
        for part, count in parts.items()
    ]


def test_autos_exchanges_are_compared_with_training_and_a_decision_with_its_passes(small):
    small(auto, REPEATS=2, INPUTS=30, protocol=TINY | {"model": "convnet-bn"})
    exchanges, decision = auto.rows(10)
    assert exchanges.limit == "0.2" and exchanges.ratio > 0
    assert decision.what == "auto, decision for 30 inputs / forward passes"
    assert decision.ratio > 1


def test_six_corrections_are_compared_with_fedavg_alone(small):
    """Six methods evaluate six times as often, so they take longer than one."""
    small(corrections, REPEATS=1)
    rows = corrections.rows(["dataset=digits", "num-clients=20", "rounds=2", "auto.alpha=0.1"])
    assert [row.limit for row in rows] == ["1.35", "1.35"]
    assert all(row.ratio > 1 for row in rows)


def test_a_step_of_fedtta_is_compared_with_one_of_sgd(small):
    """Multiplications of a sample in the network of 784, 200, 200 and 10 units, M = 198 800, of
    which I = 156 800 belong to the first layer, whose inputs need no gradient.

    SGD: M forward, M for the weights' gradients and M − I for the activations', 3M − I. FedTTA:
    that for the inner gradient and that for the adapted weights, and the way back through the
    inner gradient, 6M − 4I: M and M − I through its weights' gradients, twice M − I through its
    activations', M and M − I from there through the forward pass. The adaptation network adds a
    hundredth."""
    small(methods, FEDTTA_STEPS=2, FEDTTA_REPEATS=3)
    step, operations = methods.fedtta()
    check([step])
    many, first = 198_800, 156_800
    assert operations.ratio == pytest.approx((12 * many - 6 * first) / (3 * many - first), rel=0.02)
    assert operations.values.endswith(" / 56 million")  # 2 · 64 · (3M − I)


FEW = {"REGISTERED": (4, 12), "SAMPLED": 2, "ROUNDS": 3, "METHODS": ("scaffold",)}
NAMES = ("hand-written loop", "fedapps, in process")
SIZES = {  # by measurement: its module, and how its constants are changed
    "ray": (engines, {"ROUNDS": 1, "REPEATS": 1}),
    "start": (engines, {"REPEATS": 1}),
    "fedembed": (registered, {"USERS": (20, 60), "SAMPLED": 10, "ROUNDS": 3}),
    "data": (data, {"REPEATS": 1, "ACTORS": 2, "IMAGES": 6000}),
    "clients": (registered, FEW),
    "clients-ray": (registered, FEW),
    "cohort": (cohort, {"ROUNDS": 2, "REPEATS": 1, "LIMITS": {"mlp": "0.10"}, "protocol": TINY}),
    "peers": (simulators, {"REPEATS": 1, "SIMULATORS": dict.fromkeys(NAMES)}),
}


@pytest.mark.parametrize("name", SIZES)
def test_ratios_are_those_of_the_values(small, monkeypatch, tmp_path, name):
    monkeypatch.setattr(registered, "FIGURE", tmp_path / "drawn" / "figure.png")
    module, sizes = SIZES[name]
    small(module, **sizes)
    check(__main__.MEASUREMENTS[name]())
    assert name != "clients" or registered.FIGURE.stat().st_size > 1000


def check(rows):
    """A row's ratio is that of its two values, as far as these are rounded."""
    assert rows
    for row in rows:
        one, other = re.match(r"([\d.]+)(?: / | of )([\d.]+)", row.values).groups()
        half = 0.5 * 10.0 ** -len(one.partition(".")[2])
        assert abs(row.ratio * float(other) - float(one)) <= half * (1 + row.ratio), row
        assert "memory" not in row.what or float(one) > 200  # MB; torch alone takes 250


def test_an_error_in_a_process_of_its_own_is_raised():
    with pytest.raises(RuntimeError, match=r"fraction-train is 100\.0"):
        measure.in_new_process(registered.measure, registered.protocol("fedavg", 1))
    with pytest.raises(RuntimeError, match="nobody"):
        simulators.measure("nobody")


def test_the_table_has_the_named_measurements(monkeypatch, capsys):
    monkeypatch.setitem(__main__.MEASUREMENTS, "fedtta", lambda: [Row("step", 4.22, "3.5", "s")])
    __main__.main(["fedtta"])
    printed = capsys.readouterr().out
    assert "step" in printed and "4.22" in printed and "≤ 3.5" in printed
    assert "pFedHN" not in printed
    with pytest.raises(SystemExit, match="unknown fedta; known: in-process, ray"):
        __main__.main(["fedta"])


@pytest.mark.parametrize(
    ("name", "module"),
    [("Flower", "flwr"), ("fluke", "fluke"), ("FedLab", "fedlab"), ("pfl-research", "pfl")],
)
def test_a_simulator_reports_the_seconds_of_every_round(small, capsys, name, module):
    """Of those that are installed: uv run --with fluke-fl==0.8.1 pytest …"""
    pytest.importorskip(module)
    small(simulators, CLIENTS=4, SAMPLED=2, ROUNDS={"mlp": 2}, WORKS=(("mlp", 64),))
    simulators.main(name)
    (seconds,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_replies_are_summed_and_averaged_as_a_round_does_it():
    """Of two clients with weights 1 and 3: the sum, and (a + 3b)/4; an infinite one is refused."""
    a, b = replies.made(2, {"w": (2, 3), "v": (4,)})
    assert a["w"].dtype == np.float32 and not np.array_equal(a["w"], b["w"])
    np.testing.assert_allclose(replies.added([a, b])["v"], a["v"] + b["v"], rtol=1e-6)
    start = {name: np.zeros_like(array) for name, array in a.items()}
    took, mean = replies.round_of(replies.Stored([a, b], [1, 3]), start)
    assert took > 0
    np.testing.assert_allclose(mean["w"], (a["w"] + 3 * b["w"]) / 4, rtol=1e-5)
    infinite = {"w": b["w"] * np.float32("inf"), "v": b["v"]}
    _, mean = replies.round_of(replies.Stored([a, infinite], [1, 3]), start)
    np.testing.assert_array_equal(mean["w"], a["w"])
    found = replies.rows(3)
    assert [row.what.split(" of ")[0] for row in found] == ["mean", "round"]
    assert all(row.ratio > 0 for row in found)
