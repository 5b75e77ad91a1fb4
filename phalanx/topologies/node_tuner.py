"""The tuner of a GA3C run: reads the node, asks the tuner, moves the numbers, and keeps what was tried in the run's
directory, as data (`tuner.jsonl`) and drawn (`tuner.svg`)."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np

from phalanx.config import Experiment, GA3CConfig
from phalanx.errors import RunError
from phalanx.files import write_whole
from phalanx.replica.node import Node
from phalanx.replica.report import Report
from phalanx.runtime.seeds import Role, stream
from phalanx.topologies import tuner_history
from phalanx.topologies.plain_walk import PlainWalk
from phalanx.topologies.tuner import Knob, Setting, Tuner
from phalanx.topologies.window import Reading

SETTLE = 0.2  # of a window, after a change: queues fill or empty
STARTING = 60.0  # seconds that new agents may take to get up before one measures without them
BUSY = 0.1  # who waits for less of the time than this is the bottleneck
FULL = 0.5  # of the places in the queue of segments


class NodeTuner:
    """Calls the tuner after each report. What it is at is kept in the node's checkpoints."""

    def __init__(self, experiment: Experiment, node: Node, directory: Path) -> None:
        topology = experiment.topology
        assert isinstance(topology, GA3CConfig)
        self.topology = topology
        self.node = node
        self.path = directory / tuner_history.NAME
        self.earlier = tuner_history.read(self.path)  # what earlier sessions of the run tried
        self.written = 0  # records of the tuner's own history that are in the file
        start = {"agents": topology.agents, "predictors": topology.predictors, "trainers": topology.trainers}
        knobs = [
            Knob("agents", 1, topology.most_agents),
            Knob("predictors", 1, topology.most_predictors),
            Knob("trainers", 1, topology.most_trainers),
        ]
        generator = np.random.default_rng(stream(experiment.run.seed, Role.TUNER))
        window, lag = topology.tuner_window, topology.max_lag or None
        self.tuner: Tuner | PlainWalk | None = None
        if topology.tuner == "measured":
            self.tuner = Tuner(knobs, start, time.monotonic, generator, window, SETTLE * window, lag)
        elif topology.tuner == "walk":
            self.tuner = PlainWalk(knobs, start, time.monotonic, generator, window)
        if self.tuner is not None:
            self._go_on(self.tuner)
        self.resized: float | None = None  # when, while agents may still be starting
        self._apply(start if self.tuner is None else self.tuner.setting)

    def look(self, report: Report) -> None:
        """After each report of the node."""
        if self.tuner is None or self._agents_start(self.tuner):
            return
        setting = self.tuner.observe(Reading(self.node.segments_learnt(), mean(report.lags), self._hints()))
        if news := self.tuner.history[self.written :]:
            tuner_history.append(self.path, news)
            self.written += len(news)
            records = self.earlier + self.tuner.history
            write_whole(
                self.path.with_suffix(".svg"), tuner_history.draw(records, "What the tuner tried", "segments/s")
            )
            self.node.tuner_state = {"kind": self.topology.tuner, **self.tuner.state()}
        if setting is not None:
            self._apply(setting)

    def _apply(self, setting: Setting) -> None:
        """Where the system starts no more agents, the tuner goes on with those there are."""
        try:
            self.node.resize(**setting)
        except OSError as error:
            most = self.node.agents.started
            if self.tuner is None or not most:
                raise RunError(f"only {most} of {setting['agents']} agents could be started: {error}") from None
            self.node.tell(
                f"no more than {most} agents can be started ({error}); the tuner goes on with so many at most"
            )
            self.node.resize(**self.tuner.refuse("agents", most))
        if self.tuner is not None:
            self.resized = self.tuner.clock()

    def _agents_start(self, tuner: Tuner | PlainWalk) -> bool:
        """Are there agents that are not up yet? What is done meanwhile says nothing of the setting: nothing is read,
        and the time to settle begins when they are up. One that dies later is no reason to wait."""
        if self.resized is None:
            return False
        if self.node.is_up or tuner.clock() - self.resized > STARTING:
            self.resized = None
        tuner.window.begin(changed=True)
        return self.resized is not None

    def _go_on(self, tuner: Tuner | PlainWalk) -> None:
        """With what a tuner of the same kind was at, later than all that is in the history."""
        state = self.node.tuner_state
        if state is not None and state.get("kind", "measured") == self.topology.tuner:  # older states do not say it
            tuner.restore(state)
        if self.earlier:  # some of it may have been written after the checkpoint that is resumed
            tuner.began = min(tuner.began, tuner.clock() - self.earlier[-1].time)

    def _hints(self) -> dict[str, int]:
        """Where the bottleneck is, from who waits for whom."""
        predictors_wait, trainers_wait = self.node.idle_shares()
        crowded = self.node.questions.held > 0 or len(self.node.queue) > FULL * self.node.queue.bound
        if crowded and trainers_wait < BUSY:
            return {"trainers": 1, "predictors": 0, "agents": -1}
        if predictors_wait < BUSY:
            return {"trainers": 0, "predictors": 1, "agents": 0}
        return {"trainers": 0, "predictors": 0, "agents": 1}


def mean(lags: Counter[int]) -> float | None:
    rows = lags.total()
    return sum(lag * count for lag, count in lags.items()) / rows if rows else None
