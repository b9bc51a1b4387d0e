"""A disk that is full for a while, or to the end: the run goes on, and no file is half written.

The disk is full by RLIMIT_FSIZE, in a process of the test's own: writes beyond so many bytes of any
file fail in the kernel, after they took what fits. Renaming and removing files still work."""

import json
import logging
import os
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from safetensors.numpy import load_file
from small_runs import COMMAND, SMALL, forked, left

from fedapps import files
from fedapps.clientapp import app
from fedapps.common.new_files import replaced
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.staging import stage
from fedapps.files import append_text, spill, write_files
from fedapps.node.bridge import STATE
from fedapps.results.checkpoint import newest_checkpoint
from fedapps.results.plot import save
from fedapps.serverapp import run
from partitions import federation
from partitions.cache import Assignment, cached, cached_assignment
from partitions.datasets.readers.raw import Raw
from partitions.inspect import export

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

CONFIG = SMALL | {"num-clients": 4, "train-fraction": 0.75, "rounds": 5, "local-steps": 1}
CONFIG |= {"method": "fedper", "checkpoint-every": 1}
ROOM = 700  # bytes: a line of metrics.jsonl, not two; no model, no summary


def limit(size):
    """Let files grow to `size` bytes; None: as far as they like."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def apart(function):
    """Call it in a process of its own; what it raises fails the test."""

    def called():
        sys.dont_write_bytecode = True  # a module's compiled file would be half written, and stay
        try:
            function()
        finally:
            limit(None)  # what it raises is printed

    assert os.waitpid(forked(called), 0)[1] == 0


def test_a_copy_of_the_app_that_does_not_fit_is_one_sentence(tmp_path):
    """Not a list of every file: the schema of settings is larger than the limit."""

    def copied():
        limit(100_000)
        with pytest.raises(OSError, match=r"schema.json cannot be written: .*too large$"):
            stage(tmp_path / "app")

    apart(copied)


class Filling(InProcessGrid):
    """Its disk is full from the training of round `full` until that of round `free`."""

    full, free, number = 2, 4, 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if any(message.metadata.message_type == "train" for message in messages):
            self.number += 1
            if self.number == self.full:
                limit(ROOM)
            if self.number == self.free:
                self.look()
                limit(None)
        return super().send_and_receive(messages, timeout=timeout)

    def look(self):
        """What is there now, after the rounds on a full disk."""


def go(folder, grid=InProcessGrid, **changes):
    config = CONFIG | {"output-dir": str(folder)} | changes
    return run(grid.simulation(app, config, 4), config, "in-process")


class Heard(logging.Handler):
    """What the run says of its disk."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("flwr").addHandler(self)

    def emit(self, record):
        if "written" in record.getMessage():
            self.lines.append(record.getMessage())


def test_a_disk_that_is_full_for_two_rounds_costs_nothing(tmp_path):
    """Meanwhile the folder holds round 1, whole; then all is as if nothing had been."""
    go(tmp_path / "whole")

    class Watched(Filling):
        def look(self):
            folder = tmp_path / "full"
            summary = json.loads((folder / "summary.json").read_text())
            assert summary["rounds"] == 1
            assert load_file(folder / "model.safetensors")
            lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            assert [json.loads(line)["round"] for line in lines] == [1]
            assert lines[-1].endswith("\n")
            assert newest_checkpoint(folder, CONFIG)[0]["strategy"]["round"] == 1
            assert [file.name for file in folder.rglob(".*") if file.is_file()] == [files.LOCK]

    def full():
        heard = Heard()
        go(tmp_path / "full", Watched)
        said, again = heard.lines
        assert "metrics.jsonl is not written ([Errno 27] File too large: " in said
        assert "everything is written again" in again

    apart(full)
    assert left(tmp_path / "full") == left(tmp_path / "whole")


