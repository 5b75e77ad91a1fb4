"""How many children of a kind may die before a run ends: the budget is a rate, so that a death now and then never ends
a long run; but the same exception again and again does. And what a run has died of so far, which its last words tell.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable

from phalanx.errors import RunError

DIED = " died: "  # between the name of who died and the last words, in every sentence about a death
BLAME = re.compile(r"phalanx\.errors\.EnvironmentFailed: environment \d+ (raised )?")
LONGEST_CAUSE = 400  # characters: the longest sentence of an error, and its place
SAME_EXCEPTION = 10  # deaths of the same exception in the same line, at least, before it is none of chance
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
        self.exceptions: dict[str, deque[float]] = {}  # what children died of -> when, within the last hour

    def count(self, number: int, did_something: bool, exception: str = "") -> None:
        """A child died, after it did something or not, perhaps of an exception that it told; a RunError if that is one
        death too many."""
        self.deaths += 1
        now = self.clock()
        self.last_hour.append(now)
        forget_before(now - HOUR, self.last_hour)
        self.in_a_row[number] = 1 if did_something else self.in_a_row[number] + 1
        if self.in_a_row[number] > self.most_in_a_row:
            raise RunError(
                f"{self.kind} {number} died {self.in_a_row[number]} times in a row without a step; mend the "
                "environment, whose last words are above, or allow more with --sampler.max-deaths-in-a-row"
            )
        if exception:
            self._look_for_a_mistake(cause_of(exception), now)
        if len(self.last_hour) > self.most:
            raise RunError(
                f"more than {self.most} {self.kind}s died within an hour; mend the environment, whose last words "
                "are above, or allow more with --sampler.max-deaths"
            )

    def _look_for_a_mistake(self, cause: str, now: float) -> None:
        """What comes again and again in the same words and line is a mistake in the code; what comes now and then in a
        run of days may be a simulator's mood."""
        times = self.exceptions.setdefault(cause, deque())
        times.append(now)
        forget_before(now - HOUR, times)
        if len(times) >= max(SAME_EXCEPTION, self.most_in_a_row):
            raise RunError(
                f"{len(times)} {self.kind}s died of the same exception, {cause}, within an hour; mend the environment, "
                "or allow more with --sampler.max-deaths-in-a-row"
            )


def forget_before(moment: float, times: deque[float]) -> None:
    while times and times[0] < moment:
        times.popleft()


def cause_of(words: str) -> str:
    """The exception that a child died of, by the last line of its last words."""
    return BLAME.sub("", words.strip().rpartition("\n")[2])[:LONGEST_CAUSE]


class Deaths:
    """What the workers of a run died of, by the sentences that name their deaths: each cause is told with its traceback
    once, and counted."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()

    def told(self, sentence: str) -> str:
        """The sentence as it is to be shown, which may be about anything: a death of a known cause on one line."""
        name, died, words = sentence.partition(DIED)
        if not died:
            return sentence
        cause = cause_of(words)
        self.causes[cause] += 1
        return sentence if self.causes[cause] == 1 else f"{name}{DIED}{cause}"

    def __str__(self) -> str:
        """For the end of a run; empty where nobody died."""
        count = self.causes.total()
        causes = ", ".join(f"{times} x {cause}" for cause, times in self.causes.most_common())
        return f"{count} worker{'s' if count > 1 else ''} died ({causes})" if count else ""
