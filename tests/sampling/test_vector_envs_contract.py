"""What every VectorEnvs promises, checked for all of them. `SerialEnvs` in one group is the reference."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faulty import LENGTH, LedgerFactory, checksum, descendants, play
from phalanx.config import ToyConfig
from phalanx.registry import MakeEnv
from phalanx.runs.pack import pack, unpack
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.serial import SerialEnvs
from phalanx.sampling.slot import SlotRules

ENVIRONMENTS = 4
LAYOUTS: dict[str, tuple[int, int, int]] = {  # workers (0: none), groups in all, squads
    "serial": (0, 1, 1),
    "serial, two groups": (0, 2, 1),
    "serial, four groups": (0, 4, 1),
    "one worker": (1, 1, 1),
    "one worker, two groups": (1, 2, 1),
    "two workers": (2, 1, 1),
    "two workers, two groups": (2, 2, 1),
    "two workers, four groups": (2, 4, 1),
    "four workers, two groups": (4, 2, 1),
    "two squads": (2, 2, 2),
    "two squads of two groups": (2, 4, 2),
    "two squads of two workers and groups": (4, 4, 2),
    "four squads": (4, 4, 4),
}
SOME = ["serial, two groups", "one worker, two groups", "two workers, two groups", "two squads of two groups"]
"""One of each kind; each has at least two groups."""
FACTORIES: dict[str, Any] = {
    "ledger": LedgerFactory(),  # terminates; frames tell the environment, its incarnation, the episode, step and action
    "counter": MakeEnv(ToyConfig("counter", length=5), seed=3),  # truncates every second episode
}
RULES = {
    "swap": SlotRules(),
    "decorrelated": SlotRules(seed=3, decorrelation=9),
    "wait": SlotRules(seed=3, decorrelation=9, resets="wait", horizon=4),
}
Rows = list[list[Any]]
STOP = 15  # steps after which states are taken: in the midst of a batch, whose end some wait for


def make(layout: str, factory: str = "ledger", rules: str = "swap", balance: float = 0.0) -> Any:
    workers, groups, squads = LAYOUTS[layout]
    if not workers:
        return SerialEnvs(FACTORIES[factory], ENVIRONMENTS, groups, RULES[rules])
    size = ENVIRONMENTS // workers
    return ProcessEnvs(FACTORIES[factory], workers, size, groups // squads, RULES[rules], squads, balance=balance)


@pytest.fixture(params=SOME)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def envs(layout: str) -> Iterator[Any]:
    with make(layout) as envs:
        yield envs


@cache
def reference(factory: str, rules: str, steps: int) -> tuple[Rows, np.ndarray]:
    with make("serial", factory, rules) as envs:
        return play(envs, steps)


def assert_same(left: Rows, right: Rows) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        for (frames, flags), (other_frames, other_flags) in zip(ours, theirs, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(frames, other_frames, strict=True))
            assert np.array_equal(flags, other_flags, equal_nan=True)


def row(step: Any, offset: int) -> tuple[Any, list[float]]:
    """One environment's part of a step, as `play` keeps it; `last_observation` means nothing but after a truncation."""
    values = step[offset]
    frames = (values.observation.copy(), values.last_observation.copy() if values.truncated else 0)
    flags = [values.reward, values.score, values.terminated, values.truncated, values.first, values.cut]
    return frames, [float(flag) for flag in flags]


def fields(step: Any) -> list[Any]:
    """Everything in a step, as a copy."""
    return [row(step, offset) for offset in range(len(step.reward))]


def go_on(envs: Any, actions: np.ndarray) -> Rows:
    """The rows that further actions lead to, when every group was received before."""
    rows: Rows = [[] for _ in range(ENVIRONMENTS)]
    for chosen in actions:
        for group, part in enumerate(envs.groups):
            envs.send(group, chosen[part])
        for group, part in enumerate(envs.groups):
            for index, delivered in zip(range(ENVIRONMENTS)[part], fields(envs.recv(group)), strict=True):
                rows[index].append(delivered)
    return rows


