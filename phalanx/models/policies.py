"""Policies: from frame stacks to actions, one batched forward per group and step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.runtime.device import Compute
from phalanx.types import PolicyOutput, Progress

LEAST_NOISE = 1e-30  # less than any noise that is not 0


class ActorCriticPolicy:
    """Draws from the softmax of the logits, or takes the most probable action (`greedy`, for evaluation)."""

    def __init__(self, model: nn.Module, compute: Compute, choice: Literal["sampled", "greedy"] = "sampled") -> None:
        self.model = model
        self.compute = compute
        self.choice = choice

    def begin(self, progress: Progress) -> None:
        """Nothing moves with time here."""

    @torch.no_grad()
    def act(self, stacks: Tensor, history: Tensor, noise: Tensor, rows: slice | Tensor) -> PolicyOutput:
        with self.compute.autocast():
            logits, value = self.model(stacks, history)
        log_probs = torch.log_softmax(logits, dim=1)
        action = log_probs.argmax(1) if self.choice == "greedy" else draw(log_probs, noise)
        return PolicyOutput(action, log_probs.gather(1, action[:, None]).squeeze(1), value)

    @torch.no_grad()
    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        with self.compute.autocast():
            return self.model(stacks, history)[1]


def draw(log_probs: Tensor, noise: Tensor) -> Tensor:
    """One action per row [N] by inverting the cumulative distribution at `noise` [N] in [0, 1): the first action at
    which it reaches the noise, which is never one of probability 0."""
    cumulative = log_probs.exp().cumsum(1)
    # Scaled by the total, so that rounding can never point past the last action. Noise of 0 would be reached by a first
    # action of probability 0.
    action = torch.searchsorted(cumulative, noise.clamp(min=LEAST_NOISE)[:, None] * cumulative[:, -1:])
    return action.squeeze(1).clamp(max=log_probs.shape[1] - 1)
