"""One limit for several waits that follow each other: what one of them takes is not there for the next."""

from __future__ import annotations

import time


class Deadline:
    """A moment by which all of it is to be over."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, 0 if it is over."""
        return max(0.0, self.at - time.monotonic())
