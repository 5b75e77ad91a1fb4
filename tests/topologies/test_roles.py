"""Gorila's actors and learners around global replay, in this process: no Ray, the same classes."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from test_bundles import evaluated, experiment_of, shards_of, spec_of

from phalanx.cluster.member import MemberOrder
from phalanx.config import GorilaConfig
from phalanx.parameters.client import ShardsHere
from phalanx.replay.shards import ReplayShard, ReplayShardsHere
from phalanx.runtime.share import Share
from phalanx.topologies.gorila import replay_orders
from phalanx.topologies.roles import Actor, GlobalReplay, Learning
from phalanx.types import Progress


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread, and nobody sleeps who has nothing to do."""
    monkeypatch.setattr("phalanx.topologies.roles.IDLE", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fleet:
    """What the fleet on Ray does: tells each member what the others have done, and asks it to go on."""

    def __init__(self, experiment):
        topology = experiment.topology
        self.spec = spec_of(experiment).seen
        self.shards = shards_of(experiment, self.spec, bound=topology.staleness)
        self.replays = [ReplayShard(*order) for order in replay_orders(experiment, self.spec)]
        extra = GlobalReplay(partial(ReplayShardsHere, self.replays), self.spec)
        kinds = [Actor] * topology.actors + [Learning] * topology.learners
        ranks = [*range(topology.actors), *range(topology.learners)]
        self.actors = topology.actors
        self.members = []
        for worker, (kind, rank) in enumerate(zip(kinds, ranks, strict=True)):
            share = Share(rank, topology.actors)
            order = MemberOrder(experiment, share, lambda: ShardsHere(self.shards), worker, extra=extra)
            self.members.append(kind(order))
        self.own = [Progress() for _ in self.members]
        self.counts = {}
        self.scores = []

    @property
    def steps(self):
        return sum(own.steps for own in self.own)

    def turn(self, place, seconds):
        others = Progress(
            sum(own.steps for other, own in enumerate(self.own) if other != place), 0, self.shards[0].version
        )
        done = self.members[place].work(others, seconds)
        assert not done.failed
        self.own[place], self.counts[place] = done.own, done.counts
        self.scores += done.report.scores if done.report else []
        return done

    def run(self, steps):
        """By turns, an actor's rollout and what learners make of it, until the actors have made so many steps."""
        while self.steps < steps:
            for place in range(len(self.members)):
                self.turn(place, 0.0 if place < self.actors else 0.2)

    def close(self):
        for member in self.members:
            with contextlib.suppress(AttributeError):
                member.open.close()


def layout(actors, learners, replay_shards=2, **flags):
    return GorilaConfig(bundles=0, actors=actors, learners=learners, replay_shards=replay_shards, shards=2, **flags)


@pytest.mark.parametrize(
    ("actors", "learners", "algorithm"),
    [(4, 1, {}), (1, 3, {"prioritized": True, "target_clock": "updates"})],
    ids=["many actors, one learner", "one actor, many learners"],
)
def test_catch_is_learnt_in_both_layouts(actors, learners, algorithm):
    experiment = experiment_of("gorila-catch", layout(actors, learners, staleness=50, outlier=8.0), 40_000, algorithm)
    experiment = dataclasses.replace(
        experiment, optimizer=dataclasses.replace(experiment.optimizer, learning_rate=0.03)
    )
    fleet = Fleet(experiment)
    try:
        steps, score = 0, -1.0
        while score < 0.8 and steps < 40_000:
            steps += 4_000
            fleet.run(steps)
            score = evaluated(experiment, fleet.shards, fleet.spec)
        assert score >= 0.8
        pushes = sum(counts.get("pushes", 0) for counts in fleet.counts.values())
        lost = sum(counts.get("outliers", 0) + counts.get("stale", 0) for counts in fleet.counts.values())
        assert pushes - lost <= fleet.shards[0].version <= pushes
        assert all(fleet.counts[actors + rank]["pushes"] > 0 for rank in range(learners))
        # `intensity` rows are learnt from for each step
        worth = (fleet.steps - experiment.algorithm.learning_starts) * experiment.algorithm.intensity / 128
        assert pushes == pytest.approx(worth, rel=0.05)
    finally:
        fleet.close()


def test_learning_begins_when_all_parts_are_full_even_if_they_do_not_make_the_whole_memory():
    """500 steps for three actors of two environments each are 166 for each of them."""
    algorithm = {"replay_size": 500, "learning_starts": 500}
    experiment = experiment_of("gorila-catch", layout(3, 1), 2_000, algorithm, environments=6)
    fleet = Fleet(experiment)
    try:
        fleet.run(800)
        assert sum(replay.holding().rows for replay in fleet.replays) == 498
        assert fleet.counts[3]["pushes"] > 0
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["c51-catch", "eps-rainbow-catch"])
def test_other_algorithms_make_updates_with_several_learners(name):
    experiment = experiment_of(name, layout(2, 2), 4_000, {"prioritized": True, "learning_starts": 400}, environments=4)
    fleet = Fleet(experiment)
    before = [shard.values.clone() for shard in fleet.shards]
    try:
        while fleet.shards[0].version < 200:
            fleet.run(fleet.steps + 200)
        assert all(fleet.counts[2 + rank]["pushes"] > 50 for rank in range(2))
        for shard, values in zip(fleet.shards, before, strict=True):
            assert torch.isfinite(shard.values).all() and not torch.equal(shard.values, values)
        assert fleet.scores
    finally:
        fleet.close()
