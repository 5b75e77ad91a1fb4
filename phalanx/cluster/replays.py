"""Replay shards on Ray, and the way to them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from phalanx.cluster.watched import GONE
from phalanx.config import DQNConfig
from phalanx.replay.shards import Holding, ReplayShard
from phalanx.types import EnvSpec

CALL_TIMEOUT = 30.0  # seconds after which a shard that does not answer counts as gone
MOST_UNDER_WAY = 8  # rollouts and priorities that may be on their way from one process before it waits


class ReplayServer(ReplayShard):
    """A shard in a process of its own. One that dies comes back empty."""

    def process(self) -> int:
        return os.getpid()


class RayReplayShards:
    """All replay shards, as one process sees them."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles
        self.count = len(handles)
        self.under_way: deque[Any] = deque()

    def put(self, shard: int, *arguments: Any) -> None:
        self._send(self.handles[shard].put.remote(*arguments))

    def feedback(self, shard: int, ids: np.ndarray, priorities: np.ndarray) -> None:
        self._send(self.handles[shard].feedback.remote(ids, priorities))

    def holdings(self) -> list[Holding | None]:
        return [get(call) for call in [handle.holding.remote() for handle in self.handles]]

    def draw(self, rows: Sequence[int]) -> list[tuple[Holding, dict[str, np.ndarray], np.ndarray] | None]:
        calls = [handle.draw.remote(count) if count else None for handle, count in zip(self.handles, rows, strict=True)]
        return [None if call is None else get(call) for call in calls]

    def _send(self, call: Any) -> None:
        """Without waiting for an answer, but never so much that a slow shard drowns in it."""
        self.under_way.append(call)
        if len(self.under_way) > MOST_UNDER_WAY:
            get(self.under_way.popleft())


def get(call: Any) -> Any:
    """The answer, or None of a shard that is gone for the moment."""
    try:
        return ray.get(call, timeout=CALL_TIMEOUT)
    except GONE:
        return None


def start_replays(orders: Sequence[tuple[DQNConfig, EnvSpec, int, int, int]]) -> list[Any]:
    """A shard for each order: what a `ReplayShard` is made with. None waits for a core in a full cluster: without it
    nobody would learn."""
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
    server: Any = ray.remote(ReplayServer).options(**options)
    return [server.remote(*order) for order in orders]
