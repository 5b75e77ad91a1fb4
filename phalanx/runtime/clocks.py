"""The clocks of a run: agent steps, updates, finished games, and the version of the parameters.

Every replica counts in a row of its own and writes nowhere else; the value of the run is the sum of all rows. What is
handed down to schedules, algorithms and logs is a frozen reading, `Progress`. No clock is ever set back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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

    def of(self, row: int) -> Clocks:
        """The same clocks as another replica sees them, or another thread."""
        return Clocks(self.rows, row)

    def count(self, steps: int = 0, updates: int = 0, episodes: int = 0) -> None:
        """Count on in this replica's row."""
        self.own[STEPS] += steps
        self.own[UPDATES] += updates
        self.own[EPISODES] += episodes

    def reach(self, version: int) -> None:
        """This replica's parameters are of that version."""
        self.own[VERSION] = version

    def agree(self) -> None:
        """Called once an iteration, between collecting and learning. Only replicas in lock step have to agree."""

    def restore(self, progress: Progress) -> None:
        """Begin where a saved run has stopped: this replica's row takes what all rows had together."""
        self.own[:] = (progress.steps, progress.updates, progress.episodes, progress.version)


class LockstepClocks(Clocks):
    """The clocks of replicas that make every update together: all of them must read the same numbers at the same
    update, or their schedules and parameters would drift apart. So steps and games are those of the last agreement, and
    an update of all is one update."""

    def __init__(self, rows: np.ndarray, row: int, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(rows, row)
        self.gather = gather  # the own row -> the rows of all replicas, in every replica alike
        self.agreed = Progress()
        self.updates_then = 0  # of this replica's row

    def now(self) -> Progress:
        updates = self.agreed.updates + int(self.own[UPDATES]) - self.updates_then
        return replace(self.agreed, updates=updates, version=self.version)

    def agree(self) -> None:
        self.agreed = sum_in_lockstep(self.gather(self.own))
        self.updates_then = int(self.own[UPDATES])


def sum_in_lockstep(rows: np.ndarray) -> Progress:
    """The clocks of the run from the rows of replicas that make every update together. A replica that took the place of
    a dead one counts its updates from there on, so that the greatest number is that of the run."""
    steps, _, episodes, _ = rows.sum(0).tolist()
    _, updates, _, version = rows.max(0).tolist()
    return Progress(steps, updates, version, episodes)
