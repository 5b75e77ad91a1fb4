"""A member of a fleet that acts and learns: a replica around parameter servers. Gorila's bundle is one, and so is a
worker of Distributed BA3C; they differ in how servers take their gradients.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from phalanx.cluster.member import Done, FleetClocks, MemberOrder
from phalanx.config import DBA3CConfig, Experiment, GorilaConfig
from phalanx.errors import RunError, UserError
from phalanx.parameters.client import ShardedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.guard import LossGuard
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.replica.build import make_replica
from phalanx.replica.report import Report
from phalanx.runtime.device import choose_compute
from phalanx.topologies.asynchronous import make_envs
from phalanx.types import Progress

IDLE = 0.02  # seconds between two looks of a member that has nothing left to do


class Bundle:
    """Environments, experience and learner of one process."""

    def __init__(self, order: MemberOrder) -> None:
        self.experiment = experiment = order.own_experiment
        self.compute = choose_compute(experiment.run).install()
        self.clocks = FleetClocks()
        self.events: list[str] = []
        self.order = order
        self.last_step = experiment.run.steps
        self.open = contextlib.ExitStack()
        envs = self.open.enter_context(make_envs(experiment, self.compute, self.events.append, order.share))
        self.replica = self.open.enter_context(
            make_replica(experiment, envs, self.compute, self.events.append, self._make_store, self.clocks, order.share)
        )
        assert isinstance(self.replica.store, ShardedStore)
        self.store = self.replica.store
        self.clocks.reach(self.store.version)
        if order.state is not None:
            self.replica.restore_state(order.state, Path())

    def work(self, others: Progress, seconds: float) -> Done:
        """Iterate for about so long, and tell what came of it."""
        self.clocks.others = others
        until = time.monotonic() + seconds
        report: Report | None = None
        try:
            while self.replica.progress.steps < self.last_step:
                newest = self.replica.iterate(run_ahead=False)
                newest.staleness = self.store.take_staleness()
                newest.store_seconds.update(self.store.take_seconds())
                report = newest if report is None else report.merged_with(newest)
                if time.monotonic() >= until:
                    break
        except (UserError, RunError) as error:  # what another one would run into as well
            return self._done(report, failed=str(error))
        if report is None:  # the budget is used up; others may still be at work
            time.sleep(IDLE)
        return self._done(report)

    def state(self) -> dict[str, Any]:
        return self.replica.state()

    def _make_store(self, experiment: Experiment, parameters: FlatParameters) -> ShardedStore:
        return make_store(self.order, experiment, parameters)

    def _done(self, report: Report | None, failed: str = "") -> Done:
        events, self.events[:] = list(self.events), []
        return Done(self.clocks.own_progress(), report, dict(self.store.counts), events, failed)


def make_store(order: MemberOrder, experiment: Experiment, parameters: FlatParameters) -> ShardedStore:
    """A member's way to the parameter servers of its run."""
    topology, optimizer = experiment.topology, experiment.optimizer
    assert isinstance(topology, GorilaConfig | DBA3CConfig)
    guard = None
    if isinstance(topology, GorilaConfig) and topology.outlier:
        guard = LossGuard(topology.outlier, topology.outlier_warm_up)
    return ShardedStore(
        order.shards(),
        parameters,
        make_rule(optimizer),
        make_clip(optimizer, parameters.slices.values()),
        order.worker,
        consistent=isinstance(topology, DBA3CConfig) and not topology.asynchronous,
        bfloat16=topology.wire == "bfloat16",
        guard=guard,
    )
