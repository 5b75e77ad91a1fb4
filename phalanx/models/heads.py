"""Heads: from a torso's features to what an algorithm needs. Here the policy and value of actor-critic methods."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.config import Experiment, ModelConfig
from phalanx.models.torsos import initialise, make_torso
from phalanx.types import EnvSpec


class ActorCritic(nn.Module):
    """A policy over actions and a state value on one torso; both heads are float32 whatever the torso runs in."""

    def __init__(self, config: ModelConfig, spec: EnvSpec, stack: int) -> None:
        super().__init__()
        self.torso = make_torso(config, spec, stack)
        self.policy = initialise(nn.Linear(self.torso.features, spec.actions), config.init, "policy")
        self.value = initialise(nn.Linear(self.torso.features, 1), config.init, "value")

    def forward(self, stacks: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, A] and values [N] of stacks [N, S, *frame] with `history` [N] valid newest frames."""
        features = self.torso(stacks, history)
        with torch.autocast(features.device.type, enabled=False):
            features = features.float()
            return self.policy(features), self.value(features).squeeze(1)


def make_model(config: ModelConfig, spec: EnvSpec, stack: int) -> ActorCritic:
    """The network a configuration describes, initialised from torch's global generator."""
    return ActorCritic(config, spec, stack)


def make_network(experiment: Experiment, spec: EnvSpec) -> ActorCritic:
    return make_model(experiment.model, spec, experiment.env.stack)
