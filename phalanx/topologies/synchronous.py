"""synchronous: environments in worker processes, lock step. Everyone waits for the slowest of a group.

    worker 0  [rows of group 0 | rows of group 1]  \\                          / Experience -> Learner -> LocalStore
    worker 1  [rows of group 0 | rows of group 1]  -- shared step buffer -- Collector                        |
    worker 2  [rows of group 0 | rows of group 1]  /                          \\ <- the next act uses the new version

One group is PAAC; with two, a group simulates while the other is served (Stooke & Abbeel). The policy lag is zero, or
exactly one rollout with `sampler.overlap`. On a GPU the step buffer is page-locked and the workers publish raw screens.
Here with one replica; several that make every update together are in `topologies/lockstep.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.config import Experiment
from phalanx.replica.build import make_replica
from phalanx.runs.session import Session
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.share import WHOLE, Share
from phalanx.sampling.placement import start_workers
from phalanx.sampling.processes import ProcessEnvs


def run(experiment: Experiment, session: Session) -> None:
    compute = choose_compute(experiment.run).install()
    envs = session.prestarted or make_envs(experiment, compute, session.event)
    envs.report = session.event
    with (
        envs,
        make_replica(experiment, envs, compute, session.event) as replica,
        session.recording(replica, envs.spec, compute),
    ):
        while session.goes_on():
            session.note(replica.iterate(session.may_run_ahead))


def make_envs(
    experiment: Experiment, compute: Compute, report: Callable[[str], None], share: Share = WHOLE
) -> ProcessEnvs:
    return start_workers(experiment, compute.device.type, report, share)
