"""A2C: one gradient step on each rollout. On `synchronous` with one group it is PAAC."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.algorithms import ALONE, Peers
from phalanx.algorithms.returns import policy_batch, rows_of, value_fit, vtrace
from phalanx.config import A2CConfig, Experiment
from phalanx.seams import Latest
from phalanx.types import Loss, PolicyBatch, Progress, Rollout


class A2C:
    """-(log pi(a|s) A + beta H) + c (R - V)^2, with A and R fixed by the values of collection time."""

    def __init__(self, config: A2CConfig, model: nn.Module | None = None) -> None:
        self.config = config
        self.model = model  # that V-trace asks what it thinks of the rollout by now
        self.peers = ALONE

    def batches(
        self, experience: Latest, now: Callable[[], Progress], generator: torch.Generator
    ) -> Generator[PolicyBatch, None, dict[str, Tensor]]:
        # One batch of all T*B rows; rows that were cut have weight 0, truncated ones bootstrap from `last_value`.
        config = self.config
        rollout = experience.take()
        correct = self.corrected if config.vtrace else policy_batch
        rows = correct(rollout, config.discount, config.gae_lambda)
        advantage, share = over_the_batch(rows.advantage, rows.weight, config.normalize_advantage, self.peers)
        weight = share if config.reduction == "mean" else rows.weight * self.peers.count
        fit = value_fit(rows)
        yield replace(rows, advantage=advantage, weight=weight)
        return fit

    @torch.no_grad()
    def corrected(self, rollout: Rollout, discount: float, gae_lambda: float) -> PolicyBatch:
        """The rows of a rollout with V-trace's returns and advantages. The values of true last observations of
        truncated episodes are those of collection time."""
        assert self.model is not None
        states = rollout.history.numel()
        logits, value = self.model(rollout.stacks.flatten(0, 1), rollout.history.view(states))
        log_probs, _ = log_probabilities(logits, self.config.log_floor, self.config.log_guard)
        chosen = log_probs[: rollout.action.numel()].gather(1, rollout.action.view(-1, 1)).view_as(rollout.log_prob)
        value = value.view_as(rollout.value)
        ends = (rollout.terminated, rollout.truncated, rollout.last_value, rollout.cut)
        ratio = chosen - rollout.log_prob
        returns, advantage = vtrace(ratio, rollout.reward, value, *ends, discount, gae_lambda)
        return rows_of(rollout, value[:-1], returns, advantage)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

    def scalars(self, progress: Progress) -> dict[str, float]:
        return {}

    def loss(self, model: nn.Module, batch: PolicyBatch, scalars: dict[str, Tensor]) -> Loss:
        config = self.config
        logits, value = model(batch.stacks, batch.history)
        log_probs, probs = log_probabilities(logits, config.log_floor, config.log_guard)
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


def log_probabilities(logits: Tensor, floor: float = 0.0, guard: str = "add") -> tuple[Tensor, Tensor]:
    """log pi and pi [N, A]; with a floor the logarithm is of pi + floor, which bounds its gradient (GA3C), or of pi
    raised to the floor (`max`, its public code)."""
    log_probs = torch.log_softmax(logits, dim=1)
    probs = log_probs.exp()
    if floor == 0:
        return log_probs, probs
    return torch.log(probs + floor if guard == "add" else probs.clamp(min=floor)), probs


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
    return A2C(experiment.algorithm, model)
