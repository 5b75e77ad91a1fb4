"""Idle teams: they come and go, and change no number."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from phalanx.runtime.waits import SleepAtOnce, idle_teams


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cores", [2, 4])
def test_idle_teams_come_and_go_and_change_no_bit(two_threads: None, cores: int) -> None:
    torch.manual_seed(0)
    images, network = torch.rand(8, 4, 40, 40), torch.nn.Conv2d(4, 16, 8, 4)
    expected, sleep_at_once = network(images), SleepAtOnce(cores)
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    for on in (True, True, False, False, True, False):
        sleep_at_once.switch(on)
        assert on == any(thread.name == "idle team" for thread in threading.enumerate())
        assert torch.equal(network(images), expected) and torch.get_num_threads() == 2
        if on:
            assert len(set(tasks.iterdir()) - before) == 2 * idle_teams(cores, 2)


def test_there_are_more_threads_than_cores() -> None:
    for cores in range(1, 70):
        for threads in range(2, 70):
            teams = idle_teams(cores, threads)
            assert teams >= 1 and threads + teams * (threads - 1) > cores
            assert teams == 1 or threads + (teams - 1) * (threads - 1) <= cores  # none too many
    assert idle_teams(16, 1) == 0
