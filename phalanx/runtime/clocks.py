"""The clocks of a run: agent steps, updates, finished games, and the version of the parameters.

Every replica counts in a row of its own and writes nowhere else; the value of the run is the sum of all rows. What is
handed down to schedules, algorithms and logs is a frozen reading, `Progress`. No clock is ever set back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.types import Progress

STEPS, UPDATES, EPISODES, VERSION = range(4)  # columns

Now = Callable[[], Progress]
"""Reads the clocks."""


class Clocks:
    """One replica's view of the clocks. `rows` [replicas, 4] int64 may lie in memory that replicas share."""

    def __init__(self, rows: np.ndarray | None = None, row: int = 0) -> None:
        self.rows = np.zeros((1, 4), np.int64) if rows is None else rows
        self.own = self.rows[row]

    @property
    def replicas(self) -> int:
        return len(self.rows)

    @property
    def version(self) -> int:
        """The version of this replica's own parameters."""
        return int(self.own[VERSION])

    def now(self) -> Progress:
        """The clocks of the run: sums over all replicas, and the newest version that any of them has."""
        steps, updates, episodes, version = (self.rows.sum(0) if len(self.rows) > 1 else self.own).tolist()
        if len(self.rows) > 1:
            version = int(self.rows[:, VERSION].max())
        return Progress(steps, updates, version, episodes)

    def count(self, steps: int = 0, updates: int = 0, episodes: int = 0) -> None:
        """Count on in this replica's row."""
        self.own[STEPS] += steps
        self.own[UPDATES] += updates
        self.own[EPISODES] += episodes

    def reach(self, version: int) -> None:
        """This replica's parameters are of that version."""
        self.own[VERSION] = version

    def restore(self, progress: Progress) -> None:
        """Begin where a saved run has stopped: this replica's row takes what all rows had together."""
        self.own[:] = (progress.steps, progress.updates, progress.episodes, progress.version)
