"""Predictors: threads that answer whichever agents wait for their next actions, as many at once as there are.

    Questions.take -> rows of the shared step buffer -> inference.py -> actions, and segments that ended

The queue of questions is the step buffer itself: an agent waits once its step is done and until it is asked for the
next. Who has waited longest in the round goes first. An agent whose segment is complete waits while the queue of
segments is full, and is answered with the parameters of the moment in which there is room: so the lag is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.parameters.flat import FlatParameters
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import on_stream
from phalanx.runtime.timing import Timing
from phalanx.sampling.agents import LOOK_AGAIN, Agents
from phalanx.sampling.answers import Decoder
from phalanx.sampling.inference import Inference
from phalanx.sampling.segments import OpenSegments, SegmentQueue
from phalanx.seams import ParameterStore, Policy


@dataclass
class Taken:
    """Questions that one predictor answers together."""

    agents: np.ndarray
    goes_on: np.ndarray  # by agent: does it take another step, or rest?
    rows: np.ndarray  # of their environments
    ended: np.ndarray  # by row: does its segment end here?
    reserved: int  # places in the queue of segments that are kept for those


class Questions:
    """Agents that wait for their next actions. Each is taken once."""

    def __init__(
        self,
        *,
        agents: Agents,
        segments: OpenSegments,
        queue: SegmentQueue,
        most_rows: int,
        last_step: int,
    ) -> None:
        self.agents = agents
        self.segments = segments
        self.queue = queue
        self.most = max(1, most_rows // agents.envs_per_agent)  # agents in one forward
        self.last_step = last_step
        self.begun = 0  # steps of the run, those counted in whose segment has not ended
        self.lock = threading.Lock()
        self.taken_at = np.full(agents.capacity, -1, np.int64)  # steps an agent had done when it was taken last
        self.resting = np.zeros(agents.capacity, np.bool_)  # was it answered, without being asked for another step?
        self.next_in_round = 0
        self.depth = 0  # agents that waited when somebody looked last,
        self.held = 0  # and those of them that waited for room in the queue of segments

    def take(self, seconds: float) -> Taken | None:
        """Whoever waits; waits for somebody for so long. Others may look, and count, meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            with self.lock:
                taken = self._look()
            left = deadline - time.monotonic()
            if taken is not None or left <= 0:
                return taken
            self.agents.wait(min(left, LOOK_AGAIN))

    def lost(self, steps: int) -> None:
        """So many steps that had begun were cut off, with their agents: others take their place."""
        with self.lock:
            self.begun -= steps

    def rest(self, agents: np.ndarray) -> None:
        """They were answered with a rest: from now on they may be taken again, should they be wanted."""
        self.resting[agents] = True

    @property
    def over(self) -> bool:
        """Has every step of the budget begun?"""
        return self.begun >= self.last_step

    def _look(self) -> Taken | None:
        waiting = self._waiting()
        self.depth = len(waiting)
        taken = self._free(np.roll(waiting, -np.searchsorted(waiting, self.next_in_round)))
        if not len(taken.agents):
            return None
        self.next_in_round = int(taken.agents[-1]) + 1
        self.taken_at[taken.agents] = self.agents.exchange.dones[0, taken.agents]
        self.resting[taken.agents] = False
        self.begun += self.agents.envs_per_agent * int(taken.goes_on.sum())
        return taken

    def _waiting(self) -> np.ndarray:
        arrived = self.agents.arrived()
        news = self.agents.exchange.dones[0, arrived] != self.taken_at[arrived]
        back = self.resting[arrived] & (arrived < self.agents.playing) & (not self.over)
        return arrived[news | back]

    def _free(self, waiting: np.ndarray) -> Taken:
        """The first of those that need not wait for room in the queue of segments."""
        segments, step, each = self.segments, self.agents.step, self.agents.envs_per_agent
        rows = self.agents.rows_of(waiting).reshape(-1, each)
        left, playing = self.last_step - self.begun, waiting < self.agents.playing
        goes_on = playing & (playing.cumsum() <= -(-left // each))
        first = goes_on | ~playing | (left <= 0)  # who finds no step left waits until all of them have begun
        over = step.terminated[rows] | step.truncated[rows] | step.cut[rows] | ~goes_on[:, None]
        ended = segments.waiting[rows] & (over | (segments.position[rows] + 1 == segments.horizon))
        needed = ended.sum(1)
        needing = np.flatnonzero(first & (needed > 0))
        first[needing[self.most :]] = False
        granted = self.queue.reserve(needed[needing[: self.most]].tolist())
        first[needing[granted:]] = False
        self.held = min(len(needing), self.most) - granted
        chosen = np.flatnonzero(first)
        self.queue.give_back(int(needed[chosen[self.most :]].sum()))
        chosen = chosen[: self.most]
        return Taken(
            waiting[chosen], goes_on[chosen], rows[chosen].ravel(), ended[chosen].ravel(), int(needed[chosen].sum())
        )


class Predictor:
    """One of the threads, with a copy of the parameters of its own. Where it runs is its owner's business: `turn` is
    called again and again."""

    def __init__(
        self,
        *,
        questions: Questions,
        inference: Inference,
        policy: Policy,
        parameters: FlatParameters,
        store: ParameterStore,
        newest: Callable[[], int],
        decode: Decoder,
        clocks: Clocks,
        counting: threading.Lock,
        generator: torch.Generator,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.questions = questions
        self.inference = inference
        self.policy = policy
        self.parameters = parameters
        self.store = store
        self.newest = newest  # the version of the newest parameters
        self.decode = decode
        self.clocks = clocks  # of all predictors
        self.counting = counting  # held by whoever counts on them
        self.generator = generator
        self.stream = stream  # where all of it runs; None for the usual one
        self.version = -1
        self.timing = Timing()
        self.idle = 0.0  # seconds spent waiting for agents
        self.scores: list[float] = []  # of games that ended; appended here, taken elsewhere
        self.lengths: list[int] = []  # and the steps they took
        self.predictions = 0
        self.forwards = 0
        self.depths = 0  # sum over forwards of how many agents waited

    def turn(self, seconds: float) -> None:
        """Answer whoever waits, or nobody if nobody does for so long."""
        started = time.perf_counter()
        taken = self.questions.take(seconds)
        now = time.perf_counter()
        self.timing.add("env", now - started)
        self.idle += now - started
        if taken is not None:
            with on_stream(self.stream):
                self.answer(taken)
            self.timing.add("infer", time.perf_counter() - now)

    def leave(self) -> None:
        """Nothing of a predictor is left undone after its turn."""

    def answer(self, taken: Taken) -> None:
        agents, segments, rows = self.questions.agents, self.questions.segments, taken.rows
        step = agents.step
        waited = rows[segments.waiting[rows]]
        self._count_games(waited)
        if step.cut[waited].any():
            self.questions.lost(int(step.cut[waited].sum()))
        news = segments.receive(rows, step)
        self._refresh()
        ended = rows[taken.ended]
        self._value_truncated(ended[step.truncated[ended]])
        uniform = torch.rand(len(rows), generator=self.generator)
        found = self.inference.infer(news, rows, ended, uniform)
        if len(ended):
            self._end_segments(ended, found.value[taken.ended], found.cut, taken.reserved)
        acts = np.repeat(taken.goes_on, agents.envs_per_agent)
        if acts.any():
            segments.choose(rows[acts], found.action[acts], found.log_prob[acts], found.value[acts], self.version)
            agents.exchange.action[rows[acts]] = found.action[acts]
            agents.request(taken.agents[taken.goes_on])
        self.questions.rest(taken.agents[~taken.goes_on])
        self.predictions += len(rows)
        self.forwards += 1
        self.depths += self.questions.depth - self.questions.held

    def _refresh(self) -> None:
        """Take the newest parameters, if there are newer ones."""
        if self.newest() != self.version:
            self.version = self.store.pull(self.parameters)
            self.policy.begin(self.clocks.now())

    def _count_games(self, rows: np.ndarray) -> None:
        scores, lengths = self.questions.segments.games_over(rows, self.questions.agents.step)
        if scores:
            self.scores += scores
            self.lengths += lengths
            with self.counting:
                self.clocks.count(episodes=len(scores))

    def _value_truncated(self, rows: np.ndarray) -> None:
        segments = self.questions.segments
        if len(rows):
            stacks, history = segments.last_stacks(rows, self.questions.agents.step, self.decode)
            segments.set_last_value(rows, self.policy.value(stacks, history))

    def _end_segments(self, rows: np.ndarray, value: np.ndarray, frames: Tensor, reserved: int) -> None:
        whole = self.questions.segments.close(rows, value, frames)
        self.questions.queue.put(whole, reserved)
        with self.counting:  # last: what is counted is on its way to a trainer
            self.clocks.count(steps=sum(segment.counted for segment in whole))
