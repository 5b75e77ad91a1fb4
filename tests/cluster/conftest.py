"""Shared set-up of the tests on Ray."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pytest

from phalanx.runtime.signals import STOPS


@pytest.fixture(autouse=True)
def signals_kept():
    """Ray sets up a handler for SIGTERM in the process that starts it, which is the other tests' process, too."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def ray_place(monkeypatch):
    """Where Ray keeps its sockets and logs; their paths must be short."""
    place = tempfile.mkdtemp(dir="/tmp")
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TMPDIR", place)
    yield place
    shutil.rmtree(place, ignore_errors=True)
