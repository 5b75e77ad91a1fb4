"""Work of a GPU as CUDA graphs, launched as one piece; what cannot be captured runs as it is, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2  # eager runs before a capture, so that libraries choose their kernels

Work = Callable[[], Any]


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

        Libraries keep scratch memory per stream, and graphs that run side by side must not share it: each group and
        the learner capture on streams of their own. The graph keeps the stream's priority.
        """
        if self.failed:
            return work
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
                undo()
            torch.cuda.synchronize()
            graph, reason = record(work)
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
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    reasons = []
    graph.capture_begin(pool, capture_error_mode="thread_local")
    for attempt in (work, graph.capture_end):
        try:
            attempt()
        except RuntimeError as error:  # the first says what went wrong, the second only that something did
            reasons.append(str(error).splitlines()[0])
    if not reasons:
        return graph, ""
    close_failed(pool)
    return None, reasons[0]


def close_failed(pool: tuple[int, int]) -> None:
    """Take torch out of a capture whose end failed too: the allocator would go on waiting for it, and the default
    generator would refuse all numbers outside of graphs until a capture succeeds."""
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
    number = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()
