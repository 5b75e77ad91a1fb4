"""dba3c: workers on many hosts that make every update together, on the mean of the first gradients to arrive
(Distributed BA3C).

    worker, one of many                                          parameter servers, a slice of the parameters each
    [environments] -> [rollout] -> [learner] --- gradient -----> wait for the first k of n, apply their mean
         ^________________________________|                               |          |  copies, every few updates
         ^---------------- parameters of the next step -------------------|          v
    driver: records, writes checkpoints, replaces the dead                        standby
    evaluator: pulls one step now and then, plays whole games, ends the run at the target score

A step is over when `topology.quorum` of the workers have handed in a gradient of it; what comes later is dropped and
counted, so that a few slow workers (backup workers) hold nobody up. When fewer are alive than a step needs, the quorum
is lowered, or the run stopped (`topology.too_few`). A worker's rollout is of the newest parameters: its lag is 0, or
one rollout with `sampler.overlap`. With `topology.asynchronous` every gradient is applied as it comes, for comparison.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from phalanx.cluster.member import Done, FleetClocks, MemberOrder
from phalanx.config import DBA3CConfig, Experiment
from phalanx.parameters.flat import FlatParameters
from phalanx.registry import make_evaluation_policy
from phalanx.replica.build import make_model
from phalanx.replica.report import Report
from phalanx.runs.session import Session
from phalanx.runtime.device import choose_compute
from phalanx.runtime.share import WHOLE, Share
from phalanx.sampling.evaluator import evaluate
from phalanx.topologies.asynchronous import spec_of
from phalanx.topologies.bundle import IDLE, make_store
from phalanx.types import Progress


def run(experiment: Experiment, session: Session) -> None:
    """The driver is the chief: it prepares the servers, has the clock and the checkpoints, and learns nothing."""
    from phalanx.cluster.engine import running

    topology = settings(experiment)
    compute = choose_compute(experiment.run).install()
    with running(topology.address):
        from phalanx.cluster.fleet import Fleet, Post

        spec = spec_of(experiment, compute)
        model = FlatParameters(make_model(experiment, spec.seen))
        workers, target = topology.workers, "phalanx.topologies.bundle:Bundle"
        posts = [Post("worker", rank, target, Share(rank, workers)) for rank in range(workers)]
        if topology.evaluate_every:
            posts.append(Post("evaluator", workers, "phalanx.topologies.dba3c:Evaluator", WHOLE, spec))
        quorum = 0 if topology.asynchronous else max(1, round(topology.quorum * workers))
        with (
            Fleet(experiment=experiment, model=model, posts=posts, event=session.event, quorum=quorum) as fleet,
            session.recording(fleet, spec, compute),
        ):
            fleet.start()
            while session.goes_on():
                for report in fleet.reports(timeout=0.2):
                    session.note(report)
                if fleet.reached:
                    session.stop_reason = fleet.reached


class Evaluator:
    """Plays whole games with frozen parameters, every so many updates, and says when they are good enough."""

    def __init__(self, order: MemberOrder) -> None:
        self.experiment = order.own_experiment
        self.compute = choose_compute(self.experiment.run).install()
        self.model = make_model(self.experiment, order.extra.seen).to(self.compute.device)
        self.parameters = FlatParameters(self.model)
        self.store = make_store(order, self.experiment, self.parameters)
        self.clocks = FleetClocks()
        self.next = self.every = settings(self.experiment).evaluate_every

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


def settings(experiment: Experiment) -> DBA3CConfig:
    assert isinstance(experiment.topology, DBA3CConfig)
    return experiment.topology
