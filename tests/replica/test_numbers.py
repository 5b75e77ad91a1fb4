"""What a replica tells besides losses: the length of games, epsilon, how well values fit."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from phalanx.config import ToyConfig
from phalanx.config.presets import preset
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.topologies import serial

CPU = Compute(torch.device("cpu"))


@contextmanager
def replica_of(name, length=None, algorithm=None, **sampler):
    experiment = preset(name)
    algorithm = dataclasses.replace(experiment.algorithm, **(algorithm or {}))
    experiment = dataclasses.replace(experiment, algorithm=algorithm)
    if length is not None:
        experiment = dataclasses.replace(
            experiment,
            env=ToyConfig("counter", length=length),
            model=dataclasses.replace(experiment.model, torso="mlp"),
        )
    sampler = {"environments": 4, "horizon": 8, **sampler}
    experiment = dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, **sampler)).validate()
    envs = serial.make_envs(experiment, CPU, pytest.fail)
    with envs, make_replica(experiment, envs, CPU, pytest.fail) as replica:
        yield replica


@pytest.mark.parametrize("sampler", [{}, {"groups": 2}, {"resets": "wait"}, {"overlap": True}], ids=str)
def test_lengths_are_those_of_whole_games(sampler):
    """The first game of each environment may have begun before the first step."""
    with replica_of("ppo-catch", length=11, **sampler) as replica:
        reports = [replica.iterate(run_ahead=False) for _ in range(12)]
    scores = sum(len(report.scores) for report in reports)
    lengths = [length for report in reports for length in report.lengths]
    assert set(lengths) == {11}
    assert len(lengths) == scores - 4


def test_lengths_go_on_where_a_run_is_resumed():
    with replica_of("a2c-catch", length=11, horizon=3) as replica:
        for _ in range(5):
            replica.iterate()
        snapshot = replica.snapshot()
        expected = [replica.iterate().lengths for _ in range(9)]
    with replica_of("a2c-catch", length=11, horizon=3) as replica:
        replica.restore(snapshot, None)
        assert [replica.iterate().lengths for _ in range(9)] == expected
    assert sum(map(len, expected)) > 4


@pytest.mark.parametrize("clock", ["steps", "updates", "episodes"])
def test_epsilon_is_the_one_that_the_policy_explores_with(clock):
    algorithm = {"epsilon_clock": clock, "epsilon_length": 1_000, "learning_starts": 32}
    with replica_of("dqn-catch", algorithm=algorithm) as replica:
        policy = replica.collector.buffers[0].policy
        told, explored = [], []
        for _ in range(4):
            told.append(replica.iterate().numbers["epsilon"])
            policy.begin(replica.progress)
            explored.append(float(policy.now))
    assert told == pytest.approx(explored)
    assert told == sorted(told, reverse=True) and told[-1] < 1


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_values_and_returns_are_compared(name):
    with replica_of(name) as replica:
        metrics = replica.iterate().metrics
        rollout = replica.collector.last_rollout
        assert metrics["returns/variance"] > 0 and metrics["returns/unexplained"] > 0
        assert metrics["returns/unexplained"] < 100
        assert rollout.value.std() > 0


def test_q_learning_has_no_values_to_compare():
    with replica_of("dqn-catch") as replica:
        assert not any(name.startswith("returns/") for name in replica.iterate().metrics)
