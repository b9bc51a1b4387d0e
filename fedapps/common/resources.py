"""Memory and processors that this process may still use.

A container, a batch job and a service are control groups of Linux. Their limits, and those of the
groups around them, are often below what the machine has. Versions 1 and 2 of control groups are
read, and both where a system mounts both (https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
and …/cgroup-v2.html). psutil knows the machine alone; joblib and Ray read one group, and nothing of
what is already used in it."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

ROOT = Path("/")
NO_LIMIT = 2**60  # bytes; without a limit, version 1 states 2⁶³ less a page


class MemoryFiles(NamedTuple):
    """The files of a group that say how much memory it may use and uses, in bytes."""

    limits: tuple[str, ...]
    usage: str
    cached_files: str  # entry of memory.stat


V1 = MemoryFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
V2 = MemoryFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def memory_left() -> int:
    """Bytes that this process can still take: what is available on the machine, or less by the
    limits of its control groups."""
    return int(min(psutil.virtual_memory().available, memory_left_in_groups()))


def num_cpus() -> int:
    """Processors that this process can use at a time: those that it may run on, or fewer by the
    quotas of its control groups, rounded up."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cpus_of_groups())))


def memory_left_in_groups(root: Path = ROOT) -> float:
    """Bytes that the process's control groups leave it, infinity without a limit.

    `root` is the folder that holds proc and what is mounted. Cached files that were not used of
    late do not count: the system drops them before it refuses memory."""
    left = [math.inf]
    for group in _groups("memory", root):
        for files in (V1, V2):
            limit = min(_limit(group / name) for name in files.limits)
            used = _number(group / files.usage) - _statistic(group, files.cached_files)
            left.append(max(0.0, limit - used))
    return min(left)


def cpus_of_groups(root: Path = ROOT) -> float:
    """Processors, or parts of one, that the quotas of the process's control groups amount to;
    infinity without a quota. `root` as in `memory_left_in_groups`."""
    cpus = [math.inf]
    for group in _groups("cpu", root):
        words = _text(group / "cpu.max").split()  # e.g. "max 100000"
        if len(words) == 2 and words[0] != "max":
            cpus.append(int(words[0]) / int(words[1]))
        quota = _number(group / "cpu.cfs_quota_us")  # -1: none
        period = _number(group / "cpu.cfs_period_us")
        if quota > 0 and period > 0:
            cpus.append(quota / period)
    return min(cpus)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups with the controller, and of the groups around them."""
    paths = _paths_of_groups(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # The number of fields before " - " varies; those behind it are kind, device and options.
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split()[:3]
        # Version 1 mounts each controller by itself, version 2 all of them at once.
        wanted = ""
        if kind == "cgroup":
            wanted = controller
            if controller not in options.split(","):
                continue
        elif kind != "cgroup2":
            continue
        if wanted not in paths:
            continue
        fields = mount.split()
        mounted_group = _unescaped(fields[3])
        place = _unescaped(fields[4])
        top = root / place.lstrip("/")
        try:
            inside = PurePosixPath(paths[wanted]).relative_to(mounted_group)
        except ValueError:  # the container sees its own group alone, at the top
            inside = PurePosixPath()
        group = top / inside
        yield group
        # The limits of a group hold for all groups inside.
        while group != top:
            group = group.parent
            yield group


def _paths_of_groups(root: Path) -> dict[str, str]:
    """The path of the process's group by controller of version 1; that of version 2 under ""."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _unescaped(word: str) -> str:
    r"""A path of mountinfo, in which a blank is written as \040."""
    return word.replace(r"\040", " ")


def _limit(file: Path) -> float:
    """A limit in bytes; infinity where the file is missing or states none."""
    text = _text(file).strip()
    if not text.isdigit():  # "max", or the file is missing
        return math.inf
    limit = int(text)
    return limit if limit < NO_LIMIT else math.inf


def _number(file: Path) -> int:
    """The number in a file, 0 if it is missing."""
    with suppress(ValueError):
        return int(_text(file))
    return 0


def _statistic(group: Path, name: str) -> int:
    """An entry of the group's memory.stat, 0 if it is missing."""
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _text(file: Path) -> str:
    """A file's text, "" if it cannot be read: another system, or a group without the controller."""
    with suppress(OSError):
        return file.read_text("utf-8")
    return ""
