"""Small machines: little shared memory, and a local Ray of which nothing is left, whenever it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cluster import engine, janitor
from phalanx.cluster.engine import STORE, store_directory
from phalanx.errors import UserError
from rayrun import RayRun, ray_directories

SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
"""What precedes a command that is to have a /dev/shm of 64 MB, as containers have it."""


def may_mount():
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL, "true"], capture_output=True, timeout=30).returncode == 0


def test_the_object_store_lies_where_there_is_room(monkeypatch, tmp_path):
    free = {"/dev/shm": 3 * STORE, str(tmp_path): 3 * STORE}

    def usage(path):
        return shutil._ntuple_diskusage(0, 0, free[str(path)])

    monkeypatch.setattr(engine.shutil, "disk_usage", usage)
    assert store_directory(str(tmp_path)) == "/dev/shm"
    free["/dev/shm"] = 64 << 20
    assert store_directory(str(tmp_path)) == str(tmp_path)
    free[str(tmp_path)] = STORE
    with pytest.raises(UserError, match="has 160 MiB free for Ray's object store"):
        store_directory(str(tmp_path))


def test_only_what_ray_starts_is_marked_for_the_janitor(monkeypatch):
    """It ends all that is, and the run's own processes, such as trackers, may outlive Ray."""
    pytest.importorskip("ray")
    marks = []
    ray = SimpleNamespace(init=lambda **_: marks.append(os.environ[janitor.MARK]), shutdown=lambda: None)
    with engine._local(ray):
        assert marks and janitor.MARK not in os.environ
    assert not os.path.exists(marks[0])

    def no_room(directory):
        raise UserError("there is no room")

    monkeypatch.setattr(engine, "store_directory", no_room)
    with pytest.raises(UserError, match=r"^there is no room$"), engine._local(ray):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="nothing can be mounted here")
def test_a_run_with_64_mb_of_shared_memory(tmp_path):
    pytest.importorskip("ray")
    before = ray_directories()
    with RayRun(tmp_path, "gorila-catch", "--run.steps", "10000000", before=SMALL) as run:
        run.wait_for_updates(50)
        raylet = run.processes("raylet")[0]
        mounts = Path(f"/proc/{raylet}/mountinfo").read_text()
        assert any(" /dev/shm " in line and "size=65536k" in line for line in mounts.splitlines())
        for needless in ("dashboard.py", "monitor.py"):
            assert not run.processes(needless)
        assert run.end(signal.SIGINT) == 128 + signal.SIGINT, (tmp_path / "output").read_text()
        assert "(raylet)" not in (tmp_path / "output").read_text()
    assert ray_directories() <= before


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["gcs_server", "raylet", "ray::Server", "ray::Host"])
def test_nothing_is_left_of_a_run_that_is_killed_while_it_starts(tmp_path, moment):
    pytest.importorskip("ray")
    before = ray_directories()
    with RayRun(tmp_path, "dba3c-catch", "--run.steps", "10000000") as run:
        run.wait(lambda: run.processes(moment), f"no process {moment}")
        run.driver.kill()
        run.driver.wait(60)
        run.nothing_is_left()
    assert ray_directories() <= before


@pytest.mark.slow
def test_nothing_is_left_after_a_signal_to_all_of_the_terminal(tmp_path):
    """Ctrl-C reaches every process of a terminal's foreground group at once, and twice if it is pressed twice."""
    pytest.importorskip("ray")
    before = ray_directories()
    with RayRun(tmp_path, "gorila-catch", "--run.steps", "10000000") as run:
        run.wait_for_updates()
        os.killpg(run.driver.pid, signal.SIGINT)
        assert run.driver.wait(60) == 128 + signal.SIGINT, (tmp_path / "output").read_text()
        run.nothing_is_left()
    assert ray_directories() <= before
