"""How long the parts of a cluster's work take on this machine: what `phalanx study cluster` feeds its model with."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch

from phalanx.bench.machine import learn_first, running_replica, warm_up_until
from phalanx.config import (
    DBA3CConfig,
    DQNConfig,
    Experiment,
    GorilaConfig,
    OptimizerConfig,
    PPOConfig,
    SerialConfig,
)
from phalanx.errors import require
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import ParameterShard, QuorumShard
from phalanx.runtime.share import Share

STARTS = 256  # steps after which a worker that is measured begins to learn
REPLAY = 4096  # steps that its memory holds
SHARD = 1 << 20  # numbers of the shard that is measured
PUSHES = 20


@dataclass(frozen=True)
class WorkerTimes:
    """Of one worker on one core, in seconds."""

    act: float  # of a rollout
    learn: float  # of a gradient
    gradients: int  # for each rollout
    points: int  # data points of a gradient
    size: int  # numbers of the parameter vector


@dataclass(frozen=True)
class ServerTimes:
    """Of a parameter server, in seconds for each number."""

    apply: float
    take: float
    copy: float


def cluster_of(experiment: Experiment) -> GorilaConfig | DBA3CConfig:
    """The topology of an experiment that this study is of."""
    topology = experiment.topology
    assert isinstance(topology, GorilaConfig | DBA3CConfig)
    return topology


def worker_of(experiment: Experiment) -> Experiment:
    """What one worker of the experiment does, in one process, soon after its beginning. A worker of dba3c merges whole
    segments of its simulators; here it is one segment of each of as many simulators as fill a batch."""
    topology = cluster_of(experiment)
    require(topology.replicas > 0, "the study `cluster` is of bundles: use --topology.bundles 1 or more")
    part = Share(0, topology.replicas).part(experiment)
    algorithm = part.algorithm
    if isinstance(algorithm, DQNConfig):
        small = min(algorithm.replay_size, REPLAY)
        starts = min(algorithm.learning_starts, STARTS)
        algorithm = dataclasses.replace(algorithm, replay_size=small, learning_starts=starts, target_clock="steps")
    sampler = dataclasses.replace(part.sampler, decorrelation=0, overlap=False)
    if isinstance(topology, DBA3CConfig):
        sampler = dataclasses.replace(sampler, environments=part.batch_steps // sampler.horizon, groups=1)
    run = dataclasses.replace(part.run, threads=1, graphs=False)
    return dataclasses.replace(part, algorithm=algorithm, sampler=sampler, run=run, topology=SerialConfig()).validate()


def measure_worker(experiment: Experiment, seconds: float) -> WorkerTimes:
    """Let one worker of the experiment work for so long, without servers."""
    own = worker_of(experiment)
    with running_replica(own) as replica:
        learn_first(replica, experiment.preset)
        warm_up_until(replica.iterate, seconds / 4)
        updates, rounds, learning = replica.progress.updates, 0, 0.0
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            learning += replica.iterate().seconds.get("learn", 0.0)
            rounds += 1
        whole = time.perf_counter() - began
        updates = max(1, replica.progress.updates - updates)
        return WorkerTimes(
            act=max(0.0, whole - learning) / rounds,
            learn=learning / updates,
            gradients=max(1, round(updates / rounds)),
            points=points_of(own),
            size=replica.parameters.flat.numel(),
        )


def points_of(experiment: Experiment) -> int:
    """Data points of each gradient."""
    algorithm, steps = experiment.algorithm, experiment.batch_steps
    if isinstance(algorithm, PPOConfig):
        return steps // algorithm.minibatches
    return algorithm.batch_size if isinstance(algorithm, DQNConfig) else steps


def gradients_of(experiment: Experiment) -> int:
    """Gradients that are made of each rollout."""
    algorithm = experiment.algorithm
    if isinstance(algorithm, PPOConfig):
        return algorithm.epochs * algorithm.minibatches
    if isinstance(algorithm, DQNConfig):
        return max(1, round(algorithm.updates_per_rollout(experiment.batch_steps)))
    return 1


def measure_server(optimizer: OptimizerConfig) -> ServerTimes:
    """Of a shard without its server: rule, sum and copies."""
    rule, gradient = make_rule(optimizer), torch.full((SHARD,), 1e-3)
    plain = ParameterShard(torch.zeros(SHARD), rule)
    together = QuorumShard(torch.zeros(SHARD), rule, quorum=2)

    def push_one(number: int) -> None:
        plain.push(0, number, plain.version, gradient, 1e-3)

    def push_two(number: int) -> None:
        for worker in (0, 1):
            together.push(worker, number, together.version, gradient, 1e-3)

    apply = best(push_one)
    return ServerTimes(
        apply=apply / SHARD,
        take=max(0.0, best(push_two) - apply) / 2 / SHARD,
        copy=best(lambda _: plain.read()) / SHARD,
    )


def best(action: object) -> float:
    """Seconds of what is repeated; the least of some, because others may be at work."""
    assert callable(action)
    times = []
    for number in range(PUSHES):
        began = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - began)
    return min(times)
