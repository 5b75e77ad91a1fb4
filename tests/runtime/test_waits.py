"""The idle team: it comes and goes, and changes no number."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from phalanx.runtime.waits import SleepAtOnce


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_idle_team_comes_and_goes_and_changes_no_bit(two_threads: None) -> None:
    torch.manual_seed(0)
    images, network = torch.rand(8, 4, 40, 40), torch.nn.Conv2d(4, 16, 8, 4)
    expected, sleep_at_once = network(images), SleepAtOnce()
    tasks = Path("/proc/self/task")
    threads = set(tasks.iterdir())
    for on in (True, True, False, False, True, False):
        sleep_at_once.switch(on)
        assert sleep_at_once.is_on == on == any(thread.name == "idle team" for thread in threading.enumerate())
        assert torch.equal(network(images), expected) and torch.get_num_threads() == 2
        if on:
            assert len(set(tasks.iterdir()) - threads) == 2  # the thread, and the one other of its team
