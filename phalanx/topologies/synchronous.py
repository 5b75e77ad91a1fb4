"""synchronous: environments in worker processes, one replica, lock step. Everyone waits for the slowest of a group.

    worker 0  [rows of group 0 | rows of group 1]  \\                          / Experience -> Learner -> LocalStore
    worker 1  [rows of group 0 | rows of group 1]  -- shared step buffer -- Collector                        |
    worker 2  [rows of group 0 | rows of group 1]  /                          \\ <- the next act uses the new version

One group is PAAC; with two, a group simulates while the other is served (Stooke & Abbeel). The policy lag is zero, or
exactly one rollout with `overlap`. On a GPU the step buffer is page-locked and the workers publish raw screens.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.config import AtariConfig, Experiment, SynchronousConfig
from phalanx.registry import MakeEnv
from phalanx.replica import make_replica, slot_rules
from phalanx.runtime.device import Compute, choose_compute
from phalanx.sampling.placement import place
from phalanx.sampling.processes import ProcessEnvs
from phalanx.session import Session


def run(experiment: Experiment, session: Session) -> None:
    compute = choose_compute(experiment.run)
    envs = make_envs(experiment, compute, session.event)
    try:
        replica = make_replica(experiment, envs, compute)
        try:
            session.train(replica)
        finally:
            replica.close()
    finally:
        envs.close()


def make_envs(experiment: Experiment, compute: Compute, report: Callable[[str], None]) -> ProcessEnvs:
    placement, sampler, env = place(experiment, compute), experiment.sampler, experiment.env
    topology = experiment.topology
    raw = (
        compute.device.type == "cuda"
        and isinstance(topology, SynchronousConfig)
        and topology.raw_screens
        and isinstance(env, AtariConfig)
        and env.color == "gray"
    )
    return ProcessEnvs(
        MakeEnv(env, experiment.run.seed, raw),
        placement.workers,
        placement.envs_per_worker,
        sampler.groups,
        slot_rules(experiment),
        squads=placement.squads,
        timeout=sampler.step_timeout,
        max_deaths=sampler.max_deaths,
        cores=placement.cores,
        balance=placement.balance,
        report=report,
    )
