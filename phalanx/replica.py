"""A replica: one model with everything that feeds it and learns from it, on one device.

Topologies are made of replicas: `serial` and `synchronous` of one, later ones of many.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from phalanx.algorithms.schedules import learning_rate_schedule
from phalanx.config import AtariConfig, Experiment, SynchronousConfig
from phalanx.learner import Learner
from phalanx.logs.metrics import Timing
from phalanx.models.torsos import large_layers
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_rule
from phalanx.registry import make_algorithm, make_experience, make_network, make_policy
from phalanx.replay.experience import Latest
from phalanx.runtime.device import Compute, on_stream
from phalanx.sampling.collector import Collector, allocate_rollout
from phalanx.sampling.relay import Relay
from phalanx.seams import VectorEnvs
from phalanx.types import Progress, Rollout


class Replica:
    """Collector, experience and learner around one model."""

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute) -> None:
        self.experiment = experiment
        self.envs = envs
        self.compute = compute
        self.progress = Progress()
        self.timing = Timing()
        self.locked: np.ndarray | None = None  # memory of the environments that graphs read
        self.lag = 0  # versions between collecting and learning
        torch.manual_seed(experiment.run.seed)
        self.model = make_network(experiment, envs.spec.seen).to(compute.device)
        self.parameters = self._flatten(self.model)
        self.store = LocalStore(self.parameters, make_rule(experiment.optimizer))
        self.experience = make_experience(experiment, envs.spec.seen, compute.device)
        self.generator = torch.Generator(compute.device).manual_seed(experiment.run.seed + 1)  # of all collectors
        self.relay = Relay(self._make_collectors())
        self.learner = self._make_learner()

    def iterate(self) -> None:
        """Collect a rollout, keep it, learn from it: the whole of reinforcement learning."""
        with self.compute.keep_casts():
            rollout = self.sample()
        self.experience.put(rollout)
        self.lag = self.progress.version - rollout.version
        self.learner.learn(self.experience, self.progress)
        self.learner.check(self.progress)

    def sample(self) -> Rollout:
        """The next rollout, from which nothing is learnt yet."""
        return self.relay.collect(self.progress, self._begin)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.parameters.named_tensors()

    def state(self, with_envs: bool = True) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; without environments they begin new episodes, as they do if
        they have not begun at all."""
        sampling = None
        if with_envs and self.relay.primed:
            self.relay.finish()
            sampling = {"relay": self.relay.state(), "noise": self.generator.get_state(), "envs": self.envs.state()}
        return {
            "progress": self.progress.state(),
            "store": self.store.state(),
            "learner": self.learner.state(),
            "experience": self.experience.state(),
            "sampling": sampling,
        }

    def restore(self, weights: dict[str, torch.Tensor], state: dict[str, Any], directory: Path) -> None:
        self.parameters.load(weights)
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.store.restore(state["store"])
        self.learner.restore(state["learner"])
        self.experience.restore(state["experience"], directory)
        if state["sampling"] is not None:
            self.relay.restore(state["sampling"]["relay"])
            self.generator.set_state(state["sampling"]["noise"])
            self.envs.restore(state["sampling"]["envs"])
        else:
            self.experience.sever()

    def close(self) -> None:
        """Give back what the device holds of the environments' memory."""
        if self.locked is not None:
            from phalanx.sampling.captured import unlock_pages

            unlock_pages(self.locked)

    def _begin(self, collector: Collector) -> None:
        collector.begin(self.progress)

    def _acting_model(self) -> nn.Module:
        """What a collector's policy asks."""
        return self.model

    def _flatten(self, model: nn.Module) -> FlatParameters:
        """On a GPU the rounding is part of the graphs and costs nothing that matters."""
        rounds = self.compute.bfloat16 and self.compute.device.type == "cpu"
        return FlatParameters(model, rounded=large_layers(model) if rounds else ())

    def _make_collectors(self) -> list[Collector]:
        """One for each shift, with groups of its own."""
        experiment, compute, envs = self.experiment, self.compute, self.envs
        kind: type[Collector] = Collector
        exchange = getattr(envs, "exchange", None)
        if compute.graphs and exchange is not None:
            from phalanx.sampling.captured import CapturedCollector, lock_pages

            kind, self.locked = CapturedCollector, exchange.memory_array
            lock_pages(exchange.memory_array)
        decode = None
        if envs.spec.decoded is not None:
            from phalanx.sampling.decode import ScreenDecoder

            assert isinstance(experiment.env, AtariConfig)
            decode = ScreenDecoder(experiment.env, envs.spec.frame_shape[1], compute.device)
        size = len(envs.groups) // experiment.sampler.shifts
        return [
            kind(
                envs,
                make_policy(experiment, self._acting_model(), compute),
                experiment.env.stack,
                experiment.sampler.horizon,
                compute,
                self.generator,
                self.timing,
                decode,
                range(first, first + size),
            )
            for first in range(0, len(envs.groups), size)
        ]

    def _make_learner(self) -> Learner:
        experiment, compute = self.experiment, self.compute
        kind: type[Learner] = Learner
        if compute.graphs:
            from phalanx.captured_learner import CapturedLearner

            kind = CapturedLearner
        return kind(
            self.model,
            self.parameters,
            self.store,
            make_algorithm(experiment, self.model),
            experiment.optimizer,
            learning_rate_schedule(experiment),
            compute,
            experiment.run.seed + 2,
            self.timing,
        )


