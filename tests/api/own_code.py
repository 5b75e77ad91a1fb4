"""Torsos and algorithms that a user might write, in a file that no test imports as a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.algorithms.a2c import A2C
from phalanx.algorithms.dqn import DQN
from phalanx.algorithms.returns import policy_batch
from phalanx.types import Loss


def torso(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(24), nn.Tanh())


class Plain:
    """An algorithm with `batches` and `loss` and nothing else, with settings that are no variant of ours."""

    @dataclass(frozen=True)
    class Config:
        discount: float = 0.9
        weight_of_values: float = 0.5

    def __init__(self, config: Config, model: nn.Module, experiment: Any) -> None:
        self.config = config

    def batches(self, experience: Any, now: Any, generator: torch.Generator) -> Any:
        yield policy_batch(experience.take(), self.config.discount, 1.0)

    def loss(self, model: nn.Module, batch: Any, scalars: Any) -> Loss:
        logits, value = model(batch.stacks, batch.history)
        chosen = torch.log_softmax(logits, 1).gather(1, batch.action[:, None]).squeeze(1)
        values = (batch.returns - value).square().mean()
        total = -(chosen * batch.advantage).mean() + self.config.weight_of_values * values
        return Loss(total, {"loss/values": values.detach()})


class Bare(Plain):
    """It forgets what a loss is for."""

    def loss(self, model: nn.Module, batch: Any, scalars: Any) -> Any:
        return super().loss(model, batch, scalars).total


class SameA2C(A2C):
    """A2C by another name."""


class SameDQN(DQN):
    """DQN by another name."""


def with_running_means(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8))


def with_dropout(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, dropout=0.0), nn.Dropout(0.5))


def without_features(spec: Any) -> nn.Module:
    return nn.Linear(2, 3)


def flat(spec: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(spec.frame_shape[0], 4), nn.Flatten(0))
