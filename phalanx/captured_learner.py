"""The learner of a GPU: loss, backward, clip and rule of a batch as one CUDA graph with static buffers.

It gives the same numbers as `Learner`. A batch is copied into the graph's own buffers; where only its rows are chosen,
their numbers are, and the graph gathers the rows. Learning rate and scheduled numbers live on the device, so a captured
update stays valid while they move. Nothing waits for the device: an update
that is not finite leaves the parameters as they were, those after it too, and `check` reports it at the end of the
iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.learner import Learner, gathered, not_finite
from phalanx.parameters.local import LocalStore
from phalanx.runtime.graphs import Capturer
from phalanx.types import Chosen, Progress


class CapturedUpdate:
    """One graph and the buffers it reads and writes."""

    def __init__(self, learner: CapturedLearner, batch: Any) -> None:
        self.batch = own_copy(batch)
        self.priorities: Tensor | None = None
        before = learner.snapshot()
        work, undo = lambda: self._work(learner), lambda: learner.put_back(before)
        self.launch = learner.capturer.capture(work, undo, learner.capturing)
        learner.put_back(before)

    def _work(self, learner: CapturedLearner) -> None:
        loss, norm = learner.gradient(gathered(self.batch), learner.scalars)
        total = loss.total.detach()
        learner.good.logical_and_(torch.isfinite(total + norm))
        learner.parameters.grad.masked_fill_(~learner.good, 0.0)
        learner.store.apply(learner.parameters.grad, learner.rate * learner.good)
        logged = {**loss.metrics, "loss/total": total, "loss/gradient_norm": norm}
        learner.names = list(logged)
        learner.sums[: len(logged)] += torch.stack([value.float() for value in logged.values()])
        self.priorities = loss.priorities

    def run(self, batch: Any, good: Tensor) -> Tensor | None:
        """The update from a batch; a batch that was not finite stays, to be shown."""
        for mine, given in zip(inputs(self.batch), inputs(batch), strict=True):
            torch.where(good, given, mine, out=mine)
        self.launch()
        return self.priorities


class CapturedLearner(Learner):
    """Learner whose update is a graph launch."""

    store: LocalStore

    def __init__(self, *arguments: Any, report: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        device = self.compute.device
        self.graphs: dict[tuple[Any, ...], CapturedUpdate] = {}
        self.capturer = Capturer("an update", report)
        self.capturing = torch.cuda.Stream()
        self.rate = torch.zeros((), device=device)
        self.scalars = {name: torch.zeros((), device=device) for name in self.algorithm.scalars(Progress())}
        self.names: list[str] = []
        self.sums = torch.zeros(32, device=device)
        self.count = 0
        self.good = torch.ones((), dtype=torch.bool, device=device)  # was every update finite so far?
        self.last: CapturedUpdate

    def update(self, batch: Any, progress: Progress) -> Tensor | None:
        self.rate.fill_(self.learning_rate(progress))
        for name, value in self.algorithm.scalars(progress).items():
            self.scalars[name].fill_(value)
        fixed = batch.addresses() if isinstance(batch, Chosen) else ()
        key = (*(tensor.shape for tensor in inputs(batch)), *fixed)
        if key not in self.graphs:
            self.graphs[key] = CapturedUpdate(self, batch)
        self.last = self.graphs[key]
        priorities = self.last.run(batch, self.good)
        self.store.version += 1
        progress.version = self.store.version
        self.count += 1
        return priorities

    def snapshot(self) -> list[Tensor]:
        """Everything an update changes."""
        return [tensor.clone() for tensor in self._changed()]

    def put_back(self, snapshot: list[Tensor]) -> None:
        for tensor, value in zip(self._changed(), snapshot, strict=True):
            tensor.copy_(value)

    def _changed(self) -> list[Tensor]:
        return [self.parameters.flat, *self.store.rule_state.values(), self.sums, self.good]

    def take_metrics(self) -> dict[str, float]:
        means = (self.sums / max(self.count, 1)).tolist()
        self.sums.zero_()
        count, self.count = self.count, 0
        return dict(zip(self.names, means, strict=False)) if count else {}

    def check(self, progress: Progress) -> None:
        """Was every update finite? Waits for the device."""
        if bool(self.good):
            return
        for update in sorted(self.graphs.values(), key=lambda update: update is self.last):
            batch = gathered(update.batch)
            loss, norm = self.gradient(batch, self.scalars)
            if update is self.last or not bool(torch.isfinite(loss.total.detach() + norm)):
                raise not_finite(loss, norm, f"one of the updates before {progress.updates}", batch)


def inputs(batch: Any) -> list[Tensor]:
    """What changes from one batch to the next."""
    if isinstance(batch, Chosen):
        return [batch.chosen]
    return [getattr(batch, field.name) for field in fields(batch)]


def own_copy(batch: Any) -> Any:
    """The same batch with inputs of its own."""
    if isinstance(batch, Chosen):
        return replace(batch, chosen=batch.chosen.clone())
    return batch.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
