"""Rollouts of a few fixed sizes, each in memory of its own: what a captured update learns from.

    segments, as many as there are -> columns in page-locked memory -> one copy -> a rollout at fixed addresses

A trainer's batch has whole segments and so a number of them that varies. It is rounded up to a multiple of what fills
the least batch with segments of full length, so that there are no more sizes, and graphs, than steps in a segment; what
is missing are segments all of whose steps are cut, which have weight 0 in every sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from phalanx.runtime.pages import both_views
from phalanx.sampling.answers import allocate_rollout
from phalanx.sampling.segments import Segment
from phalanx.types import EnvSpec, Rollout

ALIGNMENT = 16  # bytes: columns of any type may begin there


class FixedRollout:
    """One of them, on the device and as the host fills it."""

    def __init__(self, like: Rollout) -> None:
        columns = {name: value for name, value in like.tensors().items() if name not in ("frames", "version")}
        offset, places = 0, {}
        for name, column in columns.items():
            size = column.numel() * column.element_size()
            places[name] = slice(offset, offset + size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.host, self.seen_by_device = both_views((offset,), np.dtype(np.uint8), like.frames.device)
        self.on_device = torch.zeros(offset, dtype=torch.uint8, device=like.frames.device)
        self.columns: dict[str, np.ndarray] = {"version": like.version.numpy()}
        tensors: dict[str, Any] = {"frames": like.frames, "version": like.version}
        for name, column in columns.items():
            kind = torch.empty(0, dtype=column.dtype).numpy().dtype
            self.columns[name] = self.host[places[name]].view(kind).reshape(column.shape)
            tensors[name] = self.on_device[places[name]].view(column.dtype).view(column.shape)
        self.rollout = Rollout(**tensors)

    def fill(self, segments: Sequence[Segment]) -> Rollout:
        """The host must not write before the last batch is learnt from."""
        count = len(segments)
        for name, column in self.columns.items():
            column[:, count:] = name in ("cut", "history")  # no step, and the first frame of an episode
            for b, segment in enumerate(segments):
                column[:, b] = segment.columns[name]
        self.on_device.copy_(self.seen_by_device)
        self.rollout.frames[:, :count] = torch.stack([segment.frames for segment in segments], 1)
        return self.rollout


class FixedRollouts:
    """Those of one trainer."""

    def __init__(self, spec: EnvSpec, stack: int, horizon: int, least_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.stack = stack
        self.horizon = horizon
        self.device = device
        self.unit = -(-least_rows // horizon)  # segments that fill the least batch
        self.sizes: dict[int, FixedRollout] = {}

    def __call__(self, segments: Sequence[Segment]) -> Rollout:
        """A rollout whose first environments are the segments; valid until the next call."""
        size = -(-len(segments) // self.unit) * self.unit
        if size not in self.sizes:
            like = allocate_rollout(self.spec, size, self.stack, self.horizon, self.device)
            self.sizes[size] = FixedRollout(like)
        return self.sizes[size].fill(segments)
