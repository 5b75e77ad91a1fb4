"""The learning rate of a run, and how it follows the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from phalanx.algorithms.schedules import learning_rate_schedule
from phalanx.config import DBA3CConfig, GA3CConfig, OptimizerConfig, SamplerConfig, SynchronousConfig
from phalanx.config.presets import PRESETS, preset
from phalanx.runtime.share import Share
from phalanx.topologies.dba3c_roles import as_node

REFERENCE = 80


def experiment_of(topology: Any, scaling: str, environments: int):
    optimizer = OptimizerConfig(learning_rate=1.0, batch_scaling=scaling, reference_batch=REFERENCE)
    experiment = dataclasses.replace(
        preset("a2c-catch"),
        optimizer=optimizer,
        sampler=SamplerConfig(environments=environments, horizon=5),
        topology=topology,
    )
    return experiment.validate()


@pytest.mark.parametrize(("scaling", "factor"), [("none", lambda _: 1), ("sqrt", math.sqrt), ("linear", float)])
@pytest.mark.parametrize("environments", [16, 64])
def test_it_follows_the_steps_of_a_rollout(scaling, factor, environments):
    experiment = experiment_of(SynchronousConfig(), scaling, environments)
    assert learning_rate_schedule(experiment).start == pytest.approx(factor(environments * 5 / REFERENCE))
    part = Share(0, 2).part(experiment)
    assert learning_rate_schedule(part, learners=2).start == learning_rate_schedule(experiment).start


@pytest.mark.parametrize(("least", "steps"), [(1, 5), (20, 20), (32, 35)])
@pytest.mark.parametrize("environments", [16, 64])
def test_where_segments_are_merged_it_follows_their_steps_and_not_the_simulators(least, steps, environments):
    node = experiment_of(GA3CConfig(min_batch=least, queue=10), "linear", environments)
    assert learning_rate_schedule(node).start == pytest.approx(steps / REFERENCE)
    workers = experiment_of(DBA3CConfig(workers=4, batch=least), "linear", environments)
    one = as_node(Share(1, 4).part(workers), threads=1)
    assert learning_rate_schedule(workers).start == pytest.approx(steps / REFERENCE)
    assert learning_rate_schedule(one).start == pytest.approx(steps / REFERENCE)


@pytest.mark.parametrize("name", [name for name in PRESETS if "ga3c" in name or "dba3c" in name])
def test_presets_that_merge_segments_take_their_rate_as_it_is_written(name):
    experiment = preset(name).validate()
    assert learning_rate_schedule(experiment).start == experiment.optimizer.learning_rate
