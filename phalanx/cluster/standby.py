"""The standby of all parameter servers: it keeps a copy of each shard, for the successor of one that is lost."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

Kept = dict[str, Any]
"""A shard's state with numpy arrays, as it travels."""


class Standby:
    """Runs in a process of its own, on whichever host Ray chooses: perhaps that of a shard, which then has no copy when
    that host is lost, and goes on from the newest checkpoint. It needs no torch."""

    def __init__(self) -> None:
        self.newest: dict[int, Kept] = {}

    def keep(self, shard: int, state: Kept) -> bool:
        """Take a copy; what has arrived lies in memory that is shared, and short."""
        self.newest[shard] = {
            **state,
            "values": np.array(state["values"]),
            "rule": {name: np.array(value) for name, value in state["rule"].items()},
        }
        return True

    def kept(self, shard: int) -> Kept | None:
        return self.newest.get(shard)

    def process(self) -> int:
        return os.getpid()
