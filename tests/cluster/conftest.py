"""Shared set-up of the tests on Ray."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


@pytest.fixture
def ray_place(monkeypatch):
    """Where Ray keeps its sockets and logs; their paths must be short."""
    place = tempfile.mkdtemp(dir="/tmp")
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TMPDIR", place)
    yield place
    shutil.rmtree(place, ignore_errors=True)
