"""A replica: one model with everything that feeds it and learns from it, on one device.

Topologies are made of replicas: `serial` and `synchronous` of one, later ones of many.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.algorithms.schedules import learning_rate_schedule
from phalanx.config import Experiment
from phalanx.learner import Learner
from phalanx.logs.metrics import Timing
from phalanx.models.heads import make_model
from phalanx.models.policies import ActorCriticPolicy
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_rule
from phalanx.registry import make_algorithm
from phalanx.replay.experience import Latest
from phalanx.runtime.device import Compute
from phalanx.sampling.collector import Collector
from phalanx.sampling.serial import SlotRules
from phalanx.seams import VectorEnvs
from phalanx.types import Progress


class Replica:
    """Collector, experience and learner around one model."""

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute) -> None:
        run = experiment.run
        self.envs = envs
        self.progress = Progress()
        self.timing = Timing()
        torch.manual_seed(run.seed)
        self.model = make_model(experiment.model, envs.spec, experiment.env.stack).to(compute.device)
        self.parameters = FlatParameters(self.model)
        self.store = LocalStore(self.parameters, make_rule(experiment.optimizer))
        self.policy = ActorCriticPolicy(self.model, compute)
        self.collector = Collector(
            envs, self.policy, experiment.env.stack, experiment.sampler.horizon, compute, run.seed + 1, self.timing
        )
        self.experience = Latest()
        self.learner = Learner(
            self.model,
            self.parameters,
            self.store,
            make_algorithm(experiment),
            experiment.optimizer,
            learning_rate_schedule(experiment),
            compute,
            run.seed + 2,
            self.timing,
        )

    def iterate(self) -> None:
        """Collect a rollout and learn from it: the whole of reinforcement learning in three lines."""
        rollout = self.collector.collect(self.progress)
        self.experience.put(rollout)
        self.learner.learn(self.experience, self.progress)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.parameters.named_tensors()

    def state(self, with_envs: bool = True) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; without environments they begin new episodes."""
        sampling = {"collector": self.collector.state(), "envs": self.envs.state()} if with_envs else None
        return {
            "progress": self.progress.state(),
            "store": self.store.state(),
            "learner": self.learner.state(),
            "experience": self.experience.state(),
            "sampling": sampling,
        }

    def restore(self, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        self.parameters.load(weights)
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.store.restore(state["store"])
        self.learner.restore(state["learner"])
        self.experience.restore(state["experience"])
        if state["sampling"] is not None:
            self.collector.restore(state["sampling"]["collector"])
            self.envs.restore(state["sampling"]["envs"])


def slot_rules(experiment: Experiment) -> SlotRules:
    """How an experiment's environments begin and end episodes."""
    sampler = experiment.sampler
    return SlotRules(experiment.run.seed, sampler.decorrelation, sampler.resets, sampler.horizon)
