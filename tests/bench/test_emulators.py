"""The bare emulators that `phalanx bench` measures beside everything else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from phalanx.bench.emulators import BareEmulators, count, cycle
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
            speeds = emulators.speeds(0.5)
            assert len(speeds) == 2 and min(speeds) > 0
        assert emulators.speed(0.5) > 0
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


def test_only_steps_that_end_in_time_count(monkeypatch):
    clock = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr("phalanx.bench.emulators.time.monotonic", lambda: next(clock))
    assert count(iter([None] * 9), end=3.0) == 2


def test_emulators_take_turns(monkeypatch):
    made = [MagicMock(**{"getMinimalActionSet.return_value": [0], "game_over.return_value": over}) for over in (0, 1)]
    monkeypatch.setattr("phalanx.envs.atari.emulator", MagicMock(side_effect=made))
    steps = cycle("any", 2)
    for _ in range(4):  # the first only makes them
        next(steps)
    assert [machine.act.call_count for machine in made] == [8, 4]
    assert [machine.restoreState.call_count for machine in made] == [0, 1]
