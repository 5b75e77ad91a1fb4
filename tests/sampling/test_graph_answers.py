"""The answers of a GPU without one: page-locked memory is plain memory, graphs are played from a tape, and the device
takes its time at random. More is in `tests/gpu`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tape import TapeCapturer

from phalanx.config import OptimizerConfig, SynchronousConfig, ToyConfig
from phalanx.config.presets import preset
from phalanx.replica import build
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.runtime.timing import Timing
from phalanx.sampling import graph_answers
from phalanx.sampling.answers import Decoder
from phalanx.sampling.graph_answers import GraphAnswers
from phalanx.topologies import synchronous

CPU = Compute(torch.device("cpu"))


class Stream:
    """Everything is done at once."""

    def __init__(self, priority: int = 0) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class Event:
    """Over after some looks."""

    chance = np.random.default_rng(0)

    def __init__(self, blocking: bool) -> None:
        self.over = True

    def record(self, stream: Stream) -> None:
        self.over = False

    def query(self) -> bool:
        self.over = self.over or bool(self.chance.random() < 0.3)
        return self.over

    def synchronize(self) -> None:
        self.over = True


@pytest.fixture
def run(monkeypatch):
    """Parameters, progress and the last rollout after some iterations."""

    def act(experiment: Any, by_graphs: bool, iterations: int, together: int = graph_answers.LARGEST_LAUNCH) -> Any:
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(monkeypatch.context())
            if by_graphs:
                for name, stand_in in {"Stream": Stream, "Event": Event, "current_stream": Stream}.items():
                    patch.setattr(torch.cuda, name, stand_in)
                patch.setattr(torch.cuda, "synchronize", lambda: None)
                patch.setattr(graph_answers, "lock_pages", lambda memory: None)
                patch.setattr(graph_answers, "unlock_pages", lambda memory: None)
                patch.setattr(graph_answers, "mapped", lambda array, device: torch.from_numpy(array))
                patch.setattr(graph_answers, "on_stream", lambda stream: contextlib.nullcontext())
                patch.setattr(graph_answers, "Capturer", TapeCapturer)
                patch.setattr(graph_answers, "LARGEST_LAUNCH", together)
                patch.setattr(build, "make_answers", answers_by_graphs)
            envs = stack.enter_context(synchronous.make_envs(experiment, CPU, print))
            replica = stack.enter_context(make_replica(experiment, envs, CPU, print))
            for _ in range(iterations):
                replica.iterate()
            collector = replica.collector
            return replica.parameters.flat.clone(), replica.progress, collector.last_rollout.tensors(), collector

    return act


def answers_by_graphs(
    envs: Any, buffers: Any, stack: int, decode: Decoder, compute: Compute, timing: Timing, tell: Any
) -> GraphAnswers:
    return GraphAnswers(envs=envs, buffers=buffers, stack=stack, decode=decode, timing=timing, report=pytest.fail)


def experiment_of(name: str, overlap: bool, env: ToyConfig, algorithm: dict[str, Any], **sampler: Any) -> Any:
    experiment = preset(name)
    if overlap and name == "a2c-catch":
        algorithm = {"importance": True}
    shape = {"environments": 8, "horizon": 8, "groups": 2, "workers": 2, "decorrelation": 8, "overlap": overlap}
    return dataclasses.replace(
        experiment,
        env=env,
        algorithm=dataclasses.replace(experiment.algorithm, **algorithm),
        # makes nothing of differences in rounding, which are large where the counter's values are in millions
        optimizer=OptimizerConfig(rule="sgd", learning_rate=0.01 if env.name == "catch" else 1e-9),
        sampler=dataclasses.replace(experiment.sampler, **{**shape, **sampler}),
        topology=SynchronousConfig(),
    ).validate()


Q = {"learning_starts": 128, "replay_size": 2_000, "batch_size": 64, "intensity": 2, "epsilon_spread": 2.0}
TOYS = {"catch": ToyConfig(), "truncated": ToyConfig("counter", stack=3, length=5)}


@pytest.mark.parametrize("together", [2, 4, 64], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("squads", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", ["ppo-catch", "dqn-catch"])
def test_what_is_collected_is_what_eager_answers_collect(run, name, toy, overlap, squads, together):
    """However many are answered together, and whoever is early."""
    flags = Q if name == "dqn-catch" else {}
    experiment = experiment_of(name, overlap, TOYS[toy], flags, squads=squads)
    ours, theirs = run(experiment, True, 8, together), run(experiment, False, 8)
    assert ours[1] == theirs[1] and ours[1].updates > 0
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
    for key, value in ours[2].items():
        if key != "value" or name != "dqn-catch":  # of which nobody reads the last
            torch.testing.assert_close(value, theirs[2][key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("groups", "rows"),
    [
        ([3] * 20, 18),  # a third of all, in whole groups
        ([8] * 15, 40),
        ([48] * 32, 48),
        ([200] * 4, 200),  # a group always has room
        ([16], 16),
        ([2, 2, 1], 2),
    ],
)
def test_a_launch_has_room_for_whole_groups(groups, rows):
    assert graph_answers.rows_of_a_launch(groups) == rows


def test_a_few_graphs_serve_all_groups_and_steps(run):
    experiment = experiment_of("ppo-catch", True, ToyConfig(), {}, squads=2, groups=2)
    collector = run(experiment, True, 4)[3]
    assert len(collector.envs.groups) == 4
    assert len(collector.answers.launches) <= 2 * 2 * graph_answers.SLOTS
