"""``module:NAME``: what is found, what of it is a setting, and what was kept of an older source."""

import importlib
import sys

import numpy as np
import pytest

from fedapps.common import external_code
from partitions.datasets import loading

SOURCE = """
import numpy as np

Pair = tuple[np.ndarray, np.ndarray]

def made(count: int = 3, *, top_k: int = 2, tags: tuple = (), novel: bool = True, seed: int = 0
         ) -> Pair:
    x = np.full((count, 2), {value}, np.float32)
    return x, np.arange(count) % top_k

class Own:
    pass
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes the module `their_own`, which this process then imports anew."""
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDAPPS_ALLOW", "their_own:made")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of two sources of one second and size

    def write(value):
        (tmp_path / "their_own.py").write_text(SOURCE.replace("{value}", str(value)))
        for forget in (external_code._imported, external_code.keywords, loading._own):
            forget.cache_clear()
        sys.modules.pop("their_own", None)
        importlib.invalidate_caches()
        return "their_own:made"

    yield write
    write(0)
    sys.modules.pop("their_own", None)


@pytest.mark.parametrize(
    ("name", "found"),
    [("a.b:c", True), ("a:b", True), ("fedavg", False), ("a:b:c", False), ("a-b:c", False),
     (":c", False), ("a:", False), ("C:/data", False)],
)  # fmt: skip
def test_what_is_a_reference(name, found):
    assert external_code.is_reference(name) == found


def test_settings_are_defaults_that_a_configuration_can_hold(written):
    """Neither tuples nor what the package itself fills."""
    function = external_code.load(written(1))
    assert external_code.declared(function) == {"count": 3, "top-k": 2}


def test_options_are_those_of_the_section_by_keyword():
    config = {"lr": 0.1, "a:b.top-k": 2, "a:c.top-k": 3, "a:b.n": 4, "num-clients": 5}
    assert external_code.options(config, "a:b") == {"top_k": 2, "n": 4}
    assert external_code.options(config, "") == {"lr": 0.1, "num_clients": 5}


def test_a_function_gets_what_it_takes_and_options_win():
    def taken(a, b=2, **more):
        return a, b, more

    assert external_code.call_with("f", taken, {"a": 1, "c": 3}, {"b": 5, "d": 6}) == (
        1,
        5,
        {"d": 6},
    )
    assert external_code.call_with("f", taken, {"a": 1, "b": 3}, {}) == (1, 3, {})
    assert external_code.call_with("f", taken, {"a": 1, "b": 3}, {"b": 5}) == (1, 5, {})
    with pytest.raises(ValueError, match="'f' needs 'a'; it is given c"):
        external_code.call_with("f", taken, {"c": 3}, {})


def test_a_table_adopts_each_reference_once(written):
    made = []
    table = external_code.Registry("thing", {"one": 1}, lambda name, of: made.append(name) or name)
    name = written(1)
    assert (table["one"], table[name], table[name], made) == (1, name, name, [name])
    assert list(table) == ["one"]  # adopted ones are nobody's choice
    with pytest.raises(ValueError, match="unknown thing 'two'; known: one, and module:NAME"):
        table.check("two")


def test_own_data_is_kept_by_its_options_and_its_source(written):
    """Three samples of value 1, two for other options; another source gives other values."""
    first = loading.load(written(1), image_size=0)
    assert first.x.tolist() == [[1, 1]] * 3 and first.y.tolist() == [0, 1, 0]
    assert (first.num_train, first.info.num_classes, first.info.scale) == (3, 2, 1.0)
    other = loading.load(written(1), image_size=0, count=2, top_k=1)
    assert (other.x.tolist(), other.info.num_classes) == ([[1, 1]] * 2, 1)
    changed = loading.load(written(2), image_size=0)
    assert changed.x.tolist() == [[2, 2]] * 3
    assert len({data.key for data in (first, other, changed)}) == 3


def test_own_images_are_kept_by_their_size(written, tmp_path):
    from PIL import Image

    for number, width in enumerate((4, 6)):
        (tmp_path / "own" / str(number)).mkdir(parents=True)
        Image.new("L", (width, 4), 90).save(tmp_path / "own" / str(number) / "0.png")
    (tmp_path / "own" / "2").mkdir()  # a class without a picture
    written(0)
    found = [loading.load("own", str(tmp_path), image_size=size) for size in (4, 2)]
    assert [data.info.shape for data in found] == [(1, 4, 4), (1, 2, 2)]
    assert (found[0].info.scale, found[0].info.num_classes) == (255, 3)
    assert found[0].classes == ("0", "1", "2")
    assert np.unique(found[1].x).tolist() == [90]


def test_modules_are_found_where_the_command_runs(tmp_path, monkeypatch):
    """Behind what PYTHONPATH has already; not in a folder with names of the package's."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "mine")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    external_code.find_here()
    assert external_code.os.environ["PYTHONPATH"] == f"{tmp_path}/work/mine:{tmp_path}/work"
    assert sys.path[-1] == str(tmp_path / "work")
    (tmp_path / "clients").mkdir()
    monkeypatch.chdir(tmp_path)
    external_code.find_here()
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("name", "root", "expected"),
    [("digits", "", "embedded"), ("voices", "", "synthesised"), ("mnist", "", "hub ylecun/mnist"),
     ("fashion-mnist", "", "hub zalando-datasets/fashion_mnist"),
     ("stl10", "nowhere", "hub (no copy)"), ("mnist", "there", "there/mnist"),
     ("own.npz", "there", "there/own.npz"), ("here.npz", "there", "here.npz"),
     ("their_own:made", "", "their_own:made")],
)  # fmt: skip
def test_where_a_dataset_comes_from(written, tmp_path, monkeypatch, name, root, expected):
    written(0)
    monkeypatch.delenv("FEDAPPS_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "mnist").mkdir(parents=True)
    (tmp_path / "fashion-mnist").mkdir()  # not looked at where no folder of data is named
    for name_ in ("there/own.npz", "there/here.npz", "here.npz"):  # of the last, the path as it is
        np.savez(tmp_path / name_, x=np.eye(2), y=[0, 1])
    assert loading.source(name, root) == expected
    assert (loading.own_path(name, root) is not None) == name.endswith(".npz")
    monkeypatch.setenv("FEDAPPS_DATA_DIR", root)  # the same where the environment says so
    assert loading.source(name) == expected
