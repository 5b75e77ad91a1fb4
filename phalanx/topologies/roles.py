"""Gorila's actors and learners as processes of their own, around global replay and parameter servers.

actor: environments, policy --- rollouts ---> replay shards --- batches ---> learner: gradients ---> servers
  ^                                              ^------- priorities -----------|  ^                   |
  |---------------------------------------------- parameters ----------------------+-------------------|
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.cluster.member import Done, FleetClocks, MemberOrder
from phalanx.config import DQNConfig, Experiment, GorilaConfig
from phalanx.errors import RunError, UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.registry import make_policy
from phalanx.replay.shards import EmptyReplayError, ReplayShards, SharedMemory
from phalanx.replica.build import flatten, make_collector, make_learner, make_model
from phalanx.replica.report import Report
from phalanx.runtime.device import choose_compute
from phalanx.runtime.timing import Timing
from phalanx.topologies.asynchronous import make_envs
from phalanx.topologies.bundle import IDLE, make_store
from phalanx.types import EnvSpec, Progress


@dataclass(frozen=True)
class GlobalReplay:
    """What actors and learners are told of the memory they share."""

    shards: Callable[[], ReplayShards]
    spec: EnvSpec  # what a policy sees


class Actor:
    """Acts with parameters that it pulls, and learns nothing."""

    def __init__(self, order: MemberOrder) -> None:
        experiment = order.own_experiment
        compute = choose_compute(experiment.run).install()
        self.last_step = experiment.run.steps
        self.clocks, self.timing, self.events = FleetClocks(), Timing(), list[str]()
        self.open = contextlib.ExitStack()
        self.envs = self.open.enter_context(make_envs(experiment, compute, self.events.append, order.share))
        model = make_model(experiment, self.envs.spec.seen).to(compute.device)
        self.parameters = flatten(model, compute)
        self.store = make_store(order, experiment, self.parameters)
        environments = self.envs.groups[-1].stop
        policies = [make_policy(experiment, model, compute, environments)]
        pull = partial(self.store.pull, self.parameters)
        self.collector = make_collector(
            experiment,
            self.envs,
            policies,
            compute,
            self.clocks,
            self.timing,
            self.events.append,
            order.share,
            pull,
        )
        self.memory = memory_of(order, experiment, compute.device, order.share.rank)
        if order.state is not None and order.state["sampling"] is not None:
            self.collector.restore(order.state["sampling"]["collector"])
            self.envs.restore(order.state["sampling"]["envs"])

    def work(self, others: Progress, seconds: float) -> Done:
        self.clocks.others = others
        until = time.monotonic() + seconds
        report: Report | None = None
        try:
            while self.clocks.now().steps < self.last_step:
                newest = self._collect()
                report = newest if report is None else report.merged_with(newest)
                if time.monotonic() >= until:
                    break
        except (UserError, RunError) as error:
            return self._done(report, str(error))
        if report is None:
            time.sleep(IDLE)
        return self._done(report)

    def state(self) -> dict[str, Any]:
        sampling = {"collector": self.collector.state(), "envs": self.envs.state()} if self.collector.primed else None
        return {"learner": {}, "experience": {}, "sampling": sampling, "pending": None}

    def _collect(self) -> Report:
        self.clocks.reach(self.store.pull(self.parameters))
        rollout = self.collector.collect()
        started = time.perf_counter()
        self.memory.put(rollout)
        self.timing.add("infer", time.perf_counter() - started)
        scores = self.collector.take_scores()
        self.clocks.count(episodes=len(scores))
        return Report(self.clocks.now(), scores, Counter(), self.timing.take(), {})

    def _done(self, report: Report | None, failed: str = "") -> Done:
        events, self.events[:] = list(self.events), []
        return Done(self.clocks.own_progress(), report, {}, events, failed)


class Learning:
    """Learns from what all actors have stored. It keeps to `algorithm.intensity`: where learners are fast, they wait
    for new steps."""

    def __init__(self, order: MemberOrder) -> None:
        experiment = order.own_experiment
        topology, algorithm = experiment.topology, order.experiment.algorithm
        assert isinstance(topology, GorilaConfig) and isinstance(algorithm, DQNConfig)
        compute = choose_compute(experiment.run).install()
        self.clocks, self.timing, self.events = FleetClocks(), Timing(), list[str]()
        model = make_model(experiment, order.extra.spec).to(compute.device)
        self.parameters: FlatParameters = flatten(model, compute)
        self.store = make_store(order, experiment, self.parameters)
        self.clocks.reach(self.store.version)
        self.learner = make_learner(
            experiment,
            model,
            self.parameters,
            self.store,
            compute,
            self.clocks,
            self.timing,
            self.events.append,
            order.share,
        )
        self.memory = memory_of(order, experiment, compute.device)
        self.starts = algorithm.learning_starts
        self.every = experiment.sampler.rollout_steps * topology.learners  # steps of the run for each turn of this one
        self.turns = 0
        self.begun_at = -1  # steps of the run when there was enough to learn from

    def work(self, others: Progress, seconds: float) -> Done:
        self.clocks.others = others
        until = time.monotonic() + seconds
        report: Report | None = None
        try:
            while time.monotonic() < until and self._may_learn():
                newest = self._learn()
                report = newest if report is None else report.merged_with(newest)
        except EmptyReplayError:
            self.events.append("all replay shards are empty; learning goes on when they are filled again")
        except (UserError, RunError) as error:
            return self._done(report, str(error))
        if report is None:
            time.sleep(IDLE)
        return self._done(report)

    def state(self) -> None:
        """Nothing: whoever goes on begins with the newest parameters, which become its target network, too."""

    def _may_learn(self) -> bool:
        steps = self.clocks.now().steps
        if self.begun_at < 0:
            if steps < self.starts or not self.memory.ready(self.starts):
                return False
            self.begun_at = steps
        return self.turns * self.every <= steps - self.begun_at

    def _learn(self) -> Report:
        self.learner.learn(self.memory)
        self.turns += 1
        report = Report(self.clocks.now(), [], Counter(), self.timing.take(), self.learner.take_metrics())
        report.numbers = {"learning_rate": self.learner.learning_rate(report.progress)}
        report.staleness = self.store.take_staleness()
        report.store_seconds = self.store.take_seconds()
        return report

    def _done(self, report: Report | None, failed: str = "") -> Done:
        events, self.events[:] = list(self.events), []
        return Done(self.clocks.own_progress(), report, dict(self.store.counts), events, failed)


def memory_of(order: MemberOrder, experiment: Experiment, device: Any, actor: int = 0) -> SharedMemory:
    """The way of a member to global replay. It holds what all actors' parts hold, which are whole rows of their
    environments each: a little less than `algorithm.replay_size` where that does not divide."""
    algorithm, topology, environments = experiment.algorithm, experiment.topology, experiment.sampler.environments
    assert isinstance(algorithm, DQNConfig) and isinstance(topology, GorilaConfig)
    assert isinstance(order.extra, GlobalReplay)
    capacity = topology.actors * (algorithm.replay_size // environments * environments)
    return SharedMemory(order.extra.shards(), capacity, device, actor)
