"""A method written by docs/how-to/own-method.md alone; where its errors and numbers are shown."""

import json
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import custom_methods
import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from small_runs import SMALL, Watched, federate, invoke, share, update

from clients.core.client import Client
from fedapps.callbacks import Callback
from fedapps.clientapp import app, host
from fedapps.commands.run import say_failures
from fedapps.common import external_code
from fedapps.common.errors import MAX_LINE, MAX_LINES, bounded, brief, described
from fedapps.console import make_console
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.jobs import Job
from fedapps.methods import Method
from fedapps.own_app import client_app
from fedapps.results.runs import read_runs
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.methods.fedavg import FedAvg

CODE = Path(custom_methods.__file__).read_text("utf-8").splitlines()
WORDS = {"LOSS": "in loss of", "PREDICT": "in predict of {", "AGGREGATE": "h is {"}
TINY = ("run", "num-clients=4", "rounds=1", "local-steps=1")


def place(words):
    """The place in custom_methods.py where these words are raised, as a traceback shows it."""
    (number,) = (i for i, line in enumerate(CODE, 1) if words in line and "raise" in line)
    return f'File "{custom_methods.__file__}", line {number}, in '


def fails(engine, output):
    """A run of each failing method: the terminal shows file and line, each cause is written once,
    and the error names the place."""
    methods = ",".join(f"custom_methods:{name}" for name in WORDS)
    printed = invoke(
        *TINY, "--methods", methods, "--engine", engine, "--jobs", 1, "--output", output, code=1
    ).output
    for name, words in WORDS.items():
        folder, where = output / f"custom_methods:{name}-seed0", place(words)
        assert where in printed
        written = (folder / "errors.log").read_text()
        assert written.count(where) == 1, written
        error = json.loads((folder / "summary.json").read_text())["error"]
        assert re.search(r"\(([^(]*):\d+\)$", error)[1] == custom_methods.__file__
    assert "ArithmeticError: in loss of 2" in printed or "ArithmeticError: in loss of 3" in printed


def test_an_error_is_shown_with_file_and_line(tmp_path):
    fails("in-process", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_other_engines_show_the_same(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(custom_methods.__file__).parent))
    fails(engine, tmp_path)


@pytest.mark.parametrize(
    ("name", "error"),
    [("LOSS", ArithmeticError), ("PREDICT", KeyError), ("AGGREGATE", ZeroDivisionError)],
)
def test_debug_raises_the_error_itself(name, error, tmp_path):
    options = ["--methods", f"custom_methods:{name}", "--output", tmp_path]
    done = invoke(*TINY, *options, "--debug", code=1)
    assert type(done.exception) is error
    refused = invoke("run", *options, "--debug", "--engine", "ray", code=2)
    assert "takes no other engine" in refused.output


def go(method, folder, grid=InProcessGrid, cohort=1, **changes):
    external_code.allow(method)
    config = SMALL | {"method": method, "output-dir": str(folder)} | changes
    grid = grid.simulation(app, config, int(config["num-clients"]), cohort)
    return run(grid, config, "in-process"), grid


def test_an_evaluation_in_which_all_novel_clients_fail_ends_the_run(tmp_path):
    with pytest.raises(RuntimeError, match=r"round 1: no novel client .* LookupError: in predict"):
        go("custom_methods:NOVEL", tmp_path)


def test_a_failing_client_is_skipped_or_stops_the_run(tmp_path):
    """Of clients 2, 3 and 5, which train, one fails in every way."""

    class OneFails(InProcessGrid):
        def _deliver(self, message):
            reply = super()._deliver(message)
            if message.metadata.dst_node_id == 3 and message.metadata.message_type == "evaluate":
                return Message(Error(2, 'File "x.py", line 7\nOSError: gone'), reply_to=message)
            return reply

    go("custom_methods:FEDDYN", tmp_path / "a", OneFails)
    assert (tmp_path / "a" / "errors.log").read_text().count("OSError: gone") == 1
    with pytest.raises(RuntimeError, match=r"a client failed \(.*client 2.*gone \(x.py:7\)"):
        go("custom_methods:FEDDYN", tmp_path / "b", OneFails, **{"on-client-failure": "stop"})


def test_a_refused_reply_is_shown_beside_what_is_expected(tmp_path):
    with pytest.raises(RuntimeError, match="0 valid replies of 3"):
        go("custom_methods:RENAMES", tmp_path)
    written = (tmp_path / "errors.log").read_text()
    assert "lacks head.bias (10,), layers.0.bias (200,)" in written
    assert "it has head.bais (10,), layers.0.bais (200,)" in written


