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
    EnvConfig,
    Experiment,
    GymnasiumConfig,
    PPOConfig,
    ToyConfig,
)
from phalanx.envs import Env

if TYPE_CHECKING:
    from phalanx.algorithms import Algorithm

ENVS: dict[type, Callable[[Any], str]] = {
    AtariConfig: lambda config: "phalanx.envs.atari:AtariEnv",
    GymnasiumConfig: lambda config: "phalanx.envs.gymnasium:GymnasiumEnv",
    ToyConfig: lambda config: f"phalanx.envs.toy:{config.name.capitalize()}",
}

ALGORITHMS: dict[type, str] = {
    A2CConfig: "phalanx.algorithms.a2c:A2C",
    PPOConfig: "phalanx.algorithms.ppo:PPO",
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

    def __call__(self, index: int, incarnation: int = 0) -> Env:
        seed = np.random.SeedSequence(entropy=self.seed, spawn_key=(index, incarnation))
        return find(ENVS[type(self.config)](self.config))(self.config, seed)  # type: ignore[no-any-return]


def make_algorithm(experiment: Experiment) -> Algorithm:
    algorithm = experiment.algorithm
    make = find(ALGORITHMS[type(algorithm)])
    if isinstance(algorithm, PPOConfig):
        return make(algorithm, experiment.run.steps)  # type: ignore[no-any-return]
    return make(algorithm)  # type: ignore[no-any-return]


def topology(experiment: Experiment) -> Callable[..., Any]:
    """The function that runs an experiment's topology."""
    return find(TOPOLOGIES[experiment.topology.name])  # type: ignore[no-any-return]
