"""Schedules: a number that moves linearly on a declared clock (steps, updates, episodes)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.config import Clock, DQNConfig, Experiment
from phalanx.types import Progress


@dataclass(frozen=True)
class Schedule:
    """From `start` to `final` over `length` ticks of `clock`, constant afterwards; with none, `final` at once."""

    start: float
    final: float
    length: int
    clock: Clock = "steps"

    def __call__(self, progress: Progress) -> float:
        if self.start == self.final or self.length <= 0:
            return self.final
        done = min(getattr(progress, self.clock) / self.length, 1.0)
        return self.start + (self.final - self.start) * done


def towards(start: float, final: float | None, length: int, clock: Clock = "steps") -> Schedule:
    """A schedule, or without an end the same number for ever."""
    return Schedule(start, start if final is None else final, length, clock)


def epsilon_schedule(algorithm: DQNConfig) -> Schedule:
    """The share of random actions over a run."""
    start, final = algorithm.epsilon_start, algorithm.epsilon_final
    return Schedule(start, final, algorithm.epsilon_length, algorithm.epsilon_clock)


def learning_rate_schedule(experiment: Experiment, learners: int = 1) -> Schedule:
    """The learning rate over a run, grown with the batch where the configuration says so: that of all learners that
    make an update together."""
    optimizer = experiment.optimizer
    factor = 1.0
    if optimizer.batch_scaling != "none":
        ratio = learners * experiment.batch_steps / optimizer.reference_batch
        factor = math.sqrt(ratio) if optimizer.batch_scaling == "sqrt" else ratio
    length = optimizer.schedule_length or experiment.run.steps
    plain = towards(optimizer.learning_rate, optimizer.final_learning_rate, length, optimizer.schedule_clock)
    return replace(plain, start=plain.start * factor, final=plain.final * factor)
