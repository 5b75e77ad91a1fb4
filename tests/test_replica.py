"""Overlap: learning in the gaps of the next rollout equals learning after it, and is spread over it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx.config import SynchronousConfig
from phalanx.presets import preset
from phalanx.replica import OverlappedReplica
from phalanx.runtime.device import Compute
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


@pytest.mark.parametrize("minibatches", [4, 32])
def test_updates_are_spread_over_the_rollout(minibatches):
    """Fewer than gaps, or more: 16 or 128 updates in 32 gaps."""
    replica, made = overlapped("ppo-catch", epochs=4, minibatches=minibatches), []
    update = replica._update_in_gap

    def counting(updates):
        before = replica.progress.updates
        update(updates)
        made.append(replica.progress.updates - before)

    replica._update_in_gap = counting
    for _ in range(3):
        made.clear()
        replica.iterate()
    assert len(made) == 32
    assert sum(made) == 4 * minibatches  # none is left at the end
    assert max(made) - min(made[:26]) <= 1
