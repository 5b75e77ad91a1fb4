"""Overlap: learning in the gaps of the next rollout equals learning after it, and is spread over it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx.bench import running_replica
from phalanx.config import SynchronousConfig
from phalanx.errors import UserError
from phalanx.presets import preset
from phalanx.replay import experience
from phalanx.replica import OverlappedReplica
from phalanx.runtime.device import Compute
from phalanx.sampling import placement
from phalanx.sampling.processes import ProcessEnvs
from phalanx.topologies import serial

CPU = Compute(torch.device("cpu"))


def overlapped(name, **algorithm):
    experiment = preset(name)
    experiment = dataclasses.replace(
        experiment,
        algorithm=dataclasses.replace(experiment.algorithm, **algorithm),
        sampler=dataclasses.replace(experiment.sampler, environments=4, horizon=16, groups=2, decorrelation=10),
        topology=SynchronousConfig(overlap=True),
    ).validate()
    return OverlappedReplica(experiment, serial.make_envs(experiment, CPU, print), CPU, print)


CASES = [("a2c-catch", {"importance": True}), ("ppo-catch", {}), ("dqn-catch", {"learning_starts": 128})]


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
