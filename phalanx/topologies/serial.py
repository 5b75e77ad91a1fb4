"""serial: everything in one process, nobody waits. The oracle every other topology is tested against.

    SerialEnvs -> Collector -> Experience -> Learner -> LocalStore
         ^________________________________________________|  the next act uses the new parameters
"""

from __future__ import annotations

from phalanx.config import Experiment
from phalanx.registry import MakeEnv
from phalanx.replica import Replica, slot_rules
from phalanx.runtime.device import choose_compute
from phalanx.sampling.serial import SerialEnvs
from phalanx.session import Session


def run(experiment: Experiment, session: Session) -> None:
    compute = choose_compute(experiment.run)
    factory = MakeEnv(experiment.env, experiment.run.seed)
    sampler = experiment.sampler
    envs = SerialEnvs(factory, sampler.environments, sampler.groups, slot_rules(experiment))
    try:
        session.train(Replica(experiment, envs, compute), compute)
    finally:
        envs.close()
