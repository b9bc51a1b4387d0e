from contextlib import contextmanager

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_runs import COMMAND

from fedapps.settings.config import defaults
from partitions import federation, inspect, shares
from partitions.shares import DATA, META, Share

pytestmark = pytest.mark.usefixtures("own_cache")

PARTS = ("train", "validation", "test", "everything", "public")


def test_distances_are_of_each_novel_client_and_of_its_own_proportions():
    """Novel (2, 6) and (4, 0) against training (3, 1) and (5, 5). TV: (¼, ¾) is ½ from (¾, ¼) and ¼
    from (½, ½); (1, 0) is ¼ and ½ from them. KL with one sample more: (3, 7)/10 against (4, 2)/6
    and (6, 6)/12, (5, 1)/6 against the same."""
    counts = np.array([[2, 6], [3, 1], [4, 0], [5, 5]])
    variation, divergence = inspect.distances(counts, np.array([True, False, True, False]))
    assert variation == pytest.approx([0.25, 0.25])

    def kl(p, q):
        return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))

    first, second = (min(kl(p, 2 / 3), kl(p, 1 / 2)) for p in (0.3, 5 / 6))
    assert divergence == pytest.approx([first, second])


def test_class_counts_are_the_clients(toy, divide):
    fed = divide(toy(np.arange(60) % 3), partition="pathological", num_clients=4)
    counts = inspect.class_counts(fed)
    for client in range(4):
        y = fed.share(client).everything[:][1].numpy()
        assert counts[client].tolist() == [(y == c).sum() for c in range(3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": "class-fraction", "standardize": "training-clients"},
        {"partition": "rotated", "partition_public_samples": 30},
        {"partition": "iid", "partition_test_fraction": 0.2},
    ],
)
def test_an_exported_share_is_the_share(tmp_path, divide, changes):
    fed = divide(num_clients=5, **changes)
    paths = inspect.export(fed, tmp_path / "out")
    assert [path.name for path in paths] == [f"client-{i}" for i in range(5)]
    for client, path in enumerate(paths):
        loaded, info = Share.load(path)
        share = fed.share(client)
        assert (info.shape, info.num_classes) == (fed.info.shape, fed.info.num_classes)
        assert (loaded.novel, loaded.attributes) == (share.novel, share.attributes)
        for part in PARTS:
            mine, theirs = getattr(share, part), getattr(loaded, part)
            assert (mine is None) == (theirs is None), part
            if mine is not None:
                for a, b in zip(mine[:], theirs[:], strict=True):
                    assert torch.equal(a, b), part
        size = sum(file.stat().st_size for file in path.iterdir())
        public = len(share.public or ())
        assert size < 4000 + 100 * (len(share.everything) + public)  # its own samples, no others


def test_the_figure_shows_training_and_novel_clients_apart(toy, divide):
    changes = {"partition": "dirichlet", "partition_alpha": 1.0, "num_clients": 8}
    fed = divide(toy(np.arange(200) % 4), **changes, train_fraction=0.75)
    left, right = inspect.figure(fed).axes
    counts = inspect.class_counts(fed)
    variation, divergence = (d.mean() for d in inspect.distances(counts, fed.novel))
    assert left.get_title() == "6 training clients"
    got = f"2 novel clients, nearest: TV {variation:.2f}, KL {divergence:.2f}"
    assert right.get_title() == got and f"{variation:.2f}" != f"{divergence:.2f}"
    for axis, role in ((left, False), (right, True)):
        bars = sorted(bar.get_height() for bar in axis.patches)
        mine = counts[fed.novel == role]
        assert bars == sorted(mine[:, mine.any(0)].ravel())  # of the classes that somebody has


def test_folders_are_numbered_by_as_many_digits_as_the_last_client_has(tmp_path, divide):
    paths = inspect.export(divide(num_clients=10, partition="iid"), tmp_path)
    assert [path.name for path in paths] == [f"client-{i}" for i in range(10)]


def test_two_deals_do_not_lie_together(tmp_path, divide):
    """The same number of clients replaces the former ones; a fourth would keep their samples."""
    for _ in range(2):
        inspect.export(divide(num_clients=4, partition="iid"), tmp_path)
    with pytest.raises(ValueError, match="holds client-3 of another partition"):
        inspect.export(divide(num_clients=3, partition="iid"), tmp_path)


@pytest.mark.parametrize("after", ["samples.safetensors", "client.json"])
def test_an_export_that_is_killed_leaves_no_share_of_a_former_one(
    after, tmp_path, divide, monkeypatch
):
    """Killed in client 1's folder, after a file: a node of client 1 or 2 would have samples that
    client 0 has now, or the role and the scaling of the former export."""
    inspect.export(divide(num_clients=3, partition="iid"), tmp_path)
    replaced = shares.replaced

    @contextmanager
    def killed(path):
        with replaced(path) as file:
            yield file
        if path == tmp_path / "client-1" / after:
            raise KeyboardInterrupt

    monkeypatch.setattr(shares, "replaced", killed)
    with pytest.raises(KeyboardInterrupt):
        inspect.export(divide(num_clients=3, partition="iid", seed=1), tmp_path)
    whole = {client for client in range(3) if (tmp_path / f"client-{client}" / META).is_file()}
    assert whole == ({0} if after == DATA else {0, 1})
    with pytest.raises(ValueError, match=r"must hold client\.json"):
        Share.load(tmp_path / "client-2")


