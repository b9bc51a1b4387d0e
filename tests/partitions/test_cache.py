"""The one copy of a dataset that a machine's processes share."""

import os
from pathlib import Path

import dataset_files
import numpy as np
import pytest
import torch

from fedapps.common import external_code
from fedapps.settings.config import defaults
from partitions import cache
from partitions.cache import Assignment
from partitions.datasets import loading
from partitions.datasets.readers.raw import Raw
from partitions.federations import Federation

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_second_process_maps_the_first_ones_copy(tmp_path, monkeypatch):
    x, y = dataset_files.idx_pairs(tmp_path / "mnist")
    loading.load("mnist", str(tmp_path))
    loading._load.cache_clear()
    monkeypatch.setattr(loading, "_from_folder", None)  # reading the files again would fail
    data = loading.load("mnist", str(tmp_path))
    assert np.array_equal(data.x.numpy(), x)
    assert np.array_equal(data.y.numpy(), y)
    where = data.x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= where < end:
            assert str(tmp_path / "cache") in line  # a file's pages, not memory of our own
            return
    pytest.fail("the inputs lie in no mapping")


def test_what_tells_files_apart(tmp_path, monkeypatch):
    """Path, size, time and the cache's version, each alone; of a file as of a folder."""

    def of(place, content=b"12", seconds=5):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
        os.utime(place, (seconds, seconds))
        return cache.fingerprint(place), cache.fingerprint(place.parent)

    first = of(tmp_path / "one" / "x")
    assert of(tmp_path / "one" / "x") == first
    others = [
        of(tmp_path / "one" / "x", b"123"),
        of(tmp_path / "one" / "x", seconds=6),
        of(tmp_path / "two" / "x"),
    ]
    monkeypatch.setattr(cache, "VERSION", -1)
    others.append(of(tmp_path / "one" / "x"))
    found = [first, *others]
    assert len({one for one, _ in found}) == len({two for _, two in found}) == len(found) == 5


def test_files_behind_links_tell_data_apart(tmp_path):
    """`data/b` links to the folder `elsewhere`, and `data/x` to a file in it. Links to the data
    themselves and to nothing change nothing."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "a", elsewhere):
        folder.mkdir(parents=True)
        (folder / "1").write_bytes(b"1")
    (data / "b").symlink_to(elsewhere)
    (data / "x").symlink_to(elsewhere / "1")
    found = [cache.fingerprint(data)]
    (elsewhere / "2").write_bytes(b"2")
    found.append(cache.fingerprint(data))
    (elsewhere / "1").write_bytes(b"11")
    found.append(cache.fingerprint(data))
    assert len(set(found)) == 3
    (data / "a" / "self").symlink_to(data)
    (data / "nothing").symlink_to(tmp_path / "missing")
    assert cache.fingerprint(data) == found[-1]


def test_the_first_writer_wins_and_reads_what_it_wrote(tmp_path):
    """While one process reads, another one's entry appears: it serves both, nothing else stays."""

    def raw(value):
        return Raw(
            np.full((3, 1), value, np.uint8), np.arange(3), 1, {"who": np.array(["b", "a", "b"])}
        )

    def slow():
        assert cache.cached("entry", lambda: raw(7)).x.flags.owndata is False  # mapped, not kept
        return raw(8)

    found = cache.cached("entry", slow)
    assert found.x.ravel().tolist() == [7, 7, 7]
    assert (found.columns["who"].tolist(), found.num_train) == (["b", "a", "b"], 1)
    assert [path.name for path in cache.cache_dir().iterdir()] == ["entry"]


def test_where_the_cache_is(tmp_path, monkeypatch):
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FEDAPPS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "fedapps"


@pytest.mark.skipif(os.name != "posix", reason="users are POSIX's")
def test_a_user_whom_the_system_does_not_know_has_the_root_folder_as_home(monkeypatch):
    """As Docker gives it to such a user; nothing is read from a folder "~" below the working
    directory."""
    import pwd

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "FEDAPPS_CACHE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert cache.cache_dir() == Path("/.cache/fedapps")
    assert external_code.user_file() == Path("/.config/fedapps/config.toml")


def _size(folder: str) -> int:
    return len(loading.load("mnist", folder).y)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    dataset_files.idx_pairs(tmp_path / "mnist")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert _size(str(tmp_path)) == 200
    assert "set FEDAPPS_CACHE_DIR" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize(
    ("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o007, 0o770, 0o660)]
)
def test_other_users_may_read_what_the_umask_lets_them(umask, folder, file):
    before = os.umask(umask)
    try:
        cache.cached("entry", lambda: Raw(np.zeros((3, 1), np.uint8), np.arange(3), 1))
    finally:
        os.umask(before)
    entry = cache.cache_dir() / "entry"
    assert entry.stat().st_mode & 0o777 == folder
    assert {path.stat().st_mode & 0o777 for path in entry.iterdir()} == {file}


@pytest.mark.parametrize("file", [cache.DATA, cache.META])
def test_an_entry_that_cannot_be_read_is_done_without(tmp_path, file, caplog):
    dataset_files.idx_pairs(tmp_path / "mnist")
    assert _size(str(tmp_path)) == 200
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / file).unlink()
    loading._load.cache_clear()
    assert _size(str(tmp_path)) == 200
    assert entry.name in caplog.text and "set FEDAPPS_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("file", [cache.DATA, cache.META])
