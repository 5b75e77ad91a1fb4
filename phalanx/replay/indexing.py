"""Which rows of the replay memory are drawn: uniformly, or by priority. Works on any device without host sync in draws.

The storage says after each put which ids are drawable; an index follows with `move`. Ids are absolute (see storage):
id % rows is the place of a row in the ring, and an id outside the drawable range is a row that is gone. Everything that
`draw` and `update` read or change lives in tensors that stay where they are, so that both can be part of a CUDA graph.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from phalanx.replay.storage import ring_slices

BLOCK = 128  # leaves under one node of the sum tree
UNIT = 1 << 24  # fixed-point value of priority 1: sums of integers are exact, in any order and on any device
TOTAL_LIMIT = 1 << 62  # the sum of all leaves stays below, so that nothing overflows


class Index(Protocol):
    """Draws ids and learns which of them matter."""

    def __len__(self) -> int:
        """Rows that can be drawn."""

    def move(self, drawable: range, cut: Tensor) -> None:
        """Follow the storage: ids before `drawable` are gone, ids after the last one known are new. `cut` [rows]."""

    def draw(self, uniform: Tensor, importance_exponent: float | Tensor) -> tuple[Tensor, Tensor]:
        """Ids [N] and their importance weights; `uniform` [N], drawn from [0, 1), decides."""

    def update(self, ids: Tensor, priorities: Tensor) -> None: ...

    def mutated_tensors(self) -> list[Tensor]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None:
        """What `move` after a restored storage does not bring back."""


class UniformIndex:
    """Every row that may be learnt from, equally often: a queue of ids in the order of time."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.queue = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = self.last = 0  # absolute positions in the queue,
        self.span = torch.zeros(2, dtype=torch.int64, device=device)  # the first one and how many there are
        self.drawable = range(0)

    def __len__(self) -> int:
        return self.last - self.first

    def move(self, drawable: range, cut: Tensor) -> None:
        rows, device = len(self.queue), self.queue.device
        gone, new = changes(self.drawable, drawable)
        oldest = torch.arange(self.first, min(self.first + len(gone), self.last), device=device) % rows
        self.first += int((self.queue[oldest] < drawable.start).sum())
        ids = torch.arange(new.start, new.stop, device=device)
        ids = ids[~cut[ids % rows]]
        self.queue[torch.arange(self.last, self.last + len(ids), device=device) % rows] = ids
        self.last += len(ids)
        self.drawable = drawable
        note(self.span, self.first, len(self))

    def draw(self, uniform: Tensor, importance_exponent: float | Tensor) -> tuple[Tensor, Tensor]:
        first, count = self.span
        ids = self.queue[((uniform * count).long() + first) % len(self.queue)]
        return ids, torch.ones(len(uniform), device=uniform.device)

    def update(self, ids: Tensor, priorities: Tensor) -> None:
        """Uniform draws have no priorities."""

    def mutated_tensors(self) -> list[Tensor]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


