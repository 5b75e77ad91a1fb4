"""How long torch's threads spin before they sleep, changed while they work.

At the end of each parallel loop threads wait for the last one. To spin for a moment is best on cores of one's own, for
being woken takes longer than many a layer. But where another process has the core of the last one, whoever spins keeps
it from a core it could run on: with a busy neighbour on 2 cores, spinning made the network two to three times slower
than sleeping at once.

The OpenMP library reads the number of spins once (see `phalanx/__init__.py`), but none spin while it manages more
threads than there are cores. So a thread that does nothing, but has a team of its own, makes the others sleep at once.
The number of threads that share a loop stays, and so does rounding.
"""

from __future__ import annotations

import threading

TEAM = 1 << 20  # numbers of a loop that all threads share
START = 60.0  # seconds in which the idle team must have come up, or gone


class SleepAtOnce:
    """While switched on, torch's waiting threads sleep at once instead of spinning first."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._idle: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        return self._idle is not None

    def switch(self, on: bool) -> None:
        if on and self._idle is None:
            self._over.clear()
            is_up = threading.Event()
            self._idle = threading.Thread(target=self._hold_a_team, args=(is_up,), name="idle team", daemon=True)
            self._idle.start()
            is_up.wait(START)
        elif not on and self._idle is not None:
            self._over.set()
            self._idle.join(START)
            self._idle = None

    def _hold_a_team(self, is_up: threading.Event) -> None:
        """Its threads belong to this one, and end with it."""
        import torch

        try:
            torch.zeros(TEAM).add_(1.0)
        finally:
            is_up.set()
        self._over.wait()
