"""A2C: one gradient step on each rollout. On `synchronous` with one group it is PAAC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.algorithms import ALONE, Peers
from phalanx.algorithms.returns import policy_batch
from phalanx.config import A2CConfig, Experiment
from phalanx.seams import Latest
from phalanx.types import Loss, PolicyBatch, Progress


class A2C:
    """-(log pi(a|s) A + beta H) + c (R - V)^2, with A and R fixed by the values of collection time."""

    def __init__(self, config: A2CConfig) -> None:
        self.config = config
        self.peers = ALONE

    def batches(
        self, experience: Latest, now: Callable[[], Progress], generator: torch.Generator
    ) -> Iterator[PolicyBatch]:
        # One batch of all T*B rows; rows that were cut have weight 0, truncated ones bootstrap from `last_value`.
        yield policy_batch(experience.take(), self.config.discount, self.config.gae_lambda)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

    def scalars(self, progress: Progress) -> dict[str, float]:
        return {}

    def loss(self, model: nn.Module, batch: PolicyBatch, scalars: dict[str, Tensor]) -> Loss:
        config = self.config
        logits, value = model(batch.stacks, batch.history)
        log_probs, probs = log_probabilities(logits, config.log_floor)
        chosen = log_probs.gather(1, batch.action[:, None]).squeeze(1)
        entropy = -(probs * log_probs).sum(1)
        share = mean_shares(batch.weight, self.peers)
        advantage = batch.advantage
        if config.normalize_advantage:
            advantage = normalised(advantage, share, self.peers)
        if config.importance:
            advantage = advantage * (chosen.detach() - batch.log_prob).clamp(max=0.0).exp()
        rows = torch.stack([-chosen * advantage, (batch.returns - value).square(), entropy])
        factors = share if config.reduction == "mean" else batch.weight * self.peers.count
        policy_loss, value_loss, entropy_bonus = (rows * factors).sum(1)
        total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy_bonus
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy_bonus}
        return Loss(config.loss_scale * total, {name: metric.detach() for name, metric in metrics.items()})


def log_probabilities(logits: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """log pi and pi [N, A]; with a floor the logarithm is of pi + floor, which bounds its gradient (GA3C)."""
    log_probs = torch.log_softmax(logits, dim=1)
    probs = log_probs.exp()
    return (torch.log(probs + floor), probs) if floor > 0 else (log_probs, probs)


def mean_shares(weight: Tensor, peers: Peers = ALONE) -> Tensor:
    """What each row contributes to a mean over the rows that count, those of all peers."""
    return weight / peers.mean(weight.sum()).clamp(min=1.0 / peers.count)


def normalised(advantage: Tensor, share: Tensor, peers: Peers = ALONE) -> Tensor:
    """Zero mean and unit deviation over the rows that count."""
    centred = advantage - peers.mean((advantage * share).sum())
    return centred / (peers.mean((centred.square() * share).sum()).sqrt() + 1e-8)


def make(experiment: Experiment, model: nn.Module) -> A2C:
    assert isinstance(experiment.algorithm, A2CConfig)
    return A2C(experiment.algorithm)
