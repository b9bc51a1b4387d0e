"""Folders of images in folders: which level is the class, and which the owner."""

import pytest
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.readers.local import read_local

pytestmark = pytest.mark.usefixtures("own_cache")


def images(folder, outer, inner, count=3):
    """Images in outer/inner, for each pair of names."""
    for first in outer:
        for second in inner:
            place = folder / first / second
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (2, 2), 10 * number).save(place / f"{number}.png")


def test_two_levels_of_the_same_names_are_declared(tmp_path):
    images(tmp_path, ("north", "south"), ("ill", "well"))
    with pytest.raises(
        ValueError, match=r"set label=folder:0 if the outer .*label=folder:1 if the"
    ):
        read_local(tmp_path)
    outer = read_local(tmp_path, label="folder:0")
    assert outer.classes == ("north", "south")
    assert sorted(set(outer.columns["folder:1"])) == ["ill", "well"]
    inner = read_local(tmp_path, label="folder:1")
    assert inner.classes == ("ill", "well")
    assert inner.y.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert inner.columns["folder:0"].tolist() == ["north"] * 6 + ["south"] * 6


def test_owners_are_clients(tmp_path):
    images(tmp_path, ("north", "south"), ("ill", "well"))
    config = {
        "dataset": str(tmp_path),
        "label": "folder:1",
        "partition": "natural",
        "partition.column": "folder:0",
        "num-clients": 2,
    }
    found = partitions.federation(defaults() | config)
    owners = [found.share(client).attributes["folder:0"] for client in (0, 1)]
    assert sorted(owners) == ["north", "south"]
    assert [len(found.share(client).everything) for client in (0, 1)] == [6, 6]


def test_inner_folders_of_other_names_are_no_classes(tmp_path):
    """Patients lie in one class each, so the outer folders alone can be classes."""
    images(tmp_path, ("ill",), ("p1", "p2"))
    images(tmp_path, ("well",), ("p3",))
    raw = read_local(tmp_path)
    assert raw.classes == ("ill", "well")
    assert raw.columns["folder:1"].tolist() == ["p1"] * 3 + ["p2"] * 3 + ["p3"] * 3


def test_a_level_that_images_lack_is_refused_by_file(tmp_path):
    images(tmp_path, ("north",), ("ill", "well"))
    Image.new("L", (2, 2)).save(tmp_path / "north" / "stray.png")
    with pytest.raises(ValueError, match=r"label is folder:1, but .*stray\.png is no image in 2 f"):
        read_local(tmp_path, label="folder:1")
    with pytest.raises(
        ValueError, match=r"label is 'kind', but .* label=folder:0 for the outermost"
    ):
        read_local(tmp_path, label="kind")


def test_a_later_clients_images_need_no_folders(tmp_path):
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    raw = read_local(tmp_path, whole=True, label="folder:1")
    assert not raw.labeled and raw.y.tolist() == [-1]
