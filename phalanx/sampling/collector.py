"""The collector: steps 2 to 4 of a transition's way, from the step buffer to a rollout.

    for each step t of each group g:   recv(g) -> rollout[t, g] -> policy.act -> send(g)

While a group steps, the loop serves the others, whichever is ready. With two lanes nobody waits at a rollout's end:
a group that has finished its part begins the next rollout in the other lane, as soon as the parameters that rollout is
to be collected with are there. What is collected does not depend on who came first. A frame is copied once, from the
step buffer into the rollout; the stacks the policy sees are views of the rollout's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import NotFinite
from phalanx.runtime.device import Compute, restore_generator
from phalanx.runtime.timing import Timing
from phalanx.seams import Policy, VectorEnvs
from phalanx.types import EnvSpec, EnvStep, Progress, Rollout, torch_dtype

Decoder = Callable[[Tensor], Tensor]
"""From what the environments publish to frames, where the rollout lives."""


@dataclass
class Lane:
    """A rollout while it is filled, and what its actions are chosen with. Each lane takes every n-th rollout."""

    policy: Policy
    rollout: Rollout
    noise: Tensor  # [T, N]
    ended: list[tuple[int, int, list[float]]] = field(default_factory=list)  # step, group and scores of games


class Collector:
    """Fills one rollout after the other; `collect` returns it, valid until the next call. There is a lane for each
    policy."""

    def __init__(
        self,
        envs: VectorEnvs,
        policies: Sequence[Policy],
        stack: int,
        horizon: int,
        compute: Compute,
        seed: int,
        timing: Timing,
        decode: Decoder | None = None,
    ) -> None:
        self.envs = envs
        self.stack = stack
        self.horizon = horizon
        self.timing = timing
        self.decode = decode or (lambda frames: frames)
        self.device = compute.device
        self.generator = torch.Generator(compute.device).manual_seed(seed)
        self.lanes = [self._make_lane(policy) for policy in policies]
        self.collected = 0  # rollouts returned,
        self.begun = 0  # and begun: one more while some groups are ahead
        self.cut = 0  # steps of the last rollout that do not count
        self.done = [0 for _ in envs.groups]  # rollouts each group has finished
        self.steps = [0 for _ in envs.groups]  # and the steps it has taken of the present one
        self.idle = list(range(len(envs.groups)))  # groups without a rollout to go on with,
        self.here: list[int] = []  # those that wait for their first actions,
        self.asked: list[int] = []  # those whose actions are being chosen,
        self.away: list[int] = []  # and those that step, in the order in which they went
        self.actions: dict[int, np.ndarray] = {}  # chosen last, by group
        self.finished: list[float] = []  # raw scores of games that ended since last asked
        self.primed = False

    @property
    def ahead(self) -> bool:
        """Has a rollout been begun that is not collected yet?"""
        return self.begun > self.collected

    @property
    def under_way(self) -> int:
        """Steps that environments have taken of rollouts which are not collected yet, masked ones too."""
        return sum(
            (rows.stop - rows.start) * ((done - self.collected) * self.horizon + steps)
            for rows, done, steps in zip(self.envs.groups, self.done, self.steps, strict=True)
        )

    def collect(
        self,
        progress: Progress,
        meanwhile: Callable[[], object] = lambda: None,
        hand_over: Callable[[], bool | None] = lambda: None,
    ) -> Rollout:
        """The next `horizon` steps of every environment under its policy's parameters; `meanwhile` is called once for
        every step of a group, when others are at work: the environments, or the device. `hand_over` is called when a
        group is done early: True if the next rollout may begin, False if some of what that waits for was done just
        now, None if there is nothing to do but wait."""
        goal = self.collected + 1
        if self.begun < goal:
            self._begin(progress)
        early = len(self.lanes) > 1 and not self.envs.unbalanced()
        while min(self.done) < goal:
            answered = self._answered()
            if answered is not None:
                self.asked.remove(answered)
                self.away.append(answered)
                self._send(answered, meanwhile)
                continue
            if self.here:
                group = self.here.pop(0)
                self._carry_over(group)
                self.asked.append(group)
                self._ask(group, 0, meanwhile)
                continue
            urgent = early and self.begun == goal and bool(self.idle)
            back = self._next(wait=not (self.asked or urgent))
            if back is not None:
                self._take_back(back, meanwhile)
                continue
            if self._ask_together(meanwhile):
                continue
            may_begin = hand_over() if urgent else None
            if may_begin:
                self._begin(progress)
            elif may_begin is None and self.asked:
                self._await_answer()
            elif may_begin is None:
                self._next(wait=True)  # it is taken back in the next turn
        return self._end(progress)

    def take_scores(self) -> list[float]:
        """Raw scores of the games that ended since the last call."""
        scores, self.finished = self.finished, []
        return scores

    def close(self) -> None:
        """Nothing to give back here."""

    def state(self) -> dict[str, Any]:
        """What the next `collect` needs besides the environments' own states; no group may be ahead."""
        assert not self.ahead
        last = self._lane(self.collected - 1).rollout
        return {
            "frames": last.frames[-self.stack :].clone(),
            "history": last.history[-1].clone(),
            "noise": self.generator.get_state(),
            "primed": self.primed,
            "cut": self.cut,
        }

    def restore(self, state: dict[str, Any]) -> None:
        last = self._lane(self.collected - 1).rollout
        last.frames[-self.stack :] = state["frames"].to(self.device)
        last.history[-1] = state["history"].to(self.device)
        restore_generator(self.generator, state["noise"])
        self.primed = state["primed"]
        self.cut = state.get("cut", 0)

    def _make_lane(self, policy: Policy) -> Lane:
        environments = self.envs.groups[-1].stop
        rollout = allocate_rollout(self.envs.spec.seen, environments, self.stack, self.horizon, self.device)
        return Lane(policy, rollout, torch.empty(rollout.action.shape, device=self.device))

    def _lane(self, number: int) -> Lane:
        """The lane of a rollout."""
        return self.lanes[number % len(self.lanes)]

    def _lane_of(self, group: int) -> Lane:
        """That of the rollout a group is at."""
        return self._lane(self.done[group])

    def _begin(self, progress: Progress) -> None:
        """The next rollout, for all groups that have finished the last."""
        lane = self._lane(self.begun)
        rollout = lane.rollout
        rollout.last_frames.clear()
        rollout.last_value.zero_()
        rollout.version = progress.version
        # if others are still at the last one, it is not known how many of its steps will count: all, for schedules
        uncounted = rollout.action.numel() if self.ahead else self.cut
        lane.policy.begin(replace(progress, steps=progress.steps + uncounted))
        lane.noise.uniform_(generator=self.generator)
        if not self.primed:
            self._prime()
        self.begun += 1
        self._enter()

    def _enter(self) -> None:
        """Groups whose next rollout has begun go on."""
        for group in [group for group in self.idle if self.done[group] < self.begun]:
            self.idle.remove(group)
            self.here.append(group)

    def _end(self, progress: Progress) -> Rollout:
        lane = self._lane(self.collected)
        self.collected += 1
        self.finished += [score for _, _, scores in sorted(lane.ended) for score in scores]
        lane.ended.clear()
        if not self.ahead:
            self.envs.balance()
        self._check(lane.rollout)
        cut = int(lane.rollout.cut.sum())
        progress.steps += lane.rollout.action.numel() - cut
        self.cut = cut if len(self.lanes) > 1 else 0
        return lane.rollout

    def _prime(self) -> None:
        """The first frames of all stand where a rollout before the first would have had its last."""
        last = self._lane(-1).rollout
        for group, rows in enumerate(self.envs.groups):
            last.frames[-1, rows] = self.decode(self._here(self._recv(group).observation))
        last.history[-1] = 1
        self.primed = True

    def _carry_over(self, group: int) -> None:
        """The newest frames of the last rollout become the history of this one."""
        rows = self.envs.groups[group]
        last, rollout = self._lane(self.done[group] - 1).rollout, self._lane_of(group).rollout
        rollout.frames[: self.stack, rows] = last.frames[-self.stack :, rows].clone()  # they may be the same
        rollout.history[0, rows] = last.history[-1, rows]

    def _next(self, wait: bool) -> int | None:
        """A group that is back, if there is one."""
        if not self.away:
            return None
        started = time.perf_counter()
        group = self.envs.ready(self.away, wait)
        self.timing.add("env", time.perf_counter() - started)
        return group

    def _take_back(self, group: int, meanwhile: Callable[[], object]) -> None:
        """Write the step a group has taken, then have it go on."""
        self.away.remove(group)
        self.steps[group] += 1
        self._receive(group, self.steps[group])
        if self.steps[group] < self.horizon:
            self.asked.append(group)
            self._ask(group, self.steps[group], meanwhile)
            return
        started = time.perf_counter()
        self._bootstrap(group)
        self.timing.add("infer", time.perf_counter() - started)
        self.steps[group] = 0
        self.done[group] += 1
        self.idle.append(group)
        self._enter()

    def _ask(self, group: int, t: int, meanwhile: Callable[[], object]) -> None:
        """Have the group's actions for step t chosen."""
        started = time.perf_counter()
        self.actions[group] = self._act(group, t)
        self.timing.add("infer", time.perf_counter() - started)

    def _ask_together(self, meanwhile: Callable[[], object]) -> bool:
        """Have the actions chosen of groups that were to wait for others; will any of them go on?"""
        return False

    def _answered(self) -> int | None:
        """A group whose actions are there, if there is one."""
        return self.asked[0] if self.asked else None

    def _await_answer(self) -> None:
        """Here nothing answers later."""

    def _send(self, group: int, meanwhile: Callable[[], object]) -> None:
        started = time.perf_counter()
        self.envs.send(group, self.actions[group])
        self.timing.add("env", time.perf_counter() - started)
        meanwhile()

    def _receive(self, group: int, t: int) -> None:
        """Take the step a group has finished and write it."""
        step = self._recv(group)
        self._write(group, t, step)
        if 1 in step.truncated.tobytes():  # `any` takes ten times as long
            self._truncated(group, t, step)
        if 1 in step.first.tobytes():
            self._lane_of(group).ended.append((t, group, step.score[~np.isnan(step.score)].tolist()))

    def _recv(self, group: int) -> EnvStep:
        started = time.perf_counter()
        step = self.envs.recv(group)
        self.timing.add("env", time.perf_counter() - started)
        return step

    def _write(self, group: int, t: int, step: EnvStep) -> None:
        """Write a step's frame as that of step t and its outcome as that of step t - 1."""
        rollout, rows = self._lane_of(group).rollout, self.envs.groups[group]
        rollout.frames[self.stack - 1 + t, rows] = self.decode(self._here(step.observation))
        longer = (rollout.history[t - 1, rows] + 1).clamp_(max=self.stack)
        rollout.history[t, rows] = longer.masked_fill_(self._here(step.first), 1)
        rollout.reward[t - 1, rows] = self._here(step.reward)
        rollout.terminated[t - 1, rows] = self._here(step.terminated)
        rollout.truncated[t - 1, rows] = self._here(step.truncated)
        rollout.cut[t - 1, rows] = self._here(step.cut)

    def _act(self, group: int, t: int) -> np.ndarray:
        """Actions of a group for step t; what the policy says of them goes into the rollout."""
        lane, rows = self._lane_of(group), self.envs.groups[group]
        rollout = lane.rollout
        output = lane.policy.act(rollout.stacks[t, rows], rollout.history[t, rows], lane.noise[t, rows], rows)
        rollout.action[t, rows] = output.action
        rollout.log_prob[t, rows] = output.log_prob
        rollout.value[t, rows] = output.value
        return output.action.cpu().numpy()

    def _bootstrap(self, group: int) -> None:
        """The value of the state after the last step."""
        lane, rows, t = self._lane_of(group), self.envs.groups[group], self.horizon
        rollout = lane.rollout
        rollout.value[t, rows] = lane.policy.value(rollout.stacks[t, rows], rollout.history[t, rows])

    def _truncated(self, group: int, t: int, step: EnvStep) -> None:
        """The value of the true last observation of each episode that was cut short at step t - 1."""
        lane, rows = self._lane_of(group), self.envs.groups[group]
        rollout = lane.rollout
        ended = torch.from_numpy(np.flatnonzero(step.truncated)).to(self.device)
        last = self.decode(self._here(step.last_observation)[ended])
        older = rollout.frames[t : t + self.stack - 1, rows].transpose(0, 1)[ended]
        history = (rollout.history[t - 1, rows][ended] + 1).clamp_(max=self.stack)
        stacks = torch.cat([older, last[:, None]], dim=1)
        rollout.last_value[t - 1, ended + rows.start] = lane.policy.value(stacks, history)
        for frame, row in zip(last, (ended + rows.start).tolist(), strict=True):
            rollout.last_frames[t - 1, row] = frame

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _check(self, rollout: Rollout) -> None:
        """Refuse rewards and observations that are not finite."""
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


def allocate_rollout(spec: EnvSpec, environments: int, stack: int, horizon: int, device: torch.device) -> Rollout:
    """An empty rollout on a device."""

    def empty(time: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros((time, environments, *shape), dtype=dtype, device=device)

    return Rollout(
        frames=empty(stack + horizon, torch_dtype(spec.frame_dtype), spec.frame_shape),
        history=empty(horizon + 1, torch.uint8),
        action=empty(horizon, torch.int64),
        log_prob=empty(horizon),
        value=empty(horizon + 1),
        reward=empty(horizon),
        terminated=empty(horizon, torch.bool),
        truncated=empty(horizon, torch.bool),
        last_value=empty(horizon),
        cut=empty(horizon, torch.bool),
    )


def rollout_bytes(spec: EnvSpec, environments: int, stack: int, horizon: int) -> int:
    """Memory a rollout takes."""
    rollout = allocate_rollout(spec, environments, stack, horizon, torch.device("meta"))
    return sum(value.numel() * value.element_size() for value in vars(rollout).values() if isinstance(value, Tensor))
