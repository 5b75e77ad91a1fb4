"""Other processes on the cores of a run: noticed, told once, and made less costly while they are there."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.runtime.cores import CoreShares, CoreTimes, core_times
from phalanx.runtime.waits import SleepAtOnce

LOOK = 5.0  # seconds between two looks, at least
OTHERS = 0.25  # cores that others use, at least, to be called busy,
PART = 0.05  # and at least this part of the run's cores
WANTED = 0.5  # cores that the run must want; it does its work elsewhere if it wants less
WAITING = 0.1  # share of its time for which the run waits for cores, at least
LOOKS = 2  # looks in a row that must say the same


class Neighbours:
    """What a session asks at each record."""

    def __init__(
        self,
        tell: Callable[[str], None],
        cores: int,
        read: Callable[[], CoreTimes | None] = core_times,
        sleep_at_once: Callable[[bool], None] | None = None,
    ) -> None:
        self.tell, self.cores, self.read = tell, cores, read
        self.sleep_at_once = sleep_at_once or SleepAtOnce().switch
        self.threads = 1  # torch's in this process
        self.crowded = False
        self.told = False
        self.changed = 0  # looks in a row that say otherwise than `crowded`
        self.before: CoreTimes | None = None
        self.shares: CoreShares | None = None  # between the last two looks

    def begin(self, threads: int) -> None:
        """From now on the run is at work, with so many torch threads in this process."""
        self.threads, self.before = threads, self.read()

    def look(self) -> None:
        """Read, if it is time, and act if the cores have become crowded or free."""
        now = self.read() if self.before is not None else None
        if now is None or self.before is None or now.clock - self.before.clock < LOOK:
            return
        self.shares, self.before = now.since(self.before), now
        self.changed = self.changed + 1 if self._is_crowded(self.shares) != self.crowded else 0
        if self.changed == LOOKS:
            self.crowded, self.changed = not self.crowded, 0
            if self.threads > 1:
                self.sleep_at_once(self.crowded)
            if self.crowded and not self.told:
                self.told = True
                self.tell(self._sentence(self.shares))

    def close(self) -> None:
        if self.crowded and self.threads > 1:
            self.sleep_at_once(False)

    @property
    def numbers(self) -> dict[str, float]:
        """For a record."""
        if self.shares is None:
            return {}
        return {"others_share": self.shares.others / self.cores, "core_wait_share": self.shares.waiting}

    def _is_crowded(self, shares: CoreShares) -> bool:
        busy = shares.others >= max(OTHERS, PART * self.cores)
        return busy and shares.wanted >= WANTED and shares.waiting >= WAITING

    def _sentence(self, shares: CoreShares) -> str:
        seen = (
            f"other processes use {shares.others:.1f} of the {self.cores} cores, and this run waits for cores "
            f"{shares.waiting:.0%} of its time"
        )
        if self.threads == 1:
            return f"{seen}; end them, or give the run cores of its own, e.g. with taskset"
        return (
            f"{seen}; torch's {self.threads} threads sleep at once now where they wait for each other, and "
            "--run.threads 1 may help more (it changes rounding, so it is not done by itself)"
        )
