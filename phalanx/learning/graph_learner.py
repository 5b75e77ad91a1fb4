"""The learner of a GPU: loss, backward, clip and rule of a batch as one CUDA graph with static buffers.

It gives the same numbers as `Learner`. A batch is copied into the graph's own buffers; where its rows are only chosen,
the choice is, and the graph gathers the rows and tells the experience of their priorities. Learning rate and scheduled
numbers live on the device, so a captured update stays valid while they move. Nothing waits for the device: an update
that is not finite leaves parameters and priorities as they were, those after it too, and `check` reports it at the end
of the iteration, and puts the rule's state of its beginning back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.learning.learner import Learner, gathered, not_finite, still_to_tell
from phalanx.parameters.local import LocalStore
from phalanx.runtime.graphs import Capturer
from phalanx.seams import Experience
from phalanx.types import Chosen, Progress


class CapturedUpdate:
    """One graph and the buffers it reads and writes."""

    def __init__(self, learner: CapturedLearner, batch: Any) -> None:
        self.batch = own_copy(batch)
        self.places = places(batch)
        self.priorities: Tensor | None = None
        changed = learner.changed()
        changed += batch.changed_by_feedback() if isinstance(batch, Chosen) else []
        before = [tensor.clone() for tensor in changed]

        def undo() -> None:
            overwrite(changed, before)

        self.launch = learner.capturer.capture(lambda: self._work(learner), undo, learner.capturing)
        undo()

    def _work(self, learner: CapturedLearner) -> None:
        rows = gathered(self.batch)
        loss, norm = learner.gradient(rows, learner.scalars)
        total = loss.total.detach()
        learner.good.logical_and_(torch.isfinite(total + norm))
        learner.parameters.grad.masked_fill_(~learner.good, 0.0)
        learner.store.apply(learner.parameters.grad, learner.rate * learner.good)
        logged = {**loss.metrics, "loss/total": total, "loss/gradient_norm": norm}
        learner.names = list(logged)
        learner.sums[: len(logged)] += torch.stack([value.float() for value in logged.values()])
        priorities = loss.priorities
        if priorities is not None:  # those that are no numbers change nothing
            priorities = priorities.masked_fill(~learner.good, torch.nan)
        self.priorities = still_to_tell(self.batch, rows, priorities)

    def run(self, batch: Any, good: Tensor) -> Tensor | None:
        """The update from a batch; a batch that was not finite stays, to be shown."""
        for mine, given in zip(inputs(self.batch), inputs(batch), strict=True):
            torch.where(good, given, mine, out=mine)
        self.launch()
        return self.priorities

    def is_stale(self) -> bool:
        """Does the graph read what is no longer there?"""
        return places(self.batch) != self.places


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
        self.told: dict[str, float] = {}  # the numbers the device has
        self.names: list[str] = []
        self.sums = torch.zeros(32, device=device)
        self.count = 0
        self.good = torch.ones((), dtype=torch.bool, device=device)  # was every update finite so far?
        self.last: CapturedUpdate | None = None
        self.kept = [state.clone() for state in self.store.rule_state.values()]

    def updates(self, experience: Experience, progress: Progress) -> Iterator[None]:
        """Those of an iteration. The rule's state before them is kept: after one that is not finite the rule runs on
        without a gradient, and its memory of gradients fades."""
        overwrite(self.kept, self.store.rule_state.values())
        yield from super().updates(experience, progress)

    def update(self, batch: Any, progress: Progress) -> Tensor | None:
        self._tell("learning rate", self.rate, self.learning_rate(progress))
        for name, value in self.algorithm.scalars(progress).items():
            self._tell(name, self.scalars[name], value)
        key = (*(tensor.shape for tensor in inputs(batch)), *places(batch))
        if key not in self.graphs:
            self._forget_stale()
            self.graphs[key] = CapturedUpdate(self, batch)
        self.last = update = self.graphs[key]
        priorities = update.run(batch, self.good)
        self.store.version += 1
        progress.version = self.store.version
        self.count += 1
        return priorities

    def _tell(self, name: str, place: Tensor, value: float) -> None:
        """Write a number that graphs read, if it is another than before: within an iteration few are."""
        if self.told.get(name) != value:
            place.fill_(value)
            self.told[name] = value

    def _forget_stale(self) -> None:
        """Give the memory of updates back that are of no use any more: torch does not do so while it captures."""
        fresh = {key: update for key, update in self.graphs.items() if not update.is_stale()}
        if len(fresh) < len(self.graphs):
            self.graphs, self.last = fresh, None
            torch.cuda.empty_cache()

    def changed(self) -> list[Tensor]:
        """Everything an update changes here."""
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
        overwrite(self.store.rule_state.values(), self.kept)
        for update in sorted(self.graphs.values(), key=lambda update: update is self.last):
            batch = gathered(update.batch)
            loss, norm = self.gradient(batch, self.scalars)
            if update is self.last or not bool(torch.isfinite(loss.total.detach() + norm)):
                raise not_finite(loss, norm, f"one of the updates before {progress.updates}", batch)


def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def inputs(batch: Any) -> list[Tensor]:
    """What changes from one batch to the next."""
    return [getattr(batch, name) for name in input_names(batch)]


def input_names(batch: Any) -> tuple[str, ...]:
    return batch.INPUTS if isinstance(batch, Chosen) else tuple(field.name for field in fields(batch))


def places(batch: Any) -> tuple[int, ...]:
    return batch.places() if isinstance(batch, Chosen) else ()


def own_copy(batch: Any) -> Any:
    """The same batch with inputs of its own."""
    copies = {name: getattr(batch, name).clone(memory_format=torch.contiguous_format) for name in input_names(batch)}
    return replace(batch, **copies)