# What comes, and in what order


def test_the_first_recv_gives_the_first_frames(envs: Any) -> None:
    for _ in range(2):  # nothing was sent, so nothing else comes
        for group, part in enumerate(envs.groups):
            step = envs.recv(group)
            for offset, index in enumerate(range(ENVIRONMENTS)[part]):
                assert step.observation[offset][:5].tolist() == [index, 0, 1, 0, -1]
            assert step.first.all() and np.isnan(step.score).all()
            assert not (step.reward.any() or step.terminated.any() or step.truncated.any() or step.cut.any())


@pytest.mark.parametrize(("factory", "rules"), [("ledger", "wait"), ("counter", "decorrelated")])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "serial"])
def test_the_same_actions_give_the_same_rows_whatever_the_grouping(name: str, factory: str, rules: str) -> None:
    """Groups cover all environments, in their order."""
    with make(name, factory, rules) as envs:
        assert len(envs.groups) == LAYOUTS[name][1]
        assert [index for part in envs.groups for index in range(ENVIRONMENTS)[part]] == list(range(ENVIRONMENTS))
        assert vars(envs.spec) == vars(FACTORIES[factory](0, 0).spec)
        rows, _ = play(envs, 40)
    assert_same(rows, reference(factory, rules, 40)[0])


def test_groups_may_be_served_in_any_order(layout: str) -> None:
    """Some are far ahead of others; `ready` is asked for any of those that step, patiently or not, and the house is put
    in order whenever nobody steps."""
    chance, steps = np.random.default_rng(0), 40
    expected, actions = reference("counter", "decorrelated", steps)
    rows: Rows = [[] for _ in range(ENVIRONMENTS)]
    with make(layout, "counter", "decorrelated", balance=1e-9) as envs:
        count = len(envs.groups)
        taken, stepping, received = [0] * count, list(range(count)), list[int]()
        while stepping or any(taken[group] < steps for group in received):
            able = [group for group in received if taken[group] < steps]
            if able and (not stepping or chance.random() < 0.5):
                if not stepping and chance.random() < 0.5:
                    envs.balance()
                group = int(chance.choice(able))
                envs.send(group, actions[taken[group], envs.groups[group]])
                taken[group] += 1
                received.remove(group)
                stepping.append(group)
                continue
            asked = chance.permutation(stepping)[: chance.integers(1, len(stepping) + 1)].tolist()
            group = envs.ready(asked, wait=bool(chance.random() < 0.5))
            if group is None:
                continue
            assert group in asked
            assert envs.ready([group], wait=False) == group  # until it is sent on
            part = range(ENVIRONMENTS)[envs.groups[group]]
            for index, delivered in zip(part, fields(envs.recv(group)), strict=True):
                rows[index].append(delivered)
            stepping.remove(group)
            received.append(group)
    assert_same(rows, expected)


def test_ready_names_a_group_that_can_be_received(envs: Any) -> None:
    everyone = list(range(len(envs.groups)))
    assert envs.ready(everyone) in everyone
    for group in everyone:
        assert envs.ready([group]) == group
        envs.recv(group)
        assert envs.ready([group], wait=False) == group
    envs.send(1, np.zeros(len(envs.recv(1).reward), np.int64))
    assert envs.ready([1], wait=False) in (None, 1)
    assert envs.ready([1]) == 1
    assert envs.recv(1).observation[:, 3].tolist() == [1] * len(envs.recv(1).reward)


def test_ready_waits_only_if_it_is_told_to(layout: str) -> None:
    """Where others do the work, and these are stopped, it gives what is there, or None."""
    before = set(descendants(os.getpid()))
    with make(layout) as envs:
        sizes = [len(envs.recv(group).reward) for group in range(len(envs.groups))]
        workers = set(descendants(os.getpid())) - before
        assert bool(workers) == (LAYOUTS[layout][0] > 0)
        try:
            for worker in workers:
                os.kill(worker, signal.SIGSTOP)
                while Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
                    os.sched_yield()
            envs.send(0, np.zeros(sizes[0], np.int64))
            assert envs.ready([0], wait=False) == (None if workers else 0)
            assert envs.ready([0, 1], wait=False) == (1 if workers else 0)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
        assert envs.ready([0]) == 0
        assert envs.recv(0).observation[:, 3].tolist() == [1] * sizes[0]


