"""Figures of a folder of runs show what the runs' files say, and can be distinguished in grey."""

import itertools
import json

import numpy as np
import pytest
import tomli_w
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from run_folders import leave, vouch
from small_runs import fedapps, invoke

import partitions
from fedapps.files import write_arrays
from fedapps.results.plot import clients, curves, matrix, save, swept, time
from fedapps.results.runs import read_runs
from fedapps.serverapp import run_in_process
from fedapps.service.figures import RecordedClasses, confusion, embeddings, predictions
from fedapps.settings.config import defaults
from fedapps.settings.saved_configurations import saved_configuration


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


def test_a_curve_has_its_rounds_in_order_and_f1_if_there_is_no_accuracy(tmp_path):
    """Seed 0 was evaluated in rounds 1 and 3, seed 1 in round 2. F1 beside an accuracy is not
    drawn; alone it is no percentage."""
    for seed, accuracies in enumerate(({1: 0.25, 3: 0.5}, {2: 0.75})):
        run = leave(tmp_path, "fedavg", seed, [0.5])
        lines = [
            json.dumps({"round": n, "evaluation": {"train-accuracy": a, "train-f1": 0.125}})
            for n, a in accuracies.items()
        ]
        (run / "metrics.jsonl").write_text("\n".join(lines))
    (line,) = curves(read_runs(tmp_path)[0]).axes[0].lines
    assert line.get_xydata().tolist() == [[1, 25], [2, 75], [3, 50]]
    users = leave(tmp_path / "users", "global", 0, [0.5])
    (users / "metrics.jsonl").write_text('{"round": 1, "evaluation": {"novel-f1": 0.375}}')
    (axis,) = curves(read_runs(tmp_path / "users")[0]).axes
    assert (axis.get_title(), axis.get_ylabel(), axis.get_xlabel()) == ("novel, F1", "F1", "round")
    assert axis.lines[0].get_xydata().tolist() == [[1, 0.375]]


def test_curves_by_simulated_time_stand_at_the_mean_time_of_a_round(tmp_path):
    """Round 1 ends at 2 and 4 s in the two seeds: its mean, 37.5 %, stands at 3 s."""
    for seed, (seconds, accuracy) in enumerate([(2.0, 0.25), (4.0, 0.5)]):
        run = leave(tmp_path, "fedavg", seed, [0.5])
        lines = []
        for round_ in (1, 2):
            report = {"round": round_, "simulated-seconds": round_ * seconds}
            report["evaluation"] = {"train-accuracy": round_ * accuracy}
            lines.append(json.dumps(report))
        (run / "metrics.jsonl").write_text("\n".join(lines))
    (axis,) = time(read_runs(tmp_path)[0]).axes
    assert axis.lines[0].get_xydata().tolist() == [[3, 37.5], [6, 75]]
    assert axis.get_xlabel() == "simulated seconds"
    leave(tmp_path / "waiting", "fedavg", 0, [0.5], curve=(0.5,))
    with pytest.raises(ValueError, match="no simulated seconds; run with latency=lognormal"):
        time(read_runs(tmp_path / "waiting")[0])


def test_lines_differ_without_colour(tmp_path):
    """In dashes, marker, or by a tenth in grey (its luminance)."""
    for number in range(7):
        leave(tmp_path, f"tent adapt-steps={number}", 0, [0.5], curve=(0.1 * number,))
    lines = curves(read_runs(tmp_path)[0]).axes[0].lines
    looks = [(line.get_linestyle(), line.get_marker()) for line in lines]
    assert len(set(looks)) == len({marker for _, marker in looks}) == 7
    assert len({dashes for dashes, _ in looks}) == 4  # and a fifth, which repeats the first
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


def test_long_names_below_an_axis_stay_within_the_figure_and_apart(tmp_path):
    """As those of runs that differ in many settings: only the last letters of each were shown."""
    settings = " ".join(f"partition.option-{number}=0.125" for number in range(6))
    for number in range(5):
        leave(tmp_path, f"tent adapt-steps={number}", 0, [0.5])
    runs = read_runs(tmp_path)[0]
    figure = clients(runs.assign(method=[f"{name} {settings}" for name in runs.method]))
    figure.draw_without_rendering()
    for axis in figure.axes:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels()]
        assert all(0 <= box.y0 < box.y1 <= axis.bbox.y0 for box in boxes)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert axis.bbox.height > 200  # of dots at 100 an inch


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
    assert training.get_xlabel() == "partition.alpha"
    assert "lenet" not in [text.get_text() for text in novel.get_xticklabels()]
    with pytest.raises(ValueError, match="a single value of batch-size: 64"):
        swept(read_runs(tmp_path)[0], "batch-size")


