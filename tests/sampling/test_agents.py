"""Agents: free-running workers, whose deaths are events, and which may be more or fewer at any time."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from faulty import LENGTH, FaultyFactory, LedgerFactory, checksum, descendants
from phalanx.errors import RunError
from phalanx.sampling import agents as module
from phalanx.sampling.agents import Agents
from phalanx.sampling.handle import WorkerHandle

PATIENCE = 60.0  # seconds after which a test gives up; nothing here takes them


def kill(agents, number):
    os.kill(agents.workers[number].process.pid, signal.SIGKILL)


def until(condition, agents):
    """Look after agents until something is so; whoever arrives meanwhile stays."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        agents.look_after()
        agents.wait(0.02)


def drive(agents, steps, seed=0, between=lambda done: None):
    """Have all that play take so many steps, each at its own pace; every row that was delivered, by environment, with
    the action before it."""
    chance = np.random.default_rng(seed)
    rows = {}
    taken = np.zeros(agents.capacity, int)
    deadline = time.monotonic() + PATIENCE
    while any(taken[: agents.playing] <= steps):
        assert time.monotonic() < deadline
        agents.look_after()
        arrived = agents.arrived()
        arrived = arrived[(arrived < agents.playing) & (taken[arrived] <= steps)]
        for number in arrived:
            for row in agents.rows_of(np.array([number])):
                values, action = agents.step[row], int(agents.exchange.action[row])
                flags = [float(values.reward), bool(values.terminated), bool(values.first), bool(values.cut)]
                rows.setdefault(int(row), []).append((values.observation.copy(), action, *flags))
                agents.exchange.action[row] = chance.integers(5)
            taken[number] += 1
            between(int(taken.sum()))
        agents.request(arrived)
        if not len(arrived):
            agents.wait(0.02)
    return rows


def check(rows):
    """None lost, doubled or torn: each row follows from the one before, or is a marked cut or a reset. The cuts."""
    cuts = []
    for index, deliveries in rows.items():
        before = None
        for frame, action, reward, terminated, first, cut in deliveries:
            assert frame[5] == checksum(frame), "torn"
            assert frame[0] == index
            if cut:
                cuts.append(index)
            if first:
                assert frame[3] == 0
            if before is not None and cut:
                assert frame[1] > before[1] and frame[2] == 1 and not terminated and reward == 0
            elif before is not None and first:
                assert terminated and reward == LENGTH + index % 3
                assert (frame[1], frame[2]) == (before[1], before[2] + 1)
            elif before is not None:
                assert tuple(frame[1:5]) == (before[1], before[2], before[3] + 1, action)
                assert reward == frame[3]
            before = frame
    return cuts


@pytest.mark.parametrize("each", [1, 3])
def test_each_goes_on_as_its_own_actions_say(each):
    with Agents(LedgerFactory(), 3, each) as agents:
        agents.play(3)
        rows = drive(agents, 40)
    assert sorted(rows) == list(range(3 * each))
    assert check(rows) == []


def test_a_slow_one_keeps_nobody_waiting():
    with Agents(FaultyFactory("hang", culprit=1, at=1), 3, timeout=PATIENCE) as agents:
        agents.play(3)
        until(lambda: len(agents.arrived()) == 3, agents)
        agents.request(np.arange(3))
        for _ in range(50):
            until(lambda: {0, 2} <= set(agents.arrived().tolist()), agents)
            agents.request(np.array([0, 2]))
        assert agents.exchange.dones[0].tolist()[1] == 1


def test_who_rests_stands_still_and_goes_on():
    with Agents(LedgerFactory(), 4) as agents:
        agents.play(1)
        until(lambda: len(agents.arrived()) == 1, agents)
        assert agents.started == 1
        agents.play(4)
        until(lambda: len(agents.arrived()) == 4, agents)
        agents.play(2)
        stood = agents.exchange.dones[0].copy()
        for _ in range(5):
            agents.request(np.arange(2))
            until(lambda: len(agents.arrived()) == 4, agents)
        assert (agents.exchange.dones[0] - stood).tolist() == [5, 5, 0, 0]
        pids = [worker.process.pid for worker in agents.workers]
        agents.play(4)
        assert [worker.process.pid for worker in agents.workers] == pids
        assert check(drive(agents, 10)) == []


