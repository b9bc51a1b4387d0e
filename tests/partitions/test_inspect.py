import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedapps.data_cli import app
from partitions import inspect
from partitions.shares import Share

PARTS = ("train", "validation", "test", "everything", "public")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDAPPS_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def test_distances_to_the_nearest_training_client():
    """Novel (3, 1) against training (1, 3) and (2, 2): TV = min(½(½ + ½), ½(¼ + ¼)) = ¼.
    KL with one sample more a class, (4, 2)/6 against (3, 3)/6: ⅔ ln(4/3) + ⅓ ln(2/3)."""
    counts = np.array([[1, 3], [3, 1], [2, 2]])
    variation, divergence = inspect.distances(counts, np.array([False, True, False]))
    assert variation == pytest.approx([0.25])
    assert divergence == pytest.approx([2 / 3 * np.log(4 / 3) + 1 / 3 * np.log(2 / 3)])


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
    fed = divide(toy(np.arange(200) % 4), partition="pathological", num_clients=8)
    left, right = inspect.figure(fed).axes
    assert left.get_title() == "4 training clients"
    assert right.get_title().startswith("4 novel clients, nearest: TV ")
    heights = sum(bar.get_height() for bar in left.patches)
    assert heights == inspect.class_counts(fed)[~fed.novel].sum()


def run(*arguments):
    result = CliRunner().invoke(app, arguments)
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
    assert "the files are whole" in text
    code, text = run("data", "digits", "num-clients=3", "partition=iid", "--export", "out")
    assert (code, sorted(p.name for p in (tmp_path / "out").iterdir())) == (
        0,
        ["client-0", "client-1", "client-2"],
    )


def test_partition_show_draws(tmp_path):
    code, text = run("partition", "show", "partition=dirichlet", "--output", "split.png")
    assert code == 0
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    assert "total variation" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "minst"), "unknown dataset 'minst'"),
        (("data", "digits", "partition=ird", "--export", "out"), "unknown partition 'ird'"),
        (("partition", "show", "partition.alpa=1"), "unknown key 'partition.alpa'"),
        (("partition", "show", "--output", "nowhere/at/all.png"), "nowhere/at/all.png"),
    ],
)
def test_errors_are_one_line(arguments, message):
    code, text = run(*arguments)
    assert code == 2
    assert text.count("error:") == 1
    assert message in text
