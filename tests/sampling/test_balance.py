"""Balancing: loads even out, and an environment does not notice where it is simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.sampling.balance import Speeds, moves
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


def test_a_worker_with_many_gives_away_one_of_them():
    rows = [[[None] * 64], [[None] * 64]]
    assert [move[:2] for move in moves(rows, np.array([1.1, 1.0]))] == [(0, 1)] * 2
    assert list(moves(rows, np.array([1.03, 1.0]))) == []  # with one more, the other would be as slow


def counts_after(rows, cost):
    counts = np.array([[len(group) for group in worker] for worker in rows])
    for source, target, group in moves(rows, np.array(cost)):
        counts[source, group] -= 1
        counts[target, group] += 1
    return counts.tolist()


def test_the_groups_of_a_squad_stay_alike():
    eight, four = [None] * 8, [None] * 4
    two_squads = [[eight, [], eight, []], [[], eight, [], eight]]  # groups 0 and 2 are the first worker's
    assert counts_after(two_squads, [2.0, 1.0]) == [[5, 0, 6, 0], [3, 8, 2, 8]]
    assert counts_after([[four, [], four, []], [[], four, [], four]], [3.0, 1.0]) == [[2, 0, 2, 0], [2, 4, 2, 4]]


def test_environments_in_extra_groups_return_first():
    rows = [[[0, 1, 2, 3, 4], [9]], [[], [5, 6, 7, 8]]]
    assert next(moves(rows, np.array([2.0, 1.0]))) == (0, 1, 1)


def test_speeds_are_smoothed_and_the_first_look_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("phalanx.sampling.balance.time.monotonic", lambda: now[0])
    speeds, rows = Speeds(1.0), [[[0, 1]], [[2, 3]]]
    assert not speeds.due()
    now[0] = 1.0
    assert speeds.due()
    assert speeds.look(rows, np.array([9.0, 1.0])) is None  # who was longer at the start says nothing
    speeds.looked(np.array([9.0, 1.0]))
    assert not speeds.due()
    now[0] = 1.0 + 1.25
    assert speeds.due()
    assert speeds.look(rows, np.array([10.0, 2.0])).tolist() == [0.5, 0.5]
    speeds.looked(np.array([10.0, 2.0]))
    cost = speeds.look(rows, np.array([16.0, 4.0]))  # three times as slow, four seconds on average
    assert cost.tolist() == [0.625, 0.375]
    for _ in range(20):
        speeds.looked(np.zeros(2))
    assert speeds.interval == 8.0


def test_without_an_interval_nothing_is_due():
    assert not Speeds(0.0).due()


@pytest.mark.parametrize(("squads", "frame"), [(1, "104x80"), (2, "104x80"), (2, "84x84")])
def test_moved_environments_go_on_as_before(squads, frame):
    factory = MakeEnv(AtariConfig("breakout", frame=frame, episodic_life=True, max_steps=40), 2)
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