@pytest.mark.parametrize("missing", ["a process", "descriptors to spare"])
def test_where_the_system_starts_no_more_of_them_those_there_are_play_on(monkeypatch, missing):
    """And nothing is left of the one that failed, be it after its process had begun."""
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def no_third(handle, *orders):
        begin(handle, *orders)
        if handle.number == 2:
            raise refused

    def none_to_spare(descriptor):
        if len(taken) > 5:
            raise refused
        taken.append(dup(descriptor))
        return taken[-1]

    begin, dup, taken = WorkerHandle.begin, os.dup, []
    with Agents(LedgerFactory(), 4) as agents:
        agents.play(1)
        until(lambda: all(agents.up), agents)
        before = len(os.listdir("/proc/self/fd"))
        if missing == "a process":
            monkeypatch.setattr(WorkerHandle, "begin", no_third)
        else:
            monkeypatch.setattr(module.os, "dup", none_to_spare)
        with pytest.raises(OSError, match="open files"):
            agents.play(4)
        count = 2 if missing == "a process" else 1
        assert agents.started == agents.playing == count == len(descendants(os.getpid()))
        assert len(os.listdir("/proc/self/fd")) == before + 3 * (count - 1)  # to wake it, to talk to it, to hear it die
        rows = drive(agents, 5)
        assert sorted(rows) == list(range(count)) and check(rows) == []


def test_a_thread_that_was_left_behind_writes_to_no_descriptor_of_others(monkeypatch):
    with Agents(LedgerFactory(), 1) as agents:
        agents.play(1)
    monkeypatch.setattr(module.os, "eventfd_write", lambda *_: pytest.fail("it may be somebody else's"))
    agents.request(np.array([0]))
    agents.wake()


@pytest.mark.parametrize("fault", ["raise", "kill", "segfault", "hang"])
def test_a_death_is_an_event(fault):
    reports = []
    with Agents(FaultyFactory(fault), 2, 2, timeout=1.0, report=reports.append) as agents:
        agents.play(2)
        rows = drive(agents, 30)
    assert sorted(check(rows)) == [0, 1]  # both environments of the agent that died, once each
    story = " ".join(reports)
    assert "env worker 0" in story and "last actions" in story
    expected = {"raise": "the simulator fell over", "kill": "SIGKILL", "segfault": "SIGSEGV", "hang": "gave no step"}
    assert expected[fault] in story


def test_a_mistake_in_the_code_of_an_environment_ends_the_run(monkeypatch):
    monkeypatch.setattr("phalanx.runtime.deaths.SAME_EXCEPTION", 3)
    with Agents(FaultyFactory("raise", always=True), 2, 2, max_deaths_in_a_row=2) as agents:
        agents.play(2)
        with pytest.raises(RunError, match="3 env workers died of the same exception, ValueError: the simulator fell"):
            drive(agents, 40)


def test_a_kill_is_one_death():
    """A dead process closes its socket and ends: two signs of one event. Its successor may be given the same numbers of
    descriptors, and is none that has died."""
    reports = []
    with Agents(LedgerFactory(), 3, report=reports.append) as agents:
        agents.play(3)
        until(lambda: all(agents.up), agents)
        for death in range(1, 4):
            kill(agents, 1)
            agents.workers[1].process.wait(timeout=PATIENCE)
            drive(agents, 5)
            assert len(reports) == agents.budget.deaths == agents.workers[1].incarnation == death


def test_several_that_are_killed_at_once_are_all_replaced():
    reports = []
    with Agents(LedgerFactory(), 4, report=reports.append) as agents:
        agents.play(4)
        until(lambda: all(agents.up), agents)
        for number in range(4):
            kill(agents, number)
        for worker in agents.workers:
            worker.process.wait(timeout=PATIENCE)
        rows = drive(agents, 12)
    assert len(reports) == 4
    check(rows)
    assert {float(deliveries[-1][0][1]) for deliveries in rows.values()} == {1.0, 2.0, 3.0, 4.0}  # incarnations


def test_random_kills_leave_no_process_and_no_descriptor():
    gc.collect()  # of what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    rows, children = play_with_random_kills()
    check(rows)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    gc.collect()  # the mapping goes with the last view of it
    assert len(os.listdir("/proc/self/fd")) <= before


def play_with_random_kills():
    chance = np.random.default_rng(3)
    reports = []
    with Agents(LedgerFactory(), 3, 2, max_deaths_in_a_row=100, report=reports.append) as agents:
        agents.play(3)
        until(lambda: all(agents.up), agents)

        def sometimes(done):
            if done % 40 == 0:
                kill(agents, int(chance.integers(3)))

        rows = drive(agents, 120, between=sometimes)
        until(lambda: len(reports) >= 7, agents)  # those of the last moments
        children = [worker.process.pid for worker in agents.workers]
        assert sorted(descendants(os.getpid())) == sorted(children)
    return rows, children


