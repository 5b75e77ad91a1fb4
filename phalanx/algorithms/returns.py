"""Returns and advantages of a rollout, as free functions on tensors [T, B].

A terminated episode is worth nothing more; a truncated one bootstraps from the value of its true last observation;
a cut step (the worker died, the environment idles) is learnt from by nobody, and what came before it bootstraps from
the value of the state that was cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.types import PolicyBatch, Rollout


def generalized_advantage(
    reward: Tensor,  # [T, B]
    value: Tensor,  # [T+1, B]
    terminated: Tensor,  # [T, B] bool
    truncated: Tensor,  # [T, B] bool
    last_value: Tensor,  # [T, B] value of the true last observation where truncated
    cut: Tensor,  # [T, B] bool
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates [T, B]; with gae_lambda 1 they are n-step returns minus the value."""
    next_value = torch.where(truncated, last_value, value[1:])
    alive = ~terminated
    delta = reward + discount * next_value * alive - value[:-1]
    delta = delta.masked_fill(cut, 0.0)
    carry = (discount * gae_lambda) * (alive & ~truncated & ~cut).to(reward.dtype)
    advantage = torch.empty_like(reward)
    running = torch.zeros_like(reward[0])
    for t in range(reward.shape[0] - 1, -1, -1):
        running = torch.addcmul(delta[t], carry[t], running)
        advantage[t] = running
    return advantage


def vtrace(
    log_ratio: Tensor,  # [T, B] log of the present policy's probability of each action over that of the one that acted
    reward: Tensor,  # [T, B]
    value: Tensor,  # [T+1, B] by the present parameters
    terminated: Tensor,  # [T, B] bool
    truncated: Tensor,  # [T, B] bool
    last_value: Tensor,  # [T, B]
    cut: Tensor,  # [T, B] bool
    discount: float,
    trace_lambda: float,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and advantages [T, B] for rollouts of another policy (Espeholt et al., "IMPALA"); both
    importance weights are truncated at 1. Where the policies agree and lambda is 1 the targets are n-step returns."""
    weight = log_ratio.clamp(max=0.0).exp()
    alive = ~terminated
    next_value = torch.where(truncated, last_value, value[1:]) * alive
    delta = (weight * (reward + discount * next_value - value[:-1])).masked_fill(cut, 0.0)
    carry = (discount * trace_lambda) * weight * (alive & ~truncated & ~cut)
    target = torch.empty_like(value)
    target[-1] = value[-1]
    running = torch.zeros_like(reward[0])
    for t in range(reward.shape[0] - 1, -1, -1):
        running = torch.addcmul(delta[t], carry[t], running)
        target[t] = value[t] + running
    next_target = torch.where(truncated, last_value, target[1:]) * alive
    advantage = (weight * (reward + discount * next_target - value[:-1])).masked_fill(cut, 0.0)
    return target[:-1], advantage


def value_fit(rows: PolicyBatch) -> dict[str, Tensor]:
    """How well values fit returns, over the rows that count: the variance of returns, and what of it values leave
    unexplained. `explained_variance` (`learning/averages.py`) makes one number of many such pairs."""
    total = rows.weight.sum().clamp(min=1.0)

    def variance(values: Tensor) -> Tensor:
        mean = (values * rows.weight).sum() / total
        return ((values - mean).square() * rows.weight).sum() / total

    return {"returns/variance": variance(rows.returns), "returns/unexplained": variance(rows.returns - rows.value)}


def policy_batch(rollout: Rollout, discount: float, gae_lambda: float) -> PolicyBatch:
    """All rows [T*B] of a rollout with their returns and advantages; stacks stay a view of the rollout's frames."""
    advantage = generalized_advantage(
        rollout.reward,
        rollout.value,
        rollout.terminated,
        rollout.truncated,
        rollout.last_value,
        rollout.cut,
        discount,
        gae_lambda,
    )
    value = rollout.value[: rollout.steps]
    return rows_of(rollout, value, advantage + value, advantage)


def rows_of(rollout: Rollout, value: Tensor, returns: Tensor, advantage: Tensor) -> PolicyBatch:
    """All rows [T*B] of a rollout with what was computed of them [T, B]."""
    steps = rollout.steps
    return PolicyBatch(
        stacks=rollout.stacks[:steps],
        history=rollout.history[:steps],
        action=rollout.action,
        log_prob=rollout.log_prob,
        value=value,
        returns=returns,
        advantage=advantage,
        weight=(~rollout.cut).float(),
    ).map(lambda tensor: tensor.flatten(0, 1))
