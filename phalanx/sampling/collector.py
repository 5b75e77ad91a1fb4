"""The collector: from the steps of environments to a rollout.

    for each step t of each group g:   recv(g) -> rollout[t, g] -> policy.act -> send(g)

While a group steps, the loop serves the others, whichever is ready. `course.py` keeps account of who is where,
`answers.py` writes rows and chooses actions. With two buffers (only with `Overlap`) nobody waits at a rollout's end: a
group that has finished its part begins the next rollout in the other buffer, as soon as the parameters that rollout is
to be collected with are there. What is collected does not depend on who came first. A frame is copied once, from the
step buffer into the rollout; the stacks the policy sees are views of the rollout's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.errors import NotFinite
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import restore_generator
from phalanx.runtime.timing import Timing
from phalanx.sampling.answers import Answers, Decoder, RolloutBuffer, to_device
from phalanx.sampling.course import Course
from phalanx.seams import VectorEnvs
from phalanx.types import EnvStep, Rollout


class HandOver(Enum):
    """May a group that has finished early begin the next rollout?"""

    BEGIN = "it begins now"
    BUSY = "not yet, but ask again at once: some of what it waits for was done"
    WAIT = "not yet, and there is nothing to do but wait"


class Companion(Protocol):
    """Whoever works while a rollout is collected: the learner, where learning overlaps with collecting."""

    def work_in_gap(self) -> None:
        """Called once for every step of a group, when others are at work: the environments, or the device."""

    def hand_over(self) -> HandOver:
        """A group is done early: may the next rollout begin?"""


class Nobody:
    """The companion of a collector that works alone."""

    def work_in_gap(self) -> None: ...

    def hand_over(self) -> HandOver:
        return HandOver.WAIT


class Collector:
    """Fills one rollout after the other. With one buffer the next call of `collect` overwrites what the last one
    returned, with two the call after it."""

    def __init__(
        self,
        *,
        envs: VectorEnvs,
        buffers: list[RolloutBuffer],
        answers: Answers,
        stack: int,
        decode: Decoder,
        clocks: Clocks,
        timing: Timing,
        generator: torch.Generator,
        run_environments: int,
        columns: slice,
        poll_every: int = 0,
        refresh: Callable[[], int] = lambda: 0,
    ) -> None:
        self.envs = envs
        self.buffers = buffers
        self.answers = answers
        self.stack = stack
        self.decode = decode
        self.clocks = clocks
        self.timing = timing
        self.device = buffers[0].rollout.action.device
        self.generator = generator  # of the numbers that actions are chosen with
        # Numbers are drawn for all environments of the run, so that a run divided among replicas chooses the same.
        self.run_environments = run_environments
        self.columns = columns  # of this collector's environments
        sizes = [rows.stop - rows.start for rows in envs.groups]
        self.course = Course(sizes, buffers[0].rollout.steps)
        self.poll_every = poll_every  # steps within a rollout after which parameters are refreshed; 0: never
        self.refresh = refresh  # brings the policy the newest parameters; their version
        self.polled = 0  # step of the rollout at which that was done last
        self.uncounted = 0  # with two buffers: cut steps of the last rollout, which are not on the clocks
        self.scores: list[float] = []  # raw scores of games that ended since last asked
        self.lengths: list[int] = []  # and the steps they took, where their start was seen
        self.received = [0] * len(sizes)  # steps of each group, and
        self.begun = np.full(sum(sizes), np.nan)  # after which of them the game of each environment began
        self.primed = False  # were the environments' first frames received?

    def collect(self, companion: Companion | None = None) -> Rollout:
        """Collect the next `horizon` steps of every environment, and count them on the clocks. Where actions are chosen
        in this thread (`EagerAnswers`), `launch` is always 0 and `wait` is never called."""
        companion = companion or Nobody()
        course = self.course
        if not course.in_progress:
            self._begin()
        may_run_ahead = len(self.buffers) > 1 and not self.envs.unbalanced()
        while not course.oldest_is_whole:
            if (group := self.answers.answered()) is not None:
                self._send(group, companion)
                continue
            if (group := course.next_to_ask()) is not None:
                self.answers.ask(group, course.rollout_of(group), 0, None)
                continue
            done_early = may_run_ahead and course.begun == course.collected + 1 and bool(course.between)
            if (group := self._returned(wait=not (course.asked or done_early))) is not None:
                self._receive(group)
                continue
            if self._launch(companion):
                continue
            told = companion.hand_over() if done_early else HandOver.WAIT
            if told is HandOver.BEGIN:
                self._begin()
            elif told is HandOver.WAIT and course.asked:
                self.answers.wait()
            elif told is HandOver.WAIT:
                self._returned(wait=True)  # it is received in the next turn
        return self._end()

    @property
    def last_rollout(self) -> Rollout:
        """The rollout that was collected last; before the first, the one that a saved rollout is restored into."""
        return self._buffer(self.course.collected - 1).rollout

    def take_scores(self) -> list[float]:
        """Raw scores of the games that ended since the last call."""
        scores, self.scores = self.scores, []
        return scores

    def take_lengths(self) -> list[int]:
        """Steps of the games that ended since the last call. Where a game began before the first step, as with
        decorrelated environments, they are not known."""
        lengths, self.lengths = self.lengths, []
        return lengths

    def close(self) -> None:
        self.answers.close()

    def state(self) -> dict[str, Any]:
        """What the next `collect` needs besides the environments' own states; no group may be ahead."""
        assert not self.course.in_progress
        last = self.last_rollout
        return {
            "frames": last.frames[-self.stack :].clone(),
            "history": last.history[-1].clone(),
            "uniform": self.generator.get_state(),
            "primed": self.primed,
            "uncounted": self.uncounted,
            "played": self._steps_received() - self.begun,
        }

    def restore(self, state: dict[str, Any]) -> None:
        last = self.last_rollout
        last.frames[-self.stack :] = state["frames"].to(self.device)
        last.history[-1] = state["history"].to(self.device)
        restore_generator(self.generator, state["uniform"])
        self.primed = state["primed"]
        self.uncounted = state["uncounted"]
        if "played" in state:
            self.begun = self._steps_received() - np.asarray(state["played"])

    def _buffer(self, number: int) -> RolloutBuffer:
        """The buffer of a rollout."""
        return self.buffers[number % len(self.buffers)]

    def _begin(self) -> None:
        """The next rollout, for all groups that have finished the last."""
        buffer = self._buffer(self.course.begun)
        rollout = buffer.rollout
        rollout.last_frames.clear()
        rollout.last_value.zero_()
        # With two buffers a rollout may begin before it is known how many steps of the last were cut. So that schedules
        # do not depend on whether it did, they always take all of them as counted.
        missing = rollout.action.numel() if self.course.in_progress else self.uncounted
        progress = self.clocks.now()
        self.polled = 0
        buffer.policy.begin(replace(progress, steps=progress.steps + missing))
        rollout.version.fill_(self.clocks.version)
        size = (rollout.steps, self.run_environments)
        uniform = torch.rand(size, generator=self.generator, device=self.device)
        buffer.uniform.copy_(uniform[:, self.columns])
        if not self.primed:
            self._receive_first_frames()
        self.course.begin()
        self.answers.begin()

    def _end(self) -> Rollout:
        self.answers.finish(self.course.collected)
        buffer = self._buffer(self.course.end())
        for _, _, scores, lengths in sorted(buffer.ended):
            self.scores += scores
            self.lengths += lengths
        buffer.ended.clear()
        if not self.course.in_progress:
            self.envs.balance()
        refuse_not_finite(buffer.rollout)
        cut = int(buffer.rollout.cut.sum())
        self.clocks.count(steps=buffer.rollout.action.numel() - cut)
        self.uncounted = cut if len(self.buffers) > 1 else 0
        self.answers.launch(self.course.collected)  # groups that are ahead need not wait for the next call
        return buffer.rollout

    def _receive_first_frames(self) -> None:
        """They become the newest frames of the buffer before the first: `ask` carries them over from there."""
        last = self._buffer(-1).rollout
        for group, rows in enumerate(self.envs.groups):
            last.frames[-1, rows] = self.decode(to_device(self._recv(group).observation, self.device))
        last.history[-1] = 1
        self.primed = True

    def _returned(self, wait: bool) -> int | None:
        """A group whose environments have stepped, if there is one."""
        if not self.course.stepping:
            return None
        started = time.perf_counter()
        group = self.envs.ready(self.course.stepping, wait)
        self.timing.add("env", time.perf_counter() - started)
        return group

    def _receive(self, group: int) -> None:
        """Take the step a group has finished, and have its next actions chosen."""
        step, number = self._recv(group), self.course.rollout_of(group)
        t = self.course.receive(group)
        self.received[group] += 1
        buffer = self._buffer(number)
        if 1 in step.truncated.tobytes():  # `any` takes ten times as long
            with self.answers.stream():
                self._keep_last_frames(group, buffer, t, step)
        if 1 in step.first.tobytes():
            buffer.ended.append((t, group, *self._games_over(group, step)))
        if self.poll_every and t % self.poll_every == 0 and t < self.course.horizon:
            self._poll(group, number, t)
        self.answers.ask(group, number, t, step)
        if t == self.course.horizon:
            self.course.finish(group)

    def _games_over(self, group: int, step: EnvStep) -> tuple[list[float], list[int]]:
        """Scores of the games that ended with this step, and the steps of those whose start was seen. A lost life that
        ends an episode ends no game; an environment that was replaced, or has waited, begins one."""
        begun, now = self.begun[self.envs.groups[group]], self.received[group]
        over = ~np.isnan(step.score)
        taken = now - begun[over]
        begun[over | (step.first & step.cut)] = now
        return step.score[over].tolist(), [int(steps) for steps in taken if not np.isnan(steps)]

    def _steps_received(self) -> np.ndarray:
        """By environment."""
        steps = np.empty(len(self.begun))
        for group, rows in enumerate(self.envs.groups):
            steps[rows] = self.received[group]
        return steps

    def _poll(self, group: int, number: int, t: int) -> None:
        """Newer parameters within a rollout: for all groups from their next actions on."""
        if t > self.polled:
            self.polled = t
            self.clocks.reach(self.refresh())
        self._buffer(number).rollout.version[t:, self.envs.groups[group]] = self.clocks.version

    def _recv(self, group: int) -> EnvStep:
        started = time.perf_counter()
        step = self.envs.recv(group)
        self.timing.add("env", time.perf_counter() - started)
        return step

    def _send(self, group: int, companion: Companion) -> None:
        started = time.perf_counter()
        self.course.send(group)
        self.answers.send(group)
        self.timing.add("env", time.perf_counter() - started)
        if not self.answers.asynchronous:
            companion.work_in_gap()

    def _launch(self, companion: Companion) -> bool:
        """Have a device answer what was asked; will any group step on because of it?"""
        launched = self.answers.launch(self.course.collected)
        for _ in range(launched):
            companion.work_in_gap()
        return launched > 0

    def _keep_last_frames(self, group: int, buffer: RolloutBuffer, t: int, step: EnvStep) -> None:
        """The true last frame of each episode that was truncated at step t - 1, and its value."""
        rollout, rows = buffer.rollout, self.envs.groups[group]
        ended = torch.from_numpy(np.flatnonzero(step.truncated)).to(self.device)
        last = self.decode(to_device(step.last_observation, self.device)[ended])
        older = rollout.frames[t : t + self.stack - 1, rows].transpose(0, 1)[ended]
        history = (rollout.history[t - 1, rows][ended] + 1).clamp_(max=self.stack)
        stacks = torch.cat([older, last[:, None]], dim=1)
        rollout.last_value[t - 1, ended + rows.start] = buffer.policy.value(stacks, history)
        for frame, row in zip(last, (ended + rows.start).tolist(), strict=True):
            rollout.last_frames[t - 1, row] = frame


def refuse_not_finite(rollout: Rollout) -> None:
    """Refuse rewards and observations that are not finite, and name their environments."""
    for name, values in (("reward", rollout.reward), ("observation", rollout.frames)):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            bad = (~torch.isfinite(values)).flatten(2).any(-1) if values.dim() > 2 else ~torch.isfinite(values)
            rows = sorted(set(bad.nonzero()[:, 1].tolist()))
            raise NotFinite(f"the {name} of environment {rows} is not finite", rollout)
    if rollout.last_frames and rollout.frames.is_floating_point():
        finite = torch.isfinite(torch.stack(list(rollout.last_frames.values()))).flatten(1).all(1).tolist()
        rows = sorted({row for (_, row), fine in zip(rollout.last_frames, finite, strict=True) if not fine})
        if rows:
            sentence = f"the last observation of a truncated episode of environment {rows} is not finite"
            raise NotFinite(sentence, rollout)