def test_a_swept_keys_numbers_come_by_size_and_each_method_has_its_line(tmp_path):
    for rate, accuracy in ((10, 0.5), (9, 0.25), (100, 0.75)):
        leave(tmp_path, f"fedavg batch-size={rate}", 0, [accuracy], train=(0.125,))
        leave(tmp_path, f"tent batch-size={rate}", 0, [accuracy / 2])
    training, novel = swept(read_runs(tmp_path)[0], "batch-size").axes
    got = {line.get_label(): line[0].get_xydata().tolist() for line in novel.containers}
    assert got == {
        "fedavg": [[9, 25], [10, 50], [100, 75]], "tent": [[9, 12.5], [10, 25], [100, 37.5]],
    }  # fmt: skip
    assert {y for line in training.lines for y in line.get_ydata()} == {12.5, 50}
    assert novel.get_ylim() == training.get_ylim()
    names = [text.get_text() for text in novel.figure.legends[0].texts]
    assert names == ["fedavg", "tent"]


def test_a_swept_f1_is_no_percentage(tmp_path):
    for size, f1 in ((16, 0.25), (64, 0.75)):
        run = leave(tmp_path, f"global batch-size={size}", 0, [])
        summary = json.loads((run / "summary.json").read_text())
        groups = {"evaluation": {"train-accuracy": None, "train-f1": f1}, "per_client": {}}
        (run / "summary.json").write_text(json.dumps(summary | groups))
    (axis,) = swept(read_runs(tmp_path)[0], "batch-size").axes
    assert (axis.get_title(), axis.get_ylabel()) == ("F1", "F1")
    assert axis.lines[0].get_xydata().tolist() == [[16, 0.25], [64, 0.75]]


def test_a_matrix_is_dark_where_shares_are_large(tmp_path):
    """0.75 of row 1 lies in column 2: a dark field with a light number, the rows downwards."""
    figure = matrix(np.array([[0.25, 0, 0.5], [0, 0.25, 0.75]]), "true", "found", "title")
    axis = figure.axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("found", "true", "title")
    got = {text.get_position(): (text.get_text(), text.get_color()) for text in axis.texts}
    black = {(0, 0): ".25", (1, 0): "", (2, 0): ".50", (0, 1): "", (1, 1): ".25"}
    assert got == {place: (text, "black") for place, text in black.items()} | {
        (2, 1): (".75", "white")
    }
    (image,) = axis.images
    assert image.get_clim() == (0, 1)
    assert [to_rgb(image.cmap(value)[:3]) for value in (0.0, 1.0)] == [(1, 1, 1), (0, 0, 0)]
    for names_axis in (axis.xaxis, axis.yaxis):  # no place between two of them has a name
        numbers = [str(place) for place in names_axis.get_ticklocs()]
        assert [text.get_text() for text in names_axis.get_ticklabels()] == numbers
    assert len(matrix(np.full((20, 20), 0.05), "a", "b").axes[0].texts) == 400
    many = matrix(np.full((3, 134), 0.05), "a", "b").axes[0].xaxis
    assert [text.get_text() for text in many.get_ticklabels()][:3] == ["0", "7", "14"]
    assert not matrix(np.full((3, 134), 0.05), "a", "b").axes[0].texts  # 402: too small to read


