"""The bare emulators that `phalanx bench` measures beside everything else."""

from __future__ import annotations

import pytest

from phalanx.emulators import BareEmulators
from phalanx.errors import RunError


def test_they_answer_each_time_they_are_asked():
    with BareEmulators("pong", 2, 3) as emulators:
        for _ in range(2):
            speeds = emulators.speeds(0.05)
            assert len(speeds) == 2 and min(speeds) > 0
        assert emulators.speed(0.05) > 0
    assert all(process.poll() is not None for process in emulators.processes)


def test_one_that_dies_is_an_error_and_nothing_is_left_behind():
    with pytest.raises(RunError, match="no answer"), BareEmulators("pong", 2, 1) as emulators:
        emulators.processes[0].kill()
        emulators.processes[0].wait(timeout=10)
        emulators.speeds(0.05)
    assert all(process.poll() is not None for process in emulators.processes)


def test_what_cannot_start_is_an_error(capfd):
    with pytest.raises(RunError, match="no answer"):
        BareEmulators("no such game", 1, 1)
    assert "no such game" in capfd.readouterr().err
