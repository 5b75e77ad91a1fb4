"""C51: DQN that learns the distribution of returns on a fixed grid. With all flags on it is eps-Rainbow."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from phalanx.algorithms.dqn import DQN
from phalanx.config import C51Config, Experiment
from phalanx.types import Loss, ReplayBatch

PRIORITY_RANGE = (1e-6, 1e6)


class CategoricalModel(Protocol):
    """A Q-network that also tells the distributions its values are the means of."""

    support: Tensor  # [K] the grid

    def log_probabilities(self, stacks: Tensor, history: Tensor) -> Tensor:
        """[N, A, K]"""


class C51(DQN):
    """Cross-entropy to the projected distribution of the target; its divergence is the priority."""

    def loss(self, model: nn.Module, batch: ReplayBatch, scalars: dict[str, Tensor]) -> Loss:
        learnt = cast(CategoricalModel, model)
        support = learnt.support
        with torch.no_grad():
            next_probs = self.target_values(batch)
            chooser = (
                model(batch.next_stacks, batch.next_history) if self.config.double else expectation(next_probs, support)
            )
            best = of_action(next_probs, chooser.argmax(1))
            target = project(best, batch.returns, batch.next_discount, support)
        log_probs = of_action(learnt.log_probabilities(batch.stacks, batch.history), batch.action)
        rows = -(target * log_probs).sum(1)
        with torch.no_grad():
            divergence = rows + torch.xlogy(target, target).sum(1)
            metrics = {
                "loss/q": expectation(log_probs.exp(), support).mean(),
                "loss/error": divergence.mean(),
            }
        return Loss((batch.weight * rows).mean(), metrics, divergence.clamp(*PRIORITY_RANGE))

    def ask_target(self, batch: ReplayBatch) -> Tensor:
        """Probabilities [N, A, K]."""
        return cast(CategoricalModel, self.target).log_probabilities(batch.next_stacks, batch.next_history).exp()


def expectation(probabilities: Tensor, support: Tensor) -> Tensor:
    """Mean over the last dimension, [..., K] -> [...]."""
    return (probabilities * support).sum(-1)


def of_action(distributions: Tensor, action: Tensor) -> Tensor:
    """[N, K]: the distribution of one action per row of [N, A, K]."""
    return distributions[torch.arange(len(action), device=action.device), action]


def project(probabilities: Tensor, returns: Tensor, next_discount: Tensor, support: Tensor) -> Tensor:
    """The distribution [N, K] of returns + next_discount * Z, Z distributed by `probabilities` [N, K] on the grid.

    Each moved atom is shared between its two neighbours on the grid; all pairs at once, so that sums need no order.
    """
    low, high = support[0], support[-1]
    step = (high - low) / (len(support) - 1)
    moved = (returns[:, None] + next_discount[:, None] * support).clamp(low, high)
    share = (1 - (moved[:, None, :] - support[None, :, None]).abs() / step).clamp(min=0)
    return (share * probabilities[:, None, :]).sum(2)


def make(experiment: Experiment, model: nn.Module) -> C51:
    assert isinstance(experiment.algorithm, C51Config)
    return C51(experiment.algorithm, model, experiment.sampler.rollout_steps)
