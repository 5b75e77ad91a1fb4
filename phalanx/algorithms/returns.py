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
    steps = rollout.steps
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
    value = rollout.value[:steps]
    return PolicyBatch(
        stacks=rollout.stacks[:steps],
        history=rollout.history[:steps],
        action=rollout.action,
        log_prob=rollout.log_prob,
        value=value,
        returns=advantage + value,
        advantage=advantage,
        weight=(~rollout.cut).float(),
    ).map(lambda tensor: tensor.flatten(0, 1))
