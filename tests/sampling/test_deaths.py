"""ProcessEnvs: deaths are events, of which no torn step comes, and nothing stays behind, even of a killed owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from faulty import FaultyFactory, LedgerFactory, checksum, descendants, play
from phalanx.config import AtariConfig
from phalanx.errors import RunError
from phalanx.registry import MakeEnv
from phalanx.runtime.channel import send
from phalanx.sampling.handle import WorkerHandle
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.serial import SerialEnvs
from phalanx.sampling.slot import Slot, SlotRules


def check_ledger(rows, actions):
    """None lost, doubled or torn: each delivered frame follows from the one before, or is a marked cut or a reset."""
    cuts = 0
    for index, deliveries in enumerate(rows):
        previous = None
        for t, ((frame, _), (reward, _, terminated, _, first, cut)) in enumerate(deliveries):
            assert frame[5] == checksum(frame), "torn"
            assert frame[0] == index
            cuts += int(cut)
            if previous is None or first:
                assert frame[3] == 0
            if previous is not None and cut:
                assert frame[1] > previous[1] and frame[2] == 1  # a new incarnation, a new episode
                assert not terminated
                assert reward == 0
            elif previous is not None and first:
                assert terminated
                assert (frame[1], frame[2]) == (previous[1], previous[2] + 1)
            elif previous is not None:
                assert tuple(frame[1:4]) == (previous[1], previous[2], previous[3] + 1)
                assert frame[4] == actions[t - 1, index]
                assert reward == frame[3]
            previous = frame
    return cuts


@pytest.mark.parametrize(("groups", "squads"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("fault", ["raise", "kill", "segfault", "hang"])
def test_a_death_is_an_event(fault, groups, squads):
    reports = []
    envs = ProcessEnvs(FaultyFactory(fault), 2, 2, groups, squads=squads, timeout=1.0, report=reports.append)
    try:
        rows, actions = play(envs, 30)
    finally:
        envs.close()
    assert check_ledger(rows, actions) == 2  # both environments of the dead worker, once each
    story = " ".join(reports)
    assert "env worker" in story
    assert "last actions" in story
    expected = {"raise": "the simulator fell over", "kill": "SIGKILL", "segfault": "SIGSEGV", "hang": "gave no step"}
    assert expected[fault] in story


def test_a_mistake_in_the_code_of_an_environment_ends_the_run(monkeypatch):
    """It kills its worker in each episode, with steps between."""
    monkeypatch.setattr("phalanx.runtime.deaths.SAME_EXCEPTION", 3)
    reports = []
    same = r"3 env workers died of .*, ValueError: the simulator fell over \(faulty.py:\d+\), within an hour"
    with (
        ProcessEnvs(FaultyFactory("raise", always=True), 1, 2, max_deaths_in_a_row=2, report=reports.append) as envs,
        pytest.raises(RunError, match=same),
    ):
        play(envs, 40)
    assert len(reports) == 3


def test_a_death_after_environments_have_moved_is_an_event_too():
    reports = []
    envs = ProcessEnvs(LedgerFactory(), 2, 4, 2, squads=2, balance=1e-9, report=reports.append)
    try:
        play(envs, 5)
        for _ in range(2):  # the first look sets the scale, the second moves
            envs.exchange.busy[:] += [3.0, 1.0]
            envs.balance()
        extra = [row for group in (0, 2) for row in envs.rows[1][group]]
        assert extra
        os.kill(envs.workers[1].process.pid, signal.SIGKILL)
        rows, _ = play(envs, 12)
    finally:
        envs.close()
    cut = {row for row, deliveries in enumerate(rows) if any(flags[-1] for _, flags in deliveries)}
    assert cut == {row for group in envs.rows[1] for row in group}
    assert len(reports) == 1


def test_a_fresh_successor_still_cuts_after_it_has_moved():
    rules = SlotRules()
    factory = LedgerFactory()
    envs = SerialEnvs(factory, 1, 1, rules)
    slot = envs.slots[0]
    slot.incarnation = 1
    envs.slots[0] = Slot(0, factory(0, 1), envs.buffer, rules)
    envs.slots[0].restore(slot.state())
    assert envs.recv(0).cut.tolist() == [True]


def test_a_worker_killed_from_outside_is_replaced():
    envs = ProcessEnvs(LedgerFactory(), 2, 2, 2)
    try:
        play(envs, 5)
        os.kill(envs.workers[1].process.pid, signal.SIGKILL)
        rows, _ = play(envs, 12)
    finally:
        envs.close()
    cut = [any(flags[-1] for _, flags in deliveries) for deliveries in rows]
    assert cut == [False, True, False, True]


def test_a_fork_of_the_owner_does_not_keep_a_dead_worker_alive():
    """A child that was forked holds copies of all descriptors, that of the dead worker too."""
    reports = []
    envs = ProcessEnvs(LedgerFactory(), 2, 2, 2, report=reports.append)
    end, kept_open = os.pipe()
    child = os.fork()
    if not child:
        os.close(kept_open)
        os.read(end, 1)
        os._exit(0)
    try:
        play(envs, 3)
        os.kill(envs.workers[1].process.pid, signal.SIGKILL)
        play(envs, 12)
    finally:
        envs.close()
        os.close(kept_open)
        os.close(end)
        os.waitpid(child, 0)
    assert envs.budget.deaths == len(reports) == 1


def test_environments_that_begin_anew_elsewhere_count_on():
    envs = ProcessEnvs(LedgerFactory(), 2, 4, 2, squads=2, balance=1e-9)
    try:
        play(envs, 5)
        envs.exchange.busy[:] += [3.0, 1.0]  # the first look sets the scale
        envs.balance()
        play(envs, 5)
        os.kill(envs.workers[0].process.pid, signal.SIGKILL)
        envs.workers[0].process.wait(timeout=10)
        envs.exchange.busy[:] += [9.0, 1.0]
        envs.balance()
        moved = [index for group in (0, 2) for index in envs.rows[1][group]]
        play(envs, 2)
        requests = {slot["requests"] for slot in envs.state()["slots"]}
    finally:
        envs.close()
    assert moved and len(requests) == 1


def test_workers_stay_as_nice_as_their_owner():
    program = """
        import os
        from phalanx.sampling.worker import stay_on_core
        nice = os.nice(5)
        stay_on_core()
        print(os.getpriority(os.PRIO_PROCESS, 0) == nice > 0, os.sched_getscheduler(0) == os.SCHED_BATCH)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("fault", ["state", "none"])
