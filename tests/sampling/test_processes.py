"""ProcessEnvs: the same trajectories as SerialEnvs, whatever the layout."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from faulty import play
from phalanx.config import AtariConfig, ToyConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.affinity import core_list, keep_to, on_any_core
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.serial import SerialEnvs
from phalanx.sampling.slot import SlotRules


def assert_same(left, right):
    for ours, theirs in zip(left, right, strict=True):
        for (frames, flags), (other_frames, other_flags) in zip(ours, theirs, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(frames, other_frames, strict=True))
            assert np.array_equal(flags, other_flags, equal_nan=True)


LAYOUTS = [(1, 4, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (4, 1, 2, 1), (2, 2, 4, 1), (1, 4, 2, 1)]
LAYOUTS += [(2, 2, 1, 2), (2, 2, 2, 2), (4, 1, 2, 2), (4, 1, 1, 4)]


@pytest.mark.parametrize("resets", ["swap", "wait"])
@pytest.mark.parametrize(("workers", "envs_per_worker", "groups", "squads"), LAYOUTS)
def test_trajectories_do_not_depend_on_the_layout(workers, envs_per_worker, groups, squads, resets):
    factory = MakeEnv(ToyConfig("counter", length=5), seed=3)
    rules = SlotRules(seed=3, decorrelation=9, resets=resets, horizon=4)
    reference, _ = play(SerialEnvs(factory, 4, 1, rules), 40)
    envs = ProcessEnvs(factory, workers, envs_per_worker, groups, rules, squads)
    try:
        rows, _ = play(envs, 40)
    finally:
        envs.close()
    assert_same(rows, reference)


@pytest.mark.parametrize("game", ["breakout", "pong"])
def test_atari_trajectories_equal_serial_ones(game):
    config = AtariConfig(game, frame="104x80", episodic_life=True, fire_on_reset=True, max_steps=150)
    rules = SlotRules(seed=1, decorrelation=20)
    reference, _ = play(SerialEnvs(MakeEnv(config, 1), 4, 2, rules), 250)
    envs = ProcessEnvs(MakeEnv(config, 1), 2, 2, 2, rules)
    try:
        rows, _ = play(envs, 250)
    finally:
        envs.close()
    assert_same(rows, reference)


def test_state_and_restore_with_another_number_of_workers():
    factory = MakeEnv(ToyConfig("counter", length=5), seed=3)
    first = ProcessEnvs(factory, 2, 2, 2)
    told = []
    second = ProcessEnvs(factory, 4, 1, 2, report=told.append)
    try:
        play(first, 13)
        second.recv(0), second.recv(1)
        state = first.state()
        second.restore(state)
        assert told == []
        for group in (0, 1):
            for envs in (first, second):
                envs.send(group, np.zeros(2, np.int64))
            ours, theirs = first.recv(group), second.recv(group)
            assert np.array_equal(ours.observation, theirs.observation)
            assert np.array_equal(ours.terminated, theirs.terminated)
        state["slots"][1]["env"]["unsaved"] = 70  # its episode was too long to be kept
        second.restore(state)
        assert len(told) == 1 and told[0].startswith("the episodes of environments [1] were too long")
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(("workers", "kept"), [(1, 1), (3, 1), (3, 2)])
def test_workers_keep_to_their_cores(workers, kept):
    """One each, or, where there are fewer than workers, all of them."""
    cores = core_list()[-kept:]
    envs = ProcessEnvs(MakeEnv(ToyConfig("catch"), 0), workers, 2, cores=cores)
    try:
        envs.recv(0)
        assert [os.sched_getaffinity(worker.process.pid) for worker in envs.workers] == [set(cores)] * workers
    finally:
        envs.close()


def test_the_owner_keeps_to_its_core_until_the_environments_are_closed():
    """Not so its workers, even one that replaces a dead one, nor threads from before or that are to run anywhere."""
    before = os.sched_getaffinity(0)
    own, *others = core_list() * 2
    asked, answers = threading.Event(), []
    thread = threading.Thread(target=lambda: answers.append(asked.wait(60) and os.sched_getaffinity(0)))
    thread.start()
    envs = ProcessEnvs(MakeEnv(ToyConfig("catch"), 0), 1, 2, cores=others[:1], owner_core=own)
    try:
        assert os.sched_getaffinity(0) == before  # torch may not be loaded yet
        envs.recv(0)
        assert os.sched_getaffinity(0) == {own}
        later = threading.Thread(target=lambda: answers.append(os.sched_getaffinity(0)))
        with on_any_core():
            later.start()
        later.join(60)
        assert os.sched_getaffinity(0) == {own}
        envs.workers[0].process.kill()
        play(envs, 3)
        assert envs.budget.deaths == 1 and os.sched_getaffinity(envs.workers[0].process.pid) == {others[0]}
    finally:
        envs.close()
        asked.set()
        thread.join(60)
    assert os.sched_getaffinity(0) == before
    assert answers == [before, before]


def test_a_core_that_was_taken_away_ends_no_run():
    """The thread stays where it may run."""
    before = os.sched_getaffinity(0)
    assert keep_to({4095}) == before
    assert os.sched_getaffinity(0) == before
