"""On a GPU: predictors and trainers that launch graphs, on streams of their own, agree with eager ones; so they do
while threads really work side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import pytest
import torch
from node_runs import PATIENCE, Driven, experiment_of

from phalanx.config import AtariConfig, ModelConfig, ToyConfig
from phalanx.replica.node import Node
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.keeper import as_snapshot, as_state
from phalanx.topologies import ga3c

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-4  # kernels may sum in another order
ATARI = AtariConfig("breakout", frame="104x80", episodic_life=True, fire_on_reset=True, max_steps=60)


@contextlib.contextmanager
def node_of(experiment, graphs, tell=pytest.fail):
    run = dataclasses.replace(experiment.run, device="cuda", graphs=graphs, seed=3)
    experiment = dataclasses.replace(experiment, run=run).validate()
    compute = ga3c.compute_of(experiment).install()
    assert compute.graphs == graphs
    with (
        ga3c.make_agents(experiment, compute, tell) as agents,
        Node(experiment, agents, compute, tell) as node,
    ):
        yield node


def driven(experiment, graphs, turns):
    with node_of(experiment, graphs) as node:
        Driven(node).run(turns)
        torch.cuda.synchronize()
        return node.parameters.flat.clone(), node.progress, node.trainers.hands[0].take_numbers()[0]


def with_atari(experiment):
    return dataclasses.replace(
        experiment, env=ATARI, model=ModelConfig(torso="nips", padding=True, init="normc")
    ).validate()


@pytest.mark.parametrize("min_batch", [1, 20])
@pytest.mark.parametrize("env", ["catch", "truncated", "atari"])
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_graphs_agree_with_eager(name, env, min_batch):
    """A row whose ratio stands at the clip's edge may fall on either side of it: PPO is compared for fewer turns."""
    rule = {"rule": "sgd"} if env == "truncated" else {}
    flags = {"algorithm": {"minibatches": 1, "epochs": 1}} if name == "ppo-catch" else {}
    toy = ToyConfig("counter", stack=3, length=7) if env == "truncated" else None
    experiment = experiment_of(name, toy, agents=3, each=4, min_batch=min_batch, **rule, **flags)
    experiment = with_atari(experiment) if env == "atari" else experiment
    turns = 40 if name == "a2c-catch" and env != "atari" else 12
    ours, theirs = driven(experiment, True, turns), driven(experiment, False, turns)
    assert ours[1] == theirs[1] and ours[1].updates > 1
    assert ours[2] == theirs[2]  # lags
    difference = float((ours[0] - theirs[0]).abs().max())
    print(f"greatest difference of a parameter: {difference:.2e}")
    assert difference < TOLERANCE


def test_a_resumed_node_learns_from_old_segments_beside_new_ones(tmp_path):
    """Checkpoints are read into the host's memory."""
    experiment = experiment_of(agents=3, each=2, min_batch=22)
    with node_of(experiment, True) as node:
        drive = Driven(node)
        drive.run(17)
        drive.predict()
        snapshot = node.snapshot()
    assert snapshot.replicas[0]["node"]["queue"]
    checkpoints = Checkpoints(tmp_path, keep=1, report=pytest.fail)
    checkpoints.write(snapshot.weights, as_state(snapshot), snapshot.clocks.steps, score=None)
    loaded = checkpoints.load()
    with node_of(experiment, True) as node:
        node.restore(as_snapshot(loaded.weights, loaded.state), tmp_path)
        assert {segment.frames.device.type for segment in node.queue.segments} == {"cuda"}
        Driven(node).run(10)
        assert node.progress.updates > snapshot.clocks.updates


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_threads_side_by_side_lose_nothing(name):
    """Captures of one thread while others launch, snapshots while they pause, and numbers that change."""
    flags = {"algorithm": {"minibatches": 1}} if name == "ppo-catch" else {}
    experiment = experiment_of(name, agents=8, each=2, steps=20_000, min_batch=20, max_threads=3, **flags)
    with node_of(experiment, True) as node:
        learnt, deadline, turn = 0, time.monotonic() + PATIENCE, 0
        while not (node.questions.over and node.quiescent):
            assert time.monotonic() < deadline
            node.resize(agents=1 + turn * 5 % 8, predictors=1 + turn % 3, trainers=1 + turn * 2 % 3)
            learnt += node.iterate(0.1).lags.total()
            if turn % 4 == 0:
                assert all(bool(torch.isfinite(weight).all()) for weight in node.snapshot().weights.values())
            turn += 1
        learnt += node.iterate(0.0).lags.total()
        assert node.progress.steps == learnt
        assert 20_000 <= learnt < 20_000 + 16
        assert node.store.pull(node.parameters) == node.progress.version == node.progress.updates > 100
