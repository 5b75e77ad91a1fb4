from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.config import DQNConfig
from phalanx.errors import UserError
from phalanx.replay import memory
from phalanx.replay import storage as storage_module
from phalanx.replay.indexing import PrioritizedIndex, UniformIndex, index_bytes
from phalanx.replay.memory import Replay, frames_on_host, make_replay, replay_bytes
from phalanx.replay.storage import TABLES, FrameStorage, RowsBeingSaved, ring_slices, storage_bytes
from phalanx.types import EnvSpec, ReplayBatch, Rollout


@pytest.fixture(autouse=True, scope="module")
def tables_that_grow_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_module, "MIN_LAST_FRAMES", 8)
        yield


CPU = torch.device("cpu")
SPEC = EnvSpec((2,), np.int32, actions=7)
DISCOUNT = 0.9


@dataclass
class Step:
    """One step of one environment, as a list of episodes would hold it."""

    frame: int
    first: bool
    action: int
    reward: float
    terminated: bool
    truncated: bool
    cut: bool
    last_frame: int


class Streams:
    """Makes rollouts of random episodes and remembers every step in plain lists."""

    def __init__(self, seed: int, environments: int, stack: int, ends: float) -> None:
        self.random = np.random.default_rng(seed)
        self.stack, self.ends = stack, ends
        self.steps: list[list[Step]] = [[] for _ in range(environments)]
        self.first = [True] * environments
        self.frames = 0

    def step(self, first: bool) -> Step:
        kind = self.random.choice(4, p=[1 - 3 * self.ends, self.ends, self.ends, self.ends])
        self.frames += 2
        return Step(
            frame=self.frames,
            first=first,
            action=int(self.random.integers(SPEC.actions)),
            reward=float(self.random.normal()),
            terminated=kind == 1,
            truncated=kind == 2,
            cut=kind == 3,
            last_frame=self.frames + 1,
        )

    def rollout(self, horizon: int) -> Rollout:
        for env, steps in enumerate(self.steps):
            for _ in range(horizon):
                steps.append(self.step(self.first[env]))
                end = steps[-1]
                # a cut may come from a replaced worker, which begins an episode, or from one that idles
                self.first[env] = end.terminated or end.truncated or (end.cut and self.random.random() < 0.5)

        def table(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[getattr(s, name) for s in steps[-horizon:]] for steps in self.steps], dtype=dtype).T

        begin = len(self.steps[0]) - horizon
        frames = torch.full((self.stack + horizon, len(self.steps), 2), -1, dtype=torch.int32)
        history = torch.zeros((horizon + 1, len(self.steps)), dtype=torch.uint8)
        for env, steps in enumerate(self.steps):
            for row in range(max(0, begin - self.stack + 1), begin + horizon):
                frames[row - begin + self.stack - 1, env] = steps[row].frame
            for t in range(horizon):
                history[t, env] = len(self.stack_at(env, begin + t))
        return Rollout(
            frames=frames,
            history=history,
            action=table("action", torch.int64),
            log_prob=torch.zeros(horizon, len(self.steps)),
            value=torch.zeros(horizon + 1, len(self.steps)),
            reward=table("reward", torch.float32),
            terminated=table("terminated", torch.bool),
            truncated=table("truncated", torch.bool),
            last_value=torch.zeros(horizon, len(self.steps)),
            cut=table("cut", torch.bool),
            version=torch.zeros(horizon, len(self.steps), dtype=torch.int64),
            last_frames={
                (t, env): torch.full((2,), steps[begin + t].last_frame, dtype=torch.int32)
                for env, steps in enumerate(self.steps)
                for t in range(horizon)
                if steps[begin + t].truncated
            },
        )

    def stack_at(self, env: int, row: int) -> list[int]:
        """The frames the policy saw, newest last, of the running episode only."""
        frames: list[int] = []
        for step in reversed(self.steps[env][: row + 1]):
            frames.insert(0, step.frame)
            if step.first or len(frames) == self.stack:
                break
        return frames

    def transition(self, env: int, row: int, n_step: int) -> tuple[float, float, list[int] | None]:
        """n-step return, factor of the bootstrap, and the stack to bootstrap from (None after a termination)."""
        total = 0.0
        for k in range(n_step):
            step = self.steps[env][row + k]
            if k > 0 and step.cut:
                return total, DISCOUNT**k, self.stack_at(env, row + k)
            total += DISCOUNT**k * step.reward
            if step.terminated:
                return total, 0.0, None
            if step.truncated:
                return total, DISCOUNT ** (k + 1), [*self.stack_at(env, row + k), step.last_frame][-self.stack :]
        return total, DISCOUNT**n_step, self.stack_at(env, row + n_step)


