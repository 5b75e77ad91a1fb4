"""The policy of value-based methods: mostly the action of greatest value, sometimes any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.algorithms.schedules import epsilon_schedule
from phalanx.config import DQNConfig, Experiment
from phalanx.runtime.device import Compute
from phalanx.types import PolicyOutput, Progress


class EpsilonGreedyPolicy:
    """Takes a uniformly random action with probability epsilon, else the greedy one.

    With a spread, environment i of n explores with epsilon ** (1 + spread * i / (n - 1)).
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        epsilon: Callable[[Progress], float],
        epsilon_spread: float = 0.0,
        environments: int = 1,
    ) -> None:
        self.model = model
        self.compute = compute
        self.epsilon = epsilon
        self.now = torch.ones((), device=compute.device)  # on the device, so that a captured `act` follows it
        self.exponents = epsilon_exponents(epsilon_spread, environments).to(compute.device) if epsilon_spread else None

    @classmethod
    def evaluation(cls, model: nn.Module, compute: Compute, epsilon: float) -> EpsilonGreedyPolicy:
        """The policy to be judged: one small epsilon for all environments, at any time."""
        return cls(model, compute, lambda progress: epsilon)

    def begin(self, progress: Progress) -> None:
        self.now.fill_(self.epsilon(progress))

    @torch.no_grad()
    def act(self, stacks: Tensor, history: Tensor, uniform: Tensor, rows: slice | Tensor) -> PolicyOutput:
        with self.compute.autocast():
            q = self.model(stacks, history)
        value, greedy = q.max(1)
        epsilon = self.now.expand_as(uniform)
        if self.exponents is not None:
            epsilon = epsilon ** self.exponents[rows]
        action = torch.where(uniform < epsilon, random_action(uniform, epsilon, q.shape[1]), greedy)
        return PolicyOutput(action, torch.zeros_like(value), value)

    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        """Nothing: what a replayed step bootstraps from is computed when it is learnt from."""
        return torch.zeros(len(history), device=history.device)


def epsilon_exponents(spread: float, environments: int) -> Tensor:
    """[n]: from 1 for the first environment to 1 + spread for the last."""
    return 1 + spread * torch.arange(environments) / max(environments - 1, 1)


def random_action(uniform: Tensor, epsilon: Tensor, actions: int) -> Tensor:
    """The action that `uniform` [N], evenly spread below epsilon, falls on; of no meaning where it is not below."""
    return (uniform / epsilon.clamp(min=1e-12) * actions).clamp(max=actions - 1).long()


def make_policy(experiment: Experiment, model: nn.Module, compute: Compute, environments: int) -> EpsilonGreedyPolicy:
    algorithm = experiment.algorithm
    assert isinstance(algorithm, DQNConfig)
    epsilon = epsilon_schedule(algorithm)
    return EpsilonGreedyPolicy(model, compute, epsilon, algorithm.epsilon_spread, environments)


def make_evaluation_policy(
    experiment: Experiment, model: nn.Module, compute: Compute, greedy: bool
) -> EpsilonGreedyPolicy:
    assert isinstance(experiment.algorithm, DQNConfig)
    return EpsilonGreedyPolicy.evaluation(model, compute, 0.0 if greedy else experiment.algorithm.epsilon_eval)
