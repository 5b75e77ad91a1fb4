"""How many children of a kind may die before a run ends: the budget is a rate, so that a death now and then never ends
a long run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from phalanx.errors import RunError

HOUR = 3600.0  # seconds: the time in which `most` children may die


class DeathBudget:
    """Counts deaths of the children of one kind, each known by a number."""

    def __init__(
        self, kind: str, children: int, most: int, most_in_a_row: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kind = kind
        self.most = most
        self.most_in_a_row = most_in_a_row
        self.clock = clock
        self.deaths = 0
        self.last_hour: deque[float] = deque()
        self.in_a_row = [0] * children  # by child: deaths without anything done between them

    def count(self, number: int, did_something: bool) -> None:
        """A child died, after it did something or not; a RunError if that is one death too many."""
        self.deaths += 1
        now = self.clock()
        self.last_hour.append(now)
        while now - self.last_hour[0] > HOUR:
            self.last_hour.popleft()
        self.in_a_row[number] = 1 if did_something else self.in_a_row[number] + 1
        if self.in_a_row[number] > self.most_in_a_row:
            raise RunError(
                f"{self.kind} {number} died {self.in_a_row[number]} times in a row without a step; mend the "
                "environment, whose last words are above, or allow more with --sampler.max-deaths-in-a-row"
            )
        if len(self.last_hour) > self.most:
            raise RunError(
                f"more than {self.most} {self.kind}s died within an hour; mend the environment, whose last words "
                "are above, or allow more with --sampler.max-deaths"
            )
