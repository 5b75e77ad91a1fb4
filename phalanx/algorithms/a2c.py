"""A2C: one gradient step on each rollout. On `synchronous` with one group it is PAAC."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.algorithms import ALONE, Peers
from phalanx.algorithms.returns import policy_batch, value_fit
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
    ) -> Generator[PolicyBatch, None, dict[str, Tensor]]:
        # One batch of all T*B rows; rows that were cut have weight 0, truncated ones bootstrap from `last_value`.
        config = self.config
        rows = policy_batch(experience.take(), config.discount, config.gae_lambda)
        advantage, share = over_the_batch(rows.advantage, rows.weight, config.normalize_advantage, self.peers)
        weight = share if config.reduction == "mean" else rows.weight * self.peers.count
        fit = value_fit(rows)
        yield replace(rows, advantage=advantage, weight=weight)
        return fit

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
        advantage = batch.advantage
        if config.importance:
            advantage = advantage * (chosen.detach() - batch.log_prob).clamp(max=0.0).exp()
        rows = torch.stack([-chosen * advantage, (batch.returns - value).square(), entropy])
        policy_loss, value_loss, entropy_bonus = (rows * batch.weight).sum(1)
        total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy_bonus
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy_bonus}
        return Loss(config.loss_scale * total, {name: metric.detach() for name, metric in metrics.items()})


def log_probabilities(logits: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """log pi and pi [N, A]; with a floor the logarithm is of pi + floor, which bounds its gradient (GA3C)."""
    log_probs = torch.log_softmax(logits, dim=1)
    probs = log_probs.exp()
    return (torch.log(probs + floor), probs) if floor > 0 else (log_probs, probs)


def over_the_batch(advantage: Tensor, weight: Tensor, normalize: bool, peers: Peers = ALONE) -> tuple[Tensor, Tensor]:
    """Advantages, and what each row contributes to a mean over the rows that count; of one batch [N] or several [M, N],
    those of all peers together. Normalised advantages have zero mean and unit deviation."""
    share = weight / peers.mean(weight.sum(-1, keepdim=True)).clamp(min=1.0 / peers.count)
    if not normalize:
        return advantage, share
    centred = advantage - peers.mean((advantage * share).sum(-1, keepdim=True))
    return centred / (peers.mean((centred.square() * share).sum(-1, keepdim=True)).sqrt() + 1e-8), share


def make(experiment: Experiment, model: nn.Module) -> A2C:
    assert isinstance(experiment.algorithm, A2CConfig)
    return A2C(experiment.algorithm)
