"""An algorithm of a user's own: a class with `batches` and `loss`; what else a learner asks for may be left out.

It is made as `Class(config, model, experiment)`: its `Config`, or the configuration of ours in whose place it learns;
the network; and everything else, such as the steps of the run, which schedules go by. A variant of one of ours that has
no `__init__` of its own is made as that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from phalanx.algorithms import ALONE, Algorithm
from phalanx.algorithms.a2c import A2C
from phalanx.algorithms.dqn import DQN
from phalanx.algorithms.ppo import PPO
from phalanx.config import Experiment
from phalanx.config.own import learner_class, own_config

LEFT_OUT: dict[str, Any] = {
    "peers": ALONE,
    "scalars": lambda progress: {},
    "state": dict,
    "restore": lambda state: None,
}
"""What stands in for parts of `Algorithm` that a class does not have."""

ARGUMENTS: dict[type, Callable[[nn.Module, Experiment], tuple[Any, ...]]] = {
    A2C: lambda model, experiment: (model,),
    PPO: lambda model, experiment: (experiment.run.steps,),
    DQN: lambda model, experiment: (model, experiment.sampler.rollout_steps),
}
"""What ours are made with, besides their configuration."""


def make(experiment: Experiment, model: nn.Module) -> Algorithm:
    learner = learner_class(experiment.algorithm.code)
    maker = next(kind for kind in learner.__mro__ if "__init__" in vars(kind))
    arguments = ARGUMENTS[maker](model, experiment) if maker in ARGUMENTS else (model, experiment)
    algorithm = learner(own_config(experiment.algorithm), *arguments)
    for name, stand_in in LEFT_OUT.items():
        if not hasattr(algorithm, name):
            setattr(algorithm, name, stand_in)
    return algorithm
