"""gorila: actors, learners, replay and parameter servers in processes of their own, on one host or many. Nobody waits
for anybody (Gorila).

    bundle, one of many                                       parameter servers, a slice of the parameters each
    [actor: own environments] -> [replay] -> [learner] -----> [slice 0, its rule] [slice 1, its rule] ...
         ^  pull before every acting step       | gradient         |  copies, every so many updates
         |__________________________________<___|__________________|             v
    driver: records, writes checkpoints, replaces the dead                    standby

A bundle (`topology.bundles`, the paper's experiment) is a replica with another store. With `topology.bundles 0` actors,
replay shards and learners are processes of their own (`topologies/roles.py`). The target network and epsilon can go by
the updates that the servers have applied, whoever made the gradients (`algorithm.target_clock`, `epsilon_clock`). A
gradient is discarded by a server if it is too old (`topology.staleness`), and by its learner if its loss is an outlier
(`topology.outlier`). A bundle that dies takes at most its own gradient and its memory with it; a server that dies comes
back with the copy its standby has.
"""

from __future__ import annotations

from functools import partial

from phalanx.cluster.post import Post
from phalanx.config import DQNConfig, Experiment, GorilaConfig
from phalanx.parameters.flat import FlatParameters
from phalanx.replica.build import make_model
from phalanx.runs.session import Session
from phalanx.runtime.device import choose_compute
from phalanx.runtime.seeds import Role, number
from phalanx.runtime.share import Share
from phalanx.topologies.asynchronous import spec_of
from phalanx.topologies.roles import GlobalReplay
from phalanx.types import EnvSpec


def run(experiment: Experiment, session: Session) -> None:
    """The driver learns nothing: it looks after the fleet, and after the run."""
    from phalanx.cluster.engine import running

    topology = settings(experiment)
    compute = choose_compute(experiment.run).install()
    with running(topology.address):
        from phalanx.cluster.fleet import Fleet

        spec = spec_of(experiment, compute)
        model = FlatParameters(make_model(experiment, spec.seen))
        if topology.bundles:
            target, replays = "phalanx.topologies.bundle:Bundle", []
            posts = [Post("bundle", rank, target, Share(rank, topology.bundles)) for rank in range(topology.bundles)]
        else:
            from phalanx.cluster.replays import RayReplayShards, start_replays

            replays = start_replays(replay_orders(experiment, spec.seen))
            extra = GlobalReplay(partial(RayReplayShards, replays), spec.seen)
            actors, learners, role = topology.actors, topology.learners, "phalanx.topologies.roles:"
            posts = [Post("actor", rank, f"{role}Actor", Share(rank, actors), extra) for rank in range(actors)]
            # a learner's experiment is that of one actor: so many updates for each of its rollouts
            posts += [Post("learner", rank, f"{role}Learning", Share(rank, actors), extra) for rank in range(learners)]
        with (
            Fleet(
                experiment=experiment,
                model=model,
                posts=posts,
                event=session.event,
                bound=topology.staleness,
                replays=replays,
            ) as fleet,
            session.recording(fleet, spec, compute),
        ):
            fleet.start()
            while session.goes_on():
                for report in fleet.reports(timeout=0.2):
                    session.note(report)


def replay_orders(experiment: Experiment, spec: EnvSpec) -> list[tuple[DQNConfig, EnvSpec, int, int, int]]:
    """What each replay shard is made with. Each actor has its part of the memory, in one of the shards."""
    topology = settings(experiment)
    part = Share(0, topology.actors).part(experiment)
    assert isinstance(part.algorithm, DQNConfig)
    seeds = [number(experiment.run.seed, Role.LEARNING, 1_000_000 + shard) for shard in range(topology.replay_shards)]
    return [(part.algorithm, spec, part.env.stack, part.sampler.environments, seed) for seed in seeds]


def settings(experiment: Experiment) -> GorilaConfig:
    assert isinstance(experiment.topology, GorilaConfig)
    return experiment.topology
