"""The inference of a predictor on a GPU: what `EagerInference` does, captured as CUDA graphs.

    page-locked step buffer, orders -> [newest frames -> OpenSegments -> stacks -> network] -> page-locked results

A graph has a fixed number of rows, so there is one for each of a few sizes, captured when it is needed first; rows that
are not used repeat the first one. The graph reads what agents wrote where they wrote it, and is told by page-locked
memory which rows to take, where their stacks begin and how long their history is. Each predictor has graphs, orders and
results of its own, and works on a stream of its own. When `infer` returns, nothing is left there: whoever answers these
rows next, and whoever learns from the segments, may do so on any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from phalanx.runtime.graphs import Capturer, Work
from phalanx.runtime.pages import both_views
from phalanx.sampling.answers import Decoder
from phalanx.sampling.inference import Inferred
from phalanx.sampling.segments import OpenSegments
from phalanx.seams import Policy

SMALLEST = 8  # rows of a graph: fewer would take as long
GROWTH = 4  # of the sizes: a chain of small kernels takes little longer for many rows than for few


class Orders:
    """What a graph is told, and where it leaves what it found: for the host and for the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        whole, small, real = np.dtype(np.int64), np.dtype(np.uint8), np.dtype(np.float32)
        self.rows, self.on_device_rows = both_views((rows,), whole, device)
        self.starts, self.on_device_starts = both_views((rows,), whole, device)
        self.history, self.on_device_history = both_views((rows,), small, device)
        self.uniform, self.on_device_uniform = both_views((rows,), real, device)
        self.action, self.on_device_action = both_views((rows,), whole, device)
        self.log_prob, self.on_device_log_prob = both_views((rows,), real, device)
        self.value, self.on_device_value = both_views((rows,), real, device)


class GraphInference:
    """One predictor's graphs."""

    def __init__(
        self,
        *,
        policy: Policy,
        segments: OpenSegments,
        observation: Tensor,
        raw_observation: np.ndarray,
        decode: Decoder,
        most_rows: int,
        report: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.segments = segments
        self.observation = observation  # of all rows, in the page-locked step buffer, as the device sees it,
        self.raw_observation = raw_observation  # and as the host does
        self.decode = decode
        self.capturing = torch.cuda.Stream(priority=-1)  # libraries keep scratch memory by stream
        self.sizes = list(sizes_up_to(most_rows))
        self.orders = Orders(self.sizes[-1], segments.device)
        self.depth = torch.arange(segments.stack, device=segments.device)
        self.done = torch.cuda.Event(blocking=True)
        self.capturer = Capturer("an inference", report)
        self.launches: dict[int, Work] = {}  # by size

    def infer(self, news: np.ndarray, rows: np.ndarray, ended: np.ndarray, uniform: Tensor) -> Inferred:
        """Rows that are no news are taken in once more, which changes nothing."""
        count, segments = len(rows), self.segments
        segments.refuse_not_finite("observation", self.raw_observation[news], news)
        size = next(size for size in self.sizes if size >= count)
        self._order(size, rows, uniform)
        if size not in self.launches:
            work = self._work_of(size)
            self.launches[size] = self.capturer.capture(work, lambda: None, self.capturing)
        self.launches[size]()
        cut = segments.cut_frames(ended)
        self.done.record()
        self.done.synchronize()
        orders = self.orders
        return Inferred(orders.action[:count].copy(), orders.log_prob[:count].copy(), orders.value[:count].copy(), cut)

    def _order(self, size: int, rows: np.ndarray, uniform: Tensor) -> None:
        orders, segments, count = self.orders, self.segments, len(rows)
        told = (
            (orders.rows, rows),
            (orders.starts, segments.starts(rows)),
            (orders.history, segments.history(rows)),
            (orders.uniform, uniform.numpy()),
        )
        for place, values in told:
            place[:count] = values
            place[count:size] = values[0]

    def _work_of(self, size: int) -> Work:
        orders, segments, depth = self.orders, self.segments, self.depth

        def work() -> None:
            rows, starts = orders.on_device_rows[:size].clone(), orders.on_device_starts[:size].clone()
            frames = self.decode(self.observation.index_select(0, rows))
            segments.single_frames.index_copy_(0, starts + (segments.stack - 1), frames)
            places = starts[:, None] + depth
            stacks = segments.single_frames.index_select(0, places.flatten()).unflatten(0, places.shape)
            history, uniform = orders.on_device_history[:size].clone(), orders.on_device_uniform[:size].clone()
            output = self.policy.act(stacks, history, uniform, rows)
            orders.on_device_action[:size].copy_(output.action)
            orders.on_device_log_prob[:size].copy_(output.log_prob)
            orders.on_device_value[:size].copy_(output.value)

        return work


def sizes_up_to(most: int) -> Iterator[int]:
    """Of graphs: the last one has room for `most` rows."""
    for power in itertools.count():
        size = SMALLEST * GROWTH**power
        if size >= most:
            yield most
            return
        yield size
