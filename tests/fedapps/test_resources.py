"""Memory and processors of a process in control groups: trees of files as Linux shows them."""

import math
import os

import psutil
import pytest

from fedapps.common import memory_limits, resources
from fedapps.common.resources import cpus_of_groups, memory_left_in_groups
from fedapps.engines import flower, ray_engine
from fedapps.planning import make_jobs
from fedapps.settings.config import defaults

GB = 10**9
MOUNT_1 = "40 30 0:40 {root} /sys/fs/cgroup/{names} rw,nosuid shared:9 - cgroup cgroup rw,{names}\n"
MOUNT_2 = "41 30 0:41 {root} /sys/fs/cgroup{place} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = "23 1 8:1 / / rw - ext4 /dev/sda rw\n30 23 0:29 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"


@pytest.fixture
def tree(tmp_path):
    """Writes the process's groups and the mounts below a folder, which it returns."""

    def write(cgroup, mounts):
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text(OTHERS + mounts)
        return tmp_path

    return write


def group(root, path, **files):
    """A group's folder; the first "_" of a file's name stands for the dot."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def v2(root, path, limit, usage, cached=0, **files):
    stat = f"anon 5\ninactive_file {cached}\nactive_file 70"
    group(root, path, memory_max=limit, memory_current=usage, memory_stat=stat, **files)


def v1(root, path, limit, usage, cached=0):
    stat = f"inactive_file 1\ntotal_inactive_file {cached}"
    names = {"memory_limit_in_bytes": limit, "memory_usage_in_bytes": usage, "memory_stat": stat}
    group(root, f"memory/{path}", **names)


def test_version_2_what_is_used_counts_and_idle_cached_files_do_not(tree):
    """8 GB less 3 GB in use, where 1 GB of these are cached files: 6 GB."""
    root = tree("0::/job\n", MOUNT_2.format(root="/", place=""))
    v2(root, "job", 8 * GB, 3 * GB, cached=GB)
    assert memory_left_in_groups(root) == 6 * GB


def test_version_2_the_tightest_of_nested_groups_decides(tree):
    """The process's own group states no limit; the one around it leaves 4 − 3 = 1 GB, since others
    use it as well, and the outermost one 9 GB. The root of the tree has no such files."""
    root = tree("0::/slice/service/job\n", MOUNT_2.format(root="/", place=""))
    v2(root, "slice", 10 * GB, GB)
    v2(root, "slice/service", 4 * GB, 3 * GB)
    v2(root, "slice/service/job", "max", GB)
    assert memory_left_in_groups(root) == GB
    group(root, "slice/service/job", memory_high=int(1.5 * GB))  # beyond it the system slows it
    assert memory_left_in_groups(root) == GB / 2
    v2(root, "slice/service/job", "max", 2 * GB)
    assert memory_left_in_groups(root) == 0  # above the limit: nothing, no negative number


def test_version_1_nested(tree):
    """As a job of a batch system: 6 − 2 GB in the job's group, 5 − 4 + 0.5 GB in its user's."""
    cgroup = "9:name=systemd:/x\n4:memory:/slurm/uid/job\n1:cpuacct,cpu:/\n0::/\n"
    root = tree(cgroup, MOUNT_1.format(root="/", names="memory"))
    v1(root, "", 2**63 - 4096, 50 * GB)
    v1(root, "slurm/uid", 5 * GB, 4 * GB, cached=GB // 2)
    v1(root, "slurm/uid/job", 6 * GB, 2 * GB)
    assert memory_left_in_groups(root) == 1.5 * GB


@pytest.mark.parametrize("path", ["/docker/1f", "/../other"])
def test_a_container_sees_its_own_group_at_the_top(tree, path):
    """Its path is that of the host, which does not exist inside."""
    root = tree(f"4:memory:{path}\n", MOUNT_1.format(root="/docker/1f", names="memory"))
    v1(root, "", 3 * GB, GB)
    assert memory_left_in_groups(root) == 2 * GB


def test_both_versions_mounted(tree):
    """Memory belongs to version 1, and processors to version 2."""
    mounts = MOUNT_1.format(root="/", names="memory") + MOUNT_2.format(root="/", place="/unified")
    root = tree("4:memory:/a\n0::/b\n", mounts)
    v1(root, "a", 3 * GB, GB)
    group(root, "unified/b", cpu_max="150000 100000")
    assert memory_left_in_groups(root) == 2 * GB
    assert cpus_of_groups(root) == 1.5


def test_no_limits(tree, tmp_path):
    assert memory_left_in_groups(tmp_path) == cpus_of_groups(tmp_path) == math.inf  # no Linux
    root = tree("0::/job\n", MOUNT_2.format(root="/", place=""))
    v2(root, "job", "max", GB, cpu_max="max 100000")
    assert memory_left_in_groups(root) == cpus_of_groups(root) == math.inf
    mounts = MOUNT_1.format(root="/", names="memory") + MOUNT_1.format(root="/", names="cpu")
    root = tree("4:memory:/\n1:cpu:/\n", mounts)
    v1(root, "", 2**63 - 4096, GB)
    group(root, "cpu", **{"cpu_cfs_quota_us": -1, "cpu_cfs_period_us": 100_000})
    assert memory_left_in_groups(root) == cpus_of_groups(root) == math.inf


def test_quotas_of_processors(tree):
    """Two and a half processors, of four in the group around."""
    root = tree("0::/slice/job\n", MOUNT_2.format(root="/", place=""))
    group(root, "slice", cpu_max="400000 100000")
    group(root, "slice/job", cpu_max="250000 100000")
    assert cpus_of_groups(root) == 2.5
    root = tree("3:cpuacct,cpu:/job\n", MOUNT_1.format(root="/", names="cpuacct,cpu"))
    quota = {"cpu_cfs_quota_us": 50_000, "cpu_cfs_period_us": 100_000}
    group(root, "cpuacct,cpu/job", **quota)
    assert cpus_of_groups(root) == 0.5


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (2.5, 3), (3.0, 3), (math.inf, 12)])
def test_a_part_of_a_processor_counts_as_one(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(resources, "cpus_of_groups", lambda: quota)
    assert resources.num_cpus() == expected


def test_the_machine_bounds_what_groups_leave(monkeypatch):
    available = psutil.virtual_memory().available
    assert 0 < resources.memory_left() < 1.5 * available
    monkeypatch.setattr(resources, "memory_left_in_groups", lambda: 1000.0)
    assert resources.memory_left() == 1000


def test_data_may_take_half_of_what_is_left(monkeypatch):
    monkeypatch.delenv(memory_limits.VARIABLE, raising=False)
    monkeypatch.setattr(memory_limits, "memory_left", lambda: 2 * GB)
    memory_limits.check_size(GB, "x.npz")
    with pytest.raises(ValueError, match=r"takes 1\.5 GB of memory; the limit is 1 GB"):
        memory_limits.check_size(1.5 * GB, "x.npz")


def test_engines_use_the_processors_of_the_process(monkeypatch, tmp_path):
    """Ray's and Flower's own numbers would be those of the machine."""
    given = []

    class Link:
        def submit(self, config, federation):
            given.append(federation)
            return 1

    def init(**options):
        given.append(options["num_cpus"])
        raise RuntimeError("busy")

    monkeypatch.setattr(flower, "num_cpus", lambda: 3)
    monkeypatch.setattr(ray_engine, "num_cpus", lambda: 3)
    monkeypatch.setattr(ray_engine, "_init", init)
    flower._submit(Link(), make_jobs(defaults(), ["fedavg"], [0], tmp_path), 0.0)
    assert {"num-supernodes=3", "init-args-num-cpus=3"} < set(given.pop().split())
    with pytest.raises(RuntimeError, match="Ray did not start"), ray_engine.ray_cluster():
        pass
    assert given == [3] * ray_engine.MAX_STARTS
