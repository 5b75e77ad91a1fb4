"""Predictors: threads that answer whichever agents wait for their next actions, as many at once as there are.

    Questions.take -> rows of the shared step buffer -> OpenSegments -> one forward -> actions, and segments that ended

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
from phalanx.runtime.timing import Timing
from phalanx.sampling.agents import LOOK_AGAIN, Agents
from phalanx.sampling.answers import Decoder
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
        self.resting = np.zeros(agents.capacity, np.bool_)  # was it taken without being asked for another step?
        self.next_in_round = 0
        self.depth = 0  # agents that waited when somebody looked last,
        self.held = 0  # and those of them that waited for room in the queue of segments

    def take(self, seconds: float) -> Taken | None:
        """Whoever waits; waits for somebody for so long."""
        deadline = time.monotonic() + seconds
        with self.lock:
            while (taken := self._look()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.agents.wait(min(left, LOOK_AGAIN))
        return taken

    def lost(self, steps: int) -> None:
        """So many steps that had begun were cut off, with their agents: others take their place."""
        with self.lock:
            self.begun -= steps

    @property
    def over(self) -> bool:
        """Has every step of the budget begun?"""
        return self.begun >= self.last_step

    def _look(self) -> Taken | None:
        waiting = self._waiting()
        self.depth = len(waiting)
        if not len(waiting):
            self.held = 0
            return None
        turn = np.searchsorted(waiting, self.next_in_round)
        free = self._free(np.roll(waiting, -turn))
        if not len(free.agents):
            return None
        self.next_in_round = int(free.agents[-1]) + 1
        self.taken_at[free.agents] = self.agents.exchange.dones[0, free.agents]
        self.resting[free.agents] = ~free.goes_on
        return free

    def _waiting(self) -> np.ndarray:
        arrived = self.agents.arrived()
        news = self.agents.exchange.dones[0, arrived] != self.taken_at[arrived]
        back = self.resting[arrived] & (arrived < self.agents.playing) & (not self.over)
        return arrived[news | back]

    def _free(self, waiting: np.ndarray) -> Taken:
        """The first of those that need not wait for room."""
        agents, each, left = self.agents, self.agents.envs_per_agent, self.last_step - self.begun
        chosen: list[int] = []
        goes_on, rows, ended, reserved = [], [], [], 0
        self.held = 0
        for agent in waiting.tolist():
            if len(chosen) == self.most:
                break
            own = agents.rows_of(np.array([agent]))
            stays = agent < agents.playing and left > 0
            ends = self._ends(own, stays)
            needed = int(ends.sum())
            if not self.queue.reserve(needed):
                self.held += 1
                continue
            left -= each if stays else 0
            reserved += needed
            chosen.append(agent)
            goes_on.append(stays)
            rows.append(own)
            ended.append(ends)
        self.begun += each * sum(goes_on)
        if not chosen:
            return Taken(np.array([], np.int64), np.array([], np.bool_), waiting[:0], waiting[:0], 0)
        return Taken(
            np.array(chosen), np.array(goes_on, np.bool_), np.concatenate(rows), np.concatenate(ended), reserved
        )

    def _ends(self, rows: np.ndarray, goes_on: bool) -> np.ndarray:
        """Which of these rows have just completed a segment, or must end it early?"""
        segments, step = self.segments, self.agents.step
        over = step.terminated[rows] | step.truncated[rows] | step.cut[rows] | (not goes_on)
        return segments.waiting[rows] & (over | (segments.position[rows] + 1 == segments.horizon))


class Predictor:
    """One of the threads, with a copy of the parameters of its own. Where it runs is its owner's business: `turn` is
    called again and again."""

    def __init__(
        self,
        *,
        questions: Questions,
        policy: Policy,
        parameters: FlatParameters,
        store: ParameterStore,
        newest: Callable[[], int],
        decode: Decoder,
        clocks: Clocks,
        counting: threading.Lock,
        generator: torch.Generator,
    ) -> None:
        self.questions = questions
        self.policy = policy
        self.parameters = parameters
        self.store = store
        self.newest = newest  # the version of the newest parameters
        self.decode = decode
        self.clocks = clocks  # of all predictors
        self.counting = counting  # held by whoever counts on them
        self.generator = generator
        self.version = -1
        self.timing = Timing()
        self.scores: list[float] = []  # of games that ended; appended here, taken elsewhere
        self.predictions = 0
        self.forwards = 0
        self.depths = 0  # sum over forwards of how many agents waited

    def turn(self, seconds: float) -> None:
        """Answer whoever waits, or nobody if nobody does for so long."""
        started = time.perf_counter()
        taken = self.questions.take(seconds)
        now = time.perf_counter()
        self.timing.add("env", now - started)
        if taken is not None:
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
        segments.receive(rows, step, self.decode)
        self._refresh()
        self._value_truncated(rows[taken.ended & step.truncated[rows]])
        stacks, history = segments.stacks(rows)
        uniform = torch.rand(len(rows), generator=self.generator, device=segments.device)
        output = self.policy.act(stacks, history, uniform, torch.from_numpy(rows))
        self._end_segments(rows, taken, output.value)
        goes_on = np.repeat(taken.goes_on, agents.envs_per_agent)
        if goes_on.any():
            acting, chosen = rows[goes_on], output[torch.from_numpy(goes_on)]
            segments.choose(acting, chosen, self.version)
            agents.exchange.action[acting] = chosen.action.cpu().numpy()
            agents.request(taken.agents[taken.goes_on])
        self.predictions += len(rows)
        self.forwards += 1
        self.depths += self.questions.depth

    def _refresh(self) -> None:
        """Take the newest parameters, if there are newer ones."""
        if self.newest() != self.version:
            self.version = self.store.pull(self.parameters)
            self.policy.begin(self.clocks.now())

    def _count_games(self, rows: np.ndarray) -> None:
        scores = self.questions.agents.step.score[rows]
        over = scores[~np.isnan(scores)].tolist()
        if over:
            self.scores += over
            with self.counting:
                self.clocks.count(episodes=len(over))

    def _value_truncated(self, rows: np.ndarray) -> None:
        segments = self.questions.segments
        if len(rows):
            stacks, history = segments.last_stacks(rows, self.questions.agents.step, self.decode)
            segments.set_last_value(rows, self.policy.value(stacks, history))

    def _end_segments(self, rows: np.ndarray, taken: Taken, value: Tensor) -> None:
        if taken.ended.any():
            whole = self.questions.segments.close(rows[taken.ended], value[torch.from_numpy(taken.ended)])
            with self.counting:
                self.clocks.count(steps=sum(segment.counted for segment in whole))
            self.questions.queue.put(whole, taken.reserved)
