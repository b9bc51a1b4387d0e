"""``module:NAME``: what is found, what of it is a setting, and what was kept of an older source."""

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from small_runs import fedapps

import partitions
from fedapps.common import external_code
from fedapps.common.settings import keyword_arguments
from fedapps.settings.config import defaults
from partitions import cache
from partitions.datasets import loading
from partitions.federations import Federation

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
        loading._held.clear()
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
    assert keyword_arguments(config, "a:b") == {"top_k": 2, "n": 4}
    assert keyword_arguments(config, "") == {"lr": 0.1, "num_clients": 5}


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
    with pytest.raises(ValueError, match=r"unknown thing 'ones' \(did you mean 'one'\?\); known"):
        table.check("ones")


def test_own_data_is_kept_by_its_options_and_its_source(written):
    """Three samples of value 1, two for other options; another source gives other values."""
    first = loading.load(written(1), image_size=0)
    assert first.x.tolist() == [[1, 1]] * 3 and first.y.tolist() == [0, 1, 0]
    assert (first.num_train, first.info.num_classes, first.info.scale) == (3, 2, 1.0)
    other = loading.load(written(1), image_size=0, count=2, top_k=2)
    assert (other.x.tolist(), other.info.num_classes) == ([[1, 1]] * 2, 2)
    changed = loading.load(written(2), image_size=0)
    assert changed.x.tolist() == [[2, 2]] * 3
    assert len({data.key for data in (first, other, changed)}) == 3


READING = """
import numpy as np

from fedapps.partitions import Info, RowsPartitioner

calls = []

def named(*, path: str = "", mode: str = "") -> tuple[np.ndarray, np.ndarray]:
    calls.append(path)
    y = np.loadtxt(path, dtype=int) if path else np.arange(4) % 2
    return np.ones((len(y), 2), np.float32), y

def uncached(*, cache: bool = False) -> tuple[np.ndarray, np.ndarray]:
    calls.append("uncached")
    return np.ones((4, 2), np.float32), np.arange(4) % 2

class Listed(RowsPartitioner):
    def __init__(self, num_partitions: int, *, path: str = "") -> None:
        super().__init__(num_partitions)
        self.first = int(open(path).read())

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), [self.first])
"""


@pytest.fixture
def reading(tmp_path, monkeypatch):
    """The module `reading`, whose functions read a file that a setting names."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "reading.py").write_text(READING)
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    names = ["reading:named", "reading:uncached", "reading:Listed"]
    monkeypatch.setenv("FEDAPPS_ALLOW", ",".join(names))
    yield importlib.import_module("reading")
    sys.modules.pop("reading")
    partitions.forget_changed()
    for forget in (external_code._imported, loading._own):
        forget.cache_clear()
    loading._held.clear()


def as_in_a_new_process():
    loading._own.cache_clear()


def test_a_changed_file_that_a_setting_names_is_read_again(reading, tmp_path):
    """The file's labels change, then its time alone; another process finds the latter's data kept.
    A folder that a setting names counts with its files."""
    file = tmp_path / "folder" / "labels.txt"
    file.parent.mkdir()
    options = {"path": str(file), "mode": str(file.parent)}
    keys = []
    for text, calls in (("0 1 1", 1), ("0 1 0", 2)):
        file.write_text(text)
        os.utime(file, (5 + calls, 5 + calls))
        as_in_a_new_process()
        data = loading.load("reading:named", image_size=0, **options)
        keys.append(data.key)
        assert data.y.tolist() == [int(word) for word in text.split()]
        assert len(reading.calls) == calls
    as_in_a_new_process()
    assert loading.load("reading:named", image_size=0, **options).y.tolist() == [0, 1, 0]
    assert len(reading.calls) == 2 and len({*keys}) == 2
    (file.parent / "more.txt").write_text("of the folder")
    as_in_a_new_process()
    loading.load("reading:named", image_size=0, **options)
    assert len(reading.calls) == 3


@pytest.mark.parametrize("text", ["/", ".", "..", "~"])
def test_a_setting_that_names_a_folder_around_everything_walks_no_disk(
    text, reading, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("it walks"))
    assert len(loading.load("reading:named", image_size=0, mode=text).y) == 4


@pytest.mark.parametrize(
    "text", ["../../outside", "/tmp/outside", "a/b", "\0", "x" * 5000, "C:\\outside", "con", "é"]
)
def test_no_text_of_a_setting_is_part_of_a_path(text, reading, tmp_path):
    loading.load("reading:named", image_size=0, mode=text)
    (entry,) = (tmp_path / "cache").iterdir()
    assert re.fullmatch(r"reading_named-[0-9a-f]{32}", entry.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "code"]
    np.savez(tmp_path / "own.npz", **{"x": np.eye(2), "kind": ["a", "b"], "y" * 300: [0, 1]})
    with contextlib.suppress(ValueError):
        loading.load(str(tmp_path / "own.npz"), image_size=0, label_column="y" * 300)
    assert all(re.fullmatch(r"\w+-[0-9a-f]{32}", p.name) for p in (tmp_path / "cache").iterdir())
    with pytest.raises(ValueError, match="it would lead out of the cache"):
        cache.cached(f"../{text}", lambda: None)


def test_a_function_without_a_cache_is_called_by_each_process(reading, tmp_path):
    first = loading.load("reading:uncached", image_size=0)
    assert loading.load("reading:uncached", image_size=0) is first
    as_in_a_new_process()
    second = loading.load("reading:uncached", image_size=0)
    assert reading.calls == ["uncached"] * 2 and first.key == second.key
    assert not (tmp_path / "cache").exists()


def test_a_changed_file_of_a_partition_deals_anew(reading, tmp_path):
    """The file says how many of the digits the first client gets."""
    file = tmp_path / "first.txt"
    config = {"partition": "reading:Listed", "num-clients": 2, "reading:Listed.path": str(file)}
    found = []
    for count in (5, 17):
        file.write_text(f"{count}")
        found.append(len(Federation(defaults() | config).share(0).everything))
    assert found == [5, 17]


def test_source_that_was_edited_after_its_import_is_not_taken_for_what_ran(written, tmp_path):
    """Else the old code's data would be kept as the new code's."""
    first = loading.load(written(1), image_size=0)
    (tmp_path / "their_own.py").write_text(SOURCE.replace("{value}", "2"))
    loading._own.cache_clear()
    assert loading.load("their_own:made", image_size=0).key == first.key
    assert loading.load(written(2), image_size=0).x.tolist() == [[2, 2]] * 3


def test_a_process_reads_files_again_that_changed_when_it_begins_another_run(own_data, tmp_path):
    """As a notebook's does; unchanged data stay the same object."""
    file, config = own_data
    assert partitions.federation(config) is partitions.federation(config)
    before = partitions.federation(config)
    partitions.forget_changed()
    assert partitions.federation(config) is before
    np.savez(file, x=np.ones((30, 2), np.float32), y=np.arange(30) % 3)
    said = fedapps(
        "run", f"dataset={file}", "num-clients=4", "rounds=1", "model=mlp-small", "partition=iid",
        "--engine", "in-process", "--output", tmp_path / "out",
    )  # fmt: skip
    assert "novel" in said
    after = partitions.federation(config)
    assert (len(before.dataset.y), len(after.dataset.y), after.info.num_classes) == (20, 30, 3)


