"""Segments: up to T steps of one environment, and the bounded queue in which they wait to be learnt from.

    an agent's step -> OpenSegments (a column for each environment) -> Segment -> SegmentQueue -> merged: a Rollout

A segment ends after T steps, or early: with its episode, with the death of its agent, or when its agent is to rest.
Its last row is followed by the value of the state it led to, as the policy that acted saw it, unless the episode
terminated: so the last reward of an episode is in its return. Merged segments are an ordinary rollout; what a short one
lacks is cut, and nobody learns from it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.sampling.answers import Decoder, allocate_rollout, to_device
from phalanx.types import EnvSpec, EnvStep, PolicyOutput, Rollout


@dataclass
class Segment:
    """Steps of one environment, as columns of a rollout."""

    columns: dict[str, Tensor]  # [T, ...] each, or [T+1, ...], as in a rollout
    steps: int  # that were taken, fewer than T in a short one
    counted: int  # those of them that may be learnt from


class OpenSegments:
    """The segments that agents are at. Different threads may work on different rows at the same time."""

    def __init__(self, spec: EnvSpec, environments: int, stack: int, horizon: int, device: torch.device) -> None:
        self.rollout = allocate_rollout(spec, environments, stack, horizon, device)
        self.stack = stack
        self.horizon = horizon
        self.device = device
        self.position = np.zeros(environments, np.int64)  # steps of its segment that each environment has taken
        self.waiting = np.zeros(environments, np.bool_)  # was an action chosen whose outcome has not been received?
        self.begun = np.zeros(environments, np.bool_)  # was its first frame received?

    def receive(self, rows: np.ndarray, step: EnvStep, decode: Decoder) -> None:
        """Take in what the environments of these rows have done."""
        rollout, waited = self.rollout, self.waiting[rows]
        acted = rows[waited]
        at, of = self._index(self.position[acted]), self._index(acted)
        rollout.reward[at, of] = to_device(step.reward[acted], self.device)
        rollout.terminated[at, of] = to_device(step.terminated[acted], self.device)
        rollout.truncated[at, of] = to_device(step.truncated[acted], self.device)
        rollout.cut[at, of] = to_device(step.cut[acted], self.device)
        self.position[acted] += 1
        news = waited | ~self.begun[rows]  # not of one that has rested since its step was received
        rows, waited = rows[news], waited[news]
        self.waiting[rows], self.begun[rows] = False, True
        now, of = self._index(self.position[rows]), self._index(rows)
        rollout.frames[now + (self.stack - 1), of] = decode(to_device(step.observation[rows], self.device))
        longer = (rollout.history[(now - 1).clamp(min=0), of] + 1).clamp(max=self.stack)
        first = to_device(step.first[rows] | ~waited, self.device)
        rollout.history[now, of] = longer.masked_fill(first, 1)

    def stacks(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """What the policy sees of these rows: [N, S, *frame] and the history."""
        now, of = self._index(self.position[rows]), self._index(rows)
        return self.rollout.frames[now[:, None] + self._ahead(), of[:, None]], self.rollout.history[now, of]

    def last_stacks(self, rows: np.ndarray, step: EnvStep, decode: Decoder) -> tuple[Tensor, Tensor]:
        """The same as of the true last observations of episodes that these rows have just truncated."""
        before, of = self._index(self.position[rows] - 1), self._index(rows)
        older = self.rollout.frames[before[:, None] + 1 + self._ahead()[:-1], of[:, None]]
        last = decode(to_device(step.last_observation[rows], self.device))
        history = (self.rollout.history[before, of] + 1).clamp(max=self.stack)
        return torch.cat([older, last[:, None]], dim=1), history

    def set_last_value(self, rows: np.ndarray, value: Tensor) -> None:
        """The values of those observations."""
        self.rollout.last_value[self._index(self.position[rows] - 1), self._index(rows)] = value

    def choose(self, rows: np.ndarray, output: PolicyOutput, version: int) -> None:
        """The actions that the environments of these rows take next, and what the policy said of them."""
        now, of = self._index(self.position[rows]), self._index(rows)
        self.rollout.action[now, of] = output.action
        self.rollout.log_prob[now, of] = output.log_prob
        self.rollout.value[now, of] = output.value
        self.rollout.last_value[now, of] = 0.0
        self.rollout.version[now.cpu(), of.cpu()] = version
        self.waiting[rows] = True

    def close(self, rows: np.ndarray, value: Tensor) -> list[Segment]:
        """End the segments of these rows, which led to states of these values, and begin new ones there. A segment from
        which nothing can be learnt is dropped."""
        self.rollout.value[self._index(self.position[rows]), self._index(rows)] = value
        segments = [self._close(int(row)) for row in rows]
        return [segment for segment in segments if segment.counted]

    def _close(self, row: int) -> Segment:
        rollout, steps = self.rollout, int(self.position[row])
        columns = {name: tensor[:, row].clone() for name, tensor in rollout.tensors().items()}
        columns["cut"][steps:] = True
        for name in ("reward", "last_value", "terminated", "truncated"):
            columns[name][steps:] = 0
        columns["frames"][self.stack + steps :] = 0
        rollout.frames[: self.stack, row] = columns["frames"][steps : steps + self.stack]
        rollout.history[0, row] = columns["history"][steps]
        self.position[row] = 0
        return Segment(columns, steps, steps - int(columns["cut"][:steps].sum()))

    def state(self) -> dict[str, Any]:
        return {
            "rollout": {name: tensor.clone() for name, tensor in self.rollout.tensors().items()},
            "position": self.position.copy(),
            "waiting": self.waiting.copy(),
            "begun": self.begun.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rollout.load(state["rollout"])
        for name in ("position", "waiting", "begun"):
            getattr(self, name)[:] = state[name]

    def _index(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def _ahead(self) -> Tensor:
        return torch.arange(self.stack, device=self.device)


def merged(segments: Sequence[Segment]) -> Rollout:
    """A rollout whose environments are the segments."""
    names = segments[0].columns
    columns: dict[str, Any] = {name: torch.stack([segment.columns[name] for segment in segments], 1) for name in names}
    return Rollout(**columns)


class SegmentQueue:
    """Segments on their way from predictors to trainers. What enters first leaves first; a full queue takes nobody's
    place: who would close a segment asks for room before."""

    def __init__(self, bound: int, made_room: Callable[[], None] = lambda: None) -> None:
        self.bound = bound
        self.made_room = made_room  # called when a segment leaves
        self.segments: deque[Segment] = deque()
        self.promised = 0  # places of segments that are about to be put
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def room(self) -> int:
        return self.bound - len(self.segments) - self.promised

    def reserve(self, count: int) -> bool:
        """Keep places for so many segments; True if they may be closed. An agent with several environments may close
        more at once than there is room for, if there is any."""
        with self.changed:
            if count and self.room <= 0:
                return False
            self.promised += count
            return True

    def put(self, segments: Sequence[Segment], reserved: int) -> None:
        """Into the places that were reserved for them, of which some may not be needed."""
        with self.changed:
            self.promised -= reserved
            self.segments.extend(segments)
            self.changed.notify_all()

    def put_back(self, segments: Sequence[Segment]) -> None:
        """What somebody took and could not learn from goes first again."""
        with self.changed:
            self.segments.extendleft(reversed(segments))
            self.changed.notify_all()

    def take(self, seconds: float) -> Segment | None:
        """The oldest segment; waits for one for so long."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.segments, seconds):
                return None
            segment = self.segments.popleft()
        self.made_room()
        return segment
