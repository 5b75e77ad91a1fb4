"""Who uses the cores: readings of /proc, from a tree made by hand and from the real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.runtime import affinity, cores
from phalanx.runtime.cores import CoreShares, CoreTimes, core_times

TICK = os.sysconf("SC_CLK_TCK")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def process(proc: Path, number: int, ticks: tuple[int, int], threads: dict[int, str], children: str = "") -> None:
    user, system = ticks
    write(proc / f"{number}/stat", f"{number} (a) b) S 1 2 3 4 5 6 7 8 9 10 {user} {system} 0 0 20 0")
    for thread, schedstat in threads.items():
        write(proc / f"{number}/task/{thread}/schedstat", schedstat)
        write(proc / f"{number}/task/{thread}/children", children)
        children = ""


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "core_list", lambda: [0, 2])
    monkeypatch.setattr(cores, "cgroup_quota", lambda: None)


def test_a_reading_holds_the_cores_of_the_run_and_its_family(two_cores: None, tmp_path: Path) -> None:
    lines = ["cpu 9 9 9 9 9 9 9 9 0 0", "cpu0 100 20 30 999 999 4 5 6 50 20", "cpu1 7 7 7 7 7 7 7 7 0 0"]
    write(tmp_path / "stat", "\n".join([*lines, "cpu2 1 0 0 999 0 0 0 0 0 0", "intr 5"]))
    me = os.getpid()
    process(tmp_path, me, (30, 12), {me: "2000000000 500000000 7", me + 1: "0 0 0"}, "77777001 77777009")
    process(tmp_path, 77777001, (8, 0), {77777001: "1000000000 0 1"}, "77777002")
    process(tmp_path, 77777002, (1, 1), {77777002: "3000000 4000000 1"})
    times = core_times(tmp_path)  # 77777009 is gone already
    assert times is not None
    assert times.busy == pytest.approx(166 / TICK)  # user, nice, system, irq, softirq and steal; guests are in user
    assert times.processes == {me: 42 / TICK, 77777001: 8 / TICK, 77777002: 2 / TICK}
    assert times.threads == {me: (2.0, 0.5), me + 1: (0, 0), 77777001: (1.0, 0), 77777002: (0.003, 0.004)}


def test_shares_are_of_what_happened_in_between() -> None:
    before = CoreTimes(10.0, 100.0, {1: 50.0, 2: 7.0}, {1: (40.0, 5.0), 2: (7.0, 1.0)})
    after = CoreTimes(20.0, 118.0, {1: 58.0, 3: 2.0}, {1: (48.0, 7.0), 3: (2.0, 1.0)})  # 2 ended, 3 began
    shares = after.since(before)
    assert shares.others == pytest.approx(0.8)
    assert shares.wanted == pytest.approx(1.3)
    assert shares.waiting == pytest.approx(3 / 13)
    assert before.since(before) == CoreShares(0.0, 0.0, 0.0)


def test_a_quota_or_no_proc_gives_no_reading(two_cores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_times(tmp_path) is None
    write(tmp_path / "stat", "cpu0 1 1 1 1 1 1 1 1 0 0")  # a kernel that does not tell of children
    process(tmp_path, os.getpid(), (1, 1), {os.getpid(): "1 1 1"})
    (tmp_path / f"{os.getpid()}/task/{os.getpid()}/children").unlink()
    assert core_times(tmp_path) is None
    monkeypatch.setattr(cores, "cgroup_quota", lambda: 1.5)
    assert core_times() is None


def test_a_busy_moment_of_this_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cgroup_quota", lambda: None)
    before = core_times()
    if before is None or not before.threads:
        pytest.skip("this system tells nothing of cores")
    used = time.process_time()
    while time.process_time() < used + 0.2:
        pass
    after = core_times()
    assert after is not None
    assert after.processes[os.getpid()] - before.processes[os.getpid()] >= 0.15
    assert after.threads[os.getpid()][0] - before.threads[os.getpid()][0] >= 0.15


def test_cores_of_a_node_are_beside_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two nodes with two threads on each core, as the system counts them."""
    write(tmp_path / "node0/cpulist", "0-1,4-5\n")
    write(tmp_path / "node1/cpulist", "2-3,6,7\n")
    write(tmp_path / "node2/cpulist", "\n")  # of memory alone
    write(tmp_path / "node10/cpulist", "nonsense")
    monkeypatch.setattr(affinity, "core_list", lambda: [0, 2, 3, 4, 5, 6, 7])
    assert affinity.cores_by_node(tmp_path) == [0, 4, 5, 2, 3, 6, 7]
    assert affinity.cores_by_node(tmp_path / "nothing") == [0, 2, 3, 4, 5, 6, 7]
