"""A replica: one model with everything that feeds it and learns from it, on one device.

Topologies are made of replicas: `serial` and `synchronous` of one, others of many. `replica/build.py` makes one of an
experiment.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from phalanx.algorithms.schedules import Schedule
from phalanx.learning.learner import Learner
from phalanx.parameters.flat import FlatParameters
from phalanx.replay.memory import WarmUp
from phalanx.replica.report import Report, Snapshot, lags_of
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute
from phalanx.runtime.timing import Timing
from phalanx.sampling.collector import Collector
from phalanx.seams import Experience, ParameterStore, VectorEnvs
from phalanx.types import Progress


class Cycle(Protocol):
    """The order in which a replica collects and learns: `CollectThenLearn`, or `Overlap` (replica/overlap.py)."""

    quiescent: bool  # is nothing under way between two iterations?

    def iterate(self, run_ahead: bool) -> Counter[int]:
        """Collect a rollout and learn from one. Returns the lags of the steps learnt from: versions between the
        parameters that chose an action and those that learning from it begins with. Only with `Overlap` do environments
        that are done early begin the next rollout, and only if they may `run_ahead`."""

    def leave(self) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class CollectThenLearn:
    """Collect a rollout, put it into the experience, learn from it; nothing overlaps."""

    quiescent = True

    def __init__(self, *, collector: Collector, experience: Experience, learner: Learner, compute: Compute) -> None:
        self.collector = collector
        self.experience = experience
        self.learner = learner
        self.compute = compute

    def iterate(self, run_ahead: bool) -> Counter[int]:
        with self.compute.casting_weights_once():
            rollout = self.collector.collect()
        self.experience.put(rollout)
        self.learner.clocks.agree()
        lags = lags_of(rollout, self.learner.clocks.version)
        self.learner.learn(self.experience)
        self.learner.check()
        return lags

    def leave(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


class Replica:
    """Collector, experience and learner around one model."""

    def __init__(
        self,
        *,
        envs: VectorEnvs,
        parameters: FlatParameters,
        store: ParameterStore,
        experience: Experience,
        collector: Collector,
        learner: Learner,
        cycle: Cycle,
        clocks: Clocks,
        timing: Timing,
        warm_up: WarmUp | None = None,
        epsilon: Schedule | None = None,
    ) -> None:
        self.envs = envs
        self.parameters = parameters
        self.store = store
        self.experience = experience
        self.collector = collector
        self.learner = learner
        self.cycle = cycle
        self.clocks = clocks
        self.timing = timing
        self.warm_up = warm_up
        self.epsilon = epsilon  # by which the policy explores, to be told

    def iterate(self, run_ahead: bool = True) -> Report:
        """One rollout more, and what is learnt meanwhile."""
        lags = self.cycle.iterate(run_ahead)
        scores = self.collector.take_scores()
        self.clocks.count(episodes=len(scores))
        progress = self.clocks.now()
        numbers = {"learning_rate": self.learner.learning_rate(progress)}
        if self.warm_up is not None:
            numbers |= self.warm_up.numbers(progress.steps)
        if self.epsilon is not None:
            numbers["epsilon"] = self.epsilon(progress)
        seconds, metrics, lengths = self.timing.take(), self.learner.take_metrics(), self.collector.take_lengths()
        return Report(progress, scores, lags, seconds, metrics, numbers, lengths=lengths)

    @property
    def progress(self) -> Progress:
        return self.clocks.now()

    @property
    def pulse(self) -> object:
        """What a session watches of a replica follows; `Source` in `report.py` says what each is for."""
        return self.timing.pulse

    @property
    def quiescent(self) -> bool:
        return self.cycle.quiescent

    def notes(self) -> list[str]:
        return [] if self.warm_up is None else [self.warm_up.sentence(self.progress.steps)]

    def leave(self) -> None:
        self.cycle.leave()

    def weights(self) -> dict[str, Tensor]:
        return self.parameters.named_tensors()

    def state(self, with_envs: bool = True) -> dict[str, Any]:
        """What belongs to this replica alone; without environments they begin new episodes, as they do if they have not
        begun at all."""
        with_envs = with_envs and self.collector.primed
        sampling = {"collector": self.collector.state(), "envs": self.envs.state()} if with_envs else None
        cycle = self.cycle.state()  # before the learner's: it waits for updates that an interruption left under way
        return {
            **cycle,
            "learner": self.learner.state(),
            "experience": self.experience.state(),
            "sampling": sampling,
        }

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        state = self.state(with_envs)
        return Snapshot(self.weights(), self.progress, self.store.state(), [state], self.experience.saver())

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        self.parameters.load(snapshot.weights)
        self.clocks.restore(snapshot.clocks)
        self.store.restore(snapshot.store)
        states = snapshot.replicas
        if len(states) == 1 and states[0]["learner"]:
            self.restore_state(states[0], directory)
        else:  # of several replicas: their parameters go on, in new games
            self.experience.mark_gap()

    def restore_state(self, state: dict[str, Any], directory: Path) -> None:
        """Take over what belonged to a replica alone."""
        self.learner.restore(state["learner"])
        self.experience.restore(state["experience"], directory)
        if state["sampling"] is not None:
            self.collector.restore(state["sampling"]["collector"])
            self.envs.restore(state["sampling"]["envs"])
        else:
            self.experience.mark_gap()
        self.cycle.restore(state)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the device holds of the environments' memory."""
        self.collector.close()
