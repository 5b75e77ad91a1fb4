"""Q-heads: from a torso to one value, or one distribution of returns, per action."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import C51Config, DQNConfig, Experiment, ModelConfig
from phalanx.models.torsos import ConvTorso, Dense, initialise, make_torso
from phalanx.types import EnvSpec

STREAMS = ("value", "advantage")  # of a dueling head


class ActionHead(nn.Module):
    """`atoms` numbers per action, [N, A, atoms], straight from the torso's features."""

    def __init__(self, config: ModelConfig, spec: EnvSpec, stack: int, atoms: int) -> None:
        super().__init__()
        self.shape = (spec.actions, atoms)
        self.torso = make_torso(config, spec, stack)
        self.output = initialise(nn.Linear(self.torso.features, spec.actions * atoms), config.init, "value")

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        return in_float32(self.output, self.torso(stacks, history)).view(-1, *self.shape)


class DuelingHead(nn.Module):
    """The state's value plus each action's advantage over their mean, from two streams on one trunk.

    The trunk ends where the streams begin: after the convolutions (each stream has its own fully connected layer
    then), or after the hidden layers of an mlp. Its gradient, a sum of two streams', is scaled by 1/sqrt 2.
    """

    def __init__(self, config: ModelConfig, spec: EnvSpec, stack: int, atoms: int) -> None:
        super().__init__()
        self.shape = (spec.actions, atoms)
        self.torso = make_torso(config, spec, stack)
        width = inputs = self.torso.features
        self.scale: nn.Module = ScaledGradient(1 / math.sqrt(2))
        if isinstance(self.torso, ConvTorso):
            inputs = self.torso.dense.weight.shape[1]
            self.torso.dense, self.scale = self.scale, nn.Identity()  # type: ignore[assignment]
        self.hidden = nn.ModuleDict({name: initialise(Dense(inputs, width), config.init) for name in STREAMS})
        sizes = dict(zip(STREAMS, (atoms, spec.actions * atoms), strict=True))
        self.output = nn.ModuleDict(
            {name: initialise(nn.Linear(width, size), config.init, "value") for name, size in sizes.items()}
        )

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        features = self.scale(self.torso(stacks, history))
        value, advantage = (in_float32(self.output[name], F.relu(self.hidden[name](features))) for name in STREAMS)
        advantage = advantage.view(-1, *self.shape)
        return value[:, None, :] + advantage - advantage.mean(1, keepdim=True)


class ScaledGradient(nn.Module):
    """The identity, but for a factor on the gradient that passes back."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + (x - x.detach()) * self.factor  # exact in any precision


class QNetwork(nn.Module):
    """Action values [N, A]."""

    def __init__(self, head: ActionHead | DuelingHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        return self.head(stacks, history).squeeze(2)


class CategoricalQNetwork(nn.Module):
    """Distributions of returns on a grid; called as a function it gives their means, action values [N, A]."""

    support: Tensor

    def __init__(self, head: ActionHead | DuelingHead, support: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("support", support, persistent=False)

    def log_probabilities(self, stacks: Tensor, history: Tensor) -> Tensor:
        """[N, A, K]"""
        return torch.log_softmax(self.head(stacks, history), dim=2)

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        return (self.log_probabilities(stacks, history).exp() * self.support).sum(2)


def in_float32(layer: nn.Module, features: Tensor) -> Tensor:
    """The last layer is float32 whatever the torso runs in."""
    with torch.autocast(features.device.type, enabled=False):
        return layer(features.float())


def make_q_model(
    config: ModelConfig, algorithm: DQNConfig | C51Config, spec: EnvSpec, stack: int
) -> QNetwork | CategoricalQNetwork:
    """The Q-network of an algorithm, initialised from torch's global generator."""
    make_head = DuelingHead if algorithm.dueling else ActionHead
    if not isinstance(algorithm, C51Config):
        return QNetwork(make_head(config, spec, stack, 1))
    support = torch.linspace(algorithm.v_min, algorithm.v_max, algorithm.atoms)
    return CategoricalQNetwork(make_head(config, spec, stack, algorithm.atoms), support)


def make_network(experiment: Experiment, spec: EnvSpec) -> QNetwork | CategoricalQNetwork:
    assert isinstance(experiment.algorithm, DQNConfig)
    return make_q_model(experiment.model, experiment.algorithm, spec, experiment.env.stack)
