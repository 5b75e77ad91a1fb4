"""Tiny environments without a simulator: to learn in seconds, and to check that no step is lost on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from phalanx.config import ToyConfig
from phalanx.types import EnvSpec, Outcome


class Catch:
    """A ball falls on a 10x5 board; the paddle in the last row moves left, stays or moves right to catch it."""

    ROWS, COLUMNS = 10, 5

    def __init__(self, config: ToyConfig, seed: np.random.SeedSequence) -> None:
        self._rng = np.random.default_rng(seed)
        self._row = self._column = self._paddle = 0
        self.spec = EnvSpec((1, self.ROWS, self.COLUMNS), np.dtype(np.uint8), 3)

    def reset(self, frame: np.ndarray) -> None:
        self._row, self._column = 0, int(self._rng.integers(self.COLUMNS))
        self._paddle = self.COLUMNS // 2
        self._write(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        """+1 for a caught ball, -1 for a missed one; either ends the episode."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self.COLUMNS - 1)
        self._row += 1
        self._write(frame)
        if self._row < self.ROWS - 1:
            return Outcome(0.0, math.nan, False, False)
        reward = 1.0 if self._paddle == self._column else -1.0
        return Outcome(reward, reward, True, False)

    def prepare(self) -> None:
        """Nothing to do: a reset costs nothing."""

    def render(self) -> np.ndarray:
        board = np.zeros((1, self.ROWS, self.COLUMNS), np.uint8)
        self._write(board)
        return np.repeat(board[0, :, :, None], 3, axis=2)

    def state(self) -> dict[str, Any]:
        return {
            "generator": self._rng.bit_generator.state,
            "row": self._row,
            "column": self._column,
            "paddle": self._paddle,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]
        self._row, self._column, self._paddle = state["row"], state["column"], state["paddle"]

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, frame: np.ndarray) -> None:
        frame.fill(0)
        frame[0, -1, self._paddle] = 255
        frame[0, self._row, self._column] = 255


class Identity:
    """Shows one of four numbers at each step, one-hot; naming it earns 1."""

    NUMBERS = 4

    def __init__(self, config: ToyConfig, seed: np.random.SeedSequence) -> None:
        self._length = config.length
        self._rng = np.random.default_rng(seed)
        self._shown = self._steps = 0
        self._score = 0.0
        self.spec = EnvSpec((self.NUMBERS,), np.dtype(np.float32), self.NUMBERS)

    def reset(self, frame: np.ndarray) -> None:
        self._steps, self._score = 0, 0.0
        self._show(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        reward = float(action == self._shown)
        self._steps += 1
        self._score += reward
        self._show(frame)
        terminated = self._steps == self._length
        return Outcome(reward, self._score if terminated else math.nan, terminated, False)

    def prepare(self) -> None:
        """Nothing to do: a reset costs nothing."""

    def render(self) -> np.ndarray:
        return np.repeat(255 * np.eye(self.NUMBERS, dtype=np.uint8)[None, self._shown, :, None], 3, axis=2)

    def state(self) -> dict[str, Any]:
        return {
            "generator": self._rng.bit_generator.state,
            "shown": self._shown,
            "steps": self._steps,
            "score": self._score,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["generator"]
        self._shown, self._steps, self._score = state["shown"], state["steps"], state["score"]

    def close(self) -> None:
        """Nothing to give back."""

    def _show(self, frame: np.ndarray) -> None:
        self._shown = int(self._rng.integers(self.NUMBERS))
        frame.fill(0)
        frame[self._shown] = 1


class Counter:
    """Frames say which step they are: [tag of the environment, episode, step]. A step's reward is its number.

    Whatever the actions, step n of episode k is known beforehand, so that a reader can tell whether a transition was
    lost, doubled or torn. Odd episodes are truncated, even ones terminate.
    """

    def __init__(self, config: ToyConfig, seed: np.random.SeedSequence) -> None:
        self._length = config.length
        self._tag = int(np.random.default_rng(seed).integers(1, 1 << 24))  # exact in float32
        self._episode, self._steps = -1, 0
        self.spec = EnvSpec((3,), np.dtype(np.float32), 2)

    def reset(self, frame: np.ndarray) -> None:
        self._episode, self._steps = self._episode + 1, 0
        self._write(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        self._steps += 1
        self._write(frame)
        ended, odd = self._steps == self._length, self._episode % 2 == 1
        score = self._length * (self._length + 1) / 2 if ended else math.nan
        return Outcome(float(self._steps), score, ended and not odd, ended and odd)

    def prepare(self) -> None:
        """Nothing to do: a reset costs nothing."""

    def render(self) -> np.ndarray:
        """A bar that grows with the steps."""
        picture = np.zeros((1, self._length, 3), np.uint8)
        picture[:, : self._steps] = 255
        return picture

    def state(self) -> dict[str, Any]:
        return {"tag": self._tag, "episode": self._episode, "steps": self._steps}

    def restore(self, state: dict[str, Any]) -> None:
        self._tag, self._episode, self._steps = state["tag"], state["episode"], state["steps"]

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, frame: np.ndarray) -> None:
        frame[:] = self._tag, self._episode, self._steps
