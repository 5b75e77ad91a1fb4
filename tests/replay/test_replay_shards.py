"""Global replay, in this process: rows are drawn from all shards as from one memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_experience_contract import ENVIRONMENTS, N_STEP, STACK, STEPS, Story
from test_storage import DISCOUNT, SPEC

from phalanx.config import DQNConfig
from phalanx.replay.shards import EmptyReplayError, ReplayShard, ReplayShardsHere, SharedMemory

CPU = torch.device("cpu")


def make(shards, **flags):
    config = DQNConfig(replay_size=STEPS * ENVIRONMENTS, n_step=N_STEP, discount=DISCOUNT, **flags)
    return ReplayShardsHere([ReplayShard(config, SPEC, STACK, ENVIRONMENTS, seed) for seed in range(shards)])


def memory(shards, actor=0):
    return SharedMemory(shards, 10_000, CPU, actor)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("prioritized", [False, True])
def test_every_row_is_a_transition_of_some_actor(prioritized):
    """Three actors on two shards; each tells its own story."""
    shards = make(2, prioritized=prioritized)
    stories = [Story(seed) for seed in range(3)]
    for _ in range(6):
        for actor, story in enumerate(stories):
            writer = memory(shards, actor)
            writer.number = story.written // 5 - 1
            writer.put(story.rollout(5))
    reader = memory(shards)
    assert reader.ready(100)
    batch = reader.draw(400, 0.5, generator())
    owners = batch.ids >> 40
    assert owners.unique().tolist() == [0, 1, 2]
    for actor, story in enumerate(stories):
        mine = owners == actor
        part = batch[mine]
        part.ids = part.ids & ((1 << 40) - 1)
        assert story.check(part) <= story.learnable()


def test_a_shard_is_drawn_from_in_proportion_to_what_it_holds():
    shards = make(2)
    for actor, rollouts in ((0, 4), (1, 2), (2, 1)):  # 0 and 2 on the first shard
        writer, story = memory(shards, actor), Story(actor, ends=0.0)
        for _ in range(rollouts):
            writer.put(story.rollout(5))
    reader = memory(shards)
    assert reader.ready(1)
    owners = (reader.draw(20_000, 0.0, generator()).ids >> 40).numpy()
    drawable = [(n * 5 - N_STEP - STACK + 1) * ENVIRONMENTS for n in (4, 2, 1)]
    drawable = [max(0, count) for count in drawable]
    expected = np.array(drawable) / sum(drawable)
    np.testing.assert_allclose(np.bincount(owners, minlength=3) / 20_000, expected, atol=0.02)


def test_priorities_weigh_rows_wherever_they_are():
    """Chances follow priorities over both shards, and importance weights undo them."""
    shards = make(2, prioritized=True, priority_exponent=1.0, new_priority="one")
    for actor in range(2):
        writer, story = memory(shards, actor), Story(actor, ends=0.0)
        for _ in range(4):
            writer.put(story.rollout(5))
    reader = memory(shards)
    reader.ready(1)
    ids = reader.draw(5_000, 0.0, generator()).ids.unique()
    priorities = torch.where(ids >> 40 == 0, 0.25, 1.0)
    reader.feedback(ids, priorities)
    reader.ready(1)
    batch = reader.draw(40_000, 1.0, generator(1))
    share = float((batch.ids >> 40 == 0).double().mean())
    assert share == pytest.approx(0.2, abs=0.01)
    first = batch.ids >> 40 == 0
    assert batch.weight[first].unique().tolist() == [1.0]
    assert batch.weight[~first].unique().tolist() == [0.25]


def test_rows_come_in_no_order():
    """A batch may be divided into smaller ones, each of which must be of all actors."""
    shards = make(2)
    for actor in range(2):
        writer, story = memory(shards, actor), Story(actor, ends=0.0)
        for _ in range(4):
            writer.put(story.rollout(5))
    reader = memory(shards)
    assert reader.ready(1)
    owners = reader.draw(400, 0.0, generator()).ids >> 40
    for part in owners.split(100):
        assert 20 < int(part.sum()) < 80


def test_that_all_shards_are_empty_is_said():
    with pytest.raises(EmptyReplayError):
        memory(make(2)).draw(10, 0.0, generator())


def test_nothing_is_learnt_across_a_rollout_that_was_lost():
    shards = make(1)
    writer, story = memory(shards), Story(0, ends=0.0)
    writer.put(story.rollout(5))
    story.mark_gap()
    writer.mark_gap()
    writer.put(story.rollout(10))
    reader = memory(shards)
    assert reader.ready(1)
    story.check(reader.draw(300, 0.0, generator()))


def test_a_shard_that_is_gone_is_not_drawn_from():
    class OneGone(ReplayShardsHere):
        def draw(self, rows):
            return [None, super().draw([0, rows[1]])[1]]

    here = make(2)
    for actor in range(2):
        writer, story = memory(here, actor), Story(actor)
        for _ in range(3):
            writer.put(story.rollout(5))
    reader = memory(OneGone(here.shards))
    assert reader.ready(1)
    batch = reader.draw(50, 0.0, generator())
    assert (batch.ids >> 40).unique().tolist() == [1]
    assert len(batch.ids) == 50