@pytest.mark.parametrize("dp", ["local", "central"])
def test_under_privacy_a_reply_has_type_file_and_line_alone(dp, tmp_path):
    """Neither the message, which has a label in it, nor a line of code."""
    private = {"dp": dp, "dp-noise-multiplier": 1.0, "dp-generator": "seeded"}
    with pytest.raises(RuntimeError, match="ArithmeticError") as error:
        go("custom_methods:LOSS", tmp_path, Seen, **private)
    reasons = {reply.error.reason for reply in SEEN if reply.has_error()}
    (reason,) = reasons
    where = re.search(r"line (\d+)", place(WORDS["LOSS"]))[0]
    line = "its text is withheld under differential privacy, a run without it shows the text"
    assert reason == (
        f'  File "support/custom_methods.py", {where}, in loss\nArithmeticError: {line}'
    )
    for text in (str(error.value), (tmp_path / "errors.log").read_text()):
        assert "sample" not in text and "raise" not in text and "custom_methods.py" in text
        assert ("client 2" in text) == (dp == "local")


def test_under_privacy_the_files_have_no_message_of_the_server(tmp_path):
    private = {"dp": "central", "dp-noise-multiplier": 1.0, "dp-generator": "seeded"}
    with pytest.raises(ZeroDivisionError):
        go("custom_methods:AGGREGATE", tmp_path, **private)
    for file in ("errors.log", "summary.json"):
        text = (tmp_path / file).read_text()
        assert "ZeroDivisionError" in text and "custom_methods.py" in text and "h is" not in text


SEEN = []