def test_a_death_at_a_save_is_an_event(fault):
    """It raises when it is asked for its state, or it died since its last step."""
    reports = []
    envs = ProcessEnvs(FaultyFactory(fault, at=0), 2, 2, 2, report=reports.append)
    try:
        play(envs, 5)
        if fault == "none":
            os.kill(envs.workers[0].process.pid, signal.SIGKILL)
        assert len(envs.state()["slots"]) == 4
        rows, _ = play(envs, 12)
    finally:
        envs.close()
    assert ("SIGKILL" if fault == "none" else "the simulator has no state") in reports[0]
    assert envs.budget.deaths == len(reports) == 1
    cut = [any(flags[-1] for _, flags in deliveries) for deliveries in rows]
    assert cut == [True, False, True, False] if fault == "none" else cut.count(True) == 2


def test_the_traceback_of_a_worker_that_dies_of_a_move_is_heard():
    reports = []
    envs = ProcessEnvs(FaultyFactory("state", culprit=3, at=0), 2, 4, 1, balance=1e-9, report=reports.append)
    try:
        play(envs, 5)
        for _ in range(2):  # the first look sets the scale, the second moves
            envs.exchange.busy[:] += [9.0, 1.0]
            envs.balance()
        play(envs, 5)
    finally:
        envs.close()
    assert len(reports) == 1
    assert "the simulator has no state" in reports[0]


def test_a_restore_shows_signs_of_life():
    """It may take long: environments of Gymnasium play their episodes again."""
    envs = ProcessEnvs(LedgerFactory(), 2, 4)
    try:
        state = envs.state()
        envs.recv(0)
        before = envs.exchange.heartbeat.copy()
        envs.restore(state)
        assert (envs.exchange.heartbeat - before).tolist() == [4, 4]
    finally:
        envs.close()


def test_one_who_is_alive_is_waited_for():
    worker = WorkerHandle(0, 0, -1)
    worker.control, theirs = socket.socketpair()
    worker.control.settimeout(0.01)
    looks = []

    def beat() -> float:
        looks.append(1)
        if len(looks) == 8:
            send(theirs, "at last")
        return len(looks)

    with worker.control, theirs:
        assert worker.hear(beat) == "at last"