def test_clients_are_dots(tmp_path):
    """Of one seed, and of the next; boxes and dots of the second method stand at 1."""
    leave(tmp_path / "two", "tent", 0, [0.25])
    leave(tmp_path / "two", "fedavg", 0, [0.0, 1.0])
    leave(tmp_path / "two", "fedavg", 1, [0.5])
    novel = clients(read_runs(tmp_path / "two")[0]).axes[1]
    xs, ys = zip(*(np.transpose(dots.get_offsets()) for dots in novel.collections), strict=True)
    assert [y.tolist() for y in ys] == [[0, 100, 50], [25]]
    assert [x.tolist() for x in xs] == [pytest.approx([-0.2, 0, 0.2]), pytest.approx([0.8])]
    medians = [line for line in novel.lines if line.get_linewidth() == 2]
    assert [line.get_xdata().mean() for line in medians] == [0, 1]
    assert [text.get_text() for text in novel.get_xticklabels()] == ["fedavg", "tent"]
    leave(tmp_path, "tent", 0, [0.25, 0.75], train=(0.5, 0.625))
    panels = clients(read_runs(tmp_path)[0]).axes
    dots = [axis.collections[0].get_offsets()[:, 1].tolist() for axis in panels]
    assert dots == [[50, 62.5], [25, 75]]


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
        got = json.loads((saved / f"{method}-seed0" / "summary.json").read_text())["per_client"]
        scored = [got[key] for key in sorted(got, key=int) if got[key]["role"] == role]
        ends = np.cumsum([client["examples"] for client in scored])
        right = [part.mean() for part in np.split(true == predicted, ends)[:-1]]
        assert len(right) == 4
        assert right == pytest.approx([client["accuracy"] for client in scored])
    labels = [everything(saved / "tent-seed0", int(c)) for c, one in got.items() if one in scored]
    assert sorted(true) == sorted(np.concatenate(labels))
    shares = confusion(saved / "tent-seed0").axes[0].images[0].get_array()
    present = [float(kind in true) for kind in sorted({*true, *predicted})]
    np.testing.assert_allclose(np.asarray(shares).sum(1), present)
    (saved / "fedper-seed0" / "clients").rename(saved / "elsewhere")
    with pytest.raises(ValueError, match="fedper-seed0 holds no clients/"):
        predictions(saved / "fedper-seed0")
    (saved / "elsewhere").rename(saved / "fedper-seed0" / "clients")


def test_confusion_is_of_the_classes_that_an_evaluation_scores(tmp_path, caplog, monkeypatch):
    """One output for two classes; novel clients learn from labels, and are scored on their other
    samples. The places of the axes have the names of the classes. A regression has no classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)).round(3)
    names = np.where(x[:, 0] > 0, "yes", "no")
    rows = [f"{a},{b},{name}" for (a, b), name in zip(x, names, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,ill", *rows]))
    run = tmp_path / "fedavg-seed0"
    keys = {"dataset": str(tmp_path / "table.csv"), "label": "ill", "task": "binary"}
    keys |= {"partition": "iid", "num-clients": 4, "rounds": 1, "local-steps": 2}
    keys |= {"novel-shots": 3, "novel-steps": 30, "output-dir": str(run)}
    run_in_process(defaults() | keys)
    caplog.clear()
    true, predicted = predictions(run)
    assert not caplog.records  # no reply is dropped
    summary = json.loads((run / "summary.json").read_text())
    novel = [client for client in summary["per_client"].values() if client["role"] == "novel"]
    right = [client["examples"] * client["accuracy"] for client in novel]
    assert len(true) == sum(client["examples"] for client in novel) == 28
    assert (true == predicted).sum() == pytest.approx(sum(right))
    assert 14 < sum(right) < 28
    axis = confusion(run).axes[0]
    shares = np.asarray(axis.images[0].get_array())
    assert shares[1, 1] == predicted[true == 1].mean() == 1 - shares[1, 0]
    for names_axis in (axis.xaxis, axis.yaxis):
        assert [text.get_text() for text in names_axis.get_ticklabels()] == ["no", "yes"]
    with monkeypatch.context() as patch:
        patch.setattr(RecordedClasses, "of", lambda *_: 0.0)
        with pytest.raises(ValueError, match="no client has been scored on samples with labels"):
            predictions(run)
    card = json.loads((run / "serving.json").read_text())
    (run / "serving.json").write_text(json.dumps(card | {"task": "values"}))
    with pytest.raises(ValueError, match="fedavg-seed0 predicts values, and this figure is of cl"):
        predictions(run)


def everything(folder, client):
    """The labels of all samples of one of the run's clients."""
    share = partitions.federation(saved_configuration(folder)).share(client)
    return share.everything[:][1].numpy()


