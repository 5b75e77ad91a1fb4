"""Where the time of a replica goes: seconds booked by stage. The collector and the learner feed it."""

from __future__ import annotations

import time
from collections.abc import Callable

STAGES = ("env", "infer", "learn")  # waiting for environments, choosing actions, learning; the rest is "other"


class Timing:
    """Seconds spent in each stage since the last reset."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.pulse = 0  # counts, and never goes back
        self.reset()

    def reset(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._start = self._clock()

    def add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] += seconds
        self.pulse += 1

    def add_all(self, seconds: dict[str, float]) -> None:
        """What was taken from another one."""
        for stage, value in seconds.items():
            self.add(stage, value)

    def take(self) -> dict[str, float]:
        """Seconds by stage since they were last taken."""
        seconds = {stage: self._seconds[stage] for stage in STAGES}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return seconds

    def shares(self) -> dict[str, float]:
        """Fraction of the time since the reset by stage, with "other" for the rest; they sum to 1."""
        booked = {stage: self._seconds[stage] for stage in STAGES}
        # Stages that run in several threads at once may book more than the time that passed.
        total = max(self._clock() - self._start, sum(booked.values()))
        shares = {stage: seconds / total if total > 0 else 0.0 for stage, seconds in booked.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}
