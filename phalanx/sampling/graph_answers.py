"""The answers of a GPU: what `EagerAnswers` does, captured as CUDA graphs.

    groups that are ready -> [page-locked step buffer -> frames, history, outcome -> network -> action] -> send

The step buffer lies in page-locked shared memory at fixed addresses, so a graph reads what the workers wrote and writes
actions where they read them. When the device has a free launch slot, all ready groups are batched into one graph launch
of fixed size; unused rows repeat the first row. A step is a chain of many small kernels, which take little longer for
many rows than for few: so groups may be small, and few workers wait for each other. Because the size is fixed, an
answer does not depend on who else was ready. Which rows, and the step each is at, the host writes into page-locked
memory: a few graphs for each rollout buffer serve every group and step.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.device import on_stream
from phalanx.runtime.graphs import Capturer, Work
from phalanx.runtime.pages import lock_pages, mapped, unlock_pages
from phalanx.runtime.timing import Timing
from phalanx.sampling.answers import Decoder, RolloutBuffer
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvStep, Rollout

SLOTS = 3  # launches of a buffer in flight at most: the device has room for several such chains side by side
LARGEST_LAUNCH = 64  # rows of a launch at most, unless a group has more: the device takes longer with them
OUTCOMES = ("reward", "terminated", "truncated", "cut")
Waiting = tuple[int, int]
"""A group that is to be answered, and the step it is at."""
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]
"""To run on, and to capture on: libraries keep scratch memory per stream, which graphs side by side must not share."""


class LaunchSlot:
    """Where a graph reads which rows of a rollout buffer it is to answer, and the step each is at; and its stream."""

    def __init__(self, buffer: int, rows_and_steps: np.ndarray, streams: Streams, device: torch.device) -> None:
        self.buffer = buffer
        self.rows_and_steps = rows_and_steps  # [2, rows of a launch]
        self.device_view = mapped(rows_and_steps, device)
        self.stream, self.capturing = streams
        self.continuing: list[int] = []  # groups that will step on once they are answered
        self.answered = torch.cuda.Event(blocking=True)

    def fill(self, waiting: list[Waiting], rows: list[list[int]]) -> list[Waiting]:
        """Take as many of the waiting groups as there is room for, in the order in which they came."""
        room, taken = self.rows_and_steps.shape[1], 0
        which: list[int] = []
        when: list[int] = []
        for group, t in waiting:
            own = rows[group]
            if len(which) + len(own) > room:
                break
            which += own
            when += [t] * len(own)
            taken += 1
        unused = room - len(which)
        self.rows_and_steps[0] = which + which[:1] * unused
        self.rows_and_steps[1] = when + when[:1] * unused
        served = waiting[:taken]
        del waiting[:taken]
        return served


class GraphAnswers:
    """Groups are answered by graph launches, several in flight."""

    asynchronous = True

    def __init__(
        self,
        *,
        envs: ProcessEnvs,
        buffers: list[RolloutBuffer],
        stack: int,
        decode: Decoder,
        timing: Timing,
        report: Callable[[str], None],
    ) -> None:
        self.envs = envs
        self.buffers = buffers
        self.stack = stack
        self.decode = decode
        self.timing = timing
        self.device = device = buffers[0].rollout.action.device
        self.horizon = buffers[0].rollout.steps
        self.chosen = [room_for_one_more(buffer.rollout) for buffer in buffers]
        self.rows = [list(range(rows.start, rows.stop)) for rows in envs.groups]
        self._lock_memory(rows_of_a_launch([len(rows) for rows in self.rows]))
        # They go before the learner's.
        pairs = [(torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)) for _ in range(SLOTS)]
        self.streams = [stream for stream, _ in pairs]
        self.free = [
            [LaunchSlot(number, own, streams, device) for own, streams in zip(of_buffer, pairs, strict=True)]
            for number, of_buffer in enumerate(self.rows_and_steps)
        ]
        self.waiting: list[list[Waiting]] = [[] for _ in buffers]
        self.in_flight: deque[LaunchSlot] = deque()  # in the order in which they were launched
        self.ready: deque[int] = deque()  # groups whose actions are there
        self.depth = torch.arange(self.stack, device=device)
        self.capturer = Capturer("a step of sampling", report)
        self.launches: dict[tuple[str, LaunchSlot], Work] = {}

    def _lock_memory(self, size: int) -> None:
        """Have the device reach the shared step buffer, and the memory in which it is told what to answer."""
        exchange, buffers = self.envs.exchange, len(self.buffers)
        orders = np.frombuffer(mmap.mmap(-1, buffers * SLOTS * 2 * size * 8), np.int64)
        self.rows_and_steps = orders.reshape(buffers, SLOTS, 2, size)
        self.locked: list[np.ndarray] = [exchange.memory_array, orders]
        for memory in self.locked:
            lock_pages(memory)
        names = ("observation", "first", *OUTCOMES)
        self.step = {name: mapped(getattr(exchange.step, name), self.device) for name in names}
        self.published = mapped(exchange.action, self.device)

    def begin(self) -> None:
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())  # where a rollout begins

    def ask(self, group: int, number: int, t: int, step: EnvStep | None) -> None:
        self.waiting[number % len(self.buffers)].append((group, t))

    def launch(self, oldest: int) -> int:
        """The older rollout first: the newer one begins with its last frames."""
        started, continuing = time.perf_counter(), 0
        for number in range(oldest, oldest + len(self.buffers)):
            buffer = number % len(self.buffers)
            while self.waiting[buffer] and self.free[buffer]:
                continuing += self._launch(buffer)
            if self.waiting[buffer]:
                break
        self.timing.add("infer", time.perf_counter() - started)
        return continuing

    def answered(self) -> int | None:
        if not self.ready and self.in_flight and self.in_flight[0].answered.query():
            self._complete_oldest()
        return self.ready.popleft() if self.ready else None

    def wait(self) -> None:
        started = time.perf_counter()
        self.in_flight[0].answered.synchronize()
        self._complete_oldest()
        self.timing.add("infer", time.perf_counter() - started)

    def send(self, group: int) -> None:
        self.envs.request(group)  # the device has written the actions

    def finish(self, number: int) -> None:
        buffer = number % len(self.buffers)
        while self.waiting[buffer]:
            while not self.free[buffer]:
                self.wait()  # perhaps first for one of another buffer
            self._launch(buffer)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def stream(self) -> AbstractContextManager[Any]:
        return on_stream(self.streams[0])

    def close(self) -> None:
        try:
            torch.cuda.synchronize()  # a group may be ahead
        finally:
            for memory in self.locked:
                unlock_pages(memory)

    def _complete_oldest(self) -> None:
        """Later launches are seldom complete before it, and a look takes time."""
        slot = self.in_flight.popleft()
        self.free[slot.buffer].append(slot)
        self.ready += slot.continuing

    def _launch(self, buffer: int) -> int:
        """Have waiting groups answered; how many of them will step on."""
        slot = self.free[buffer].pop()
        served = slot.fill(self.waiting[buffer], self.rows)
        with on_stream(slot.stream):
            if any(t == 0 for _, t in served):
                for other in self.in_flight:  # perhaps it writes the frames these begin with, and actions nobody takes
                    slot.stream.wait_event(other.answered)
                self._run("begin", slot, self._captured_begin)
            self._run("answer", slot, self._captured_answer)
            slot.answered.record(slot.stream)
        self.in_flight.append(slot)
        slot.continuing = [group for group, t in served if t < self.horizon]
        return len(slot.continuing)

    def _captured_begin(self, slot: LaunchSlot) -> None:
        """The newest frames of the last rollout become the history of this one, for rows that begin it."""
        rows, t = slot.device_view.clone()
        last, rollout = self.buffers[slot.buffer - 1].rollout, self.buffers[slot.buffer].rollout
        depth = self.depth[:, None]
        older, own = last.frames[self.horizon + depth, rows], rollout.frames[depth, rows]  # [S, K, *frame]
        begins = t == 0
        frames = torch.where(begins.view(-1, *[1] * (own.dim() - 2)), older, own)
        rollout.frames.index_put_((depth, rows), frames)
        first = rollout.history[0]
        first.index_put_((rows,), torch.where(begins, last.history[-1, rows], first[rows]))

    def _captured_answer(self, slot: LaunchSlot) -> None:
        """Write what rows have seen of their last step, and choose their next actions."""
        rows, t = slot.device_view.clone()
        buffer, chosen = self.buffers[slot.buffer], self.chosen[slot.buffer]
        rollout = buffer.rollout
        step = {name: array.index_select(0, rows) for name, array in self.step.items()}
        # Rows that begin have taken no step yet: what is written for them stands where the last step will.
        is_later = t > 0
        taken = torch.where(is_later, t, self.horizon) - 1
        for name in OUTCOMES:
            getattr(rollout, name).index_put_((taken, rows), step[name])
        longer = (rollout.history[taken, rows] + 1).clamp_(max=self.stack).masked_fill_(step["first"], 1)
        history = torch.where(is_later, longer, rollout.history[0].index_select(0, rows))
        rollout.history.index_put_((t, rows), history)
        rollout.frames.index_put_((taken + self.stack, rows), self.decode(step["observation"]))
        uniform = buffer.uniform[t.clamp(max=self.horizon - 1), rows]
        output = buffer.policy.act(self._stacks(rollout, rows, t), history, uniform, rows)
        chosen["action"].index_put_((t, rows), output.action)
        # A launch may hold a row twice; both copies must publish the action that the rollout has stored.
        stored_actions = chosen["action"][t, rows]
        self.published.index_put_((rows,), stored_actions.to(self.published.dtype))
        chosen["log_prob"].index_put_((t, rows), output.log_prob)
        rollout.value.index_put_((t, rows), output.value)

    def _stacks(self, rollout: Rollout, rows: Tensor, t: Tensor) -> Tensor:
        """[K, S, *frame]: what rows see at their steps."""
        frames = rollout.frames
        places = (t[:, None] + self.depth) * frames.shape[1] + rows[:, None]
        return frames.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def _run(self, name: str, slot: LaunchSlot, work: Callable[[LaunchSlot], None]) -> None:
        """Launch a graph; capture it at its first use. To do its work again changes nothing, except where a horizon is
        shorter than the stack: then the frames a rollout begins with are partly those it ended with."""
        launch = self.launches.get((name, slot))
        if launch is None:
            frames, rows = self.buffers[slot.buffer].rollout.frames[: self.stack], slot.rows_and_steps[0].tolist()
            before = frames[:, rows]

            def undo() -> None:
                frames[:, rows] = before

            launch = self.capturer.capture(lambda: work(slot), undo, slot.capturing)
            self.launches[name, slot] = launch
        launch()


def room_for_one_more(rollout: Rollout) -> dict[str, Tensor]:
    """What is chosen after each step [T+1, B], the last one too, which nobody takes; the rollout has the first T."""
    chosen = {}
    for name in ("action", "log_prob"):
        short: Tensor = getattr(rollout, name)
        chosen[name] = short.new_zeros((len(short) + 1, *short.shape[1:]))
        setattr(rollout, name, chosen[name][:-1])
    return chosen


def rows_of_a_launch(groups: list[int]) -> int:
    """For groups of so many rows: whole groups, together at most a `SLOTS`-th of all environments, but one at least."""
    largest = max(groups)
    return largest * max(1, min(LARGEST_LAUNCH, sum(groups) // SLOTS) // largest)
