"""The collector: steps 2 to 4 of a transition's way, from the step buffer to a rollout.

    for each step t of each group g:   recv(g) -> rollout[t, g] -> policy.act -> send(g)

While a group steps, the loop serves the others, whichever is ready; only at a rollout's end all have taken the same
number of steps. What is collected does not depend on who came first. A frame is copied once, from the step buffer
into the rollout; the stacks the policy sees are views of the rollout's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import NotFinite
from phalanx.logs.metrics import Timing
from phalanx.runtime.device import Compute, restore_generator
from phalanx.seams import Policy, VectorEnvs
from phalanx.types import EnvSpec, EnvStep, Progress, Rollout, torch_dtype

Decoder = Callable[[Tensor], Tensor]
"""From what the environments publish to frames, where the rollout lives."""


class Collector:
    """Fills one rollout again and again; `collect` returns it, valid until the next call."""

    def __init__(
        self,
        envs: VectorEnvs,
        policy: Policy,
        stack: int,
        horizon: int,
        compute: Compute,
        seed: int,
        timing: Timing,
        decode: Decoder | None = None,
    ) -> None:
        self.envs = envs
        self.policy = policy
        self.stack = stack
        self.horizon = horizon
        self.timing = timing
        self.decode = decode or (lambda frames: frames)
        self.device = compute.device
        self.rollout = allocate_rollout(envs.spec.seen, envs.groups[-1].stop, stack, horizon, compute.device)
        self.generator = torch.Generator(compute.device).manual_seed(seed)
        self.noise = torch.empty(self.rollout.action.shape, device=compute.device)
        self.finished: list[float] = []  # raw scores of games that ended since last asked
        self.ended: list[tuple[int, int, list[float]]] = []  # step, group and scores of the present rollout
        self.actions: dict[int, np.ndarray] = {}  # chosen last, by group
        self.primed = False

    def collect(self, progress: Progress, meanwhile: Callable[[], object] = lambda: None) -> Rollout:
        """The next `horizon` steps of every environment under the policy's present parameters; `meanwhile` is called
        once for every step of a group, when others are at work: the environments, or the device."""
        groups = range(len(self.envs.groups))
        self._begin(progress)
        steps = [0 for _ in groups]
        here = list(groups)  # groups that wait for their first actions,
        asked: list[int] = []  # those whose actions are being chosen,
        away: list[int] = []  # and those that step, in the order in which they went
        while here or asked or away:
            answered = next(filter(self._is_answered, asked), None)
            if answered is not None:
                asked.remove(answered)
                away.append(answered)
                self._send(answered, meanwhile)
            elif here:
                asked.append(here.pop(0))
                self._ask(asked[-1], 0, meanwhile)
            elif (back := self._next(away, wait=not asked)) is not None:
                away.remove(back)
                steps[back] += 1
                self._receive(back, steps[back])
                if steps[back] < self.horizon:
                    self._ask(back, steps[back], meanwhile)
                    asked.append(back)
                else:
                    started = time.perf_counter()
                    self._bootstrap(back)
                    self.timing.add("infer", time.perf_counter() - started)
            else:
                self._await_answer(asked[0])
        self._end(progress)
        return self.rollout

    def take_scores(self) -> list[float]:
        """Raw scores of the games that ended since the last call."""
        scores, self.finished = self.finished, []
        return scores

    def close(self) -> None:
        """Nothing to give back here."""

    def state(self) -> dict[str, Any]:
        """What the next `collect` needs besides the environments' own states."""
        return {
            "frames": self.rollout.frames[-self.stack :].clone(),
            "history": self.rollout.history[-1].clone(),
            "noise": self.generator.get_state(),
            "primed": self.primed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rollout.frames[-self.stack :] = state["frames"].to(self.device)
        self.rollout.history[-1] = state["history"].to(self.device)
        restore_generator(self.generator, state["noise"])
        self.primed = state["primed"]

    def _begin(self, progress: Progress) -> None:
        self._carry_over()
        self.rollout.version = progress.version
        self.policy.begin(progress)
        self.noise.uniform_(generator=self.generator)

    def _end(self, progress: Progress) -> None:
        self.finished += [score for _, _, scores in sorted(self.ended) for score in scores]
        self.ended = []
        self.envs.balance()
        self._check()
        progress.steps += self.rollout.action.numel() - int(self.rollout.cut.sum())

    def _carry_over(self) -> None:
        """The newest frames of the last rollout become the history of this one."""
        rollout = self.rollout
        rollout.last_frames.clear()
        rollout.last_value.zero_()
        if self.primed:
            rollout.frames[: self.stack] = rollout.frames[-self.stack :].clone()
            rollout.history[0] = rollout.history[-1]
            return
        for group in range(len(self.envs.groups)):
            self._receive(group, 0)
        self.primed = True

    def _next(self, away: list[int], wait: bool) -> int | None:
        """A group that is back, if there is one."""
        if not away:
            return None
        started = time.perf_counter()
        group = self.envs.ready(away, wait)
        self.timing.add("env", time.perf_counter() - started)
        return group

    def _ask(self, group: int, t: int, meanwhile: Callable[[], object]) -> None:
        """Have the group's actions for step t chosen."""
        started = time.perf_counter()
        self.actions[group] = self._act(group, t)
        self.timing.add("infer", time.perf_counter() - started)

    def _is_answered(self, group: int) -> bool:
        return True

    def _await_answer(self, group: int) -> None:
        """Here nothing answers later."""

    def _send(self, group: int, meanwhile: Callable[[], object]) -> None:
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
        rollout, rows = self.rollout, self.envs.groups[group]
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
        rollout, rows = self.rollout, self.envs.groups[group]
        output = self.policy.act(rollout.stacks[t, rows], rollout.history[t, rows], self.noise[t, rows], rows)
        rollout.action[t, rows] = output.action
        rollout.log_prob[t, rows] = output.log_prob
        rollout.value[t, rows] = output.value
        return output.action.cpu().numpy()

    def _bootstrap(self, group: int) -> None:
        """The value of the state after the last step."""
        rollout, rows, t = self.rollout, self.envs.groups[group], self.horizon
        rollout.value[t, rows] = self.policy.value(rollout.stacks[t, rows], rollout.history[t, rows])

    def _truncated(self, group: int, t: int, step: EnvStep) -> None:
        """The value of the true last observation of each episode that was cut short at step t - 1."""
        rollout, rows = self.rollout, self.envs.groups[group]
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
