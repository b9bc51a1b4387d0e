"""Own data that are easily misread: deep pixels, unusual numbers, links, labels and gaps."""

import datasets
import numpy as np
import pytest
from PIL import Image

from fedapps.settings.config import defaults
from partitions.datasets.loading import configured, described
from partitions.datasets.readers import hub
from partitions.datasets.readers.local import read_files, scaled_pixels

pytestmark = pytest.mark.usefixtures("own_cache")


def saved(path, **arrays):
    """The configuration of a run on an .npz of the arrays."""
    np.savez(path, **arrays)
    return defaults() | {"dataset": str(path)}


@pytest.mark.parametrize(
    ("name", "values", "mode"),
    [("a.png", np.uint16([[0, 40_000]]), "I;16"), ("a.tiff", np.float32([[0.0, 0.5]]), "F")],
)
def test_pixels_of_more_than_8_bits_are_refused(tmp_path, name, values, mode):
    """Pillow's `convert` would clip 40 000 to 255, and cut 0.5 to 0."""
    Image.fromarray(values).save(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} has pixels of more .*mode {mode}\); save it"):
        read_files(tmp_path)


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int32])
def test_whole_numbers_up_to_255_in_images_are_bytes(tmp_path, caplog, kind):
    """A pixel of 51 is 0.2 for the model, as it is in a uint8 array."""
    x = np.full((2, 4, 6), 51, kind)
    config = saved(tmp_path / "d.npz", x=x, y=[0, 1])
    assert (described(config).scale, configured(config).x.numpy().dtype) == (255, np.uint8)
    assert "images hold whole numbers up to 51; they are divided by 255" in caplog.text
    assert (
        scaled_pixels(x, "mine", later=True).dtype == np.int64
    )  # a later client's, on a run's scale


@pytest.mark.parametrize(("low", "high"), [(0, 256), (-1, 255)])
def test_other_whole_numbers_in_images_are_refused(tmp_path, low, high):
    np.savez(tmp_path / "d.npz", x=np.array([[[low]], [[high]]]), y=[0, 1])
    with pytest.raises(ValueError, match=rf"d\.npz: .* from {low} to {high}; give bytes from 0"):
        read_files(tmp_path / "d.npz")


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_a_tables_numbers_stay_as_they_are(tmp_path, kind):
    np.savez(tmp_path / "d.npz", x=np.array([[7, 200], [5000, -3]], kind), y=[0, 1])
    raw = read_files(tmp_path / "d.npz")
    assert (raw.x.dtype, raw.x.tolist()) == (np.float32, [[7, 200], [5000, -3]])
    assert not raw.notes


def test_large_floats_in_images_are_warned_of(tmp_path):
    """Standardized ones are not large."""
    for value, said in ((3.5, 0), (254.5, 1)):
        np.savez(tmp_path / "d.npz", x=np.full((2, 4, 6), value, np.float32), y=[0, 1])
        raw = read_files(tmp_path / "d.npz", inputs="image")
        assert raw.x.max() == value
        assert len(raw.notes) == said
    assert "floats from 254.5 to 254.5; only bytes" in raw.notes[0]
    assert "divide these, or set standardize=training-clients" in raw.notes[0]


def test_bytes_that_were_stored_as_floats_are_bytes(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.full((2, 4, 6), 255.0), y=[0, 1])
    raw = read_files(tmp_path / "d.npz", inputs="image")
    assert raw.x.dtype == np.uint8 and raw.x.max() == 255
    assert "whole floats up to 255; they are divided by 255, as bytes are" in raw.notes[0]


def test_a_fourth_channel_may_be_the_last():
    """The first axis of an image is larger than 4, so it does not count channels."""
    assert scaled_pixels(np.zeros((2, 5, 6, 4), np.uint8), "mine").shape == (2, 4, 5, 6)
    assert scaled_pixels(np.zeros((2, 4, 6, 4), np.uint8), "mine").shape == (2, 4, 6, 4)


def test_links_do_not_multiply_images(tmp_path):
    """Links to the data, to a folder around them, and in a circle elsewhere; one link leads to
    other images, which are read once. A class that is a link into the data is none."""
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "cat", data / "dog" / "deep", other / "more"):
        folder.mkdir(parents=True)
        Image.new("L", (2, 2)).save(folder / "0.png")
    links = {
        data / "all": data,
        data / "cat" / "again": data / "cat",
        data / "cat" / "up": tmp_path,
        data / "dog" / "other": other,
        data / "dog" / "twice": other,
        data / "tom": data / "cat",
        other / "circle": other,
    }
    for link, target in links.items():
        link.symlink_to(target, target_is_directory=True)
    raw = read_files(data)
    assert raw.classes == ("cat", "dog")
    assert raw.samples == ("cat/0.png", "dog/deep/0.png", "dog/other/more/0.png")
    assert raw.y.tolist() == [0, 1, 1]


