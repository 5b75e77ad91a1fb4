"""The learner: steps 6 to 9 of a transition's way. It makes gradients; the parameter store applies them.

    for batch in algorithm.batches(experience):   loss -> backward -> flat gradient -> clip -> store.push

On a GPU the whole update is captured once as a CUDA graph and replayed for every batch of the same kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.algorithms import Algorithm
from phalanx.algorithms.schedules import Schedule
from phalanx.config import OptimizerConfig
from phalanx.errors import NotFinite
from phalanx.learning.averages import MetricAverager
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import average_norm_clip, global_norm_clip
from phalanx.runtime.device import Compute, restore_generator
from phalanx.runtime.timing import Timing
from phalanx.seams import Experience, ParameterStore
from phalanx.types import Chosen, Gradient, Loss, Progress


class Learner:
    """Takes what the algorithm wants to learn from, one gradient step per batch."""

    def __init__(
        self,
        model: nn.Module,
        parameters: FlatParameters,
        store: ParameterStore,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        learning_rate: Schedule,
        compute: Compute,
        seed: int,
        timing: Timing,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.store = store
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.compute = compute
        self.shuffle = torch.Generator(compute.device).manual_seed(seed)
        self.timing = timing
        self.metrics = MetricAverager()

    def learn(self, experience: Experience, progress: Progress) -> None:
        """Learn from the experience as often as the algorithm wants."""
        for _ in self.updates(experience, progress):
            pass

    def updates(self, experience: Experience, progress: Progress) -> Iterator[None]:
        """The same, one update at a time, for topologies that do something else in between."""
        started = time.perf_counter()
        batches = self.algorithm.batches(experience, progress, self.shuffle)
        while (batch := self._next(batches)) is not None:
            priorities = self.update(batch, progress)
            if priorities is not None:
                experience.feedback(batch.ids, priorities)
            progress.updates += 1
            self.timing.add("learn", time.perf_counter() - started)
            yield
            started = time.perf_counter()
        self.store.pull(self.model)
        self.timing.add("learn", time.perf_counter() - started)

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; what the algorithm asks a network on the way runs as its loss does."""
        with self.compute.autocast():
            return next(batches, None)

    def update(self, batch: Any, progress: Progress) -> Tensor | None:
        """One gradient step; new priorities of the batch's rows, if the experience is still to be told of any."""
        device = self.compute.device
        values = self.algorithm.scalars(progress)
        scalars = {name: torch.tensor(value, device=device) for name, value in values.items()}
        rows = gathered(batch)
        loss, norm = self.gradient(rows, scalars)
        if not bool(torch.isfinite(loss.total.detach() + norm)):
            raise not_finite(loss, norm, f"update {progress.updates}", rows)
        gradient = Gradient(self.parameters.grad, progress.version)
        progress.version = self.store.push(gradient, self.learning_rate(progress))
        self.metrics.add({**loss.metrics, "loss/total": loss.total.detach(), "loss/gradient_norm": norm})
        return still_to_tell(batch, rows, loss.priorities)

    def gradient(self, batch: Any, scalars: dict[str, Tensor]) -> tuple[Loss, Tensor]:
        """Leave the clipped gradient of a batch in the flat vector; the loss and the norm before the clip."""
        self.parameters.clear()
        with self.compute.autocast():
            loss = self.algorithm.loss(self.model, batch, scalars)
        loss.total.backward()
        self.parameters.gather()
        return loss, self.clip()

    def clip(self) -> Tensor:
        """Clip the flat gradient in place; its norm before."""
        if self.optimizer.clip == "global":
            return global_norm_clip(self.parameters.grad, self.optimizer.clip_norm)
        norm = self.parameters.grad.norm()
        if self.optimizer.clip == "average":
            average_norm_clip(self.parameters.grad, self.parameters.slices.values(), self.optimizer.clip_norm)
        return norm

    def take_metrics(self) -> dict[str, float]:
        """Means of what was logged since the last call."""
        return self.metrics.take()

    def check(self, progress: Progress) -> None:
        """Raise what could not be raised at once; here everything was."""

    def state(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle.get_state(), "algorithm": self.algorithm.state()}

    def restore(self, state: dict[str, Any]) -> None:
        restore_generator(self.shuffle, state["shuffle"])
        self.algorithm.restore(state["algorithm"])


def gathered(batch: Any) -> Any:
    """The rows themselves, where they were only chosen so far."""
    return batch.gather() if isinstance(batch, Chosen) else batch


def still_to_tell(batch: Any, rows: Any, priorities: Tensor | None) -> Tensor | None:
    """The priorities, unless the batch itself passes them on."""
    if priorities is None or not isinstance(batch, Chosen):
        return priorities
    batch.feedback(rows.ids, priorities)
    return None


def not_finite(loss: Loss, norm: Tensor, update: str, batch: Any) -> NotFinite:
    return NotFinite(
        f"the loss ({float(loss.total.detach()):g}) or the gradient norm ({float(norm):g}) of {update} is not finite; "
        f"a lower optimizer.learning_rate or reward clipping may help",
        batch,
    )
