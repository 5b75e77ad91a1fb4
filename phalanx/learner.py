"""The learner: steps 6 to 9 of a transition's way. It makes gradients; the parameter store applies them.

    for batch in algorithm.batches(experience):   loss -> backward -> flat gradient -> clip -> store.push
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from phalanx.algorithms import Algorithm
from phalanx.algorithms.schedules import Schedule
from phalanx.config import OptimizerConfig
from phalanx.errors import NotFinite
from phalanx.logs.metrics import MetricAverager, Timing
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import average_norm_clip, global_norm_clip
from phalanx.runtime.device import Compute
from phalanx.seams import Experience, ParameterStore
from phalanx.types import Gradient, Progress


class Learner:
    """Takes what the algorithm wants to learn from, one gradient step per batch."""

    def __init__(
        self,
        model: nn.Module,
        parameters: FlatParameters,
        store: ParameterStore,
        algorithm: Algorithm,
        optimizer: OptimizerConfig,
        learning_rate: Schedule,
        compute: Compute,
        seed: int,
        timing: Timing,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.store = store
        self.algorithm = algorithm
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.compute = compute
        self.shuffle = torch.Generator(compute.device).manual_seed(seed)
        self.timing = timing
        self.metrics = MetricAverager()

    def learn(self, experience: Experience, progress: Progress) -> None:
        """Learn from the experience as often as the algorithm wants."""
        started = time.perf_counter()
        for batch in self.algorithm.batches(experience, progress, self.shuffle):
            gradient = self.gradient(batch, progress, experience)
            progress.version = self.store.push(gradient, self.learning_rate(progress))
            progress.updates += 1
        self.store.pull(self.model)
        self.timing.add("learn", time.perf_counter() - started)

    def gradient(self, batch: Any, progress: Progress, experience: Experience) -> Gradient:
        """The clipped flat gradient of one batch; priorities go back to where the batch came from."""
        self.parameters.grad.zero_()
        with self.compute.autocast():
            loss = self.algorithm.loss(self.model, batch, self.scalars(progress))
        loss.total.backward()  # type: ignore[no-untyped-call]
        norm = self.clip()
        if not bool(torch.isfinite(loss.total.detach() + norm)):
            raise NotFinite(
                f"the loss ({float(loss.total.detach()):g}) or the gradient norm ({float(norm):g}) of update "
                f"{progress.updates} is not finite; a lower optimizer.learning_rate or reward clipping may help",
                batch,
            )
        self.metrics.add({**loss.metrics, "loss/total": loss.total.detach(), "loss/gradient_norm": norm})
        if loss.priorities is not None:
            experience.feedback(batch.ids, loss.priorities)
        return Gradient(self.parameters.grad, progress.version)

    def scalars(self, progress: Progress) -> dict[str, torch.Tensor]:
        values = self.algorithm.scalars(progress)
        return {name: torch.tensor(value, device=self.compute.device) for name, value in values.items()}

    def clip(self) -> torch.Tensor:
        """Clip the flat gradient in place; its norm before."""
        if self.optimizer.clip == "global":
            return global_norm_clip(self.parameters.grad, self.optimizer.clip_norm)
        norm = self.parameters.grad.norm()
        if self.optimizer.clip == "average":
            average_norm_clip(self.parameters.grad, self.parameters.slices.values(), self.optimizer.clip_norm)
        return norm

    def state(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.shuffle.set_state(state["shuffle"])
