"""DQN: Q-learning on batches from memory against a slowly moving target network.

Flags make it double, dueling (in the model), n-step (in the memory) and prioritised. C51 is the same with another loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.algorithms import ALONE
from phalanx.algorithms.schedules import Schedule
from phalanx.config import DQNConfig, Experiment
from phalanx.seams import Memory
from phalanx.types import AheadBatch, Loss, Progress, ReplayBatch

MIN_PRIORITY = 1e-6  # no row that may be learnt from is forgotten for good
ROWS_AHEAD = 256  # drawn and shown to the target network at once on a CPU


class DQN:
    """Huber loss of the n-step error; owns the target network and knows when to refresh it."""

    def __init__(self, config: DQNConfig, model: nn.Module, rollout_steps: int) -> None:
        self.config = config
        self.model = model
        self.peers = ALONE
        self.target = copy.deepcopy(model).requires_grad_(False)
        self.updates = int(config.updates_per_rollout(rollout_steps))
        self.importance = Schedule(config.importance_start, 1.0, config.importance_length)
        self.tick = -1  # of the target clock, at the last refresh
        # priorities change with every update, and so may the target network if it goes by updates
        independent = not config.prioritized and config.target_clock != "updates"
        self.batches_ahead = max(1, ROWS_AHEAD // config.batch_size) if independent else 1

    def batches(self, experience: Memory, now: Callable[[], Progress], generator: torch.Generator) -> Iterator[Any]:
        """A fixed number of batches per rollout, none before the memory is warm (again, if resumed without it)."""
        ready = now().steps >= self.config.learning_starts and experience.ready(self.config.learning_starts)
        if float(self.peers.mean(torch.tensor(float(ready)))) < 1:  # all begin together
            return
        size = self.config.batch_size
        for done in range(0, self.updates, self.batches_ahead):
            self.refresh_target(now())
            rows = size * min(self.batches_ahead, self.updates - done)
            drawn = experience.draw(rows, self.importance(now()), generator)
            if rows > size and isinstance(drawn, ReplayBatch):  # one pass over many rows; a GPU has it in its graph
                drawn = AheadBatch(**vars(drawn), next_values=self.target_values(drawn))
            for start in range(0, rows, size):
                yield drawn[start : start + size]

    @torch.no_grad()
    def refresh_target(self, progress: Progress) -> None:
        """Copy the learnt network whenever the clock passes a multiple of `target_every`."""
        tick = getattr(progress, self.config.target_clock) // self.config.target_every
        if tick == self.tick:
            return
        for old, new in zip(self.target.parameters(), self.model.parameters(), strict=True):
            old.copy_(new)
        self.tick = tick  # last: a copy that was interrupted is made again

    def scalars(self, progress: Progress) -> dict[str, float]:
        return {}

    def loss(self, model: nn.Module, batch: ReplayBatch, scalars: dict[str, Tensor]) -> Loss:
        with torch.no_grad():
            next_q = self.target_values(batch)
            chooser = model(batch.next_stacks, batch.next_history) if self.config.double else next_q
            target = batch.returns + batch.next_discount * value_of_best(next_q, chooser)
        q = model(batch.stacks, batch.history).gather(1, batch.action[:, None]).squeeze(1)
        rows = F.huber_loss(q, target, reduction="none", delta=self.config.huber)
        error = (target - q.detach()).abs()
        metrics = {"loss/q": q.detach().mean(), "loss/error": error.mean()}
        priorities = error.clamp(MIN_PRIORITY, max(self.config.huber, MIN_PRIORITY))
        return Loss((batch.weight * rows).mean(), metrics, priorities)

    @torch.no_grad()
    def target_values(self, batch: ReplayBatch) -> Tensor:
        """What the target network says of the next stacks; known already where it was asked ahead."""
        return batch.next_values if isinstance(batch, AheadBatch) else self.ask_target(batch)

    def ask_target(self, batch: ReplayBatch) -> Tensor:
        """Action values [N, A]."""
        return self.target(batch.next_stacks, batch.next_history)

    def state(self) -> dict[str, Any]:
        return {"target": self.target.state_dict(), "tick": self.tick}

    def restore(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state["target"])
        self.tick = state["tick"]


def value_of_best(values: Tensor, chooser: Tensor) -> Tensor:
    """[N] of `values` [N, A] at the action that `chooser` [N, A] likes best."""
    return values.gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)


def make(experiment: Experiment, model: nn.Module) -> DQN:
    assert isinstance(experiment.algorithm, DQNConfig)
    return DQN(experiment.algorithm, model, experiment.sampler.rollout_steps)
