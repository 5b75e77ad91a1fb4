"""Algorithms: what is learnt. Pure files: no process, queue, device count or logger is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.types import Loss, Progress


@dataclass(frozen=True)
class Peers:
    """The learners whose gradients are averaged before every update, this one among them. While an algorithm makes a
    batch it asks them for the mean of each statistic that it takes over it: so N learners with batches of b learn what
    one with N b does, and a loss needs nobody."""

    count: int = 1
    mean: Callable[[Tensor], Tensor] = lambda statistic: statistic


ALONE = Peers()


class Algorithm(Protocol):
    """Turns experience into batches and a batch into a loss; the learner does the rest."""

    peers: Peers

    def batches(self, experience: Any, now: Callable[[], Progress], generator: torch.Generator) -> Iterator[Any]:
        """The batches to learn from after a rollout was put, one gradient step each. `experience` is the one that the
        algorithm asks for in the registry; `now` reads the clocks, whose updates move on from batch to batch.
        What a generator returns at its end, if anything, are numbers of the experience to be logged, by name."""

    def scalars(self, progress: Progress) -> dict[str, float]:
        """Numbers the loss depends on that change during a run; the learner hands them to `loss` as tensors, so that
        a captured update stays valid while they move."""

    def loss(self, model: nn.Module, batch: Any, scalars: dict[str, Tensor]) -> Loss: ...

    def state(self) -> dict[str, Any]:
        """What the algorithm itself remembers, a target network for instance."""

    def restore(self, state: dict[str, Any]) -> None: ...
