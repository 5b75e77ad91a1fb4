"""Balancing: loads even out, and an environment does not notice where it is simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.sampling.balance import moves
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.serial import SerialEnvs


@settings(deadline=None)
@given(st.lists(st.floats(0.2, 3.0), min_size=2, max_size=8), st.integers(1, 3), st.integers(1, 9))
def test_moves_never_make_the_slowest_worker_slower(costs, groups, per_group):
    rows = [[list(range(per_group)) for _ in range(groups)] for _ in costs]
    cost = np.array(costs)
    counts = np.full((len(costs), groups), per_group)
    before = (counts.sum(1) * cost).max()
    for source, target, group in moves(rows, cost):
        counts[source, group] -= 1
        counts[target, group] += 1
        assert counts.min() >= 0
    assert counts.sum() == len(costs) * groups * per_group
    assert (counts.sum(1) * cost).max() <= before
    assert (counts.sum(0) == len(costs) * per_group).all()


def test_a_slow_core_gives_environments_away():
    rows = [[list(range(8))], [list(range(8, 16))]]
    assert [move[:2] for move in moves(rows, np.array([2.0, 1.0]))] == [(0, 1)] * 3
    assert list(moves(rows, np.array([1.0, 1.0]))) == []


def test_environments_rather_go_where_their_group_is_known():
    alone = [[[0, 1, 2, 3], []], [[], [4, 5, 6, 7]]]  # two squads of one worker
    assert next(iter(moves(alone, np.array([2.0, 1.0])))) == (0, 1, 0)
    guest = [[[0, 1, 2], [4]], [[3], [5, 6, 7]]]
    assert next(iter(moves(guest, np.array([2.0, 1.0])))) == (0, 1, 0)
    visited = [[[0, 1, 2, 3], [], [8]], [[], [4, 5, 6, 7], [9]]]
    assert next(iter(moves(visited, np.array([1.0, 2.0])))) == (1, 0, 2)


@pytest.mark.parametrize("squads", [1, 2])
def test_moved_environments_go_on_as_before(squads):
    factory = MakeEnv(AtariConfig("breakout", frame="104x80", episodic_life=True, max_steps=40), 2)
    reference = SerialEnvs(factory, 8, 2 * squads)
    envs = ProcessEnvs(factory, 2, 4, 2, squads=squads, balance=1e-9)
    actions = np.random.default_rng(0).integers(4, size=(90, 8))
    placements = set()
    try:
        for t in range(90):
            for group, rows in enumerate(envs.groups):
                ours, theirs = envs.recv(group), reference.recv(group)
                for name, values in vars(ours).items():
                    if name != "last_observation":
                        assert np.array_equal(values, getattr(theirs, name), equal_nan=name == "score"), name
                if t % 10 != 9:
                    envs.send(group, actions[t, rows])
                    reference.send(group, actions[t, rows])
            if t % 10 == 9:
                envs.exchange.busy[t // 10 % 2] += 10.0  # pretend that one worker was slow
                envs.balance()
                placements.add(str(envs.rows))
                for group, rows in enumerate(envs.groups):
                    envs.send(group, actions[t, rows])
                    reference.send(group, actions[t, rows])
    finally:
        envs.close()
    assert len(placements) > 1
