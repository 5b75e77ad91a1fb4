"""Overlap: a replica learns from the last rollout while the next one is collected, with a lag of exactly one rollout.

    rollout k collected        | k + 1 collected by what was learnt from k - 1 | k + 2 by what was learnt from k
    learning from k - 1        | learning from k                               | learning from k + 1

The bars are not walls: environments that are done with k go on with k + 1 once nothing is left to learn from k - 1. Who
is early does not change what is collected, so runs are as reproducible as without overlap. Two rollout buffers are
enough: k + 2 is written where k was, and does not begin before everything was learnt from k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.learning.learner import Learner
from phalanx.parameters.flat import FlatParameters
from phalanx.replay.latest import LatestRollout
from phalanx.replica.report import lags_of
from phalanx.runtime.device import on_stream
from phalanx.sampling.collector import Collector, HandOver
from phalanx.seams import Experience, ParameterStore, Policy
from phalanx.types import Progress, Rollout

SPREAD = 0.85  # share of a rollout over which its updates are spread


class ActingCopy:
    """A policy on a copy of the model, which pulls the newest parameters when a rollout begins: the model learns on."""

    def __init__(
        self,
        *,
        policy: Policy,
        parameters: FlatParameters,
        store: ParameterStore,
        learning: torch.cuda.Stream | None,
    ) -> None:
        self.policy = policy
        self.parameters = parameters
        self.store = store
        self.learning = learning
        self.act = policy.act
        self.value = policy.value

    def begin(self, progress: Progress) -> None:
        """Between two updates of the learner, which may still be on their way on its stream."""
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.store.pull(self.parameters)
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        self.policy.begin(progress)


class Overlap:
    """The cycle in which updates are spread over the time that the next rollout takes: the collector's companion."""

    def __init__(
        self,
        *,
        collector: Collector,
        experience: Experience,
        learner: Learner,
        learning: torch.cuda.Stream | None,
        last_step: int,
    ) -> None:
        self.collector = collector
        self.experience = experience
        self.learner = learner
        self.clocks = learner.clocks
        self.learning = learning  # the learner's own stream on a GPU
        self.last_step = last_step  # of the run: no rollout begins after it
        self.quiescent = True
        self.pending: Rollout | None = None  # collected, and not learnt from yet
        self.updates: Iterator[bool] = iter(())  # from the last rollout
        self.gaps = 0  # times in the present rollout in which an update could be made
        self.per_gap = 1.0  # updates in each of them: spread, but so that none are left at the end
        self.due = 0.0
        self.may_run_ahead = True
        self.leaving = False

    def iterate(self, run_ahead: bool) -> Counter[int]:
        begun = self.clocks.now()
        lags: Counter[int] = Counter()
        self.updates = iter(())
        if self.pending is not None:
            self.updates = self.learner.updates(self.experience, begun)
            lags = lags_of(self.pending, self.clocks.version)
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        rollout_steps = self.collector.buffers[0].rollout.action.numel() * self.clocks.replicas
        self.may_run_ahead = run_ahead and begun.steps + rollout_steps < self.last_step and not self.leaving
        self.due = max(0.0, 1.0 - self.per_gap)  # the first at once: the last one's end is waited for
        self.gaps = 0
        rollout = self.collector.collect(self)
        while self._make_update():
            pass
        self._plan(begun)
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.learner.check()
        self.experience.put(rollout)
        self.pending = rollout
        self.quiescent = not self.may_run_ahead and not self.collector.course.in_progress
        return lags

    def work_in_gap(self) -> None:
        """Make the updates that are due by now."""
        self.gaps += 1
        self.due += self.per_gap
        while self.due >= 1:
            self.due -= 1
            self._make_update()

    def hand_over(self) -> HandOver:
        """Environments are done early: what is left to learn before the next rollout is urgent now."""
        if not self.may_run_ahead:
            return HandOver.WAIT
        if self._make_update():
            return HandOver.BUSY
        return HandOver.BEGIN if self.learning is None or self.learning.query() else HandOver.WAIT

    def leave(self) -> None:
        self.leaving, self.may_run_ahead = True, False

    def state(self) -> dict[str, Any]:
        """The rollout that was collected but not learnt from."""
        if self.learning is not None:
            self.learning.synchronize()  # after an interruption it may still be at work
        return {"pending": None if self.pending is None else self.pending.tensors()}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("pending") is not None:
            self.pending = self.collector.last_rollout
            self.pending.load(state["pending"])
            if isinstance(self.experience, LatestRollout):  # a replay memory has it already, or has lost everything
                self.experience.put(self.pending)

    def _make_update(self) -> bool:
        """The next update, on the learner's stream; was there one? What has been learnt from in part is no longer
        pending: an interrupted run must not begin with it again."""
        self.pending = None
        with on_stream(self.learning):
            return next(self.updates, False)

    def _plan(self, begun: Progress) -> None:
        """Spread as many updates as this rollout had over the gaps that the next one will have."""
        made = self.clocks.now().updates - begun.updates
        self.per_gap = made / (SPREAD * max(self.gaps, 1)) if made else 1.0
