"""Scores of finished games, as a session records them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np


class ScoreWindow:
    """Raw scores of the last `size` finished games."""

    def __init__(self, size: int = 100) -> None:
        self._scores: deque[float] = deque(maxlen=size)
        self.count = 0  # games finished in all
        self.best: float | None = None  # highest score of one game in all

    def add(self, scores: np.ndarray | float) -> int:
        """Take the scores of games that ended here, NaN where none did (see EnvStep); how many ended."""
        scores = np.atleast_1d(np.asarray(scores, np.float64))
        ended = scores[~np.isnan(scores)].tolist()
        if ended:
            self._scores.extend(ended)
            self.count += len(ended)
            self.best = max(ended) if self.best is None else max(self.best, *ended)
        return len(ended)

    @property
    def mean(self) -> float | None:
        """Mean score of the window, None before the first game has ended."""
        return sum(self._scores) / len(self._scores) if self._scores else None

    def state(self) -> dict[str, Any]:
        return {"scores": list(self._scores), "count": self.count, "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        self._scores.clear()
        self._scores.extend(state["scores"])
        self.count, self.best = state["count"], state["best"]