def test_the_order_of_images_is_that_of_torchvision(tmp_path):
    from torchvision.datasets import ImageFolder

    for name in ("b/z.png", "b/a.PNG", "b/c/x.png", "b/c-d/x.png", "a/notes.txt", "a/1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name, "PNG")
    expected = ImageFolder(str(tmp_path))
    raw = read_files(tmp_path)
    assert [str(tmp_path / name) for name in raw.samples] == [f for f, _ in expected.samples]
    assert (raw.y.tolist(), list(raw.classes)) == (expected.targets, expected.classes)


def test_labels_that_leave_most_classes_empty_are_refused(tmp_path):
    """Three labels may stand for at most 10 · 3 + 100 = 130 classes, 1 to 130."""
    for high in (131, 20240002):
        config = saved(tmp_path / f"{high}.npz", x=np.eye(3), y=[1, 3, high])
        with pytest.raises(ValueError, match=f"go up to {high}, but only 3 .*number the classes"):
            configured(config)
    config = saved(tmp_path / "130.npz", x=np.eye(3), y=[1, 3, 130])
    assert described(config).num_classes == 130


def test_labels_from_1_are_classes_that_keep_their_numbers(tmp_path, caplog):
    """A class 0 without samples would be learnt beside them. A gap is a class, years too, and is
    named."""
    assert described(saved(tmp_path / "a.npz", x=np.eye(3), y=[0, 1, 3])).num_classes == 4
    (record,) = caplog.records
    assert "no sample has the class 2" in record.getMessage()
    for first in (1, 2020):
        y = [first, first + 3, first + 1]
        found = configured(saved(tmp_path / f"{first}.npz", x=np.eye(3), y=y))
        assert found.y.tolist() == [0, 3, 1]
        assert found.classes == tuple(str(first + i) for i in range(4))
        assert f"labels are {first} to {first + 3}: 4 classes, called by these" in caplog.text


def test_labels_below_0_are_refused_with_what_is_allowed(tmp_path):
    config = saved(tmp_path / "d.npz", x=np.eye(3), y=[-1, 0, 1])
    words = "row 0 has the label -1; number the classes from 0 on, give them as texts, leave out"
    with pytest.raises(ValueError, match=words):
        configured(config)


def test_marks_of_missing_values_are_gaps(tmp_path):
    """Of `age` a cell of three is a question mark, and one of `site` is empty."""
    (tmp_path / "d.csv").write_text("age,site,kind,size\n1,n,1,5\n?,,x,6\n3,4,2,7\n")
    raw = read_files(tmp_path / "d.csv", label="kind")
    assert np.isnan(raw.x).tolist() == [[False] * 3, [True, True, False], [False] * 3]
    assert raw.inputs.columns[1].categories == ("4", "n")


def test_pictures_that_are_missing_or_broken_are_named_by_row(tmp_path):
    feature = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    whole = tmp_path / "whole.png"
    Image.new("L", (2, 2)).save(whole)
    good = {"bytes": whole.read_bytes(), "path": None}
    for bad in (None, {"bytes": b"no image", "path": None}):
        table = datasets.Dataset.from_dict({"image": [good, bad], "label": [0, 1]}, feature)
        table.to_parquet(tmp_path / "d.parquet")
        with pytest.raises(ValueError, match=r"d\.parquet, row 1 is no whole image \(it is empty"):
            read_files(tmp_path / "d.parquet")
        with pytest.raises(ValueError, match=r"here, row 1 (holds no|is no whole) image"):
            hub._split(table, "here", (1, 2, 2), (), train=True)


def test_a_picture_is_named_whatever_pillow_raises(tmp_path):
    """A ValueError without a name, for a grey value of 999 where 255 is the largest."""
    (tmp_path / "a.pgm").write_text("P2\n2 2\n255\n1 2 3 999\n")
    with pytest.raises(ValueError, match=r"a\.pgm is no whole image"):
        read_files(tmp_path)


def test_columns_of_the_training_samples_alone_are_named(tmp_path):
    train = datasets.Dataset.from_dict({"x": [[1.0]], "label": [0], "site": ["n"]})
    splits = {"train": train, "test": train.remove_columns("site")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="columns that the test samples lack: site; both need"):
        read_files(tmp_path / "d")
