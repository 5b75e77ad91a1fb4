"""Which environments to move between workers, when cores differ in speed: others share them, or the host does.

In lock step everyone waits for the slowest worker; a worker on a slow core must hold fewer environments.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

GAIN = 0.01  # the slowest worker must get faster by this share with each move; one of 32 environments is 3 %
MOST_MOVES = 16  # per call: each costs about a step


def moves(rows: list[list[list[int]]], busy: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(source, target, group) of moves that shorten the time of the slowest worker.

    `rows[worker][group]` are the environments now, `busy[worker]` the seconds each worker has just spent on them.
    """
    counts = np.array([[len(group) for group in worker] for worker in rows])
    if (counts.sum(1) == 0).any() or (busy <= 0).any():
        return
    cost = busy / counts.sum(1)  # seconds per environment
    for _ in range(MOST_MOVES):
        load = counts.sum(1) * cost
        source = int(load.argmax())
        target = int((load + cost).argmin())
        after = max(load[source] - cost[source], load[target] + cost[target])
        held = counts[source] > 0
        if source == target or after > load[source] * (1 - GAIN) or counts[source].sum() <= held.sum():
            return
        # rather one the target has a part in already: the fewer workers a squad's group waits for, the better
        known = held & (counts[target] > 0)
        candidates = np.flatnonzero(known if known.any() else held)
        group = int(candidates[(counts[source] - counts[target])[candidates].argmax()])
        counts[source, group] -= 1
        counts[target, group] += 1
        yield source, target, group
