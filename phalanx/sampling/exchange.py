"""The memory and the signals that env workers share with the process that owns the model.

One anonymous mapping holds everything: the step buffer, the actions, two tables of counters, and what workers tell of
themselves,

    request[group, worker]   how many steps the owner has asked for
    done[group, worker]      how many of them the worker has finished
    busy[worker]             seconds the worker has spent stepping, to see who keeps the others waiting
    heartbeat[worker]        steps of single environments it has taken, to tell a slow one from one that hangs

The counters are the truth; event descriptors only wake a sleeper, so a lost or doubled wake-up can do no harm. They are
memoryviews: a process that wakes up finds its caches cold, and numpy would be most of what it has to load.
The mapping has no name: when the last process that holds it is gone, so is the memory.
"""

from __future__ import annotations

import mmap
import os
import select
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.sampling.slot import allocate_step
from phalanx.types import EnvSpec

WAKE = select.EPOLLIN | select.EPOLLET  # of an event descriptor: each writing wakes once, and nobody has to read it
ALIGNMENT = 64  # a cache line: arrays begin on one, and what workers tell of themselves has one for each


@dataclass(frozen=True)
class Layout:
    """Everything a process needs to know to find its way in the mapping."""

    spec: EnvSpec
    environments: int
    workers: int
    groups: int


class Exchange:
    """Views of the shared mapping behind a file descriptor."""

    def __init__(self, layout: Layout, descriptor: int | None = None) -> None:
        self.layout = layout
        self.offset = 0
        self._place(lambda shape, dtype: np.broadcast_to(np.empty((), dtype), shape))  # a dry run that only measures
        size = self.offset
        self.descriptor = os.memfd_create("phalanx") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.memory_array = np.frombuffer(self.memory, np.uint8)
        self._place(lambda shape, dtype: np.ndarray(shape, dtype, self.memory, self.offset))
        self.request, self.done = self.requests.data, self.dones.data
        self._rows = [(requests.data, dones.data) for requests, dones in zip(self.requests, self.dones, strict=True)]

    def finished(self, group: int) -> bool:
        """Has every worker finished its rows of the group?"""
        requests, dones = self._rows[group]
        return requests == dones

    def _place(self, view: Any) -> None:
        self.offset = 0

        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            array = view(shape, dtype)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.offset += -(-size // ALIGNMENT) * ALIGNMENT
            return array

        layout = self.layout
        self.step = allocate_step(layout.spec, layout.environments, take)
        self.action = take((layout.environments,), np.int32)
        counters = layout.groups, layout.workers
        self.requests, self.dones = take(counters, np.int64), take(counters, np.int64)
        own = take((layout.workers, ALIGNMENT // 8), np.float64)
        self.busy, self.heartbeat = own[:, 0], own[:, 1]

    def close(self) -> None:
        """Give up the descriptor; the mapping goes with the last view of it."""
        os.close(self.descriptor)