class PrioritizedIndex:
    """Rows in proportion to priority ** exponent: a sum tree of two levels, blocks of leaves under one root.

    Two levels cost a handful of vector operations for a whole batch, where a binary tree costs twenty times as many.
    """

    def __init__(self, rows: int, exponent: float, new_priority: Literal["max", "one"], device: torch.device) -> None:
        self.rows = rows
        self.exponent = exponent
        self.new_priority = new_priority
        # the last block is no part of the tree: updates of rows that are gone are thrown there
        self.leaves = torch.zeros((-(-rows // BLOCK) + 1, BLOCK), dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(self.leaves) - 1, dtype=torch.int64, device=device)
        self.greatest = torch.tensor(UNIT, device=device)
        self.count = 0
        self.drawable = range(0)
        self.span = torch.zeros(2, dtype=torch.int64, device=device)  # its ends

    def __len__(self) -> int:
        return self.count

    def move(self, drawable: range, cut: Tensor) -> None:
        gone, new = changes(self.drawable, drawable)
        leaves = self.leaves.view(-1)
        counts = torch.zeros((), dtype=torch.int64, device=leaves.device)
        for rows in ring_slices(gone, self.rows):
            counts -= leaves[rows].count_nonzero()
            leaves[rows] = 0
            self._sum(rows)
        fresh = self.greatest if self.new_priority == "max" else UNIT
        for rows in ring_slices(new, self.rows):
            leaves[rows] = ~cut[rows] * fresh
            counts += leaves[rows].count_nonzero()
            self._sum(rows)
        self.count += int(counts)
        self.drawable = drawable
        note(self.span, drawable.start, drawable.stop)

    def draw(self, uniform: Tensor, importance_exponent: float | Tensor) -> tuple[Tensor, Tensor]:
        """One id from each of N equal parts of the total priority."""
        cumulative = self.sums.cumsum(0)
        total = cumulative[-1]
        part = (torch.arange(len(uniform), device=uniform.device) + uniform) / len(uniform)
        point = torch.minimum((part * total).long(), total - 1)
        block = torch.searchsorted(cumulative, point, right=True)
        inside = point - (cumulative[block] - self.sums[block])
        leaves = self.leaves.index_select(0, block)
        leaf = torch.searchsorted(leaves.cumsum(1), inside[:, None], right=True)
        rows = block * BLOCK + leaf.squeeze(1)
        start = self.span[0]
        weight = importance_weights(leaves.gather(1, leaf).squeeze(1) / total, importance_exponent)
        return start + (rows - start) % self.rows, weight

    def update(self, ids: Tensor, priorities: Tensor) -> None:
        """New priorities; of equal ids the greatest counts, rows that are gone or cut are left alone, and so are those
        whose priority is no number: on a GPU a loss that is not finite is reported later."""
        leaves, rows = self.leaves.view(-1), ids % self.rows
        known = (ids >= self.span[0]) & (ids < self.span[1]) & (leaves[rows] > 0) & ~priorities.isnan()
        rows = torch.where(known, rows, len(self.sums) * BLOCK)
        values = self._fixed_point(priorities)
        leaves.scatter_reduce_(0, rows, values, "amax", include_self=False)
        torch.maximum(self.greatest, (values * known).max(), out=self.greatest)
        # equal blocks are written several times, with equal sums; the block outside the tree is written nowhere
        blocks = (rows // BLOCK).clamp(max=len(self.sums) - 1)
        self.sums[blocks] = self.leaves.index_select(0, blocks).sum(1)

    def mutated_tensors(self) -> list[Tensor]:
        return [self.leaves, self.sums, self.greatest]

    def _fixed_point(self, priorities: Tensor) -> Tensor:
        scaled = priorities.detach().nan_to_num().double().pow(self.exponent) * UNIT
        return scaled.clamp(1, TOTAL_LIMIT // self.rows).long()

    def _sum(self, rows: slice) -> None:
        """Bring the sums above a range of leaves up to date."""
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        self.sums[blocks] = self.leaves[blocks].sum(1)

    def state(self) -> dict[str, Any]:
        leaves = self.leaves.view(-1)
        parts = [leaves[rows] for rows in ring_slices(self.drawable, self.rows)]
        saved = torch.cat(parts) if parts else leaves[:0]
        return {"first": self.drawable.start, "leaves": saved, "greatest": self.greatest.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        """The priorities of rows that were drawable then and are now: with another n they are not all the same. Which
        rows are cut is what `move` has found."""
        leaves, saved = self.leaves.view(-1), state["leaves"].to(self.leaves.device)
        first = state.get("first", self.drawable.start)
        both = range(max(first, self.drawable.start), min(first + len(saved), self.drawable.stop))
        done = both.start - first
        for rows in ring_slices(both, self.rows):
            count = rows.stop - rows.start
            known = saved[done : done + count]
            leaves[rows] = torch.where((leaves[rows] > 0) & (known > 0), known, leaves[rows])
            self._sum(rows)
            done += count
        self.greatest.copy_(state["greatest"])


def changes(old: range, new: range) -> tuple[range, range]:
    """Ids that are gone and ids that came when the drawable range moves forward from `old` to `new`."""
    return range(old.start, max(old.start, min(old.stop, new.start))), range(max(old.stop, new.start), new.stop)


def note(span: Tensor, *numbers: int) -> None:
    """Write numbers where draws read them, without waiting for a device."""
    for place, number in zip(span, numbers, strict=True):
        place.fill_(number)


def importance_weights(probabilities: Tensor, exponent: float | Tensor) -> Tensor:
    """(rows * p) ** -exponent, divided by the greatest of the batch; the number of rows cancels."""
    return (probabilities / probabilities.min()).pow(-exponent).float()


def index_bytes(rows: int, prioritized: bool) -> int:
    """Bytes of an index over so many rows."""
    return rows * torch.int64.itemsize * (BLOCK + 1) // BLOCK if prioritized else rows * torch.int64.itemsize
