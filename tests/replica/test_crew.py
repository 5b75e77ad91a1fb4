"""Crews: threads whose number changes, that pause together, whose errors are heard of, and that end."""

from __future__ import annotations

import random
import threading
import time

import pytest

from phalanx.errors import RunError
from phalanx.replica.crew import Crew, Gate
from phalanx.runtime.deadline import Deadline

PATIENCE = 30.0  # seconds after which a test gives up


class Counting:
    """Works in tiny turns, notes who works at the same time, and gives back what it has when it leaves."""

    def __init__(self, given_back, at_work=None):
        self.given_back = given_back
        self.turns = 0
        self.holds = 0
        self.threads = set()
        self.at_work = at_work if at_work is not None else set()

    def turn(self, seconds):
        assert self not in self.at_work  # not in two threads at once
        self.at_work.add(self)
        self.threads.add(threading.current_thread().name)
        self.turns += 1
        self.holds += 1
        time.sleep(0.0005)
        self.at_work.discard(self)

    def leave(self):
        self.given_back.append(self.holds)
        self.holds = 0


class Failing(Counting):
    def turn(self, seconds):
        super().turn(seconds)
        if self.turns == 3:
            raise ValueError("it fell over")


class Stuck(Counting):
    """A turn that lasts until it is let go."""

    def __init__(self, given_back):
        super().__init__(given_back)
        self.go = threading.Event()

    def turn(self, seconds):
        self.turns += 1
        assert self.go.wait(PATIENCE)


@pytest.fixture
def crews():
    """Makes crews, and ends their threads after the test."""
    made, gate = [], Gate()

    def make(kind=Counting, name="hand"):
        crew = Crew(name, lambda number: kind([]), gate, threading.Event())
        made.append(crew)
        return crew

    make.gate = gate
    yield make
    for crew in made:
        for hand in crew.hands:
            if isinstance(hand, Stuck):
                hand.go.set()
        crew.close(Deadline(PATIENCE))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hand")]


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_so_many_work_as_are_wanted(crews):
    crew = crews()
    for count in (2, 4, 1, 3):
        crew.resize(count)
        until(lambda: sorted(crew.threads) == list(range(count)))  # noqa: B023
        before = [hand.turns for hand in crew.hands]
        until(lambda: all(hand.turns > then for hand, then in zip(crew.hands[:count], before, strict=False)))  # noqa: B023
    assert len(crew.hands) == 4  # who left comes back as the same
    assert all(len(hand.threads) == 1 for hand in crew.hands)


def test_who_leaves_gives_back_what_it_has_once(crews):
    crew = crews()
    crew.resize(3)
    until(lambda: all(hand.turns for hand in crew.hands))
    crew.resize(1)
    until(lambda: sorted(crew.threads) == [0])
    for hand in crew.hands[1:]:
        assert sum(hand.given_back) == hand.turns and hand.holds == 0


def test_random_changes_lose_no_turn_and_never_double_a_hand(crews):
    """200 of them, with pauses in between in which nobody works and nobody leaves."""
    crew, chance = crews(), random.Random(1)
    for change in range(200):
        crew.resize(chance.randint(1, 5))
        if change % 5 == 0:
            with crews.gate.shut(PATIENCE):
                before = [(hand.turns, hand.holds, list(hand.given_back)) for hand in crew.hands]
                time.sleep(0.002)
                assert [(hand.turns, hand.holds, hand.given_back) for hand in crew.hands] == before
        time.sleep(0.001)
    crew.resize(1)
    until(lambda: sorted(crew.threads) == [0])
    with crews.gate.shut(PATIENCE):
        for hand in crew.hands:
            assert sum(hand.given_back) + hand.holds == hand.turns
    assert crew.failure is None


def test_an_error_is_kept_and_rings_the_alarm(crews):
    crew = crews(Failing)
    crew.resize(1)
    assert crew.alarm.wait(PATIENCE)
    assert str(crew.failure) == "it fell over"
    with crews.gate.shut(PATIENCE):  # it is no longer at work
        pass


def test_a_pause_begins_when_the_last_turn_ends(crews):
    slow, fast = crews(Stuck), crews()
    slow.resize(1)
    fast.resize(2)
    until(lambda: slow.hands[0].turns and all(hand.turns for hand in fast.hands))
    threading.Timer(0.1, slow.hands[0].go.set).start()
    with crews.gate.shut(PATIENCE):
        assert slow.hands[0].go.is_set()
        assert crews.gate.inside == 0
    turns = [hand.turns for hand in fast.hands]
    until(lambda: all(hand.turns > then for hand, then in zip(fast.hands, turns, strict=True)))


def test_a_pause_that_nobody_heeds_is_given_up_and_work_goes_on(crews):
    slow, fast = crews(Stuck), crews()
    slow.resize(1)
    fast.resize(1)
    until(lambda: slow.hands[0].turns and fast.hands[0].turns)
    with pytest.raises(RunError, match="did not end its turn"), crews.gate.shut(0.05):
        pytest.fail("somebody is still at work")
    turns = fast.hands[0].turns
    until(lambda: fast.hands[0].turns > turns)


def test_a_pause_that_is_interrupted_before_it_begins_leaves_the_gate_open(crews):
    """A signal may raise an exception at any moment in the main thread."""
    slow, fast = crews(Stuck), crews()
    slow.resize(1)
    fast.resize(1)
    until(lambda: slow.hands[0].turns and fast.hands[0].turns)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    waits, crews.gate.changed.wait_for = crews.gate.changed.wait_for, interrupted
    try:
        with pytest.raises(KeyboardInterrupt), crews.gate.shut(PATIENCE):
            pass
    finally:
        crews.gate.changed.wait_for = waits
    assert not crews.gate.is_shut


def test_a_checkpoint_in_a_pause_does_not_end_it(crews):
    crew = crews()
    crew.resize(2)
    until(lambda: all(hand.turns for hand in crew.hands))
    crews.gate.close(PATIENCE)
    turns = [hand.turns for hand in crew.hands]
    with crews.gate.shut(PATIENCE):
        pass
    assert crews.gate.is_shut
    time.sleep(0.02)
    assert [hand.turns for hand in crew.hands] == turns
    crews.gate.open()
    until(lambda: all(hand.turns > then for hand, then in zip(crew.hands, turns, strict=True)))


def test_they_end_though_the_gate_is_shut(crews):
    crew = crews()
    crew.resize(3)
    until(lambda: all(hand.turns for hand in crew.hands))
    with crews.gate.shut(PATIENCE):
        threads = list(crew.threads.values())
        crew.close(Deadline(PATIENCE))
        assert not [thread for thread in threads if thread.is_alive()]


def test_one_that_does_not_end_is_left_behind(crews):
    crew = crews(Stuck)
    crew.resize(2)
    until(lambda: all(hand.turns for hand in crew.hands))
    crew.close(Deadline(0.1))
    assert sum(thread.is_alive() for thread in crew.threads.values()) == 2
    crew.hands[0].go.set()
    crew.hands[1].go.set()
    crew.close(Deadline(PATIENCE))
