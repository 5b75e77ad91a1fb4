"""The learner of a GPU: loss, backward, clip and rule of a batch as one CUDA graph with static buffers.

It gives the same numbers as `Learner`. A batch is copied into the graph's own buffers; a deferred batch is known by few
numbers, and the graph itself gathers its rows and tells the experience of their priorities. Learning rate and scheduled
numbers live on the device, so a captured update stays valid while they move. Nothing waits for the device: an update
that is not finite leaves parameters and priorities as they were, those after it too; `check` reports it at the end of
the iteration, and puts the rule's state of its beginning back.

Where a graph cannot hold the store's push, as when other processes take part in it, the graph ends with the gradient,
and each push waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.deferred import DeferredBatch
from phalanx.errors import NotFinite
from phalanx.learning.learner import Learner, materialise, not_finite, report_priorities
from phalanx.runtime.graphs import Capturer
from phalanx.seams import CapturableStore, Experience
from phalanx.types import Gradient, Progress


class CapturedUpdate:
    """One graph and the buffers it reads and writes."""

    def __init__(self, learner: GraphLearner, batch: Any, experience: Experience) -> None:
        self.batch = own_copy(batch)
        self.addresses = addresses(batch)
        self.experience = experience
        changed = learner.mutated_tensors()
        changed += batch.mutated_tensors() if isinstance(batch, DeferredBatch) else []
        before = [tensor.clone() for tensor in changed]

        def undo() -> None:
            overwrite(changed, before)

        self.launch = learner.capturer.capture(lambda: self._work(learner), undo, learner.capturing)
        undo()

    def _work(self, learner: GraphLearner) -> None:
        rows = materialise(self.batch)
        loss, gradient = learner.gradient(rows, learner.scalars)
        if learner.whole_updates:
            cast(CapturableStore, learner.store).launch(gradient, learner.rate, learner.good)
        else:
            gradient.norm = gradient.flat.norm()
            learner.good.copy_(torch.isfinite(gradient.loss + gradient.norm))
        self.gradient = gradient
        assert gradient.norm is not None
        logged = {**loss.metrics, "loss/total": gradient.loss, "loss/gradient_norm": gradient.norm}
        learner.names = list(logged)
        learner.sums[: len(logged)] += torch.stack([value.float() for value in logged.values()])
        priorities = loss.priorities
        if priorities is not None:  # the memory ignores priorities that are no numbers
            priorities = priorities.masked_fill(~learner.good, torch.nan)
        report_priorities(self.batch, rows, priorities, self.experience)

    def run(self, batch: Any, good: Tensor) -> None:
        """The update from a batch; a batch that was not finite stays, to be shown."""
        for mine, given in zip(inputs(self.batch), inputs(batch), strict=True):
            torch.where(good, given, mine, out=mine)
        self.launch()

    def is_stale(self) -> bool:
        """Does the graph read what is no longer there?"""
        return addresses(self.batch) != self.addresses


class GraphLearner(Learner):
    """Learner whose update is a graph launch."""

    def __init__(self, *, report: Callable[[str], None], **parts: Any) -> None:
        super().__init__(**parts)
        self.whole_updates = self.store.capturable  # else the graph ends with the gradient
        device = self.compute.device
        self.graphs: dict[tuple[Any, ...], CapturedUpdate] = {}
        self.capturer = Capturer("an update", report)
        self.capturing = torch.cuda.Stream()
        self.rate = torch.zeros((), device=device)
        self.scalars = {name: torch.zeros((), device=device) for name in self.algorithm.scalars(Progress())}
        self.on_device: dict[str, float] = {}  # the scheduled numbers as the device has them
        self.names: list[str] = []
        self.sums = torch.zeros(32, device=device)
        self.count = 0
        self.good = torch.ones((), dtype=torch.bool, device=device)  # was every update finite so far?
        self.last: CapturedUpdate | None = None

    def updates(self, experience: Experience, begun: Progress) -> Iterator[bool]:
        """Those of an iteration."""
        if self.whole_updates:
            cast(CapturableStore, self.store).back_up_rule_state()
        yield from super().updates(experience, begun)

    def update(self, batch: Any, progress: Progress, experience: Experience) -> None:
        self._write_number("learning rate", self.rate, self.learning_rate(progress))
        for name, value in self.algorithm.scalars(progress).items():
            self._write_number(name, self.scalars[name], value)
        key = (*(tensor.shape for tensor in inputs(batch)), *addresses(batch))
        if key not in self.graphs:
            self._forget_stale()
            self.graphs[key] = CapturedUpdate(self, batch, experience)
        self.last = update = self.graphs[key]
        update.run(batch, self.good)
        self.count += 1
        if self.whole_updates:
            self.clocks.reach(cast(CapturableStore, self.store).count_push())
        else:
            self._push(update, progress)

    def _push(self, update: CapturedUpdate, progress: Progress) -> None:
        """Apply the gradient that a graph ended with."""
        computed = update.gradient
        gradient = Gradient(computed.flat, computed.loss, self.clocks.version)
        try:
            self.clocks.reach(self.store.push(gradient, self.learning_rate(progress)))
        except NotFinite:
            self.good.fill_(True)
            raise not_finite(gradient, f"update {progress.updates}", materialise(update.batch)) from None

    def _write_number(self, name: str, place: Tensor, value: float) -> None:
        """Write a number that graphs read, if it is another than before: within an iteration few are."""
        if self.on_device.get(name) != value:
            place.fill_(value)
            self.on_device[name] = value

    def _forget_stale(self) -> None:
        """Give the memory of updates back that are of no use any more: torch does not do so while it captures."""
        fresh = {key: update for key, update in self.graphs.items() if not update.is_stale()}
        if len(fresh) < len(self.graphs):
            self.graphs, self.last = fresh, None
            torch.cuda.empty_cache()

    def mutated_tensors(self) -> list[Tensor]:
        """Everything an update changes here and in the store."""
        in_store = cast(CapturableStore, self.store).mutated_tensors() if self.whole_updates else []
        return [*in_store, self.sums, self.good]

    def take_metrics(self) -> dict[str, float]:
        means = (self.sums / max(self.count, 1)).tolist()
        self.sums.zero_()
        count, self.count = self.count, 0
        return {**dict(zip(self.names, means, strict=False)), **super().take_metrics()} if count else {}

    def check(self) -> None:
        """Was every update finite? Waits for the device."""
        if bool(self.good):
            return
        cast(CapturableStore, self.store).put_rule_state_back()
        for update in sorted(self.graphs.values(), key=lambda update: update is self.last):
            batch = materialise(update.batch)
            _, gradient = self.gradient(batch, self.scalars)
            if update is self.last or not bool(torch.isfinite(gradient.loss + gradient.flat.norm())):
                raise not_finite(gradient, f"one of the updates before {self.clocks.now().updates}", batch)


def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def inputs(batch: Any) -> list[Tensor]:
    """What changes from one batch to the next."""
    return [getattr(batch, name) for name in input_names(batch)]


def input_names(batch: Any) -> tuple[str, ...]:
    return batch.INPUTS if isinstance(batch, DeferredBatch) else tuple(field.name for field in fields(batch))


def addresses(batch: Any) -> tuple[int, ...]:
    return batch.addresses() if isinstance(batch, DeferredBatch) else ()


def own_copy(batch: Any) -> Any:
    """The same batch with inputs of its own."""
    copies = {name: getattr(batch, name).clone(memory_format=torch.contiguous_format) for name in input_names(batch)}
    return replace(batch, **copies)
