"""Schedules: a number that moves linearly on a declared clock (steps, updates, episodes)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config import Clock, Experiment
from phalanx.types import Progress


@dataclass(frozen=True)
class Schedule:
    """From `start` to `final` over `length` ticks of `clock`, constant afterwards."""

    start: float
    final: float
    length: int
    clock: Clock = "steps"

    def __call__(self, progress: Progress) -> float:
        if self.start == self.final or self.length <= 0:
            return self.start
        done = min(getattr(progress, self.clock) / self.length, 1.0)
        return self.start + (self.final - self.start) * done


def learning_rate_schedule(experiment: Experiment) -> Schedule:
    optimizer = experiment.optimizer
    final = optimizer.learning_rate if optimizer.final_learning_rate is None else optimizer.final_learning_rate
    length = optimizer.schedule_length or experiment.run.steps
    return Schedule(optimizer.learning_rate, final, length, optimizer.schedule_clock)
