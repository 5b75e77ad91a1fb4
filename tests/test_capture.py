"""Captures that fail, on a stand-in for CUDA that keeps account as torch does: of the stream that captures, of the
memory pool in use, and of the default generator. `tests/gpu` has the same with a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx.runtime import graphs

POOL = (0, 7)


class Cuda:
    """What torch knows; a graph of it is one that may fail."""

    def __init__(self):
        self.capturing = self.invalid = self.generator_captures = False
        self.pools = []

    def graph(self):
        return Graph(self)

    def end_pool(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def idle(self):
        return not (self.capturing or self.generator_captures or self.pools)


class Graph:
    def __init__(self, cuda):
        self.cuda = cuda

    def capture_begin(self, pool=(1, 0), capture_error_mode=""):
        self.pool = pool
        self.cuda.capturing = self.cuda.generator_captures = True
        self.cuda.pools.append(pool)

    def capture_end(self):
        self.cuda.capturing = False
        if self.cuda.invalid:
            self.cuda.invalid = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.end_pool(0, self.pool)
        self.cuda.generator_captures = False


@pytest.fixture
def cuda(monkeypatch):
    cuda, zeros = Cuda(), torch.zeros
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
    monkeypatch.setattr(graphs, "FAILED", [])
    return cuda


def test_work_becomes_a_graph(cuda):
    graph, reason = graphs.record(lambda: None)
    assert isinstance(graph, Graph) and reason == ""
    assert cuda.idle()


@pytest.mark.parametrize("invalid", [True, False], ids=["CUDA gives up", "CUDA would go on"])
def test_a_failure_is_the_reason_and_leaves_nothing_open(cuda, invalid):
    def fail():
        cuda.invalid = invalid
        raise RuntimeError("operation not permitted when stream is capturing\nand a long explanation")

    assert graphs.record(fail) == (None, "operation not permitted when stream is capturing")
    assert cuda.idle()


@pytest.mark.parametrize("invalid", [True, False], ids=["CUDA gives up", "CUDA would go on"])
def test_an_interruption_leaves_nothing_open(cuda, invalid):
    def interrupted():
        cuda.invalid = invalid
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.record(interrupted)
    assert cuda.idle()


def test_an_end_that_fails_late_is_a_reason_too(cuda, monkeypatch):
    """The pool is closed by then; closing it twice is an error of torch's."""
    end = Graph.capture_end

    def too_late(graph):
        end(graph)
        monkeypatch.setattr(Graph, "capture_end", end)
        raise RuntimeError("the graph cannot be instantiated")

    monkeypatch.setattr(Graph, "capture_end", too_late)
    assert graphs.record(lambda: None) == (None, "the graph cannot be instantiated")
    assert cuda.idle()


class Stream:
    waited_for = False

    def wait_stream(self, other): ...

    def synchronize(self):
        self.waited_for = True

    def __enter__(self): ...

    def __exit__(self, *exception): ...


@pytest.mark.parametrize("when", [1, 2, 3], ids=["first warm-up", "second warm-up", "capture"])
def test_what_an_interrupted_capture_has_done_is_undone(cuda, monkeypatch, when):
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    count, calls = 0, 0

    def work():
        nonlocal count, calls
        count, calls = count + 1, calls + 1
        if calls == when:
            raise KeyboardInterrupt

    def undo():
        nonlocal count
        count = 0

    stream = Stream()
    with pytest.raises(KeyboardInterrupt):
        graphs.Capturer("work", print).capture(work, undo, stream)
    assert count == 0
    assert stream.waited_for  # what is saved next reads what was undone there


def test_threads_capture_one_after_the_other(cuda, monkeypatch):
    """Each waits for the whole device before it captures, which CUDA forbids while another one does."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    captures, overlaps = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: overlaps.append(1) if captures else None)

    def record(work):
        captures.append(1)
        threading.Event().wait(0.01)
        captures.pop()
        return Replayable(), ""

    class Replayable:
        def replay(self): ...

    monkeypatch.setattr(graphs, "record", record)
    done = []

    def capture():
        done.append(graphs.Capturer("work", print).capture(lambda: None, lambda: None, Stream()))

    threads = [threading.Thread(target=capture) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(done) == 5 and not overlaps
