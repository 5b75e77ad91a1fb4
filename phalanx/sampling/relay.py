"""The relay: collectors that take turns, rollout by rollout, each with environments of its own.

    shift 0   [ rollout 0 ......]        [.... rollout 2 ....]
    shift 1             [.. rollout 1 ........]        [...... rollout 3
    learner                  [ from 0 ]       [ from 1 ]

With two shifts nobody waits for the slowest at a rollout's end: the next rollout begins in the gaps of this one, as
soon as the parameters it is to be collected with are known. Those do not depend on who is fast, so neither does what
is collected. With one shift each rollout begins when the last one is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.sampling.collector import Collector, Meanwhile
from phalanx.types import Progress, Rollout


class Relay:
    """The collectors of a replica, one per shift."""

    def __init__(self, collectors: list[Collector]) -> None:
        self.collectors = collectors
        self.turn = 0  # whose rollout is the next to be handed out

    def collect(
        self,
        progress: Progress,
        begin: Callable[[Collector], None],
        may_begin: Callable[[], bool] = lambda: True,
        meanwhile: Meanwhile = lambda: None,
    ) -> Rollout:
        """The next rollout. `begin` begins that of a collector under the parameters it is meant for, that of the next
        one as soon as it `may`; `meanwhile` is called once for every step of a group, when others are at work."""
        now, *later = self.collectors[self.turn :] + self.collectors[: self.turn]
        if not now.begun:
            begin(now)
        active = [now]
        while now.unfinished:
            if later and may_begin() and not now.envs.needs_rest():
                begin(later[0])
                active.append(later.pop(0))
            serve(active, meanwhile)
        self.turn = (self.turn + 1) % len(self.collectors)
        return now.end(progress)

    def take_scores(self) -> list[float]:
        """Raw scores of the games that ended since the last call."""
        return [score for collector in self.collectors for score in collector.take_scores()]

    @property
    def primed(self) -> bool:
        return all(collector.primed for collector in self.collectors)

    def finish(self) -> None:
        """Bring a rollout that has begun to its end, so that all environments rest; it is handed out in its turn."""
        now = self.collectors[self.turn]
        while now.unfinished:
            serve([now], lambda: None)

    def state(self) -> dict[str, Any]:
        return {"turn": self.turn, "shifts": [collector.state() for collector in self.collectors]}

    def restore(self, state: dict[str, Any]) -> None:
        self.turn = state["turn"]
        for collector, saved in zip(self.collectors, state["shifts"], strict=True):
            collector.restore(saved)


def serve(collectors: Sequence[Collector], meanwhile: Meanwhile) -> None:
    """Do the next thing there is to do for one of these collectors, the first if possible; waits until there is one."""
    if any(collector.send_on(meanwhile) for collector in collectors):
        return
    first = collectors[0]
    away = [group for collector in collectors for group in collector.away]
    asked = [collector for collector in collectors if collector.asked]
    started = time.perf_counter()
    back = first.envs.ready(away, wait=not asked) if away else None
    first.timing.add("env", time.perf_counter() - started)
    if back is not None:
        next(collector for collector in collectors if back in collector.away).take_in(back, meanwhile)
    elif asked:
        asked[0].await_answer()
