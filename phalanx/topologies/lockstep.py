"""synchronous with several replicas on one host: each in a process of its own, every update made together.

    parent                             replica 0             replica 1             ... each with its environments
    records, evaluates,                collect               collect
    writes checkpoints,                agree on the clocks <--> agree on the clocks
    replaces the dead  <-- reports --  gradient              gradient
                                       mean of all gradients, clip, rule: the same in every replica

N replicas learn what one with all their environments learns: gradients, and statistics that a loss takes over its
batch, are means over all of them. A replica that dies is named, the others wait for its successor, which takes over
their parameters, and they go on. Under torchrun, on one host or several, see `topologies/torchrun.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.config import Experiment, SynchronousConfig
from phalanx.errors import RunError, UserError
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.replica.build import MakeStore, make_model, make_replica
from phalanx.replica.lockstep import GroupInvitation, LockstepTeam, Member
from phalanx.replica.team import ReplicaOrder
from phalanx.runs.session import Session
from phalanx.runtime.affinity import confine_to
from phalanx.runtime.child import Parent
from phalanx.runtime.clocks import LockstepClocks
from phalanx.runtime.device import Compute, choose_compute
from phalanx.topologies.asynchronous import make_envs, shares_of, spec_of

PATIENCE = 60.0  # seconds for which replicas wait for the slowest, besides what a step may take


def run(experiment: Experiment, session: Session) -> None:
    """The parent learns nothing: it looks after the replicas, and after the run."""
    compute = choose_compute(experiment.run).install()
    spec = spec_of(experiment, compute)
    team = LockstepTeam(
        experiment=experiment,
        target="phalanx.topologies.lockstep:serve",
        shares=shares_of(compute, settings(experiment).replicas),
        model=FlatParameters(make_model(experiment, spec.seen)),
        nccl=over_nccl(experiment, compute),
        event=session.event,
    )
    with team, session.recording(team, spec, compute):
        team.start()
        while session.goes_on():
            for report in team.reports(timeout=0.2):
                session.note(report)


def serve(order: ReplicaOrder, parent: Parent) -> None:
    """A replica's process: it iterates with the others until the budget is used up, or its parent is gone."""
    share, invitation = order.share, order.shared
    assert isinstance(invitation, GroupInvitation)
    if share.cores is not None:
        confine_to(share.cores)
    parent.failed_at_once = lambda: False
    experiment = share.part(order.experiment)
    clocks = LockstepClocks(order.clock_rows(), share.rank, lambda row: row[None])
    compute = choose_compute(experiment.run).install()
    patience = PATIENCE + experiment.sampler.step_timeout

    def event(sentence: str) -> None:
        parent.tell(("event", sentence))

    try:
        with (
            make_envs(experiment, compute, event, share) as envs,
            make_replica(
                experiment, envs, compute, event, make_store(share.count, invitation.nccl), clocks, share
            ) as replica,
        ):
            member = Member(replica, clocks, parent, share, invitation, patience)
            if invitation.initial_state is not None:
                weights, store = invitation.initial_state
                replica.parameters.load(weights)
                replica.store.restore(store)
            if order.state is not None:
                replica.restore_state(order.state, Path())
            try:
                member.run(experiment.run.steps)
            except (UserError, RunError) as error:  # what the others run into as well
                parent.tell(("failed", str(error)))
                while True:
                    member.hear()
                    member.answer()
            finally:  # gloo's threads must have ended when the interpreter does, or they abort it
                member.store.leave()
    except (UserError, RunError) as error:  # in the making of its environments, say
        parent.tell(("failed", str(error)))
        parent.hear()


def make_store(learners: int, nccl: bool) -> MakeStore:
    def make(experiment: Experiment, parameters: FlatParameters) -> AllReduceStore:
        clip = make_clip(experiment.optimizer, parameters.slices.values())
        return AllReduceStore(parameters, make_rule(experiment.optimizer), clip, learners, capturable=nccl)

    return make


def over_nccl(experiment: Experiment, compute: Compute) -> bool:
    """NCCL joins GPUs of which each belongs to one replica."""
    return choose_nccl(experiment, own_gpus(compute, settings(experiment).replicas))


def own_gpus(compute: Compute, replicas: int) -> bool:
    """Is there a GPU for each of the replicas on this host?"""
    return compute.device.type == "cuda" and replicas <= torch.cuda.device_count()


def choose_nccl(experiment: Experiment, possible: bool) -> bool:
    """Do gradients go over NCCL, and not over gloo? `possible` says whether every replica has a GPU to itself."""
    topology = settings(experiment)
    if topology.exchange == "nccl" and not possible:
        raise UserError(
            f"--topology.exchange nccl needs a GPU for each of {topology.replicas} replicas; use "
            "--topology.exchange gloo"
        )
    return possible and topology.exchange != "gloo"


def settings(experiment: Experiment) -> SynchronousConfig:
    assert isinstance(experiment.topology, SynchronousConfig)
    return experiment.topology