def seen(stack: Tensor, history: Tensor) -> list[int]:
    """The valid frames of a stack [S, 2]."""
    assert torch.equal(stack[:, 0], stack[:, 1])
    return stack[len(stack) - int(history) :, 0].tolist()


def check_rows(storage: FrameStorage, streams: Streams, ids: Tensor, batch: ReplayBatch) -> None:
    for i, number in enumerate(ids.tolist()):
        row, env = divmod(number, storage.environments)
        assert not streams.steps[env][row].cut
        returns, discount, next_stack = streams.transition(env, row, storage.n_step)
        assert seen(batch.stacks[i], batch.history[i]) == streams.stack_at(env, row)
        assert int(batch.action[i]) == streams.steps[env][row].action
        assert float(batch.returns[i]) == pytest.approx(returns, abs=1e-5)
        assert float(batch.next_discount[i]) == pytest.approx(discount, abs=1e-6)
        if next_stack is not None:
            assert seen(batch.next_stacks[i], batch.next_history[i]) == next_stack


def learnable(storage: FrameStorage, streams: Streams) -> list[int]:
    """Ids that may be drawn, by the rule as it is told."""
    written, count = len(streams.steps[0]), len(streams.steps)
    oldest = max(0, written - storage.length)
    return [
        row * count + env
        for row in range(oldest + storage.stack - 1, written - storage.n_step)
        for env in range(count)
        if not streams.steps[env][row].cut
    ]


