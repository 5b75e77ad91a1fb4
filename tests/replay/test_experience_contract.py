"""What every Experience promises, checked for all of them; then what a `Latest` and a `Memory` promise besides.

Whether a batch is right is told by its frames alone, which say which step of which environment they are of: what an
implementation calls its rows, and where it keeps them, is its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage import DISCOUNT, SPEC, Streams, seen
from torch import Tensor

from phalanx.config import DQNConfig
from phalanx.replay.latest import LatestRollout
from phalanx.replay.memory import make_replay
from phalanx.seams import Experience, Latest, Memory
from phalanx.types import ReplayBatch, Rollout

CPU = torch.device("cpu")
STACK, ENVIRONMENTS, N_STEP, STEPS = 3, 2, 3, 24  # STEPS: of each environment that a memory holds


def memory(**flags: Any) -> Callable[[], Memory]:
    config = DQNConfig(replay_size=STEPS * ENVIRONMENTS, n_step=N_STEP, discount=DISCOUNT, **flags)
    return lambda: make_replay(config, SPEC, STACK, ENVIRONMENTS, CPU)


LATEST: dict[str, Callable[[], Latest]] = {"latest rollout": LatestRollout}
MEMORIES: dict[str, Callable[[], Memory]] = {
    "uniform": memory(checkpoint_replay=True),
    "prioritised": memory(checkpoint_replay=True, prioritized=True),
    "prioritised, one": memory(checkpoint_replay=True, prioritized=True, new_priority="one"),
    "uniform, not saved": memory(),
    "prioritised, not saved": memory(prioritized=True),
}
EXPERIENCES: dict[str, Callable[[], Any]] = {**LATEST, **MEMORIES}
SAVED = [name for name in EXPERIENCES if "not saved" not in name]


@pytest.fixture(params=EXPERIENCES)
def experience(request: pytest.FixtureRequest) -> Experience:
    return EXPERIENCES[request.param]()


@pytest.fixture(params=MEMORIES)
def store(request: pytest.FixtureRequest) -> Memory:
    return MEMORIES[request.param]()


class Story(Streams):
    """Streams of steps that may have gaps."""

    def __init__(self, seed: int = 0, ends: float = 0.1) -> None:
        super().__init__(seed, ENVIRONMENTS, STACK, ends)

    @property
    def written(self) -> int:
        return len(self.steps[0])

    def mark_gap(self) -> None:
        """Environments begin anew: the step that was last is not followed by the one that comes."""
        for env, steps in enumerate(self.steps):
            if steps:
                steps[-1].cut = True
            self.first[env] = True

    def learnable(self) -> set[tuple[int, int]]:
        """(environment, step) of each transition that a memory of the newest STEPS steps can give."""
        oldest = max(0, self.written - STEPS) + STACK - 1
        return {
            (env, row)
            for env, steps in enumerate(self.steps)
            for row in range(oldest, self.written - N_STEP)
            if not steps[row].cut
        }

    def where(self) -> dict[int, tuple[int, int]]:
        """Which step a frame is of."""
        return {step.frame: (env, row) for env, steps in enumerate(self.steps) for row, step in enumerate(steps)}

    def check(self, batch: ReplayBatch) -> set[tuple[int, int]]:
        """That each row is a transition as the plain lists have it; which ones they are."""
        where, found = self.where(), set()
        for i in range(len(batch.action)):
            stack = seen(batch.stacks[i], batch.history[i])
            env, row = where[stack[-1]]
            returns, discount, next_stack = self.transition(env, row, N_STEP)
            assert stack == self.stack_at(env, row)
            assert int(batch.action[i]) == self.steps[env][row].action
            assert float(batch.returns[i]) == pytest.approx(returns, abs=1e-5)
            assert float(batch.next_discount[i]) == pytest.approx(discount, abs=1e-6)
            if next_stack is not None:
                assert seen(batch.next_stacks[i], batch.next_history[i]) == next_stack
            assert 0 < float(batch.weight[i]) <= 1
            found.add((env, row))
        assert found <= self.learnable()
        return found


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(store: Memory, count: int, seed: int = 0, exponent: float = 0.5) -> ReplayBatch:
    batch: ReplayBatch = store.draw(count, exponent, chance(seed))
    assert len(batch.ids) == len(batch.weight) == len(batch.stacks) == count
    return batch


def assert_equal(left: ReplayBatch, right: ReplayBatch) -> None:
    for name, values in vars(left).items():
        assert torch.equal(values, getattr(right, name)), name


def use(experience: Any, story: Story, seed: int) -> ReplayBatch | Rollout | None:
    """What an algorithm would be given; a memory is told of new priorities."""
    if hasattr(experience, "take"):
        rollout: Rollout = experience.take()
        return rollout
    if not experience.ready(1):
        return None
    batch = draw(experience, 16, seed)
    story.check(batch)
    experience.feedback(batch.ids, batch.returns.abs() + 0.1)
    return batch


def assert_used_the_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Rollout):
        for name, values in left.tensors().items():
            assert torch.equal(values, right.tensors()[name]), name
        assert left.last_frames.keys() == right.last_frames.keys()
    elif left is not None:
        assert_equal(left, right)


def save(experience: Experience, directory: Path) -> dict[str, Any]:
    state, saver = experience.state(), experience.saver()
    if saver is not None:
        saver(directory)
        saver.release()
    return state


# Every experience


def test_a_gap_before_anything_was_put_is_none(experience: Any) -> None:
    story = Story()
    experience.mark_gap()
    experience.mark_gap()
    for seed in range(6):
        experience.put(story.rollout(5))
        use(experience, story, seed)


@pytest.mark.parametrize("puts", [0, 1, 2, 9])
@pytest.mark.parametrize("name", SAVED)
def test_a_restored_one_goes_on_as_the_saved_one_does(name: str, puts: int, tmp_path: Path) -> None:
    """Empty, half full and after its beginning has been overwritten; a gap is not forgotten."""
    story = Story(seed=puts)
    saved, restored = EXPERIENCES[name](), EXPERIENCES[name]()
    for seed in range(puts):
        saved.put(story.rollout(5))
        use(saved, story, seed)
        if seed % 3 == 1:
            saved.mark_gap()
            story.mark_gap()
    restored.restore(save(saved, tmp_path), tmp_path)
    for seed in range(8):
        rollout = story.rollout(4)
        for one in (saved, restored):
            one.put(rollout)
        assert_used_the_same(*(use(one, story, 100 + seed) for one in (saved, restored)))
        if seed == 4:
            saved.mark_gap()
            restored.mark_gap()
            story.mark_gap()


@pytest.mark.parametrize("name", EXPERIENCES)
def test_a_gap_after_a_restore_is_one(name: str, tmp_path: Path) -> None:
    """As where a checkpoint is without environments: what was saved is not continued by what comes."""
    story = Story(seed=1)
    saved, restored = EXPERIENCES[name](), EXPERIENCES[name]()
    for seed in range(4):
        saved.put(story.rollout(5))
        use(saved, story, seed)
    restored.restore(save(saved, tmp_path), tmp_path)
    if name not in SAVED and name not in LATEST:
        assert not restored.ready(1)
        story = Story(seed=2)  # nothing of the first one is there
    restored.mark_gap()
    story.mark_gap()
    for seed in range(4):
        restored.put(story.rollout(4))
        use(restored, story, seed)


def test_the_state_of_an_empty_one_leaves_an_empty_one_as_it_is(experience: Any, tmp_path: Path) -> None:
    story = Story()
    experience.restore(save(experience, tmp_path), tmp_path)
    experience.put(story.rollout(12))
    assert use(experience, story, 0) is not None


@pytest.mark.parametrize("name", [name for name in MEMORIES if name in SAVED])
def test_a_saver_writes_what_was_there_when_it_was_asked_for(name: str, tmp_path: Path) -> None:
    """In another thread, while rollouts come that overwrite all of it."""
    story = Story(seed=3)
    going, copy, still = (MEMORIES[name]() for _ in range(3))
    for seed in range(7):
        rollout = story.rollout(5)
        for one in (going, still):
            one.put(rollout)
            use(one, story, seed)
    written = story.written
    state, saver = going.state(), going.saver()
    assert saver is not None
    thread = threading.Thread(target=saver, args=(tmp_path,))
    thread.start()
    for _ in range(8):
        going.put(story.rollout(5))
    thread.join(60)
    assert not thread.is_alive()
    saver.release()
    for steps in story.steps:
        del steps[written:]
    copy.restore(state, tmp_path)
    for seed in range(4):
        assert_used_the_same(use(copy, story, seed), use(still, story, seed))


@pytest.mark.parametrize("name", [name for name in MEMORIES if name in SAVED])
def test_a_saver_that_was_given_up_holds_nobody_up(name: str, tmp_path: Path) -> None:
    story, store = Story(), MEMORIES[name]()
    for seed in range(7):
        store.put(story.rollout(5))
        saver = store.saver()
        assert saver is not None
        saver.release()
        use(store, story, seed)


# What gives out the newest rollout


@pytest.mark.parametrize("name", LATEST)
def test_the_newest_rollout_is_taken(name: str) -> None:
    """As often as an algorithm wants, until the next one is put; a gap does not touch it."""
    latest, story = LATEST[name](), Story()
    with pytest.raises(RuntimeError):
        latest.take()
    for _ in range(3):
        rollout = story.rollout(4)
        before = {name: values.clone() for name, values in rollout.tensors().items()}
        latest.put(rollout)
        for _ in range(2):
            taken = latest.take()
            assert all(torch.equal(values, before[name]) for name, values in taken.tensors().items())
            assert taken.last_frames.keys() == rollout.last_frames.keys()
            latest.mark_gap()


# What batches are drawn from


PUT, GAP = "put", "gap"
EVENTS = st.lists(st.one_of(st.integers(1, 8).map(lambda steps: (PUT, steps)), st.just((GAP, 0))), max_size=14)


@pytest.mark.parametrize("name", MEMORIES)
def test_batches_are_transitions_and_none_spans_a_gap(name: str) -> None:
    """Whatever the lengths of rollouts, the ends of episodes and the places of gaps; each transition can be drawn."""

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), ends=st.sampled_from([0.0, 0.05, 0.2]), events=EVENTS)
    def check(seed: int, ends: float, events: list[tuple[str, int]]) -> None:
        store, story = MEMORIES[name](), Story(seed, ends)
        for kind, steps in events:
            if kind == GAP:
                store.mark_gap()
                story.mark_gap()
                continue
            store.put(story.rollout(steps))
            assert store.ready(1) == bool(story.learnable())
            if story.learnable():
                batch = draw(store, 32, seed % 1000)
                story.check(batch)
                store.feedback(batch.ids, 0.5 + torch.rand(32, generator=chance(seed % 1000)))
        if story.learnable():
            assert story.check(draw(store, 2000, 1)) == story.learnable()

    check()


def test_a_window_ends_at_a_gap(store: Memory) -> None:
    """In closed form: the reward of a step is its number, nothing ends, and a gap comes after step 9."""
    rewards = torch.arange(20, dtype=torch.float32)
    story = Story(ends=0.0)
    for part in (range(10), range(10, 20)):
        rollout = story.rollout(10)
        rollout.reward[:] = rewards[list(part)][:, None]
        for env in range(ENVIRONMENTS):
            for row in part:
                story.steps[env][row].reward = float(row)
        store.put(rollout)
        if part.start == 0:
            store.mark_gap()
            story.mark_gap()
    batch, where = draw(store, 1000), story.where()
    rows = [where[seen(s, h)[-1]][1] for s, h in zip(batch.stacks, batch.history, strict=True)]
    assert set(rows) == {*range(STACK - 1, 9), *range(10, 17)}  # that of step 9 leads nowhere
    for i, row in enumerate(rows):
        length = min(N_STEP, 9 - row) if row < 9 else N_STEP
        expected = sum(DISCOUNT**k * (row + k) for k in range(length))
        assert float(batch.returns[i]) == pytest.approx(expected, rel=1e-5)
        assert float(batch.next_discount[i]) == pytest.approx(DISCOUNT**length)
        frames = seen(batch.next_stacks[i], batch.next_history[i])
        assert where[frames[-1]][1] == row + length
        assert len(frames) == (min(STACK, row + length - 9) if row + length >= 10 else STACK)


def test_a_memory_says_when_it_is_ready(store: Memory) -> None:
    story = Story(ends=0.0)
    assert not store.ready(0) and not store.ready(1)
    with pytest.raises(RuntimeError):
        store.draw(1, 1.0, chance())
    while not story.learnable():
        assert not store.ready(1)
        store.put(story.rollout(1))
    for _ in range(2 * STEPS):
        rows = min(story.written, STEPS) * ENVIRONMENTS
        assert store.ready(rows) and (store.ready(rows + 1) == (story.written >= STEPS))
        draw(store, 1)
        store.put(story.rollout(1))
    assert store.ready(10**9)  # as many as fit


def test_a_draw_is_decided_by_its_generator(store: Memory) -> None:
    story = Story(seed=4)
    store.put(story.rollout(STEPS))
    one, again, other = draw(store, 24, 1), draw(store, 24, 1), draw(store, 24, 2)
    assert_equal(one, again)
    assert not torch.equal(one.stacks, other.stacks)
    generator = chance(1)
    first, second = (store.draw(24, 0.5, generator) for _ in range(2))
    assert_equal(first, one)
    assert not torch.equal(first.stacks, second.stacks)


def identified(batch: ReplayBatch) -> dict[int, list[int]]:
    """The stack of each id."""
    return {int(i): seen(s, h) for i, s, h in zip(batch.ids, batch.stacks, batch.history, strict=True)}


def test_ids_name_rows_as_long_as_they_are_there(store: Memory) -> None:
    """One id, one row, whatever comes; that of a row which is gone is not used again."""
    story, known = Story(seed=5), dict[int, list[int]]()
    for seed in range(12):
        store.put(story.rollout(7))
        if store.ready(1):
            found = identified(draw(store, 200, seed))
            assert all(known.get(i, stack) == stack for i, stack in found.items())
            assert len(set(map(tuple, found.values()))) == len(found)
            known |= found


def test_feedback_for_rows_that_are_gone_changes_nothing(store: Memory) -> None:
    """It comes late where the learner is slow."""
    story = Story(seed=6, ends=0.0)
    store.put(story.rollout(STEPS))
    ids = draw(store, 64).ids
    for _ in range(2):
        store.put(story.rollout(STEPS))
    before = draw(store, 64)
    store.feedback(ids, torch.full((64,), 1e6))
    assert_equal(draw(store, 64), before)
    store.put(story.rollout(STEPS))  # nor is it the greatest priority that new rows get
    assert story.check(draw(store, 2000)) == story.learnable()


@pytest.mark.parametrize("name", [name for name in MEMORIES if name.startswith("uniform")])
def test_uniform_draws_take_no_notice_of_priorities(name: str) -> None:
    store, story = MEMORIES[name](), Story(seed=7)
    store.put(story.rollout(STEPS))
    before = draw(store, 64)
    assert torch.equal(before.weight, torch.ones(64))
    store.feedback(before.ids, torch.logspace(-3, 3, 64))
    assert_equal(draw(store, 64), before)


@pytest.mark.parametrize("name", [name for name in MEMORIES if name.startswith("prioritised")])
def test_prioritised_draws_follow_the_feedback(name: str) -> None:
    """In proportion to priority ** .6, of equal ids the greatest; weights undo it as far as the exponent says."""
    store, story = MEMORIES[name](), Story(seed=8, ends=0.0)
    store.put(story.rollout(STEPS))
    everything = draw(store, 2000)
    ids: Tensor = everything.ids.unique()
    assert len(ids) == len(story.learnable())
    priorities = torch.ones(len(ids))
    priorities[0], priorities[1] = 1024.0, 32.0
    store.feedback(
        torch.cat([ids[:1], ids, ids[:1]]), torch.cat([torch.tensor([3.0]), priorities, torch.tensor([5.0])])
    )
    batch = draw(store, 100_000, exponent=1.0)
    shares = priorities**0.6 / (priorities**0.6).sum()
    counts = torch.tensor([(batch.ids == i).sum() for i in ids]) / 100_000
    torch.testing.assert_close(counts, shares, atol=2e-3, rtol=0.02)
    for exponent in (0.0, 0.4, 1.0):
        batch = draw(store, 1000, exponent=exponent)
        assert set(batch.ids.tolist()) == set(ids.tolist())
        expected = (shares / shares.min()) ** -exponent
        place = torch.searchsorted(ids, batch.ids)
        torch.testing.assert_close(batch.weight, expected[place], rtol=1e-3, atol=1e-4)