def test_too_many_deaths_end_the_run():
    with Agents(FaultyFactory("kill", always=True, at=2), 2, max_deaths=3) as agents:
        agents.play(2)
        with pytest.raises(RunError, match="env worker"):
            drive(agents, 30)


def test_an_environment_that_cannot_step_at_all_ends_the_run_at_once():
    reports = []
    with Agents(FaultyFactory("raise", at=1, always=True), 2, report=reports.append) as agents:
        agents.play(2)
        with pytest.raises(RunError, match=r"before its first step(?s:.)*the simulator fell over"):
            drive(agents, 5)
    assert reports == []


class TestState:
    def play_on(self, agents, state, seed):
        agents.restore(state)
        return drive(agents, 25, seed)

    @pytest.mark.parametrize(("number", "each"), [(4, 1), (2, 2), (1, 4)])
    def test_is_gone_on_from_with_any_number_of_agents(self, number, each):
        with Agents(LedgerFactory(), 4) as agents:
            agents.play(4)
            drive(agents, 10)
            assert agents.all_arrived(PATIENCE)
            frames = agents.step.observation.copy()
            state = agents.state()
        with Agents(LedgerFactory(), number, each) as agents:
            agents.restore(state)
            assert agents.arrived().tolist() == list(range(number))
            assert np.array_equal(agents.step.observation, frames)
            rows = drive(agents, 20)
        assert check(rows) == []
        assert rows[0][0][0][2] > 1  # its second episode or a later one

    def test_may_be_asked_for_and_restored_at_once(self):
        """Whoever has taken its first step was heard to be ready before."""
        with Agents(LedgerFactory(), 3) as agents:
            agents.play(3)
            assert agents.all_arrived(PATIENCE)
            state = agents.state()
        for _ in range(3):
            with Agents(LedgerFactory(), 3) as agents:
                agents.restore(state)
                assert check(drive(agents, 3)) == []
        told = []
        state["slots"][1]["env"]["unsaved"] = 70  # its episode was too long to be kept
        with Agents(LedgerFactory(), 3, report=told.append) as agents:
            agents.restore(state)
        assert len(told) == 1 and told[0].startswith("the episodes of environments [1] were too long")

    @pytest.mark.parametrize("moment", ["before it is asked", "when it is asked"])
    def test_of_one_that_dies_meanwhile_is_that_of_its_successor(self, moment):
        fault = FaultyFactory("state" if moment == "when it is asked" else "none", at=1000)
        reports = []
        with Agents(fault, 3, report=reports.append) as agents:
            agents.play(3)
            drive(agents, 4)
            assert agents.all_arrived(PATIENCE)
            if moment == "before it is asked":
                kill(agents, 1)
                agents.workers[1].process.wait(timeout=PATIENCE)
            state = agents.state()
            assert len(reports) == 1
        assert [slot["fresh"] for slot in state["slots"]] == [False, True, False]
        with Agents(LedgerFactory(), 3) as agents:
            agents.restore(state)
            rows = drive(agents, 10)
        assert check(rows) == [1]

    def test_is_restored_though_one_is_killed_meanwhile(self, monkeypatch):
        with Agents(LedgerFactory(), 3) as agents:
            agents.play(3)
            drive(agents, 4)
            assert agents.all_arrived(PATIENCE)
            state = agents.state()
        reports = []
        with Agents(LedgerFactory(), 3, report=reports.append) as agents:
            ask = agents._ask_all

            def killing(kind, questions):
                monkeypatch.setattr(agents, "_ask_all", ask)
                kill(agents, 2)
                agents.workers[2].process.wait(timeout=PATIENCE)
                return ask(kind, questions)

            monkeypatch.setattr(agents, "_ask_all", killing)
            agents.restore(state)
            rows = drive(agents, 10)
        assert len(reports) == 1
        assert check(rows) == []


def test_a_run_that_was_stopped_and_goes_on_has_no_hung_agents(monkeypatch):
    """As by Ctrl-Z: no time has passed for agents either."""
    reports = []
    with Agents(FaultyFactory("slow"), 2, timeout=2.0, report=reports.append) as agents:
        agents.play(2)
        until(lambda: len(agents.arrived()) == 2, agents)
        agents.request(np.arange(2))  # takes a quarter of a second
        agents.look_after()
        now = time.monotonic
        monkeypatch.setattr(module.time, "monotonic", lambda: now() + 100.0)
        agents.look_after()
        assert reports == []
        monkeypatch.undo()