def test_a_disk_that_stays_full_ends_in_one_sentence_and_the_run_goes_on_later(tmp_path):
    """All rounds are trained; the folder holds round 1, from which it is resumed."""
    go(tmp_path / "whole")
    folder = tmp_path / "full"

    class Full(Filling):
        free = None

    def full():
        with pytest.raises(OSError, match="make room, then: fedapps run --resume") as error:
            go(folder, Full)
        assert "summary.json" in str(error.value)
        assert "\n" not in str(error.value)

    apart(full)
    assert "finished" not in json.loads((folder / "summary.json").read_text())
    assert not (folder / "clients").exists()
    assert newest_checkpoint(folder, CONFIG)[0]["strategy"]["round"] == 1
    go(folder, resume=True)
    assert left(folder) == left(tmp_path / "whole")


def test_what_the_next_round_spends_is_written_or_nobody_trains(tmp_path):
    """Else a run that is killed and resumed would tell too small an ε."""
    private = {"method": "fedavg", "dp": "central", "dp-noise-multiplier": 1.0, "rounds": 3}
    private |= {"dp-covers": "model-updates"}
    asked = []

    class Early(Filling):
        def get_node_ids(self):
            if self.number == 1:
                limit(0)
            return super().get_node_ids()

        def send_and_receive(self, messages, *, timeout=None):
            asked.append(self.number)
            return super().send_and_receive(messages, timeout=timeout)

    def full():
        with pytest.raises(OSError, match="privacy budget cannot be written"):
            go(tmp_path, Early, **private)
        assert max(asked) == 1

    apart(full)
    go(tmp_path, resume=True, **private)
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 3


