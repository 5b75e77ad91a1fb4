"""The collector of a GPU: the same rollout as `Collector`, with each group's work captured as CUDA graphs.

    recv(g) -> [page-locked step buffer -> frames, history, outcome -> network -> action] -> send(g)

The step buffer lies in page-locked shared memory at fixed addresses, so a graph reads what the workers wrote and
writes actions where they read them. The step number t lives on the device: one graph per group and lane serves every
step.
Each group has a stream, all of which go before the learner's: a step is a chain of many small kernels, and those of
several groups run side by side. While the device works, the next group that is back is served, and whatever is to be
done meanwhile is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.runtime.device import on_stream
from phalanx.runtime.graphs import Capturer, Work
from phalanx.runtime.pages import lock_pages, mapped, unlock_pages
from phalanx.sampling.collector import Collector
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvStep, Progress, Rollout


class CapturedCollector(Collector):
    """Collector whose steps are one graph launch each."""

    envs: ProcessEnvs

    def __init__(self, *arguments: Any, report: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        exchange, groups = self.envs.exchange, self.envs.groups
        lock_pages(exchange.memory_array)
        self.step = [mapped_step(exchange.step[rows], self.device) for rows in groups]
        self.published = [mapped(exchange.action[rows], self.device) for rows in groups]
        self.t = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in groups]
        self.depth = torch.arange(self.stack, device=self.device)
        self.capturer = Capturer("a step of sampling", report)
        self.launches: dict[tuple[str, int, int], Work] = {}  # a graph for each group and lane
        self.answered = [torch.cuda.Event(blocking=True) for _ in groups]
        self.streams = [torch.cuda.Stream(priority=-1) for _ in groups]
        self.capturing = [torch.cuda.Stream(priority=-1) for _ in groups]

    def close(self) -> None:
        try:
            torch.cuda.synchronize()  # a group may be ahead
        finally:
            unlock_pages(self.envs.exchange.memory_array)

    def _end(self, progress: Progress) -> Rollout:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        return super()._end(progress)

    def _carry_over(self, group: int) -> None:
        stream = self.streams[group]
        stream.wait_stream(torch.cuda.current_stream())  # where a rollout begins
        with on_stream(stream):
            super()._carry_over(group)
            self.t[group].zero_()

    def _write(self, group: int, t: int, step: EnvStep) -> None:
        """Nothing: it is part of the graphs below."""

    def _ask(self, group: int, t: int, meanwhile: Callable[[], object]) -> None:
        started = time.perf_counter()
        self._run("step" if t else "start", group, lambda: self._captured_step(group, t > 0))
        self.answered[group].record(self.streams[group])
        self.timing.add("infer", time.perf_counter() - started)
        meanwhile()

    def _is_answered(self, group: int) -> bool:
        return bool(self.answered[group].query())

    def _await_answer(self, group: int) -> None:
        started = time.perf_counter()
        self.answered[group].synchronize()
        self.timing.add("infer", time.perf_counter() - started)

    def _send(self, group: int, meanwhile: Callable[[], object]) -> None:
        started = time.perf_counter()
        self.envs.request(group)  # the device has written the actions
        self.timing.add("env", time.perf_counter() - started)

    def _bootstrap(self, group: int) -> None:
        self._run("end", group, lambda: self._captured_end(group))

    def _truncated(self, group: int, t: int, step: EnvStep) -> None:
        with on_stream(self.streams[group]):
            super()._truncated(group, t, step)

    def _captured_step(self, group: int, received: bool) -> None:
        if received:
            self._captured_write(group)
        self._captured_act(group)

    def _captured_end(self, group: int) -> None:
        self._captured_write(group)
        lane, rows, t = self._lane_of(group), self.envs.groups[group], self.t[group]
        lane.rollout.value[:, rows].index_copy_(0, t, lane.policy.value(*self._seen(group))[None])

    def _captured_write(self, group: int) -> None:
        rollout, rows = self._lane_of(group).rollout, self.envs.groups[group]
        step, t = self.step[group], self.t[group]
        frame = self.decode(step["observation"])
        longer = (rollout.history[:, rows].index_select(0, t)[0] + 1).clamp_(max=self.stack)
        for name in ("reward", "terminated", "truncated", "cut"):
            getattr(rollout, name)[:, rows].index_copy_(0, t, step[name][None])
        t.add_(1)
        rollout.frames[:, rows].index_copy_(0, t + (self.stack - 1), frame[None])
        rollout.history[:, rows].index_copy_(0, t, longer.masked_fill(step["first"], 1)[None])

    def _captured_act(self, group: int) -> None:
        lane, rows, t = self._lane_of(group), self.envs.groups[group], self.t[group]
        rollout, noise = lane.rollout, lane.noise[:, rows].index_select(0, t)[0]
        output = lane.policy.act(*self._seen(group), noise, rows)
        self.published[group].copy_(output.action)
        rollout.action[:, rows].index_copy_(0, t, output.action[None])
        rollout.log_prob[:, rows].index_copy_(0, t, output.log_prob[None])
        rollout.value[:, rows].index_copy_(0, t, output.value[None])

    def _seen(self, group: int) -> tuple[Tensor, Tensor]:
        """The stacks [B, S, *frame] and histories [B] a group's policy sees now."""
        rollout, rows, t = self._lane_of(group).rollout, self.envs.groups[group], self.t[group]
        stacks = rollout.frames[:, rows].index_select(0, t + self.depth).transpose(0, 1)
        return stacks, rollout.history[:, rows].index_select(0, t)[0]

    def _run(self, name: str, group: int, work: Work) -> None:
        """Launch the group's graph in the lane it is at; capture it at its first use."""
        key = name, group, self.done[group] % len(self.lanes)
        with on_stream(self.streams[group]):
            launch = self.launches.get(key)
            if launch is None:
                t = self.t[group].clone()
                launch = self.capturer.capture(work, lambda: self.t[group].copy_(t), self.capturing[group])
                self.launches[key] = launch
            launch()


def mapped_step(step: EnvStep, device: torch.device) -> dict[str, Tensor]:
    """The arrays of a step, in page-locked memory, as tensors of the device."""
    return {name: mapped(array, device) for name, array in vars(step).items()}
