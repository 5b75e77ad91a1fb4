"""asynchronous: replicas in processes of their own around central parameters; nobody waits for anybody.

    parent                    shared memory                      replica, one of many, with its own environments
    records, evaluates,       [chunk 0 | chunk 1 | chunk 2] <--> push: for each chunk lock, pull, rule, write back
    writes checkpoints,       [clocks, a row each]          <--  counts its steps, updates and games
    replaces the dead  <---------- reports, by socket ---------  iterate: collect, put, learn

A3C is A2C on it, APPO is PPO on it (Stooke & Abbeel, sections 4.3, 5.5). A replica pulls before it collects, and with
`topology.poll_every` within a rollout. Others may push between its pull and its push; how often is measured for every
chunk (`staleness_mean`). A replica that dies takes at most its own gradient with it: a successor plays other games.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from phalanx.config import AsynchronousConfig, Experiment
from phalanx.errors import RunError, UserError
from phalanx.parameters.chunked import CentralParameters, ChunkLockedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.registry import MakeEnv
from phalanx.replica.build import make_model, make_replica
from phalanx.replica.central import CentralTeam
from phalanx.replica.replica import Replica
from phalanx.replica.team import Mailbox, ReplicaOrder, longest_silence
from phalanx.runs.session import Session
from phalanx.runtime.affinity import confine_to, cores_by_node
from phalanx.runtime.child import Parent
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.share import Share, divide_cores
from phalanx.sampling.placement import place, sends_raw_screens
from phalanx.seams import VectorEnvs
from phalanx.topologies import serial, synchronous
from phalanx.types import EnvSpec


def run(experiment: Experiment, session: Session) -> None:
    """The parent learns nothing: it looks after the replicas, and after the run."""
    topology = settings(experiment)
    compute = choose_compute(experiment.run).install()
    spec = spec_of(experiment, compute)
    model = FlatParameters(make_model(experiment, spec.seen))
    rule = make_rule(experiment.optimizer)
    central = CentralParameters.create(model.flat, rule.init(model.flat.numel()), topology.chunks)
    shares = shares_of(compute, topology.replicas)
    target = "phalanx.topologies.asynchronous:serve"
    with (
        contextlib.closing(central),
        CentralTeam(
            experiment=experiment, target=target, shares=shares, model=model, central=central, event=session.event
        ) as team,
        session.recording(team, spec, compute),
    ):
        team.start()
        while session.goes_on():
            for report in team.reports(timeout=0.2):
                session.note(report)


def shares_of(compute: Compute, count: int) -> list[Share]:
    """Who has which cores, and which GPU where there are several."""
    cores, gpus = (
        divide_cores(cores_by_node(), count),
        torch.cuda.device_count() if compute.device.type == "cuda" else 0,
    )
    devices = [f"cuda:{rank % gpus}" if gpus > 1 else None for rank in range(count)]
    return [Share(rank, count, part, device) for rank, (part, device) in enumerate(zip(cores, devices, strict=True))]


def spec_of(experiment: Experiment, compute: Compute) -> EnvSpec:
    """What the replicas' environments are like, from one that is made for that alone."""
    env = MakeEnv(experiment.env, experiment.run.seed, sends_raw_screens(experiment, compute.device.type))(0)
    env.close()
    return env.spec


def serve(order: ReplicaOrder, parent: Parent) -> None:
    """A replica's process: it iterates until the budget is used up, or its parent is gone."""
    if order.share.cores is not None:
        confine_to(order.share.cores)
    parent.failed_at_once = lambda: False
    experiment, clocks = order.share.part(order.experiment), Clocks(order.clock_rows(), order.share.rank)
    compute = choose_compute(experiment.run).install()

    def event(sentence: str) -> None:
        parent.tell(("event", sentence))

    try:
        with (
            make_envs(experiment, compute, event, order.share) as envs,
            make_replica(experiment, envs, compute, event, central_store(order), clocks, order.share) as replica,
        ):
            if order.state is not None:
                replica.restore_state(order.state, Path())
            iterate(replica, parent, experiment.run.steps)
    except (UserError, RunError) as error:  # what another replica would run into as well
        parent.tell(("failed", str(error)))
        parent.hear()


def iterate(replica: Replica, parent: Parent, last_step: int) -> None:
    """The loop of a replica. Its reports wait for nobody; what its parent asks is answered between two iterations."""
    store, mailbox = replica.store, Mailbox(parent)
    assert isinstance(store, ChunkLockedStore)

    def tell_state() -> None:  # the only thing that a parent asks for
        parent.tell(("state", (replica.state(), store.own_state())))

    while replica.progress.steps < last_step:
        report = replica.iterate(run_ahead=False)
        report.staleness = store.take_staleness()
        report.store_seconds.update(store.take_seconds())
        mailbox.post(report)
        for _ in mailbox.messages():
            tell_state()
    mailbox.post_the_rest()
    while True:
        parent.hear()
        tell_state()


def central_store(order: ReplicaOrder) -> Callable[[Experiment, FlatParameters], ChunkLockedStore]:
    """What makes a replica's store of the central parameters it was told of."""

    def make(experiment: Experiment, parameters: FlatParameters) -> ChunkLockedStore:
        optimizer, central = experiment.optimizer, CentralParameters(order.shared.layout)
        clip = make_clip(optimizer, parameters.slices.values())
        local_steps, own_rule = settings(experiment).local_steps, order.shared.own_rule
        lock_timeout = 2 * longest_silence(experiment)  # by then the parent has replaced whoever hangs with a lock
        return ChunkLockedStore(central, parameters, make_rule(optimizer), clip, local_steps, own_rule, lock_timeout)

    return make


def make_envs(experiment: Experiment, compute: Compute, event: Callable[[str], None], share: Share) -> VectorEnvs:
    """In the replica's own process, where another one could not work beside it."""
    alone = compute.device.type == "cpu" and place(experiment, "cpu").workers <= 1
    return (serial if alone else synchronous).make_envs(experiment, compute, event, share)


def settings(experiment: Experiment) -> AsynchronousConfig:
    assert isinstance(experiment.topology, AsynchronousConfig)
    return experiment.topology
