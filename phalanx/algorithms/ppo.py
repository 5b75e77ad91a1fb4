"""PPO: several epochs of shuffled minibatches on each rollout, with a clipped probability ratio."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.algorithms import ALONE
from phalanx.algorithms.a2c import log_probabilities, over_the_batch
from phalanx.algorithms.returns import policy_batch, value_fit
from phalanx.algorithms.schedules import towards
from phalanx.config import Experiment, PPOConfig
from phalanx.deferred import RolloutRows
from phalanx.seams import Latest
from phalanx.types import Loss, PolicyBatch, Progress


class PPO:
    """min(r A, clip(r) A) with r = pi / pi_collected; the clip may shrink linearly over the run."""

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self.config = config
        self.peers = ALONE
        self.stable_buffers: dict[int, dict[str, Tensor]] = {}  # captured updates read them where they lie
        self.clip = towards(config.clip, config.final_clip, total_steps)
        self.discount = towards(config.discount, config.final_discount, config.discount_length or total_steps)

    def batches(
        self, experience: Latest, now: Callable[[], Progress], generator: torch.Generator
    ) -> Generator[RolloutRows, None, dict[str, Tensor]]:
        rollout, config = experience.take(), self.config
        computed = policy_batch(rollout, self.discount(now()), config.gae_lambda)
        rows, fit = self._in_stable_buffers(computed), value_fit(computed)
        count, device = rows.action.shape[0], rows.action.device
        for _ in range(config.epochs):
            order = torch.randperm(count, generator=generator, device=device).view(config.minibatches, -1)
            advantage, weight = computed.advantage[order], computed.weight[order]
            advantage, share = over_the_batch(advantage, weight, config.normalize_advantage, self.peers)
            rows.advantage.index_copy_(0, order.flatten(), advantage.flatten())
            rows.weight.index_copy_(0, order.flatten(), share.flatten())
            for chosen in order:
                yield RolloutRows(chosen, rows, rollout.frames)
        return fit

    def _in_stable_buffers(self, rows: PolicyBatch) -> PolicyBatch:
        """The same rows, with what is no part of the rollout in memory of their own, the same for every rollout of that
        size. An epoch writes there what its minibatches are to learn from."""
        computed = {"returns": rows.returns, "advantage": rows.advantage, "weight": rows.weight}
        buffers = self.stable_buffers.setdefault(len(rows.weight), {})
        for name, values in computed.items():
            buffers[name] = buffers[name].copy_(values) if name in buffers else values.clone()
        return replace(rows, **buffers)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

    def scalars(self, progress: Progress) -> dict[str, float]:
        return {"clip": self.clip(progress)}

    def loss(self, model: nn.Module, batch: PolicyBatch, scalars: dict[str, Tensor]) -> Loss:
        config, clip = self.config, scalars["clip"]
        logits, value = model(batch.stacks, batch.history)
        log_probs, probs = log_probabilities(logits)
        log_ratio = log_probs.gather(1, batch.action[:, None]).squeeze(1) - batch.log_prob
        ratio = log_ratio.exp()
        advantage, fixed = batch.advantage, ratio.detach()
        limited = fixed.clamp(1 - clip, 1 + clip)
        # the lesser of both objectives; the limited one has no gradient, which autograd would find out in 19 kernels
        surrogate = torch.where(fixed * advantage > limited * advantage, limited, ratio) * advantage
        value_error = (value - batch.returns).square()
        if config.value_clip:
            near = batch.value + (value - batch.value).clamp(-clip, clip)
            value_error = torch.maximum(value_error, (near - batch.returns).square())
        # one pass over all of them: on a GPU so few rows cost less than a launch
        rows = [
            -surrogate,
            0.5 * value_error,
            -(probs * log_probs).sum(1),
            fixed - 1 - log_ratio.detach(),
            (fixed != limited).float(),
        ]
        means = (torch.stack(rows) * batch.weight).sum(1)
        policy_loss, value_loss, entropy = means[:3]
        total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        names = ("loss/policy", "loss/value", "loss/entropy", "loss/kl", "loss/clipped")
        metrics = dict(zip(names, means.detach(), strict=True))
        return Loss(total, metrics)


def make(experiment: Experiment, model: nn.Module) -> PPO:
    assert isinstance(experiment.algorithm, PPOConfig)
    return PPO(experiment.algorithm, experiment.run.steps)
