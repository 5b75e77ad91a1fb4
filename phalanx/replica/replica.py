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
from phalanx.learning.learner import Learner
from phalanx.models.torsos import large_layers, layers_in_bfloat16
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_rule
from phalanx.registry import make_algorithm, make_experience, make_network, make_policy
from phalanx.replay.experience import Latest
from phalanx.runtime.device import Compute, on_stream
from phalanx.runtime.timing import Timing
from phalanx.sampling.collector import Collector, allocate_rollout
from phalanx.seams import Policy, VectorEnvs
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
        self.settled = True  # nothing is under way after an iteration, its state can be taken
        torch.manual_seed(experiment.run.seed)
        self.model = make_network(experiment, envs.spec.seen).to(compute.device)
        self.parameters = self._flatten(self.model)
        self.store = LocalStore(self.parameters, make_rule(experiment.optimizer))
        self.policies = self._make_policies()
        self.experience = make_experience(experiment, envs.spec.seen, compute.device)
        self.collector = self._make_collector()
        self.learner = self._make_learner()

    def iterate(self, early: bool = True) -> None:
        """Collect a rollout, keep it, learn from it: the whole of reinforcement learning. Where environments can begin
        the next rollout before others have finished this one, they do so only if they may (`early`)."""
        with self.compute.keep_casts():
            rollout = self.collector.collect(self.progress)
        self.experience.put(rollout)
        self.lag = self.progress.version - rollout.version
        self.learner.learn(self.experience, self.progress)
        self.learner.check(self.progress)

    def leave(self) -> None:
        """The run is to end soon: begin nothing that would have to be finished first."""

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

    def _make_policies(self) -> list[Policy]:
        return [make_policy(self.experiment, self.model, self.compute)]

    def _make_collector(self) -> Collector:
        experiment, compute = self.experiment, self.compute
        decode = None
        if self.envs.spec.decoded is not None:
            from phalanx.sampling.decode import ScreenDecoder

            assert isinstance(experiment.env, AtariConfig)
            decode = ScreenDecoder(experiment.env, self.envs.spec.frame_shape[1], compute.device)
        arguments = (
            self.envs,
            self.policies,
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
            from phalanx.learning.graph_learner import CapturedLearner

            return CapturedLearner(*arguments, report=self.report)
        return Learner(*arguments)


class ActingCopy:
    """A policy on a copy of the model, which takes over the parameters when a rollout begins: the model learns on."""

    def __init__(self, replica: Replica, learning: torch.cuda.Stream | None) -> None:
        model, compute = copy.deepcopy(replica.model), replica.compute
        choose = layers_in_bfloat16 if compute.device.type == "cuda" else large_layers
        rounded = choose(model) if compute.bfloat16 else ()  # once a rollout, not at every step
        self.parameters = FlatParameters(model, rounded=rounded)
        self.source = replica.parameters
        self.learning = learning
        self.policy = make_policy(replica.experiment, model, replica.compute)
        self.act = self.policy.act
        self.value = self.policy.value

    def begin(self, progress: Progress) -> None:
        """Between two updates of the learner, which may still be on their way on its stream."""
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.parameters.flat.copy_(self.source.flat)
        self.parameters.refresh()
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        self.policy.begin(progress)


class OverlappedReplica(Replica):
    """Learns from the last rollout while the next one is collected by copies of the model: lag exactly one rollout.

        rollout k collected        | k + 1 collected by what was learnt from k - 1 | k + 2 by what was learnt from k
        learning from k - 1        | learning from k                               | learning from k + 1

    The bars are not walls: environments that are done with k go on with k + 1 once nothing is left to learn from k - 1.
    Who is early does not change what is collected, so runs are as reproducible as without overlap.
    """

    def __init__(self, experiment: Experiment, envs: VectorEnvs, compute: Compute, report: Report) -> None:
        self.learning = torch.cuda.Stream() if compute.device.type == "cuda" else None
        super().__init__(experiment, envs, compute, report)
        sampler = experiment.sampler
        self.held = allocate_rollout(
            envs.spec.seen, sampler.environments, experiment.env.stack, sampler.horizon, compute.device
        )
        self.has_rollout = False
        self.gaps = 0  # times in the present rollout in which an update could be made,
        self.per_gap = 1.0  # updates in each: spread, but so that none are left at the end
        self.due = 0.0
        self.early = True  # environments may begin the next rollout
        self.leaving = False

    def iterate(self, early: bool = True) -> None:
        """Collect the next rollout, with updates from the last one in every gap."""
        updates = self.learner.updates(self.experience, self.progress) if self.has_rollout else iter(())
        self.lag = self.progress.version - self.held.version if self.has_rollout else 0
        if self.learning is not None:
            self.learning.wait_stream(torch.cuda.current_stream())
        before = self.progress.updates
        begun = self.progress.steps
        self.early = early and begun + self.held.action.numel() < self.experiment.run.steps and not self.leaving
        self.due = max(0.0, 1.0 - self.per_gap)  # the first at once: the last one's end is waited for
        self.gaps = 0
        rollout = self.collector.collect(
            self.progress, lambda: self._update_in_gap(updates), lambda: self._hand_over(updates)
        )
        # what is left to do goes by the same clock as what was done in the gaps
        self.progress.steps, collected = begun, self.progress.steps
        while self._update(updates):
            pass
        self.progress.steps = collected
        made = self.progress.updates - before
        self.per_gap = made / (SPREAD * max(self.gaps, 1)) if made else 1.0
        if self.learning is not None:
            torch.cuda.current_stream().wait_stream(self.learning)
        self.learner.check(self.progress)
        self._hold(rollout)
        self.settled = not self.early and not self.collector.ahead

    def leave(self) -> None:
        self.leaving, self.early = True, False

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
        self.gaps += 1
        self.due += self.per_gap
        while self.due >= 1:
            self.due -= 1
            self._update(updates)

    def _hand_over(self, updates: Iterator[None]) -> bool | None:
        """Environments are done early: what is left to learn before the next rollout is urgent now."""
        if not self.early:
            return None
        if self._update(updates):
            return False
        return True if self.learning is None or self.learning.query() else None

    def _update(self, updates: Iterator[None]) -> bool:
        """The next update, on the learner's stream; False when there is none left. What has been learnt from in part
        is no longer there to be learnt from: an interrupted run must not begin with it again."""
        self.has_rollout = False
        with on_stream(self.learning):
            return next(updates, self) is None

    def _make_policies(self) -> list[Policy]:
        return [ActingCopy(self, self.learning) for _ in range(2)]

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
