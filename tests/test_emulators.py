"""The bare emulators that `phalanx bench` measures beside everything else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.emulators import BareEmulators, count, cycle
from phalanx.errors import RunError


def forked(emulators: BareEmulators) -> list[int]:
    pid = emulators.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int], limit: float = 10.0) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_they_answer_each_time_they_are_asked():
    with BareEmulators("pong", 2, 3) as emulators:
        children = forked(emulators)
        assert len(children) == 2
        for _ in range(2):
            speeds = emulators.speeds(0.05)
            assert len(speeds) == 2 and min(speeds) > 0
        assert emulators.speed(0.05) > 0
    assert emulators.process.poll() is not None and gone(children)


def test_one_that_dies_is_an_error_and_nothing_is_left_behind():
    with pytest.raises(RunError, match="no answer"), BareEmulators("pong", 2, 1) as emulators:
        children = forked(emulators)
        os.kill(children[0], signal.SIGKILL)
        emulators.speeds(0.05)
    assert emulators.process.poll() is not None and gone(children)


def test_what_cannot_start_is_an_error(capfd):
    with pytest.raises(RunError, match="no answer"):
        BareEmulators("no such game", 1, 1)
    assert "no such game" in capfd.readouterr().err


def test_only_steps_that_end_in_time_count():
    steps = cycle("pong", 2)
    next(steps)
    assert count(steps, time.monotonic()) == 0
    assert count(steps, time.monotonic() + 0.05) > 0
