"""The learner: from a batch to a gradient, which the parameter store applies.

    for batch in algorithm.batches(experience):   loss -> backward -> flat gradient -> store.push

`learning/graph_learner.py` is its variant for a GPU, where the whole update is a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.algorithms import Algorithm
from phalanx.algorithms.schedules import Schedule
from phalanx.deferred import DeferredBatch
from phalanx.errors import NotFinite, UserError
from phalanx.learning.averages import MetricAverager
from phalanx.parameters.flat import FlatParameters
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute, restore_generator
from phalanx.runtime.timing import Timing
from phalanx.seams import Experience, Memory, ParameterStore
from phalanx.types import Gradient, Loss, Progress


class Learner:
    """Takes what the algorithm wants to learn from, one gradient step per batch."""

    def __init__(
        self,
        *,
        model: nn.Module,
        parameters: FlatParameters,
        store: ParameterStore,
        algorithm: Algorithm,
        learning_rate: Schedule,
        compute: Compute,
        clocks: Clocks,
        timing: Timing,
        seed: int,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.store = store
        self.algorithm = algorithm
        self.learning_rate = learning_rate
        self.compute = compute
        self.clocks = clocks
        self.timing = timing
        self.shuffle = torch.Generator(compute.device).manual_seed(seed)
        self.metrics = MetricAverager()

    def learn(self, experience: Experience) -> None:
        """Learn from the experience as often as the algorithm wants."""
        for _ in self.updates(experience, self.clocks.now()):
            pass

    def updates(self, experience: Experience, begun: Progress) -> Iterator[bool]:
        """The same as a generator that yields after each update, so that the caller can collect in between. Schedules
        see the steps and games of `begun`, a reading of the clocks, and the present number of updates."""
        started = time.perf_counter()

        def now() -> Progress:
            newest = self.clocks.now()
            return Progress(begun.steps, newest.updates, newest.version, begun.episodes)

        batches = self.algorithm.batches(experience, now, self.shuffle)
        while (batch := self._next(batches)) is not None:
            self.update(batch, now(), experience)
            self.clocks.count(updates=1)
            self.timing.add("learn", time.perf_counter() - started)
            yield True
            started = time.perf_counter()
        self.clocks.reach(self.store.pull(self.parameters))  # what others have pushed, if the store is shared
        self.timing.add("learn", time.perf_counter() - started)

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch, in the precision of the loss: an algorithm may ask a network to make one. At the end it may
        have numbers to log."""
        with self.compute.autocast():
            try:
                return next(batches)
            except StopIteration as end:
                self.metrics.add(end.value or {})
                return None

    def update(self, batch: Any, progress: Progress, experience: Experience) -> None:
        """One gradient step; the experience hears of new priorities, if there are any."""
        device = self.compute.device
        values = self.algorithm.scalars(progress)
        scalars = {name: torch.tensor(value, device=device) for name, value in values.items()}
        rows = materialise(batch)
        loss, gradient = self.gradient(rows, scalars)
        try:
            self.clocks.reach(self.store.push(gradient, self.learning_rate(progress)))
        except NotFinite:
            raise not_finite(gradient, f"update {progress.updates}", rows) from None
        assert gradient.norm is not None
        self.metrics.add({**loss.metrics, "loss/total": gradient.loss, "loss/gradient_norm": gradient.norm})
        report_priorities(batch, rows, loss.priorities, experience)

    def gradient(self, batch: Any, scalars: dict[str, Tensor]) -> tuple[Loss, Gradient]:
        """The loss of a batch and its gradient, which lies in the model's flat vector."""
        self.parameters.clear()
        with self.compute.autocast():
            loss = self.algorithm.loss(self.model, batch, scalars)
        if not isinstance(loss, Loss):  # it may be somebody else's code
            name, kind = type(self.algorithm).__name__, type(loss).__name__
            raise UserError(f"{name}.loss must return phalanx.types.Loss(total, metrics), not {kind}")
        loss.total.backward()
        self.parameters.gather()
        return loss, Gradient(self.parameters.grad, loss.total.detach(), self.clocks.version)

    def take_metrics(self) -> dict[str, float]:
        """Means of what was logged since the last call."""
        return self.metrics.take()

    def check(self) -> None:
        """Raise errors that a device reports late. This learner raises at once, so there are none."""

    def state(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle.get_state(), "algorithm": self.algorithm.state()}

    def restore(self, state: dict[str, Any]) -> None:
        restore_generator(self.shuffle, state["shuffle"])
        self.algorithm.restore(state["algorithm"])


def materialise(batch: Any) -> Any:
    """Gathers the rows of a deferred batch; any other one is returned as it is."""
    return batch.gather() if isinstance(batch, DeferredBatch) else batch


def report_priorities(batch: Any, rows: Any, priorities: Tensor | None, experience: Experience) -> None:
    """Tell the experience what was learnt of the rows it gave."""
    if priorities is not None:
        source = batch if isinstance(batch, DeferredBatch) else cast(Memory, experience)
        source.feedback(rows.ids, priorities)


def not_finite(gradient: Gradient, update: str, batch: Any) -> NotFinite:
    norm = gradient.flat.norm() if gradient.norm is None else gradient.norm
    return NotFinite(
        f"the loss ({float(gradient.loss):g}) or the gradient norm ({float(norm):g}) of {update} is not finite; "
        f"a lower optimizer.learning_rate or reward clipping may help",
        batch,
    )