class Seen(Watched):
    """Its messages and replies are in SEEN."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        SEEN[:] = []
        self.seen = SEEN


def test_a_real_node_answers_an_error_with_its_place_and_logs_it(caplog):
    """A node that is one client, of this package or of an app of its own."""

    def no_data(context):
        raise FileNotFoundError("no data here")

    mine = client_app("fedavg", model=lambda: torch.nn.Linear(2, 2), data=no_data)
    for component, node in ((mine, {}), (host, {"data-path": "/nowhere"})):
        message = Message(RecordDict(), 1, "train")
        message.metadata.__dict__["_message_id"] = "1"
        config = defaults() | {"method": "fedavg"}
        reply = component(message, Context(1, 1, node, RecordDict(), config))
        assert re.search(r'File ".*py", line \d+', reply.error.reason), reply.error.reason
    assert "no data here" in caplog.text and "/nowhere" in caplog.text


def test_a_text_from_a_client_is_bounded_and_printable():
    """A screen of control characters, without an end."""
    text = bounded("\x1b[2Jaway\n" * 1000 + "z" * 10_000 + "\x07")
    assert text.isascii() and "\x1b" not in text and "\x07" not in text
    lines = text.splitlines()
    assert len(lines) == MAX_LINES and lines[0] == "\\x1b[2Jaway" and len(lines[-1]) == MAX_LINE
    assert brief("") == ""


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_frames_of_torch_are_left_out():
    with pytest.raises(RuntimeError) as error:
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))
    text = described(error.value)
    assert Path(__file__).name in text and "torch/nn" not in text
    assert described(Odd()) == "Odd"


# Its numbers and its name


def test_feddyn_by_hand():
    """α = 0.5, θ^{t−1} = 1, two of three training clients reply with 2 and 4, h = 3:
    h = 3 − 0.5·(2/3)·(3 − 1) = 7/3, θ = 3 − h/0.5 = −5/3."""
    server = custom_methods.FedDynServer(alpha=0.5)
    server.nodes = [
        SimpleNamespace(novel=novel, unlabeled=False) for novel in (False, False, True, False)
    ]
    arrays = {"w": np.ones(1, np.float32)}
    server.initialize(arrays)
    server.h = {"w": np.full(1, 3, np.float32)}
    replies = [update(i, {"w": np.full(1, w, np.float32)}) for i, w in enumerate((2, 4))]
    assert server.aggregate(arrays, replies)["w"] == pytest.approx(-5 / 3)
    assert server.h["w"] == pytest.approx(7 / 3)


def test_feddyns_client_by_hand():
    """L = (w − 2)²/2, from w = 1 with g = 0.25, α = 0.5, one step of 0.1: the gradient is
    −1 − 0.25 + 0, so w = 1.125; g = 0.25 − 0.5·0.125 = 0.1875."""
    model = torch.nn.Linear(1, 1, bias=False)
    client = custom_methods.FedDynClient(
        model, share(torch.ones(1, 1), torch.tensor([2.0])), alpha=0.5, lr=0.1, local_steps=1
    )
    client.criterion = lambda z, y: (z[:, 0] - y).square().mean() / 2
    client.state = {"gradient/weight": np.full((1, 1), 0.25, np.float32)}
    theta, *_ = client.train({"weight": np.ones((1, 1), np.float32)}, {})
    assert theta["weight"] == pytest.approx(1.125)
    assert client.state["gradient/weight"] == pytest.approx(0.1875)


@pytest.mark.filterwarnings("error:.*has no effect")
def test_a_cohort_gives_feddyns_numbers_or_is_refused(tmp_path):
    """What the loss of SILENT reads is equal in round 1 alone."""
    alone, _ = go("custom_methods:FEDDYN", tmp_path / "alone")
    together, _ = go("custom_methods:FEDDYN", tmp_path / "together", cohort=3)
    for name, array in alone.arrays.items():
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(together.arrays[name].numpy(), array.numpy(), **close)
    with pytest.raises(ValueError, match=r"Silent.loss reads self.gradient.*stacked-clients=1"):
        go("custom_methods:SILENT", tmp_path / "silent", cohort=3)
    assert len((tmp_path / "silent" / "metrics.jsonl").read_text().splitlines()) == 1


def test_its_numbers_reach_the_file_and_the_callbacks(tmp_path, monkeypatch):
    """Clients 2, 3 and 5 train: the means are 10 + 10/3, and 5/3 at their evaluation."""
    heard = []
    monkeypatch.setattr(custom_methods, "Ear", type("Ear", (Callback,), {
        "round_ends": lambda self, report, strategy: heard.append(report["metrics"]),
    }), raising=False)  # fmt: skip
    external_code.allow("custom_methods:Ear")
    go("custom_methods:FEDDYN", tmp_path, callbacks="custom_methods:Ear", rounds=1)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["metrics"] == heard[0] == {"own-number": pytest.approx(10 + 10 / 3)}
    assert line["evaluation"]["train-own-score"] == pytest.approx(5 / 3)
    assert line["evaluation"]["novel-own-score"] == pytest.approx(5 / 6)


def test_its_name_stands_in_tables_unless_two_methods_have_it(tmp_path):
    """Saved runs show it, and nothing is imported for that."""
    methods = "custom_methods:FEDDYN,custom_methods:FEDDYN lr=0.1,fedavg"
    engine = ("--engine", "in-process", "--jobs", 1, "--output", tmp_path)
    printed = invoke(*TINY, "--methods", methods, *engine).output
    assert "│ FedDyn lr=0.1 │" in printed and "│ custom_methods:" not in printed
    assert set(read_runs(tmp_path)[0].method) == {"FedDyn", "FedDyn lr=0.1", "fedavg"}
    invoke(*TINY, "--methods", "custom_methods:SAME_NAME,custom_methods:SHIPPED_NAME", *engine)
    left = set(read_runs(tmp_path)[0].method)
    assert left == {
        "custom_methods:FEDDYN",
        "custom_methods:FEDDYN lr=0.1",
        "custom_methods:SAME_NAME",
        "custom_methods:SHIPPED_NAME",
        "fedavg",
    }


def test_a_name_is_one_word(monkeypatch):
    method = Method(FedAvg, Client, *custom_methods.PAPER, name="a b")
    monkeypatch.setattr(custom_methods, "BAD", method, raising=False)
    external_code.allow("custom_methods:BAD")
    with pytest.raises(ValueError, match="'a b'; it must be one word"):
        federate(method="custom_methods:BAD")


def test_the_pages_short_method_learns(tmp_path):
    """SmoothClient of docs/how-to/own-method.md; label smoothing changes what FedAvg gives."""
    from documented_code import written

    with written(tmp_path):
        external_code.allow("my_lab.smooth:METHOD")
        smooth, _ = federate(method="my_lab.smooth:METHOD", rounds=1)
    plain, _ = federate(method="fedavg", rounds=1)
    losses = [r.train_metrics_clientapp[1]["loss"] for r in (smooth, plain)]
    assert losses[0] != losses[1] and defaults()["method"] == "fedavg"


def test_the_end_of_a_command_names_each_cause_once(tmp_path):
    """Two jobs fail alike: the second refers to the first, and a job with several causes to its
    file."""
    jobs = []
    causes_of = {
        "a": "client 1: error\nno memory\n",
        "b": "client 2: error\nno memory\n\nclient 3: error\nno disk\n",
    }
    for name, causes in causes_of.items():
        job = Job("fedavg", 0, {}, tmp_path / name)
        job.folder.mkdir()
        (job.folder / "errors.log").write_text(causes)
        jobs.append(job)
    file = StringIO()
    say_failures(make_console(file=file, width=200), jobs)
    assert file.getvalue().splitlines() == [
        "a, client 1: error", "  no memory", "b, client 2: error, as above",
        f"2 causes in {tmp_path / 'b' / 'errors.log'}",
    ]  # fmt: skip
