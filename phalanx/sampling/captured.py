"""The collector of a GPU: the same rollout as `Collector`, with its work captured as CUDA graphs.

    groups that are back -> [page-locked step buffer -> frames, history, outcome -> network -> action] -> send

The step buffer lies in page-locked shared memory at fixed addresses, so a graph reads what the workers wrote and
writes actions where they read them. Whoever is back when the device is free is answered together, in one launch: a
step is a chain of many small kernels, which take little longer for many rows than for few. So groups may be small, and
few workers wait for each other. A launch always has the same number of rows, some of them twice, so that an answer does
not depend on who else was there. Which rows, and the step each is at, the host writes into page-locked memory: a
few graphs for each lane serve every group and step. While the device works, whatever is to be done meanwhile is done.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.device import on_stream
from phalanx.runtime.graphs import Capturer, Work
from phalanx.runtime.pages import lock_pages, mapped, unlock_pages
from phalanx.sampling.collector import Collector
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvStep, Progress, Rollout

TURNS = 3  # launches of a lane under way at most: the device has room for several such chains side by side
TOGETHER = 64  # rows of a launch at most, unless a group has more: the device takes longer with them
OUTCOMES = ("reward", "terminated", "truncated", "cut")
Waiting = tuple[int, int]
"""A group that is to be answered, and the step it is at."""
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]
"""To run on, and to capture on: libraries keep scratch memory per stream, which graphs side by side must not share."""


class Turn:
    """A graph's place to read which rows of a lane it is to answer, and the step each is at; and where it runs."""

    def __init__(self, lane: int, order: np.ndarray, streams: Streams, device: torch.device) -> None:
        self.lane = lane
        self.order = order  # [2, rows of a launch]
        self.given = mapped(order, device)
        self.stream, self.capturing = streams
        self.going: list[int] = []  # groups that will go on once they are answered
        self.answered = torch.cuda.Event(blocking=True)

    def fill(self, waiting: list[Waiting], rows: list[list[int]]) -> list[Waiting]:
        """Take as many of the waiting groups as there is room for, in the order in which they came."""
        room, taken = self.order.shape[1], 0
        which: list[int] = []
        when: list[int] = []
        for group, t in waiting:
            own = rows[group]
            if len(which) + len(own) > room:
                break
            which += own
            when += [t] * len(own)
            taken += 1
        left = room - len(which)
        self.order[0], self.order[1] = which + which[:1] * left, when + when[:1] * left  # the first row several times
        served = waiting[:taken]
        del waiting[:taken]
        return served


