"""Explicit tables from names to code: the only place where a name in a configuration becomes an object.

Nothing registers itself at import time, so spawned processes see the same world. Modules are imported when used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.config import (
    A2CConfig,
    AtariConfig,
    C51Config,
    DQNConfig,
    EnvConfig,
    Experiment,
    GymnasiumConfig,
    PPOConfig,
    ToyConfig,
)
from phalanx.envs import Env

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phalanx.algorithms import Algorithm
    from phalanx.runtime.device import Compute
    from phalanx.seams import Experience, Policy
    from phalanx.types import EnvSpec

ENVS: dict[type, Callable[[Any], str]] = {
    AtariConfig: lambda config: "phalanx.envs.atari:AtariEnv",
    GymnasiumConfig: lambda config: "phalanx.envs.gymnasium:GymnasiumEnv",
    ToyConfig: lambda config: f"phalanx.envs.toy:{config.name.capitalize()}",
}

ALGORITHMS: dict[type, str] = {
    A2CConfig: "phalanx.algorithms.a2c:A2C",
    PPOConfig: "phalanx.algorithms.ppo:PPO",
    DQNConfig: "phalanx.algorithms.dqn:DQN",
    C51Config: "phalanx.algorithms.c51:C51",
}

TOPOLOGIES: dict[str, str] = {
    "serial": "phalanx.topologies.serial:run",
    "synchronous": "phalanx.topologies.synchronous:run",
}


def find(path: str) -> Any:
    """The object behind `module:name`."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class MakeEnv:
    """Makes environment number `index`; a value, so that it can be sent to another process."""

    config: EnvConfig
    seed: int
    raw: bool = False  # publish raw screens, for a decoder on the device; Atari only

    def __call__(self, index: int, incarnation: int = 0) -> Env:
        seed = np.random.SeedSequence(entropy=self.seed, spawn_key=(index, incarnation))
        make = find(ENVS[type(self.config)](self.config))
        return make(self.config, seed, raw=True) if self.raw else make(self.config, seed)


def make_network(experiment: Experiment, spec: EnvSpec) -> nn.Module:
    """The model an experiment's algorithm learns."""
    from phalanx.models.heads import make_model
    from phalanx.models.q_heads import make_q_model

    if isinstance(experiment.algorithm, DQNConfig):
        return make_q_model(experiment.model, experiment.algorithm, spec, experiment.env.stack)
    return make_model(experiment.model, spec, experiment.env.stack)


def make_policy(experiment: Experiment, model: nn.Module, compute: Compute) -> Policy:
    """The policy that collects experience."""
    from phalanx.algorithms.schedules import Schedule
    from phalanx.models.policies import ActorCriticPolicy
    from phalanx.models.q_policies import EpsilonGreedyPolicy

    algorithm = experiment.algorithm
    if isinstance(algorithm, DQNConfig):
        epsilon = Schedule(algorithm.epsilon_start, algorithm.epsilon_final, algorithm.epsilon_length)
        return EpsilonGreedyPolicy(model, compute, epsilon, algorithm.epsilon_spread, experiment.sampler.environments)
    return ActorCriticPolicy(model, compute)


def make_evaluation_policy(experiment: Experiment, model: nn.Module, compute: Compute, greedy: bool = False) -> Policy:
    """The policy that is judged: sampled or greedy for actor-critic, a small epsilon for value-based methods."""
    from phalanx.models.policies import ActorCriticPolicy
    from phalanx.models.q_policies import EpsilonGreedyPolicy

    if isinstance(experiment.algorithm, DQNConfig):
        return EpsilonGreedyPolicy.evaluation(model, compute, 0.0 if greedy else experiment.algorithm.epsilon_eval)
    return ActorCriticPolicy(model, compute, "greedy" if greedy else "sampled")


def make_experience(experiment: Experiment, spec: EnvSpec, device: torch.device) -> Experience:
    """Where rollouts go."""
    from phalanx.replay.experience import Latest, make_replay

    if isinstance(experiment.algorithm, DQNConfig):
        sampler = experiment.sampler
        return make_replay(experiment.algorithm, spec, experiment.env.stack, sampler.environments, device)
    return Latest()


def make_algorithm(experiment: Experiment, model: nn.Module) -> Algorithm:
    algorithm = experiment.algorithm
    make = find(ALGORITHMS[type(algorithm)])
    if isinstance(algorithm, PPOConfig):
        return make(algorithm, experiment.run.steps)
    if isinstance(algorithm, DQNConfig):
        return make(algorithm, model, experiment.sampler.rollout_steps)
    return make(algorithm)


def topology(experiment: Experiment) -> Callable[..., Any]:
    """The function that runs an experiment's topology."""
    return find(TOPOLOGIES[experiment.topology.name])
