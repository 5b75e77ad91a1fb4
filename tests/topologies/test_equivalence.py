"""serial is the oracle: with the same grouping, `synchronous` ends with the same parameters, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx.config import AtariConfig, ModelConfig, SerialConfig, SynchronousConfig
from phalanx.presets import preset
from phalanx.registry import MakeEnv
from phalanx.replica import Replica, make_replica
from phalanx.runtime.device import Compute
from phalanx.sampling.placement import slot_rules
from phalanx.sampling.serial import SerialEnvs
from phalanx.topologies import serial, synchronous

TOPOLOGIES = {"serial": (SerialConfig(), serial), "synchronous": (SynchronousConfig(), synchronous)}
CPU = Compute(torch.device("cpu"))


def parameters_after(experiment, topology, updates):
    config, module = TOPOLOGIES[topology]
    experiment = dataclasses.replace(experiment, topology=config).validate()
    envs = module.make_envs(experiment, CPU, print)
    try:
        replica = Replica(experiment, envs, CPU)
        while replica.progress.updates < updates:
            replica.iterate()
        return replica.parameters.flat.clone(), replica.relay.take_scores()
    finally:
        envs.close()


def change(name, env=None, model=None, algorithm=None, **sampler):
    experiment = preset(name)
    return dataclasses.replace(
        experiment,
        env=env or experiment.env,
        model=model or experiment.model,
        algorithm=dataclasses.replace(experiment.algorithm, **(algorithm or {})),
        sampler=dataclasses.replace(experiment.sampler, **sampler),
    )


ATARI = AtariConfig("breakout", frame="104x80", episodic_life=True, fire_on_reset=True, max_steps=100)
NIPS = ModelConfig(torso="nips", padding=True, init="normc")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("resets", ["swap", "wait"])
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_synchronous_equals_serial_on_catch(name, resets, groups):
    experiment = change(name, environments=4, horizon=16, groups=groups, workers=2, resets=resets, decorrelation=10)
    ours, scores = parameters_after(experiment, "synchronous", 200)
    theirs, reference = parameters_after(experiment, "serial", 200)
    assert torch.equal(ours, theirs)
    assert scores == reference
    assert scores


@pytest.mark.parametrize("name", ["dqn-catch", "c51-catch", "eps-rainbow-catch"])
def test_synchronous_equals_serial_when_learning_from_memory(name):
    experiment = change(name, environments=4, horizon=8, groups=2, workers=2, decorrelation=10)
    ours, scores = parameters_after(experiment, "synchronous", 200)
    theirs, reference = parameters_after(experiment, "serial", 200)
    assert torch.equal(ours, theirs)
    assert scores == reference


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch", "dqn-catch"])
def test_who_comes_first_changes_nothing(name):
    experiment = change(name, environments=8, horizon=16, groups=2, workers=4, decorrelation=10, squads=4)
    ours, scores = parameters_after(experiment, "synchronous", 200)
    theirs, reference = parameters_after(change(name, **{**vars(experiment.sampler), "groups": 8}), "serial", 200)
    assert torch.equal(ours, theirs)
    assert scores == reference


def test_synchronous_equals_serial_on_atari():
    experiment = change("a2c", ATARI, NIPS, environments=4, horizon=5, groups=2, workers=2, decorrelation=20)
    ours, scores = parameters_after(experiment, "synchronous", 200)
    theirs, reference = parameters_after(experiment, "serial", 200)
    assert torch.equal(ours, theirs)
    assert scores == reference


def test_the_number_of_workers_changes_nothing():
    results = [
        parameters_after(change("a2c-catch", environments=4, horizon=8, workers=workers), "synchronous", 50)[0]
        for workers in (1, 2, 4)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class Restless(SerialEnvs):
    """Lets no rollout begin before the last one is over."""

    def needs_rest(self):
        return True


def shifts_after(experiment, envs, iterations):
    """Parameters, scores, and the version and rewards of each rollout."""
    try:
        replica, rollouts = make_replica(experiment, envs, CPU), []
        for _ in range(iterations):
            replica.iterate()
            rollouts.append((replica.held.version, replica.lag, replica.held.reward.clone()))
        return replica.parameters.flat.clone(), replica.relay.take_scores(), rollouts, replica
    finally:
        envs.close()


@pytest.mark.parametrize("squads", [1, 2])
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_a_shift_that_begins_early_changes_nothing(name, squads):
    algorithm = {"importance": True} if name == "a2c-catch" else {}
    sampler = {"environments": 16, "horizon": 8, "groups": 2, "shifts": 2, "workers": 4, "decorrelation": 10}
    experiment = change(name, algorithm=algorithm, squads=squads, **sampler)
    experiment = dataclasses.replace(experiment, topology=SynchronousConfig(overlap=True)).validate()
    ours = shifts_after(experiment, synchronous.make_envs(experiment, CPU, print), 60)
    one_after_the_other = Restless(MakeEnv(experiment.env, 0), 16, 4 * squads, slot_rules(experiment))
    theirs = shifts_after(experiment, one_after_the_other, 60)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert ours[1]
    for (version, lag, reward), (their_version, their_lag, their_reward) in zip(ours[2], theirs[2], strict=True):
        assert (version, lag) == (their_version, their_lag)
        assert torch.equal(reward, their_reward)
    per_rollout = ours[3].progress.updates // 59
    assert [version for version, _, _ in ours[2]] == [0, 0, *(k * per_rollout for k in range(1, 59))]
    assert {lag for _, lag, _ in ours[2][2:]} == {per_rollout}


def test_shifts_begin_early():
    """Else the test above would show nothing."""
    experiment = change("ppo-catch", environments=16, horizon=8, groups=2, shifts=2, workers=2)
    experiment = dataclasses.replace(experiment, topology=SynchronousConfig(overlap=True)).validate()
    envs = synchronous.make_envs(experiment, CPU, print)
    try:
        replica = make_replica(experiment, envs, CPU)
        replica.iterate()
        assert replica.relay.collectors[1].begun
        assert not replica.relay.collectors[0].begun
        replica.relay.finish()
        assert not replica.relay.collectors[1].unfinished
    finally:
        envs.close()
