"""The replay memory's frames and outcomes: step 5 of a transition's way when the algorithm learns from memory.

Each frame is stored once, in a ring of time rows [L, B]. Stacks, n-step returns and bootstrap stacks are gathered
when a row is read, so that 1,000,000 steps of 84x84 frames take 7.1 GB. A row's id is its absolute step number
times B plus its environment: it is never used twice, so a late priority cannot hit a row that was overwritten.

    time row   oldest ... | S-1 rows: frames of stacks only | drawable rows | n rows: look-ahead only | next write
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import RunError, UserError
from phalanx.runtime.affinity import free_memory
from phalanx.runtime.pages import mapped_zeros
from phalanx.types import EnvSpec, ReplayBatch, Rollout, torch_dtype

TERMINATED, TRUNCATED = 1, 2  # codes in the table of episode ends; 0 where the episode goes on
SAVED_AT_ONCE = 1 << 24  # bytes of frames written between two looks at who is waiting, or read at once
SAVE_TIMEOUT = 600.0  # seconds a `put` waits for the rows it overwrites to be saved
MIN_LAST_FRAMES = 256  # first size of the table of truncated episodes' last frames; graphs that read it go stale then
TABLES = ("frames", "history", "action", "reward", "end", "cut")


class RowsBeingSaved:
    """Time rows that are being saved while the storage goes on: those not saved yet must not be overwritten."""

    def __init__(self, rows: range) -> None:
        self.rows = rows
        self.saved = rows.start  # rows before this one are safe in the file
        self.moved = threading.Condition()

    def advance(self, row: int) -> None:
        with self.moved:
            self.saved = max(self.saved, row)
            self.moved.notify_all()

    def wait_for(self, row: int) -> None:
        """Until the rows before `row` are saved."""
        with self.moved:
            if not self.moved.wait_for(lambda: self.saved >= min(row, self.rows.stop), SAVE_TIMEOUT):
                raise RunError(f"the replay memory could not be saved for {SAVE_TIMEOUT:g} s; is the disk stuck?")


class FrameStorage:
    """A ring of L = capacity // environments time rows, read by absolute id."""

    def __init__(
        self,
        spec: EnvSpec,
        stack: int,
        environments: int,
        capacity: int,
        n_step: int,
        discount: float,
        device: torch.device,
        frames_on_host: bool = False,
    ) -> None:
        self.stack, self.environments, self.n_step, self.device = stack, environments, n_step, device
        self.frames_on_host = frames_on_host  # a GPU reads them over the bus
        self.length = capacity // environments
        if self.length < stack + n_step:
            raise UserError(
                f"a memory of {capacity} steps leaves {self.length} for each of {environments} environments, but "
                f"stacks and returns need {stack + n_step}; raise algorithm.replay_size to at least "
                f"{(stack + n_step) * environments}"
            )
        self.rows = self.length * environments
        self.may_look = device.type == "cpu"  # there it is free; with a GPU one would wait for all work before
        self.written = 0  # time rows ever written
        self.being_saved: RowsBeingSaved | None = None
        # zeros, not empty: the system hands out such memory lazily, and no read ever meets a stray NaN
        if frames_on_host:
            shape = (self.length, environments, *spec.frame_shape)
            self.frames = mapped_zeros(shape, np.dtype(spec.frame_dtype), device)
        else:
            self.frames = self._table(torch_dtype(spec.frame_dtype), spec.frame_shape)
        self.history = self._table(torch.uint8)
        self.action = self._table(action_dtype(spec.actions))
        self.reward = self._table(torch.float32)
        self.end = self._table(torch.uint8)
        self.cut = self._table(torch.bool)
        # true last frames of truncated episodes: a growing table, the slot each row uses, and who holds a slot
        self.last_frames = torch.zeros((0, *spec.frame_shape), dtype=self.frames.dtype, device=device)
        self.last_slot = self._table(torch.int32)
        self.held: deque[tuple[int, int]] = deque()  # (id, slot), oldest first
        self.free: list[int] = []
        self.powers = torch.tensor([discount**k for k in range(n_step + 1)], dtype=torch.float32, device=device)
        self.ahead = torch.arange(n_step + 1, device=device) * environments
        self.back = torch.arange(1 - stack, 1, device=device) * environments

    def _table(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros((self.length, self.environments, *shape), dtype=dtype, device=self.device)

    @property
    def filled(self) -> int:
        """Time rows that hold something."""
        return min(self.written, self.length)

    @property
    def drawable(self) -> range:
        """Ids whose stack and look-ahead are stored; cut rows among them must not be drawn."""
        start = self.written - self.filled + self.stack - 1
        return range(start * self.environments, max(start, self.written - self.n_step) * self.environments)

    def put(self, rollout: Rollout) -> None:
        """Append a rollout, which continues the one before; the oldest rows give way."""
        steps = rollout.steps
        if steps > self.length:
            raise UserError(
                f"a rollout of {steps} steps does not fit into a memory of {self.length} steps per environment; raise "
                f"algorithm.replay_size to at least {(steps + self.stack + self.n_step) * self.environments}"
            )
        if self.being_saved is not None:
            self.being_saved.wait_for(self.written + steps - self.length)
        self._release((self.written + steps - self.length) * self.environments)
        columns = (
            (self.frames, rollout.frames[self.stack - 1 :]),
            (self.history, rollout.history),
            (self.action, rollout.action),
            (self.reward, rollout.reward),
            (self.end, torch.where(rollout.terminated, TERMINATED, rollout.truncated * TRUNCATED)),
            (self.cut, rollout.cut),
        )
        done = 0
        for rows in ring_slices(range(self.written, self.written + steps), self.length):
            count = rows.stop - rows.start
            for table, values in columns:
                table[rows] = values[done : done + count]
            done += count
        if rollout.last_frames:
            keys = sorted(rollout.last_frames)
            ids = [(self.written + t) * self.environments + b for t, b in keys]
            self._keep_last_frames(ids, torch.stack([rollout.last_frames[key] for key in keys]))
        self.written += steps

    def mark_gap(self) -> None:
        """The next rollout does not continue the last one: nothing is learnt from the steps in between."""
        if self.written:
            self.cut[(self.written - 1) % self.length] = True

    def read(self, ids: Tensor, weight: Tensor) -> ReplayBatch:
        """The transitions [N] of drawable ids. A window of up to n rewards stops after the end of an episode and
        before a cut step; it bootstraps from the observation where it stops, after a truncation from the true last."""
        rows = ids % self.rows
        window = (rows[:, None] + self.ahead) % self.rows  # [N, n+1]
        steps = window[:, :-1]
        end = self.end.view(-1)[steps]
        summed = torch.ones_like(end, dtype=torch.bool)
        summed[:, 1:] = (end[:, :-1] == 0) & ~self.cut.view(-1)[steps[:, 1:]]
        summed = summed.cumprod(1)
        length = summed.sum(1, keepdim=True)
        reward = self.reward.view(-1)[steps] * summed * self.powers[:-1]
        last, following = steps.gather(1, length - 1).squeeze(1), window.gather(1, length).squeeze(1)
        last_end = self.end.view(-1)[last]
        history = self.history.view(-1)
        next_stacks, next_history = self._stacks(following), history[following]
        truncated = last_end == TRUNCATED
        if len(self.last_frames) and not (self.may_look and not bool(truncated.any())):
            next_history = torch.where(truncated, (history[last] + 1).clamp(max=self.stack), next_history)
            frames = self.last_frames.index_select(0, self.last_slot.view(-1)[last])
            shape = (-1, *[1] * (frames.dim() - 1))
            next_stacks[:, -1] = torch.where(truncated.view(shape), frames, next_stacks[:, -1])
        return ReplayBatch(
            stacks=self._stacks(rows),
            history=history[rows],
            action=self.action.view(-1)[rows].long(),
            returns=reward.sum(1),
            next_stacks=next_stacks,
            next_history=next_history,
            next_discount=self.powers[length.squeeze(1)] * (last_end != TERMINATED),
            weight=weight,
            ids=ids,
        )

    def _stacks(self, rows: Tensor) -> Tensor:
        """[N, S, *frame]: whole frames are gathered, one memory copy each."""
        chosen = (rows[:, None] + self.back) % self.rows
        frames = self.frames.flatten(0, 1).index_select(0, chosen.flatten())
        return frames.view(len(rows), self.stack, *frames.shape[1:])

    def _keep_last_frames(self, ids: list[int], frames: Tensor) -> None:
        """Give each truncated step a slot for its episode's last frame."""
        while len(self.free) < len(ids):
            size = len(self.last_frames)
            grown = self.last_frames.new_zeros((max(2 * size, MIN_LAST_FRAMES), *self.last_frames.shape[1:]))
            grown[:size] = self.last_frames
            self.free += range(size, len(grown))
            self.last_frames = grown
        slots = [self.free.pop() for _ in ids]
        self.held.extend(zip(ids, slots, strict=True))
        where = torch.tensor(slots, device=self.device)
        self.last_frames[where] = frames.to(self.device)
        self.last_slot.view(-1)[torch.tensor(ids, device=self.device) % self.rows] = where.int()

    def _release(self, oldest: int) -> None:
        """Take back the slots of rows older than the id `oldest`."""
        while self.held and self.held[0][0] < oldest:
            self.free.append(self.held.popleft()[1])

    def state(self) -> dict[str, Any]:
        """What is small; `saver` writes the tables."""
        ids, slots = zip(*self.held, strict=True) if self.held else ((), ())
        return {
            "written": self.written,
            "length": self.length,
            "environments": self.environments,
            "last_ids": list(ids),
            "last_frames": self.last_frames[list(slots)],
        }

    def saver(self) -> TableSaver:
        """What writes the tables as they are now into a directory, in another thread if need be."""
        self.being_saved = RowsBeingSaved(range(self.written - self.filled, self.written))
        return TableSaver(self, self.being_saved)

    def parts(self, span: range) -> Iterator[range]:
        """Time rows a few at a time, in order."""
        step = max(1, SAVED_AT_ONCE // (self.frames[0].numel() * self.frames.element_size()))
        for start in range(span.start, span.stop, step):
            yield range(start, min(start + step, span.stop))

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Fill a fresh storage from a state and the tables that `saver` wrote; no table is in memory twice."""
        if state["length"] != self.length or state["environments"] != self.environments:
            raise UserError(
                f"the checkpoint's memory has {state['environments']} environments x {state['length']} "
                f"steps, this run has {self.environments} x {self.length}; resume with the same algorithm.replay_size "
                f"and sampler.environments"
            )
        self.written = state["written"]
        for name in TABLES:
            table = getattr(self, name)
            with (directory / table_file(name)).open("rb") as file:
                for part in self.parts(range(self.written - self.filled, self.written)):
                    for rows in ring_slices(part, self.length):
                        table[rows] = read_rows(file, table[rows]).to(self.device)
        if state["last_ids"]:
            self._keep_last_frames(state["last_ids"], state["last_frames"])


def read_rows(file: BinaryIO, like: Tensor) -> Tensor:
    """The next rows of a table's file, of the shape and type of others."""
    raw = np.fromfile(file, np.uint8, like.numel() * like.element_size())
    return torch.from_numpy(raw).view(like.dtype).view(like.shape)


def table_file(name: str) -> str:
    return f"replay-{name}.bin"


def ring_slices(span: range, size: int) -> list[slice]:
    """Where the absolute positions of `span` lie in a ring: no, one or two slices, in order."""
    if not span:
        return []
    start, stop = span.start % size, span.start % size + len(span)
    return [slice(start, stop)] if stop <= size else [slice(start, size), slice(0, stop - size)]


def action_dtype(actions: int) -> torch.dtype:
    """The smallest type that tells so many actions apart."""
    return torch.uint8 if actions <= 256 else torch.int32


def frame_bytes(spec: EnvSpec, environments: int, capacity: int) -> int:
    """Bytes of a full FrameStorage's frames; last frames of truncated episodes, one each, come on top."""
    frame = int(np.prod(spec.frame_shape)) * np.dtype(spec.frame_dtype).itemsize
    return capacity // environments * environments * frame


def storage_bytes(spec: EnvSpec, environments: int, capacity: int) -> int:
    """Bytes of a full FrameStorage."""
    small = torch.uint8.itemsize * 2 + torch.bool.itemsize + torch.float32.itemsize + torch.int32.itemsize
    rows = capacity // environments * environments
    return frame_bytes(spec, environments, capacity) + rows * (small + action_dtype(spec.actions).itemsize)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on a device, those included that torch keeps for later."""
    if device.type == "cpu":
        return free_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


class TableSaver:
    """Writes a storage's tables as they were: the oldest rows first, which are the next to be overwritten, so that
    `put` hardly ever waits."""

    def __init__(self, storage: FrameStorage, being_saved: RowsBeingSaved) -> None:
        self.storage = storage
        self.being_saved = being_saved

    def __call__(self, directory: Path) -> None:
        storage, being_saved = self.storage, self.being_saved
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context((directory / table_file(name)).open("wb")) for name in TABLES}
            for part in storage.parts(being_saved.rows):
                for rows in ring_slices(part, storage.length):
                    for name, file in files.items():
                        table = getattr(storage, name)[rows].cpu().contiguous()
                        file.write(table.view(-1).view(torch.uint8).numpy())
                being_saved.advance(part.stop)

    def release(self) -> None:
        self.being_saved.advance(self.being_saved.rows.stop)
