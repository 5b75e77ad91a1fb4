"""The tuner of a GA3C run: reads the node, asks the tuner, moves the numbers, and keeps what was tried in the run's
directory, as data (`tuner.jsonl`) and drawn (`tuner.svg`)."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phalanx.config import Experiment, GA3CConfig
from phalanx.figure import Line, Panel, chart
from phalanx.files import open_to_append, write_whole
from phalanx.replica.node import Node
from phalanx.replica.report import Report
from phalanx.runtime.seeds import Role, stream
from phalanx.topologies.plain_walk import PlainWalk
from phalanx.topologies.tuner import Knob, Record, Tuner
from phalanx.topologies.window import Reading

SETTLE = 0.2  # of a window, after a change: new agents start, and queues fill or empty
BUSY = 0.1  # who waits for less of the time than this is the bottleneck
FULL = 0.5  # of the places in the queue of segments


class NodeTuner:
    """Calls the tuner after each report. What it is at is kept in the node's checkpoints."""

    def __init__(self, experiment: Experiment, node: Node, directory: Path) -> None:
        topology = experiment.topology
        assert isinstance(topology, GA3CConfig)
        self.topology = topology
        self.node = node
        self.path = directory / "tuner.jsonl"
        self.written = 0  # records of the history that are in the file
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
            if node.tuner_state is not None:
                self.tuner.restore(node.tuner_state)
        elif topology.tuner == "walk":
            self.tuner = PlainWalk(knobs, start, time.monotonic, generator, window)
        node.resize(**(start if self.tuner is None else self.tuner.setting))

    def look(self, report: Report) -> None:
        """After each report of the node."""
        if self.tuner is None:
            return
        setting = self.tuner.observe(Reading(self.node.segments_learnt(), mean(report.lags), self._hints()))
        if len(self.tuner.history) > self.written:
            with open_to_append(self.path) as file:
                for record in self.tuner.history[self.written :]:
                    print(json.dumps(record._asdict()), file=file)
            self.written = len(self.tuner.history)
            write_whole(self.path.with_suffix(".svg"), drawn(self.tuner.history))
        if setting is not None:
            self.node.resize(**setting)
            if isinstance(self.tuner, Tuner):
                self.node.tuner_state = self.tuner.state()

    def _hints(self) -> dict[str, int]:
        """Where the bottleneck is, from who waits for whom."""
        predictors_wait, trainers_wait = self.node.idle_shares()
        crowded = self.node.questions.held > 0 or len(self.node.queue) > FULL * self.node.queue.bound
        if crowded and trainers_wait < BUSY:
            return {"trainers": 1, "predictors": 0, "agents": -1}
        if predictors_wait < BUSY:
            return {"trainers": 0, "predictors": 1, "agents": 0}
        return {"trainers": 0, "predictors": 0, "agents": 1}


def drawn(history: Sequence[Record]) -> str:
    """A chart of the settings that were tried and of those that were kept."""
    tried = [Line("tried", [(one.time, one.rate) for one in history])]
    kept = [Line("kept", [(one.time, one.expected) for one in history])]
    lags = [Line("tried", [(one.time, math.nan if one.lag is None else one.lag) for one in history])]
    panels = [
        Panel("segments learnt from", "seconds", "segments/s", tried + kept),
        Panel("policy lag", "seconds", "versions", lags),
    ]
    for name in history[0].setting:
        lines = [Line("tried", [(one.time, one.setting[name]) for one in history])]
        lines += [Line("kept", [(one.time, one.incumbent[name]) for one in history])]
        panels.append(Panel(name, "seconds", "number", lines))
    return chart("What the tuner tried", panels)


def mean(lags: Counter[int]) -> float | None:
    rows = lags.total()
    return sum(lag * count for lag, count in lags.items()) / rows if rows else None
