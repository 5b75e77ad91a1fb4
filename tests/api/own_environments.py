"""Environments that a user might write, in a file that no test imports as a module and that does not need torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Line(gymnasium.Env):
    """Shows its steps so far and the action that pays."""

    def __init__(self, length: int = 6) -> None:
        self.length = length
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2, start=3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: int) -> Any:
        assert action in (3, 4)
        paid = float(action == 3 + self.wanted)
        self.steps += 1
        return self._show(), paid, self.steps == self.length, False, {}

    def _show(self) -> np.ndarray:
        self.wanted = int(self.np_random.integers(2))
        return np.array([self.steps / self.length, self.wanted], np.float32)


def make(length: int = 6) -> gymnasium.Env:
    return Line(length)


def doubled(env: gymnasium.Env) -> gymnasium.Env:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)


def no_environment() -> str:
    return "nothing"


class Breaks(Line):
    """Raises at the 100th step of a process."""

    taken = 0

    def step(self, action: int) -> Any:
        Breaks.taken += 1
        if Breaks.taken == 100:
            raise KeyError("broken env")
        return super().step(action)


class Drawn(Line):
    """Draws itself, if it was asked to when it was made."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": np.int64(60)}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((8, 8, 3), self.steps, np.uint8) if self.render_mode == "rgb_array" else None


def undrawn() -> gymnasium.Env:
    return Drawn()
