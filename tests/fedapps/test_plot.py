"""Figures of a folder of runs show what the runs' files say, and can be told apart in grey."""

import itertools
import json

import numpy as np
import pytest
from left import leave
from matplotlib.colors import to_rgb
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.config import defaults
from fedapps.engines.jobs import run_in_process
from fedapps.results.models import confusion, embeddings, predictions
from fedapps.results.plot import clients, curves, swept
from fedapps.results.runs import read_runs


def fedapps(*arguments, code=0):
    done = CliRunner().invoke(cli, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


def test_curves_are_means_over_seeds_within_their_range(tmp_path):
    leave(tmp_path, "fedavg", 0, [0.5], curve=(0.25, 0.5))
    leave(tmp_path, "fedavg", 1, [0.5], curve=(0.5, 0.75))
    leave(tmp_path, "tent", 0, [0.5], curve=(0.125, 0.25))
    figure = curves(read_runs(tmp_path)[0])
    (axis,) = figure.axes  # no run tells a curve of novel clients
    fedavg, tent = axis.lines
    assert fedavg.get_xydata().tolist() == [[1, 37.5], [2, 62.5]]
    assert tent.get_ydata().tolist() == [12.5, 25]
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (25, 75)
    assert [text.get_text() for text in figure.legends[0].texts] == ["fedavg", "tent"]


def test_lines_differ_without_colour(tmp_path):
    """In dashes, marker, or by a tenth in grey (its luminance)."""
    for number in range(7):
        leave(tmp_path, f"tent adapt-steps={number}", 0, [0.5], curve=(0.1 * number,))
    lines = curves(read_runs(tmp_path)[0]).axes[0].lines
    looks = {(line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(looks) == 7
    grey = [np.dot(to_rgb(line.get_color()), (0.299, 0.587, 0.114)) for line in lines]
    assert all(abs(a - b) > 0.1 for a, b in itertools.pairwise(grey))


def test_long_names_stay_within_the_figure(tmp_path):
    for number in range(4):
        method = f"tent adapt-steps={number} adapt-clip-norm=10.0 bits=true lr=0.125"
        leave(tmp_path, method, 0, [0.5], curve=(0.5,))
    figure = curves(read_runs(tmp_path)[0])
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert len(figure.legends[0].texts) == 4


def test_accuracy_against_a_swept_key(tmp_path):
    """Means 50 and 70 over seeds at α = 0.1, deviation 20/√2; words beside each other."""
    for alpha, seed, accuracy in ((0.1, 0, 0.5), (0.1, 1, 0.7), (10.0, 0, 0.9)):
        leave(tmp_path, f"tent partition.alpha={alpha}", seed, [accuracy], partition="dirichlet")
    figure = swept(read_runs(tmp_path)[0], "partition.alpha")
    training, novel = figure.axes
    assert novel.lines[0].get_xydata().tolist() == [[0.1, 60], [10, 90]]
    low, high = novel.collections[0].get_segments()[0][:, 1]
    assert high - low == pytest.approx(2 * 20 / 2**0.5)
    assert training.get_title() == "training clients"
    leave(tmp_path, "tent model=lenet partition.alpha=0.1", 0, [0.3], partition="dirichlet")
    words = swept(read_runs(tmp_path)[0], "model").axes[1]
    assert [text.get_text() for text in words.get_xticklabels()] == ["lenet", "mlp"]
    with pytest.raises(ValueError, match="one value of batch-size alone: 64"):
        swept(read_runs(tmp_path)[0], "batch-size")


def test_clients_are_dots(tmp_path):
    leave(tmp_path, "tent", 0, [0.25, 0.75], train=(0.5, 0.625))
    training, novel = clients(read_runs(tmp_path)[0]).axes
    dots = [[x for x in a.lines if x.get_marker() == "."] for a in (training, novel)]
    assert [line.get_ydata().tolist() for of in dots for line in of] == [[50, 62.5], [25, 75]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Finished runs of six clients, in one folder."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("tent", "fedper", "pfedhn"):
        keys = {"method": method, "output-dir": str(folder / f"{method}-seed0")}
        run_in_process(defaults() | {"num-clients": 8, "rounds": 3, "local-steps": 4} | keys)
    return folder


def test_predictions_of_a_saved_model_are_those_of_the_run(saved):
    """Each client's share of right predictions is the accuracy in its summary: of the novel ones,
    and of FedPer, which serves none, of the training ones, whose heads their folder holds."""
    for method, role in (("fedper", "train"), ("tent", "novel")):
        true, predicted = predictions(saved / f"{method}-seed0")
        told = json.loads((saved / f"{method}-seed0" / "summary.json").read_text())["per_client"]
        scored = [told[key] for key in sorted(told, key=int) if told[key]["role"] == role]
        ends = np.cumsum([client["examples"] for client in scored])
        right = [part.mean() for part in np.split(true == predicted, ends)[:-1]]
        assert len(right) == 4
        assert right == pytest.approx([client["accuracy"] for client in scored])
    shares = confusion(saved / "tent-seed0").axes[0].images[0].get_array()
    present = [float(kind in true) for kind in sorted({*true, *predicted})]
    np.testing.assert_allclose(np.asarray(shares).sum(1), present)
    (saved / "fedper-seed0" / "clients").rename(saved / "elsewhere")
    with pytest.raises(ValueError, match="fedper-seed0 holds no clients/"):
        predictions(saved / "fedper-seed0")
    (saved / "elsewhere").rename(saved / "fedper-seed0" / "clients")


def test_confusion_of_users_with_tastes(tmp_path):
    """Two of three users of 0 use head 0; those of 1 and 2 use head 1."""
    users = [(0, 0), (0, 0), (0, 1), (1, 1), (2, 1)]  # (sub-population, head)
    told = {str(i): {"sub_population": kind, "head": head} for i, (kind, head) in enumerate(users)}
    (tmp_path / "summary.json").write_text(json.dumps({"per_client": told}))
    shares = np.asarray(confusion(tmp_path).axes[0].images[0].get_array())
    assert shares == pytest.approx(np.array([[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 1, 0]]))


def test_a_map_has_a_place_for_every_embedding(saved):
    assert len(embeddings(saved / "pfedhn-seed0").axes[0].texts) == 4
    with pytest.raises(ValueError, match="holds 0 embeddings"):
        embeddings(saved / "tent-seed0")


def test_the_command_writes_files_of_every_kind(saved, tmp_path):
    starts = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG"}
    for ending, start in starts.items():
        fedapps("plot", saved, "curves", "--output", tmp_path / f"a{ending}")
        assert (tmp_path / f"a{ending}").read_bytes().startswith(start)
    own = ["--run", "pfedhn-seed0", "--output", tmp_path / "map.png"]
    fedapps("plot", saved, "embeddings", *own)
    fedapps("plot", saved / "tent-seed0", "confusion", "--output", tmp_path / "c.svg")
    assert (tmp_path / "c.svg").is_file()


def test_bad_options_are_refused(saved, tmp_path):
    assert "'pie'; known: curves" in fedapps("plot", saved, "pie", code=2)
    said = fedapps("plot", saved, "curves", "--output", tmp_path / "a.gif", code=2)
    assert "a.gif must end in one of .pdf" in said
    assert "name one run: --run" in fedapps("plot", saved, "confusion", code=2)
    said = fedapps("plot", saved, "confusion", "--run", "afl-seed0", code=2)
    assert "no run 'afl-seed0'; there are fedper-seed0" in said
    assert "--by partition.alpha" in fedapps("plot", saved, "swept", code=2)