@given(
    seed=st.integers(0, 2**32 - 1),
    environments=st.integers(1, 3),
    stack=st.integers(1, 4),
    n_step=st.integers(1, 4),
    horizon=st.integers(1, 6),
    spare=st.integers(0, 7),
    ends=st.sampled_from([0.0, 0.05, 0.15, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_every_row_reads_as_the_list_of_episodes_says(
    seed: int, environments: int, stack: int, n_step: int, horizon: int, spare: int, ends: float
) -> None:
    streams = Streams(seed, environments, stack, ends)
    length = max(stack + n_step, horizon) + spare
    storage = FrameStorage(SPEC, stack, environments, length * environments, n_step, DISCOUNT, CPU)
    uniform, prioritized = UniformIndex(storage.rows, CPU), PrioritizedIndex(storage.rows, 0.6, "max", CPU)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3 * length // horizon + 2):
        storage.put(streams.rollout(horizon))
        expected = learnable(storage, streams)
        for index in (uniform, prioritized):
            index.move(storage.drawable, storage.cut.view(-1))
            assert len(index) == len(expected)
            if expected:
                drawn, _ = index.draw(torch.rand(16, generator=generator, dtype=torch.float64), 0.5)
                assert set(drawn.tolist()) <= set(expected)
        ids = torch.tensor(expected, dtype=torch.int64)
        if expected:
            check_rows(storage, streams, ids, storage.read(ids, torch.ones(len(ids))))


def test_slots_of_last_frames_are_reused() -> None:
    streams = Streams(3, 2, 2, 0.3)
    storage = FrameStorage(SPEC, 2, 2, 40, 2, DISCOUNT, CPU)
    for _ in range(60):
        storage.put(streams.rollout(4))
    in_ring = sum(step.truncated for steps in streams.steps for step in steps[-20:])
    assert len(storage.held) == in_ring > 0
    assert len(storage.held) + len(storage.free) == len(storage.last_frames) <= 64


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_restored_memory_goes_on_as_the_old_one(prioritized: bool, tmp_path: Path) -> None:
    def fresh() -> Replay:
        config = DQNConfig(replay_size=63, n_step=2, discount=DISCOUNT, prioritized=prioritized, checkpoint_replay=True)
        return make_replay(config, SPEC, 3, 3, CPU)

    for rollouts in (2, 9):  # before and after the ring is full
        streams, replay, copy = Streams(5, 3, 3, 0.1), fresh(), fresh()
        for _ in range(rollouts):
            replay.put(streams.rollout(6))
            batch = replay.draw(8, 1.0, torch.Generator().manual_seed(1))
            replay.feedback(batch.ids, batch.returns.abs() + 0.1)
        save_now(replay, tmp_path)
        copy.restore(replay.state(), tmp_path)
        assert copy.size == replay.size
        for _ in range(8):
            rollout = streams.rollout(4)
            both = []
            for one in (replay, copy):
                one.put(rollout)
                batch = one.draw(16, 0.5, torch.Generator().manual_seed(2))
                one.feedback(batch.ids, batch.returns.abs() + 0.2)
                both.append(batch)
            for name, values in vars(both[0]).items():
                assert torch.equal(values, getattr(both[1], name)), name
            check_rows(copy.storage, streams, both[1].ids, both[1])


def save_now(replay: Replay, directory: Path) -> None:
    saver = replay.saver()
    assert saver is not None
    saver(directory)


def test_a_memory_is_saved_as_it_was_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver is slow, the memory is overwritten several times over meanwhile: the file holds the old rows."""
    monkeypatch.setattr("phalanx.replay.storage.SAVED_AT_ONCE", 1)
    config = DQNConfig(replay_size=63, n_step=2, discount=DISCOUNT, checkpoint_replay=True)
    replay, copy = (make_replay(config, SPEC, 3, 3, CPU) for _ in range(2))
    streams = Streams(5, 3, 3, 0.1)
    for _ in range(9):
        replay.put(streams.rollout(6))
    before = {name: getattr(replay.storage, name).clone() for name in TABLES}
    state, saver = replay.state(), replay.saver()
    assert saver is not None
    advance = RowsBeingSaved.advance

    def slow_advance(being_saved: RowsBeingSaved, row: int) -> None:
        time.sleep(0.005)
        advance(being_saved, row)

    monkeypatch.setattr(RowsBeingSaved, "advance", slow_advance)
    thread = threading.Thread(target=saver, args=(tmp_path,))
    thread.start()
    for _ in range(9):
        replay.put(streams.rollout(6))
    thread.join(60)
    assert not thread.is_alive()
    copy.restore(state, tmp_path)
    for name, table in before.items():
        assert torch.equal(getattr(copy.storage, name), table), name
        assert not torch.equal(replay.storage.frames, before["frames"])


def test_a_memory_outside_checkpoints_has_no_state() -> None:
    replay = make_replay(DQNConfig(replay_size=64), SPEC, 2, 2, CPU)
    replay.put(Streams(1, 2, 2, 0.1).rollout(8))
    assert replay.state() == {}
    empty = make_replay(DQNConfig(replay_size=64), SPEC, 2, 2, CPU)
    assert replay.saver() is None
    empty.restore({}, Path())
    assert empty.size == 0


def test_a_memory_of_another_shape_is_refused() -> None:
    storage = FrameStorage(SPEC, 2, 2, 64, 1, DISCOUNT, CPU)
    storage.put(Streams(1, 2, 2, 0.1).rollout(8))
    with pytest.raises(UserError, match="replay_size"):
        FrameStorage(SPEC, 2, 2, 66, 1, DISCOUNT, CPU).restore(storage.state(), Path())


def test_nothing_is_learnt_across_a_gap() -> None:
    """After `mark_gap` the newest step is cut: its own row is gone, the row before it still bootstraps from it."""
    streams = Streams(1, 1, 1, 0.0)
    replay = Replay(FrameStorage(SPEC, 1, 1, 32, 2, DISCOUNT, CPU), UniformIndex(32, CPU))
    replay.put(streams.rollout(4))
    replay.mark_gap()
    streams.steps[0][-1].cut = True
    replay.put(streams.rollout(4))
    assert len(replay.index) == len(learnable(replay.storage, streams)) == 5
    ids = torch.tensor(learnable(replay.storage, streams))
    check_rows(replay.storage, streams, ids, replay.storage.read(ids, torch.ones(5)))


def test_ready_waits_for_rows_and_for_one_that_can_be_drawn() -> None:
    streams = Streams(1, 2, 2, 0.0)
    replay = make_replay(DQNConfig(replay_size=40, n_step=2), SPEC, 2, 2, CPU)
    with pytest.raises(RuntimeError, match="drawn"):
        replay.draw(1, 1.0, torch.Generator())
    replay.put(streams.rollout(3))  # one oldest row and two newest ones cannot be drawn
    assert not replay.ready(1)
    replay.put(streams.rollout(3))
    assert replay.ready(12) and not replay.ready(13)
    for _ in range(5):
        replay.put(streams.rollout(3))
    assert replay.ready(10**6)


def test_bytes_are_known_before_they_are_taken() -> None:
    storage = FrameStorage(SPEC, 2, 3, 3 * 50 + 2, 2, DISCOUNT, CPU)
    tables = [getattr(storage, name) for name in ("frames", "history", "action", "reward", "end", "cut", "last_slot")]
    assert storage_bytes(SPEC, 3, 3 * 50 + 2) == sum(table.nbytes for table in tables)
    index = PrioritizedIndex(150, 0.5, "one", CPU)
    assert abs(index_bytes(150, True) - index.leaves.nbytes - index.sums.nbytes) <= 2 * 8 * 128
    atari = EnvSpec((1, 84, 84), np.uint8, actions=18)
    config = DQNConfig(replay_size=1_000_000, prioritized=True)
    assert replay_bytes(config, atari, 16) == storage_bytes(atari, 16, 1_000_000) + index_bytes(1_000_000, True)
    assert 7.0e9 < replay_bytes(config, atari, 16) < 7.3e9


ATARI = EnvSpec((1, 84, 84), np.uint8, 4)


def test_a_memory_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * 10**9)
    with pytest.raises(UserError, match=r"7\.08 GB.*2\.00 GB.*algorithm\.replay_size"):
        make_replay(DQNConfig(), ATARI, 4, 16, CPU)


@pytest.mark.parametrize(
    ("card", "host", "expected"),
    [(12, 0, False), (3, 10, True), (2, 100, None), (3, 9, None), (0, 0, None)],
    ids=["all on the card", "frames on the host", "no room for the rest", "no room for frames", "no room"],
)
def test_frames_lie_on_the_host_where_a_card_is_too_small(
    card: float, host: float, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"cuda": int(card * 10**9), "cpu": int(host * 10**9)}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
    if expected is None:
        sentence = (
            r"needs 7\.08 GB of the GPU, or 7\.06 GB of the host and 0\.02 GB of the GPU, but .*; lower algorithm"
        )
        with pytest.raises(UserError, match=sentence):
            frames_on_host(DQNConfig(), ATARI, 16, torch.device("cuda"))
    else:
        assert frames_on_host(DQNConfig(), ATARI, 16, torch.device("cuda")) is expected


def test_too_little_room_is_refused() -> None:
    with pytest.raises(UserError, match="at least 28"):
        FrameStorage(SPEC, 4, 4, 27, 3, DISCOUNT, CPU)
    storage = FrameStorage(SPEC, 1, 1, 4, 1, DISCOUNT, CPU)
    with pytest.raises(UserError, match="rollout of 5 steps"):
        storage.put(Streams(1, 1, 1, 0.0).rollout(5))


@pytest.mark.parametrize(("dtype", "actions"), [(np.uint8, 256), (np.float32, 300)])
def test_frames_and_actions_of_any_type_survive(dtype: type, actions: int) -> None:
    spec = EnvSpec((1, 3, 2), dtype, actions)
    storage = FrameStorage(spec, 2, 1, 8, 1, DISCOUNT, CPU)
    rollout = Streams(1, 1, 2, 0.0).rollout(5)
    rollout.frames = torch.arange(7 * 6).view(7, 1, 1, 3, 2).to(storage.frames.dtype)
    rollout.action[:] = actions - 1
    storage.put(rollout)
    batch = storage.read(torch.tensor([2]), torch.ones(1))
    assert batch.stacks.dtype == storage.frames.dtype
    assert torch.equal(batch.stacks[0], rollout.frames[2:4, 0])
    assert batch.action.tolist() == [actions - 1]


@given(start=st.integers(0, 50), count=st.integers(0, 9), size=st.integers(9, 20))
def test_ring_slices_name_each_place_once_and_in_order(start: int, count: int, size: int) -> None:
    slices = ring_slices(range(start, start + count), size)
    places = [place for part in slices for place in range(part.start, part.stop)]
    assert places == [number % size for number in range(start, start + count)]
