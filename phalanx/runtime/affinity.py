"""What the container may really use: cores by affinity mask and cgroup quota, memory by cgroup limit."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


@functools.cache
def core_list() -> list[int]:
    """The cores this process may run on, whatever single ones its threads keep to later."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_by_node(root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The cores of `core_list`, those of a NUMA node beside each other, so that parts of the list keep to a node."""
    nodes = {core: number for number, cores in _nodes(root).items() for core in cores}
    return sorted(core_list(), key=lambda core: (nodes.get(core, -1), core))


def _nodes(root: Path) -> dict[int, list[int]]:
    """The cores of each NUMA node; none where the system does not tell."""
    found = {}
    for path in root.glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError, ValueError):
            ends = [part.split("-") for part in path.read_text().strip().split(",") if part]
            cores = [core for first, *last in ends for core in range(int(first), int(last[0] if last else first) + 1)]
            found[int(path.parent.name.removeprefix("node"))] = cores
    return found


def keep_to(cores: Iterable[int]) -> set[int]:
    """From now on this thread runs on these cores only, if the system lets it; those it ran on before."""
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # they may have been taken from the process meanwhile
        os.sched_setaffinity(0, cores)
    return before


def confine_to(cores: Iterable[int]) -> None:
    """From now on these are all the cores that this process may use, and what it starts."""
    keep_to(cores)
    core_list.cache_clear()


@contextlib.contextmanager
def on_any_core() -> Iterator[None]:
    """What is started within may run on all of them, though the thread that starts it keeps to a single one."""
    before = keep_to(core_list())
    try:
        yield
    finally:
        keep_to(before)


def usable_cores() -> int:
    """Whole cores this process may keep busy: the affinity mask, cut by a cgroup quota."""
    cores = len(core_list())
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU quota in cores of cgroup v2 or v1, None where there is none."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def free_memory() -> int:
    """Bytes that can still be taken: what the system has available, cut by a cgroup limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (Path("/sys/fs/cgroup") / "memory.max").read_text().strip()
        used = int((Path("/sys/fs/cgroup") / "memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):
        return available
