"""Algorithms: what is learnt. Pure files: no process, queue, device count or logger is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.seams import Experience
from phalanx.types import Loss, Progress


class Algorithm(Protocol):
    """Turns experience into batches and a batch into a loss; the learner does the rest."""

    def batches(self, experience: Experience, progress: Progress, generator: torch.Generator) -> Iterator[Any]:
        """The batches to learn from after a rollout was put, one gradient step each."""

    def scalars(self, progress: Progress) -> dict[str, float]:
        """Numbers the loss depends on that change during a run; the learner hands them to `loss` as tensors, so that
        a captured update stays valid while they move."""

    def loss(self, model: nn.Module, batch: Any, scalars: dict[str, Tensor]) -> Loss: ...

    def state(self) -> dict[str, Any]:
        """What the algorithm itself remembers, a target network for instance."""

    def restore(self, state: dict[str, Any]) -> None: ...
