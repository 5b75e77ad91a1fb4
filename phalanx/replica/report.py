"""What a replica tells of itself, and all that anybody learns of it: reports, one an iteration, and snapshots.

A session consumes them, whether they come from a replica in this process or from many in others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from phalanx.seams import Saver
from phalanx.types import Progress, Rollout


@dataclass
class Report:
    """One iteration of a replica."""

    progress: Progress  # the clocks of the run at its end
    scores: list[float]  # raw scores of games that ended in it
    lags: Counter[int]  # versions between acting and learning -> steps learnt from with that lag
    seconds: dict[str, float]  # by stage
    metrics: dict[str, float]  # means of what the learner logged
    numbers: dict[str, float] = field(default_factory=dict)  # further ones for the record: the learning rate, say
    staleness: Counter[int] = field(default_factory=Counter)  # others' updates between pull and push -> times
    store_seconds: dict[str, float] = field(default_factory=dict)  # of a shared store: blocked by others, updating
    lengths: list[int] = field(default_factory=list)  # steps of games that ended in it, where their start was seen

    def merged_with(self, newer: Report) -> Report:
        """Both as one; means of metrics are those of the newer one."""
        seconds = {stage: self.seconds[stage] + newer.seconds[stage] for stage in newer.seconds}
        return replace(
            newer,
            scores=self.scores + newer.scores,
            lags=self.lags + newer.lags,
            seconds=seconds,
            staleness=self.staleness + newer.staleness,
            store_seconds=summed(self.store_seconds, newer.store_seconds),
            lengths=self.lengths + newer.lengths,
        )


@dataclass
class Snapshot:
    """What a checkpoint holds of a run, besides what the session itself remembers."""

    weights: dict[str, Tensor]  # the parameters by name, once
    clocks: Progress
    store: dict[str, Any]  # the rule's state and the version
    replicas: list[dict[str, Any]]  # learner, experience, sampling and pending rollout of each
    saver: Saver | None = None  # writes what is large, while training goes on


class Source(Protocol):
    """What a session records: a replica, or a team of them."""

    @property
    def progress(self) -> Progress: ...

    @property
    def pulse(self) -> object:
        """Something that changes as long as the run goes on."""

    @property
    def quiescent(self) -> bool:
        """Is nothing under way, so that a snapshot with environments can be taken?"""

    def notes(self) -> list[str]:
        """What the user should know before the first step."""

    def weights(self) -> dict[str, Tensor]:
        """A copy of the newest parameters by name."""

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """Everything a bit-identical continuation needs; without environments they begin new episodes."""

    def restore(self, snapshot: Snapshot, directory: Any) -> None: ...

    def leave(self) -> None:
        """The run is to end soon: begin nothing that would have to be finished first."""


def summed(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Key by key."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}


def lags_of(rollout: Rollout, version: int) -> Counter[int]:
    """How many steps of a rollout were chosen by parameters how many versions older than `version`."""
    values, counts = (version - rollout.version).unique(return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