def test_a_step_stays_as_it_is_until_its_group_is_sent_on(envs: Any) -> None:
    """Whatever others do meanwhile; it can be received once more."""
    steps = [envs.recv(group) for group in range(len(envs.groups))]
    kept = fields(steps[0])
    for number in range(2 * LENGTH):
        for group in range(1, len(envs.groups)):
            envs.send(group, np.full(len(steps[group].reward), number % 5))
            envs.recv(group)
        assert_same([fields(steps[0])], [kept])
        assert_same([fields(envs.recv(0))], [kept])
    envs.state()
    assert_same([fields(steps[0])], [kept])
    envs.send(0, np.full(len(steps[0].reward), 3))
    assert_same([fields(envs.recv(0))], [fields(steps[0])])  # where it stood, the next one stands
    assert steps[0].observation[:, 3:5].tolist() == [[1, 3]] * len(steps[0].reward)


# What a row says


def test_a_row_tells_of_the_step_that_led_there(layout: str) -> None:
    """An episode that terminates is followed by the next one in the same step."""
    with make(layout) as envs:
        rows, actions = play(envs, 40)
    for index, delivered in enumerate(rows):
        episode, count = 1, 0
        for t, ((frame, _), (reward, score, terminated, truncated, first, cut)) in enumerate(delivered):
            assert frame[5] == checksum(frame)
            assert not truncated and not cut
            if t:
                count += 1
                assert reward == count
            ended = count == LENGTH + index % 3
            assert terminated == ended
            assert score == count if ended else np.isnan(score)
            if ended:
                episode, count = episode + 1, 0
            assert first == (count == 0)
            assert frame[:4].tolist() == [index, 0, episode, count]
            assert frame[4] == (-1 if first else actions[t - 1, index])


def test_after_a_truncation_the_true_last_frame_is_there(layout: str) -> None:
    with make(layout, "counter") as envs:
        rows, _ = play(envs, 40)
    for delivered in rows:
        (tag, episode, count), seen = delivered[0][0][0], []
        assert (episode, count) == (0, 0)
        for (frame, last), (_, _, terminated, truncated, first, cut) in delivered[1:]:
            count += 1
            ended = count == 5
            assert not cut
            assert (terminated, truncated) == (ended and episode % 2 == 0, ended and episode % 2 == 1)
            if truncated:
                assert last.tolist() == [tag, episode, 5]
                seen.append(episode)
            if ended:
                episode, count = episode + 1, 0
            assert first == ended
            assert frame.tolist() == [tag, episode, count]
        assert seen == [1, 3, 5, 7][: len(seen)] and len(seen) >= 3


@pytest.mark.parametrize("factory", FACTORIES)
def test_whoever_waits_for_the_end_of_the_batch_is_cut(layout: str, factory: str) -> None:
    """Between the end of an episode and the batch after it, nothing may be learnt, and nothing is earned. The next
    episode begins with the first step of a batch, and is learnt from as from its second row."""
    with make(layout, factory, "wait") as envs:
        rows, _ = play(envs, 60)
    for delivered in rows:
        waiting = waited = False
        for t, ((frame, _), (reward, score, terminated, truncated, first, cut)) in enumerate(delivered):
            begins_batch = t % RULES["wait"].horizon == 1  # row 0 is no step
            assert cut == waiting
            waited = waited or waiting
            if waiting:
                assert reward == 0 and np.isnan(score) and not terminated and not truncated
                assert first == begins_batch
                assert not begins_batch or frame[{"ledger": 3, "counter": 2}[factory]] == 0
                waiting = not begins_batch
            elif terminated or truncated:
                waiting = True
        assert waited


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_score_comes_with_the_end_of_an_episode(factory: str, rules: str) -> None:
    """Readers look for scores only where an episode begins."""
    for delivered in reference(factory, rules, 40)[0]:
        for _, (_, score, terminated, truncated, first, _) in delivered:
            assert np.isnan(score) or (first and (terminated or truncated))


