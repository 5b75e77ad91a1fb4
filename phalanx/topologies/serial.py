"""serial: everything in one process, without concurrency. Every other topology is tested against its results.

    SerialEnvs -> Collector -> Experience -> Learner -> LocalStore
         ^________________________________________________|  the next act uses the new parameters

A topology is a function `run(experiment, session)` with a row in `registry.TOPOLOGIES`, and a configuration in
`config/experiment.py`. It makes environments and replicas (`replica/build.py` puts one together: experiment,
environments, the device it computes on, and, where there are several, a store, clocks and a `Share` of the run) and has
the loop: a replica iterates and reports, the session notes. The session owns the run directory: records, checkpoints,
signals, and when to stop. What it records is any `Source` (`replica/report.py`), a replica or a team of them.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.config import Experiment
from phalanx.registry import MakeEnv
from phalanx.replica.build import make_replica
from phalanx.runs.session import Session
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.share import WHOLE, Share
from phalanx.sampling.serial import SerialEnvs
from phalanx.sampling.slot import slot_rules


def run(experiment: Experiment, session: Session) -> None:
    compute = choose_compute(experiment.run).install()
    with (
        make_envs(experiment, compute, session.event) as envs,
        make_replica(experiment, envs, compute, session.event) as replica,
        session.recording(replica, envs.spec, compute),
    ):
        while session.goes_on():
            session.note(replica.iterate(session.may_run_ahead))


def make_envs(
    experiment: Experiment, compute: Compute, report: Callable[[str], None], share: Share = WHOLE
) -> SerialEnvs:
    sampler = experiment.sampler
    factory = MakeEnv(experiment.env, experiment.run.seed)
    return SerialEnvs(factory, sampler.environments, sampler.groups, slot_rules(experiment, share), report)
