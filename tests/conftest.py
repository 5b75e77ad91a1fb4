"""Shared set-up of the tests."""

from __future__ import annotations

import signal
from typing import Any

import phalanx  # noqa: F401  first: it tells torch's threads to sleep, not spin, and torch reads that when loaded

import pytest  # isort: skip
import torch  # isort: skip
from phalanx.cli.main import main  # isort: skip
from phalanx.topologies import serial, synchronous  # isort: skip
from whole_runs import Moody  # isort: skip
from hypothesis import settings  # isort: skip

settings.register_profile("untimed", deadline=None)  # no test asserts a time, and the machine may be busy
settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background has it ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def train(tmp_path):
    """Train a preset in tmp_path/NAME; the exit code."""

    def run(preset: str, *flags: Any, name: str = "run", steps: int = 500) -> int:
        place = ["--run.directory", str(tmp_path), "--run.name", name, "--run.steps", str(steps)]
        return main(["train", preset, *place, "--run.precision", "float32", *map(str, flags)])

    return run


@pytest.fixture
def resume(tmp_path):
    def run(*flags: Any, name: str = "run") -> int:
        return main(["resume", str(tmp_path / name), *map(str, flags)])

    return run


class ClosedByTopology(Moody):
    """A topology closes its environments by `with`."""

    def __enter__(self) -> ClosedByTopology:
        return self

    def __exit__(self, *exception: object) -> None:
        self.envs.close()


@pytest.fixture
def early(monkeypatch):
    """Flags of a run with overlap some of whose environments are early, and others late, by chance."""
    monkeypatch.setattr(synchronous, "make_envs", lambda *arguments: ClosedByTopology(serial.make_envs(*arguments), 1))
    size = ("--sampler.groups", 4, "--sampler.environments", 4, "--sampler.horizon", 16)
    return "ppo-catch", "--topology", "synchronous", "--sampler.overlap", True, *size