def test_a_client_keeps_its_state_in_memory_while_its_disk_is_full(tmp_path):
    class Nodes(Filling):
        """With state-dirs; looks whether what they hold is what the clients have in mind."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            for node, context in self.contexts.items():
                context.node_config["state-dir"] = str(tmp_path / f"state-{node}")

        def look(self):
            assert len(self.stale()) == 3  # of the training clients

        def stale(self):
            found = []
            for node, context in self.contexts.items():
                if record := context.state.get(f"{STATE}fedper"):
                    (file,) = (tmp_path / f"state-{node}").iterdir()
                    kept = load_file(file)  # whole
                    if any((a.numpy() != kept[name]).any() for name, a in record.items()):
                        found.append(node)
            return found

    def full():
        config = CONFIG | {"rounds": 4}
        grid = Nodes.simulation(app, config, 4)
        result = run(grid, config, "in-process")
        for got in result.train_metrics_clientapp.values():
            assert got["valid-replies"] == 3
        assert grid.stale() == []

    apart(full)


def test_data_that_cannot_be_kept_are_used(tmp_path, monkeypatch, caplog):
    """The cache's copy of a dataset, and of the clients' rows; what is exported is an error."""
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    raw = Raw(np.arange(6.0).reshape(2, 3), np.array([1, 0]), 1)
    deal = Assignment.of([np.array([0]), np.array([1])], np.array([], int), False, [{}, {}])

    def full():
        limit(0)
        assert cached("here", lambda: raw) is raw
        assert "set FEDAPPS_CACHE_DIR" in caplog.text
        assert cached_assignment("here", {}, lambda: deal) is deal
        with pytest.raises(OSError, match="too large"):
            export(federation(CONFIG), tmp_path / "shares")

    apart(full)
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size] == []


def test_the_command_says_in_one_sentence_that_nothing_can_be_written(tmp_path):
    arguments = ["run", "num-clients=4", "rounds=1", "--methods", "local", "--engine", "in-process"]

    def full():
        limit(0)
        done = CliRunner().invoke(COMMAND, [*arguments, "--output", str(tmp_path)])
        limit(None)
        assert done.exit_code == 1, done.output
        assert isinstance(done.exception, SystemExit)
        assert "local-seed0 failed: OSError: [Errno 27] File too large" in done.output
        assert "no report: [Errno 27]" in done.output
        assert "Traceback" not in done.output

    apart(full)
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size] == []


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    """A write fails without a name, also of a temporary file. An error of another file keeps it."""
    whole = tmp_path / "whole"

    def full():
        limit(ROOM)
        with pytest.raises(OSError, match=f"too large: '{whole}'$"):
            write_files({whole: bytes(ROOM + 1)})
        with pytest.raises(OSError, match=f"too large: '{whole}'$"):
            append_text(whole, "x" * (ROOM + 1))
        with pytest.raises(OSError, match=f"too large: '{whole}'$"), replaced(whole) as file:
            file.write_bytes(bytes(ROOM + 1))
        other = tmp_path / "other"
        with pytest.raises(OSError, match=f"No such file .*: '{other}'$"), replaced(whole):
            other.read_bytes()

    apart(full)


@pytest.mark.parametrize("ending", ["pdf", "png", "svg"])
def test_a_figure_that_the_disk_does_not_take_is_one_sentence(ending, tmp_path):
    """In a file, matplotlib's PDF would raise zlib.error while it closes. A figure that is there
    stays."""
    output = tmp_path / f"figure.{ending}"
    output.write_text("former")

    def full():
        limit(ROOM)
        with pytest.raises(OSError, match=f"too large: '{output}'$"):
            save(Figure(), output)

    apart(full)
    assert output.read_text() == "former"
    assert list(tmp_path.iterdir()) == [output]


def test_a_search_whose_study_does_not_fit_is_one_sentence(tmp_path):
    pytest.importorskip("optuna")
    search = tmp_path / "search.toml"
    search.write_text('methods = ["fedavg"]\nnum-clients = 4\nrounds = 1\n[search]\nlr = [0.1]\n')

    def full():
        limit(ROOM)
        done = CliRunner().invoke(COMMAND, ["tune", str(search), "--output", str(tmp_path / "t")])
        limit(None)
        assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.output
        assert "study.db cannot be read or written: " in done.output

    apart(full)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    """SIGTERM between two replacements, as a worker process may get it."""

    def stop(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedapps.files.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert not list(tmp_path.iterdir())


def test_what_is_outdated_goes_when_the_disk_has_taken_the_rest(tmp_path):
    """As the stream of a delivered model whose folder gets a model without one."""
    outdated, large = tmp_path / "outdated", tmp_path / "large"
    outdated.write_bytes(b"old")

    def full():
        limit(ROOM)
        with pytest.raises(OSError, match="too large"):
            write_files({large: bytes(ROOM + 1)}, outdated=[outdated])

    apart(full)
    assert outdated.read_bytes() == b"old"
    write_files({large: b"new"}, outdated=[outdated])
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_an_interrupted_append_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    def write_half(file, data):
        file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    append_text(tmp_path / "lines", "one\n")
    monkeypatch.setattr(files, "_write_all", write_half)
    with pytest.raises(KeyboardInterrupt):
        append_text(tmp_path / "lines", "two\n")
    assert (tmp_path / "lines").read_text() == "one\n"


def test_files_that_belong_together_and_lines_are_written_whole_or_not_at_all(tmp_path):
    small, large, lines = tmp_path / "small", tmp_path / "large", tmp_path / "lines"

    def full():
        write_files({small: b"old", large: b"old"})
        append_text(lines, "one\n")
        limit(ROOM)
        with pytest.raises(OSError, match="too large"):
            write_files({small: b"new", large: bytes(ROOM + 1)})
        with pytest.raises(OSError, match="too large"):
            append_text(lines, "x" * ROOM)

    apart(full)
    assert (small.read_bytes(), large.read_bytes()) == (b"old", b"old")
    assert lines.read_text() == "one\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_what_clients_keep_stays_in_memory_where_the_disk_does_not_take_it(tmp_path, monkeypatch):
    """Of 240 bytes each, the first two fit a file of ROOM bytes, the third in part, the fourth not.
    On a disk that lets no file be made, none does."""
    monkeypatch.setattr(files, "IN_MEMORY", 0)
    kept = {client: {"w": np.arange(30.0) + client} for client in range(4)}

    def full():
        limit(ROOM)
        found = spill(kept.items(), tmp_path)
        assert [found[client] is kept[client] for client in kept] == [False, False, True, True]
        np.testing.assert_equal(found, kept)
        np.testing.assert_equal(spill(kept.items(), tmp_path / "not there"), kept)

    apart(full)
