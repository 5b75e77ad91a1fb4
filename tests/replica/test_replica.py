"""Overlap: learning in the gaps of the next rollout equals learning after it, and is spread over it; environments that
are done early with a rollout begin the next, which changes nothing but the time it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from phalanx.bench.machine import running_replica
from phalanx.config import AtariConfig, ModelConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.replay import experience
from phalanx.replica.replica import OverlappedReplica
from phalanx.runtime.device import Compute
from phalanx.sampling import placement
from phalanx.sampling.processes import ProcessEnvs
from phalanx.topologies import serial, synchronous
from whole_runs import Moody

CPU = Compute(torch.device("cpu"))


def overlapping(name, **algorithm):
    experiment = preset(name)
    return dataclasses.replace(
        experiment,
        algorithm=dataclasses.replace(experiment.algorithm, **algorithm),
        sampler=dataclasses.replace(experiment.sampler, environments=4, horizon=16, groups=2, decorrelation=10),
        topology=SynchronousConfig(overlap=True),
    ).validate()


def overlapped(name, **algorithm):
    experiment = overlapping(name, **algorithm)
    return OverlappedReplica(experiment, serial.make_envs(experiment, CPU, print), CPU, print)


CASES = [("a2c-catch", {"importance": True}), ("ppo-catch", {}), ("dqn-catch", {"learning_starts": 128})]


def change(experiment, **sampler):
    return dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, **sampler)).validate()


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_it_does_not_matter_when_in_a_rollout_updates_are_made(name, algorithm):
    in_gaps, afterwards = overlapped(name, **algorithm), overlapped(name, **algorithm)
    for _ in range(12):
        in_gaps.iterate()
        afterwards.per_gap = 0.0
        afterwards.iterate()
    assert in_gaps.progress.updates > 10
    assert vars(in_gaps.progress) == vars(afterwards.progress)
    assert torch.equal(in_gaps.parameters.flat, afterwards.parameters.flat)
    assert torch.equal(in_gaps.held.action, afterwards.held.action)


@pytest.mark.parametrize("minibatches", [1, 4, 32])
def test_updates_are_spread_over_the_rollout(minibatches):
    """One, or fewer than gaps, or more: 1, 16 or 128 updates in 32 gaps."""
    epochs = 1 if minibatches == 1 else 4
    replica, made = overlapped("ppo-catch", epochs=epochs, minibatches=minibatches), []
    update = replica._update_in_gap

    def counting(updates):
        before = replica.progress.updates
        update(updates)
        made.append(replica.progress.updates - before)

    replica._update_in_gap = counting
    for _ in range(6):
        made.clear()
        replica.iterate()
    count = epochs * minibatches
    assert len(made) == 32 and sum(made) == count  # none is left at the end
    assert made[0] >= 1  # the device waits for nothing
    last = max(gap for gap, updates in enumerate(made) if updates)
    even = [sum(made[: gap + 1]) - count * (gap + 1) / (last + 1) for gap in range(last + 1)]
    assert count == 1 or last >= 24
    assert max(even) <= max(2, count / 24)
    assert min(even) >= -1


def watched(replica):
    """The most rollouts a group was ahead of another in each rollout collected from now on."""
    end, seen = replica.collector._end, []

    def watching(progress):
        seen.append(max(replica.collector.done) - replica.collector.collected - 1)
        return end(progress)

    replica.collector._end = watching
    return seen


def early_replica(experiment, seed):
    return OverlappedReplica(experiment, Moody(serial.make_envs(experiment, CPU, print), seed), CPU, print)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@pytest.mark.parametrize("resets", ["swap", "wait"])
@pytest.mark.parametrize("seed", range(3))
def test_who_is_early_changes_nothing(name, algorithm, resets, seed):
    experiment = change(overlapping(name, **algorithm), groups=4, resets=resets)
    early = early_replica(experiment, seed)
    ahead = watched(early)
    ordinary = OverlappedReplica(experiment, serial.make_envs(experiment, CPU, print), CPU, print)
    for _ in range(14):
        early.iterate()
        ordinary.iterate(early=False)
        assert vars(early.progress) == vars(ordinary.progress)
        assert early.held.version == ordinary.held.version
        for name, values in early.held.tensors().items():
            assert torch.equal(values, ordinary.held.tensors()[name]), name
        assert early.collector.take_scores() == ordinary.collector.take_scores()
    assert torch.equal(early.parameters.flat, ordinary.parameters.flat)
    assert early.progress.updates > 10
    assert max(ahead) == 1 and not ordinary.collector.ahead


def test_a_state_is_taken_when_nobody_is_ahead():
    experiment = overlapping("ppo-catch")
    replica = early_replica(experiment, 1)
    while not replica.collector.ahead:
        replica.iterate()
    assert not replica.settled
    replica.iterate(early=False)
    assert replica.settled and not replica.collector.ahead
    state, weights = replica.state(), {name: value.clone() for name, value in replica.weights().items()}
    again = early_replica(experiment, 2)
    again.restore(weights, state, Path())
    for _ in range(5):
        replica.iterate()
        again.iterate()
    assert torch.equal(replica.parameters.flat, again.parameters.flat)


def test_nobody_is_early_before_the_environments_are_balanced():
    replica = early_replica(overlapping("ppo-catch"), 3)
    replica.envs.waits_for_balance = True
    ahead = watched(replica)
    for _ in range(6):
        replica.iterate()
    assert set(ahead) == {0} and not replica.collector.ahead


def test_who_is_to_leave_begins_no_more():
    replica = early_replica(overlapping("ppo-catch"), 3)
    receive, ahead = replica.collector._receive, []

    def leaving(group, t):
        if replica.collector.collected == 3:
            replica.leave()
        receive(group, t)

    replica.collector._receive = leaving
    for _ in range(5):
        replica.iterate()
        ahead.append((replica.collector.ahead, replica.settled))
    assert ahead == [(True, False)] * 3 + [(False, True)] * 2


def test_nobody_begins_a_rollout_after_the_end_of_the_run():
    experiment = overlapping("ppo-catch")
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, steps=5 * 64)).validate()
    replica = early_replica(experiment, 3)
    while replica.progress.steps < experiment.run.steps:
        replica.iterate()
    assert replica.progress.steps == experiment.run.steps
    assert replica.settled and not replica.collector.ahead


def test_steps_of_a_rollout_under_way_are_known():
    replica, sent = early_replica(overlapping("ppo-catch"), 3), []
    send = replica.envs.send

    def count(group, actions):
        sent.append(len(actions))
        send(group, actions)

    replica.envs.send = count
    under_way = []
    for _ in range(4):
        replica.iterate()
        in_flight = 2 * len(replica.collector.away)
        under_way.append(replica.collector.under_way)
        assert replica.progress.steps + replica.collector.under_way == sum(sent) - in_flight
    assert min(under_way) > 0


def test_workers_that_run_ahead_change_nothing():
    """With processes, whose speeds differ by chance, and Atari."""
    env = AtariConfig("breakout", frame="104x80", episodic_life=True, fire_on_reset=True, max_steps=60)
    experiment = overlapping("ppo-catch", minibatches=2)
    model = ModelConfig(torso="nips", padding=True, init="normc")
    experiment = change(dataclasses.replace(experiment, env=env, model=model), workers=2, squads=2, horizon=4)
    alike = change(experiment, groups=4, squads=1)  # batches of the same size
    ordinary = OverlappedReplica(experiment, serial.make_envs(alike, CPU, print), CPU, print)
    for _ in range(12):
        ordinary.iterate(early=False)
    envs = synchronous.make_envs(experiment, CPU, print)
    try:
        replica = OverlappedReplica(experiment, envs, CPU, print)
        for _ in range(12):
            replica.iterate()
        assert torch.equal(replica.parameters.flat, ordinary.parameters.flat)
        assert replica.collector.take_scores() == ordinary.collector.take_scores()
    finally:
        envs.close()


def test_a_bench_that_cannot_begin_leaves_no_worker_behind(monkeypatch):
    closed = []

    class Envs(ProcessEnvs):
        def close(self):
            closed.append([worker.process for worker in self.workers])
            super().close()

    monkeypatch.setattr(placement, "ProcessEnvs", Envs)
    monkeypatch.setattr(experience, "free_bytes", lambda device: 0)
    base = preset("dqn-catch")
    topology, run = SynchronousConfig(), dataclasses.replace(base.run, device="cpu")
    with (
        pytest.raises(UserError, match="replay_size"),
        running_replica(dataclasses.replace(base, topology=topology, run=run).validate()),
    ):
        pass
    (workers,) = closed
    assert workers and all(worker.poll() is not None for worker in workers)
