"""Batches whose rows are still to be gathered: on a GPU gathering them is part of the captured update.

PPO yields `RolloutRows` (its minibatches), a replay memory on a GPU gives `DrawnRows`; the learner materialises them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.types import PolicyBatch


class DeferredBatch(ABC):
    """A batch that is known by what it will be gathered from. Telling the experience of new priorities is part of the
    captured update, too.

    A captured update copies the `INPUTS` and reads everything else at the address it had when the update was captured.
    """

    INPUTS: ClassVar[tuple[str, ...]]  # the fields that tell one batch from the next

    @abstractmethod
    def gather(self) -> Any:
        """The batch itself."""

    @abstractmethod
    def addresses(self) -> tuple[int, ...]:
        """Addresses and sizes of what is read; a captured update is of no use when they have changed."""

    @abstractmethod
    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """New priorities of the rows."""

    @abstractmethod
    def mutated_tensors(self) -> list[Tensor]:
        """Everything that `feedback` changes."""


@dataclass
class RolloutRows(DeferredBatch):
    """Rows of a rollout, by their numbers."""

    INPUTS: ClassVar = ("chosen",)

    chosen: Tensor  # [N] int64
    rows: PolicyBatch  # all rows of the rollout, [T*B] each
    frames: Tensor  # [S-1 + T+1, B, *frame]

    def gather(self) -> PolicyBatch:
        """Frames are gathered whole, one memory copy each, instead of indexing the strided stacks."""
        depth, environments = self.rows.stacks.shape[1], self.frames.shape[1]
        # Row r of the batch is (t, b) = divmod(r, B); its stack is frames t .. t+S-1 of environment b.
        offsets = torch.arange(depth, device=self.chosen.device) * environments
        frames = self.frames.flatten(0, 1).index_select(0, (self.chosen[:, None] + offsets).flatten())
        others = [f.name for f in fields(self.rows) if f.name != "stacks"]
        return PolicyBatch(
            stacks=frames.view(len(self.chosen), depth, *frames.shape[1:]),
            **{name: getattr(self.rows, name).index_select(0, self.chosen) for name in others},
        )

    def addresses(self) -> tuple[int, ...]:
        return (self.frames.data_ptr(), *(getattr(self.rows, f.name).data_ptr() for f in fields(self.rows)))

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """Rows of a rollout have no priorities."""

    def mutated_tensors(self) -> list[Tensor]:
        return []
