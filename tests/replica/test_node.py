"""A node turn by turn: its graphs beside the eager way, what reaches a trainer, and what a resumed node does."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from node_runs import PATIENCE, Driven, experiment_of, node_of

from phalanx.algorithms.returns import policy_batch
from phalanx.config import ToyConfig
from phalanx.replica import node as node_module
from phalanx.replica.trainer import Trainer
from phalanx.runtime import deadline
from phalanx.runtime.signals import GRACE_SECONDS
from phalanx.sampling.graph_inference import sizes_up_to
from phalanx.types import Rollout
from whole_runs import same

TOYS = {"catch": ToyConfig(), "truncated": ToyConfig("counter", stack=3, length=7)}


def driven(experiment, graphs, turns):
    with node_of(experiment, graphs, pytest.fail) as node:
        Driven(node).run(turns)
        graphs_made = len(node.predictors.hands[0].inference.launches) if graphs else 0
        numbers = node.trainers.hands[0].take_numbers()[:2]
        return node.parameters.flat.clone(), node.progress, numbers, graphs_made


@pytest.mark.parametrize("min_batch", [1, 12, 20])
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_graphs_of_predictors_and_trainers_do_what_eager_ones_do(name, toy, min_batch):
    """With more agents than the smallest graph has rows, and batches of several sizes."""
    rate = {"rule": "sgd"} if toy == "truncated" else {}
    flags = {"algorithm": {"minibatches": 1}} if name == "ppo-catch" else {}
    experiment = experiment_of(name, TOYS[toy], agents=3, each=4, min_batch=min_batch, **rate, **flags)
    ours, theirs = driven(experiment, True, 60), driven(experiment, False, 60)
    assert ours[1] == theirs[1] and ours[1].updates > 10
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-5)
    assert ours[2][0] == theirs[2][0]  # lags
    assert ours[2][1].keys() == theirs[2][1].keys()
    for key, value in theirs[2][1].items():
        assert ours[2][1][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert ours[3] <= 2


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [8]), (9, [8, 9]), (128, [8, 32, 128]), (40, [8, 32, 40])])
def test_there_are_few_sizes_of_graphs_and_room_for_all(most, sizes):
    assert list(sizes_up_to(most)) == sizes


@pytest.mark.parametrize(
    ("graphs", "alone"), [(False, False), (True, False), (False, True)], ids=["eager", "graphs", "one of each"]
)
@pytest.mark.parametrize("length", [1, 4, 7], ids=lambda length: f"episodes of {length}")
def test_the_last_reward_of_an_episode_is_in_its_return(monkeypatch, graphs, length, alone):
    """Also where an episode ends on its first step. Step n of the counter is worth n; odd episodes are truncated."""
    seen, learn = [], Trainer._learn

    def noted(trainer):
        rollout = trainer.merge(trainer.batch)  # in memory that the next one overwrites
        copies = {name: column.clone() for name, column in rollout.tensors().items()}
        seen.append([*(segment.state() for segment in trainer.batch), Rollout(**copies)])
        learn(trainer)

    monkeypatch.setattr(Trainer, "_learn", noted)
    topology = {"agents": 1, "queue": 1, "min_batch": 1} if alone else {"min_batch": 8}
    experiment = experiment_of(env=ToyConfig("counter", length=length), horizon=5, rule="sgd", **topology)
    with node_of(experiment, graphs) as node:
        Driven(node).run(80 if alone else 40)
        terminated, truncated = 0, 0
        for *segments, rollout in seen:
            assert all(segment["steps"] >= 1 for segment in segments)
            rewards = sum(segment["columns"]["reward"][: segment["steps"]].sum() for segment in segments)
            assert float(rollout.reward[~rollout.cut].sum()) == rewards > 0
            rows = policy_batch(rollout, 0.5, 1.0)
            returns = rows.returns.view_as(rollout.reward)
            for t, b in (rollout.terminated & ~rollout.cut).nonzero().tolist():
                assert float(returns[t, b]) == pytest.approx(length) == float(rollout.reward[t, b])
                terminated += 1
            for t, b in (rollout.truncated & ~rollout.cut).nonzero().tolist():
                expected = length + 0.5 * float(rollout.last_value[t, b])
                assert float(returns[t, b]) == pytest.approx(expected, rel=1e-4)
                truncated += 1
        assert terminated > 3 and truncated > 3


def test_a_resumed_node_goes_on_as_if_it_had_not_stopped(tmp_path):
    """With open segments, segments in the queue, and a batch that is not complete."""
    experiment = experiment_of(agents=3, each=2, min_batch=22)

    def rest(drive):
        drive.run(30)
        return drive.node.parameters.flat.clone(), drive.node.progress, drive.node.snapshot()

    with node_of(experiment) as node:
        drive = Driven(node)
        drive.run(17)
        drive.predict()
        snapshot = node.snapshot()
        state = snapshot.replicas[0]["node"]
        assert len(state["queue"]) > 1 and state["games"]["open"]["position"].any()
        whole = rest(drive)
    with node_of(experiment) as node:
        node.restore(snapshot, Path(tmp_path))
        again = rest(Driven(node))
    assert torch.equal(whole[0], again[0])
    assert whole[1] == again[1]
    ours, theirs = (kept[2].replicas[0]["node"] for kept in (whole, again))
    assert same(ours["games"]["open"], theirs["games"]["open"])
    assert same(ours["queue"], theirs["queue"])
    del snapshot.replicas[0]["node"]["games"]["open"]["played"]  # as checkpoints were before it was counted
    with node_of(experiment) as node:
        node.segments.device = torch.device("meta")  # in the place of a GPU
        node.restore(snapshot, Path(tmp_path))
        assert {segment.frames.device.type for segment in node.queue.segments} == {"meta"}
        assert np.isnan(node.segments.played).all()


def test_numbers_of_trainers_that_logged_different_things_are_all_told():
    experiment = experiment_of(agents=1)
    with node_of(experiment) as node:
        Driven(node, trainers=2)
        for trainer, logged in zip(node.trainers.hands, ({"loss": 1.0}, {"loss": 3.0, "late": 5.0}), strict=True):
            trainer.learner.metrics.add(logged)
            trainer.learner.timing.add("learn", 0.5)
        report = node.iterate(0.0)
        assert report.metrics == {"loss": 2.0, "late": 5.0}
        assert report.seconds["learn"] == 1.0
        with node.trainers.hands[0].learning:  # during an update nothing of it is taken
            node.trainers.hands[0].learner.timing.add("learn", 0.5)
            assert node.iterate(0.0).seconds["learn"] == 0.0
        assert node.iterate(0.0).seconds["learn"] == 0.5


def test_only_agents_that_wait_for_room_are_held():
    """All end a segment at once, in more than one forward."""
    experiment = experiment_of(agents=4, horizon=1, prediction_batch=2, queue=100)
    with node_of(experiment) as node:
        drive = Driven(node)
        for _ in range(6):
            drive.predict()
            assert node.questions.held == 0


@pytest.mark.parametrize(("each", "bound", "rows"), [(1, 4, 4), (2, 5, 4), (3, 4, 3), (5, 4, 5)])
def test_an_inference_has_no_more_rows_than_its_bound(monkeypatch, each, bound, rows):
    """In whole agents, and at least one: their environments step together."""
    with node_of(experiment_of(agents=6, each=each, prediction_batch=bound)) as node:
        drive, seen = Driven(node), []
        infer = node.predictors.hands[0].inference.infer
        monkeypatch.setattr(
            node.predictors.hands[0].inference, "infer", lambda *parts: seen.append(len(parts[1])) or infer(*parts)
        )
        for _ in range(12):
            drive.predict()
            drive.learn()
    assert set(seen) == {rows}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_inference_reads_frames_where_agents_have_written_them(graphs):
    """Nothing of a step is copied before."""
    with node_of(experiment_of(agents=2), graphs) as node:
        inference = Driven(node).node.predictors.hands[0].inference
        read = [inference.raw_observation, inference.observation.numpy()] if graphs else [inference.observation]
        for frames in read:
            assert np.shares_memory(frames, node.agents.exchange.memory_array)
            assert np.shares_memory(frames, node.agents.step.observation)


def test_shares_of_idle_time_are_of_those_that_work_and_of_the_time_since_the_last_look(monkeypatch):
    now = 100.0
    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=lambda: now))
    with node_of(experiment_of(agents=1, max_threads=3)) as node:
        for crew, count in ((node.predictors, 2), (node.trainers, 1)):
            crew.hands, crew.wanted = [crew.hire(rank) for rank in range(count)], count
        first, second = node.predictors.hands
        (trainer,) = node.trainers.hands
        now, first.idle, second.idle, trainer.idle = 104.0, 1.0, 2.0, 1.0
        assert node.idle_shares() == pytest.approx((3 / 2 / 4, 1 / 4))
        now, second.idle, trainer.idle = 106.0, 4.0, 1.5
        assert node.idle_shares() == pytest.approx((2 / 2 / 2, 0.5 / 2))


def test_who_waits_for_questions_keeps_nobody_from_counting(monkeypatch):
    with node_of(experiment_of(agents=1)) as node:
        questions, free = node.questions, []
        monkeypatch.setattr(node.agents, "wait", lambda seconds: free.append(not questions.lock.locked()))
        monkeypatch.setattr(questions, "_look", lambda: (questions.lock.locked() and len(free) > 2) or None)
        assert questions.take(PATIENCE) is True
        assert free == [True] * 3


class Hanging:
    """In the place of whoever is waited for: every wait lasts as long as it may, on a clock of its own."""

    def __init__(self):
        self.now, self.said = 0.0, []

    def wait(self, seconds):
        self.now += seconds
        return False

    def thread(self):
        return SimpleNamespace(join=lambda seconds: self.said.append("join thread") or self.wait(seconds))

    def agent(self):
        def join(seconds):
            self.said.append("join agent")
            self.wait(seconds)

        return SimpleNamespace(wake=os.eventfd(0), say_goodbye=lambda: self.said.append("goodbye"), join=join)

    def lock(self):
        return SimpleNamespace(acquire=lambda timeout: self.wait(timeout), locked=lambda: True)


def stop_in_the_loop(node, hanging):
    """As `ga3c.run` does after a signal that comes when an iteration has just begun."""
    node.leave()
    hanging.now += 0.2
    node.pause()
    node.iterate(0.0)
    return node.snapshot(with_envs=True)


def interrupted(node, hanging):
    """The iteration did not end within the grace."""
    node.leave()
    hanging.now += GRACE_SECONDS
    return node.snapshot(with_envs=False)


ENDS = {
    "an ordinary one": lambda node, hanging: None,
    "a signal": stop_in_the_loop,
    "an interruption": interrupted,
    "an error": lambda node, hanging: node.snapshot(with_envs=False),
}


@pytest.mark.parametrize("end", ENDS)
def test_all_that_an_end_waits_for_is_three_seconds_together(monkeypatch, end):
    """Though nobody ends anything. Agents are told to leave before a thread is waited for."""
    hanging, told = Hanging(), []
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: hanging.now))
    with node_of(experiment_of(agents=2, rule="sgd"), tell=told.append) as node:
        for crew in (node.predictors, node.trainers):
            crew.hands = [crew.hire(rank) for rank in range(3)]
            crew.threads = {rank: hanging.thread() for rank in range(3)}
        for trainer in node.trainers.hands:
            trainer.learning = hanging.lock()
        node.agents.workers += [hanging.agent() for _ in range(2)]
        monkeypatch.setattr(node.gate.changed, "wait_for", lambda condition, seconds: hanging.wait(seconds))
        monkeypatch.setattr(node.agents, "all_arrived", hanging.wait)
        monkeypatch.setattr(node.agents, "look_after", lambda: None)
        snapshot = ENDS[end](node, hanging)
    assert 0 < hanging.now <= 3.0
    assert hanging.said == ["goodbye"] * 2 + ["join thread"] * 6 + ["join agent"] * 2
    assert node.agents.closed
    if snapshot is not None:
        assert snapshot.weights and snapshot.replicas[0]["node"]["games"] is None and told


def test_an_update_that_does_not_end_costs_the_last_checkpoint_its_batch_alone(monkeypatch):
    monkeypatch.setattr(node_module, "SOON", 0.05)
    told, begun, go = [], threading.Event(), threading.Event()

    def learn(experience):
        begun.set()
        assert go.wait(PATIENCE)

    with node_of(experiment_of(agents=2, min_batch=5, rule="sgd"), tell=told.append) as node:
        drive = Driven(node)
        while not len(node.queue):
            drive.predict()
        (trainer,) = node.trainers.hands
        monkeypatch.setattr(trainer.learner, "learn", learn)
        monkeypatch.setattr(trainer.learner, "check", lambda: None)
        left = len(node.queue) - 1
        node.trainers.resize(1)
        assert begun.wait(PATIENCE)
        assert node.agents.all_arrived(PATIENCE)
        node.leave()
        node.pause()
        state = node.snapshot(with_envs=True).replicas[0]["node"]
        go.set()
    assert state["games"] is not None and len(state["queue"]) == left
    assert len(told) == 1 and "all but its batch" in told[0]
