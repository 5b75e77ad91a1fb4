"""Work of a GPU as CUDA graphs, launched as one piece; what cannot be captured runs as it is, with a reason."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2  # eager runs before a capture, so that libraries choose their kernels

FAILED: list[torch.cuda.CUDAGraph] = []  # kept: torch's allocator of page-locked memory may still know of them

Work = Callable[[], Any]

CAPTURING = threading.RLock()
"""One capture at a time in a process: before it the host waits for the whole device, which CUDA forbids while another
thread captures. Threads that launch graphs or single kernels meanwhile do no harm."""


class Capturer:
    """Captures one kind of work. After the first failure it tries no more: all of it runs eagerly, and one report says
    why."""

    def __init__(self, what: str, report: Callable[[str], None]) -> None:
        self.what = what
        self.report = report
        self.failed = False

    def capture(self, work: Work, undo: Work, stream: torch.cuda.Stream) -> Work:
        """What launches `work`: a graph of it, or `work` itself. It may run several times before; `undo` takes back
        what it counted.

        Libraries keep scratch memory per stream, and graphs that run side by side must not share it: each
        launch slot of sampling and the learner capture on streams of their own. The graph keeps the stream's priority.
        """
        with CAPTURING:
            return self._capture(work, undo, stream)

    def _capture(self, work: Work, undo: Work, stream: torch.cuda.Stream) -> Work:
        if self.failed:
            return work
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                for _ in range(WARM_UPS):
                    work()
                    undo()
                torch.cuda.synchronize()
                graph, reason = record(work)
            except BaseException:  # a signal's too: what is saved after it must not hold half of a warm-up
                undo()
                stream.synchronize()
                raise
            if graph is None:
                undo()
        torch.cuda.current_stream().wait_stream(stream)
        if graph is not None:
            return graph.replay
        self.failed = True
        self.report(f"{self.what} cannot be captured as a CUDA graph and runs eagerly, which is slower: {reason}")
        return work


def record(work: Work) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """A graph of what `work` launches on the current stream, or why there is none. `torch.cuda.graph` would first give
    all unused memory back to the driver, each time anew."""
    graph, pool, reasons = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), []
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    except RuntimeError as error:
        reasons.append(str(error))
    finally:  # whatever was raised, a signal's too: nothing else may run within a capture
        try:
            graph.capture_end()
        except RuntimeError as error:
            reasons.append(str(error))  # says only that something went wrong before, if it did
            close_failed(graph, pool)
    return (None, reasons[0].partition("\n")[0]) if reasons else (graph, "")


def close_failed(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Take torch out of a capture whose end failed: the allocator would go on waiting for it, and the default generator
    would refuse all numbers outside of graphs until a capture succeeds."""
    FAILED.append(graph)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the end failed after this was done
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    number = torch.zeros(1, device="cuda")
    other = torch.cuda.CUDAGraph()
    other.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    other.capture_end()
