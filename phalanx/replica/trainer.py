"""Trainers: threads that learn from segments, each as a learner of its own on parameters that all of them share.

SegmentQueue -> as many segments as make a batch -> one rollout -> Learner -> LockedStore, or NodeStore

On a GPU a trainer has a stream of its own, on which nothing is left when it has learnt.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.learning.learner import Learner
from phalanx.parameters.followed import NodeStore
from phalanx.parameters.locked import LockedStore
from phalanx.replay.latest import LatestRollout
from phalanx.runtime.device import on_stream
from phalanx.sampling.segments import Segment, SegmentQueue
from phalanx.types import Rollout

LONG_UPDATE = 0.2  # seconds for which whoever wants the numbers of a trainer waits for the end of an update


class Trainer:
    """One of the threads. Where it runs is its owner's business: `turn` is called again and again."""

    def __init__(
        self,
        *,
        learner: Learner,
        store: LockedStore | NodeStore,
        queue: SegmentQueue,
        least_rows: int,
        nothing_follows: Callable[[], bool],
        merge: Callable[[Sequence[Segment]], Rollout],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.learner = learner
        self.merge = merge  # makes a rollout of segments
        self.stream = stream  # where all of it runs; None for the usual one
        self.store = store
        self.queue = queue
        self.least_rows = least_rows
        self.nothing_follows = nothing_follows  # must a batch that is too small be learnt from, as it will not grow?
        self.experience = LatestRollout()
        self.batch: list[Segment] = []
        self.rows = 0
        self.learning = threading.Lock()  # held during an update, and by whoever takes its numbers
        self.idle = 0.0  # seconds spent waiting for segments
        self.lags: Counter[int] = Counter()  # versions between acting and learning -> rows
        self.segments = 0  # learnt from so far

    def turn(self, seconds: float) -> None:
        """Take one segment more, or none if there is none for so long; learn once there are enough."""
        started = time.perf_counter()
        segment = self.queue.take(seconds)
        self.idle += time.perf_counter() - started
        if segment is not None:
            self.batch.append(segment)
            self.rows += segment.counted
        if self.batch and (self.rows >= self.least_rows or (segment is None and self.nothing_follows())):
            with self.learning, on_stream(self.stream):
                self._learn()

    def leave(self) -> None:
        """Give back what was not learnt from."""
        self.queue.put_back(self.batch)
        self.batch, self.rows = [], 0

    def take_numbers(self, patience: float = LONG_UPDATE) -> tuple[Counter[int], dict[str, float], dict[str, float]]:
        """The lags of the rows learnt from, the means of what was logged, and the seconds by stage, since the last
        call. Nothing while an update takes long, as one does that waits for other nodes: the next call has it."""
        if not self.learning.acquire(timeout=patience):
            return Counter(), {}, {}
        try:
            with on_stream(self.stream):
                lags, self.lags = self.lags, Counter()
                return lags, self.learner.take_metrics(), self.learner.timing.take()
        finally:
            self.learning.release()

    def state(self) -> dict[str, Any]:
        return self.learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.restore(state)

    def _learn(self) -> None:
        rollout = self.merge(self.batch)
        clocks = self.learner.clocks
        clocks.reach(self.store.pull(self.store.parameters))
        self.lags += lags_of_rows(rollout, clocks.version)
        self.experience.put(rollout)
        self.learner.learn(self.experience)
        self.learner.check()  # waits for the device: the segments may go
        self.segments += len(self.batch)
        self.queue.learnt(len(self.batch))
        self.batch, self.rows = [], 0


def lags_of_rows(rollout: Rollout, version: int) -> Counter[int]:
    """How many rows that may be learnt from were chosen by parameters how many versions older than `version`."""
    lags: Tensor = (version - rollout.version)[~rollout.cut.to(rollout.version.device)]
    values, counts = lags.unique(return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
