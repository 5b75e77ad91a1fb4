"""Who uses the cores this run counts on, as the kernel tells: totals now, and shares between two readings.

`runs/neighbours.py` reads every few seconds and decides what to make of it.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.runtime.affinity import cgroup_quota, core_list

PROC = Path("/proc")
BUSY = (0, 1, 2, 5, 6, 7)  # of a core's line in /proc/stat: user, nice, system, irq, softirq, steal


@dataclass(frozen=True)
class CoreTimes:
    """Running totals in seconds; the shares between two of them are what matters."""

    clock: float
    busy: float  # all cores of this run together, with whatever
    processes: dict[int, float]  # CPU time of each process of this run
    threads: dict[int, tuple[float, float]]  # for each of its threads: had a core, and was ready but waited for one

    def since(self, before: CoreTimes) -> CoreShares:
        """What happened between an earlier reading and this one; what began in between counts from its start."""
        seconds = max(self.clock - before.clock, 1e-9)
        own = sum(used - before.processes.get(process, 0.0) for process, used in self.processes.items())
        none = (0.0, 0.0)
        ran = sum(one[0] - before.threads.get(thread, none)[0] for thread, one in self.threads.items())
        waited = sum(one[1] - before.threads.get(thread, none)[1] for thread, one in self.threads.items())
        return CoreShares(
            max(self.busy - before.busy - own, 0.0) / seconds,
            (ran + waited) / seconds,
            max(waited, 0.0) / max(ran + waited, 1e-9),
        )


@dataclass(frozen=True)
class CoreShares:
    """How the cores were used for a while."""

    others: float  # cores that processes of others used
    wanted: float  # cores that this run's threads used, or waited for
    waiting: float  # share of that which they waited


def core_times(proc: Path = PROC) -> CoreTimes | None:
    """The totals now. None where they say nothing: under a quota, where the cores are shared with others anyway, or
    where the kernel does not tell which processes are the run's."""
    me = str(os.getpid())
    if cgroup_quota() is not None or not (proc / me / "task" / me / "children").exists():
        return None
    try:
        family = _family(os.getpid(), proc)
        processes = {process: used for process in family if (used := _cpu_time(process, proc)) is not None}
        threads = {thread: times for process in family for thread, times in _threads(process, proc).items()}
        return CoreTimes(time.perf_counter(), _busy(proc), processes, threads)
    except (OSError, ValueError, IndexError):
        return None


def _busy(proc: Path) -> float:
    cores, ticks = {f"cpu{core}" for core in core_list()}, 0
    for line in (proc / "stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in cores:
            ticks += sum(int(numbers[place]) for place in BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(process: int, proc: Path) -> list[int]:
    """A process and all that descend from it."""
    family = [process]
    for member in family:  # which grows
        with contextlib.suppress(OSError):  # it may be gone
            for thread in (proc / str(member) / "task").iterdir():
                with contextlib.suppress(OSError):
                    family.extend(map(int, (thread / "children").read_text().split()))
    return family


def _cpu_time(process: int, proc: Path) -> float | None:
    with contextlib.suppress(OSError):
        fields = (proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime
    return None


def _threads(process: int, proc: Path) -> dict[int, tuple[float, float]]:
    times = {}
    with contextlib.suppress(OSError):
        for thread in (proc / str(process) / "task").iterdir():
            with contextlib.suppress(OSError):
                ran, waited, *_ = (thread / "schedstat").read_text().split()
                times[int(thread.name)] = (int(ran) / 1e9, int(waited) / 1e9)
    return times
