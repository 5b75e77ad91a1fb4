"""Which environments to move between workers, when cores differ in speed: others share them, or the host does.

In lock step everyone waits for the slowest worker; a worker on a slow core must hold fewer environments. Speeds are
noisy and moves are not free, so what is learnt of them is smoothed and looked at more and more rarely.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

GAIN = 0.02  # with what it gets, a worker must stay faster than the slowest was by this share
MOST_MOVES = 8  # per call: each costs a few steps, or hundreds where a simulator must be made for it
SMOOTHING = 0.5  # of what is known of a worker's speed
SLOWER = 1.25  # by this factor the time between two calls grows,
SLOWEST = 8.0  # up to so many times the first


class Speeds:
    """What is known of the workers' speeds, and when to look again."""

    def __init__(self, interval: float) -> None:
        self.first = self.interval = interval
        self.cost: np.ndarray | None = None  # seconds an environment takes, by worker
        self.busy: np.ndarray | None = None  # at the last look; the first only sets it: starts differ in length
        self.since = time.monotonic()

    def due(self) -> bool:
        return self.first > 0 and time.monotonic() - self.since >= self.interval

    def look(self, rows: list[list[list[int]]], busy: np.ndarray) -> np.ndarray | None:
        """The cost of an environment by worker, from the seconds each has been busy so far; None at the first look."""
        if self.busy is None:
            return None
        counts = np.array([sum(map(len, worker)) for worker in rows])
        spent = (busy - self.busy) / np.maximum(counts, 1)
        self.cost = spent if self.cost is None else SMOOTHING * self.cost + (1 - SMOOTHING) * spent * self._unit(spent)
        return self.cost

    def looked(self, busy: np.ndarray) -> None:
        self.since, self.busy = time.monotonic(), busy.copy()
        self.interval = min(self.interval * SLOWER, self.first * SLOWEST)

    def _unit(self, spent: np.ndarray) -> float:
        """Intervals differ in length: only the proportions between workers count."""
        assert self.cost is not None
        return float(self.cost.mean() / max(spent.mean(), 1e-9))


def _worth(source: np.ndarray, target: np.ndarray, group: int) -> tuple[bool, int, bool, int]:
    """What to move first: an environment that returns to a group of its squad, then one of the source's largest group
    (its groups must stay alike, or they no longer alternate), then one of a group the target knows, then where the
    target has least."""
    returns = bool(2 * source[group] < source.max() and target[group] > source[group])
    return returns, int(source[group]), bool(target[group] > 0), -int(target[group])


def moves(rows: list[list[list[int]]], cost: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(source, target, group) of moves that shorten the time of the slowest worker.

    `rows[worker][group]` are the environments now, `cost[worker]` the time a worker needs for one of them.
    """
    counts = np.array([[len(group) for group in worker] for worker in rows])
    if (cost <= 0).any():  # one of them was not seen at work
        return
    for _ in range(MOST_MOVES):
        load = counts.sum(1) * cost
        source = int(load.argmax())
        target = int((load + cost).argmin())
        held = counts[source] > 0
        too_much = load[target] + cost[target] > load[source] * (1 - GAIN)
        if source == target or too_much or counts[source].sum() <= held.sum():
            return
        group = max(np.flatnonzero(held).tolist(), key=lambda g: _worth(counts[source], counts[target], g))
        counts[source, group] -= 1
        counts[target, group] += 1
        yield source, target, group