def test_a_restore_that_hangs_is_an_error():
    envs = ProcessEnvs(FaultyFactory("hung restore"), 2, 4)
    try:
        state = envs.state()
        for worker in envs.workers:
            worker.control.settimeout(0.5)
        with pytest.raises(RunError, match="cannot restore its environments: no answer"):
            envs.restore(state)
    finally:
        envs.close()


def test_a_restore_that_fails_is_an_error():
    envs = ProcessEnvs(LedgerFactory(), 1, 2)
    try:
        state = envs.state()
        state["slots"][1] = {}
        with pytest.raises(RunError, match=r"(?s)cannot restore its environments.*KeyError"):
            envs.restore(state)
    finally:
        envs.close()


@pytest.mark.parametrize("decorrelation", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_a_worker_that_is_slow_does_not_hang(decorrelation):
    """No group is done within the timeout, but environments take steps."""
    rules = SlotRules(seed=2, decorrelation=decorrelation)
    envs = ProcessEnvs(FaultyFactory("slow"), 1, 4, 1, rules, timeout=0.6)
    try:
        rows, _ = play(envs, 2)
    finally:
        envs.close()
    assert envs.budget.deaths == 0
    assert not any(flags[-1] for row in rows for _, flags in row)
    assert any(row[0][0][0][3] > 0 for row in rows) == bool(decorrelation)


@pytest.mark.slow
def test_a_job_that_is_stopped_and_goes_on_loses_nobody():
    program = """
        import time
        from faulty import FaultyFactory
        from phalanx.sampling.processes import ProcessEnvs
        import numpy as np
        envs = ProcessEnvs(FaultyFactory("slow"), 3, 1, timeout=1.5)
        envs.recv(0)
        print("ready", flush=True)
        for _ in range(20):
            envs.send(0, np.zeros(3, np.int64))
            envs.recv(0)
        print(envs.budget.deaths, flush=True)
        envs.close()
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    everyone = [process.pid, *descendants(process.pid)]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in everyone:  # the owner is the first to go on
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    assert process.communicate(timeout=60)[0] == "0\n"


def test_no_incarnation_comes_twice():
    """In one session, after environments have moved, and after a resume."""

    def incarnations(envs, victim):
        os.kill(envs.workers[victim].process.pid, signal.SIGKILL)
        rows, _ = play(envs, 3)
        return {deliveries[-1][0][0][1] for deliveries in rows}

    first, second = (ProcessEnvs(LedgerFactory(), 2, 2, 2) for _ in range(2))
    try:
        play(first, 2)
        assert incarnations(first, 0) == {0, 1}
        assert incarnations(first, 1) == {1, 2}
        second.restore(first.state())
        assert incarnations(second, 0) == {2, 3}
        old = first.state()
        del old["births"]  # as it was saved before
        second.restore(old)
        assert incarnations(second, 0) == {2, 3}
    finally:
        first.close()
        second.close()


def test_an_environment_that_cannot_be_made_is_named():
    with pytest.raises(Exception, match="unknown game"):
        ProcessEnvs(MakeEnv(AtariConfig("pongg"), 0), 1, 1)


def test_close_leaves_no_process_and_no_descriptor():
    before, processes = set(os.listdir("/proc/self/fd")), descendants(os.getpid())
    envs = ProcessEnvs(LedgerFactory(), 2, 2)
    envs.recv(0)
    envs.close()
    envs.close()
    del envs
    assert descendants(os.getpid()) == processes
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("hang", [False, True])
def test_workers_leave_when_the_owner_is_killed(hang, tmp_path):
    script = tmp_path / "owner.py"
    fault = "hang" if hang else "none"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        import numpy as np
        from faulty import FaultyFactory
        from phalanx.sampling.processes import ProcessEnvs
        envs = ProcessEnvs(FaultyFactory({fault!r}, at=1, culprit={0 if hang else -1}), 2, 2)
        envs.recv(0); envs.send(0, np.zeros(4, np.int64))
        print("ready", flush=True)
        time.sleep(600)
        """)
    )
    shared_before = set(os.listdir("/dev/shm"))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())])
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    workers = descendants(owner.pid)
    assert len(workers) == 2
    owner.kill()
    owner.wait(60)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert set(os.listdir("/dev/shm")) == shared_before
