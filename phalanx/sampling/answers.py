"""Answers: a group's newest step is written into its rollout, and its next actions are chosen.

The collector asks: this group has stepped, which actions next?

`EagerAnswers` does so at once, in this thread: the reference. `sampling/graph_answers.py` is the way of a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.timing import Timing
from phalanx.seams import Policy, VectorEnvs
from phalanx.types import EnvSpec, EnvStep, Rollout, torch_dtype

Decoder = Callable[[Tensor], Tensor]
"""Makes the frames that the policy sees of raw observations, which are on the rollout's device already."""


@dataclass
class RolloutBuffer:
    """A rollout while it is filled, and what chooses its actions. `CollectThenLearn` needs one; `Overlap` needs two,
    each with a policy on parameters of its own, which take every second rollout."""

    policy: Policy
    rollout: Rollout
    uniform: Tensor  # [T, B]: the random numbers its actions are chosen with
    ended: list[tuple[int, int, list[float], list[int]]] = field(default_factory=list)
    """Step, group, and scores and lengths of the games that ended there."""


class Answers(Protocol):
    """The way from a group's newest step to its next actions."""

    asynchronous: bool  # are actions chosen by a device while the collector does something else?

    def begin(self) -> None:
        """A rollout begins."""

    def ask(self, group: int, number: int, t: int, step: EnvStep | None) -> None:
        """Write what the group's step t - 1 of rollout `number` gave (nothing, before its first), and have its actions
        for step t chosen; after the last step only the value of the state it led to."""

    def launch(self, oldest: int) -> int:
        """Begin to work on what was asked, the rollout `oldest` first; how many groups will step on because of it."""

    def answered(self) -> int | None:
        """A group whose actions are there, if there is one; it is given once."""

    def wait(self) -> None:
        """Until a group is answered."""

    def send(self, group: int) -> None:
        """Have the group's environments step with the actions chosen last."""

    def finish(self, number: int) -> None:
        """Until a rollout, all of whose steps were asked for, is whole."""

    def stream(self) -> AbstractContextManager[Any]:
        """Where the collector may run work of its own on a rollout that is being filled."""

    def close(self) -> None: ...


class EagerAnswers:
    """Every question is answered when it is asked."""

    asynchronous = False

    def __init__(
        self, *, envs: VectorEnvs, buffers: list[RolloutBuffer], stack: int, decode: Decoder, timing: Timing
    ) -> None:
        self.envs = envs
        self.buffers = buffers
        self.stack = stack
        self.decode = decode
        self.timing = timing
        self.device = buffers[0].rollout.action.device
        self.horizon = buffers[0].rollout.steps
        self.actions: dict[int, np.ndarray] = {}  # chosen last, by group
        self.ready: deque[int] = deque()

    def begin(self) -> None: ...

    def ask(self, group: int, number: int, t: int, step: EnvStep | None) -> None:
        buffer = self.buffers[number % len(self.buffers)]
        if step is None:
            self._carry_over(group, self.buffers[(number - 1) % len(self.buffers)].rollout, buffer.rollout)
        else:
            self._write(group, buffer.rollout, t, step)
        started = time.perf_counter()
        if t < self.horizon:
            self._act(group, buffer, t)
            self.ready.append(group)
        else:
            self._bootstrap(group, buffer)
        self.timing.add("infer", time.perf_counter() - started)

    def launch(self, oldest: int) -> int:
        return 0

    def answered(self) -> int | None:
        return self.ready.popleft() if self.ready else None

    def wait(self) -> None: ...

    def send(self, group: int) -> None:
        self.envs.send(group, self.actions[group])

    def finish(self, number: int) -> None: ...

    def stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None: ...

    def _carry_over(self, group: int, last: Rollout, rollout: Rollout) -> None:
        """The newest frames of the last rollout become the history of this one."""
        rows = self.envs.groups[group]
        rollout.frames[: self.stack, rows] = last.frames[-self.stack :, rows].clone()  # both may be the same rollout
        rollout.history[0, rows] = last.history[-1, rows]

    def _write(self, group: int, rollout: Rollout, t: int, step: EnvStep) -> None:
        """Write a step's frame as that of step t and its outcome as that of step t - 1."""
        rows, device = self.envs.groups[group], self.device
        rollout.frames[self.stack - 1 + t, rows] = self.decode(to_device(step.observation, device))
        longer = (rollout.history[t - 1, rows] + 1).clamp_(max=self.stack)
        rollout.history[t, rows] = longer.masked_fill_(to_device(step.first, device), 1)
        rollout.reward[t - 1, rows] = to_device(step.reward, device)
        rollout.terminated[t - 1, rows] = to_device(step.terminated, device)
        rollout.truncated[t - 1, rows] = to_device(step.truncated, device)
        rollout.cut[t - 1, rows] = to_device(step.cut, device)

    def _act(self, group: int, buffer: RolloutBuffer, t: int) -> None:
        """Choose the group's actions for step t; what the policy says of them goes into the rollout."""
        rows, rollout = self.envs.groups[group], buffer.rollout
        output = buffer.policy.act(rollout.stacks[t, rows], rollout.history[t, rows], buffer.uniform[t, rows], rows)
        rollout.action[t, rows] = output.action
        rollout.log_prob[t, rows] = output.log_prob
        rollout.value[t, rows] = output.value
        self.actions[group] = output.action.cpu().numpy()

    def _bootstrap(self, group: int, buffer: RolloutBuffer) -> None:
        """The value of the state after the last step."""
        rows, rollout, t = self.envs.groups[group], buffer.rollout, self.horizon
        rollout.value[t, rows] = buffer.policy.value(rollout.stacks[t, rows], rollout.history[t, rows])


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def make_buffer(
    policy: Policy, seen: EnvSpec, environments: int, stack: int, horizon: int, device: torch.device
) -> RolloutBuffer:
    rollout = allocate_rollout(seen, environments, stack, horizon, device)
    return RolloutBuffer(policy, rollout, torch.empty(rollout.action.shape, device=device))


def allocate_rollout(spec: EnvSpec, environments: int, stack: int, horizon: int, device: torch.device) -> Rollout:
    """An empty rollout on a device."""

    def zeros(time: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros((time, environments, *shape), dtype=dtype, device=device)

    host = torch.device("cpu") if device.type == "cuda" else device
    return Rollout(
        frames=zeros(stack + horizon, torch_dtype(spec.frame_dtype), spec.frame_shape),
        history=zeros(horizon + 1, torch.uint8),
        action=zeros(horizon, torch.int64),
        log_prob=zeros(horizon),
        value=zeros(horizon + 1),
        reward=zeros(horizon),
        terminated=zeros(horizon, torch.bool),
        truncated=zeros(horizon, torch.bool),
        last_value=zeros(horizon),
        cut=zeros(horizon, torch.bool),
        version=torch.zeros((horizon, environments), dtype=torch.int64, device=host),
    )


def rollout_bytes(spec: EnvSpec, environments: int, stack: int, horizon: int) -> int:
    """Memory a rollout takes."""
    rollout = allocate_rollout(spec, environments, stack, horizon, torch.device("meta"))
    return sum(value.numel() * value.element_size() for value in vars(rollout).values() if isinstance(value, Tensor))
