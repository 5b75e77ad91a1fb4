"""Members of a fleet: what acts or learns, as the fleet sees it. No Ray here.

supervisor -> work(others, seconds) -> Done        what the run has done elsewhere, and what this member has done
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from phalanx.cluster.server import with_arrays
from phalanx.cluster.standby import Kept
from phalanx.config import Experiment
from phalanx.parameters.client import Shards
from phalanx.replica.report import Report
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.share import Share
from phalanx.types import Progress


@dataclass(frozen=True)
class MemberOrder:
    """What a member is told when it starts."""

    experiment: Experiment  # of the whole run
    share: Share
    shards: Callable[[], Shards]  # its way to the parameter servers
    worker: int  # its number in pushes; no two members of a run have the same, nor a successor that of its predecessor
    state: dict[str, Any] | None = None  # what a checkpoint holds of it
    extra: Any = None  # what its kind needs besides

    @property
    def own_experiment(self) -> Experiment:
        """The experiment as this member runs it: with its part of the environments, on its own cores."""
        experiment = self.share.part(self.experiment)
        cores = getattr(experiment.topology, "cores", 1)
        sampler, run = experiment.sampler, experiment.run
        if cores > 1 and not sampler.workers:
            sampler = replace(sampler, workers=cores)
        sampler = replace(sampler, pin=False)  # which cores are free on its host, nobody here knows
        return replace(experiment, sampler=sampler, run=replace(run, threads=run.threads or cores))


@dataclass
class Done:
    """What a member has done since it was asked last."""

    own: Progress  # steps, games and updates of this member alone, since it was born; the version it knows
    report: Report | None = None
    counts: dict[str, int] = field(default_factory=dict)  # what became of its gradients, since it was born
    events: list[str] = field(default_factory=list)
    failed: str = ""  # why no successor would do better
    over: str = ""  # why the run has reached what it was for


class Member(Protocol):
    """Runs in a process of its own."""

    def work(self, others: Progress, seconds: float) -> Done:
        """Go on for about so long. `others` is what the rest of the run has done."""

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint."""


@dataclass
class Elsewhere:
    """What the rest of the run has done, as all threads of a member are told."""

    done: Progress = field(default_factory=Progress)


class FleetClocks(Clocks):
    """The clocks of a member: what it counts itself, and what it was told of others. Updates are those that the
    parameter servers have applied, whoever made the gradients: the version counts them, and every pull tells it."""

    def __init__(self, rows: np.ndarray | None = None, row: int = 0, elsewhere: Elsewhere | None = None) -> None:
        super().__init__(rows, row)
        self.elsewhere = elsewhere or Elsewhere()

    @property
    def others(self) -> Progress:
        return self.elsewhere.done

    @others.setter
    def others(self, done: Progress) -> None:
        self.elsewhere.done = done

    def of(self, row: int) -> FleetClocks:
        return FleetClocks(self.rows, row, self.elsewhere)

    def now(self) -> Progress:
        own, others = super().now(), self.others
        version = max(own.version, others.version)
        return Progress(own.steps + others.steps, version, version, own.episodes + others.episodes)

    def own_progress(self) -> Progress:
        """Of this member alone."""
        return super().now()


class Host:
    """A member in a process of its own: what Ray starts. It makes the member when it is asked for work for the first
    time, so that its way of failing is an answer, not a mystery, and one that is slow to get ready is known to be there
    (`process`)."""

    def __init__(self, target: str, order: MemberOrder) -> None:
        self.target = target
        self.order = order

    @cached_property
    def member(self) -> Member:
        module, name = self.target.split(":")
        member: Member = getattr(import_module(module), name)(self.order)
        return member

    def process(self) -> int:
        return os.getpid()

    def work(self, others: Progress, seconds: float) -> Done:
        return self.member.work(others, seconds)

    def state(self) -> dict[str, Any] | None:
        return self.member.state()

    def whole(self) -> Kept:
        """Asked of a member that is the chief: what all parameter servers have."""
        values, state, apart = self.member.whole()  # type: ignore[attr-defined]
        return with_arrays({**state, "values": values, "apart": apart})
