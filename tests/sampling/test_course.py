"""The course of the collection as a state machine, against a plain list of all steps that were ever taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.sampling.course import Course


class Driver(RuleBasedStateMachine):
    """Drives a course as the collector may, in any order, and keeps account of every step by itself."""

    @initialize(
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), horizon=st.integers(1, 4), run_ahead=st.booleans()
    )
    def make(self, sizes: list[int], horizon: int, run_ahead: bool) -> None:
        self.course = Course(sizes, horizon)
        self.groups, self.sizes, self.horizon = range(len(sizes)), sizes, horizon
        self.run_ahead = run_ahead  # are there two buffers?
        self.taken: list[list[int]] = [[] for _ in sizes]  # by group: the rollout of each step it has taken
        self.begun = self.collected = 0
        self.sent: list[int] = []  # groups that step, in the order in which they were sent
        self.started: list[int] = []  # groups that were asked, in any order
        self.entered: list[int] = []  # groups whose rollout has begun, in the order in which they are to start

    def done(self, group: int) -> int:
        """Rollouts that a group has finished."""
        return len(self.taken[group]) // self.horizon

    def resting(self) -> list[int]:
        """Groups that have finished all that has begun."""
        return [group for group in self.groups if self.done(group) == self.begun]

    @precondition(lambda self: self.begun == self.collected or (self.run_ahead and self.may_run_ahead()))
    @rule()
    def begin(self) -> None:
        new = self.resting()
        self.course.begin()
        self.begun += 1
        assert sorted(self.course.starting[len(self.entered) :]) == new
        self.entered = list(self.course.starting)

    def may_run_ahead(self) -> bool:
        return self.begun == self.collected + 1 and bool(self.resting())

    @rule()
    def start(self) -> None:
        group = self.course.next_to_ask()
        assert group == (self.entered.pop(0) if self.entered else None)
        if group is not None:
            assert self.course.rollout_of(group) == self.done(group)
            self.started.append(group)

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.started))
        self.course.send(group)
        self.started.remove(group)
        self.sent.append(group)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.sent)))

    def take(self, group: int) -> None:
        number = self.done(group)
        assert self.course.rollout_of(group) == number
        t = self.course.receive(group)
        self.sent.remove(group)
        self.taken[group].append(number)
        assert t == self.taken[group].count(number)
        if t < self.horizon:
            self.started.append(group)
        else:
            self.course.finish(group)
            if self.done(group) < self.begun:  # the next rollout has begun, and it goes on at once
                self.entered.append(group)

    @precondition(lambda self: min(map(self.done, self.groups)) > self.collected)
    @rule()
    def end(self) -> None:
        assert self.course.end() == self.collected
        self.collected += 1

    @precondition(lambda self: len(self.started) < len(self.groups))
    @rule(data=st.data())
    def what_is_out_of_order_is_refused(self, data: st.DataObject) -> None:
        """Nothing is sent that was not asked, or received that does not step; a course that refuses stays as it is."""
        before = repr(vars(self.course))
        for act, able in ((self.course.send, self.started), (self.course.receive, self.sent)):
            unable = [group for group in self.groups if group not in able]
            if unable:
                with pytest.raises(ValueError):
                    act(data.draw(st.sampled_from(unable)))
        assert repr(vars(self.course)) == before

    @invariant()
    def every_group_is_in_exactly_one_place(self) -> None:
        course = self.course
        places = [*course.between, *course.starting, *course.asked, *course.stepping]
        assert sorted(places) == list(self.groups)
        assert sorted(course.between) == self.resting()
        assert course.starting == self.entered
        assert sorted(course.asked) == sorted(self.started)
        assert course.stepping == self.sent

    @invariant()
    def steps_are_within_the_horizon(self) -> None:
        for group in self.groups:
            assert self.course.steps[group] == len(self.taken[group]) % self.horizon
            assert self.course.finished[group] == self.done(group)
            assert self.taken[group] == sorted(self.taken[group])
            assert all(self.taken[group].count(number) <= self.horizon for number in self.taken[group])

    @invariant()
    def nobody_is_more_than_one_rollout_ahead(self) -> None:
        at = [self.course.rollout_of(group) for group in self.groups if group not in self.course.between]
        assert all(self.collected <= number <= self.collected + self.run_ahead for number in at)
        assert self.course.collected == self.collected <= self.course.begun <= self.collected + 1 + self.run_ahead

    @invariant()
    def questions_about_the_whole_are_answered_by_a_count(self) -> None:
        course = self.course
        of_open = [
            size for size, rollouts in zip(self.sizes, self.taken, strict=True) for n in rollouts if n >= self.collected
        ]
        assert course.steps_under_way == sum(of_open)
        assert course.oldest_is_whole == all(rollouts.count(self.collected) == self.horizon for rollouts in self.taken)
        assert course.in_progress == (self.begun > self.collected)
        assert not course.oldest_is_whole or course.in_progress

    def teardown(self) -> None:
        """From wherever it is, all comes to rest: no group is forgotten."""
        if not hasattr(self, "course"):
            return
        course = self.course
        for _ in range(10 * len(self.groups) * self.horizon):
            self.start()
            for group in list(self.started):
                self.course.send(group)
                self.started.remove(group)
                self.sent.append(group)
            if self.sent:
                self.take(self.sent[0])
            if course.oldest_is_whole:
                self.end()
        assert not course.in_progress and course.steps_under_way == 0
        assert sorted(course.between) == list(self.groups)
        assert all(len(rollouts) == self.begun * self.horizon for rollouts in self.taken)


class TestCourse(Driver.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def moved(course: Course, *moves: tuple[str, Any]) -> list[Any]:
    return [getattr(course, name)(*arguments) for name, *arguments in moves]


def test_one_group_takes_one_rollout() -> None:
    course = Course([3], horizon=2)
    assert course.between == [0] and not course.in_progress and not course.oldest_is_whole
    assert moved(course, ("begin",), ("next_to_ask",), ("next_to_ask",)) == [None, 0, None]
    assert moved(course, ("send", 0), ("receive", 0)) == [None, 1]
    assert course.asked == [0] and course.steps_under_way == 3
    assert moved(course, ("send", 0), ("receive", 0), ("finish", 0)) == [None, 2, None]
    assert course.oldest_is_whole and course.steps_under_way == 6 and course.between == [0]
    assert course.end() == 0
    assert not course.in_progress and not course.oldest_is_whole and course.steps_under_way == 0


def test_a_group_that_is_early_goes_on_while_another_is_late() -> None:
    course = Course([1, 1], horizon=1)
    moved(course, ("begin",), ("next_to_ask",), ("next_to_ask",), ("send", 1), ("send", 0))
    assert course.stepping == [1, 0]
    moved(course, ("receive", 1), ("finish", 1))
    assert course.between == [1] and not course.oldest_is_whole
    moved(course, ("begin",), ("next_to_ask",), ("send", 1), ("receive", 1))
    assert (course.rollout_of(0), course.rollout_of(1)) == (0, 1)
    moved(course, ("finish", 1), ("receive", 0))
    course.finish(0)
    assert (
        course.oldest_is_whole and course.starting == [0] and course.between == [1]
    )  # the late one begins without a pause
    assert course.end() == 0 and course.in_progress and not course.oldest_is_whole
    assert course.steps_under_way == 1