@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100], ids=["empty", "other", "zeros"])
def test_a_damaged_entry_is_written_again(file, content, tmp_path, caplog):
    """As after a power failure. Every command ended in a traceback."""
    dataset_files.idx_pairs(tmp_path / "mnist")
    assert _size(str(tmp_path)) == 200
    (entry,) = (tmp_path / "cache").iterdir()
    whole = (entry / file).read_bytes()
    (entry / file).write_bytes(content)
    for _ in range(2):
        loading._load.cache_clear()
        assert _size(str(tmp_path)) == 200
    assert caplog.text.count(f"{entry} is damaged") == 1
    assert (entry / file).read_bytes() == whole


def test_what_a_killed_process_has_begun_is_removed_after_a_day(tmp_path):
    """Of a dataset it may be gigabytes. A present one stays, and what is no entry."""
    key = cache.cache_key("mine", files="x")
    names = (f"{key}.old_1234", f"{key}.new_1234", "archive.20240101", f"{key}.tar")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        if "new" not in name:
            os.utime(tmp_path / name, (1000, 1000))
    cache._remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_failed_read_leaves_nothing(tmp_path):
    dataset_files.idx_pairs(tmp_path / "mnist")
    file = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is truncated"):
        loading.load("mnist", str(tmp_path))
    assert not (tmp_path / "cache").exists()


def divide(**changes) -> Federation:
    named = {k.replace("partition_", "partition.").replace("_", "-"): v for k, v in changes.items()}
    return Federation(defaults() | named)


def test_a_deal_is_remembered_and_the_same(monkeypatch):
    """The second time flwr-datasets is not asked; another seed or rule is dealt anew."""
    config = {"num_clients": 6, "partition": "class-fraction", "partition_public_samples": 50}
    first = divide(**config)
    monkeypatch.setattr(Federation, "_assign", None)  # dealing again would fail
    second = divide(**config)
    for client in range(6):
        for part in ("train", "validation", "test", "everything", "public"):
            mine, theirs = (getattr(fed.share(client), part) for fed in (first, second))
            assert torch.equal(mine.index, theirs.index)
        assert first.share(client).attributes == second.share(client).attributes
    for other in ({"seed": 1}, {"partition": "iid"}, {"partition_public_samples": 49},
                  {"train_fraction": 0.7}, {"num_clients": 7}):  # fmt: skip
        with pytest.raises(TypeError, match="not callable"):
            divide(**config | other)


def test_what_a_deal_is_remembered_by(monkeypatch):
    """Dataset, settings and sources; of a dataset without a name nothing is."""
    made = []

    def make():
        made.append(len(made))
        rows = [np.arange(3), np.arange(3, 4), np.arange(4, 9)]
        return Assignment.of(rows, np.array([9 + made[-1]]), True, [{"writer": i} for i in "abc"])

    def number(*what):
        deal = cache.cached_assignment(*what, make)
        assert deal.pooled and [len(rows) for rows in deal.rows] == [3, 1, 5]
        assert deal.rows[2].tolist() == [4, 5, 6, 7, 8]
        assert deal.attributes[1] == {"writer": "b"}
        return int(deal.public[0]) - 9

    got = ("one", {"seed": 1}), ("one", {"seed": 1}), ("two", {"seed": 1}), ("one", {"seed": 2})
    assert [number(*what) for what in got] == [0, 0, 1, 2]
    monkeypatch.setattr(cache, "_code", lambda: "changed")
    assert [number("one", {"seed": 1}), number("", {}), number("", {})] == [3, 4, 5]


def test_a_damaged_deal_is_dealt_again(tmp_path):
    first = divide(num_clients=4)
    (file,) = (tmp_path / "cache" / "deals").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    second = divide(num_clients=4)
    assert torch.equal(first.share(3).everything.index, second.share(3).everything.index)


def test_few_deals_are_kept(tmp_path, monkeypatch):
    """The latest ones: each file is made a second older than the next."""
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    folder, files = tmp_path / "cache" / "deals", []
    for seed in range(5):
        divide(num_clients=4, seed=seed)
        (new,) = set(folder.iterdir()) - set(files)
        os.utime(new, (1000 + seed, 1000 + seed))
        files.append(new)
    assert set(folder.iterdir()) == set(files[2:])
