"""gorila: actors, learners, replay and parameter servers in processes of their own, on one host or many. Nobody waits
for anybody (Gorila).

    bundle, one of many                                       parameter servers, a slice of the parameters each
    [actor: own environments] -> [replay] -> [learner] -----> [slice 0, its rule] [slice 1, its rule] ...
         ^  pull before every acting step       | gradient         |  copies, every so many updates
         |__________________________________<___|__________________|             v
    driver: records, evaluates, writes checkpoints, replaces the dead         standby

A bundle (`topology.bundles`, the paper's experiment) is a replica with another store. With `topology.bundles 0` actors,
replay shards and learners are processes of their own (`topologies/roles.py`). The target network and epsilon can go by
the updates that the servers have applied, whoever made the gradients (`algorithm.target_clock`, `epsilon_clock`). A
gradient is discarded by a server if it is too old (`topology.staleness`), and by its learner if its loss is an outlier
(`topology.outlier`). A bundle that dies takes at most its own gradient and its memory with it; a server that dies comes
back with the copy its standby has.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from phalanx.cluster.member import CrewClocks, Done, MemberOrder
from phalanx.config import Experiment, GorilaConfig
from phalanx.errors import RunError, UserError
from phalanx.parameters.client import ShardedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.guard import LossGuard
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.replica.build import make_model, make_replica
from phalanx.replica.report import Report
from phalanx.runs.session import Session
from phalanx.runtime.device import choose_compute
from phalanx.runtime.share import Share
from phalanx.topologies.asynchronous import make_envs, spec_of
from phalanx.types import Progress


def run(experiment: Experiment, session: Session) -> None:
    """The driver learns nothing: it looks after the crew, and after the run."""
    from phalanx.cluster.engine import running

    topology = settings(experiment)
    compute = choose_compute(experiment.run).install()
    with running(topology.address):
        from phalanx.cluster.crew import Crew, Post

        spec = spec_of(experiment, compute)
        model = FlatParameters(make_model(experiment, spec.seen))
        target = "phalanx.topologies.gorila:Bundle"
        posts = [Post("bundle", rank, target, Share(rank, topology.bundles)) for rank in range(topology.bundles)]
        with (
            Crew(
                experiment=experiment, model=model, posts=posts, event=session.event, bound=topology.staleness
            ) as crew,
            session.recording(crew, spec, compute),
        ):
            crew.start()
            while session.goes_on():
                for report in crew.reports(timeout=0.2):
                    session.note(report)


class Bundle:
    """An actor, its memory and a learner: a replica around the parameter servers."""

    def __init__(self, order: MemberOrder) -> None:
        self.experiment = experiment = order.own_experiment
        self.compute = choose_compute(experiment.run).install()
        self.clocks = CrewClocks()
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
                report = newest if report is None else report.merged_with(newest)
                if time.monotonic() >= until:
                    break
        except (UserError, RunError) as error:  # what another one would run into as well
            return self._done(report, failed=str(error))
        if report is None:  # the budget is used up; others may still be at work
            time.sleep(0.02)
        return self._done(report)

    def state(self) -> dict[str, Any]:
        return self.replica.state()

    def _make_store(self, experiment: Experiment, parameters: FlatParameters) -> ShardedStore:
        topology, optimizer = settings(experiment), experiment.optimizer
        return ShardedStore(
            self.order.shards(),
            parameters,
            make_rule(optimizer),
            make_clip(optimizer, parameters.slices.values()),
            self.order.worker,
            bfloat16=topology.wire == "bfloat16",
            guard=LossGuard(topology.outlier, topology.outlier_warm_up),
        )

    def _done(self, report: Report | None, failed: str = "") -> Done:
        events, self.events[:] = list(self.events), []
        return Done(self.clocks.own_progress(), report, dict(self.store.counts), events, failed)


def settings(experiment: Experiment) -> GorilaConfig:
    assert isinstance(experiment.topology, GorilaConfig)
    return experiment.topology
