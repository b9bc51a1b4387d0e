"""Folders of images in folders: which level is the class, and which the owner."""

import numpy as np
import pytest
from PIL import ExifTags, Image

import partitions
from fedapps.results.card import Card
from fedapps.service.inputs import read_input_files
from fedapps.settings.config import defaults
from partitions.datasets.readers.local import read_files
from partitions.datasets.readers.pictures import read_pictures

pytestmark = pytest.mark.usefixtures("own_cache")


def images(folder, outer, inner, count=3):
    """Images in outer/inner, for each pair of names."""
    for first in outer:
        for second in inner:
            place = folder / first / second
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.new("L", (2, 2), 10 * number).save(place / f"{number}.png")


def test_two_levels_of_the_same_names_are_declared(tmp_path):
    images(tmp_path, ("north", "south"), ("ill", "well"))
    with pytest.raises(
        ValueError,
        match=r"has 2 folders \(north, south\) in which folders have the same names \(ill, well\); "
        r"write label=folder:1 .* if the outer ones are the owners .*or label=folder:0",
    ):
        read_files(tmp_path)
    outer = read_files(tmp_path, label="folder:0")
    assert outer.classes == ("north", "south")
    assert sorted(set(outer.columns["folder:1"])) == ["ill", "well"]
    inner = read_files(tmp_path, label="folder:1")
    assert inner.classes == ("ill", "well")
    assert inner.y.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert inner.columns["folder:0"].tolist() == ["north"] * 6 + ["south"] * 6


@pytest.mark.parametrize("outer", [("north", "south"), ("site-1", "site-2")])
def test_of_three_levels_the_classes_are_declared(tmp_path, outer):
    for day in ("mon", "tue"):
        for owner in outer:
            images(tmp_path / owner, (day,), ("ill", "well"))
    for changes in ({}, {"partition.column": "folder:0"}):
        with pytest.raises(ValueError, match="label=folder:2"):
            partitions.federation(defaults() | {"dataset": str(tmp_path)} | changes)
    declared = read_files(tmp_path, label="folder:2")
    assert declared.classes == ("ill", "well")
    assert sorted(set(declared.columns["folder:1"])) == ["mon", "tue"]


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


@pytest.mark.parametrize(("column", "classes"), [(0, ("ill", "well")), (1, ("north", "south"))])
def test_the_level_beside_the_owners_is_the_class(tmp_path, column, classes):
    """With partition.column, one reading is left."""
    images(tmp_path, ("north", "south"), ("ill", "well"))
    owner = f"folder:{column}"
    config = {"dataset": str(tmp_path), "partition": "natural", "partition.column": owner}
    found = partitions.federation(defaults() | config | {"num-clients": 2})
    assert found.dataset.classes == classes


def test_names_of_owners_say_the_level(tmp_path):
    """hospital-1 names no class, at either level; the sentence says what was understood."""
    owners = ("hospital-1", "hospital-2", "hospital-3", "hospital-4")
    images(tmp_path / "a", owners, ("ill", "well"), 1)
    outer = read_files(tmp_path / "a")
    assert outer.classes == ("ill", "well")
    assert outer.columns["folder:0"].tolist() == sorted(owners * 2)
    assert (
        "a: 4 owners (folder:0: hospital-1, hospital-2, hospital-3, …) with the same 2 classes "
        "each (folder:1: ill, well); partition=natural partition.column=folder:0 makes"
    ) in outer.notes[0]
    images(tmp_path / "b", ("ill", "well"), owners, 1)
    inner = read_files(tmp_path / "b")
    assert inner.classes == ("ill", "well")
    assert inner.columns["folder:1"].tolist() == list(owners * 2)
    images(tmp_path / "c", ("phone", "camera"), ("front", "back"), 1)  # may be two classes
    with pytest.raises(ValueError, match=r"write label=folder:1"):
        read_files(tmp_path / "c")


def test_owners_with_some_of_the_classes(tmp_path):
    images(tmp_path, ("site_a",), ("ill", "well"), 1)
    images(tmp_path, ("site_b",), ("well", "other"), 1)
    raw = read_files(tmp_path)
    assert raw.classes == ("ill", "other", "well")
    assert "2 owners (folder:0: site_a, site_b) with up to 2 of 3 classes each" in raw.notes[0]


def test_inner_folders_of_other_names_are_no_classes(tmp_path):
    """Patients lie in one class each, so the outer folders alone can be classes."""
    images(tmp_path, ("ill",), ("p1", "p2"))
    images(tmp_path, ("well",), ("p3",))
    raw = read_files(tmp_path)
    assert raw.classes == ("ill", "well")
    assert raw.columns["folder:1"].tolist() == ["p1"] * 3 + ["p2"] * 3 + ["p3"] * 3


def test_a_level_that_images_lack_is_refused_by_file(tmp_path):
    images(tmp_path, ("north",), ("ill", "well"))
    Image.new("L", (2, 2)).save(tmp_path / "north" / "stray.png")
    with pytest.raises(ValueError, match=r"label is folder:1, but .*stray\.png is no image in 2 f"):
        read_files(tmp_path, label="folder:1")
    with pytest.raises(
        ValueError, match=r"label is 'kind', but .* label=folder:0 for the outermost"
    ):
        read_files(tmp_path, label="kind")


