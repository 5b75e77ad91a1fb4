"""serial is the oracle: with the same grouping, `synchronous` ends with the same parameters, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from phalanx.config import AtariConfig, ModelConfig, SerialConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.topologies import serial, synchronous

TOPOLOGIES = {"serial": (SerialConfig(), serial), "synchronous": (SynchronousConfig(), synchronous)}
CPU = Compute(torch.device("cpu"))


def parameters_after(experiment, topology, updates):
    config, module = TOPOLOGIES[topology]
    experiment = dataclasses.replace(experiment, topology=config).validate()
    with module.make_envs(experiment, CPU, print) as envs, make_replica(experiment, envs, CPU, print) as replica:
        scores: list[float] = []
        while replica.progress.updates < updates:
            scores += replica.iterate().scores
        return replica.parameters.flat.clone(), scores


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