def test_confusion_of_users_with_tastes(tmp_path):
    """Two of three users of 0 use head 0; those of 1 and 2 use head 1."""
    users = [(0, 0), (0, 0), (0, 1), (1, 1), (2, 1)]  # (sub-population, head)
    got = {str(i): {"sub_population": kind, "head": head} for i, (kind, head) in enumerate(users)}
    (tmp_path / "summary.json").write_text(json.dumps({"per_client": got}))
    axis = confusion(tmp_path).axes[0]
    assert (axis.get_ylabel(), axis.get_xlabel()) == ("sub-population", "assigned head")
    shares = np.asarray(axis.images[0].get_array())
    assert shares == pytest.approx(np.array([[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 1, 0]]))
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0", "1", "2"]


def test_a_map_has_a_place_for_every_embedding(saved):
    assert len(embeddings(saved / "pfedhn-seed0").axes[0].texts) == 4
    with pytest.raises(ValueError, match="holds 0 embeddings"):
        embeddings(saved / "tent-seed0")


def test_a_file_is_the_same_each_time_and_its_text_can_be_edited(tmp_path):
    """No date and no random names in it; no font whose letters are drawings (type 3)."""
    figure = Figure()
    figure.subplots().plot([1, 2])
    for name in ("one.PDF", "one.svg", "new/two.PDF", "new/two.svg"):
        save(figure, tmp_path / name)
    for ending in ("PDF", "svg"):
        first, second = (tmp_path / f"{name}.{ending}" for name in ("one", "new/two"))
        assert first.read_bytes() == second.read_bytes()
    assert b"CreationDate" not in (tmp_path / "one.PDF").read_bytes()
    assert b"/Type3" not in (tmp_path / "one.PDF").read_bytes()
    assert b"dc:date" not in (tmp_path / "one.svg").read_bytes()


@pytest.fixture
def turned(tmp_path):
    """A saved run by hand: embeddings of the eight clients of turned digits, novel ones by 45°."""
    rng = np.random.default_rng(0)
    angles = {"partition": "rotated", "partition.novel-angles": "45", "partition.samples": 160}
    config = defaults() | {"method": "pfedhn", "num-clients": 8} | angles
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))
    arrays = {f"embedding/{i}": rng.normal(size=3).astype("float32") for i in range(8)}
    write_arrays(tmp_path / "model.safetensors", arrays)
    vouch(tmp_path)
    return tmp_path, partitions.federation(config), arrays


def test_a_map_is_coloured_by_an_attribute(turned):
    """As many dots of a name as clients of that angle, the names in order; the same dots where the
    others' map, which tells classes, has its texts."""
    folder, federation, _ = turned
    angles = [str(federation.share(i).attributes["angle"]) for i in range(8)]
    axis = embeddings(folder, "angle").axes[0]
    got = {dots.get_label(): dots.get_offsets().tolist() for dots in axis.collections}
    assert list(got) == sorted(set(angles))
    assert len(got["45.0"]) == federation.novel.sum() == 4
    texts = [text.get_position() for text in embeddings(folder).axes[0].texts]
    for name, places in got.items():
        expected = [place for place, angle in zip(texts, angles, strict=True) if angle == name]
        np.testing.assert_allclose(places, expected)


def test_a_map_tells_each_clients_classes_novel_ones_in_bold(turned):
    folder, federation, arrays = turned
    axis = embeddings(folder).axes[0]
    for client, text in enumerate(axis.texts):
        classes = np.unique(everything(folder, client))[:5]
        assert text.get_text() == ",".join(map(str, classes))
        assert (text.get_weight() == "bold") == federation.novel[client]
    xs, ys = zip(*(text.get_position() for text in axis.texts), strict=True)
    assert axis.get_xlim() == pytest.approx((min(xs), max(xs)))
    assert axis.get_ylim() == pytest.approx((min(ys), max(ys)))
    write_arrays(folder / "model.safetensors", dict(list(arrays.items())[:3]))
    vouch(folder)
    with pytest.raises(ValueError, match="holds 3 embeddings; a map needs at least 4"):
        embeddings(folder)


