"""serial: everything in one process, nobody waits. The oracle every other topology is tested against.

SerialEnvs -> Collector -> Experience -> Learner -> LocalStore
     ^________________________________________________|  the next act uses the new parameters
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.config import Experiment
from phalanx.registry import MakeEnv
from phalanx.replica.replica import Replica
from phalanx.runs.session import Session
from phalanx.runtime.device import Compute, choose_compute
from phalanx.sampling.placement import slot_rules
from phalanx.sampling.serial import SerialEnvs


def run(experiment: Experiment, session: Session) -> None:
    compute = choose_compute(experiment.run)
    envs = make_envs(experiment, compute, session.event)
    try:
        session.train(Replica(experiment, envs, compute, session.event))
    finally:
        envs.close()


def make_envs(experiment: Experiment, compute: Compute, report: Callable[[str], None]) -> SerialEnvs:
    sampler = experiment.sampler
    factory = MakeEnv(experiment.env, experiment.run.seed)
    return SerialEnvs(factory, sampler.environments, sampler.groups, slot_rules(experiment), report)
