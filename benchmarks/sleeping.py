"""A Gymnasium environment that sleeps instead of computing, so that few cores can host many learners.

`--env.id sleeping:Sleeping-v0` finds it where this directory is on PYTHONPATH; a step takes SLEEPING_MS milliseconds.
It shows noise, and pays for the action that the first number's sign asks for.
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

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        reward = float((self.shown[0] > 0) == action)
        self.steps += 1
        return self._show(), reward, self.steps == LENGTH, False, {}

    def _show(self) -> np.ndarray:
        self.shown = self.np_random.normal(size=8).astype(np.float32)
        return self.shown


gymnasium.register("Sleeping-v0", Sleeping)
