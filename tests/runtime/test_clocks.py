"""The clocks of a run: a row for each replica, which nobody else writes, and frozen readings of them all."""

from __future__ import annotations

import dataclasses
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.clocks import Clocks
from phalanx.types import Progress

COUNTS = st.integers(0, 2**40)
EVENTS = st.tuples(st.integers(0, 4), COUNTS, COUNTS, COUNTS, COUNTS)
"""A replica, what it counts of steps, updates and episodes, and by how much its version grows."""


def team(replicas: int) -> list[Clocks]:
    """The clocks of replicas that share their memory."""
    rows = np.zeros((replicas, 4), np.int64)
    return [Clocks(rows, row) for row in range(replicas)]


def test_clocks_begin_at_zero_and_every_replica_alone_has_its_own() -> None:
    one, other = Clocks(), Clocks()
    assert one.replicas == 1
    assert one.now() == Progress() == Progress(steps=0, updates=0, version=0, episodes=0)
    one.count(steps=1)
    assert other.now() == Progress()


@given(replicas=st.integers(1, 5), events=st.lists(EVENTS, max_size=12))
def test_the_value_of_the_run_is_the_sum_of_all_rows_and_the_newest_version(
    replicas: int, events: list[tuple[int, int, int, int, int]]
) -> None:
    clocks = team(replicas)
    counted = [Progress() for _ in clocks]
    for who, steps, updates, episodes, grown in events:
        who %= replicas
        before = [row.tolist() for row in clocks[0].rows]
        clocks[who].count(steps=steps, updates=updates, episodes=episodes)
        clocks[who].reach(clocks[who].version + grown)
        after = [row.tolist() for row in clocks[0].rows]
        assert before[:who] + before[who + 1 :] == after[:who] + after[who + 1 :]  # one writer a row
        old = counted[who]
        counted[who] = Progress(old.steps + steps, old.updates + updates, old.version + grown, old.episodes + episodes)
    expected = Progress(
        steps=sum(one.steps for one in counted),
        updates=sum(one.updates for one in counted),
        version=max(one.version for one in counted),
        episodes=sum(one.episodes for one in counted),
    )
    for row, one in zip(clocks, counted, strict=True):
        assert row.now() == expected  # whoever reads
        assert row.version == one.version  # of its own parameters
        assert row.replicas == replicas


def test_what_is_not_counted_stays_as_it_is() -> None:
    clocks = Clocks()
    clocks.count()
    assert clocks.now() == Progress()
    clocks.count(steps=5)
    clocks.count(updates=3)
    clocks.count(episodes=2)
    clocks.reach(7)
    clocks.reach(9)  # a version is reached, not counted
    assert clocks.now() == Progress(steps=5, updates=3, version=9, episodes=2)
    assert clocks.version == 9


def test_a_reading_is_frozen() -> None:
    clocks = Clocks()
    clocks.count(steps=5)
    reading = clocks.now()
    clocks.count(steps=5, updates=1, episodes=1)
    clocks.reach(1)
    assert reading == Progress(steps=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reading.steps = 6  # type: ignore[misc]
    assert all(type(value) is int for value in vars(clocks.now()).values())  # as JSON and schedules want them


def test_rows_may_lie_in_memory_that_replicas_share() -> None:
    """What one counts is seen by another that looks at the same memory through an array of its own."""
    with mmap.mmap(-1, 2 * 4 * 8) as memory:
        first, second = (Clocks(np.frombuffer(memory, np.int64).reshape(2, 4), row) for row in range(2))
        first.count(steps=3)
        second.count(steps=4, episodes=1)
        second.reach(2)
        assert first.now() == second.now() == Progress(steps=7, version=2, episodes=1)
        assert (first.version, second.version) == (0, 2)
        del first, second  # the memory is closed with no array left


@given(st.builds(Progress, COUNTS, COUNTS, COUNTS, COUNTS), st.integers(1, 4), st.data())
def test_a_restored_run_goes_on_where_the_saved_one_stopped(
    saved: Progress, replicas: int, data: st.DataObject
) -> None:
    """The saved run may have had any number of replicas: one row takes what all had together."""
    clocks = team(replicas)
    who = data.draw(st.integers(0, replicas - 1))
    clocks[who].restore(Progress(**vars(saved)))
    assert all(one.now() == saved for one in clocks)
    assert clocks[who].version == saved.version
    clocks[-1].count(steps=2, updates=1, episodes=3)
    clocks[-1].reach(saved.version + 1)
    expected = Progress(saved.steps + 2, saved.updates + 1, saved.version + 1, saved.episodes + 3)
    assert clocks[0].now() == expected


def test_a_restored_row_forgets_what_it_held() -> None:
    clocks = Clocks()
    clocks.count(steps=100, updates=100, episodes=100)
    clocks.reach(100)
    clocks.restore(Progress(steps=4, updates=3, version=2, episodes=1))
    assert clocks.now() == Progress(steps=4, updates=3, version=2, episodes=1)


def test_the_state_of_a_reading_is_a_copy_with_names() -> None:
    reading = Progress(steps=4, updates=3, version=2, episodes=1)
    state = dict(vars(reading))
    assert state == {"steps": 4, "updates": 3, "version": 2, "episodes": 1}
    state["steps"] = 9
    assert reading.steps == 4