class CapturedCollector(Collector):
    """Collector whose groups are answered by graph launches."""

    envs: ProcessEnvs

    def __init__(self, *arguments: Any, report: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        self.chosen = [room_for_one_more(lane.rollout) for lane in self.lanes]
        exchange, device = self.envs.exchange, self.device
        self.rows = [list(range(rows.start, rows.stop)) for rows in self.envs.groups]
        size, lanes = rows_of_a_launch([len(rows) for rows in self.rows]), len(self.lanes)
        self.orders = np.frombuffer(mmap.mmap(-1, lanes * TURNS * 2 * size * 8), np.int64)
        self.locked: list[np.ndarray] = [exchange.memory_array, self.orders]
        for memory in self.locked:
            lock_pages(memory)
        names = ("observation", "first", *OUTCOMES)
        self.step = {name: mapped(getattr(exchange.step, name), device) for name in names}
        self.published = mapped(exchange.action, device)
        orders = self.orders.reshape(lanes, TURNS, 2, size)
        # they go before the learner's
        pairs = [(torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)) for _ in range(TURNS)]
        self.streams = [stream for stream, _ in pairs]
        self.free = [
            [Turn(lane, order, streams, device) for order, streams in zip(orders[lane], pairs, strict=True)]
            for lane in range(lanes)
        ]
        self.waiting: list[list[Waiting]] = [[] for _ in range(lanes)]
        self.flying: deque[Turn] = deque()  # on the device, in the order in which they were launched
        self.answers: deque[int] = deque()  # groups whose actions are there
        self.depth = torch.arange(self.stack, device=device)
        self.capturer = Capturer("a step of sampling", report)
        self.launches: dict[tuple[str, Turn], Work] = {}

    def close(self) -> None:
        try:
            torch.cuda.synchronize()  # a group may be ahead
        finally:
            for memory in self.locked:
                unlock_pages(memory)

    def _begin(self, progress: Progress) -> None:
        super()._begin(progress)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())  # where a rollout begins

    def _end(self, progress: Progress) -> Rollout:
        lane = self.collected % len(self.lanes)
        while self.waiting[lane]:
            while not self.free[lane]:
                self._await_answer()  # perhaps first one of another lane
            self._launch(lane)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        rollout = super()._end(progress)
        self._ask_together(lambda: None)  # those that are ahead need not wait for the next call
        return rollout

    def _carry_over(self, group: int) -> None:
        """Nothing: it is part of the graphs below, as is the next."""

    def _write(self, group: int, t: int, step: EnvStep) -> None: ...

    def _ask(self, group: int, t: int, meanwhile: Callable[[], object]) -> None:
        self.waiting[self.done[group] % len(self.lanes)].append((group, t))

    def _bootstrap(self, group: int) -> None:
        self._ask(group, self.horizon, lambda: None)

    def _ask_together(self, meanwhile: Callable[[], object]) -> bool:
        """The older rollout first: the newer one begins with its last frames."""
        started, going = time.perf_counter(), 0
        for number in range(len(self.lanes)):
            lane = (self.collected + number) % len(self.lanes)
            while self.waiting[lane] and self.free[lane]:
                going += self._launch(lane)
            if self.waiting[lane]:
                break
        self.timing.add("infer", time.perf_counter() - started)
        for _ in range(going):
            meanwhile()
        return going > 0

    def _answered(self) -> int | None:
        if not self.answers and self.flying and self.flying[0].answered.query():
            self._land()
        return self.answers.popleft() if self.answers else None

    def _await_answer(self) -> None:
        started = time.perf_counter()
        self.flying[0].answered.synchronize()
        self._land()
        self.timing.add("infer", time.perf_counter() - started)

    def _land(self) -> None:
        """The one that has flown longest: others are seldom back before it, and a look takes time."""
        turn = self.flying.popleft()
        self.free[turn.lane].append(turn)
        self.answers += turn.going

    def _send(self, group: int, meanwhile: Callable[[], object]) -> None:
        started = time.perf_counter()
        self.envs.request(group)  # the device has written the actions
        self.timing.add("env", time.perf_counter() - started)

    def _truncated(self, group: int, t: int, step: EnvStep) -> None:
        with on_stream(self.streams[0]):
            super()._truncated(group, t, step)

    def _launch(self, lane: int) -> int:
        """Have waiting groups answered; how many of them will go on."""
        turn = self.free[lane].pop()
        served = turn.fill(self.waiting[lane], self.rows)
        with on_stream(turn.stream):
            if any(t == 0 for _, t in served):
                for other in self.flying:  # perhaps it writes the frames these begin with, and actions nobody takes
                    turn.stream.wait_event(other.answered)
                self._run("begin", turn, self._captured_begin)
            self._run("answer", turn, self._captured_answer)
            turn.answered.record(turn.stream)
        self.flying.append(turn)
        turn.going = [group for group, t in served if t < self.horizon]
        return len(turn.going)

    def _captured_begin(self, turn: Turn) -> None:
        """The newest frames of the last rollout become the history of this one, for rows that begin it."""
        rows, t = turn.given.clone()
        last, rollout = self.lanes[turn.lane - 1].rollout, self.lanes[turn.lane].rollout
        depth = self.depth[:, None]
        older, own = last.frames[self.horizon + depth, rows], rollout.frames[depth, rows]  # [S, K, *frame]
        begins = t == 0
        frames = torch.where(begins.view(-1, *[1] * (own.dim() - 2)), older, own)
        rollout.frames.index_put_((depth, rows), frames)
        first = rollout.history[0]
        first.index_put_((rows,), torch.where(begins, last.history[-1, rows], first[rows]))

    def _captured_answer(self, turn: Turn) -> None:
        """Write what rows have seen of their last step, and choose their next actions."""
        rows, t = turn.given.clone()
        lane, chosen = self.lanes[turn.lane], self.chosen[turn.lane]
        rollout = lane.rollout
        step = {name: array.index_select(0, rows) for name, array in self.step.items()}
        # rows that begin have taken no step yet: what is written for them stands where the last step will
        is_later = t > 0
        taken = torch.where(is_later, t, self.horizon) - 1
        for name in OUTCOMES:
            getattr(rollout, name).index_put_((taken, rows), step[name])
        longer = (rollout.history[taken, rows] + 1).clamp_(max=self.stack).masked_fill_(step["first"], 1)
        history = torch.where(is_later, longer, rollout.history[0].index_select(0, rows))
        rollout.history.index_put_((t, rows), history)
        rollout.frames.index_put_((taken + self.stack, rows), self.decode(step["observation"]))
        noise = lane.noise[t.clamp(max=self.horizon - 1), rows]
        output = lane.policy.act(self._stacks(rollout, rows, t), history, noise, rows)
        chosen["action"].index_put_((t, rows), output.action)
        taken_of_twins = chosen["action"][t, rows]  # a row that is there twice must do what is remembered of it
        self.published.index_put_((rows,), taken_of_twins.to(self.published.dtype))
        chosen["log_prob"].index_put_((t, rows), output.log_prob)
        rollout.value.index_put_((t, rows), output.value)

    def _stacks(self, rollout: Rollout, rows: Tensor, t: Tensor) -> Tensor:
        """[K, S, *frame]: what rows see at their steps."""
        frames = rollout.frames
        places = (t[:, None] + self.depth) * frames.shape[1] + rows[:, None]
        return frames.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def _run(self, name: str, turn: Turn, work: Callable[[Turn], None]) -> None:
        """Launch a graph; capture it at its first use. To do its work again changes nothing, except where a horizon is
        shorter than the stack: then the frames a rollout begins with are partly those it ended with."""
        launch = self.launches.get((name, turn))
        if launch is None:
            frames, rows = self.lanes[turn.lane].rollout.frames[: self.stack], turn.order[0].tolist()
            before = frames[:, rows]

            def undo() -> None:
                frames[:, rows] = before

            launch = self.capturer.capture(lambda: work(turn), undo, turn.capturing)
            self.launches[name, turn] = launch
        launch()


def room_for_one_more(rollout: Rollout) -> dict[str, Tensor]:
    """What is chosen after each step [T+1, N], the last one too, which nobody takes; the rollout has the first T."""
    chosen = {}
    for name in ("action", "log_prob"):
        short: Tensor = getattr(rollout, name)
        chosen[name] = short.new_zeros((len(short) + 1, *short.shape[1:]))
        setattr(rollout, name, chosen[name][:-1])
    return chosen


def rows_of_a_launch(groups: list[int]) -> int:
    """For groups of so many rows: whole groups, together at most a `TURNS`-th of all environments, but one at least."""
    largest = max(groups)
    return largest * max(1, min(TOGETHER, sum(groups) // TURNS) // largest)
