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

from phalanx.errors import NotFinite
from phalanx.sampling.answers import Decoder, allocate_rollout, to_device
from phalanx.types import EnvSpec, EnvStep, Rollout

ARRAYS = ("position", "waiting", "begun", "played")  # of open segments, a number for each environment


@dataclass
class Segment:
    """Steps of one environment, as columns of a rollout."""

    frames: Tensor  # [S-1 + T+1, *frame], on the device
    columns: dict[str, np.ndarray]  # everything else of a rollout, [T] or [T+1]
    steps: int  # that were taken, fewer than T in a short one
    counted: int  # those of them that may be learnt from

    def state(self) -> dict[str, Any]:
        """Plain values that a checkpoint holds, with memory of their own: segments that ended together share theirs."""
        columns = {name: column.copy() for name, column in self.columns.items()}
        return {"frames": self.frames.clone(), "columns": columns, "steps": self.steps, "counted": self.counted}


class OpenSegments:
    """The segments that agents are at, a row for each environment. Frames are on the device of the network, all the
    rest is on the host. Different threads may work on different rows at the same time."""

    def __init__(self, spec: EnvSpec, environments: int, stack: int, horizon: int, device: torch.device) -> None:
        self.stack = stack
        self.horizon = horizon
        self.device = device
        empty = allocate_rollout(spec, environments, stack, horizon, torch.device("meta"))
        self.frames = torch.zeros((environments, *empty.frames[:, 0].shape), dtype=empty.frames.dtype, device=device)
        self.columns = {
            name: torch.zeros((environments, len(like)), dtype=like.dtype).numpy()
            for name, like in empty.tensors().items()
            if name != "frames"
        }
        self.position = np.zeros(environments, np.int64)  # steps of its segment that each environment has taken
        self.waiting = np.zeros(environments, np.bool_)  # was an action chosen whose outcome has not been received?
        self.begun = np.zeros(environments, np.bool_)  # was its first frame received?
        self.played = np.full(environments, np.nan)  # steps of its game; not known of one whose start was not seen

    def receive(self, rows: np.ndarray, step: EnvStep) -> np.ndarray:
        """Note what the environments of these rows have done; the rows whose newest frame is to be taken in."""
        columns, waited = self.columns, self.waiting[rows]
        acted = rows[waited]
        place = acted, self.position[acted]
        columns["reward"][place] = step.reward[acted]
        self.refuse_not_finite("reward", step.reward[acted], acted)
        columns["terminated"][place] = step.terminated[acted]
        columns["truncated"][place] = step.truncated[acted]
        columns["cut"][place] = step.cut[acted]
        self.position[acted] += 1
        news = waited | ~self.begun[rows]  # not of one that has rested since its step was received
        rows, waited = rows[news], waited[news]
        self.waiting[rows], self.begun[rows] = False, True
        now = self.position[rows]
        longer = np.minimum(columns["history"][rows, np.maximum(now - 1, 0)] + 1, self.stack)
        columns["history"][rows, now] = np.where(step.first[rows] | ~waited, 1, longer)
        return rows

    def take_in(self, rows: np.ndarray, frames: Tensor) -> None:
        """The newest frames of these rows, on the device."""
        places = torch.from_numpy(self.starts(rows) + (self.stack - 1)).to(self.device)
        self.single_frames.index_copy_(0, places, frames)

    def games_over(self, rows: np.ndarray, step: EnvStep) -> tuple[list[float], list[int]]:
        """Scores of the games that ended with the steps of these rows, and the steps of those whose start was seen."""
        over = ~np.isnan(step.score[rows])
        self.played[rows] += 1
        taken = self.played[rows[over]]
        self.played[rows[over | step.cut[rows]]] = 0  # one that took the place of another begins a game
        return step.score[rows[over]].tolist(), taken[~np.isnan(taken)].astype(np.int64).tolist()

    def stacks(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """What the policy sees of these rows: [N, S, *frame] and the history."""
        return self._stacks(rows, self.position[rows], self.stack), to_device(self.history(rows), self.device)

    def history(self, rows: np.ndarray) -> np.ndarray:
        """How many frames of these stacks belong to the running episode."""
        return self.columns["history"][rows, self.position[rows]]

    def last_stacks(self, rows: np.ndarray, step: EnvStep, decode: Decoder) -> tuple[Tensor, Tensor]:
        """The same as of the true last observations of episodes that these rows have just truncated."""
        before = self.position[rows] - 1
        self.refuse_not_finite("last observation of a truncated episode", step.last_observation[rows], rows)
        last = decode(to_device(step.last_observation[rows], self.device))
        stacks = torch.cat([self._stacks(rows, before + 1, self.stack - 1), last[:, None]], dim=1)
        history = np.minimum(self.columns["history"][rows, before] + 1, self.stack)
        return stacks, to_device(history, self.device)

    def set_last_value(self, rows: np.ndarray, value: Tensor) -> None:
        """The values of those observations."""
        self.columns["last_value"][rows, self.position[rows] - 1] = value.cpu().numpy()

    def choose(
        self, rows: np.ndarray, action: np.ndarray, log_prob: np.ndarray, value: np.ndarray, version: int
    ) -> None:
        """The actions that the environments of these rows take next, and what the policy said of them."""
        columns, place = self.columns, (rows, self.position[rows])
        columns["action"][place] = action
        columns["log_prob"][place] = log_prob
        columns["value"][place] = value
        columns["last_value"][place] = 0.0
        columns["version"][place] = version
        self.waiting[rows] = True

    def cut_frames(self, rows: np.ndarray) -> Tensor:
        """The frames of the segments that end in these rows [N, S-1 + T+1, *frame]; those that begin there have the
        newest of them. All of it is for the device to do: `close` does not wait for it."""
        if not len(rows):
            return self.frames[:0]
        steps = self.position[rows]
        frames = self.frames.index_select(0, torch.from_numpy(rows).to(self.device))
        newest = self._stacks(rows, steps, self.stack)
        heads = self._places(rows[:, None], np.arange(self.stack)[None])
        self.single_frames.index_copy_(0, heads.view(-1), newest.flatten(0, 1))
        if (steps < self.horizon).any():
            beyond = np.arange(frames.shape[1]) >= self.stack + steps[:, None]
            frames.masked_fill_(to_device(beyond, self.device).view(*beyond.shape, *[1] * (frames.dim() - 2)), 0)
        return frames

    def close(self, rows: np.ndarray, value: np.ndarray, frames: Tensor) -> list[Segment]:
        """End the segments of these rows, which led to states of these values and have the frames that were cut, and
        begin new ones there. A segment from which nothing can be learnt is dropped."""
        steps = self.position[rows]
        self.columns["value"][rows, steps] = value
        columns = {name: column[rows] for name, column in self.columns.items()}
        self.columns["history"][rows, 0] = columns["history"][np.arange(len(rows)), steps]
        self.position[rows] = 0
        beyond = np.arange(self.horizon) >= steps[:, None]
        columns["cut"] |= beyond
        for name in ("reward", "last_value", "terminated", "truncated"):
            columns[name][beyond] = 0
        counted = (self.horizon - columns["cut"].sum(1)).tolist()
        parts = zip(frames.unbind(), *columns.values(), strict=True)
        return [
            Segment(own, dict(zip(columns, of_row, strict=True)), taken, counts)
            for (own, *of_row), taken, counts in zip(parts, steps.tolist(), counted, strict=True)
            if counts
        ]

    def state(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in ARRAYS}
        columns = {name: column.copy() for name, column in self.columns.items()}
        return {"frames": self.frames.clone(), "columns": columns, **arrays}

    def restore(self, state: dict[str, Any]) -> None:
        self.frames.copy_(state["frames"])
        for name, column in self.columns.items():
            column[:] = state["columns"][name]
        for name in ARRAYS:
            if name in state:  # older checkpoints do not know `played`, which then is not known here either
                getattr(self, name)[:] = state[name]

    def fits(self, state: dict[str, Any]) -> bool:
        """Is it of as many environments, and of segments of the same size?"""
        same_columns = all(state["columns"][name].shape == column.shape for name, column in self.columns.items())
        return bool(state["frames"].shape == self.frames.shape) and same_columns

    def closed(self, state: dict[str, Any]) -> Segment:
        """A segment of that state, as if it had been closed here: checkpoints are read into the host's memory."""
        return Segment(**{**state, "frames": state["frames"].to(self.device)})

    def may_hold(self, segment: Segment) -> bool:
        """Could it have been closed here?"""
        same_columns = all(segment.columns[name].shape == column[0].shape for name, column in self.columns.items())
        return bool(segment.frames.shape == self.frames.shape[1:]) and same_columns

    def refuse_not_finite(self, name: str, values: np.ndarray, rows: np.ndarray) -> None:
        """Refuse what is not finite, and name its environments; their open segments are the evidence."""
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = rows[~np.isfinite(values).reshape(len(rows), -1).all(1)]
            columns: dict[str, Any] = {name: torch.from_numpy(column[bad].T) for name, column in self.columns.items()}
            frames = self.frames[torch.from_numpy(bad).to(self.device)].transpose(0, 1)
            raise NotFinite(f"the {name} of environment {bad.tolist()} is not finite", Rollout(frames, **columns))

    @property
    def single_frames(self) -> Tensor:
        """All frames of all rows in one line: whole frames are copied, not single bytes of many."""
        return self.frames.flatten(0, 1)

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Where in that line the stacks that the policy sees of these rows begin."""
        return rows * self.frames.shape[1] + self.position[rows]

    def _stacks(self, rows: np.ndarray, start: np.ndarray, count: int) -> Tensor:
        places = self._places(rows[:, None], start[:, None] + np.arange(count))
        chosen = self.single_frames.index_select(0, places.view(-1))
        return chosen.view(len(rows), count, *chosen.shape[1:])

    def _places(self, rows: np.ndarray, frames: np.ndarray) -> Tensor:
        return torch.from_numpy(rows * self.frames.shape[1] + frames).to(self.device)


def merged(segments: Sequence[Segment]) -> Rollout:
    """A rollout whose environments are the segments."""
    device = segments[0].frames.device
    columns: dict[str, Any] = {}
    for name in segments[0].columns:
        column = torch.from_numpy(np.stack([segment.columns[name] for segment in segments], 1))
        columns[name] = column if name == "version" else column.to(device)
    return Rollout(frames=torch.stack([segment.frames for segment in segments], 1), **columns)


class SegmentQueue:
    """Segments on their way from predictors to trainers. What enters first leaves first; a full queue takes nobody's
    place: who would close a segment asks for room before."""

    def __init__(self, bound: int, made_room: Callable[[], None] = lambda: None) -> None:
        self.bound = bound
        self.made_room = made_room  # called when a segment leaves a full queue
        self.segments: deque[Segment] = deque()
        self.promised = 0  # places of segments that are about to be put
        self.unlearnt = 0  # segments that were put and not learnt from yet, those counted in that trainers hold
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def room(self) -> int:
        return self.bound - len(self.segments) - self.promised

    def reserve(self, counts: Sequence[int]) -> int:
        """Keep places for so many segments of each of several agents; how many of the agents got theirs. One with
        several environments may close more at once than there is room for, if there is any."""
        with self.changed:
            granted = 0
            for count in counts:
                if self.room <= 0:
                    break
                self.promised += count
                granted += 1
            return granted

    def give_back(self, places: int) -> None:
        """Places that were kept are not needed."""
        with self.changed:
            self.promised -= places

    def put(self, segments: Sequence[Segment], reserved: int) -> None:
        """Into the places that were reserved for them, of which some may not be needed."""
        with self.changed:
            self.promised -= reserved
            self.unlearnt += len(segments)
            self.segments.extend(segments)
            self.changed.notify_all()

    def put_back(self, segments: Sequence[Segment]) -> None:
        """What somebody took and could not learn from goes first again."""
        with self.changed:
            self.segments.extendleft(reversed(segments))
            self.changed.notify_all()

    def learnt(self, count: int) -> None:
        """So many were learnt from."""
        with self.changed:
            self.unlearnt -= count

    def take(self, seconds: float) -> Segment | None:
        """The oldest segment; waits for one for so long."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.segments, seconds):
                return None
            was_full = self.room <= 0
            segment = self.segments.popleft()
        if was_full:
            self.made_room()
        return segment