def test_data_whose_code_is_not_allowed_any_more_are_forgotten(written, monkeypatch):
    loading.load(written(1), image_size=0)
    external_code._imported.cache_clear()
    monkeypatch.setenv("FEDAPPS_ALLOW", "")
    partitions.forget_changed()
    assert not loading._held


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A file of own data, and the configuration of a federation of it."""
    partitions.forget_changed()  # files of earlier tests, which are gone by now
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "own.npz"
    np.savez(file, x=np.ones((20, 2), np.float32), y=np.arange(20) % 2)
    return file, defaults() | {"dataset": str(file), "num-clients": 4, "partition": "iid"}


def test_a_changed_reader_of_an_own_entry_reads_again(tmp_path, monkeypatch):
    """An `Info` of one's own reads a folder by a function of its module."""
    source = (
        "import numpy as np\nfrom fedapps.partitions import Info\n"
        "from partitions.datasets.readers.raw import Raw\n"
        "def read(folder):\n    return Raw(np.full((4, 2), {value}, np.float32), np.arange(4), 4)\n"
        "ENTRY = Info('mine', (2,), 4, 'files', scale=1.0, read=read)\n"
    )
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDAPPS_ALLOW", "entry_code:ENTRY")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    for value in (1, 2):
        (tmp_path / "entry_code.py").write_text(source.format(value=value))
        sys.modules.pop("entry_code", None)
        importlib.invalidate_caches()
        external_code._imported.cache_clear()
        loading._load.cache_clear()
        found = loading.load("entry_code:ENTRY", str(tmp_path / "data"))
        assert found.x.tolist() == [[value] * 2] * 4
    sys.modules.pop("entry_code")
    loading._held.clear()


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


@pytest.mark.parametrize("packed", [False, True])
def test_the_source_of_a_module_that_is_gone(packed, tmp_path, monkeypatch):
    """A module of a zip archive has a source too; a source that is gone has no digest."""
    monkeypatch.setenv("FEDAPPS_ALLOW", "packed_code:made,packed_code:other")
    code = "def made():\n    return 1\n\n\nother = made\n"
    folder = tmp_path / "code"
    if packed:
        with zipfile.ZipFile(folder, "w") as archive:
            archive.writestr("packed_code.py", code)
    else:
        folder.mkdir()
        (folder / "packed_code.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    expected = hashlib.blake2b(code.encode(), digest_size=8).hexdigest()
    assert external_code.source_code("packed_code:made") == expected
    shutil.move(folder, tmp_path / "moved")
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"packed_code was imported from .* put the file back"):
        external_code.load("packed_code:other")