def test_a_map_of_a_regression_tells_the_clients(tmp_path):
    """Their labels are no classes."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "values.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60))
    config = defaults() | {"method": "pfedhn", "dataset": str(tmp_path / "values.npz")}
    config |= {"task": "values", "inputs": "vector", "partition": "iid", "num-clients": 6}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config))
    arrays = {f"embedding/{i}": rng.normal(size=3).astype("float32") for i in (5, 0, 2, 3)}
    write_arrays(tmp_path / "model.safetensors", arrays)
    vouch(tmp_path)
    axis = embeddings(tmp_path).axes[0]
    assert [text.get_text() for text in axis.texts] == ["0", "2", "3", "5"]
    assert axis.get_title().startswith("ids of training clients")


def test_the_command_writes_files_of_every_kind(saved, tmp_path):
    starts = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG"}
    for ending, start in starts.items():
        fedapps("plot", saved, "curves", "--output", tmp_path / f"a{ending}")
        assert (tmp_path / f"a{ending}").read_bytes().startswith(start)
    own = ["--run", "pfedhn-seed0", "--output", tmp_path / "map.png"]
    fedapps("plot", saved, "embeddings", *own)
    fedapps("plot", saved / "tent-seed0", "confusion", "--output", tmp_path / "c.svg")
    assert (tmp_path / "c.svg").is_file()
    output = ["--output", tmp_path / "more.png"]
    fedapps("plot", saved, "swept", "--by", "lr", *output)
    assert (tmp_path / "more.png").is_file()
    said = fedapps("plot", saved / "tent-seed0", "traces", *output, code=2)
    assert "'tent' has no adaptation steps to trace; known: fedtta" in said


def test_bad_options_are_refused(saved, tmp_path):
    assert "'pie'; known: curves" in fedapps("plot", saved, "pie", code=2)
    said = fedapps("plot", saved, "curves", "--output", tmp_path / "a.gif", code=2)
    assert "a.gif must end in one of .pdf" in said
    assert "name one run: --run" in fedapps("plot", saved, "confusion", code=2)
    said = fedapps("plot", saved, "confusion", "--run", "afl-seed0", code=2)
    assert "no run 'afl-seed0'; there are fedper-seed0" in said
    assert "--by partition.alpha" in fedapps("plot", saved, "swept", code=2)


def test_a_run_that_failed_is_named_where_a_figure_lacks_it(tmp_path):
    for seed in (0, 1):
        run = leave(tmp_path / "iid", "fedavg", seed, [0.5], curve=(0.5,))
    (run / "summary.json").write_text('{"finished": false, "error": "OSError: full"}')
    output = ["--output", tmp_path / "a.png"]
    assert "fedavg-seed1 failed: OSError: full" in fedapps(
        "plot", tmp_path / "iid", "curves", *output
    )
    assert "iid: fedavg-seed1 failed: OSError: full" in fedapps("plot", tmp_path, "gain", *output)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["clients", "--run", "tent-seed0"], "--run is 'tent-seed0', but clients does not read it"),
        (["curves", "--by", "lr"], "--by is 'lr', but curves does not read it: it is for swept"),
        (["gain", "--attribute", "coarse"], "it is for embeddings; remove it"),
        (["confusion", "--client", 0], "--client is 0, but confusion does not read it"),
        (["swept", "--by", "lr", "--steps", 0], "--steps is 0, but swept does not read it"),
    ],
)
def test_an_option_that_a_figure_does_not_read_is_refused(words, why, tmp_path):
    """The first would draw all runs, as if each were the one that was named."""
    said = invoke("plot", tmp_path, *words, "--output", tmp_path / "a.png", code=2).output
    assert why in said
    assert not list(tmp_path.iterdir())


def test_methods_without_values_keep_place_and_look(tmp_path):
    """The first and the last method have no novel values: in both panels the others stand at 1 of
    0 … 2, and have the look of the second line."""
    for method, novel in (("fedavg", []), ("tent", [0.5, 0.75]), ("zeta", [])):
        for rate in (8, 16):
            label = f"fedavg lr=0.{rate}" if method == "zeta" else method
            if rate == 8 or method != "zeta":
                leave(tmp_path / "clients", label, rate, novel)
    training, other = clients(read_runs(tmp_path / "clients")[0]).axes
    assert training.get_xlim() == other.get_xlim() == (-0.5, 2.5)
    for rate in (8, 16):
        leave(tmp_path / "swept", f"fedavg batch-size={rate}", 0, [])
        leave(tmp_path / "swept", f"tent batch-size={rate}", 0, [0.5])
    training, other = swept(read_runs(tmp_path / "swept")[0], "batch-size").axes
    looks = {}
    for axis in (training, other):
        for line in axis.containers:
            looks.setdefault(line.get_label(), set()).add(line[0].get_color())
    assert {label: len(colours) for label, colours in looks.items()} == {"fedavg": 1, "tent": 1}
