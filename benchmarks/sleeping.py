"""A Gymnasium environment that sleeps instead of computing, so that few cores can host many learners.

`--env.id sleeping:Sleeping-v0` finds it where this directory is on PYTHONPATH; a step takes SLEEPING_MS milliseconds.
It shows noise, and pays for the action that the first number's sign asks for. With STRAGGLER, the path of a file that
is not there, the first environment of all that takes a step creates it, and needs STRAGGLER_TIMES as long for each.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np

LENGTH = 100  # steps of an episode


class Sleeping(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 10, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.seconds = float(os.environ.get("SLEEPING_MS", "20")) / 1000
        self.shown = np.zeros(8, np.float32)
        self.steps = 0
        self.pace = 0.0  # times that a step takes as long; 0: it has not begun

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.pace = self.pace or pace()
        time.sleep(self.pace * self.seconds)
        reward = float((self.shown[0] > 0) == action)
        self.steps += 1
        return self._show(), reward, self.steps == LENGTH, False, {}

    def _show(self) -> np.ndarray:
        self.shown = self.np_random.normal(size=8).astype(np.float32)
        return self.shown


def pace() -> float:
    """Of an environment that begins: only one can create the file."""
    path = os.environ.get("STRAGGLER", "")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except OSError:
        return 1.0
    return float(os.environ.get("STRAGGLER_TIMES", "5"))


gymnasium.register("Sleeping-v0", Sleeping)