# States


def without_waiting(rows: Rows) -> Rows:
    """The same without the frames of those that wait: old ones, which states do not hold and nobody learns from."""
    waits = [[bool(flags[-1] and not flags[-2]) for _, flags in delivered] for delivered in rows]
    return [
        [((0, 0), flags) if waiting else (frames, flags) for (frames, flags), waiting in zip(*both, strict=True)]
        for both in zip(rows, waits, strict=True)
    ]


@cache
def interrupted(layout: str, factory: str, rules: str) -> str:
    """The state after STOP steps, as a checkpoint holds it. Who gives it goes on undisturbed."""
    expected, actions = reference(factory, rules, 40)
    with make(layout, factory, rules) as envs:
        for group in range(len(envs.groups)):
            envs.recv(group)
        rows = go_on(envs, actions[:STOP])
        values, tensors = pack(envs.state())
        assert not tensors
        rows = [[*before, *after] for before, after in zip(rows, go_on(envs, actions[STOP:]), strict=True)]
    assert_same(rows, [delivered[1:] for delivered in expected])
    return json.dumps(values)


@pytest.mark.parametrize("into", SOME)
@pytest.mark.parametrize("out_of", SOME)
def test_a_state_goes_on_bit_for_bit_in_every_implementation(out_of: str, into: str) -> None:
    state = unpack(json.loads(interrupted(out_of, "ledger", "wait")), {})
    expected, actions = reference("ledger", "wait", 40)
    assert any(delivered[STOP][1][-1] and delivered[STOP + 1][1][-1] for delivered in expected)  # somebody waits
    with make(into, "ledger", "wait") as envs:
        envs.restore(state)
        rows = go_on(envs, actions[STOP:])
    assert_same(without_waiting(rows), without_waiting([delivered[STOP + 1 :] for delivered in expected]))


def test_a_state_may_be_restored_into_environments_that_have_played(layout: str) -> None:
    """Nothing of what they played is left."""
    state = unpack(json.loads(interrupted(layout, "counter", "decorrelated")), {})
    expected, actions = reference("counter", "decorrelated", 40)
    with make(layout, "counter", "decorrelated") as envs:
        play(envs, 9, seed=1)
        envs.restore(state)
        assert_same(go_on(envs, actions[STOP:]), [delivered[STOP + 1 :] for delivered in expected])


def test_a_state_of_environments_that_have_not_begun(envs: Any) -> None:
    """It was received, but nobody has stepped."""
    for group in range(len(envs.groups)):
        envs.recv(group)
    expected, actions = reference("ledger", "swap", 40)
    with make("serial") as other:
        other.restore(envs.state())
        assert_same(go_on(other, actions), [delivered[1:] for delivered in expected])


# The end


def test_closing_twice_does_no_harm(layout: str) -> None:
    before = descendants(os.getpid())
    envs = make(layout)
    envs.recv(0)
    envs.close()
    envs.close()
    assert descendants(os.getpid()) == before


def test_with_closes_them_also_after_an_error(layout: str) -> None:
    """Even before anybody has received; the error is not hidden."""
    before = descendants(os.getpid())
    with pytest.raises(ZeroDivisionError), make(layout) as envs:
        raise ZeroDivisionError
    envs.close()
    assert descendants(os.getpid()) == before


def test_environments_that_step_can_be_closed(layout: str) -> None:
    before = descendants(os.getpid())
    with make(layout) as envs:
        for group in range(len(envs.groups)):
            envs.send(group, np.zeros(len(envs.recv(group).reward), np.int64))
    assert descendants(os.getpid()) == before
