"""How long torch's threads spin before they sleep, changed while they work.

At the end of each parallel loop threads wait for the last one. To spin for a moment is best on cores of one's own, for
being woken takes longer than many a layer. But where another process has the core of the last one, whoever spins keeps
it from a core it could run on: with a busy neighbour on 2 cores, spinning made the network two to three times slower
than sleeping at once.

The OpenMP library reads the number of spins once (see `phalanx/__init__.py`), but none spin while it manages more
threads than there are cores. So threads that do nothing, but have teams of their own, make the others sleep at once.
The number of threads that share a loop stays, and so does rounding.
"""

from __future__ import annotations

import threading

from phalanx.runtime.affinity import core_list

TEAM = 1 << 20  # numbers of a loop that all threads share
START = 60.0  # seconds in which an idle team must have come up, or gone


class SleepAtOnce:
    """While switched on, torch's waiting threads sleep at once instead of spinning first."""

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores or len(core_list())  # now, as this thread may be kept to one of them later
        self._over = threading.Event()
        self._idle: list[threading.Thread] = []

    def switch(self, on: bool) -> None:
        import torch

        if on and not self._idle:
            self._over.clear()
            for _ in range(idle_teams(self._cores, torch.get_num_threads())):
                is_up = threading.Event()
                thread = threading.Thread(target=self._hold_a_team, args=(is_up,), name="idle team", daemon=True)
                self._idle.append(thread)
                thread.start()
                is_up.wait(START)
        elif not on:
            self._over.set()
            for thread in self._idle:
                thread.join(START)
            self._idle = []

    def _hold_a_team(self, is_up: threading.Event) -> None:
        """Its threads belong to this one, and end with it."""
        import torch

        try:
            torch.zeros(TEAM).add_(1.0)
        finally:
            is_up.set()
        self._over.wait()  # as long as the switch is on: it is what keeps the team


def idle_teams(cores: int, threads: int) -> int:
    """How many teams of so many threads it takes, beside the one at work, for there to be more threads than cores. The
    library counts the first thread of a program, but of further teams only those beside their own first."""
    return max(1, (cores - threads) // (threads - 1) + 1) if threads > 1 else 0
