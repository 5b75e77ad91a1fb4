"""A node: agents, predictors and trainers around one set of parameters, in one process (GA3C).

    agents ........ processes without a model: each steps its environments whenever its actions are there
    predictors .... threads: answer whichever agents wait (sampling/predictor.py)
    trainers ...... threads: learn from segments (replica/trainer.py)

Two bounded queues join them: the questions of agents, and the segments. How many there are of each may change while the
node works. A session records it as it records a replica (`Source`).
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.config import Experiment, GA3CConfig
from phalanx.errors import RunError
from phalanx.learning.averages import MetricAverager
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.followed import FollowedParameters
from phalanx.parameters.locked import SharedParameters
from phalanx.replica.build import acting_copy, flatten, local_store, make_decoder, make_learner, make_model
from phalanx.replica.crew import Crew, Gate
from phalanx.replica.report import Report, Snapshot
from phalanx.replica.trainer import LONG_UPDATE, Trainer
from phalanx.runtime.clocks import VERSION, Clocks
from phalanx.runtime.deadline import Deadline
from phalanx.runtime.device import Compute, on_stream, restore_generator
from phalanx.runtime.pages import lock_pages, mapped, unlock_pages
from phalanx.runtime.seeds import Role, number
from phalanx.runtime.share import WHOLE, Share
from phalanx.runtime.timing import Timing
from phalanx.sampling.agents import Agents
from phalanx.sampling.inference import EagerInference, Inference
from phalanx.sampling.predictor import Predictor, Questions
from phalanx.sampling.segments import OpenSegments, Segment, SegmentQueue, merged
from phalanx.seams import Policy
from phalanx.types import Progress, Rollout

T = TypeVar("T")

Shared = SharedParameters | FollowedParameters
"""Parameters that all threads of a node use, wherever they are kept."""

PAUSE_SECONDS = 60.0  # that an update, or an inference, may take before a pause is given up
LEAVE_SECONDS = 2.0  # that threads and agents, told at the same time, may take to leave
SOON = 0.4  # in the place of each of these after a signal or an error: with its grace, an end waits for 3 s at most
LOOK_EVERY = 0.05  # seconds between two looks at the agents
RATE_SECONDS = 5.0  # over which rates and depths are averaged
THREADS = 1_000  # of a kind in a node, at most: the next node's random streams begin there


def kept_here(experiment: Experiment, parameters: FlatParameters) -> SharedParameters:
    """The parameters of a node that is alone."""
    return SharedParameters(local_store(experiment, parameters))


class Node:
    """Everything of a GA3C run but its records; or one of many nodes of a run (Distributed BA3C), which have parameters
    and clocks in common."""

    def __init__(
        self,
        experiment: Experiment,
        agents: Agents,
        compute: Compute,
        tell: Callable[[str], None],
        share_parameters: Callable[[Experiment, FlatParameters], Shared] = kept_here,
        clocks: Clocks | None = None,
        share: Share = WHOLE,
    ) -> None:
        topology = experiment.topology
        assert isinstance(topology, GA3CConfig)
        self.experiment = experiment
        self.topology = topology
        self.agents = agents
        self.compute = compute
        self.tell = tell
        spec, stack, horizon = agents.spec.seen, experiment.env.stack, experiment.sampler.horizon
        environments = agents.layout.environments
        self.decode = make_decoder(experiment, agents.spec, compute)
        self.model = make_model(experiment, spec).to(compute.device)
        self.parameters = flatten(self.model, compute)
        self.shared = share_parameters(experiment, self.parameters)
        self.store = self.shared.store_of(self.parameters)
        # The first row of the clocks is for all predictors together, the others for a trainer each.
        self.clocks = clocks or Clocks(np.zeros((1 + topology.most_trainers, 4), np.int64), 0)
        self.share = share
        self.segments = OpenSegments(spec, environments, stack, horizon, compute.device)
        self.queue = SegmentQueue(topology.queue, agents.wake)
        self.questions = Questions(
            agents=agents,
            segments=self.segments,
            queue=self.queue,
            most_rows=topology.prediction_batch,
            last_step=experiment.run.steps,
        )
        self.counting = threading.Lock()
        self.gate = Gate()
        self.alarm = threading.Event()
        self.predictors = Crew("predictor", self._make_predictor, self.gate, self.alarm)
        self.trainers = Crew("trainer", self._make_trainer, self.gate, self.alarm)
        self.tuner_state: dict[str, Any] | None = None  # of whoever moves the numbers; kept in checkpoints
        self.ends = False  # must the run end soon, because of a signal or an error?
        self.waited = (time.monotonic(), 0.0, 0.0)  # when idle shares were asked for last, and the seconds idle by then
        self.window: deque[tuple[float, np.ndarray]] = deque()  # times, and what had been counted then
        if compute.graphs:
            lock_pages(agents.exchange.memory_array)  # for the device to reach the step buffer in place

    def resize(self, agents: int, predictors: int, trainers: int) -> None:
        """So many of each from now on. Agents that are too many end their segments and rest. Raises OSError where the
        system starts no more agents."""
        self._finish_on_device()  # new threads have streams of their own
        self.predictors.resize(predictors)
        self.trainers.resize(trainers)
        self.agents.play(agents)
        self.agents.wake()

    def iterate(self, seconds: float) -> Report:
        """Look after the agents for so long, and report what was done meanwhile."""
        deadline = time.monotonic() + seconds
        while not self.alarm.is_set() and not (self.questions.over and self.quiescent):
            self.agents.look_after()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.alarm.wait(min(left, LOOK_EVERY))
        for crew in (self.predictors, self.trainers):
            if crew.failure is not None:
                failure, crew.failure = crew.failure, None
                raise failure
        return self._report()

    def pause(self) -> None:
        """Nobody works any more: what is reported next is all that the last checkpoint holds."""
        try:
            self.gate.close(self._patience(PAUSE_SECONDS))
        except RunError:
            if not self.ends:  # else the last snapshot does without whoever hangs
                raise

    @property
    def progress(self) -> Progress:
        return self.clocks.now()

    @property
    def pulse(self) -> object:
        return self.clocks.rows.tobytes()

    @property
    def quiescent(self) -> bool:
        """Once the budget is used up, everything is learnt from first; before, a snapshot pauses what is under way."""
        if not self.questions.over:
            return True
        return self.progress.steps >= self.questions.begun and not self.queue.unlearnt

    def notes(self) -> list[str]:
        topology, each = self.topology, self.agents.envs_per_agent
        tuned = "" if topology.tuner == "off" else " to begin with"
        return [
            f"{topology.agents} agents x {each} environments, {topology.predictors} predictors, {topology.trainers} "
            f"trainers{tuned}"
        ]

    def weights(self) -> dict[str, Tensor]:
        with self.shared.turns.take():
            return self.parameters.named_tensors()

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """Of a moment in which predictors and trainers pause. With environments, once their steps are done."""
        if not with_envs:  # something ends the run
            self.leave()
        if self.ends:
            return self._last_snapshot(with_envs)
        with self.gate.shut(PAUSE_SECONDS):
            return self._snapshot(with_envs)

    def _last_snapshot(self, with_envs: bool) -> Snapshot:
        """Of a run that must end soon: what is kept is all but what a thread is at that does not end its turn. Nobody
        begins another one."""
        stuck: list[Trainer] = []
        try:
            self.gate.close(self._patience(PAUSE_SECONDS))
        except RunError as error:
            stuck = [trainer for trainer in self._trainers if trainer.learning.locked()]
            with_envs = with_envs and self.gate.inside == len(stuck)  # else a predictor is amid open segments
            kept = "all but its batch" if with_envs else "neither games nor what it was at"
            self.tell(f"{error}; the last checkpoint holds {kept}")
        return self._snapshot(with_envs, stuck)

    def _snapshot(self, with_envs: bool, stuck: Sequence[Trainer] = ()) -> Snapshot:
        for trainer in self._trainers:
            if trainer not in stuck:
                trainer.leave()
        seconds = self._patience(self.experiment.sampler.step_timeout)
        games = with_envs and self.agents.all_arrived(seconds)
        if with_envs and not games:
            self.tell(f"not every agent ended its step within {seconds:.1f} s; the checkpoint holds no games")
        node = {
            "predictors": [predictor.generator.get_state() for predictor in self._predictors],
            "trainers": [trainer.state() for trainer in self._trainers],
            "queue": [segment.state() for segment in list(self.queue.segments)],
            "games": {"agents": self.agents.state(), "open": self.segments.state()} if games else None,
            "tuner": self.tuner_state,
        }
        replica = {"learner": {}, "experience": {}, "sampling": None, "node": node}
        snapshot = Snapshot(self.weights(), self.progress, self.store.state(), [replica])
        self._finish_on_device()  # before threads write again
        return snapshot

    def _patience(self, seconds: float) -> float:
        """How long others may take to end what they are at."""
        return SOON if self.ends else seconds

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        """Before `resize`. Games of another topology, or of another number of environments, are not gone on with."""
        self.parameters.load(snapshot.weights)
        self.clocks.restore(snapshot.clocks)
        self.store.restore(snapshot.store)
        self.questions.begun = snapshot.clocks.steps
        node = snapshot.replicas[0].get("node") if len(snapshot.replicas) == 1 else None
        if node is None:
            return
        trainers = node["trainers"][: self.topology.most_trainers]
        self.trainers.hands = [self._make_trainer(rank) for rank in range(len(trainers))]
        for trainer, state in zip(self._trainers, trainers, strict=True):
            trainer.restore(state)
        generators = node.get("predictors", [])[: self.topology.most_predictors]  # older checkpoints have none
        self.predictors.hands = [self._make_predictor(rank) for rank in range(len(generators))]
        for predictor, generator in zip(self._predictors, generators, strict=True):
            restore_generator(predictor.generator, generator)
        self.tuner_state = node["tuner"]
        games = node["games"]
        if games is not None and self._can_go_on(games):
            self.agents.restore(games["agents"])
            self.segments.restore(games["open"])
            self.questions.begun += int(self.segments.position.sum() + self.segments.waiting.sum())
        segments = [self.segments.closed(segment) for segment in node["queue"]]
        self.queue.put([segment for segment in segments if self.segments.may_hold(segment)], reserved=0)

    def _can_go_on(self, games: dict[str, Any]) -> bool:
        """Are they of as many environments, and do they divide among agents of today's size?"""
        return self.segments.fits(games["open"]) and not len(games["agents"]["slots"]) % self.agents.envs_per_agent

    @property
    def is_up(self) -> bool:
        """Have all agents that are to play made their environments?"""
        return all(self.agents.up[: self.agents.playing])

    def predictions(self) -> int:
        """Actions chosen so far."""
        return sum(predictor.predictions for predictor in self._predictors)

    def segments_learnt(self) -> int:
        return sum(trainer.segments for trainer in self._trainers)

    def idle_shares(self) -> tuple[float, float]:
        """Which shares of the time since the last call have predictors and trainers waited for work?"""
        now = time.monotonic()
        predicting = sum(predictor.idle for predictor in self._predictors)
        training = sum(trainer.idle for trainer in self._trainers)
        then, predicting_then, training_then = self.waited
        self.waited = (now, predicting, training)
        elapsed = max(now - then, 1e-9)
        shares = (
            (predicting - predicting_then) / self.predictors.wanted,
            (training - training_then) / self.trainers.wanted,
        )
        return shares[0] / elapsed, shares[1] / elapsed

    def leave(self) -> None:
        """The run must end soon: nobody is waited for long any more."""
        self.ends = True

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exception: object) -> None:
        """Threads and agents have one limit together."""
        end = Deadline(self._patience(LEAVE_SECONDS))
        self.predictors.dismiss()
        self.trainers.dismiss()
        self.agents.dismiss(end)
        self.predictors.close(end)
        self.trainers.close(end)
        if self.compute.graphs:
            torch.cuda.synchronize()
            unlock_pages(self.agents.exchange.memory_array)

    def _finish_on_device(self) -> None:
        """Wait for what this thread has launched; others have streams of their own, on which they leave nothing."""
        if self.compute.graphs:
            torch.cuda.current_stream().synchronize()

    @property
    def _trainers(self) -> list[Trainer]:
        return [hand for hand in self.trainers.hands if isinstance(hand, Trainer)]

    @property
    def _predictors(self) -> list[Predictor]:
        return [hand for hand in self.predictors.hands if isinstance(hand, Predictor)]

    def _report(self) -> Report:
        lags: Counter[int] = Counter()
        metrics = MetricAverager()
        seconds = {"env": 0.0, "infer": 0.0, "learn": 0.0}
        scores: list[float] = []
        lengths: list[int] = []
        for predictor in self._predictors:
            scores += taken(predictor.scores)
            lengths += taken(predictor.lengths)
            add(seconds, predictor.timing.take())
        for trainer in self._trainers:
            own, logged, spent = trainer.take_numbers(0.0 if self.ends else LONG_UPDATE)
            lags += own
            metrics.add(logged)  # each trainer may have logged other names than the rest
            add(seconds, spent)
        staleness, numbers = self.shared.take_staleness(), self._numbers()
        return Report(self.progress, scores, lags, seconds, metrics.take(), numbers, staleness, lengths=lengths)

    def _numbers(self) -> dict[str, float]:
        """Rates, depths and counts for the record; TPS as in the paper, which counts segments."""
        counts = np.array(
            [
                self.predictions(),
                sum(predictor.forwards for predictor in self._predictors),
                sum(predictor.depths for predictor in self._predictors),
                self.segments_learnt(),
            ],
            np.float64,
        )
        now = time.monotonic()
        self.window.append((now, counts))
        while now - self.window[0][0] > RATE_SECONDS and len(self.window) > 2:
            self.window.popleft()
        then, before = self.window[0]
        predictions, forwards, depths, segments = (counts - before).tolist()
        elapsed = max(now - then, 1e-9)
        learner = self._trainers[0].learner if self._trainers else None
        return {
            **({} if learner is None else {"learning_rate": learner.learning_rate(self.progress)}),
            "pps": predictions / elapsed,
            "tps": segments / elapsed,
            "queue_prediction": depths / forwards if forwards else 0.0,
            "held": float(self.questions.held),
            "queue_training": float(len(self.queue)),
            "batch_fill": predictions / forwards if forwards else 0.0,
            "agents": float(sum(self.agents.up[: self.agents.playing])),
            "predictors": float(self.predictors.wanted),
            "trainers": float(self.trainers.wanted),
        }

    def _make_predictor(self, rank: int) -> Predictor:
        stream = torch.cuda.Stream(priority=-1) if self.compute.graphs else None  # agents wait; learning can wait
        with on_stream(stream):  # what is allocated here is used there
            return self._predictor_on(stream, rank)

    def _predictor_on(self, stream: torch.cuda.Stream | None, rank: int) -> Predictor:
        acting = acting_copy(
            self.experiment, self.model, self.compute, self.store, None, self.agents.layout.environments
        )
        seed = number(self.experiment.run.seed, Role.ACTIONS, THREADS * self.share.rank + rank)
        return Predictor(
            questions=self.questions,
            inference=self._make_inference(acting.policy),
            policy=acting.policy,
            parameters=acting.parameters,
            store=self.store,
            newest=self.shared.newest,
            decode=self.decode,
            clocks=self.clocks,
            counting=self.counting,
            generator=torch.Generator().manual_seed(seed),
            stream=stream,
        )

    def _make_inference(self, policy: Policy) -> Inference:
        observation = self.agents.step.observation
        if not self.compute.graphs:
            return EagerInference(policy=policy, segments=self.segments, observation=observation, decode=self.decode)
        from phalanx.sampling.graph_inference import GraphInference

        return GraphInference(
            policy=policy,
            segments=self.segments,
            observation=mapped(observation, self.compute.device),
            raw_observation=observation,
            decode=self.decode,
            most_rows=min(self.questions.most * self.agents.envs_per_agent, self.agents.layout.environments),
            report=self.tell,
        )

    def _make_trainer(self, rank: int) -> Trainer:
        stream = torch.cuda.Stream() if self.compute.graphs else None
        with on_stream(stream):
            return self._trainer_on(stream, rank)

    def _trainer_on(self, stream: torch.cuda.Stream | None, rank: int) -> Trainer:
        model = copy.deepcopy(self.model)
        parameters = flatten(model, self.compute)
        store = self.shared.store_of(parameters)
        clocks = self.clocks.of(1 + rank)
        clocks.own[VERSION] = self.shared.version
        share = Share(THREADS * self.share.rank + rank)
        learner = make_learner(
            self.experiment, model, parameters, store, self.compute, clocks, Timing(), self.tell, share
        )
        return Trainer(
            learner=learner,
            store=store,
            queue=self.queue,
            least_rows=self.topology.min_batch,
            nothing_follows=lambda: self.questions.over,
            merge=self._make_merge(),
            stream=stream,
        )

    def _make_merge(self) -> Callable[[Sequence[Segment]], Rollout]:
        if not self.compute.graphs:
            return merged
        from phalanx.sampling.fixed_rollouts import FixedRollouts

        sampler, spec = self.experiment.sampler, self.agents.spec.seen
        return FixedRollouts(
            spec, self.experiment.env.stack, sampler.horizon, self.topology.min_batch, self.compute.device
        )


def taken(values: list[T]) -> list[T]:
    """What a list holds, which a thread may go on appending to."""
    count = len(values)
    first = values[:count]
    del values[:count]
    return first


def add(seconds: dict[str, float], more: dict[str, float]) -> None:
    for stage, value in more.items():
        seconds[stage] += value
