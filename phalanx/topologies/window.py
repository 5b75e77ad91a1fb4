"""From readings of a counter to rates that can be compared: what a tuner decides by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 1e15  # nothing is counted so far, and no lag is so great


@dataclass(frozen=True)
class Reading:
    """What is known at a moment."""

    count: float
    """How much of what is to be maximised per second there has been so far."""
    lag: float | None = None
    """Mean policy lag since the last reading; None if nothing was trained on."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """Does the bottleneck ask for more of a knob (1), for less (-1), or for nothing (0)?"""


class Measurement(NamedTuple):
    """A whole window."""

    rate: float
    lag: float | None
    hints: dict[str, float]  # means of the readings'


class Window:
    """Makes measurements of readings. Time before a change has settled does not count, nor does a pause in which there
    was no reading: the process was stopped, or the machine slept."""

    def __init__(self, clock: Callable[[], float], length: float, settle: float) -> None:
        self.clock = clock
        self.length = length
        self.settle = settle
        self.patience = length  # a longer time without a reading is a pause
        self.last: tuple[float, float] | None = None
        self.seconds = self.count = self.lag_sum = self.lag_count = 0.0
        self.hints: dict[str, float] = {}
        self.readings = 0
        self.begin(changed=True)

    def begin(self, changed: bool) -> None:
        """A new window; of another setting, if it `changed`."""
        if changed:
            self._settle()
        self.seconds = self.count = self.lag_sum = self.lag_count = 0.0
        self.hints, self.readings = {}, 0

    def take(self, reading: Reading) -> Measurement | None:
        """A measurement, when the window is complete."""
        now = self.clock()
        if now < self.settled_at <= now + self.settle:  # beyond that, the clock was set back
            return None
        last, self.last = self.last, (now, reading.count)
        if last is None:
            return None
        seconds, count = now - last[0], reading.count - last[1]
        if not 0 <= seconds <= self.patience or not 0 <= count < MOST:
            self.patience *= 2 if seconds > self.patience else 1  # readings may have become rare for good
            self._settle()
            return None
        self.patience = max(self.length / 4, min(self.patience, 4 * seconds))
        self.seconds += seconds
        self.count += count
        if reading.lag is not None and 0 <= reading.lag < MOST:
            self.lag_sum, self.lag_count = self.lag_sum + count * reading.lag, self.lag_count + count
        for name, hint in reading.hints.items():
            self.hints[name] = self.hints.get(name, 0.0) + hint
        self.readings += 1
        return self._measurement() if self.seconds >= self.length else None

    def _measurement(self) -> Measurement:
        lag = self.lag_sum / self.lag_count if self.lag_count else None
        hints = {name: total / self.readings for name, total in self.hints.items()}
        return Measurement(self.count / self.seconds, lag, hints)

    def _settle(self) -> None:
        self.settled_at, self.last = self.clock() + self.settle, None
