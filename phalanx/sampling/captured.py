"""The collector of a GPU: the same rollout as `Collector`, with each group's work captured as CUDA graphs.

    recv(g) -> [page-locked step buffer -> frames, history, outcome -> network -> action] -> send(g)

The step buffer lies in page-locked shared memory at fixed addresses, so a graph reads what the workers wrote and
writes actions where they read them. The step number t lives on the device: one graph per group serves every step.
Each group has a stream, all of which go before the learner's: a step is a chain of many small kernels, and those of
several groups run side by side. While the device works, the next group that is back is served, and whatever is to be
done meanwhile is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.device import on_stream
from phalanx.sampling.collector import Collector
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvStep, Progress

WARM_UPS = 2  # eager runs before a capture, so that libraries choose their kernels


class CapturedCollector(Collector):
    """Collector whose steps are one graph launch each."""

    envs: ProcessEnvs

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        exchange, groups = self.envs.exchange, self.envs.groups
        lock_pages(exchange.memory_array)
        self.step = [mapped_step(exchange.step[rows], self.device) for rows in groups]
        self.published = [mapped(exchange.action[rows], self.device) for rows in groups]
        self.t = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in groups]
        self.depth = torch.arange(self.stack, device=self.device)
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self.answered = [torch.cuda.Event(blocking=True) for _ in groups]
        self.streams = [torch.cuda.Stream(priority=-1) for _ in groups]
        self.capturing = [torch.cuda.Stream(priority=-1) for _ in groups]

    def close(self) -> None:
        unlock_pages(self.envs.exchange.memory_array)

    def _begin(self, progress: Progress) -> None:
        super()._begin(progress)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def _end(self, progress: Progress) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        super()._end(progress)

    def _carry_over(self) -> None:
        super()._carry_over()
        for t in self.t:
            t.zero_()

    def _write(self, group: int, t: int, step: EnvStep) -> None:
        """Only the first frames of all: what is written later is part of the graphs below."""
        if t == 0:
            super()._write(group, t, step)

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
        self.envs.send(group, self.envs.exchange.action[self.envs.groups[group]])
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
        rows, t = self.envs.groups[group], self.t[group]
        self.rollout.value[:, rows].index_copy_(0, t, self.policy.value(*self._seen(group))[None])

    def _captured_write(self, group: int) -> None:
        rollout, rows, step, t = self.rollout, self.envs.groups[group], self.step[group], self.t[group]
        frame = self.decode(step["observation"])
        longer = (rollout.history[:, rows].index_select(0, t)[0] + 1).clamp_(max=self.stack)
        for name in ("reward", "terminated", "truncated", "cut"):
            getattr(rollout, name)[:, rows].index_copy_(0, t, step[name][None])
        t.add_(1)
        rollout.frames[:, rows].index_copy_(0, t + (self.stack - 1), frame[None])
        rollout.history[:, rows].index_copy_(0, t, longer.masked_fill(step["first"], 1)[None])

    def _captured_act(self, group: int) -> None:
        rollout, rows, t = self.rollout, self.envs.groups[group], self.t[group]
        noise = self.noise[:, rows].index_select(0, t)[0]
        output = self.policy.act(*self._seen(group), noise, rows)
        self.published[group].copy_(output.action)
        rollout.action[:, rows].index_copy_(0, t, output.action[None])
        rollout.log_prob[:, rows].index_copy_(0, t, output.log_prob[None])
        rollout.value[:, rows].index_copy_(0, t, output.value[None])

    def _seen(self, group: int) -> tuple[Tensor, Tensor]:
        """The stacks [B, S, *frame] and histories [B] a group's policy sees now."""
        rows, t = self.envs.groups[group], self.t[group]
        stacks = self.rollout.frames[:, rows].index_select(0, t + self.depth).transpose(0, 1)
        return stacks, self.rollout.history[:, rows].index_select(0, t)[0]

    def _run(self, name: str, group: int, work: Callable[[], None]) -> None:
        """Replay a graph; capture it at its first use. Captured work may run twice before: it must not count."""
        with on_stream(self.streams[group]):
            graph = self.graphs.get((name, group))
            if graph is None:
                t = self.t[group].clone()
                graph = capture(work, lambda: self.t[group].copy_(t), self.capturing[group])
                self.graphs[name, group] = graph
            graph.replay()


def capture(work: Callable[[], None], undo: Callable[[], Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of `work`, after warm-ups; `undo` takes back what a warm-up counted.

    Libraries keep scratch memory per stream, and graphs that run side by side must not share it: each group and the
    learner capture on streams of their own. The graph keeps the stream's priority. `torch.cuda.graph` would
    first give all unused memory back to the driver, each time anew.
    """
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
            undo()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def lock_pages(memory: np.ndarray) -> None:
    """Lock shared memory into place, so that the GPU reads and writes it directly."""
    code = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot lock {memory.nbytes / 2**20:.0f} MiB of shared memory (CUDA error {int(code)})")


def unlock_pages(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _Mapped:
    """Page-locked memory as torch wants to be told of memory the device can reach."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = array.__array_interface__


def mapped(array: np.ndarray, device: torch.device) -> Tensor:
    """Page-locked memory as a tensor of the device, which reads and writes it without a copy in between."""
    plain = array.view(np.uint8) if array.dtype == np.bool_ else array
    tensor = torch.as_tensor(_Mapped(plain), device=device)
    return tensor.view(torch.bool) if array.dtype == np.bool_ else tensor


def mapped_step(step: EnvStep, device: torch.device) -> dict[str, Tensor]:
    """The arrays of a step as such tensors."""
    return {name: mapped(array, device) for name, array in vars(step).items()}
