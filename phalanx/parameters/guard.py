"""A safeguard of Gorila: a learner discards gradients whose loss is far out of what it usually sees."""

from __future__ import annotations

import math

MEMORY = 1_000  # losses that the running mean and deviation look back on, about


class LossGuard:
    """Running mean and deviation of the absolute loss. Beyond `multiple` deviations above the mean a loss is an
    outlier, once `warm_up` losses were seen, and two at least: one has no deviation. Outliers enter the statistics too,
    so that a rise that lasts is accepted in time. A learner that replaces a dead one, or goes on from a checkpoint,
    warms up again."""

    def __init__(self, multiple: float, warm_up: int) -> None:
        self.multiple = multiple
        self.warm_up = warm_up
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0

    def refuses(self, loss: float) -> bool:
        """Is the loss an outlier? It enters the statistics either way."""
        value = abs(loss)
        outlier = self.count >= max(self.warm_up, 2) and value > self.mean + self.multiple * math.sqrt(self.variance)
        self.count += 1
        share = max(1 / self.count, 1 / MEMORY)
        difference = value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2)
        return outlier
