"""ga3c: agents without a model, threads that answer whoever waits, threads that learn. Nobody waits for the slowest.

    agent 0 --> questions: rows of -----> predictor 0 --> segments: up to --> trainer 0 --> parameters,
    agent 1 --> the shared step buffer    predictor 1     T steps of one      trainer 1     one lock
    agent 2 --> that wait for actions     takes all       environment, in a   merges            |
       ^                                  that wait       bounded queue       segments          |
       \\------------- actions -----------/  ^------ the newest parameters, copied -------------/

An agent is an env worker that wakes up when its actions are there (Babaeizadeh et al., "GA3C"). While a step waits for
its turn, and a segment in the queue, trainers go on: the policy lag is measured for every row. The parent thread looks
after agents, records, writes checkpoints, and moves the numbers of agents, predictors and trainers (tuner.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from phalanx.config import Experiment, GA3CConfig
from phalanx.registry import MakeEnv
from phalanx.replica.node import Node
from phalanx.runs.session import Session
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.share import WHOLE, Share
from phalanx.sampling.agents import Agents
from phalanx.sampling.placement import place, sends_raw_screens
from phalanx.sampling.slot import slot_rules
from phalanx.topologies.node_tuner import NodeTuner


def run(experiment: Experiment, session: Session) -> None:
    compute = compute_of(experiment).install()
    with (
        make_agents(experiment, compute, session.event) as agents,
        Node(experiment, agents, compute, session.event) as node,
        session.recording(node, agents.spec, compute),
    ):
        tuner = NodeTuner(experiment, node, session.directory)
        while session.goes_on():
            report = node.iterate(seconds=0.2)
            session.note(report)
            tuner.look(report)
        node.pause()
        session.note(node.iterate(seconds=0.0))


def compute_of(experiment: Experiment) -> Compute:
    """Predictors and trainers are threads side by side: more torch threads for each would be in each other's way."""
    compute = choose_compute(experiment.run)
    return dataclasses.replace(compute, threads=place(experiment, compute.device.type).owner_threads)


def make_agents(
    experiment: Experiment, compute: Compute, report: Callable[[str], None], share: Share = WHOLE
) -> Agents:
    """Room for as many agents as the tuner may come to."""
    topology, sampler = settings(experiment), experiment.sampler
    return Agents(
        MakeEnv(experiment.env, experiment.run.seed, sends_raw_screens(experiment, compute.device.type)),
        topology.places,
        sampler.environments // topology.agents,
        slot_rules(experiment, share),
        timeout=sampler.step_timeout,
        max_deaths=sampler.max_deaths,
        max_deaths_in_a_row=sampler.max_deaths_in_a_row,
        report=report,
    )


def settings(experiment: Experiment) -> GA3CConfig:
    assert isinstance(experiment.topology, GA3CConfig)
    return experiment.topology
