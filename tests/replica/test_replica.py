"""Overlap: learning in the gaps of the next rollout equals learning after it, and is spread over it; environments that
are done early with a rollout begin the next, which changes nothing but the time it takes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from phalanx.bench.machine import running_replica
from phalanx.config import AsynchronousConfig, AtariConfig, ModelConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.replay import memory
from phalanx.replica.build import make_replica
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
        sampler=dataclasses.replace(
            experiment.sampler, environments=4, horizon=16, groups=2, decorrelation=10, overlap=True
        ),
        topology=SynchronousConfig(),
    ).validate()


def overlapped(name, **algorithm):
    experiment = overlapping(name, **algorithm)
    return make_replica(experiment, serial.make_envs(experiment, CPU, print), CPU, print)


CASES = [("a2c-catch", {"importance": True}), ("ppo-catch", {}), ("dqn-catch", {"learning_starts": 128})]


def change(experiment, **sampler):
    return dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, **sampler)).validate()


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_it_does_not_matter_when_in_a_rollout_updates_are_made(name, algorithm):
    in_gaps, afterwards = overlapped(name, **algorithm), overlapped(name, **algorithm)
    for _ in range(12):
        in_gaps.iterate()
        afterwards.cycle.per_gap = 0.0
        afterwards.iterate()
    assert in_gaps.progress.updates > 10
    assert in_gaps.progress == afterwards.progress
    assert torch.equal(in_gaps.parameters.flat, afterwards.parameters.flat)
    assert torch.equal(in_gaps.cycle.pending.action, afterwards.cycle.pending.action)


@pytest.mark.parametrize("minibatches", [1, 4, 32])
def test_updates_are_spread_over_the_rollout(minibatches):
    """One, or fewer than gaps, or more: 1, 16 or 128 updates in 32 gaps."""
    epochs = 1 if minibatches == 1 else 4
    replica, made = overlapped("ppo-catch", epochs=epochs, minibatches=minibatches), []
    work_in_gap = replica.cycle.work_in_gap

    def counting():
        before = replica.progress.updates
        work_in_gap()
        made.append(replica.progress.updates - before)

    replica.cycle.work_in_gap = counting
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
    course, seen = replica.collector.course, []
    end = course.end

    def watching():
        seen.append(max(course.finished) - course.collected - 1)
        return end()

    course.end = watching
    return seen


def early_replica(experiment, seed):
    return make_replica(experiment, Moody(serial.make_envs(experiment, CPU, print), seed), CPU, print)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@pytest.mark.parametrize("resets", ["swap", "wait"])
@pytest.mark.parametrize("seed", range(3))
def test_who_is_early_changes_nothing(name, algorithm, resets, seed):
    experiment = change(overlapping(name, **algorithm), groups=4, resets=resets)
    early = early_replica(experiment, seed)
    ahead = watched(early)
    ordinary = make_replica(experiment, serial.make_envs(experiment, CPU, print), CPU, print)
    for _ in range(14):
        ours, theirs = early.iterate(), ordinary.iterate(run_ahead=False)
        assert ours.progress == theirs.progress
        assert ours.scores == theirs.scores
        assert ours.lags == theirs.lags
        for name, values in early.cycle.pending.tensors().items():  # the versions, too
            assert torch.equal(values, ordinary.cycle.pending.tensors()[name]), name
    assert torch.equal(early.parameters.flat, ordinary.parameters.flat)
    assert early.progress.updates > 10
    assert max(ahead) == 1 and not ordinary.collector.course.in_progress


def test_a_state_is_taken_when_nobody_is_ahead():
    experiment = overlapping("ppo-catch")
    replica = early_replica(experiment, 1)
    while not replica.collector.course.in_progress:
        replica.iterate()
    assert not replica.quiescent
    replica.iterate(run_ahead=False)
    assert replica.quiescent and not replica.collector.course.in_progress
    again = early_replica(experiment, 2)
    again.restore(replica.snapshot(), Path())
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
    assert set(ahead) == {0} and not replica.collector.course.in_progress


def test_who_is_to_leave_begins_no_more():
    replica = early_replica(overlapping("ppo-catch"), 3)
    course, ahead = replica.collector.course, []
    receive = course.receive

    def leaving(group):
        if course.collected == 3:
            replica.leave()
        return receive(group)

    course.receive = leaving
    for _ in range(5):
        replica.iterate()
        ahead.append((course.in_progress, replica.quiescent))
    assert ahead == [(True, False)] * 3 + [(False, True)] * 2


def test_nobody_begins_a_rollout_after_the_end_of_the_run():
    experiment = overlapping("ppo-catch")
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, steps=5 * 64)).validate()
    replica = early_replica(experiment, 3)
    while replica.progress.steps < experiment.run.steps:
        replica.iterate()
    assert replica.progress.steps == experiment.run.steps
    assert replica.quiescent and not replica.collector.course.in_progress


@pytest.mark.parametrize("seed", [3, 7], ids=["nobody has finished it", "a group has finished it"])
def test_steps_of_a_rollout_under_way_are_known(seed):
    replica, sent = early_replica(overlapping("ppo-catch"), seed), []
    send = replica.envs.send

    def count(group, actions):
        sent.append(len(actions))
        send(group, actions)

    replica.envs.send = count
    under_way = []
    for _ in range(4):
        replica.iterate()
        in_flight = 2 * len(replica.collector.course.stepping)
        under_way.append(replica.collector.course.steps_under_way)
        assert replica.progress.steps + under_way[-1] == sum(sent) - in_flight
    assert min(under_way) > 0


def test_workers_that_run_ahead_change_nothing():
    """With processes, whose speeds differ by chance, and Atari."""
    env = AtariConfig("breakout", frame="104x80", episodic_life=True, fire_on_reset=True, max_steps=60)
    experiment = overlapping("ppo-catch", minibatches=2)
    model = ModelConfig(torso="nips", padding=True, init="normc")
    experiment = change(dataclasses.replace(experiment, env=env, model=model), workers=2, squads=2, horizon=4)
    alike = change(experiment, groups=4, squads=1)  # batches of the same size
    ordinary = make_replica(experiment, serial.make_envs(alike, CPU, print), CPU, print)
    expected = [ordinary.iterate(run_ahead=False).scores for _ in range(12)]
    with synchronous.make_envs(experiment, CPU, print) as envs:
        replica = make_replica(experiment, envs, CPU, print)
        assert [replica.iterate().scores for _ in range(12)] == expected
        assert torch.equal(replica.parameters.flat, ordinary.parameters.flat)


def test_a_bench_that_cannot_begin_leaves_no_worker_behind(monkeypatch):
    closed = []

    class Envs(ProcessEnvs):
        def close(self):
            closed.append([worker.process for worker in self.workers])
            super().close()

    monkeypatch.setattr(placement, "ProcessEnvs", Envs)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    base = preset("dqn-catch")
    topology, run = SynchronousConfig(), dataclasses.replace(base.run, device="cpu")
    with (
        pytest.raises(UserError, match="replay_size"),
        running_replica(dataclasses.replace(base, topology=topology, run=run).validate()),
    ):
        pass
    (workers,) = closed
    assert workers and all(worker.poll() is not None for worker in workers)


class Moving(LocalStore):
    """A store with others behind it: each pull brings other parameters."""

    def pull(self, parameters):
        self.version += 1
        noise = torch.randn(parameters.flat.shape, generator=torch.Generator().manual_seed(self.version))
        parameters.flat.add_(noise, alpha=0.02)
        parameters.refresh()
        return self.version


def moving_store(experiment, parameters):
    return Moving(parameters, make_rule(experiment.optimizer), make_clip(experiment.optimizer, []))


@pytest.mark.parametrize("torso", ["mlp", "fitted"])
def test_after_a_poll_actions_are_chosen_by_the_new_parameters_alone(monkeypatch, torso):
    """In bfloat16 weights are rounded once for a whole rollout; what was rounded before a poll is not used after it."""
    experiment = preset("a2c-catch")
    experiment = dataclasses.replace(
        change(experiment, environments=4, horizon=8, decorrelation=0),
        model=dataclasses.replace(experiment.model, torso=torso),
        topology=AsynchronousConfig(replicas=1, poll_every=2),
    )
    compute = Compute(torch.device("cpu"), bfloat16=True)

    def collected():
        with serial.make_envs(experiment, compute, print) as envs:
            replica = make_replica(experiment, envs, compute, print, moving_store)
            replica.iterate()
            return replica.experience.take()

    rounded_once = collected()
    monkeypatch.setattr(Compute, "casting_weights_once", lambda self: contextlib.nullcontext())
    rounded_each_time = collected()
    assert len(rounded_once.version.unique()) == 4
    for name, values in rounded_each_time.tensors().items():
        assert torch.equal(rounded_once.tensors()[name], values), name
