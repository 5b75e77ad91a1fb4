"""A replica: one model with everything that feeds it and learns from it, on one device.

Topologies are made of replicas: `serial` and `synchronous` of one, later ones of many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from phalanx.seams import VectorEnvs
from phalanx.types import Progress, Rollout

SPREAD = 0.85  # share of a rollout over which its updates are spread
Report = Callable[[str], None]
"""Takes a sentence the user should read."""


class Replica:
    """Collector, experience and learner around one model."""

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute, report: Report) -> None:
        self.experiment = experiment
        self.report = report
        self.envs = envs
        self.compute = compute
        self.progress = Progress()
        self.timing = Timing()
        self.lag = 0  # versions between collecting and learning
        torch.manual_seed(experiment.run.seed)
        self.model = make_network(experiment, envs.spec.seen).to(compute.device)
        self.parameters = self._flatten(self.model)
        self.store = LocalStore(self.parameters, make_rule(experiment.optimizer))
        self.policy = make_policy(experiment, self.model, compute)
        self.experience = make_experience(experiment, envs.spec.seen, compute.device)
        self.collector = self._make_collector()
        self.learner = self._make_learner()

    def iterate(self) -> None:
        """Collect a rollout, keep it, learn from it: the whole of reinforcement learning."""
        with self.compute.keep_casts():
            rollout = self.collector.collect(self.progress)
        self.experience.put(rollout)
        self.lag = self.progress.version - rollout.version
        self.learner.learn(self.experience, self.progress)
        self.learner.check(self.progress)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.parameters.named_tensors()

    def state(self, with_envs: bool = True) -> dict[str, Any]:
        """Everything a bit-identical continuation needs; without environments they begin new episodes, as they do if
        they have not begun at all."""
        with_envs = with_envs and self.collector.primed
        sampling = {"collector": self.collector.state(), "envs": self.envs.state()} if with_envs else None
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
            self.collector.restore(state["sampling"]["collector"])
            self.envs.restore(state["sampling"]["envs"])
        else:
            self.experience.sever()

    def close(self) -> None:
        """Give back what the device holds of the environments' memory."""
        self.collector.close()

    def _flatten(self, model: nn.Module) -> FlatParameters:
        """On a GPU the rounding is part of the graphs and costs nothing that matters."""
        rounds = self.compute.bfloat16 and self.compute.device.type == "cpu"
        return FlatParameters(model, rounded=large_layers(model) if rounds else ())

    def _make_collector(self) -> Collector:
        experiment, compute = self.experiment, self.compute
        decode = None
        if self.envs.spec.decoded is not None:
            from phalanx.sampling.decode import ScreenDecoder

            assert isinstance(experiment.env, AtariConfig)
            decode = ScreenDecoder(experiment.env, self.envs.spec.frame_shape[1], compute.device)
        arguments = (
            self.envs,
            self.policy,
            experiment.env.stack,
            experiment.sampler.horizon,
            compute,
            experiment.run.seed + 1,
            self.timing,
            decode,
        )
        if compute.graphs and hasattr(self.envs, "exchange"):
            from phalanx.sampling.captured import CapturedCollector

            return CapturedCollector(*arguments, report=self.report)
        return Collector(*arguments)

    def _make_learner(self) -> Learner:
        experiment, compute = self.experiment, self.compute
        arguments = (
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
        if compute.graphs:
            from phalanx.captured_learner import CapturedLearner

            return CapturedLearner(*arguments, report=self.report)
        return Learner(*arguments)


class OverlappedReplica(Replica):
    """Learns from the last rollout while the next one is collected by a copy of the model: lag exactly one rollout.

    Between two rollouts everything is in order again: all updates are done, and the copy takes over their result. So
    runs are as reproducible as without overlap.
    """

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute, report: Report) -> None:
        super().__init__(experiment, envs, compute, report)
        self.acting: nn.Module = copy.deepcopy(self.model)
        rounded = large_layers(self.acting) if compute.bfloat16 else ()  # once a rollout, not at every step
        self.acting_parameters = FlatParameters(self.acting, rounded=rounded)
        self.policy.model = self.acting  # type: ignore[attr-defined]
        self.learning = torch.cuda.Stream() if compute.device.type == "cuda" else None
        sampler = experiment.sampler
        self.held = allocate_rollout(
            envs.spec.seen, sampler.environments, experiment.env.stack, sampler.horizon, compute.device
        )
        self.has_rollout = False
        self.per_gap = 1.0  # updates while a group is away: spread, but so that none are left at the end
        self.due = 0.0

    def iterate(self) -> None:
        """Collect the next rollout, with updates from the last one in every gap; then hand over."""
        self.acting_parameters.flat.copy_(self.parameters.flat)
        self.acting_parameters.refresh()
        updates = self.learner.updates(self.experience, self.progress) if self.has_rollout else iter(())
        self.lag = self.progress.version - self.held.version if self.has_rollout else 0
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        before = self.progress.updates
        begun = self.progress.steps
        self.due = max(0.0, 1.0 - self.per_gap)  # the first at once: the last one's end is waited for
        rollout = self.collector.collect(self.progress, lambda: self._update_in_gap(updates))
        # what is left to do goes by the same clock as what was done in the gaps
        self.progress.steps, collected = begun, self.progress.steps
        while self._update(updates):
            pass
        self.progress.steps = collected
        gaps = self.experiment.sampler.horizon * len(self.envs.groups)
        self.per_gap = (self.progress.updates - before) / (SPREAD * gaps) if self.progress.updates > before else 1.0
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.learner.check(self.progress)
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

    def _update_in_gap(self, updates: Iterator[None]) -> None:
        """The updates that are due by now."""
        self.due += self.per_gap
        while self.due >= 1:
            self.due -= 1
            self._update(updates)

    def _update(self, updates: Iterator[None]) -> bool:
        """The next update, on the learner's stream; False when there is none left. What has been learnt from in part
        is no longer there to be learnt from: an interrupted run must not begin with it again."""
        self.has_rollout = False
        with on_stream(self.learning):
            return next(updates, self) is None

    def _hold(self, rollout: Rollout) -> None:
        """Put a copy into the experience: the collector will write over its own."""
        self.held.load(rollout.tensors())
        self.held.last_frames = dict(rollout.last_frames)
        self.held.version = rollout.version
        self.experience.put(self.held)
        self.has_rollout = True


def make_replica(experiment: Experiment, envs: VectorEnvs, compute: Compute, report: Report) -> Replica:
    """The replica an experiment asks for; it reports what the user should know."""
    overlap = isinstance(experiment.topology, SynchronousConfig) and experiment.topology.overlap
    return (OverlappedReplica if overlap else Replica)(experiment, envs, compute, report)