def test_a_later_clients_images_need_no_folders(tmp_path):
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    raw = read_files(tmp_path, later=True, label="folder:1")
    assert not raw.labeled and raw.y.tolist() == [-1]


def test_classes_that_look_alike_or_have_no_image_are_said(tmp_path):
    for name in ("Cat", "cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "1.png")
    (tmp_path / "new").mkdir()
    notes = read_pictures(tmp_path, 0).notes
    assert notes == (
        f"{tmp_path}: the folders Cat and cat are several classes, though they differ in case "
        "alone; write them alike if they mean the same",
        f"{tmp_path}: no image has the class new, which counts as a class all the same; remove its "
        "folder if it is none",
    )
    assert read_pictures(tmp_path, 0, later=True).notes == ()


def test_photos_are_turned_upright(tmp_path):
    """A camera held upright writes its rows sideways, and says so in EXIF (orientation 6: a quarter
    turn). Damaged EXIF says nothing."""
    upright = Image.new("L", (2, 3))
    upright.putdata([0, 50, 100, 150, 200, 250])
    sideways = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name, words in (("a", exif.tobytes()), ("b", b"Exif\0\0II*\0damaged")):
        (tmp_path / name / "ill").mkdir(parents=True)
        sideways.save(tmp_path / name / "ill" / "0.png", exif=words)
    assert read_files(tmp_path / "a").x[0, 0].tolist() == [[0, 50], [100, 150], [200, 250]]
    assert read_files(tmp_path / "b").x[0, 0].tolist() == np.asarray(sideways).tolist()


def test_pictures_of_0_and_1_are_truth_values(tmp_path):
    """As arrays are: divided by 255 they would be nearly black. A later client's are read alike,
    and its ordinary pictures are divided by 255."""
    for name, seed in (("cross", 0), ("ring", 1)):
        (tmp_path / name).mkdir()
        mask = np.random.default_rng(seed).integers(0, 2, (4, 4), dtype=np.uint8)
        Image.fromarray(mask).save(tmp_path / name / "0.png")
    raw = read_files(tmp_path)
    assert raw.x.dtype == np.float32 and np.unique(raw.x).tolist() == [0, 1]
    assert any("all pixels are 0 or 1: truth values, not divided by 255" in n for n in raw.notes)
    card = Card("fedavg", "masks", "mlp", (1, 4, 4), raw.classes, 1.0, 0.5, 0.25)
    found = read_input_files(tmp_path, card).share.everything[:][0].numpy()
    assert found == pytest.approx((raw.x - 0.5) / 0.25)
    Image.fromarray(np.full((4, 4), 255, np.uint8)).save(tmp_path / "ring" / "0.png")
    found = read_input_files(tmp_path, card).share.everything[:][0].numpy()
    assert found.max() == pytest.approx((1 - 0.5) / 0.25)


def test_a_level_of_folders_without_any_image_is_refused(tmp_path):
    (tmp_path / "ill").mkdir()
    with pytest.raises(ValueError, match="image"):
        read_files(tmp_path, label="folder:1")


@pytest.mark.parametrize(
    "names", [("train", "test"), ("Training", "Testing"), ("TRAIN", "TEST"), ("train", "dev")]
)
def test_parts_may_have_other_names(tmp_path, names):
    images(tmp_path, names, ("ill", "well"))
    raw = read_files(tmp_path)
    assert (raw.classes, raw.num_train, len(raw.x)) == (("ill", "well"), 6, 12)
    assert raw.num_validation == (6 if "dev" in names else 0)


def test_folders_that_seem_to_be_parts_are_refused(tmp_path):
    images(tmp_path, ("seg_train", "seg_test"), ("ill", "well"))
    with pytest.raises(ValueError, match="seg_test, seg_train seem to be parts of the data; call"):
        read_files(tmp_path)
    assert read_files(tmp_path, label="folder:1").classes == ("ill", "well")


def test_a_class_may_be_called_train(tmp_path):
    """Without folders of classes, train and test alone hold images without labels."""
    images(tmp_path, ("bus", "train"), ("",))
    raw = read_files(tmp_path)
    assert (raw.classes, raw.y.tolist()) == (("bus", "train"), [0] * 3 + [1] * 3)
    images(tmp_path / "parts", ("test", "train"), ("",))
    assert not read_files(tmp_path / "parts").labeled


@pytest.mark.parametrize("classes", [("ill", "well"), ()])
def test_hidden_files_are_no_images(tmp_path, classes):
    """macOS writes ._0.png beside 0.png on disks that have no room for its attributes."""
    folder = tmp_path / "photos"
    images(folder, classes or ("../photos",), ("",))
    (folder / "".join(classes[:1]) / "._0.png").write_bytes(b"\0\5\26\7")
    raw = read_pictures(folder, 0, later=True)
    assert len(raw.x) == 3 * max(len(classes), 1) and raw.notes == ()