class OverlappedReplica(Replica):
    """Learns from the last rollout while the next one is collected by a copy of the model: lag exactly one rollout.

    Which parameters a rollout is collected with does not depend on who is fast: those after all updates from the last
    but one. With two shifts they are known before the last rollout is over, and this one begins then. So runs are as
    reproducible as without overlap.
    """

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute) -> None:
        self.acting: list[FlatParameters] = []  # of each shift
        super().__init__(experiment, envs, compute)
        self.learning = torch.cuda.Stream() if compute.device.type == "cuda" else None
        sampler = experiment.sampler
        self.held = allocate_rollout(
            envs.spec.seen, sampler.rollout_environments, experiment.env.stack, sampler.horizon, compute.device
        )
        self.has_rollout = False
        self.updates: Iterator[None] | None = None  # that are still to be made from the last rollout
        self.per_gap = 1  # updates while a group is away, so that none are left at the end

    def iterate(self) -> None:
        """Collect the next rollout, with updates from the last one in every gap; then hand over."""
        progress = self.progress
        self.updates = self.learner.updates(self.experience, progress) if self.has_rollout else None
        self.lag = progress.version - self.held.version if self.has_rollout else 0
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        before, begun = progress.updates, progress.steps
        rollout = self.relay.collect(
            progress, self._begin, lambda: self.updates is None, lambda: self._update(self.per_gap)
        )
        # what is left to do goes by the same clock as what was done in the gaps
        progress.steps, collected = begun, progress.steps
        while self.updates is not None:
            self._update(1)
        progress.steps = collected
        # the sooner the last is made, the sooner the next shift may begin
        gaps = self.experiment.sampler.horizon * len(self.envs.groups) // self.experiment.sampler.shifts**2
        self.per_gap = max(1, -(-(progress.updates - before) // gaps))
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.learner.check(progress)
        self._hold(rollout)

    def state(self, with_envs: bool = True) -> dict[str, Any]:
        """Besides, the rollout that was collected but not yet learnt from."""
        if self.learning is not None:
            self.learning.synchronize()  # after an interruption it may still be at work
        held = self.held.tensors() if self.has_rollout else None
        return {**super().state(with_envs), "held": held, "version": self.held.version}

    def restore(self, weights: dict[str, torch.Tensor], state: dict[str, Any], directory: Path) -> None:
        super().restore(weights, state, directory)
        if state.get("held") is not None:
            self.held.load(state["held"])
            self.held.version = state["version"]
            if isinstance(self.experience, Latest):  # a replay memory has it already, or has lost everything
                self.experience.put(self.held)
            self.has_rollout = True

    def _acting_model(self) -> nn.Module:
        model: nn.Module = copy.deepcopy(self.model)
        rounded = large_layers(model) if self.compute.bfloat16 else ()  # once a rollout, not at every step
        self.acting.append(FlatParameters(model, rounded=rounded))
        return model

    def _begin(self, collector: Collector) -> None:
        """Under the newest parameters, as they are after the updates the learner's stream has still to make."""
        with on_stream(self.learning):
            acting = self.acting[self.relay.collectors.index(collector)]
            acting.flat.copy_(self.parameters.flat)
            acting.refresh()
            super()._begin(collector)

    def _update(self, count: int) -> None:
        """The next updates, on the learner's stream, if there are any."""
        with on_stream(self.learning):
            for _ in range(count):
                if self.updates is not None and next(self.updates, self) is self:
                    self.updates = None

    def _hold(self, rollout: Rollout) -> None:
        """Put a copy into the experience: the collector will write over its own."""
        self.held.load(rollout.tensors())
        self.held.last_frames = dict(rollout.last_frames)
        self.held.version = rollout.version
        self.experience.put(self.held)
        self.has_rollout = True


def make_replica(experiment: Experiment, envs: VectorEnvs, compute: Compute) -> Replica:
    """The replica an experiment asks for."""
    overlap = isinstance(experiment.topology, SynchronousConfig) and experiment.topology.overlap
    return OverlappedReplica(experiment, envs, compute) if overlap else Replica(experiment, envs, compute)
