"""The collector of a GPU: the same rollout as `Collector`, with each group's work captured as CUDA graphs.

    recv(g) -> [page-locked step buffer -> frames, history, outcome -> network -> action] -> send(g)

The step buffer lies in page-locked shared memory at fixed addresses, so a graph reads what the workers wrote and
writes actions where they read them. The step number t lives on the device: one graph per group serves every step.
All of it runs on a stream that goes before the learner's. While the device works, the next group that is back is
served, and whatever is to be done meanwhile is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.sampling.collector import Collector, Meanwhile
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvStep, Progress, Rollout

WARM_UPS = 2  # eager runs before a capture, so that libraries choose their kernels


class CapturedCollector(Collector):
    """Collector whose steps are one graph launch each."""

    envs: ProcessEnvs

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        exchange, groups = self.envs.exchange, self.groups
        self.step = {g: torch_step(exchange.step[self.envs.groups[g]]) for g in groups}
        self.published = {g: torch.from_numpy(exchange.action[self.envs.groups[g]]) for g in groups}
        self.t = {g: torch.zeros(1, dtype=torch.int64, device=self.device) for g in groups}
        self.depth = torch.arange(self.stack, device=self.device)
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self.answered = {g: torch.cuda.Event(blocking=True) for g in groups}
        self.stream = torch.cuda.Stream(priority=-1)
        self.capturing = torch.cuda.Stream(priority=-1)

    def begin(self, progress: Progress) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            super().begin(progress)

    def end(self, progress: Progress) -> Rollout:
        torch.cuda.current_stream().wait_stream(self.stream)
        return super().end(progress)

    def state(self) -> dict[str, Any]:
        self.stream.synchronize()
        return super().state()

    def _carry_over(self) -> None:
        super()._carry_over()
        for t in self.t.values():
            t.zero_()

    def _write(self, group: int, t: int, step: EnvStep) -> None:
        """Only the first frames of all: what is written later is part of the graphs below."""
        if t == 0:
            super()._write(group, t, step)

    def _ask(self, group: int, t: int, meanwhile: Meanwhile) -> None:
        started = time.perf_counter()
        with torch.cuda.stream(self.stream):
            self._run("step" if t else "start", group, lambda: self._captured_step(group, t > 0))
            self.answered[group].record()
        self.timing.add("infer", time.perf_counter() - started)
        meanwhile()

    def _is_answered(self, group: int) -> bool:
        return bool(self.answered[group].query())

    def await_answer(self) -> None:
        started = time.perf_counter()
        self.answered[self.asked[0]].synchronize()
        self.timing.add("infer", time.perf_counter() - started)

    def _send(self, group: int, meanwhile: Meanwhile) -> None:
        started = time.perf_counter()
        self.envs.send(group, self.envs.exchange.action[self.envs.groups[group]])
        self.timing.add("env", time.perf_counter() - started)

    def _bootstrap(self, group: int) -> None:
        with torch.cuda.stream(self.stream):
            self._run("end", group, lambda: self._captured_end(group))

    def _truncated(self, step: EnvStep, rows: slice, t: int) -> None:
        with torch.cuda.stream(self.stream):
            super()._truncated(step, rows, t)

    def _captured_step(self, group: int, received: bool) -> None:
        if received:
            self._captured_write(group)
        self._captured_act(group)

    def _captured_end(self, group: int) -> None:
        self._captured_write(group)
        rows, t = self.rows[group], self.t[group]
        self.rollout.value[:, rows].index_copy_(0, t, self.policy.value(*self._seen(group))[None])

    def _captured_write(self, group: int) -> None:
        rollout, rows, step, t = self.rollout, self.rows[group], self.step[group], self.t[group]
        frame = self.decode(step["observation"].to(self.device, non_blocking=True))
        first = step["first"].to(self.device, non_blocking=True)
        longer = (rollout.history[:, rows].index_select(0, t)[0] + 1).clamp_(max=self.stack)
        for name in ("reward", "terminated", "truncated", "cut"):
            value = step[name].to(self.device, non_blocking=True)
            getattr(rollout, name)[:, rows].index_copy_(0, t, value[None])
        t.add_(1)
        rollout.frames[:, rows].index_copy_(0, t + (self.stack - 1), frame[None])
        rollout.history[:, rows].index_copy_(0, t, longer.masked_fill(first, 1)[None])

    def _captured_act(self, group: int) -> None:
        rollout, rows, t = self.rollout, self.rows[group], self.t[group]
        noise = self.noise[:, rows].index_select(0, t)[0]
        output = self.policy.act(*self._seen(group), noise, self.envs.groups[group])
        self.published[group].copy_(output.action, non_blocking=True)
        rollout.action[:, rows].index_copy_(0, t, output.action[None])
        rollout.log_prob[:, rows].index_copy_(0, t, output.log_prob[None])
        rollout.value[:, rows].index_copy_(0, t, output.value[None])

    def _seen(self, group: int) -> tuple[Tensor, Tensor]:
        """The stacks [B, S, *frame] and histories [B] a group's policy sees now."""
        rows, t = self.rows[group], self.t[group]
        stacks = self.rollout.frames[:, rows].index_select(0, t + self.depth).transpose(0, 1)
        return stacks, self.rollout.history[:, rows].index_select(0, t)[0]

    def _run(self, name: str, group: int, work: Callable[[], None]) -> None:
        """Replay a graph; capture it at its first use. Captured work may run twice before: it must not count."""
        graph = self.graphs.get((name, group))
        if graph is None:
            t = self.t[group].clone()
            graph = capture(work, lambda: self.t[group].copy_(t), self.capturing)
            self.graphs[name, group] = graph
        graph.replay()


def capture(work: Callable[[], None], undo: Callable[[], Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of `work`, after warm-ups; `undo` takes back what a warm-up counted.

    Libraries keep scratch memory per stream, and graphs that run side by side must not share it: the collector and
    the learner capture on streams of their own. The graph keeps the stream's priority.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
            undo()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


def lock_pages(memory: np.ndarray) -> None:
    """Lock shared memory into place, so that the GPU reads and writes it directly."""
    code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot lock {memory.nbytes / 2**20:.0f} MiB of shared memory (CUDA error {int(code)})")


def unlock_pages(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def torch_step(step: EnvStep) -> dict[str, Tensor]:
    """The arrays of a step as tensors over the same memory."""
    return {name: torch.from_numpy(array) for name, array in vars(step).items()}
