"""The budget of deaths: a rate, and a number in a row."""

from __future__ import annotations

import pytest

from phalanx.errors import RunError
from phalanx.runtime.deaths import HOUR, DeathBudget, Deaths


def test_a_death_now_and_then_never_ends_a_run():
    now = [0.0]
    budget = DeathBudget("env worker", children=2, most=10, most_in_a_row=1, clock=lambda: now[0])
    for number in range(1000):
        now[0] += HOUR / 9
        budget.count(number % 2, did_something=True)
    assert budget.deaths == 1000


def test_too_many_within_an_hour_do():
    budget = DeathBudget("env worker", children=2, most=3, most_in_a_row=9, clock=lambda: 0.0)
    for _ in range(3):
        budget.count(0, did_something=True)
    with pytest.raises(RunError, match="more than 3 env workers died within an hour"):
        budget.count(1, did_something=True)


def test_deaths_in_a_row_are_those_of_one_child_that_did_nothing():
    budget = DeathBudget("env worker", children=2, most=100, most_in_a_row=2)
    for _ in range(2):
        budget.count(0, did_something=False)
        budget.count(1, did_something=False)
    budget.count(1, did_something=True)
    budget.count(1, did_something=False)
    with pytest.raises(RunError, match="env worker 0 died 3 times in a row without a step"):
        budget.count(0, did_something=False)


def test_the_same_exception_again_and_again_is_a_mistake_and_no_chance():
    words = "Traceback:\nphalanx.errors.EnvironmentFailed: environment {} raised KeyError: 'left' (tiny.py:{})"
    budget = DeathBudget("env worker", children=2, most=1000, most_in_a_row=10)
    for death in range(9):
        budget.count(0, did_something=True, exception=words.format(death, 29))
        budget.count(1, did_something=True, exception=words.format(1, 100 + death))  # of another line each time
        budget.count(1, did_something=True)  # killed by a signal
    with pytest.raises(RunError, match=r"10 env workers died of the same exception, KeyError: 'left' \(tiny.py:29\)"):
        budget.count(1, did_something=True, exception=words.format(7, 29))


def test_more_deaths_of_the_same_exception_can_be_allowed():
    budget = DeathBudget("env worker", children=1, most=1000, most_in_a_row=20)
    for _ in range(19):
        budget.count(0, did_something=True, exception="OSError: the simulator lost its connection")
    with pytest.raises(RunError, match="20 env workers died of the same exception, OSError"):
        budget.count(0, did_something=True, exception="OSError: the simulator lost its connection")


def test_a_cause_is_told_with_its_traceback_once_and_counted():
    deaths = Deaths()
    broken = "env worker {} (environments [3]) died: Traceback:\n  File x\n{}"
    cause = "phalanx.errors.EnvironmentFailed: environment {} raised KeyError: 'left'"
    assert str(deaths) == ""
    assert deaths.told(first := broken.format(0, cause.format(3))) == first
    assert deaths.told(broken.format(1, cause.format(7))) == ("env worker 1 (environments [3]) died: KeyError: 'left'")
    assert deaths.told("replica 1 died: killed by SIGKILL") == "replica 1 died: killed by SIGKILL"
    assert deaths.told("nothing happened") == "nothing happened"
    assert deaths.told(other := broken.format(1, "MemoryError")) == other
    assert str(deaths) == "4 workers died (2 x KeyError: 'left', 1 x killed by SIGKILL, 1 x MemoryError)"


def test_the_same_exception_now_and_then_in_a_run_of_days_does_not_end_it():
    now = [0.0]
    budget = DeathBudget("env worker", 1, most=1000, most_in_a_row=10, clock=lambda: now[0])
    for _ in range(100):
        now[0] += 500.0  # 8 within an hour
        budget.count(0, True, "OSError: the simulator did not answer (game.py:3)")
