"""The collector: steps 2 to 4 of a transition's way, from the step buffer to a rollout.

    for each step t of each group g:   recv(g) -> rollout[t, g] -> policy.act -> send(g)

While a group steps, others are served, whichever is ready (see `relay`); only at a rollout's end all have taken the
same number of steps. What is collected does not depend on who came first. A frame is copied once, from the step
buffer into the rollout; the stacks the policy sees are views of the rollout's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import NotFinite
from phalanx.logs.metrics import Timing
from phalanx.runtime.device import Compute
from phalanx.seams import Policy, VectorEnvs
from phalanx.types import EnvSpec, EnvStep, Progress, Rollout, torch_dtype

Decoder = Callable[[Tensor], Tensor]
"""From what the environments publish to frames, where the rollout lives."""
Meanwhile = Callable[[], object]
"""What else there is to do while others work."""


class Collector:
    """Fills one rollout again and again with the steps of some groups; `end` returns it, valid until `begin`."""

    def __init__(
        self,
        envs: VectorEnvs,
        policy: Policy,
        stack: int,
        horizon: int,
        compute: Compute,
        generator: torch.Generator,
        timing: Timing,
        decode: Decoder | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.envs = envs
        self.policy = policy
        self.stack = stack
        self.horizon = horizon
        self.timing = timing
        self.decode = decode or (lambda frames: frames)
        self.device = compute.device
        self.groups = range(len(envs.groups)) if groups is None else groups
        origin = envs.groups[self.groups[0]].start
        self.rows = {g: slice(envs.groups[g].start - origin, envs.groups[g].stop - origin) for g in self.groups}
        environments = self.rows[self.groups[-1]].stop
        self.rollout = allocate_rollout(envs.spec.seen, environments, stack, horizon, compute.device)
        self.generator = generator
        self.noise = torch.empty(self.rollout.action.shape, device=compute.device)
        self.finished: list[float] = []  # raw scores of games that ended since last asked
        self.ended: list[tuple[int, int, list[float]]] = []  # step, group and scores of the present rollout
        self.actions: dict[int, np.ndarray] = {}  # chosen last, by group
        self.primed = False
        self.begun = False
        self.steps: dict[int, int] = {}
        self.here: list[int] = []  # groups that wait for their first actions,
        self.asked: list[int] = []  # those whose actions are being chosen,
        self.away: list[int] = []  # and those that step, in the order in which they went

    def begin(self, progress: Progress) -> None:
        """Begin a rollout under the policy's present parameters; `send_on` and `take_in` bring it forward."""
        self.envs.begin(self.groups)
        self._carry_over()
        self.rollout.version = progress.version
        self.policy.begin(progress)
        self.noise.uniform_(generator=self.generator)
        self.steps = dict.fromkeys(self.groups, 0)
        self.here = list(self.groups)
        self.begun = True

    @property
    def unfinished(self) -> bool:
        return bool(self.here or self.asked or self.away)

    def send_on(self, meanwhile: Meanwhile) -> bool:
        """Let a group step whose actions are there, or have the first ones chosen; was there such a group?"""
        if self.asked and self._is_answered(self.asked[0]):
            self.away.append(self.asked.pop(0))
            self._send(self.away[-1], meanwhile)
        elif self.here:
            self.asked.append(self.here.pop(0))
            self._ask(self.asked[-1], 0, meanwhile)
        else:
            return False
        return True

    def take_in(self, group: int, meanwhile: Meanwhile) -> None:
        """Keep the step of a group that is back, and have its next actions chosen."""
        self.away.remove(group)
        self.steps[group] += 1
        self._receive(group, self.steps[group])
        if self.steps[group] < self.horizon:
            self._ask(group, self.steps[group], meanwhile)
            self.asked.append(group)
        else:
            started = time.perf_counter()
            self._bootstrap(group)
            self.timing.add("infer", time.perf_counter() - started)

    def end(self, progress: Progress) -> Rollout:
        """The finished rollout, counted and checked."""
        self.begun = False
        self.finished += [score for _, _, scores in sorted(self.ended) for score in scores]
        self.ended = []
        self.envs.balance()
        self._check()
        progress.steps += self.rollout.action.numel() - int(self.rollout.cut.sum())
        return self.rollout

    def take_scores(self) -> list[float]:
        """Raw scores of the games that ended since the last call."""
        scores, self.finished = self.finished, []
        return scores

    def state(self) -> dict[str, Any]:
        """What goes on from here needs besides the environments' own states: a finished rollout, or the last frames."""
        rollout = self.rollout
        return {
            "frames": rollout.frames[-self.stack :].clone(),
            "history": rollout.history[-1].clone(),
            "primed": self.primed,
            "begun": {"rollout": rollout.tensors(), "ended": self.ended} if self.begun else None,
            "version": rollout.version,
        }

    def restore(self, state: dict[str, Any]) -> None:
        rollout = self.rollout
        rollout.frames[-self.stack :] = state["frames"].to(self.device)
        rollout.history[-1] = state["history"].to(self.device)
        rollout.version = state["version"]
        self.primed = state["primed"]
        if state["begun"] is not None:
            rollout.load(state["begun"]["rollout"])
            self.ended, self.begun = state["begun"]["ended"], True

    def _carry_over(self) -> None:
        """The newest frames of the last rollout become the history of this one."""
        rollout = self.rollout
        rollout.last_frames.clear()
        rollout.last_value.zero_()
        if self.primed:
            rollout.frames[: self.stack] = rollout.frames[-self.stack :].clone()
            rollout.history[0] = rollout.history[-1]
            return
        for group in self.groups:
            self._receive(group, 0)
        self.primed = True

    def _ask(self, group: int, t: int, meanwhile: Meanwhile) -> None:
        """Have the group's actions for step t chosen."""
        started = time.perf_counter()
        self.actions[group] = self._act(group, t)
        self.timing.add("infer", time.perf_counter() - started)

    def _is_answered(self, group: int) -> bool:
        return True

    def await_answer(self) -> None:
        """Until the group asked first is answered; here everyone is at once."""

    def _send(self, group: int, meanwhile: Meanwhile) -> None:
        started = time.perf_counter()
        self.envs.send(group, self.actions[group])
        self.timing.add("env", time.perf_counter() - started)
        meanwhile()

    def _receive(self, group: int, t: int) -> None:
        """Wait for a group's step and write it."""
        started = time.perf_counter()
        step = self.envs.recv(group)
        self.timing.add("env", time.perf_counter() - started)
        self._write(group, t, step)
        if t > 0:
            if step.truncated.any():
                self._truncated(group, t, step)
            if step.first.any():
                self.ended.append((t, group, step.score[~np.isnan(step.score)].tolist()))

    def _write(self, group: int, t: int, step: EnvStep) -> None:
        """Write a step's frame as that of step t and its outcome as that of step t - 1."""
        rollout, rows = self.rollout, self.rows[group]
        rollout.frames[self.stack - 1 + t, rows] = self.decode(self._here(step.observation))
        if t == 0:
            rollout.history[0, rows] = 1
            return
        longer = (rollout.history[t - 1, rows] + 1).clamp_(max=self.stack)
        rollout.history[t, rows] = longer.masked_fill_(self._here(step.first), 1)
        rollout.reward[t - 1, rows] = self._here(step.reward)
        rollout.terminated[t - 1, rows] = self._here(step.terminated)
        rollout.truncated[t - 1, rows] = self._here(step.truncated)
        rollout.cut[t - 1, rows] = self._here(step.cut)

    def _act(self, group: int, t: int) -> np.ndarray:
        """Actions of a group for step t; what the policy says of them goes into the rollout."""
        rollout, rows, environments = self.rollout, self.rows[group], self.envs.groups[group]
        seen = rollout.stacks[t, rows], rollout.history[t, rows]
        output = self.policy.act(*seen, self.noise[t, rows], environments)
        rollout.action[t, rows] = output.action
        rollout.log_prob[t, rows] = output.log_prob
        rollout.value[t, rows] = output.value
        return output.action.cpu().numpy()

    def _bootstrap(self, group: int) -> None:
        """The value of the state after the last step."""
        rollout, rows, t = self.rollout, self.rows[group], self.horizon
        rollout.value[t, rows] = self.policy.value(rollout.stacks[t, rows], rollout.history[t, rows])

    def _truncated(self, group: int, t: int, step: EnvStep) -> None:
        """The value of the true last observation of each episode that was cut short at step t - 1."""
        rollout, rows = self.rollout, self.rows[group]
        ended = torch.from_numpy(np.flatnonzero(step.truncated)).to(self.device)
        last = self.decode(self._here(step.last_observation)[ended])
        older = rollout.frames[t : t + self.stack - 1, rows].transpose(0, 1)[ended]
        history = (rollout.history[t - 1, rows][ended] + 1).clamp_(max=self.stack)
        stacks = torch.cat([older, last[:, None]], dim=1)
        rollout.last_value[t - 1, ended + rows.start] = self.policy.value(stacks, history)
        for frame, row in zip(last, (ended + rows.start).tolist(), strict=True):
            rollout.last_frames[t - 1, row] = frame

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _check(self) -> None:
        """Refuse rewards and observations that are not finite."""
        for name, values in (("reward", self.rollout.reward), ("observation", self.rollout.frames)):
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                bad = (~torch.isfinite(values)).flatten(2).any(-1) if values.dim() > 2 else ~torch.isfinite(values)
                rows = sorted(set(bad.nonzero()[:, 1].tolist()))
                raise NotFinite(f"the {name} of environment {rows} is not finite", self.rollout)


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
