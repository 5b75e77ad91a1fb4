"""Who works in a run of dba3c: workers, each a GA3C node around parameter servers, and an evaluator.

Plain Python: tests run them around servers in their own process, `phalanx/cluster` in processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from typing import Any

import numpy as np

from phalanx.cluster.member import Done, FleetClocks, MemberOrder
from phalanx.config import DBA3CConfig, Experiment, GA3CConfig
from phalanx.config.experiment import STEPS
from phalanx.errors import RunError, UserError
from phalanx.parameters.client import Whole
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.followed import FollowedParameters
from phalanx.registry import make_evaluation_policy
from phalanx.replica.build import make_model
from phalanx.replica.node import Node
from phalanx.replica.report import Report
from phalanx.runtime.device import choose_compute
from phalanx.sampling.evaluator import evaluate
from phalanx.topologies.bundle import IDLE, make_store
from phalanx.topologies.ga3c import compute_of, make_agents
from phalanx.types import Progress

OF_A_WORKER = ("learning_rate", "queue_prediction", "held", "queue_training", "batch_fill")
"""What the record has of the worker that reported last; rates are those of all workers."""


class Worker:
    """A GA3C node whose parameters are those of the servers. Its trainer waits for the step that its gradient belongs
    to; its predictors act meanwhile, until a batch is full. It goes on until it is stopped: a worker that had used up
    its budget would be missing in the steps of others."""

    def __init__(self, order: MemberOrder) -> None:
        self.events: list[str] = []
        experiment = as_node(order.own_experiment, order.experiment.run.threads)
        self.clocks = FleetClocks(np.zeros((2, 4), np.int64))
        compute = compute_of(experiment).install()
        self.open = contextlib.ExitStack()
        agents = self.open.enter_context(make_agents(experiment, compute, self.events.append, order.share))

        def share_parameters(_: Experiment, parameters: FlatParameters) -> FollowedParameters:
            return FollowedParameters(parameters, lambda own: make_store(order, order.experiment, own))

        self.node = self.open.enter_context(
            Node(experiment, agents, compute, self.events.append, share_parameters, self.clocks, order.share)
        )
        self.node.questions.last_step = STEPS
        assert isinstance(self.node.shared, FollowedParameters)
        self.shared = self.node.shared
        topology = self.node.topology
        self.node.resize(topology.agents, topology.predictors, topology.trainers)

    def work(self, others: Progress, seconds: float) -> Done:
        """Go on for so long, and tell what came of it. Neither waits for a step of the others."""
        self.clocks.others = others
        report, failed = None, ""
        try:
            report = self.node.iterate(seconds)
            report.numbers = {name: value for name, value in report.numbers.items() if name in OF_A_WORKER}
        except (UserError, RunError) as error:  # what another one would run into as well
            failed = str(error)
        events, self.events[:] = list(self.events), []
        return Done(self.clocks.own_progress(), report, self.shared.counts(), events, failed)

    def state(self) -> None:
        """Nothing: a run that is resumed goes on with the parameters, in new games."""

    def whole(self) -> Whole:
        """For a checkpoint: what the servers have, all of it of one step."""
        with self.shared.turns.take():
            return self.shared.follower.whole()


def as_node(experiment: Experiment, threads: int) -> Experiment:
    """The experiment of a worker as that of a GA3C node. Of its cores a third computes each update, if nobody says
    otherwise: the others belong to simulators and predictors."""
    topology = experiment.topology
    assert isinstance(topology, DBA3CConfig)
    node = GA3CConfig(
        agents=topology.agents,
        predictors=topology.predictors,
        trainers=1,
        prediction_batch=topology.prediction_batch,
        queue=topology.queue * -(-topology.batch // experiment.sampler.horizon),
        min_batch=topology.batch,
        max_threads=1,
    )
    run = dataclasses.replace(experiment.run, threads=threads or max(1, topology.cores // 3))
    return dataclasses.replace(experiment, topology=node, run=run)


class Evaluator:
    """Plays whole games with frozen parameters, every so many updates, and says when they are good enough."""

    def __init__(self, order: MemberOrder) -> None:
        self.experiment = order.own_experiment
        self.compute = choose_compute(self.experiment.run).install()
        self.model = make_model(self.experiment, order.extra.seen).to(self.compute.device)
        self.parameters = FlatParameters(self.model)
        self.store = make_store(order, self.experiment, self.parameters)
        self.clocks = FleetClocks()
        topology = self.experiment.topology
        assert isinstance(topology, DBA3CConfig)
        self.next = self.every = topology.evaluate_every

    def work(self, others: Progress, seconds: float) -> Done:
        """One evaluation if it is due."""
        self.clocks.others = others
        version = self.store.pull(self.parameters)
        self.clocks.reach(version)
        done = Done(self.clocks.own_progress())
        if version < self.next:
            time.sleep(seconds / 2 if version else IDLE)
            return done
        self.next = (version // self.every + 1) * self.every
        run, progress = self.experiment.run, self.clocks.now()
        policy = make_evaluation_policy(self.experiment, self.model, self.compute, greedy=True)
        scores = evaluate(self.experiment.env, policy, self.compute, run.eval_games, run.seed, progress)
        mean = sum(scores) / len(scores)
        numbers: dict[str, Any] = {"eval/score": mean, "eval/games": len(scores), "eval/version": version}
        done.report = Report(progress, [], Counter(), {}, {}, numbers)
        done.events = [
            f"after {version:,} updates {len(scores)} games have a mean of {mean:.2f}, at most {max(scores):g}"
        ]
        if run.target_score is not None and mean >= run.target_score:
            done.over = f"target score {run.target_score:g} reached in an evaluation"
        return done

    def state(self) -> dict[str, Any] | None:
        return None
