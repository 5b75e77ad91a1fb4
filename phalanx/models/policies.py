"""Policies: from frame stacks to actions, one batched forward per group and step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.config import Experiment
from phalanx.runtime.device import Compute
from phalanx.types import PolicyOutput, Progress

LEAST_UNIFORM = 1e-30  # less than any drawn number that is not 0


class ActorCriticPolicy:
    """Draws from the softmax of the logits, or takes the most probable action (`greedy`, for evaluation)."""

    def __init__(self, model: nn.Module, compute: Compute, choice: Literal["sampled", "greedy"] = "sampled") -> None:
        self.model = model
        self.compute = compute
        self.choice = choice

    def begin(self, progress: Progress) -> None:
        """Nothing moves with time here."""

    @torch.no_grad()
    def act(self, stacks: Tensor, history: Tensor, uniform: Tensor, rows: slice | Tensor) -> PolicyOutput:
        with self.compute.autocast():
            logits, value = self.model(stacks, history)
        log_probs = torch.log_softmax(logits, dim=1)
        action = log_probs.argmax(1) if self.choice == "greedy" else draw(log_probs, uniform)
        return PolicyOutput(action, log_probs.gather(1, action[:, None]).squeeze(1), value)

    @torch.no_grad()
    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        with self.compute.autocast():
            return self.model(stacks, history)[1]


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """One action per row [N] by inverting the cumulative distribution at `uniform` [N] in [0, 1): the first action at
    which it reaches that number, which is never one of probability 0."""
    cumulative = log_probs.exp().cumsum(1)
    # Scaled by the total, so that rounding can never point past the last action. A number of 0 would be reached by a
    # first action of probability 0.
    action = torch.searchsorted(cumulative, uniform.clamp(min=LEAST_UNIFORM)[:, None] * cumulative[:, -1:])
    return action.squeeze(1).clamp(max=log_probs.shape[1] - 1)


def make_policy(experiment: Experiment, model: nn.Module, compute: Compute, environments: int) -> ActorCriticPolicy:
    return ActorCriticPolicy(model, compute)


def make_evaluation_policy(
    experiment: Experiment, model: nn.Module, compute: Compute, greedy: bool
) -> ActorCriticPolicy:
    return ActorCriticPolicy(model, compute, "greedy" if greedy else "sampled")