def test_a_summary_by_hand(toy, monkeypatch):
    """Five samples, two of them to train on; class 1 occurs three times; two writers."""
    data = toy([1, 0, 1, 2, 1], num_train=2, writer=["b", "a", "b", "b", "a"])
    asked = []
    monkeypatch.setattr(inspect, "load", lambda *_: asked.append("load") or data)
    monkeypatch.setattr(inspect, "reread", lambda *_: asked.append("reread") or data)
    found = inspect.summary("digits", check=True)
    assert (found.num_train, found.num_test, found.columns) == (2, 3, {"writer": 2})
    assert found.class_counts == {"0": 1, "1": 3, "2": 1}
    inspect.summary("digits")
    assert asked == ["reread", "load"]


def run(*arguments):
    result = CliRunner().invoke(COMMAND, arguments)
    return result.exit_code, " ".join(result.output.split())


def test_data_shows_checks_and_exports(tmp_path):
    assert run("data", "digits", "--info") == (
        0,
        "digits: 1 797 digits of scikit-learn, embedded; 10 classes, inputs (1, 8, 8) "
        "from: embedded",
    )
    code, text = run("data", "digits", "--check")
    assert code == 0
    assert "1437 training and 360 test samples, uint8" in text
    assert "the files are complete" in text
    settings = ("num-clients=3", "partition=iid", "novel-shots=2")
    code, text = run("data", "digits", *settings, "--export", "out")
    assert (code, sorted(p.name for p in (tmp_path / "out").iterdir())) == (
        0,
        ["client-0", "client-1", "client-2"],
    )


def test_partition_show_draws(tmp_path):
    code, text = run("partition", "show", "partition=dirichlet", "--output", "split.png")
    assert code == 0
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    assert "total variation" in text
    clients = federation(defaults() | {"num-clients": 6})
    counts, picture = inspect.class_counts(clients), inspect.figure(clients)
    picture.draw_without_rendering()
    (legend,) = picture.legends  # of both panels, inside the figure
    assert [text.get_text() for text in legend.get_texts()] == list("0123456789")
    assert legend.get_window_extent().x1 <= picture.bbox.width
    marks = [mark.get_facecolor() for mark in legend.get_patches()]
    for role, axis in zip((False, True), picture.axes, strict=True):
        for bars in axis.containers:
            number = int(bars.get_label())
            assert bars[0].get_facecolor() == marks[number]
            heights = [bar.get_height() for bar in bars]
            assert heights == counts[clients.novel == role][:, number].tolist()
    options = ["num-clients=5", "dataset=digits", "standardize=none", "--output", "split.pdf"]
    assert run("partition", "show", "fedtta/table1-mnist", *options)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "minst"), "unknown dataset 'minst' (did you mean 'mnist'?)"),
        (("data", "pyproject.tml"), "'pyproject.tml': there is no such path, "),
        (("data", "/a/b.csv"), "no such path, not in /a; if it was moved, put a link in its place"),
        (("data", "digits", "partition=ird", "--export", "out"), "unknown partition 'ird'"),
        (
            ("data", "digits", "dataset=mnist", "--info"),
            "the dataset is digits; remove dataset=mnist",
        ),
        (("data", "digits", "--info", "--export", "out"), "exclude each other; give one"),
        (("data", "digits", "--info", "--check"), "exclude each other; give one"),
        (("data", "digits", "--check", "--export", "out"), "exclude each other; give one"),
        (("partition", "show", "partition.alpa=1"), "unknown key 'partition.alpa'"),
        (("partition", "show", "partition.alpha=1"), "since partition is pathological"),
        (("partition", "show", "unseen/digits"), "includes others; show one of them: unseen/iid"),
        (("partition", "show", "lr=0.1,0.2"), "lr has several values"),
        (("partition", "show", "--output", "a.gif"), "a.gif must end in one of"),
        (("partition", "show", "--output", "nowhere/at/all.png"), "nowhere/at/all.png"),
    ],
)
def test_errors_are_one_line(arguments, message):
    code, text = run(*arguments)
    assert code == 2
    assert text.count("error:") == 1
    assert message in text


def test_a_summary_of_values_has_their_range(tmp_path):
    (tmp_path / "d.csv").write_text("a,dose\n1,0.5\n2,1.5\n4,4.0\n")
    found = inspect.summary(str(tmp_path / "d.csv"), label_column="dose", task="values")
    assert found.class_counts == {}
    assert found.quantiles == {"dose": pytest.approx([0.5, 1.0, 1.5, 2.75, 4.0])}


def test_a_summary_of_several_labels_counts_each(tmp_path):
    (tmp_path / "d.csv").write_text("x,fever,cough\n1,1,1\n2,1,0\n4,0,0\n")
    found = inspect.summary(str(tmp_path / "d.csv"), label_column="fever,cough")
    assert found.class_counts == {"fever": 2, "cough": 1}
