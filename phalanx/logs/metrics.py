"""What a run measures between two log records: where the time goes, game scores, averages of the losses.

The collector and the learner feed these; the topology turns them into one record for the Logger.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

STAGES = ("env", "infer", "learn")  # waiting for environments, choosing actions, learning; the rest is "other"


class Timing:
    """Seconds spent in each stage since the last reset."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.pulse = 0  # counts, and never goes back
        self.reset()

    def reset(self) -> None:
        self._seconds = dict.fromkeys((*STAGES, "other"), 0.0)
        self._start = self._clock()

    def add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] += seconds
        self.pulse += 1

    def shares(self) -> dict[str, float]:
        """Fraction of the time since the reset by stage, with "other" for the rest; they sum to 1."""
        booked = {stage: self._seconds[stage] for stage in STAGES}
        # Stages that run in several threads at once may book more than the time that passed.
        total = max(self._clock() - self._start, sum(booked.values()))
        shares = {stage: seconds / total if total > 0 else 0.0 for stage, seconds in booked.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


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


class MetricAverager:
    """Means of metrics between two log records. Sums stay on their device: only `take` waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}  # a tensor, or a float
        self._counts: dict[str, int] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            # float32, since sums of half precision lose digits; a new tensor, since the caller may reuse its own.
            number = value.detach().float() if isinstance(value, Tensor) else float(value)
            self._sums[name] = self._sums.get(name, 0.0) + number
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """The means since the last call, in one copy per device, and start again."""
        sums, counts = self._sums, self._counts
        self._sums, self._counts = {}, {}
        on_device: dict[torch.device, list[str]] = {}
        for name, total in sums.items():
            if isinstance(total, Tensor):
                on_device.setdefault(total.device, []).append(name)
        for names in on_device.values():
            sums.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
        return {name: total / counts[name] for name, total in sums.items()}
